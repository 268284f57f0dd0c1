"""Words a head can never rank first, and sets of words it can put on top.

A hidden state h in a box |h_e| <= B ranks word i first with the margin

    m_i(h) = min_{j != i} ((w_i - w_j) . h + b_i - b_j) / ||w_i - w_j||,

its distance to the nearest state at which another word takes over. Word i is reachable
if some m_i(h) exceeds 1e-8; without a bias that is so if and only if w_i is a corner of
the convex hull of the rows. The largest m_i is a linear programme (the Chebyshev centre
of the states that belong to i; Grivas, Bogoychev and Lopez, 2022),

    max r   s.t.   (w_j - w_i) . h + ||w_j - w_i|| r <= b_i - b_j  for all j != i.

Most words need no programme. From h along w_i less the mean row, the state is mirrored
in the face shared with whichever word is first (Motzkin and Schoenberg's relaxation:
it ends if the cell has an inside). The programmes that remain start from the few rivals
that are nearest and take in those that the solution breaks, until it breaks none: a
programme of fewer rivals has a larger optimum, so "unreachable" is proved as soon as
that is no more than 1e-8, and "reachable" as soon as its h passes against all rows.

A set S of m words is on top if some h gives all of S larger logits than all others,

    max r   s.t.   z_s >= t + r  for s in S,   z_v <= t - r  for v outside,

and "how large may S be?" is asked of random sets (Basri and Jacobs, 2026).

Axes: U words that are looked at, X unknowns of a programme, N sizes of sets.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, present, real
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "Which words some hidden state can rank first, and which sets of words some state "
    "can rank above all others.",
    "A word that cannot be first never comes out of greedy decoding, whatever the "
    "context; sampling can still draw it.",
    "Words that can never come first",
)
BOX = 100.0
MARGIN = 1e-8
_REFLECTIONS = 100
_BLOCK = 1 << 24


_FEW = 3  # models up to which bounds are drawn beside their lines


class Reach(NamedTuple):
    """Which words can be ranked first.

    Attributes:
        reachable_V: whether a word can be the argmax.
        margin_V: of the state that was found, or the most there is where none was.
        programs: how many words the quick search left to the linear program.
        words_V: the words in question.
    """

    reachable_V: np.ndarray
    margin_V: np.ndarray
    programs: int
    words_V: np.ndarray


class TopSets(NamedTuple):
    """How many random sets of each size a head can put on top.

    Attributes:
        sizes_N: m, the number of words in a set.
        fraction_N: the share of the sets tried that are feasible.
        random_N: Basri and Jacobs' lower bound for a Gaussian table of this shape,
            Phi(1 / sqrt(m v))^(V - m), v = d(d-1) / ((d-m)(d-m-1)(d-m-3)); nought
            where m > d - 4.
        trials: sets tried of each size.
        dim: d; no table puts every set of more than about d / 2 words on top.
    """

    sizes_N: np.ndarray
    fraction_N: np.ndarray
    random_N: np.ndarray
    trials: int
    dim: int


def reach(
    table_VE: np.ndarray,
    bias_V: np.ndarray | None = None,
    words: np.ndarray | None = None,
) -> Reach:
    """Find the words that no state in the box |h_e| <= 100 ranks first.

    Two equal rows with equal biases tie for ever, so neither is reachable.

    Args:
        table_VE: the rows, all of which are rivals.
        bias_V: nought if None.
        words: those that are looked at; None for all.

    Raises:
        ValueError: if the table or the bias is not finite, their shapes disagree, or
            a word is none of the table's.
    """
    table_VE, bias_V = _checked(table_VE, bias_V)
    vocab = len(table_VE)
    words_V = np.arange(vocab) if words is None else np.unique(words)
    if not len(words_V) or words_V[0] < 0 or words_V[-1] >= vocab:
        raise ValueError(f"words must be some of {vocab}, got {words_V}.")
    # Words that are not asked for count as found.
    margin_V = np.full(vocab, np.inf)
    margin_V[words_V] = -np.inf
    for scale in (BOX, 1.0):
        _search(table_VE, bias_V, margin_V, scale)
    left = np.flatnonzero(margin_V <= MARGIN)
    for word in left:
        margin_V[word] = _largest_margin(table_VE, bias_V, word)
    margin_V = margin_V[words_V]
    return Reach(margin_V > MARGIN, margin_V, len(left), words_V)


def top_sets(
    table_VE: np.ndarray,
    bias_V: np.ndarray | None = None,
    *,
    sizes: Sequence[int],
    trials: int,
    seed: int = 0,
) -> TopSets:
    """The share of random sets of words that a head can rank above all others.

    Raises:
        ValueError: for a bad table or bias, sizes outside [1, V), or no trials.
    """
    table_VE, bias_V = _checked(table_VE, bias_V)
    vocab, dim = table_VE.shape
    sizes_N = np.asarray(sizes)
    if sizes_N.ndim != 1 or not sizes_N.size or trials < 1:
        raise ValueError(f"need sizes and trials, got {sizes} and {trials}.")
    if sizes_N.min() < 1 or sizes_N.max() >= vocab:
        raise ValueError(f"sizes must lie in [1, {vocab}), got {list(sizes)}.")
    rng = np.random.default_rng(seed)
    feasible = [
        [
            set_margin(table_VE, bias_V, rng.choice(vocab, size, replace=False))
            > MARGIN
            for _ in range(trials)
        ]
        for size in sizes_N
    ]
    random_N = np.array([_gaussian_bound(vocab, dim, size) for size in sizes_N])
    return TopSets(sizes_N, np.mean(feasible, axis=1), random_N, trials, dim)


def set_margin(
    table_VE: np.ndarray, bias_V: np.ndarray | None, words: np.ndarray
) -> float:
    """Half a gap between some words' logits and all others', above 1e-8 if any is.

    Where there is none, it is the most that half a gap can be.

    Raises:
        ValueError: for a bad table or bias, or words that are not a part of it.
    """
    table_VE, bias_V = _checked(table_VE, bias_V)
    vocab, dim = table_VE.shape
    words = np.unique(words)
    if not 0 < len(words) < vocab or words[0] < 0 or words[-1] >= vocab:
        raise ValueError(f"words must be some of {vocab}, not all, got {words}.")
    sign_V = np.ones(vocab)
    sign_V[words] = -1.0
    rows_VX = sign_V[:, None] * np.column_stack([table_VE, -np.ones(vocab)])
    towards_E = table_VE[words].mean(axis=0) - table_VE.mean(axis=0)
    order_V = np.argsort(-(table_VE @ towards_E + bias_V))
    rivals = order_V[sign_V[order_V] > 0][: 2 * dim + 2]
    bounds = [*[(-BOX, BOX)] * dim, (None, None)]
    first = np.concatenate([words, rivals])
    return _deepest(rows_VX, np.ones(vocab), -sign_V * bias_V, first, bounds)


def section(reaches: dict[str, Reach], sets: dict[str, TopSets]) -> report.Section:
    """Unreachable words, and the sizes of sets that can be on top, by head."""
    figure = drawing.Figure(figsize=(6.4, 4.0))
    axes = figure.subplots()
    few = len(sets) <= _FEW
    for name, top in sets.items():
        (line,) = axes.plot(top.sizes_N, top.fraction_N, marker="o", label=name)
        if few:
            axes.plot(top.sizes_N, top.random_N, "--", color=line.get_color())
        if few and top.dim / 2 <= max(top.sizes_N):
            axes.axvline(top.dim / 2, linestyle=":", color=line.get_color())
    axes.set(xlabel="words in the set", ylabel="share of sets that can be on top")
    axes.set(ylim=(-0.03, 1.03))
    drawing.label(axes)
    caption = "Random sets of words that some hidden state ranks above all others."
    if few:
        caption += (
            " Dashed: what is proved for a random table of the same shape, at least."
        )
    if few and any(top.dim / 2 <= max(top.sizes_N) for top in sets.values()):
        caption += " Dotted: half the width; past it no table whatever has every set."
    lost = {
        name: reached.words_V[~reached.reachable_V] for name, reached in reaches.items()
    }
    counts = "; ".join(
        f"{name}: {len(words):,} of {len(reaches[name].words_V):,} that were tried"
        for name, words in lost.items()
    )
    reading = (
        "A word inside the hull of the others can never be the model's first choice, "
        f"whatever the context. Words that cannot be first: {counts}."
    )
    numbers = {
        name: {
            "unreachable": words,
            "tried": len(reaches[name].words_V),
            "decided_by_linear_programme": reaches[name].programs,
            "smallest_margin": reaches[name].margin_V.min(),
        }
        for name, words in lost.items()
    }
    table = report.Table(
        ("model", "words that cannot be first", "words tried"),
        [
            (name, f"{len(words):,}", f"{len(reaches[name].words_V):,}")
            for name, words in lost.items()
        ],
    )
    return report.Section(
        "What can be on top",
        reading,
        [report.Figure("argmax-top-sets", figure, caption)],
        {
            "words": numbers,
            "sets": {name: top._asdict() for name, top in sets.items()},
        },
        tables=[table],
        remarks="A word inside the hull of the others can never be the model's first "
        "choice, whatever the context.",
        key={
            name: {"words never first": f"{len(words):,}"}
            for name, words in lost.items()
        },
        verdicts={
            name: f"cannot put {len(words):,} of {numbers[name]['tried']:,} words first"
            for name, words in lost.items()
            if len(words)
        },
    )


def of_capture(capture: Capture, settings: Settings) -> tuple[Reach, TopSets]:
    """The words and sets that a capture's source names."""
    del settings
    output = present("table_VE", capture.table_VE), capture.bias_V
    words, sizes, sets = present("trials", capture.trials)
    return reach(*output, words), top_sets(*output, sizes=sizes, trials=sets)


