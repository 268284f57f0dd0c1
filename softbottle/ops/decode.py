"""Distributions, best words and samples of a mixture, never as [T, K, V].

    log P(v) = logsumexp_k( log_prior_k + g(z_kv) - lse_k )

Log-probabilities take two passes: the normalisers, then one write. A sample at
temperature 1 needs a single component: k is drawn from the prior and the word by
argmax_v( g(z_kv) + Gumbel noise ), which is exact and needs no normaliser at all.
Every token has its own random key, so chunking does not change what is drawn.
"""

import jax
import jax.numpy as jnp

from softbottle.ops import parts
from softbottle.ops.activations import Activation
from softbottle.ops.options import Options, chunk_count, sum_dtype


def log_probs(
    log_prior_TK, context_TKE, table_VE, bias_V, lse_TK, activation, options: Options
):
    """Log-probabilities [T, V]; -inf on rows beyond the vocabulary."""

    def one_chunk(log_prior_CK, context_CKE, lse_CK):
        g_CKV = _scores(context_CKE, table_VE, bias_V, activation, options)
        offset_CK = log_prior_CK - lse_CK
        return jax.nn.logsumexp(g_CKV + offset_CK[:, :, None], axis=1)

    return _by_chunk(one_chunk, (log_prior_TK, context_TKE, lse_TK), table_VE, options)


def top_k(
    log_prior_TK, context_TKE, table_VE, bias_V, lse_TK, activation, options, k: int
):
    """The k most probable words of each token: (log-probabilities, ids), [T, k]."""

    def one_chunk(*tokens):
        log_prior_CK, context_CKE, lse_CK = tokens
        log_p_CV = log_probs(
            log_prior_CK, context_CKE, table_VE, bias_V, lse_CK, activation, options
        )
        return jax.lax.top_k(log_p_CV, k)

    return _by_chunk(one_chunk, (log_prior_TK, context_TKE, lse_TK), table_VE, options)


def sample(log_prior_TK, context_TKE, table_VE, bias_V, activation, options, key):
    """One word a token, drawn exactly from the mixture: ids [T]."""
    tokens = context_TKE.shape[0]
    prior_key, word_key = jax.random.split(key)
    component_T = jax.random.categorical(prior_key, log_prior_TK)
    context_T1E = jnp.take_along_axis(context_TKE, component_T[:, None, None], axis=1)

    def one_chunk(context_C1E, key_C):
        g_CV = _scores(context_C1E, table_VE, bias_V, activation, options)[:, 0]
        noise_CV = jax.vmap(
            lambda key: jax.random.gumbel(key, g_CV.shape[1:], g_CV.dtype)
        )(key_C)
        return jnp.argmax(g_CV + noise_CV, axis=-1)

    keys_T = jax.random.split(word_key, tokens)
    return _by_chunk(one_chunk, (context_T1E, keys_T), table_VE, options)


def _scores(context_CKE, table_VE, bias_V, activation: Activation, options):
    z_CKV = parts.logits(context_CKE, table_VE, bias_V, options)
    live_V = parts.live_rows(table_VE.shape[0], options)
    g_CKV = activation.apply(activation.theta, z_CKV)
    return jnp.where(live_V[None, None], g_CKV, -jnp.inf)


def _by_chunk(function, tokens, table_VE, options):
    """`function` over chunks of tokens that fit the budget, joined."""
    context_TKE = next(array for array in tokens if array.ndim == 3)
    count, components = context_TKE.shape[:2]
    itemsize = sum_dtype(context_TKE, table_VE).itemsize
    row_bytes = components * table_VE.shape[0] * itemsize
    chunks = chunk_count(count, row_bytes, options.budget_bytes)
    if chunks == 1:
        return function(*tokens)
    return jax.lax.map(
        lambda one: jax.tree.map(
            lambda array: array[0], function(*jax.tree.map(lambda a: a[None], one))
        ),
        tokens,
        batch_size=-(-count // chunks),
    )
