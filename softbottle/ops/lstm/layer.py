"""One LSTM layer: its parameters, its state, and how both are padded.

A layer may be padded with units: zeros for the weights, biases and states of a padded
unit give it c = h = 0 for ever, and no weight reads it.

Axes: I width of a layer's inputs, H its units, G = 4 H gates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Weights(NamedTuple):
    """Parameters of one layer; G = 4 H holds the gates i, f, g, o in this order."""

    input_IG: jax.Array
    recurrent_HG: jax.Array
    input_bias_G: jax.Array
    recurrent_bias_G: jax.Array


class Carry(NamedTuple):
    """What one layer hands from a position to the next."""

    hidden_BH: jax.Array
    cell_BH: jax.Array


def sizes_of(layers: Sequence[Weights]) -> list[int]:
    """Units of each layer."""
    return [weights.recurrent_HG.shape[0] for weights in layers]


def biases_of(layers: Sequence[Weights]) -> list[jax.Array]:
    """The sum of both biases [G], for each layer."""
    return [weights.input_bias_G + weights.recurrent_bias_G for weights in layers]


def masked(outputs_SBH: jax.Array, mask_BH: jax.Array) -> jax.Array:
    """What the next layer reads; no gradient flows to the mask."""
    mask_BH = lax.stop_gradient(mask_BH).astype(outputs_SBH.dtype)
    return outputs_SBH * mask_BH[None]


def widen(weight_IG: jax.Array, inputs: int, width: int) -> jax.Array:
    """Pad the rows to `inputs` and every gate to `width`."""
    size = weight_IG.shape[1] // 4
    padding = ((0, inputs - weight_IG.shape[0]), (0, 0), (0, width - size))
    return jnp.pad(weight_IG.reshape(-1, 4, size), padding).reshape(inputs, 4 * width)


def pad_last(values: jax.Array, width: int) -> jax.Array:
    """Pad the last axis, that of the units."""
    padding = [(0, 0)] * (values.ndim - 1)
    return jnp.pad(values, (*padding, (0, width - values.shape[-1])))


def stack_wide(values: Sequence[jax.Array], width: int) -> jax.Array:
    """Values [B, H] of layers, padded and stacked: [L, B, width]."""
    return jnp.stack([pad_last(values_BH, width) for values_BH in values])


def product(
    axes: str, dtype: jax.typing.DTypeLike, left: jax.Array, right: jax.Array
) -> jax.Array:
    """An einsum of `dtype` operands, summed in float32 or wider."""
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.einsum(
        axes, left.astype(dtype), right.astype(dtype), preferred_element_type=wide
    )
