"""Soft-capped logits: P(v) proportional to exp(cap tanh(z_v / cap)), as Gemma 2 has.

A logit is nearly itself while it is small beside the cap and never beyond it, so that
no word is more than 2 cap nats from another.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import base, checks, contexts
from softbottle.heads.mos import PlainOrMixed
from softbottle.ops.mixture.activations import DEAD, LOG2_E, Activation


@dataclasses.dataclass(frozen=True, repr=False)
class Softcap(PlainOrMixed):
    """A softmax of capped logits, plain or mixed.

    Attributes:
        cap: the largest logit.
        components: K of a mixture; None for a single component without projection.
        context: how a mixture's contexts are made, one of contexts.KINDS.
    """

    name: ClassVar[str] = "softcap"
    cap: float = 30.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if not 0 < self.cap < math.inf:
            raise ValueError(f"cap must be positive and finite, got {self.cap!r}.")
        object.__setattr__(self, "cap", float(self.cap))

    def activation(self, params: base.Params) -> Activation:
        """Cap tanh(z / cap); see `Head.activation`."""
        del params
        unit = 2 / self.cap
        return Activation(_capped, (self.cap,), base2=_capped_base2, unit=unit)


@checks.factory
def softcap(
    cap: float, components: int | None = None, context: str = contexts.DEFAULT
) -> Softcap:
    """A softmax of the logits cap tanh(z / cap), plain or, with `components`, mixed.

    Args:
        cap: the largest logit; Gemma 2 has 30.
        components: K of a mixture; None for a single component without projection.
        context: of a mixture, as of `mos`.

    Raises:
        ValueError: if `cap` is not positive and finite, `components` is not a positive
            integer, or there is no such kind of context.
    """
    return Softcap(cap, components=components, context=context)


def _capped(theta, z):
    (cap,) = theta
    cap = jnp.asarray(cap, z.dtype)
    # A word without probability (a bias of -inf, padding) is not lifted to -cap.
    return jnp.where(z < DEAD / 2, z, cap * jnp.tanh(z / cap))


def _capped_base2(theta, x2, ref2):
    """Of x = 2 z / cap, with s = 1 / (1 + exp(x)): tanh = 1 - 2 s and g' = 1 - tanh^2.

    Every instruction shows in the time of a loss; hence the unit, and no comparison for
    words without probability. A share of x that is nothing beside the cap for |z| up to
    1e22 puts these 200 powers of two below all others.
    """
    (cap,) = theta
    # A root's inverse costs one instruction, a division many. Beyond float32's range
    # the power of two is 0 or infinite, and s still 1 or 0.
    share = jnp.square(jax.lax.rsqrt(1 + jnp.exp2(x2)))
    tanh = 1 - 2 * share
    below = 200 / (DEAD * LOG2_E * 2 / cap)
    ahead2 = (cap * LOG2_E) * tanh + (-below * x2 - ref2)
    return ahead2, 1 - jnp.square(tanh)
