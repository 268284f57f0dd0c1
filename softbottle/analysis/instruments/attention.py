"""What a normaliser can select: the limits of attention weights, measured.

alpha are weights over L tokens, I the N largest of them, A their sum, x_i the tokens'
vectors and s = sum_{i in I} alpha_i x_i the selected sum (Mudarisov, Burtsev, Petrova
and State, 2025, whose questions these are). The distance of s from all that was left
out, and a bound of our own, are

    d~ = sum_{i not in I} ||alpha_i x_i - s||
       <= d_1 (1 - A) + M ((L - N) A - (1 - A)),

d_1 the largest distance of a token outside from one inside, M the largest norm inside.
Proof: s = A c with c a convex combination of the selected vectors, so that
alpha_i x_i - s = alpha_i (x_i - c) + (alpha_i - A) c. Its norm is at most
alpha_i d_1 + (A - alpha_i) M, since c is in their hull and alpha_i <= A; add up over
the L - N tokens outside, whose weights sum to 1 - A. Both terms vanish at N = L, and
the second grows as L for a fixed N.

Softmax weights at temperature T change with the logits l by J = (diag alpha -
alpha alpha') / T. For a unit vector v, v'Jv = Var_alpha(v) / T, at most
(max v - min v)^2 / 4T <= 1 / 2T, and alpha = (1/2, 1/2) attains it. The 1 / 4T in the
literature bounds the entries of J, not its norm. Two probability vectors are at most
sqrt 2 apart, so

    g(T, eps) = ||alpha(l + eps v) - alpha(l)|| / eps  <=  min(1 / 2T, sqrt 2 / eps).

Axes: R rows (a head, a query), L tokens, N numbers that are tried.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, present
from softbottle.analysis.instruments import normalizers
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "What the largest weights of an attention layer select, how the largest one "
    "shrinks as the text grows, and how sharply weights answer their logits.",
    "Read off how many tokens such a layer can single out, and at which length no "
    "token keeps a large weight.",
    "What attention can tell apart",
)
COUNTS = (1, 2, 5, 10, 20, 50, 100)  # numbers of tokens that may be selected
LEVEL = 0.01  # of the test that calls two samples of distances different
_CAPTIONS = {
    "attention-limits": "How far the selected sum is from what was left out, and its "
    "bound (dashed).",
    "attention-limits-reach": "Selected tokens nearer to their sum than any other "
    "(lines), bounds for softmax of random vectors as we reconstruct them (shade), and "
    "how far the selected weights are from equal (dotted).",
    "attention-limits-length": "The largest weight as the text grows, beside 1/L "
    "(thin) and what bounded logits allow softmax (dotted).",
    "attention-limits-temperature": "How sharply softmax weights answer their logits.",
}


class Selection(NamedTuple):
    """The N largest weights of each row, and what they leave out.

    Attributes:
        distance_R: d~.
        bound_R: on d~, from the head of this file.
        summed_R: the norm of the sum in place of the sum of norms; one text prints it.
        inside_R: N_s / N, the share of selected alpha_i x_i no farther from s than the
            nearest one outside.
        inside_lower_R: of its expectation, for tokens uniform on a sphere.
        inside_upper_R: likewise; both are reconstructed from a sketch of the second
            theorem's proof. They hold on spheres in our tests, not elsewhere: vectors
            with a common mean exceed the upper one.
        uneven_R: total variation between the selected weights and uniform ones.
    """

    distance_R: np.ndarray
    bound_R: np.ndarray
    summed_R: np.ndarray
    inside_R: np.ndarray
    inside_lower_R: np.ndarray
    inside_upper_R: np.ndarray
    uneven_R: np.ndarray


class Limits(NamedTuple):
    """Every measure, for several normalisers of the same logits.

    Attributes:
        counts_N: the numbers of selected tokens.
        selections: by normaliser, a `Selection` for each of them.
        critical: by normaliser, the first count whose distances are not told from
            those of random sets, or None.
        lengths_N: lengths to which the logits were cut.
        largest_N: by normaliser, the largest weight at each length, averaged over rows.
        law_N2: the least and the most a softmax weight can be at each length.
        temperatures_N: those of `sensitivity`.
        sensitivity_N: the largest g(T, eps) of softmax, eps = 0.001.
    """

    counts_N: np.ndarray
    selections: dict[str, list[Selection]]
    critical: dict[str, int | None]
    lengths_N: np.ndarray
    largest_N: dict[str, np.ndarray]
    law_N2: np.ndarray
    temperatures_N: np.ndarray
    sensitivity_N: np.ndarray


def length_law(
    bound: float, lengths: Sequence[int] | np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """The least and the most a softmax weight over L tokens can be, for each L.

    |l_i| <= D gives exp(-2D/T) / L <= alpha_i <= exp(2D/T) / L: no token keeps its
    weight as the text grows.
    """
    ratio = np.exp(2 * bound / temperature)
    return np.array([1 / ratio, ratio])[None, :] / np.asarray(lengths)[:, None]


def selection(weights_RL: np.ndarray, values_LD: np.ndarray, count: int) -> Selection:
    """Measure what the `count` largest weights of each row select.

    Args:
        weights_RL: distributions over the same L tokens, one per row (a head, a query).
        values_LD: the tokens' vectors.
        count: N, below L.

    Raises:
        ValueError: if an array is not finite or the shapes disagree, a row is no
            distribution, or the count is not in [1, L).
    """
    weights_RL, values_LD = _checked(weights_RL, values_LD, [count])
    order_RL = np.argsort(-weights_RL, axis=-1, kind="stable")
    weight_RL = np.take_along_axis(weights_RL, order_RL, axis=-1)
    picked_RN, rest_R = weight_RL[:, :count], weight_RL[:, count:].sum(axis=-1)
    mass_R, left = picked_RN.sum(axis=-1), weight_RL.shape[-1] - count
    sum_RD, away_RL = _away(weights_RL, values_LD, order_RL, count)
    apart_LL = _distances(values_LD)
    widest_R = np.array(
        [apart_LL[np.ix_(row[count:], row[:count])].max() for row in order_RL]
    )
    norm_L = np.linalg.norm(values_LD, axis=-1)
    largest_R = norm_L[order_RL[:, :count]].max(axis=-1)
    summed_RD = weights_RL @ values_LD - (1 + left) * sum_RD
    radius_R1 = away_RL[:, count:].min(axis=-1, keepdims=True)
    delta = apart_LL[np.triu_indices_from(apart_LL, 1)].min()
    lower_R, upper_R = _separability(picked_RN, radius_R1, norm_L.max(), delta)
    return Selection(
        away_RL[:, count:].sum(axis=-1),
        widest_R * rest_R + largest_R * (left * mass_R - rest_R),
        np.linalg.norm(summed_RD, axis=-1),
        np.mean(away_RL[:, :count] <= radius_R1, axis=-1),
        lower_R,
        upper_R,
        0.5 * np.abs(picked_RN / mass_R[:, None] - 1 / count).sum(axis=-1),
    )


def critical_count(
    weights_RL: np.ndarray, values_LD: np.ndarray, counts: Sequence[int], seed: int = 0
) -> int | None:
    """The first count at which the largest weights look like a blind choice.

    The distances d~ of the rows are compared with those of one random set of as many
    tokens for each row, by a Kolmogorov-Smirnov test at the level 0.01; None if it
    tells them apart at every count.

    Raises:
        ValueError: as `selection` does.
    """
    _checked(weights_RL, values_LD, counts)
    rng = np.random.default_rng(seed)
    for count in sorted(counts):
        pair = beside_blind(weights_RL, values_LD, count, rng)
        if stats.ks_2samp(*pair).pvalue > LEVEL:
            return int(count)
    return None


def beside_blind(
    weights_RL: np.ndarray, values_LD: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """d~ of each row's largest weights, and of as many tokens drawn at random.

    Raises:
        ValueError: as `selection` does.
    """
    weights_RL, values_LD = _checked(weights_RL, values_LD, [count])
    order_RL = np.argsort(-weights_RL, axis=-1, kind="stable")
    blind_RL = rng.permuted(order_RL, axis=-1)
    chosen_R, random_R = (
        _away(weights_RL, values_LD, some_RL, count)[1][:, count:].sum(axis=-1)
        for some_RL in (order_RL, blind_RL)
    )
    return chosen_R, random_R


def sensitivity(
    logits_RL: np.ndarray, temperature: float, step: float, seed: int = 0
) -> np.ndarray:
    """g(T, eps) of softmax for each row, along a random unit vector.

    Raises:
        ValueError: if a logit is not finite, or the temperature or step not positive.
    """
    logits_RL = normalizers.finite("logits", logits_RL)
    if temperature <= 0 or step <= 0:
        raise ValueError(f"need T > 0 and eps > 0, got {temperature} and {step}.")
    direction_RL = np.random.default_rng(seed).normal(size=logits_RL.shape)
    direction_RL /= np.linalg.norm(direction_RL, axis=-1, keepdims=True)
    before_RL, after_RL = (
        normalizers.softmax(some_RL, temperature)
        for some_RL in (logits_RL, logits_RL + step * direction_RL)
    )
    return np.linalg.norm(after_RL - before_RL, axis=-1) / step


def limits(
    logits_RL: np.ndarray,
    values_LD: np.ndarray,
    counts: Sequence[int],
    temperatures: Sequence[float] | np.ndarray,
) -> Limits:
    """Measure everything on given logits, for each of `normalisers.ALL`.

    Raises:
        ValueError: as `selection` and `sensitivity` do.
    """
    logits_RL = normalizers.finite("logits", logits_RL)
    weights = {name: apply(logits_RL) for name, apply in normalizers.ALL.items()}
    length = logits_RL.shape[-1]
    lengths_N = np.unique(np.geomspace(min(4, length), length, 9).astype(int))
    return Limits(
        np.asarray(counts),
        {
            name: [selection(weights_RL, values_LD, count) for count in counts]
            for name, weights_RL in weights.items()
        },
        {
            name: critical_count(weights_RL, values_LD, counts)
            for name, weights_RL in weights.items()
        },
        lengths_N,
        {
            name: np.array([apply(logits_RL[:, :n]).max(-1).mean() for n in lengths_N])
            for name, apply in normalizers.ALL.items()
        },
        length_law(np.abs(logits_RL).max(), lengths_N),
        np.asarray(temperatures),
        np.array([sensitivity(logits_RL, t, 1e-3).max() for t in temperatures]),
    )


def survey(logits_RL: np.ndarray, values_LD: np.ndarray) -> Limits:
    """`limits` at the counts and temperatures that a report shows.

    Raises:
        ValueError: as `limits` does.
    """
    counts = [count for count in COUNTS if count < np.shape(logits_RL)[-1]]
    return limits(logits_RL, values_LD, counts, np.geomspace(0.01, 10, 13))


def section(limits: Limits) -> report.Section:
    """The limits of each normaliser in four pictures."""
    drawn = {name: drawing.Figure(figsize=(5, 3.6)) for name in _CAPTIONS}
    distance, inside, length, gradient = (one.subplots() for one in drawn.values())
    for name, selections in limits.selections.items():
        _draw_selections(distance, inside, name, limits.counts_N, selections)
        length.loglog(limits.lengths_N, limits.largest_N[name], label=name)
    lower, upper = (
        [getattr(selection, field).mean() for selection in limits.selections["softmax"]]
        for field in ("inside_lower_R", "inside_upper_R")
    )
    inside.fill_between(limits.counts_N, lower, upper, color=drawing.GRAY, alpha=0.15)
    length.loglog(limits.lengths_N, limits.law_N2[:, 1].clip(max=1), "k:")
    length.loglog(limits.lengths_N, 1 / limits.lengths_N, "k-", linewidth=0.8)
    t_N = limits.temperatures_N
    gradient.loglog(t_N, limits.sensitivity_N, marker="o", label="measured, largest")
    gradient.loglog(t_N, 1 / (2 * t_N), "k-", label="1/(2T), the bound")
    gradient.loglog(t_N, 1 / (4 * t_N), "k:", label="1/(4T), as printed")
    distance.set(xlabel="selected tokens", ylabel="distance", xscale="log")
    inside.set(xlabel="selected tokens", ylabel="share within reach", xscale="log")
    length.set(xlabel="tokens", ylabel="largest weight")
    shown_N = limits.lengths_N[[0, len(limits.lengths_N) // 2, -1]]
    length.set_xticks(shown_N, [f"{count:,}" for count in shown_N])
    length.tick_params(which="minor", labelbottom=False)
    gradient.set(xlabel="temperature", ylabel="change of weights by logit")
    for axes in (distance, inside, length, gradient):
        drawing.label(axes)
    firsts = "; ".join(
        f"{name}: {'none of those tried' if count is None else count}"
        for name, count in limits.critical.items()
    )
    reading = (
        "Attention can single out only so many tokens. Number of tokens from which "
        f"picking the largest weights looks like picking blindly: {firsts}."
    )
    figures = [
        report.Figure(name, figure, _CAPTIONS[name]) for name, figure in drawn.items()
    ]
    numbers = limits._asdict()
    numbers["selections"] = {
        name: [selection._asdict() for selection in selections]
        for name, selections in limits.selections.items()
    }
    table = report.Table(
        ("normaliser", "tokens from which picking looks blind"),
        [
            (name, "none of those tried" if count is None else f"{count:,}")
            for name, count in limits.critical.items()
        ],
    )
    return report.Section(
        "Limits of attention",
        reading,
        figures,
        numbers,
        tables=[table],
        remarks="Attention can single out only so many tokens.",
    )


def of_capture(capture: Capture, settings: Settings) -> Limits:
    """`survey` of an attention layer's own arrays, of which a file has one set."""
    del settings
    return survey(*present("attention_rows", capture.attention_rows))


