"""Dropout as masks: pure functions of a key, to be multiplied on by the caller.

A mask is Bernoulli(1 - rate) / (1 - rate), so its mean is 1 and nothing is rescaled
in evaluation. A rate of 0 gives None, which `masked` takes as "leave it alone".
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rates(NamedTuple):
    """Dropout rates of a backbone; all of them 0 in evaluation."""

    input: float = 0.0  # embedded tokens
    hidden: float = 0.0  # between layers
    output: float = 0.0  # last layer
    recurrent: float = 0.0  # hidden-to-hidden weights


def elements(key: jax.Array, rate: float, *shape: int) -> jax.Array | None:
    """A mask with a draw for every element; weight drop, residual dropout."""
    if rate == 0:
        return None
    keep = jax.random.bernoulli(key, 1 - rate, shape)
    return keep.astype(jnp.float32) / (1 - rate)


def locked(key: jax.Array, rate: float, rows: int, dim: int) -> jax.Array | None:
    """A mask [B, 1, D]: one draw a row and unit, the same at every position."""
    return elements(key, rate, rows, 1, dim)


def table_rows(key: jax.Array, rate: float, vocab: int) -> jax.Array | None:
    """A mask [V, 1] that drops whole words wherever they stand in the batch."""
    return elements(key, rate, vocab, 1)


def masked(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The product in the dtype of `values`, or `values` where there is no mask."""
    return values if mask is None else values * mask.astype(values.dtype)
