"""Pointwise log-activations g, so that a head is P(v) = exp g(z_v) / sum_w exp g(z_w).

    softmax      g(z) = z, or z over a temperature
    sigsoftmax   g(z) = z + log sigmoid(z) = 2z - softplus(z)
    GSS          g(z) = slope (z - center) + center - (slope - 1) softplus(z - center)
    PLIF         g(z) = piecewise linear and increasing, with learned slopes

An activation is a module-level function `apply(theta, z)` beside the numbers `theta` it
depends on. The function is static and learned numbers are differentiable inputs, so one
fused operation serves every family.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
# The logit of a row that is no word: finite, so that g of it is finite.
DEAD = -1e30

Slope = jax.Array | float | None
Base2 = Callable[[tuple, jax.Array, jax.Array | float], tuple[jax.Array, Slope]]


class Activation(NamedTuple):
    """A log-activation g and what it depends on.

    g increases, and exp(g(z)) is 0 at z = DEAD and at -inf.

    Attributes:
        apply: (theta, z) -> g(z), elementwise; theta is the constants, then the params.
        constants: fixed numbers, which need no gradient.
        params: learned arrays.
        base2: (constants, z unit log2(e), r log2(e)) -> ((g(z) - r) log2(e), g'(z) /
            slope_unit), g' None where it is 1: what a GPU kernel computes, whose
            hardware has powers of two. None if no such form is known; then plain XLA
            computes the loss.
        unit: the unit of z there. The kernel multiplies by log2(e) in any case, and by
            a factor of g's along with it.
        slope_unit: the unit of g' there: a factor that each row of a gradient has
            instead, along with others.
        bound: the largest |g(z)| of a word; None if there is none.
    """

    apply: Callable[[tuple, jax.Array], jax.Array]
    constants: tuple[float, ...] = ()
    params: tuple[jax.Array, ...] = ()
    base2: Base2 | None = None
    unit: float = 1.0
    slope_unit: float = 1.0
    bound: float | None = None

    @property
    def theta(self) -> tuple:
        """What `apply` reads: the constants as Python floats, then the params."""
        return (*map(float, self.constants), *self.params)


class Segments(NamedTuple):
    """A piecewise-linear map by its left ends: values, slopes and positions [N]."""

    values_N: jax.Array
    slopes_N: jax.Array
    positions_N: jax.Array


def identity(theta: tuple, z: jax.Array) -> jax.Array:
    """g(z) = z."""
    del theta
    return z


def scaled(theta: tuple, z: jax.Array) -> jax.Array:
    """g(z) = factor z."""
    (factor,) = theta
    # One multiplication of DEAD may be rounded and another, fused with a sum, may not:
    # where a shard has no word, the difference would be 1e22 and not 0.
    return jnp.where(z < DEAD / 2, z, jnp.asarray(factor, z.dtype) * z)


def add_log_sigmoid(theta: tuple, z: jax.Array) -> jax.Array:
    """g(z) = z + log sigmoid(z)."""
    del theta
    return z + jax.nn.log_sigmoid(z)


def generalized(theta: tuple[jax.Array, jax.Array], z: jax.Array) -> jax.Array:
    """g(z) = slope (z - c) + c - (slope - 1) softplus(z - c)."""
    center, slope = (jnp.asarray(value, z.dtype) for value in theta)
    shifted = z - center
    return slope * shifted + center - (slope - 1) * jax.nn.softplus(shifted)


def piecewise_even(theta: tuple, z: jax.Array) -> jax.Array:
    """A piecewise-linear g with segments of one length: the index is a division."""
    _, _, starts_N = theta
    step = (starts_N[-1] - starts_N[0]) / (len(starts_N) - 1)
    index = jnp.floor((z - starts_N[0]) / step)
    return _interpolate(theta, z, jnp.clip(index, 0, len(starts_N) - 1))


def piecewise(theta: tuple, z: jax.Array) -> jax.Array:
    """A piecewise-linear g with segments of any length: the index is a search."""
    _, _, starts_N = theta
    index = jnp.searchsorted(starts_N, z, side="right") - 1
    return _interpolate(theta, z, jnp.clip(index, 0, len(starts_N) - 1))


def segments(knots_N1: jax.Array, slopes_N: jax.Array) -> Segments:
    """The increasing map with these knots and slopes that is 0 at the middle knot.

    Beyond the outer knots the first and the last segment go on, so g is defined and
    increasing on the whole line.
    """
    rises_N = slopes_N * jnp.diff(knots_N1)
    values_N1 = jnp.concatenate([jnp.zeros_like(rises_N[:1]), jnp.cumsum(rises_N)])
    middle = values_N1[len(rises_N) // 2]
    return Segments((values_N1 - middle)[:-1], slopes_N, knots_N1[:-1])


def _interpolate(theta, z, index):
    index = jax.lax.stop_gradient(index).astype(jnp.int32)
    values, slopes, starts = (part[index].astype(z.dtype) for part in theta)
    return values + _rise(slopes, z - starts)


@jax.custom_jvp
def _rise(slopes, distance):
    return slopes * distance


@_rise.defjvp
def _rise_jvp(inputs, tangents):
    """The product rule, with a derivative of 0 by the slope where z is -inf.

    A word whose bias is -inf has probability 0, so its cotangent is 0; times the
    infinite distance from its knot it would be NaN.
    """
    (slopes, distance), (slopes_dot, distance_dot) = inputs, tangents
    finite = jnp.where(jnp.isneginf(distance), 0.0, distance)
    return _rise(slopes, distance), slopes_dot * finite + slopes * distance_dot


def identity_base2(
    theta: tuple, z2: jax.Array, ref2: jax.Array | float
) -> tuple[jax.Array, None]:
    """g = z; g' = 1 needs no product."""
    del theta
    return z2 - ref2, None


def scaled_base2(
    theta: tuple[float], z2: jax.Array, ref2: jax.Array | float
) -> tuple[jax.Array, float]:
    """g = factor z, and g' = factor."""
    (factor,) = theta
    return jnp.where(z2 < DEAD / 2, z2, factor * z2) - ref2, factor


def add_log_sigmoid_base2(
    theta: tuple, z2: jax.Array, ref2: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """g = z - log(1 + exp(-z)) and g' = 2 - sigmoid(z)."""
    del theta
    softplus, sigmoid = _softplus_and_sigmoid(z2)
    return 2 * z2 - softplus - ref2, 2 - sigmoid


def generalized_base2(
    theta: tuple[float, float], z2: jax.Array, ref2: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """g = slope (z - c) + c - (slope - 1) softplus(z - c)."""
    center, slope = theta
    softplus, sigmoid = _softplus_and_sigmoid(z2 - center * LOG2_E)
    g2 = slope * z2 + (1 - slope) * center * LOG2_E - (slope - 1) * softplus
    return g2 - ref2, slope - (slope - 1) * sigmoid


def _softplus_and_sigmoid(z2):
    small = jnp.exp2(-jnp.abs(z2))
    log = jnp.log2(1 + small)
    # A power of two costs one instruction, a division many.
    inverse = jnp.exp2(-log)
    softplus = jnp.maximum(z2, 0.0) + log
    return softplus, jnp.where(z2 >= 0, inverse, small * inverse)


SOFTMAX = Activation(identity, base2=identity_base2)
SIGSOFTMAX = Activation(add_log_sigmoid, base2=add_log_sigmoid_base2)


def divided(temperature: float) -> Activation:
    """g(z) = z / temperature."""
    return Activation(scaled, (1 / temperature,), base2=scaled_base2)
