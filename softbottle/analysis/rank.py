"""Numerical rank of a log-probability matrix, judged by its own precision.

    rank = #{ i : sigma_i > tol },   tol = 1/2 sqrt(m + n + 1) sigma_1 eps,

the rule of Press et al. for an m x n matrix whose entries carry a relative error of
eps. The eps must be that of the arithmetic that produced the entries: float32
log-probabilities judged with the eps of float64 have full rank, always.
"""

from typing import NamedTuple

import numpy as np


class Spectrum(NamedTuple):
    """Singular values in descending order, and the rank they amount to."""

    sigma: np.ndarray
    tolerance: float
    rank: int


def spectrum(matrix: np.ndarray, precision: np.dtype | type) -> Spectrum:
    """Singular values and numerical rank of a matrix.

    Args:
        matrix: two axes, finite.
        precision: the dtype in which the entries were computed, whatever holds them
            now.

    Raises:
        ValueError: if the matrix is not two-dimensional and finite.
    """
    matrix = np.asarray(matrix, np.float64)
    if matrix.ndim != 2 or not np.all(np.isfinite(matrix)):
        raise ValueError(
            f"the matrix must be finite with two axes, got the shape {matrix.shape} "
            f"with {np.size(matrix) - np.isfinite(matrix).sum()} entries not finite."
        )
    sigma = np.linalg.svd(matrix, compute_uv=False)
    scale = 0.5 * np.sqrt(sum(matrix.shape) + 1)
    tolerance = float(scale * sigma[0] * np.finfo(precision).eps)
    return Spectrum(sigma, tolerance, int((sigma > tolerance).sum()))


def softmax_bound(context_dim: int, bias: bool = True) -> int:
    """The largest rank a softmax of this width can give its log-probabilities.

    log softmax(H W' + 1 b') = H W' + 1 b' - s 1': d from the product, one for the
    normaliser, and one more for a bias.
    """
    return context_dim + (2 if bias else 1)