def _draw_selections(distance, inside, name, counts_N, selections):
    (line,) = distance.plot(
        counts_N, [x.distance_R.mean() for x in selections], label=name
    )
    color = line.get_color()
    distance.plot(counts_N, [x.bound_R.mean() for x in selections], "--", color=color)
    inside.plot(
        counts_N, [x.inside_R.mean() for x in selections], color=color, label=name
    )
    inside.plot(counts_N, [x.uneven_R.mean() for x in selections], ":", color=color)


def _away(weights_RL, values_LD, order_RL, count):
    """s of the first tokens of each row's order, and ||alpha_i x_i - s|| in it."""
    weight_RL = np.take_along_axis(weights_RL, order_RL, axis=-1)
    picked_RND = values_LD[order_RL[:, :count]]
    sum_RD = np.einsum("rn,rnd->rd", weight_RL[:, :count], picked_RND)
    norm_RL = np.linalg.norm(values_LD, axis=-1)[order_RL]
    cross_RL = np.take_along_axis(sum_RD @ values_LD.T, order_RL, axis=-1)
    square_RL = (weight_RL * norm_RL) ** 2 - 2 * weight_RL * cross_RL
    square_RL += np.sum(sum_RD**2, axis=-1, keepdims=True)
    return sum_RD, np.sqrt(np.maximum(square_RL, 0))


