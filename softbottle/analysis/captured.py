"""The instruments on a softmax model of which arrays are all there is.

    log P = H W' + 1 b' - s 1',    s_n = logsumexp_v (H W' + 1 b')_nv

for states H [N, D], a table W [V, D] and a bias b. Its singular values are those of
its transpose, so the shorter side is the one that a Gram matrix is made of: the words
of a large vocabulary pass by in blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from softbottle.analysis import (
    argmax,
    attention_layers,
    gradient,
    lowrank,
    ngram,
    rank,
    saturation,
)
from softbottle.analysis.report import Section

_BLOCK = 256  # positions whose logits are held at a time
_GRADIENTS = 1024  # positions whose gradients are measured
_WORDS = 4096  # of a vocabulary, at most, that are tried for the first place
_PROGRAMMES = 64  # width up to which large sets of words are tried
_DIMENSIONS = 576  # of the text's next-token matrix, at most


class Capture(NamedTuple):
    """What a model holds while it reads a text.

    Attributes:
        name: of the model.
        table_VD: its output table.
        bias_V: its output bias, or None.
        states: [N, D] by layer, the embedded words first; the head reads the last.
            Empty if only the head is known.
        labels_N: the tokens that follow, or None.
        logits_LWHS: attention logits of the last position of each of W stretches of S
            positions, by layer and head, N = W S; or None.
        ids: the whole text in tokens, or None.
    """

    name: str
    table_VD: np.ndarray
    bias_V: np.ndarray | None = None
    states: Sequence[np.ndarray] = ()
    labels_N: np.ndarray | None = None
    logits_LWHS: np.ndarray | None = None
    ids: np.ndarray | None = None


def sections(
    capture: Capture, instruments: Sequence[str], order: int = 2
) -> list[Section]:
    """Sections on a model; an instrument whose arrays are not there has none.

    Args:
        capture: the arrays.
        instruments: names from `INSTRUMENTS`, in the order of the report.
        order: of the n-grams of the text.

    Raises:
        ValueError: for an unknown instrument, shapes that disagree or entries that are
            not finite.
    """
    unknown = [name for name in instruments if name not in INSTRUMENTS]
    if unknown or not instruments:
        raise ValueError(f"no instrument {unknown}; there are {list(INSTRUMENTS)}.")
    _check(capture)
    found = [INSTRUMENTS[name](capture, order) for name in instruments]
    return [section for section in found if section is not None]


def mean_loss(capture: Capture) -> float:
    """The model's own loss on the text it read, in nats a token."""
    total, start = 0.0, 0
    for log_p_CV in _by_position(capture):
        labels_C = capture.labels_N[start : start + len(log_p_CV)]
        total -= float(np.sum(log_p_CV[np.arange(len(labels_C)), labels_C]))
        start += len(labels_C)
    return total / start


def _rank(capture, order):
    del order
    if not capture.states:
        return None
    vocab, dim = capture.table_VD.shape
    count = len(capture.states[-1])
    wide = count < vocab
    ranks = rank.streamed(_by_word(capture) if wide else _by_position(capture))
    pairs = rank.PairwiseKL()
    for log_p_CV in _by_position(capture):
        pairs.add(log_p_CV)
    bound = rank.softmax_bound(dim, capture.bias_V is not None)
    found = rank.HeadRanks(
        ranks._replace(shape=(count, vocab)), bound, pairs.value, None
    )
    section = rank.section({capture.name: found})
    if capture.labels_N is None:
        return section
    loss = mean_loss(capture)
    section.numbers[capture.name]["loss"] = loss
    said = f" Its loss on this text is {loss:.3f} nats a token."
    return section._replace(reading=section.reading + said)


def _saturation(capture, order):
    del order
    states = {capture.name: saturation.layers(capture.states)} if capture.states else {}
    heads = {capture.name: saturation.head(capture.table_VD)}
    return saturation.section(states, heads)


def _gradient(capture, order):
    del order
    if capture.labels_N is None:
        return None
    first = slice(0, _GRADIENTS)
    hidden_TD = capture.states[-1][first]
    dim = capture.table_VD.shape[1]
    measured = gradient.measure(
        np.zeros((len(hidden_TD), 1), np.float32),
        hidden_TD[:, None],
        capture.table_VD,
        _bias(capture),
        capture.labels_N[first],
        ranks=_powers(np.linalg.matrix_rank(capture.table_VD) if dim < 64 else dim),
    )
    return gradient.section({capture.name: measured})


