"""Soft-capped logits: P(v) proportional to exp(cap tanh(z_v / cap)), as Gemma 2 has.

A logit is nearly itself while it is small beside the cap and never beyond it, so that
no word is more than 2 cap nats from another.
"""

import dataclasses
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
        object.__setattr__(self, "cap", checks.number("cap", self.cap))
        if self.cap <= 0:
            raise ValueError(f"cap must be positive, got {self.cap!r}.")

    def activation(self, params: base.Params) -> Activation:
        """Cap tanh(z / cap); see `Head.activation`."""
        del params
        return Activation(
            _capped,
            (self.cap,),
            base2=_capped_base2,
            unit=2 / self.cap,
            slope_unit=4.0,
            bound=self.cap,
        )


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
    """Of x = 2 z / cap, with s = 1 / (1 + exp(x)): tanh = 1 - 2 s and g' = 4 (s - s^2).

    Hence the units, and no comparison for words without probability. A share of x that
    is nothing beside the cap for |z| up to 1e22 puts these 200 powers of two below all
    others.
    """
    (cap,) = theta
    cap2 = cap * LOG2_E
    # Beyond 30 powers of two s is nothing beside 1.
    share = _shares(jnp.exp2(jnp.minimum(x2, 30.0)))
    below = 200 / (DEAD * LOG2_E * 2 / cap)
    ahead2 = (-2 * cap2) * share + (-below * x2 + (cap2 - ref2))
    return ahead2, share - jnp.square(share)


def _shares(x):
    """1 / (1 + x) of numbers from 0 to 2^30, by one root for four of them.

    A GPU computes an eighth as many roots and powers of two as products in a time, so
    that a loss waits for these; a division is one of them and several products.
    """
    if x.ndim == 1:
        return jnp.square(jax.lax.rsqrt(1 + x))
    each = x.shape[1] // 4
    a, b, c, d = (x[:, part * each : (part + 1) * each] for part in range(4))
    b, d = 1 + b, 1 + d
    # With 1 + a written as sums of products, which a GPU adds up in one instruction.
    ab, cd = a * b + b, c * d + d
    all4 = jnp.square(jax.lax.rsqrt(ab * cd))
    by_ab, by_cd = all4 * cd, all4 * ab
    parts = [by_ab * b, by_ab * a + by_ab, by_cd * d, by_cd * c + by_cd]
    return jnp.concatenate(parts, axis=1)
