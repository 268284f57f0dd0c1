"""Numerical rank of a log-probability matrix, judged by its own precision.

    rank = #{ i : sigma_i > tol },   tol = 1/2 sqrt(m + n + 1) sigma_1 eps,

the rule of Press et al. for an m x n matrix whose entries carry a relative error of
eps. The eps must be that of the arithmetic that produced the entries: float32
log-probabilities judged with the eps of float64 have full rank, always. Beside it
stands the effective rank, which rounding cannot move: the smallest k with
sum_{i<=k} sigma_i^2 >= (1 - e) sum_i sigma_i^2.

A tall matrix is read in blocks of rows (factors.py). Its Gram matrix resolves sigma
down to about 1.5e-8 sigma_1: enough for the tolerance of float32 (1.8e-5 at 82,430 x
10,000) and not for that of float64 (3.4e-14), for which a QR factorisation is updated
instead.

Axes: C rows of a block.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from softbottle.analysis.capture import Capture, joined, present, real
from softbottle.analysis.instruments import factors, mixture, predictions
from softbottle.analysis.settings import Precision, Settings
from softbottle.ops.mixture import classes
from softbottle.ops.mixture.activations import SOFTMAX

PRECISIONS: tuple[Precision, ...] = ("float32", "float64")
LOSSES = (1e-3, 1e-4, 1e-5)  # of the sum of squares that an effective rank may leave


_GRAM_FLOOR = 1e-7  # some times the 1.5e-8 that its rounding is worth


class Spectrum(NamedTuple):
    """Singular values in descending order, and the rank they amount to."""

    sigma: np.ndarray
    tolerance: float
    rank: int


class Ranks(NamedTuple):
    """What a matrix read in blocks amounts to.

    Attributes:
        shape: rows and columns.
        entries: the dtype in which the entries came.
        sigma: singular values in descending order, as many as the shorter side.
        tolerances: by precision, "float32" and "float64".
        ranks: by precision; None where the Gram matrix cannot tell.
        effective: effective rank by loss.
    """

    shape: tuple[int, int]
    entries: str
    sigma: np.ndarray
    tolerances: dict[str, float]
    ranks: dict[str, int | None]
    effective: dict[float, int]

    @property
    def precision(self) -> str:
        """Of the tolerance to go by: the entries' own, if the spectrum resolves it."""
        known = self.entries in PRECISIONS and self.ranks[self.entries] is not None
        return self.entries if known else "float32"


class HeadRanks(NamedTuple):
    """A head on a text.

    Attributes:
        ranks: of its log-probabilities.
        bound: the largest rank that a softmax of its width can have, d + 2, or d + 1
            without a bias.
        kl: expected divergence between two contexts, in nats.
        mixing: None for a head of one component.
        loss: mean loss on the text, in nats per token; None without labels.
        lifted: whether a pointwise g, such as a soft-cap, or contexts by class of
            words lift the bound of a softmax that has the same table.
    """

    ranks: Ranks
    bound: int
    kl: float
    mixing: mixture.Mixing | None
    loss: float | None = None
    lifted: bool = False

    @property
    def rank(self) -> int:
        """The rank of the precision to go by."""
        return self.ranks.ranks[self.ranks.precision] or 0

    @property
    def limit(self) -> str | None:
        """What the rank is limited by before the head: "positions" or "words".

        There are then as many of them as the rank, or no more than the bound. None if
        the limit is the head's.
        """
        least = min(self.ranks.shape)
        if least > self.bound and self.rank != least:
            return None
        rows, columns = self.ranks.shape
        return "positions" if rows <= columns else "words"


def spectrum(matrix: np.ndarray, precision: np.dtype | type) -> Spectrum:
    """Singular values and numerical rank of a matrix.

    Args:
        matrix: two axes, finite.
        precision: the dtype in which the entries were computed, whatever holds them
            now.

    Raises:
        ValueError: if the matrix is not two-dimensional and finite.
    """
    matrix = real("the matrix", matrix)
    _check(matrix)
    sigma = np.linalg.svd(matrix, compute_uv=False)
    tolerance = _tolerance(matrix.shape, sigma, precision)
    return Spectrum(sigma, tolerance, int((sigma > tolerance).sum()))


