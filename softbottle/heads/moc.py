"""Mixture of Contexts: P(v) = softmax_v( (sum_k prior_k context_k) . w_v + b_v ).

It has the parameters of a mixture of softmaxes but mixes before the softmax, so it is
an ordinary softmax of another context, with the rank bound of one. It is the control
that shows that the gain of MoS is not in its parameters.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import base, checks, contexts, mos
from softbottle.heads.base import Mixture, Params


@dataclasses.dataclass(frozen=True, repr=False)
class MixtureOfContexts(mos.Mixed):
    """A softmax of the prior-weighted mean of `components` contexts.

    Attributes:
        components: K.
        context: how the contexts are made, one of contexts.KINDS.
    """

    name: ClassVar[str] = "moc"

    @property
    def products(self) -> int:
        """One: the contexts are averaged before they meet the table."""
        return 1

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The mean of the contexts as the only one; see `Head.mix`."""
        log_prior_TK, context_TKE = super().mix(params, hidden_TD, latent_mask)
        prior_TK = jnp.exp(log_prior_TK).astype(context_TKE.dtype)
        return base.single(jnp.einsum("tk,tke->te", prior_TK, context_TKE), None)


@checks.factory
def moc(components: int, context: str = contexts.DEFAULT) -> MixtureOfContexts:
    """A softmax of the prior-weighted mean of `components` contexts.

    Args:
        components: K.
        context: as of `mos`.

    Raises:
        ValueError: if `components` is not a positive integer, or there is no such kind
            of context.
    """
    return MixtureOfContexts(components, context=context)
