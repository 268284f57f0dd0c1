"""Pointwise log-activations g, so that a head is P(v) = exp g(z_v) / sum_w exp g(z_w).

    softmax      g(z) = z
    sigsoftmax   g(z) = z + log sigmoid(z) = 2z - softplus(z)
    GSS          g(z) = slope (z - center) + center - (slope - 1) softplus(z - center)
    PLIF         g(z) = piecewise linear and increasing, with learned slopes

An activation is a module-level function `apply(theta, z)` beside the arrays `theta` it
depends on. The function is static and the arrays are differentiable inputs, so one
fused operation serves every family.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Activation(NamedTuple):
    """A log-activation and what it depends on."""

    apply: Callable[[Any, jax.Array], jax.Array]
    theta: Any


class Segments(NamedTuple):
    """A piecewise-linear map by its left ends: values, slopes and positions [N]."""

    values_N: jax.Array
    slopes_N: jax.Array
    positions_N: jax.Array


def identity(theta: tuple, z: jax.Array) -> jax.Array:
    """g(z) = z."""
    del theta
    return z


def add_log_sigmoid(theta: tuple, z: jax.Array) -> jax.Array:
    """g(z) = z + log sigmoid(z)."""
    del theta
    return z + jax.nn.log_sigmoid(z)


def generalised(theta: tuple[jax.Array, jax.Array], z: jax.Array) -> jax.Array:
    """g(z) = slope (z - c) + c - (slope - 1) softplus(z - c)."""
    center, slope = (jnp.asarray(value, z.dtype) for value in theta)
    shifted = z - center
    return slope * shifted + center - (slope - 1) * jax.nn.softplus(shifted)


def piecewise_even(theta: Segments, z: jax.Array) -> jax.Array:
    """A piecewise-linear g with segments of one length: the index is a division."""
    starts_N = theta.positions_N
    step = (starts_N[-1] - starts_N[0]) / (len(starts_N) - 1)
    index = jnp.floor((z - theta.positions_N[0]) / step)
    return _interpolate(theta, z, jnp.clip(index, 0, len(theta.values_N) - 1))


def piecewise(theta: Segments, z: jax.Array) -> jax.Array:
    """A piecewise-linear g with segments of any length: the index is a search."""
    index = jnp.searchsorted(theta.positions_N, z, side="right") - 1
    return _interpolate(theta, z, jnp.clip(index, 0, len(theta.values_N) - 1))


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


SOFTMAX = Activation(identity, ())
SIGSOFTMAX = Activation(add_log_sigmoid, ())
