"""Mixture of Contexts: P(v) = softmax_v( (sum_k prior_k context_k) . w_v + b_v ).

It has the parameters of a mixture of softmaxes but mixes before the softmax, so it is
an ordinary softmax of another context, with the rank bound of one. It is the control
that shows that the gain of MoS is not in its parameters.
"""

import jax.numpy as jnp

from softbottle.heads import base, mos


def moc(components: int) -> base.Head:
    """A softmax of the prior-weighted mean of `components` contexts.

    Raises:
        ValueError: if `components` is not a positive integer.
    """
    base.check_components(components)

    def init(key, hidden_dim, context_dim):
        return mos.init_latent(key, components, hidden_dim, context_dim)

    def mix(params, hidden_TD, latent_mask=None):
        log_prior_TK, context_TKE = mos.mix_latent(params, hidden_TD, latent_mask)
        prior_TK = jnp.exp(log_prior_TK).astype(context_TKE.dtype)
        return base.single(jnp.einsum("tk,tke->te", prior_TK, context_TKE), None)

    return base.mixture_head(init, mix)
