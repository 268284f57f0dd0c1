"""The dense mixture likelihood: the definition, for checking and for tiny sizes.

    z[t, k, v] = context[t, k] . table[v] + bias[v]
    lse[t, k]  = logsumexp_v g(z[t, k, v])
    nll[t]     = -logsumexp_k( log_prior[t, k] + g(z[t, k, label[t]]) - lse[t, k] )

It holds all [T, K, V] logits and leaves differentiation to jax.
"""

import functools

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import likelihood, shards
from softbottle.ops.mixture.activations import DEAD
from softbottle.ops.mixture.implementation import Choice, Implementation


def _of_words(context_TKE, vocabulary, activation, options):
    read = likelihood.as_read(vocabulary, context_TKE, options)
    z_TKV = likelihood.logits(context_TKE, read, options)
    g_TKV = activation.apply(activation.theta, z_TKV)
    live_V = shards.live_rows(len(vocabulary.table_VE), options)
    return jnp.where(live_V[None, None], g_TKV, -jnp.inf)


def _lse(context_TKE, vocabulary, activation, options):
    inputs = (context_TKE, vocabulary, activation, options)
    return jax.nn.logsumexp(_of_words(*inputs), axis=-1)


def _scores(context_TKE, vocabulary, labels_T, activation, options):
    lse_TK = _lse(context_TKE, vocabulary, activation, options)
    inputs = (context_TKE, vocabulary, labels_T, activation, options)
    return likelihood.with_own(lse_TK, *inputs)


def _entropies(context_TKE, vocabulary, labels_T, activation, options):
    lse_TK = _lse(context_TKE, vocabulary, activation, options)
    g_TKV = _of_words(context_TKE, vocabulary, activation, options)
    log_p_TKV = jnp.maximum(g_TKV - lse_TK[:, :, None], DEAD)
    entropy_TK = -jnp.sum(jnp.exp(log_p_TKV) * log_p_TKV, axis=-1)
    inputs = (context_TKE, vocabulary, labels_T, activation, options)
    return likelihood.with_own(lse_TK, *inputs, entropy_TK)


def _choice(context_TKE, table_VE, activation, options):
    del table_VE, activation, options
    return Choice("reference", context_TKE.shape[0])


IMPLEMENTATION = Implementation(
    _lse,
    functools.partial(likelihood.loss_from, _scores),
    lambda *_: None,
    _choice,
    _scores,
    _entropies,
)
