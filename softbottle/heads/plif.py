"""PLIF: P(v) proportional to exp g(z_v), g a learned piecewise-linear increasing map.

The slope of segment n is softplus(w_n) > 0. Ganea et al. use 100,000 segments on
[-20, 20]; beyond the outer knots the outer segments go on.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.heads import base, checks, contexts
from softbottle.heads.mos import PlainOrMixed
from softbottle.ops.mixture.activations import (
    Activation,
    piecewise,
    piecewise_even,
    segments,
)


@dataclasses.dataclass(frozen=True, repr=False)
class PiecewiseLinear(PlainOrMixed):
    """A learned piecewise-linear log-activation, plain or mixed.

    Attributes:
        knots: the number of equal segments of [-span, span], or the increasing
            positions of the knots themselves.
        span: read only when `knots` is a number.
        components: K of a mixture; None for a single component without projection.
        context: how a mixture's contexts are made, one of contexts.KINDS.
    """

    name: ClassVar[str] = "plif"
    knots: int | Sequence[float] = 100_000
    span: float = 20.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        object.__setattr__(self, "span", checks.number("span", self.span))
        if not isinstance(self.knots, int):
            _check_positions(self.knots)
            knots = tuple(np.asarray(self.knots, np.float64).tolist())
            object.__setattr__(self, "knots", knots)
        elif self.knots < 2 or self.span <= 0:
            raise ValueError(
                f"knots must be >= 2 and span positive, got {self.knots} and "
                f"{self.span!r}."
            )

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> base.Params:
        """`slope_N` beside a mixture's; see `Head.init`."""
        slope_key, latent_key = jax.random.split(key)
        # softplus(log(e - 1)) = 1: the map starts as the identity with noise.
        noise_N = jax.random.normal(slope_key, (len(self._positions()) - 1,))
        params = {"slope_N": math.log(math.e - 1) + noise_N}
        return params | super().init(latent_key, hidden_dim, context_dim)

    def activation(self, params: base.Params) -> Activation:
        """Piecewise linear, with the learned slopes; see `Head.activation`."""
        slopes_N = jax.nn.softplus(params["slope_N"])
        knots_N1 = jnp.asarray(self._positions(), slopes_N.dtype)
        apply = piecewise_even if isinstance(self.knots, int) else piecewise
        return Activation(apply, params=segments(knots_N1, slopes_N))

    def _positions(self):
        if isinstance(self.knots, int):
            return np.linspace(-self.span, self.span, self.knots + 1)
        return np.array(self.knots)


@checks.factory
def plif(
    knots: int | Sequence[float],
    span: float = 20.0,
    components: int | None = None,
    context: str = contexts.DEFAULT,
) -> PiecewiseLinear:
    """A learned piecewise-linear log-activation, plain or mixed.

    Args:
        knots: the number of equal segments of [-span, span], or the increasing
            positions of the knots themselves.
        span: read only when `knots` is a number.
        components: K of a mixture; None for a single component without projection.
        context: of a mixture, as of `mos`.

    Raises:
        ValueError: if the knots are fewer than two, not finite or out of order, if
            `span` or `components` is not positive, or there is no such kind of context.
    """
    return PiecewiseLinear(knots, span, components=components, context=context)


def _check_positions(knots):
    try:
        positions = np.asarray(knots, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"knots must be a number of segments or positions, got {knots!r}."
        ) from None
    if positions.ndim != 1 or len(positions) < 2:
        raise ValueError(f"knots must be at least two positions, got {knots!r}.")
    if not np.all(np.isfinite(positions)) or not np.all(np.diff(positions) > 0):
        raise ValueError(f"knots must be finite and increasing, got {knots!r}.")