def compare(measured: dict[str, tuple[Reach, TopSets]]) -> report.Section:
    """The section on what `of_capture` gave for each model."""
    reaches = {name: reach for name, (reach, _) in measured.items()}
    return section(reaches, {name: sets for name, (_, sets) in measured.items()})


def _checked(table_VE, bias_V):
    table_VE = real("the table", table_VE)
    if table_VE.ndim != 2 or len(table_VE) < 2:
        raise ValueError(f"the table must be [V > 1, E], got shape {table_VE.shape}.")
    bias_V = np.zeros(len(table_VE)) if bias_V is None else bias_V
    bias_V = real("the bias", bias_V)
    if bias_V.shape != table_VE.shape[:1]:
        raise ValueError(
            f"a table of shape {table_VE.shape} has no bias of shape {bias_V.shape}."
        )
    wrong = np.sum(~np.isfinite(table_VE)) + np.sum(~np.isfinite(bias_V))
    if wrong:
        raise ValueError(f"{wrong} entries of the table and bias are not finite.")
    return table_VE, bias_V


def _search(table_VE, bias_V, margin_V, scale):
    """Raise `margin_V` where a state along a row, or its mirror images, will do."""
    centered_VE = table_VE - table_VE.mean(axis=0)
    # Every distance between rows is below the sum of their norms.
    norm_V = np.linalg.norm(centered_VE, axis=1)
    reach_V = np.maximum(norm_V + norm_V.max(), np.finfo(float).tiny)
    left = np.flatnonzero(margin_V <= MARGIN)
    size = max(1, _BLOCK // len(table_VE))
    for start in range(0, len(left), size):
        words_U = left[start : start + size]
        largest_U1 = np.abs(centered_VE[words_U]).max(axis=1, keepdims=True)
        state_UE = scale * centered_VE[words_U] / np.maximum(largest_U1, 1e-200)
        for _ in range(_REFLECTIONS):
            gap_U, rival_U = _gap(table_VE, bias_V, state_UE, words_U)
            margin_V[words_U] = np.maximum(margin_V[words_U], gap_U / reach_V[words_U])
            open_U = margin_V[words_U] <= MARGIN
            words_U, rival_U = words_U[open_U], rival_U[open_U]
            if not len(words_U):
                break
            face_UE = table_VE[rival_U] - table_VE[words_U]
            square_U = np.maximum(np.sum(face_UE**2, axis=1), 1e-200)
            step_U = 2 * gap_U[open_U] / square_U
            mirrored_UE = state_UE[open_U] + step_U[:, None] * face_UE
            state_UE = np.clip(mirrored_UE, -BOX, BOX)


def _gap(table_VE, bias_V, state_UE, words_U):
    """How far a word's logit is above the largest other, and whose that is."""
    logits_UV = state_UE @ table_VE.T + bias_V
    rows_U = np.arange(len(words_U))
    own_U = logits_UV[rows_U, words_U]
    logits_UV[rows_U, words_U] = -np.inf
    rival_U = logits_UV.argmax(axis=1)
    return own_U - logits_UV[rows_U, rival_U], rival_U


def _largest_margin(table_VE, bias_V, word):
    others = np.delete(np.arange(len(table_VE)), word)
    rows_VE = table_VE[others] - table_VE[word]
    norm_V = np.linalg.norm(rows_VE, axis=1)
    slack_V = bias_V[word] - bias_V[others]
    # The same row, at least as much bias: never strictly above it.
    if np.any((norm_V == 0) & (slack_V <= 0)):
        return 0.0
    apart = norm_V > 0
    if not apart.any():
        return np.inf
    rows_VE, norm_V, slack_V = rows_VE[apart], norm_V[apart], slack_V[apart]
    first = np.argsort(slack_V / norm_V)[: 4 * table_VE.shape[1] + 4]
    bounds = [(-BOX, BOX)] * table_VE.shape[1]
    return _deepest(rows_VE, norm_V, slack_V, first, bounds)


def _deepest(rows_VX, norm_V, slack_V, first, bounds):
    """max r subject to rows x + norm r <= slack, decided against `MARGIN`."""
    active_V = np.zeros(len(rows_VX), bool)
    active_V[first] = True
    goal = np.append(np.zeros(rows_VX.shape[1]), -1.0)
    while True:
        solved = optimize.linprog(
            goal,
            np.column_stack([rows_VX[active_V], norm_V[active_V]]),
            slack_V[active_V],
            bounds=[*bounds, (None, None)],
            options={"primal_feasibility_tolerance": 1e-10},
        )
        if solved.status != 0:
            raise RuntimeError(f"the linear programme failed: {solved.message}")
        if solved.x[-1] <= MARGIN:
            return float(solved.x[-1])
        depth_V = (slack_V - rows_VX @ solved.x[:-1]) / norm_V
        broken = np.flatnonzero((depth_V <= MARGIN) & ~active_V)
        # None is left where the solver's own tolerance hides the last 1e-8.
        if depth_V.min() > MARGIN or not len(broken):
            return float(depth_V.min())
        worst = broken[np.argsort(depth_V[broken])]
        active_V[worst[: 4 * len(goal)]] = True


def _gaussian_bound(vocab, dim, size):
    free = dim - size
    if free <= 3:
        return 0.0
    variance = dim * (dim - 1) / (free * (free - 1) * (free - 3))
    inside = special.log_ndtr(1 / np.sqrt(size * variance))
    return float(np.exp((vocab - size) * inside))
