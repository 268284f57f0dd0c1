"""Sigsoftmax and its family: P(v) proportional to exp g(z_v) with g beyond linear.

    sigsoftmax   g(z) = z + log sigmoid(z)
    GSS          g(z) = slope (z - center) + center - (slope - 1) softplus(z - center)

Because g bends, the log-probabilities leave the linear space of d + 1 dimensions that
those of a softmax fill. GSS contains softmax (slope 1) and sigsoftmax (center 0,
slope 2).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.heads import base, checks, contexts
from softbottle.heads.mos import MixtureOfSoftmaxes, PlainOrMixed
from softbottle.heads.softmax import Single
from softbottle.heads.start import log_frequencies
from softbottle.ops.mixture.activations import (
    SIGSOFTMAX,
    Activation,
    generalized,
    generalized_base2,
)


def _sigsoftmax_activation(self: base.Head, params: base.Params) -> Activation:
    """z + log sigmoid(z); see `Head.activation`."""
    del self, params
    return SIGSOFTMAX


def _sigsoftmax_start(self: base.Head, counts_V: Any) -> jax.Array:
    """Far below 0 about half the log-frequencies; see `Head.start_bias`."""
    del self
    return _unbent(log_frequencies(counts_V), center=0.0, slope=2.0)


def _unbent(level_V, center, slope):
    """The z of which g(z) are these levels, by bisection."""
    above_V = np.asarray(level_V, np.float64) - center

    def bent(z_V):
        return slope * z_V - (slope - 1) * np.logaddexp(0.0, z_V)

    # From 0 on g rises or falls by 1 to `slope` per unit.
    ends = np.stack([(above_V - bent(0.0)) / rate for rate in (1.0, slope)])
    low_V, high_V = ends.min(axis=0), ends.max(axis=0)
    for _ in range(60):
        middle_V = (low_V + high_V) / 2
        below_V = bent(middle_V) < above_V
        low_V = np.where(below_V, middle_V, low_V)
        high_V = np.where(below_V, high_V, middle_V)
    return jnp.asarray(center + (low_V + high_V) / 2, jnp.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class Sigsoftmax(Single):
    """P(v) proportional to exp(z_v) sigmoid(z_v)."""

    name: ClassVar[str] = "sigsoftmax"
    activation = _sigsoftmax_activation
    start_bias = _sigsoftmax_start


@dataclasses.dataclass(frozen=True, repr=False)
class MixtureOfSigsoftmaxes(MixtureOfSoftmaxes):
    """A mixture of `components` sigsoftmaxes.

    Attributes:
        components: K.
        context: how the contexts are made, one of contexts.KINDS.
        active: components that a token meets the table with; None is all.
        draw: whether `loss`, given a key, draws one of them.
    """

    name: ClassVar[str] = "moss"
    activation = _sigsoftmax_activation
    start_bias = _sigsoftmax_start


@dataclasses.dataclass(frozen=True, repr=False)
class GeneralizedSigsoftmax(PlainOrMixed):
    """Generalized sigsoftmax, plain or mixed.

    Attributes:
        center: where g bends.
        slope: of g far below the center; it is 1 far above, for every slope.
        components: K of a mixture; None for a single component without projection.
        context: how a mixture's contexts are made, one of contexts.KINDS.
    """

    name: ClassVar[str] = "gss"
    center: float
    slope: float

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for name in ("center", "slope"):
            value = checks.number(name, getattr(self, name))
            object.__setattr__(self, name, value)
        if self.slope <= 0:
            raise ValueError(f"slope must be positive, got {self.slope!r}.")

    def activation(self, params: base.Params) -> Activation:
        """Bent at the center; see `Head.activation`."""
        del params
        constants = (self.center, self.slope)
        return Activation(generalized, constants, base2=generalized_base2)

    def start_bias(self, counts_V: Any) -> jax.Array:
        """Of which g are the log-frequencies; see `Head.start_bias`."""
        return _unbent(log_frequencies(counts_V), self.center, self.slope)


@checks.factory
def sigsoftmax() -> Sigsoftmax:
    """Sigsoftmax: P(v) proportional to exp(z_v) sigmoid(z_v)."""
    return Sigsoftmax()


@checks.factory
def moss(
    components: int,
    context: str = contexts.DEFAULT,
    *,
    active: int | None = None,
    draw: bool = False,
) -> MixtureOfSigsoftmaxes:
    """A mixture of `components` sigsoftmaxes; arguments and errors as of `mos`."""
    return MixtureOfSigsoftmaxes(components, context=context, active=active, draw=draw)


@checks.factory
def gss(
    center: float,
    slope: float,
    components: int | None = None,
    context: str = contexts.DEFAULT,
) -> GeneralizedSigsoftmax:
    """Generalized sigsoftmax, plain or, with `components`, mixed.

    Args:
        center: where g bends.
        slope: of g far below the center; it is 1 far above, for every slope.
        components: K of a mixture; None for a single component without projection.
        context: of a mixture, as of `mos`.

    Raises:
        ValueError: if the slope is not positive (g would not be increasing),
            `components` is not a positive integer, or there is no such kind of context.
    """
    return GeneralizedSigsoftmax(center, slope, components=components, context=context)
