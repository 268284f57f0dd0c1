"""How much of the gradient of the logits can reach the backbone through the head.

    d_k = d nll / d z_k = r_k (p_k - onehot(label)) * g'(z_k)
    d nll / d context_k = W' d_k

r_k the posterior of component k given the label. W' sees only what lies in the column
space of W, E dimensions of V: with Q its orthonormal basis,

    kept = |Q' d| / |d|,   suppressed = |d - Q Q' d| / |d|,   kept^2 + suppressed^2 = 1.

The components of a mixture are stacked, so that each counts as its responsibility
says. A gradient without any relation to W would keep sqrt(E / V). The mixture weights
are a second way to the backbone, of K dimensions, which is not counted here.

Axes: B draws and W windows of the bootstrap.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import drawing
from softbottle.analysis import bootstrap, report
from softbottle.analysis.capture import Capture, bias_or_zeros, present, real
from softbottle.analysis.settings import Settings
from softbottle.ops.mixture.activations import SOFTMAX, Activation

ABOUT = report.About(
    "The loss has a gradient by every word's logit, and only its part in the "
    "directions of the output table reaches the layers below.",
    "A share near that of chance says that the table passes on no more than random "
    "directions would; a wider table passes more.",
    "How much of a gradient passes the head",
)
CHUNK = 64  # tokens whose [K, V] gradients are held at a time


class Gradient(NamedTuple):
    """Norm fractions; over several tokens, of the root of the summed squares.

    Attributes:
        kept_T: of each token's gradient, what the head passes on.
        kept: over all tokens.
        suppressed: over all tokens; kept^2 + suppressed^2 = 1.
        kept_K: of each component's gradient over all tokens.
        responsibility_K: mean posterior given the label.
        by_rank: kept by the head's leading singular directions alone.
        width: dimensions of the column space.
        vocab: rows of the table.
        interval: both ends, of `kept`, over windows of tokens.
    """

    kept_T: np.ndarray
    kept: float
    suppressed: float
    kept_K: np.ndarray
    responsibility_K: np.ndarray
    by_rank: dict[int, float]
    width: int
    vocab: int
    interval: tuple[float, float]

    @property
    def chance(self) -> float:
        """What an unrelated gradient would keep, sqrt(width / vocab)."""
        return (self.width / self.vocab) ** 0.5


def measure(
    log_prior_TK: np.ndarray,
    context_TKE: np.ndarray,
    table_VE: np.ndarray,
    bias_V: np.ndarray,
    labels_T: np.ndarray,
    activation: Activation = SOFTMAX,
    ranks: Sequence[int] = (),
) -> Gradient:
    """The share of the logits' gradient that a head passes on to its contexts.

    Args:
        log_prior_TK: log mixture weights; zeros with K = 1 for a plain softmax, -inf
            for a component that is not active.
        context_TKE: what each component multiplies the table by.
        table_VE: the output table, words only.
        bias_V: its bias.
        labels_T: the words that came.
        activation: the head's g.
        ranks: numbers of leading singular directions to report beside all of them.

    Raises:
        ValueError: if the shapes do not fit, an entry is not finite, a label is not a
            word, or a rank is not in [1, width].
    """
    arrays = _checked(log_prior_TK, context_TKE, table_VE, bias_V, labels_T)
    basis_VE = column_space(arrays[2])
    width = basis_VE.shape[1]
    if not all(1 <= r <= width for r in ranks):
        raise ValueError(
            f"the head has {width} directions; ranks must be in [1, {width}], got "
            f"{list(ranks)}."
        )
    return _measured(arrays, basis_VE, activation, ranks)


def _measured(arrays, basis_VE, activation, ranks):
    """`measure` of checked arrays and the basis of their table."""
    log_prior_TK, context_TKE, table_VE, bias_V, labels_T = arrays
    width = basis_VE.shape[1]
    fixed = (table_VE, bias_V, basis_VE, activation.theta, activation.apply)
    chunks = [
        _squares(labels_T[chunk], log_prior_TK[chunk], context_TKE[chunk], *fixed)
        for chunk in _chunks(len(labels_T))
    ]
    parts = (np.concatenate(part) for part in zip(*chunks, strict=True))
    part_TKE, whole_TK, responsibility_TK = (np.asarray(a, np.float64) for a in parts)
    share = np.square(_kept(np.cumsum(part_TKE.sum(axis=(0, 1))), whole_TK.sum()))
    return Gradient(
        _kept(part_TKE.sum(axis=(1, 2)), whole_TK.sum(axis=1)),
        float(np.sqrt(share[-1])),
        float(np.sqrt(max(1 - share[-1], 0.0))),
        _kept(part_TKE.sum(axis=(0, 2)), whole_TK.sum(axis=0)),
        responsibility_TK.mean(axis=0),
        {int(r): float(np.sqrt(share[r - 1])) for r in ranks},
        width,
        len(basis_VE),
        _interval(part_TKE.sum(axis=(1, 2)), whole_TK.sum(axis=1)),
    )


def column_space(table_VE: np.ndarray) -> np.ndarray:
    """An orthonormal basis of the columns, by singular value, the largest first.

    Directions below the rounding of float32 are left out.
    """
    left_VE, sigma, _ = np.linalg.svd(
        np.asarray(table_VE, np.float64), full_matrices=False
    )
    scale = 0.5 * np.sqrt(sum(table_VE.shape) + 1) * np.finfo(np.float32).eps
    return left_VE[:, sigma > scale * sigma[0]]


def of_capture(capture: Capture, settings: Settings) -> Gradient:
    """`measure` on the start of a capture's text, by no more ranks than there are."""
    del settings
    mixed = present("mixed", capture.mixed)
    arrays = _checked(
        mixed.log_prior_TK,
        mixed.context_TKE,
        present("table_VE", capture.table_VE),
        bias_or_zeros(capture),
        mixed.labels_T,
    )
    basis_VE = column_space(arrays[2])
    ranks = sorted({min(rank, basis_VE.shape[1]) for rank in mixed.ranks})
    return _measured(arrays, basis_VE, mixed.activation, ranks)


