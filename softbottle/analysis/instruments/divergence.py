"""How the predictions of two models differ on the tokens of one text.

With p and q the distributions of the next token that the models a and b give,

    KL(a||b)  = sum_v p_v log(p_v / q_v), and KL(b||a) with p and q exchanged
    JS        = KL(a||m) / 2 + KL(b||m) / 2,  m = (p + q) / 2, at most log 2
    TV        = 1/2 sum_v |p_v - q_v|, at most 1
    overlap   = |top_k(p) and top_k(q)| / k; k = 1 asks whether the same word is first
    reach     = whether one model's first word is among the other's k first

at each position, and the losses -log p_y and -log q_y of the token y that came, with
their correlation. All are averaged over the text, and by the frequency decile of y.

Both log P pass by in blocks and are normalized again in float64: of the rounding of
float32 no divergence becomes negative.

Axes: N deciles, the whole text last; M quantities; J numbers k of words; X pieces of a
block; B draws and W windows of the bootstrap.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy import special

from softbottle.analysis import bootstrap
from softbottle.analysis.bootstrap import Estimate
from softbottle.analysis.capture import Capture, Tokens, joined, present
from softbottle.analysis.instruments import predictions
from softbottle.analysis.settings import Precision
from softbottle.data import frequency, vocab

COUNTS = (1, 2, 5, 10, 20, 50)  # k of the sets of first words
_PIECE = 2**22  # entries of log P that are held in float64 at a time
FORWARD, BACKWARD = "KL(a||b)", "KL(b||a)"
JS, TV = "Jensen-Shannon", "total variation"
LOSS_A, LOSS_B, AHEAD = "loss of a", "loss of b", "loss of a less loss of b"
FIRST, OVERLAP = "same first word", "{} first words in common"
A_IN_B = "first word of a among the {} first of b"
B_IN_A = "first word of b among the {} first of a"
CORRELATION = "correlation of losses"
# All others are shares.
_BOUNDS = {
    **dict.fromkeys((FORWARD, BACKWARD, LOSS_A, LOSS_B), (0.0, np.inf)),
    AHEAD: (-np.inf, np.inf),
    JS: (0.0, float(np.log(2))),
    CORRELATION: (-1.0, 1.0),
}


class Positions(NamedTuple):
    """What is measured at each position, in the order of the text.

    Attributes:
        labels_T: the tokens that came.
        forward_T: KL(a||b), in nats.
        backward_T: KL(b||a).
        shannon_T: JS.
        variation_T: TV.
        loss_a_T: of a, in nats.
        loss_b_T: of b.
        counts_J: the k that are tried, below the vocabulary.
        overlap_TJ: the share that the sets of the k first words have in common.
        a_in_b_TJ: whether the first word of a is among the k first of b.
        b_in_a_TJ: whether the first word of b is among the k first of a.
    """

    labels_T: np.ndarray
    forward_T: np.ndarray
    backward_T: np.ndarray
    shannon_T: np.ndarray
    variation_T: np.ndarray
    loss_a_T: np.ndarray
    loss_b_T: np.ndarray
    counts_J: np.ndarray
    overlap_TJ: np.ndarray
    a_in_b_TJ: np.ndarray
    b_in_a_TJ: np.ndarray


class Comparison(NamedTuple):
    """Means over the text and by decile, each with its interval.

    Attributes:
        quantities: M names, the correlation of the losses the last.
        value_NM: by decile of frequency, most frequent first, then of the whole text.
        low_NM: the lower ends of the intervals.
        high_NM: the upper ends.
        tokens_N: positions of each.
        positions: what the means are of.
    """

    quantities: tuple[str, ...]
    value_NM: np.ndarray
    low_NM: np.ndarray
    high_NM: np.ndarray
    tokens_N: np.ndarray
    positions: Positions

    def whole(self, quantity: str) -> Estimate:
        """A quantity over the whole text."""
        at = self.quantities.index(quantity)
        parts = (self.value_NM, self.low_NM, self.high_NM)
        return Estimate(*(float(part_NM[-1, at]) for part_NM in parts))


def check(a: Capture, b: Capture) -> int:
    """How many tokens two captures have in common, from the first on.

    Raises:
        ValueError: if their vocabularies or their tokens differ, with the first
            difference, or no labels are known.
    """
    sizes = [len(present("table_VE", model.table_VE)) for model in (a, b)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{a.name} has a vocabulary of {sizes[0]:,} and {b.name} one of "
            f"{sizes[1]:,}; only models of one vocabulary can be compared."
        )
    if a.words is not None and b.words is not None:
        at = _first_difference(np.asarray(a.words), np.asarray(b.words))
        if at is not None:
            raise ValueError(
                f"{a.name} and {b.name} have {sizes[0]:,} words each, which differ, "
                f"first word {at:,}: {_shown(a, at)} and {_shown(b, at)}; only models "
                "of one vocabulary can be compared."
            )
    labels = [
        present("labels", joined(present("tokens", model.tokens)).labels_T)
        for model in (a, b)
    ]
    common = min(map(len, labels))
    at = _first_difference(labels[0][:common], labels[1][:common])
    if at is not None:
        tokens = [
            _shown(model, label_T[at])
            for model, label_T in zip((a, b), labels, strict=True)
        ]
        raise ValueError(
            f"{a.name} and {b.name} read different tokens, first at position {at:,}: "
            f"{tokens[0]} and {tokens[1]}; give both one text, --text."
        )
    return common


def measure(a: Capture, b: Capture, precision: Precision = "float32") -> Positions:
    """Compare two models at each position that both have read.

    Raises:
        ValueError: as `check`.
    """
    common = check(a, b)
    a, b = (_first(model, common) for model in (a, b))
    labels_T = present("labels", joined(present("tokens", a.tokens)).labels_T)
    size = len(present("table_VE", a.table_VE))
    counts_J = np.array([count for count in COUNTS if count < size])
    rows, start = [], 0
    for log_p_XV, log_q_XV in _pieces(a, b, precision):
        labels_X = labels_T[start : start + len(log_p_XV)]
        rows.append(_compared(log_p_XV, log_q_XV, labels_X, counts_J))
        start += len(log_p_XV)
    forward, backward, shannon, variation, loss_a, loss_b, overlap, ab, ba = (
        np.concatenate(part) for part in zip(*rows, strict=True)
    )
    divergences = forward, backward, shannon, variation
    sets = overlap, ab, ba
    return Positions(labels_T, *divergences, loss_a, loss_b, counts_J, *sets)


def compare(positions: Positions, decile_V: np.ndarray) -> Comparison:
    """Means, correlations and their intervals, by decile and over the text.

    Args:
        positions: of `measure`.
        decile_V: the decile of each word, of `frequency.deciles`.
    """
    named = _named(positions)
    quantities = (*named, CORRELATION)
    a_T, b_T = positions.loss_a_T, positions.loss_b_T
    # Centered, or their squares lose digits to their means.
    x_T, y_T = a_T - a_T.mean(), b_T - b_T.mean()
    value_TM = np.stack([*named.values(), x_T, y_T, x_T**2, y_T**2, x_T * y_T], axis=1)
    decile_T = decile_V[positions.labels_T]
    inside_TN = np.arange(frequency.DECILES)[None] == decile_T[:, None]
    inside_TN = np.concatenate([inside_TN, np.ones_like(inside_TN[:, :1])], axis=1)
    window_T = bootstrap.windows(len(decile_T))
    count_WN = bootstrap.sums(inside_TN.astype(np.float64), window_T)
    sum_WNM = np.stack(
        [
            bootstrap.sums(inside_T[:, None] * value_TM, window_T)
            for inside_T in inside_TN.T
        ],
        axis=1,
    )

    def means(weight_BW):
        count_BN = weight_BW @ count_WN
        count_BN = np.where(count_BN > 0, count_BN, np.nan)
        mean_BNM = np.einsum("bw,wnm->bnm", weight_BW, sum_WNM) / count_BN[..., None]
        *others, x, y, xx, yy, xy = np.moveaxis(mean_BNM, -1, 0)
        spread = np.maximum((xx - x * x) * (yy - y * y), 0.0)
        correlation_BN = (xy - x * y) / np.sqrt(np.where(spread > 0, spread, np.nan))
        return np.stack([*others, correlation_BN], axis=-1)

    ends = bootstrap.interval(means, len(count_WN))
    bounds = np.array([_BOUNDS.get(name, (0.0, 1.0)) for name in quantities]).T
    return Comparison(
        quantities,
        means(np.ones((1, len(count_WN))))[0],
        np.clip(ends.low, *bounds),
        np.clip(ends.high, *bounds),
        inside_TN.sum(axis=0),
        positions,
    )


def _named(positions):
    """The quantities that have a mean, by name."""
    named = {
        FORWARD: positions.forward_T,
        BACKWARD: positions.backward_T,
        JS: positions.shannon_T,
        TV: positions.variation_T,
        LOSS_A: positions.loss_a_T,
        LOSS_B: positions.loss_b_T,
        AHEAD: positions.loss_a_T - positions.loss_b_T,
    }
    for at, count in enumerate(positions.counts_J):
        if count == 1:
            named[FIRST] = positions.overlap_TJ[:, at]
            continue
        named[OVERLAP.format(count)] = positions.overlap_TJ[:, at]
        named[A_IN_B.format(count)] = positions.a_in_b_TJ[:, at]
        named[B_IN_A.format(count)] = positions.b_in_a_TJ[:, at]
    return named


def _pieces(
    a: Capture, b: Capture, precision: Precision
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """log P of both models in float64, a few positions at a time."""
    pair = (predictions.blocks(model, precision) for model in (a, b))
    for log_p_CV, log_q_CV in zip(*pair, strict=True):
        step = max(1, _PIECE // log_p_CV.shape[1])
        for start in range(0, len(log_p_CV), step):
            piece = slice(start, start + step)
            yield log_p_CV[piece].astype(float), log_q_CV[piece].astype(float)


def _compared(log_p_XV, log_q_XV, labels_X, counts_J):
    """The fields of `Positions` from the divergences on, but for the counts."""
    log_p_XV, log_q_XV = (
        log_XV - special.logsumexp(log_XV, axis=1, keepdims=True)
        for log_XV in (log_p_XV, log_q_XV)
    )
    p_XV, q_XV = np.exp(log_p_XV), np.exp(log_q_XV)
    log_m_XV = np.logaddexp(log_p_XV, log_q_XV) - np.log(2)
    first_XJ, second_XJ = (_first_words(log_XV, counts_J) for log_XV in (p_XV, q_XV))
    same_XJJ = first_XJ[:, :, None] == second_XJ[:, None, :]
    rows_X = np.arange(len(labels_X))
    return (
        (p_XV * (log_p_XV - log_q_XV)).sum(axis=1),
        (q_XV * (log_q_XV - log_p_XV)).sum(axis=1),
        (p_XV * (log_p_XV - log_m_XV) + q_XV * (log_q_XV - log_m_XV)).sum(axis=1) / 2,
        abs(p_XV - q_XV).sum(axis=1) / 2,
        -log_p_XV[rows_X, labels_X],
        -log_q_XV[rows_X, labels_X],
        np.stack([same_XJJ[:, :k, :k].sum(axis=(1, 2)) / k for k in counts_J], axis=1),
        np.stack([same_XJJ[:, 0, :k].any(axis=1) for k in counts_J], axis=1),
        np.stack([same_XJJ[:, :k, 0].any(axis=1) for k in counts_J], axis=1),
    )


def _first_words(p_XV, counts_J):
    """The words of largest probability in their order, as many as the largest k."""
    most = counts_J[-1]
    words_XJ = np.argpartition(-p_XV, most - 1, axis=1)[:, :most]
    height_XJ = np.take_along_axis(p_XV, words_XJ, axis=1)
    order_XJ = np.lexsort((words_XJ, -height_XJ), axis=1)
    return np.take_along_axis(words_XJ, order_XJ, axis=1)


def _first(model, count):
    """The capture with the first tokens alone."""
    hidden_TD, labels_T = joined(model.tokens)
    return dataclasses.replace(
        model, tokens=[Tokens(hidden_TD[:count], labels_T[:count])]
    )


def _first_difference(one, other):
    places = np.flatnonzero(one != other)
    return int(places[0]) if len(places) else None


def _shown(model, at):
    """A word of a model's vocabulary, or its number where there are no words."""
    return str(at) if model.words is None else repr(vocab.printable(model.words[at]))
