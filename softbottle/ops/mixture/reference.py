"""The dense mixture likelihood: the definition, for checking and for tiny sizes.

    z[t, k, v] = context[t, k] . table[v] + bias[v]
    lse[t, k]  = logsumexp_v g(z[t, k, v])
    nll[t]     = -logsumexp_k( log_prior[t, k] + g(z[t, k, label[t]]) - lse[t, k] )

It holds all [T, K, V] logits and leaves differentiation to jax.
"""

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import parts
from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.options import Options


def lse(
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """Log-normaliser of every token and component, [T, K], over the local rows."""
    z_TKV = parts.logits(context_TKE, table_VE, bias_V, options)
    g_TKV = activation.apply(activation.theta, z_TKV)
    live_V = parts.live_rows(table_VE.shape[0], options)
    return jax.nn.logsumexp(jnp.where(live_V[None, None], g_TKV, -jnp.inf), axis=-1)


def loss(
    log_prior_TK: jax.Array,
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array,
    labels_T: jax.Array,
    weights_T: jax.Array,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """Weighted sum of the tokens' negative log-likelihoods."""
    lse_TK = parts.over_shards(
        lse(context_TKE, table_VE, bias_V, activation, options), options
    )
    score_TK = parts.target_score(
        context_TKE, table_VE, bias_V, labels_T, activation, options
    )
    return parts.weighted(weights_T, parts.nll(log_prior_TK, score_TK, lse_TK))