def section(heads: dict[str, Gradient]) -> report.Section:
    """Heads side by side: what they keep, beside chance, against their width."""
    lines = [
        f"{name}: {head.kept:.1%} of the norm of the logits' gradient"
        f"{bootstrap.between(*head.interval, '.1%')} reaches the backbone through "
        f"{head.width:,} of {head.vocab:,} dimensions (chance {head.chance:.1%}); the "
        f"part left out has {head.suppressed:.1%} of the norm."
        for name, head in heads.items()
    ]
    remarks = bootstrap.described(*(len(head.kept_T) for head in heads.values()))
    lines.append(remarks)
    numbers = {
        name: head._asdict() | {"chance": head.chance} for name, head in heads.items()
    }
    kept = {
        name: bootstrap.Estimate(head.kept, *head.interval)
        for name, head in heads.items()
    }
    table = report.Table(
        (
            *("model", "norm that reaches the backbone", "by chance"),
            *("through", "norm left out"),
        ),
        [
            (
                *(name, kept[name].text(".1%"), f"{head.chance:.1%}"),
                f"{head.width:,} of {head.vocab:,} dimensions",
                f"{head.suppressed:.1%}",
            )
            for name, head in heads.items()
        ],
    )
    return report.Section(
        "Gradient",
        " ".join(lines),
        [_draw(heads)],
        numbers,
        tables=[table],
        remarks=remarks,
        key={
            name: {"gradient kept": f"{head.kept:.0%}"} for name, head in heads.items()
        },
    )


def _draw(heads):
    """By leading directions where they are known; else a bar per head."""
    figure = drawing.Figure(figsize=(6.4, 3.8))
    axes = figure.subplots()
    lines = {name: head for name, head in heads.items() if head.by_rank}
    if not lines:
        drawing.bars(axes, {name: head.kept for name, head in heads.items()})
        for place, head in enumerate(heads.values()):
            axes.plot([head.chance] * 2, [place - 0.3, place + 0.3], color="black")
            axes.hlines(place, *head.interval, color=drawing.BLACK, linewidth=1)
        axes.set(xlabel="norm kept", xlim=(0, None))
        reading = (
            "Bars: the share of the gradient's norm that the head passes on, lines on "
            "them its interval; upright strokes: what chance would keep."
        )
        return report.Figure("gradient-kept", figure, reading)
    for name, head in heads.items():
        (line,) = axes.plot(head.width, head.kept, "o", label=name)
        color = line.get_color()
        axes.vlines(head.width, *head.interval, color=color)
        axes.plot(head.width, head.chance, "_", color=color, markersize=14)
        if head.by_rank:
            ranks, shares = zip(*sorted(head.by_rank.items()), strict=True)
            axes.plot(ranks, shares, "-", color=color)
    axes.set(xlabel="width of the head", ylabel="norm kept", ylim=(0, 1), xscale="log")
    drawing.plain(axes.xaxis)
    drawing.label(axes)
    reading = (
        "Dots: the share of the gradient's norm that the head passes on, and its "
        "interval; dashes: what chance would keep; lines: by the head's leading "
        "directions alone."
    )
    return report.Figure("gradient-kept", figure, reading)