def _separability(picked_RN, radius_R1, radius_of_sphere, delta):
    """Markov's bound below and Hoeffding's above on E N_s / N.

    xi_i^2 = M^2 sum_{j != i} alpha_j^2
             + (M^2 - delta^2 / 2) sum_{j != k, neither i} alpha_j alpha_k
    stands for the expected square of ||alpha_i x_i - s||; j and k are selected.
    """
    squares_RN = np.sum(picked_RN**2, axis=-1, keepdims=True) - picked_RN**2
    pairs_RN = (picked_RN.sum(axis=-1, keepdims=True) - picked_RN) ** 2 - squares_RN
    square = radius_of_sphere**2
    xi_RN = square * squares_RN + (square - delta**2 / 2) * pairs_RN
    xi_RN = np.sqrt(np.maximum(xi_RN, 0))
    lower_R = 1 - np.mean(xi_RN / np.maximum(radius_R1, 1e-200), axis=-1)
    beyond_RN = np.maximum(xi_RN - radius_R1, 0)
    upper_R = np.mean(np.exp(-(beyond_RN**2) / (2 * square)), axis=-1)
    return np.maximum(lower_R, 0), upper_R


def _distances(values_LD):
    square_L = np.sum(values_LD**2, axis=-1)
    square_LL = square_L[:, None] + square_L[None, :] - 2 * values_LD @ values_LD.T
    return np.sqrt(np.maximum(square_LL, 0))


def _checked(weights_RL, values_LD, counts):
    weights_RL = normalizers.finite("weights", weights_RL)
    values_LD = normalizers.finite("values", values_LD)
    if values_LD.ndim != 2 or weights_RL.shape[1:] != values_LD.shape[:1]:
        raise ValueError(
            f"weights of shape {weights_RL.shape} and values of {values_LD.shape} are "
            "not [R, L] and [L, D]."
        )
    sums_R = weights_RL.sum(axis=-1)
    if weights_RL.min() < 0 or np.abs(sums_R - 1).max() > 1e-3:
        raise ValueError(
            f"a row of weights is no distribution: smallest {weights_RL.min()}, sums "
            f"{sums_R.min()} to {sums_R.max()}."
        )
    length = len(values_LD)
    if not len(counts) or min(counts) < 1 or max(counts) >= length:
        raise ValueError(f"counts must lie in [1, {length}), got {list(counts)}.")
    return weights_RL, values_LD
