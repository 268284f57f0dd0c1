"""Mixture of Softmaxes: P(v) = sum_k prior_k softmax_v(context_k . w_v + b_v).

Each component sees its own context tanh(W_k h + b_k) and the mixture weights are
softmax(U h). The log-probabilities are a log-sum-exp of K rank-d matrices, and a
log-sum-exp of low-rank matrices is not low-rank.
"""

import jax
import jax.numpy as jnp

from softbottle.heads import base


def mos(components: int) -> base.Head:
    """A mixture of `components` softmaxes over one shared vocabulary table.

    Args:
        components: K; 1 gives an ordinary softmax with a tanh projection.

    Raises:
        ValueError: if `components` is not a positive integer.
    """
    return mixture_of(components, base.softmax_activation)


def mixture_of(components: int, activation) -> base.Head:
    """A mixture whose components share one log-activation."""
    base.check_components(components)

    def init(key, hidden_dim, context_dim):
        return init_latent(key, components, hidden_dim, context_dim)

    return base.mixture_head(init, mix_latent, activation)


def init_latent(key, components, hidden_dim, context_dim):
    """Parameters of the prior and of the contexts, started as PyTorch's Linear."""
    prior_key, latent_key, bias_key = jax.random.split(key, 3)
    latent_shape = (hidden_dim, components, context_dim)
    return {
        "prior_DK": base.uniform(prior_key, (hidden_dim, components), hidden_dim),
        "latent_DKE": base.uniform(latent_key, latent_shape, hidden_dim),
        "latent_bias_KE": base.uniform(bias_key, latent_shape[1:], hidden_dim),
    }


def mix_latent(params, hidden_TD, latent_mask=None):
    """log softmax(h U) and tanh(h W_k + b_k), the latter masked after the tanh."""
    wide = jnp.promote_types(hidden_TD.dtype, jnp.float32)
    prior_TK = jnp.einsum(
        "td,dk->tk",
        hidden_TD,
        params["prior_DK"].astype(hidden_TD.dtype),
        preferred_element_type=wide,
    )
    latent_TKE = jnp.einsum(
        "td,dke->tke", hidden_TD, params["latent_DKE"].astype(hidden_TD.dtype)
    )
    bias_KE = params["latent_bias_KE"].astype(hidden_TD.dtype)
    context_TKE = jnp.tanh(latent_TKE + bias_KE[None])
    return base.Mixture(
        jax.nn.log_softmax(prior_TK), base.masked(context_TKE, latent_mask)
    )