def _chunks(tokens):
    return [slice(at, at + CHUNK) for at in range(0, tokens, CHUNK)]


def _interval(part_T, whole_T):
    """Both ends of the interval of what is kept over all tokens."""
    window_T = bootstrap.windows(len(part_T))
    part_W, whole_W = (bootstrap.sums(a_T, window_T) for a_T in (part_T, whole_T))

    def kept(weight_BW):
        return _kept(weight_BW @ part_W, weight_BW @ whole_W)

    low, high = bootstrap.interval(kept, len(part_W), bounds=(0, 1))
    return float(low), float(high)


def _kept(part, whole):
    """The norm fraction of squares; NaN where there is no gradient to keep."""
    return np.sqrt(part / np.where(whole > 0, whole, np.nan))


@functools.partial(jax.jit, static_argnames="apply")
def _squares(
    labels_C, log_prior_CK, context_CKE, table_VE, bias_V, basis_VE, theta, apply
):
    """Squares of Q'd by direction and of d, and the responsibilities."""
    logits_CKV = jnp.einsum("cke,ve->ckv", context_CKE, table_VE, precision="highest")
    logits_CKV = logits_CKV + bias_V[None, None]

    def log_labels(logits_CKV):
        log_p_CKV = jax.nn.log_softmax(apply(theta, logits_CKV))
        return jnp.take_along_axis(log_p_CKV, labels_C[:, None, None], axis=2)[..., 0]

    log_label_CK, pull = jax.vjp(log_labels, logits_CKV)
    r_CK = jax.nn.softmax(log_prior_CK + log_label_CK)
    (d_CKV,) = pull(-r_CK)
    part_CKE = jnp.einsum("ckv,ve->cke", d_CKV, basis_VE, precision="highest")
    return jnp.square(part_CKE), jnp.square(d_CKV).sum(axis=-1), r_CK


def _checked(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    """The arrays as NumPy's; see `measure`."""
    log_prior_TK = real("prior", log_prior_TK, None)
    context_TKE = real("contexts", context_TKE, None)
    table_VE = real("table", table_VE, None)
    bias_V = real("bias", bias_V, None)
    labels_T = np.asarray(labels_T)
    shapes = [a.shape for a in (log_prior_TK, context_TKE, table_VE, bias_V, labels_T)]
    fits = context_TKE.ndim == 3 and table_VE.ndim == 2
    if not fits or shapes != [
        *(context_TKE.shape[:2], context_TKE.shape, (len(bias_V), shapes[1][2])),
        *(table_VE.shape[:1], context_TKE.shape[:1]),
    ]:
        raise ValueError(f"[T, K], [T, K, E], [V, E], [V], [T] expected, got {shapes}.")
    # -inf is of a component that is not active, of which a token has not only such.
    most_T1 = log_prior_TK.max(axis=1, keepdims=True)
    prior_TK = np.where(np.isneginf(log_prior_TK), most_T1, log_prior_TK)
    named = {"log-weights": prior_TK, "contexts": context_TKE}
    for name, array in (named | {"table": table_VE, "bias": bias_V}).items():
        if bad := array.size - np.isfinite(array).sum():
            raise ValueError(f"the {name} have {bad} entries that are not finite.")
    outside = labels_T[(labels_T < 0) | (labels_T >= len(table_VE))]
    if len(outside):
        raise ValueError(f"label {outside[0]} is not among {len(table_VE)} words.")
    return log_prior_TK, context_TKE, table_VE, bias_V, labels_T
