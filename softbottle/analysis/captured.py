"""The instruments on a softmax model of which arrays are all there is.

    log P = H W' + 1 b' - s 1',    s_n = logsumexp_v (H W' + 1 b')_nv

for states H [N, D], a table W [V, D] and a bias b. Its singular values are those of
its transpose, so the shorter side is the one that a Gram matrix is made of: the words
of a large vocabulary pass by in blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from softbottle.analysis.asked import USUAL, Asked
from softbottle.analysis.instruments import (
    argmax,
    attention_layers,
    gradient,
    lowrank,
    ngram,
    rank,
    saturation,
)
from softbottle.analysis.report import Section
from softbottle.analysis.sources import arrays as arrays_lib
from softbottle.data import vocab as vocab_lib

_BLOCK = 256  # positions whose logits are held at a time
_GRADIENTS = 1024  # positions whose gradients are measured
_WORDS = 4096  # of a vocabulary, at most, that are tried for the first place
_PROGRAMMES = 64  # width up to which large sets of words are tried


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
        frozen_MD: what the head reads along more of the text, from its start, for
            instruments that train; empty if `states` are all.
    """

    name: str
    table_VD: np.ndarray
    bias_V: np.ndarray | None = None
    states: Sequence[np.ndarray] = ()
    labels_N: np.ndarray | None = None
    logits_LWHS: np.ndarray | None = None
    ids: np.ndarray | None = None
    frozen_MD: np.ndarray = np.zeros((0, 0), np.float32)


def sections(
    capture: Capture, instruments: Sequence[str], asked: Asked = USUAL
) -> list[Section]:
    """Sections on a model; an instrument whose arrays are not there has none.

    Args:
        capture: the arrays.
        instruments: names from `INSTRUMENTS`, in the order of the report.
        asked: how closely.

    Raises:
        ValueError: for an unknown instrument, shapes that disagree or entries that are
            not finite.
    """
    unknown = [name for name in instruments if name not in INSTRUMENTS]
    if unknown or not instruments:
        raise ValueError(f"no instrument {unknown}; there are {list(INSTRUMENTS)}.")
    _check(capture)
    found = [INSTRUMENTS[name](capture, asked) for name in instruments]
    return [section for section in found if section is not None]


def mean_loss(capture: Capture) -> float:
    """The model's own loss on the text it read, in nats a token."""
    total, start = 0.0, 0
    for log_p_CV in _by_position(capture):
        labels_C = capture.labels_N[start : start + len(log_p_CV)]
        total -= float(np.sum(log_p_CV[np.arange(len(labels_C)), labels_C]))
        start += len(labels_C)
    return total / start


def _rank(capture, asked):
    if not capture.states:
        return None
    vocab, dim = capture.table_VD.shape
    count = len(capture.states[-1])
    blocks = _by_word if count < vocab else _by_position
    ranks = rank.streamed(blocks(capture, asked.precision), asked.precision)
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


def _saturation(capture, asked):
    del asked
    states = {capture.name: saturation.layers(capture.states)} if capture.states else {}
    heads = {capture.name: saturation.head(capture.table_VD)}
    return saturation.section(states, heads)


def _gradient(capture, asked):
    del asked
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


def _lowrank(capture, asked):
    """Heads of every power of two over the tokens that follow in the text alone."""
    del asked
    if capture.labels_N is None:
        return None
    hidden_ND, labels_N = capture.states[-1], capture.labels_N
    if len(capture.frozen_MD) > len(hidden_ND):
        hidden_ND = capture.frozen_MD
        labels_N = capture.ids[1 : len(hidden_ND) + 1]
    words_U, labels_N = np.unique(labels_N, return_inverse=True)
    own = lowrank.Own(capture.table_VD[words_U], _bias(capture)[words_U])
    ranks = _powers(hidden_ND.shape[1])
    return lowrank.section({capture.name: lowrank.cut(hidden_ND, labels_N, ranks, own)})


def _argmax(capture, asked):
    """All words of a small vocabulary, some at even distances of a large one."""
    del asked
    table = capture.table_VD, capture.bias_V
    vocab, dim = capture.table_VD.shape
    words = np.linspace(0, vocab - 1, min(vocab, _WORDS)).astype(int)
    some = (dim // 4, dim // 2, dim) if dim <= _PROGRAMMES else (4,)
    sizes = sorted({size for size in (1, 2, *some) if 0 < size < vocab})
    return argmax.section(
        {capture.name: argmax.reach(*table, words)},
        {capture.name: argmax.top_sets(*table, sizes=sizes, trials=5)},
    )


def _ngram(capture, asked):
    """Up to twice the model's width, unless told otherwise."""
    if capture.ids is None:
        return None
    vocab, dim = capture.table_VD.shape
    table = ngram.next_word(capture.ids, vocab, asked.order)
    dimensions = min(asked.dimensions or 2 * dim, *table.matrix_CV.shape)
    title = f"text in tokens of {capture.name}"
    errors = {title: ngram.w_error(table.matrix_CV, dimensions)}
    return ngram.section(errors, {title: {capture.name: dim}})


def _attention(capture, asked):
    del asked
    if capture.logits_LWHS is None:
        return None
    entering = capture.states[: len(capture.logits_LWHS)]
    found = attention_layers.measure(capture.logits_LWHS, entering)
    return attention_layers.section({capture.name: found})


def _by_position(capture, precision="float32") -> Iterator[np.ndarray]:
    """log P in blocks of positions."""
    hidden_ND, table_VD, bias_V = _head(capture, precision)
    for start in range(0, len(hidden_ND), _BLOCK):
        logits_CV = hidden_ND[start : start + _BLOCK] @ table_VD.T + bias_V[None]
        yield special.log_softmax(logits_CV, axis=1)


def _by_word(capture, precision) -> Iterator[np.ndarray]:
    """The transpose of log P in blocks of words."""
    hidden_ND, table_VD, bias_V = _head(capture, precision)
    lse_N = np.concatenate(
        [
            special.logsumexp(hidden_CD @ table_VD.T + bias_V[None], axis=1)
            for hidden_CD in np.split(hidden_ND, range(_BLOCK, len(hidden_ND), _BLOCK))
        ]
    )
    for start in range(0, len(table_VD), _BLOCK):
        stop = start + _BLOCK
        logits_CN = table_VD[start:stop] @ hidden_ND.T + bias_V[start:stop, None]
        yield logits_CN - lse_N[None]


def _head(capture, precision):
    given = capture.states[-1], capture.table_VD, _bias(capture)
    return [np.asarray(one, precision) for one in given]


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
    bias_V, labels_N = capture.bias_V, capture.labels_N
    if bias_V is not None and np.shape(bias_V) != table_VD.shape[:1]:
        raise ValueError(f"bias {np.shape(bias_V)} must be [V] = {table_VD.shape[:1]}.")
    for name, array in (("hidden", states[-1:]), ("table", table_VD), ("bias", bias_V)):
        if array is not None and not np.all(
            np.isfinite(arrays_lib.real(name, array, None))
        ):
            raise ValueError(f"{name} has entries that are not finite.")
    if labels_N is not None:
        if labels_N.shape != states[-1].shape[:1]:
            raise ValueError(f"labels {labels_N.shape} must be [N] as hidden {shapes}.")
        vocab_lib.check_ids("labels", labels_N, len(table_VD))


# By default all but the one that trains.
BARE = ("rank", "saturation", "gradient")  # of arrays that no one says more about
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
