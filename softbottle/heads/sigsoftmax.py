"""Sigsoftmax and its family: P(v) proportional to exp g(z_v) with g beyond linear.

    sigsoftmax   g(z) = z + log sigmoid(z)
    GSS          g(z) = slope (z - center) + center - (slope - 1) softplus(z - center)

Because g bends, the log-probabilities leave the linear space of d + 1 dimensions that
those of a softmax fill. GSS contains softmax (slope 1) and sigsoftmax (center 0,
slope 2).
"""

import math

from softbottle.heads import base
from softbottle.heads.mos import mixture_of
from softbottle.heads.softmax import single_head
from softbottle.ops.mixture.activations import SIGSOFTMAX, Activation, generalised


def sigsoftmax() -> base.Head:
    """Sigsoftmax: P(v) proportional to exp(z_v) sigmoid(z_v)."""
    return single_head("sigsoftmax", _sigsoftmax)


def moss(components: int) -> base.Head:
    """A mixture of `components` sigsoftmaxes.

    Raises:
        ValueError: if `components` is not a positive integer.
    """
    return mixture_of(components, _sigsoftmax)


def gss(center: float, slope: float, components: int | None = None) -> base.Head:
    """Generalised sigsoftmax, plain or, with `components`, mixed.

    Args:
        center: where g bends.
        slope: of g far below the center; it is 1 far above, for every slope.
        components: K of a mixture; None for a single component without projection.

    Raises:
        ValueError: if the slope is not positive (g would not be increasing), or
            `components` is not a positive integer.
    """
    if not (math.isfinite(center) and math.isfinite(slope) and slope > 0):
        raise ValueError(
            f"center must be finite and slope positive, got {center!r} and {slope!r}."
        )

    def activation(params):
        del params
        return Activation(generalised, (float(center), float(slope)))

    if components is None:
        return single_head("gss", activation)
    return mixture_of(components, activation)


def _sigsoftmax(params):
    del params
    return SIGSOFTMAX