def _lowrank(capture, order):
    """Heads of every power of two over the tokens that follow in the text alone."""
    del order
    if capture.labels_N is None:
        return None
    words_U, labels_N = np.unique(capture.labels_N, return_inverse=True)
    hidden_ND, table_UD = capture.states[-1], capture.table_VD[words_U]
    ranks = _powers(hidden_ND.shape[1])
    found = lowrank.train(hidden_ND, labels_N, len(words_U), ranks, table_UD)
    return lowrank.section({capture.name: found})


def _argmax(capture, order):
    """All words of a small vocabulary, some at even distances of a large one."""
    del order
    table = capture.table_VD, capture.bias_V
    vocab, dim = capture.table_VD.shape
    words = np.linspace(0, vocab - 1, min(vocab, _WORDS)).astype(int)
    some = (dim // 4, dim // 2, dim) if dim <= _PROGRAMMES else (4,)
    sizes = sorted({size for size in (1, 2, *some) if 0 < size < vocab})
    return argmax.section(
        {capture.name: argmax.reach(*table, words)},
        {capture.name: argmax.top_sets(*table, sizes=sizes, trials=5)},
    )


def _ngram(capture, order):
    if capture.ids is None:
        return None
    table = ngram.next_word(capture.ids, len(capture.table_VD), order)
    dimensions = min(_DIMENSIONS, *table.matrix_CV.shape)
    error = ngram.w_error(table.matrix_CV, dimensions)
    return ngram.section({f"text in tokens of {capture.name}": error})


def _attention(capture, order):
    del order
    if capture.logits_LWHS is None:
        return None
    entering = capture.states[: len(capture.logits_LWHS)]
    found = attention_layers.measure(capture.logits_LWHS, entering)
    return attention_layers.section({capture.name: found})


def _by_position(capture) -> Iterator[np.ndarray]:
    """log P in blocks of positions."""
    hidden_ND, bias_V = capture.states[-1], _bias(capture)
    table_VD = jnp.asarray(capture.table_VD)
    for start in range(0, len(hidden_ND), _BLOCK):
        logits_CV = hidden_ND[start : start + _BLOCK] @ table_VD.T + bias_V[None]
        yield np.asarray(jax.nn.log_softmax(logits_CV))


def _by_word(capture) -> Iterator[np.ndarray]:
    """The transpose of log P in blocks of words."""
    hidden_ND, bias_V = jnp.asarray(capture.states[-1]), _bias(capture)
    table_VD = jnp.asarray(capture.table_VD)
    lse_N = np.concatenate(
        [
            scipy.special.logsumexp(hidden_CD @ table_VD.T + bias_V[None], axis=1)
            for hidden_CD in np.split(hidden_ND, range(_BLOCK, len(hidden_ND), _BLOCK))
        ]
    )
    for start in range(0, len(table_VD), _BLOCK):
        stop = start + _BLOCK
        logits_CN = table_VD[start:stop] @ hidden_ND.T + bias_V[start:stop, None]
        yield np.asarray(logits_CN - lse_N[None])


def _bias(capture):
    if capture.bias_V is None:
        return np.zeros(len(capture.table_VD), capture.table_VD.dtype)
    return capture.bias_V


def _powers(most):
    return sorted({min(2**power, int(most)) for power in range(16)})


def _check(capture):
    table_VD, states = capture.table_VD, capture.states
    shapes = [one.shape for one in states[-1:]]
    if table_VD.ndim != 2 or any(
        len(shape) != 2 or shape[1:] != table_VD.shape[1:] for shape in shapes
    ):
        raise ValueError(
            f"hidden {shapes} and table {table_VD.shape} must be [N, D] and [V, D]."
        )
    for name, array in (("hidden", states[-1:]), ("table", table_VD)):
        if not np.all(np.isfinite(array)):
            raise ValueError(f"{name} has entries that are not finite.")


# By default all but the one that trains.
QUICK = ("rank", "saturation", "attention", "gradient", "argmax", "ngram")
INSTRUMENTS: dict[str, Callable[..., Section | None]] = {
    "rank": _rank,
    "saturation": _saturation,
    "attention": _attention,
    "gradient": _gradient,
    "argmax": _argmax,
    "lowrank": _lowrank,
    "ngram": _ngram,
}
