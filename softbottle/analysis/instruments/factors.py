"""Singular values of a tall matrix that comes in blocks of rows, in float64.

    Gram       G = sum of block' block; sigma are the roots of its eigenvalues, and are
               lost to rounding below about 1.5e-8 sigma_1
    Triangle   R <- qr([R; block]); sigma are those of R, at a few times the cost

Either is computed where the blocks are: by NumPy on a host, by jax on an accelerator.

Axes: C rows of a block, R rows that wait.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Block = np.ndarray | jax.Array


def library(array: Block) -> Any:
    """jax.numpy for an array on an accelerator; else NumPy.

    On a host NumPy's products of a matrix with its own transpose cost half of jax's.
    """
    if isinstance(array, np.ndarray):
        return np
    return np if all(d.platform == "cpu" for d in array.devices()) else jnp


class Gram:
    """Outer products summed; singular values are roots of the sum's eigenvalues.

    Rows wait until there are as many as columns: of fewer, the products between rows
    make the smaller matrix.
    """

    def __init__(self) -> None:
        self._waiting: list[Block] = []
        self._rows = 0
        self._gram_VV: Any = None

    def add(self, block_CV: Block) -> None:
        """Take in some rows."""
        self._waiting.append(block_CV)
        self._rows += len(block_CV)
        if self._rows >= block_CV.shape[1]:
            for waiting_CV in self._waiting:
                part_VV = waiting_CV.T @ waiting_CV
                if self._gram_VV is None:
                    self._gram_VV = part_VV
                else:
                    self._gram_VV += part_VV
            self._waiting = []

    def sigma(self) -> np.ndarray:
        """The singular values in descending order."""
        gram = self._gram_VV
        if gram is None:
            rows_RV = library(self._waiting[0]).concatenate(self._waiting)
            gram = rows_RV @ rows_RV.T
        square = np.asarray(library(gram).linalg.eigvalsh(gram))[::-1]
        return np.sqrt(np.maximum(square, 0.0))


class Triangle:
    """The R of a QR factorisation; rows wait until there are as many as columns."""

    def __init__(self) -> None:
        self._waiting: list[Block] = []
        self._rows = 0

    def add(self, block_CV: Block) -> None:
        """Take in some rows."""
        self._waiting.append(block_CV)
        self._rows += len(block_CV)
        if self._rows >= 2 * block_CV.shape[1]:
            self._reduce()

    def sigma(self) -> np.ndarray:
        """The singular values in descending order."""
        self._reduce()
        return np.linalg.svd(np.asarray(self._waiting[0]), compute_uv=False)

    def _reduce(self):
        xp = library(self._waiting[0])
        self._waiting = [xp.linalg.qr(xp.concatenate(self._waiting), mode="r")]
        self._rows = len(self._waiting[0])