def softmax_bound(context_dim: int, bias: bool = True) -> int:
    """The largest rank a softmax of this width can give its log-probabilities.

    log softmax(H W' + 1 b') = H W' + 1 b' - s 1': d from the product, one for the
    normaliser, and one more for a bias.
    """
    return context_dim + (2 if bias else 1)


def streamed(
    blocks: Iterable[factors.Block], precision: Precision = "float32"
) -> Ranks:
    """Singular values and ranks of a matrix that comes in blocks of rows.

    Args:
        blocks: arrays [any number of rows, V], finite, of one width.
        precision: the finest tolerance asked for. "float32" adds up a Gram matrix;
            "float64" factorises, at a few times the cost, and judges by both.

    Raises:
        ValueError: if a block is not a finite matrix of that width, if there is none,
            or if the precision has another name.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}.")
    rows = 0
    width: int | None = None
    dtypes: set[np.dtype] = set()
    factor: factors.Gram | factors.Triangle
    factor = factors.Gram() if precision == "float32" else factors.Triangle()
    for block in blocks:
        if width not in (None, block.shape[-1]):
            raise ValueError(f"the blocks are {width} columns wide, got {block.shape}.")
        # Not around the loop: the blocks are computed there, in their own precision.
        with jax.enable_x64(True):
            dtypes.add(block.dtype)
            block_CV = factors.library(block).asarray(block, np.float64)
            _check(block_CV)
            factor.add(block_CV)
        rows, width = rows + len(block_CV), block_CV.shape[1]
    if not rows or width is None:
        raise ValueError("there are no rows to take a rank of.")
    with jax.enable_x64(True):
        sigma = factor.sigma()[: min(rows, width)]
    shape, entries = (rows, width), str(np.result_type(*dtypes))
    tolerances: dict[str, float] = {
        name: _tolerance(shape, sigma, name) for name in PRECISIONS
    }
    ranks: dict[str, int | None] = {
        name: int((sigma > tolerances[name]).sum()) for name in PRECISIONS
    }
    if precision == "float32":
        ranks["float64"] = None
    by_loss = {loss: effective(sigma, loss) for loss in LOSSES}
    return Ranks(shape, entries, sigma, tolerances, ranks, by_loss)


def floor(ranks: Ranks) -> float:
    """The smallest share of the largest singular value that is resolved.

    Of a Gram matrix the eigenvalues below eps sigma_1^2 are rounding, and half of them
    negative: their roots would be a second cliff that no matrix has.
    """
    if ranks.ranks["float64"] is None:
        return _GRAM_FLOOR
    return len(ranks.sigma) * float(np.finfo(np.float64).eps)


def effective(sigma: np.ndarray, loss: float) -> int:
    """The smallest k with sum_{i<=k} sigma_i^2 >= (1 - loss) sum_i sigma_i^2.

    Raises:
        ValueError: unless 0 <= loss < 1.
    """
    if not 0 <= loss < 1:
        raise ValueError(f"loss must be in [0, 1), got {loss}.")
    energy = np.cumsum(np.square(np.asarray(sigma, np.float64)))
    return int(np.searchsorted(energy, (1 - loss) * energy[-1])) + 1


class PairwiseKL:
    """Expected divergence between the predictions of two contexts, in nats.

        E_{c,c'} KL(P_c || P_c') = mean_c sum_v p_cv log p_cv
                                   - sum_v (mean_c p_cv) (mean_c log p_cv),

    because c and c' are independent: the double sum over pairs is a product of means.
    All T^2 ordered pairs count, those with c = c' too, which add nothing; over the
    pairs of different positions the mean is T / (T - 1) times this.
    """

    def __init__(self) -> None:
        self._count, self._negentropy = 0, 0.0
        self._p_V = self._log_p_V = np.zeros(())

    def add(self, log_p_CV: factors.Block) -> None:
        """Take in the log-probabilities of some contexts.

        Raises:
            ValueError: if they are not finite or do not sum to one.
        """
        with jax.enable_x64(True):
            xp = factors.library(log_p_CV)
            log_p_CV = xp.asarray(log_p_CV, np.float64)
            _check(log_p_CV)
            p_CV = xp.exp(log_p_CV)
            worst = float(abs(p_CV.sum(axis=1) - 1).max())
            if worst > 1e-3:
                raise ValueError(f"probabilities sum to one, these miss it by {worst}.")
            self._negentropy += float((p_CV * log_p_CV).sum())
            self._p_V = self._p_V + np.asarray(p_CV.sum(axis=0))
            self._log_p_V = self._log_p_V + np.asarray(log_p_CV.sum(axis=0))
            self._count += len(log_p_CV)

    @property
    def value(self) -> float:
        """The mean over all that was added."""
        if not self._count:
            raise ValueError("there are no contexts to compare.")
        cross = float((self._p_V / self._count) @ (self._log_p_V / self._count))
        return self._negentropy / self._count - cross


def measure(capture: Capture, precision: Precision = "float32") -> HeadRanks:
    """Rank, divergence and mixture of the predictions along a capture's text."""
    width = present("table_VE", capture.table_VE).shape[1]
    bound = softmax_bound(width, capture.bias_V is not None)
    if capture.readout is None:
        return _of_softmax(capture, precision, bound)
    pairs, parts, losses = PairwiseKL(), [], []
    labels = [present("labels_T", block.labels_T) for block in capture.tokens or ()]

    def rows():
        blocks = predictions.mixtures(capture, precision)
        for block, labels_C in zip(blocks, labels, strict=True):
            pairs.add(block.log_p_CV)
            parts.append(tuple(map(np.asarray, block[1:])))
            losses.append(
                -np.asarray(block.log_p_CV[np.arange(len(labels_C)), labels_C])
            )
            yield block.log_p_CV

    ranks = streamed(rows(), precision)
    loss = float(np.concatenate(losses).mean(dtype=np.float64))
    log_prior_TK, log_label_TK = map(np.concatenate, zip(*parts, strict=True))
    several = log_prior_TK.shape[1] > 1
    mixed = mixture.mixing(log_prior_TK, log_label_TK) if several else None
    return HeadRanks(ranks, bound, pairs.value, mixed, loss, _lifts(capture))


