"""PLIF: P(v) proportional to exp g(z_v), g a learned piecewise-linear increasing map.

The slope of segment n is softplus(w_n) > 0. Ganea et al. use 100,000 segments on
[-20, 20]; beyond the outer knots the outer segments go on.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.heads import base
from softbottle.heads.mos import init_latent, mix_latent
from softbottle.ops.mixture.activations import (
    Activation,
    piecewise,
    piecewise_even,
    segments,
)


def plif(
    knots: int | Sequence[float], span: float = 20.0, components: int | None = None
) -> base.Head:
    """A learned piecewise-linear log-activation, plain or mixed.

    Args:
        knots: the number of equal segments of [-span, span], or the increasing
            positions of the knots themselves.
        span: read only when `knots` is a number.
        components: K of a mixture; None for a single component without projection.

    Raises:
        ValueError: if the knots are fewer than two, not finite or out of order, or if
            `span` or `components` is not positive.
    """
    positions = _positions(knots, span)
    apply = piecewise_even if isinstance(knots, int) else piecewise
    if components is not None:
        base.check_components(components)

    def init(key, hidden_dim, context_dim):
        slope_key, latent_key = jax.random.split(key)
        # softplus(log(e - 1)) = 1: the map starts as the identity with noise.
        noise_N = jax.random.normal(slope_key, (len(positions) - 1,))
        params = {"slope_N": math.log(math.e - 1) + noise_N}
        if components is None:
            base.check_same_width("plif", hidden_dim, context_dim)
            return params
        return params | init_latent(latent_key, components, hidden_dim, context_dim)

    def mix(params, hidden_TD, latent_mask=None):
        if components is None:
            return base.single(hidden_TD, latent_mask)
        return mix_latent(params, hidden_TD, latent_mask)

    def activation(params):
        slopes_N = jax.nn.softplus(params["slope_N"])
        knots_N1 = jnp.asarray(positions, slopes_N.dtype)
        return Activation(apply, segments(knots_N1, slopes_N))

    return base.mixture_head(init, mix, activation)


def _positions(knots, span):
    if isinstance(knots, int):
        if knots < 2 or not 0 < span < math.inf:
            raise ValueError(
                f"knots must be >= 2 and span positive, got {knots} and {span!r}."
            )
        return np.linspace(-span, span, knots + 1)
    positions = np.asarray(knots, np.float64)
    if positions.ndim != 1 or len(positions) < 2:
        raise ValueError(f"knots must be at least two positions, got {knots!r}.")
    if not np.all(np.isfinite(positions)) or not np.all(np.diff(positions) > 0):
        raise ValueError(f"knots must be finite and increasing, got {knots!r}.")
    return positions