def _lifts(capture):
    """Whether a head's logits are more than one product of contexts with the table."""
    head, (params, *_), _ = capture.readout
    if not head.mixes_all or head.activation(params).apply is not SOFTMAX.apply:
        return True
    mixed = jax.eval_shape(head.mix, params, capture.tokens[0].hidden_TD)
    return classes.count(mixed.context_TKE) > 1


def _of_softmax(capture, precision, bound):
    """The same where log P has a transpose that is as easily read."""
    tokens, vocab = joined(capture.tokens), len(capture.table_VE)
    count = len(tokens.hidden_TD)
    blocks = predictions.columns if count < vocab else predictions.rows
    ranks = streamed(blocks(capture, precision), precision)
    pairs, total, start = PairwiseKL(), 0.0, 0
    for log_p_CV in predictions.rows(capture):
        pairs.add(log_p_CV)
        if tokens.labels_T is not None:
            labels_C = tokens.labels_T[start : start + len(log_p_CV)]
            total -= float(np.sum(log_p_CV[np.arange(len(labels_C)), labels_C]))
            start += len(labels_C)
    ranks = ranks._replace(shape=(count, vocab))
    loss = total / start if start else None
    lifted = capture.activation.apply is not SOFTMAX.apply
    return HeadRanks(ranks, bound, pairs.value, None, loss, lifted)


def of_capture(capture: Capture, settings: Settings) -> HeadRanks:
    """`measure` as closely as the settings say."""
    return measure(capture, settings.precision)


def _tolerance(shape, sigma, precision):
    return float(0.5 * np.sqrt(sum(shape) + 1) * sigma[0] * np.finfo(precision).eps)


def _check(matrix):
    finite = int((abs(matrix) < np.inf).sum())
    if matrix.ndim != 2 or finite < matrix.size:
        raise ValueError(
            f"the matrix must be finite with two axes, got the shape {matrix.shape} "
            f"with {matrix.size - finite} entries not finite."
        )
