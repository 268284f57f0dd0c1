"""The mixture likelihood in plain XLA without the [T, K, V] logits.

Tokens are taken in chunks, each against the whole table, all K components of a token
together. Two differentiable functions come out of it.

`lse` takes any cotangent. Its backward pass computes a chunk's logits again, four
products in all:

    d lse[t, k] / d z[t, k, v] = exp(g(z[t, k, v]) - lse[t, k]) g'(z[t, k, v]).

`loss` is a scalar, so its gradient is known up to a factor as soon as a chunk's
normalisers are: it is computed in the forward rule, three products in all, as
exponential.py describes. An activation with parameters to learn goes by float logits,

    d loss / d z[t, k, v] = weight[t] r[t, k] (exp(g - lse) - [v == label[t]]) g',

where r[t, k] is the posterior of component k given the label. All equal reference.py
to rounding; without learned segments they give the same bits twice.
"""

import functools

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import exponential, parts
from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    product_dtype,
    sum_dtype,
)


def lse(context_TKE, table_VE, bias_V, activation: Activation, options: Options):
    """Log-normaliser of every token and component, [T, K], over the local rows."""
    theta = jax.tree.map(jnp.asarray, activation.theta)
    inputs = parts.varying_together(theta, context_TKE, table_VE, bias_V)
    return _lse(activation.apply, options, *inputs)


def loss(
    log_prior_TK,
    context_TKE,
    table_VE,
    bias_V,
    labels_T,
    weights_T,
    activation: Activation,
    options: Options,
):
    """Weighted sum of the tokens' negative log-likelihoods, gradient in forward."""
    if exponential.takes(activation):
        return exponential.loss(
            _route(),
            log_prior_TK,
            context_TKE,
            table_VE,
            bias_V,
            labels_T,
            weights_T,
            activation,
            options,
        )
    theta = jax.tree.map(jnp.asarray, activation.theta)
    theta, context_TKE, table_VE, bias_V = parts.varying_together(
        theta, context_TKE, table_VE, bias_V
    )
    tokens = parts.varying_together(log_prior_TK, labels_T, weights_T)
    return _loss(
        activation.apply, options, theta, context_TKE, table_VE, bias_V, *tokens
    )


def _route():
    """Plain XLA; matrix units of GPUs want aligned tables, CPUs gain nothing."""
    if jax.default_backend() == "gpu":
        return exponential.Route(exponential.xla_first, lse, (8, 128, 64), 32)
    return exponential.Route(exponential.xla_first, lse, (1, 1, 1), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lse(apply, options, theta, context_TKE, table_VE, bias_V):
    table_VE = _cast(options, context_TKE, table_VE)

    def chunk(_, context_CKE):
        g_CKV = apply(theta, parts.logits(context_CKE, table_VE, bias_V, options))
        return (), _masked_lse(g_CKV, options)

    return _over_chunks(chunk, (), context_TKE, table_VE, options)[1]


def _lse_forward(apply, options, theta, context_TKE, table_VE, bias_V):
    lse_TK = _lse(apply, options, theta, context_TKE, table_VE, bias_V)
    return lse_TK, (theta, context_TKE, table_VE, bias_V, lse_TK)


def lse_backward(apply, options, saved, lse_bar_TK):
    """The gradients of theta, context, table and bias, from what a forward saved."""
    theta, context_TKE, table_VE, bias_V, lse_TK = saved
    cast_VE = _cast(options, context_TKE, table_VE)

    def chunk(sums, tokens):
        context_CKE, lse_CK, lse_bar_CK = tokens
        z_CKV = parts.logits(context_CKE, cast_VE, bias_V, options)
        g_CKV, pull = jax.vjp(apply, theta, z_CKV)
        p_CKV = _probabilities(g_CKV, lse_CK, options)
        bar_CK1 = lse_bar_CK[:, :, None]
        theta_bar, z_bar_CKV = pull(jnp.where(bar_CK1 != 0, bar_CK1 * p_CKV, 0.0))
        return _add_products(sums, theta_bar, z_bar_CKV, context_CKE, cast_VE)

    sums = _zero_sums(theta, context_TKE, table_VE, bias_V)
    tokens = (context_TKE, lse_TK, lse_bar_TK)
    sums, context_bar_TKE = _over_chunks(chunk, sums, tokens, table_VE, options)
    return _like((theta, table_VE, bias_V), sums, context_TKE, context_bar_TKE)


_lse.defvjp(_lse_forward, lse_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(apply, options, theta, context_TKE, table_VE, bias_V, *tokens):
    log_prior_TK, labels_T, weights_T = tokens
    lse_TK = _lse(apply, options, theta, context_TKE, table_VE, bias_V)
    score_TK = parts.target_score(
        context_TKE,
        table_VE,
        bias_V,
        labels_T,
        Activation(apply, params=theta),
        options,
    )
    lse_TK = parts.over_shards(lse_TK, options)
    return parts.weighted(weights_T, parts.nll(log_prior_TK, score_TK, lse_TK))


def _loss_forward(apply, options, theta, context_TKE, table_VE, bias_V, *tokens):
    log_prior_TK, labels_T, weights_T = tokens
    cast_VE = _cast(options, context_TKE, table_VE)
    activation = Activation(apply, params=theta)

    def chunk(sums, tokens):
        context_CKE, log_prior_CK, labels_C, weights_C = tokens
        z_CKV = parts.logits(context_CKE, cast_VE, bias_V, options)
        g_CKV, pull = jax.vjp(apply, theta, z_CKV)
        lse_CK = parts.over_shards(_masked_lse(g_CKV, options), options)
        score_CK = parts.target_score(
            context_CKE, cast_VE, bias_V, labels_C, activation, options
        )
        nll_C = parts.nll(log_prior_CK, score_CK, lse_CK)
        weight_CK = parts.responsibility(
            log_prior_CK, score_CK, lse_CK, nll_C, weights_C
        )
        p_CKV = _probabilities(g_CKV, lse_CK, options)
        hit_CV = _hits(labels_C, cast_VE.shape[0], options)
        p_CKV = jnp.where(hit_CV[:, None], p_CKV - 1.0, p_CKV)
        theta_bar, z_bar_CKV = pull(weight_CK[:, :, None] * p_CKV)
        sums, context_bar_CKE = _add_products(
            sums, theta_bar, z_bar_CKV, context_CKE, cast_VE
        )
        return sums, (context_bar_CKE, nll_C, weight_CK)

    sums = _zero_sums(theta, context_TKE, table_VE, bias_V)
    chunked = (context_TKE, log_prior_TK, labels_T, weights_T)
    sums, by_token = _over_chunks(chunk, sums, chunked, table_VE, options)
    context_bar_TKE, nll_T, weight_TK = by_token
    bars = _like((theta, table_VE, bias_V), sums, context_TKE, context_bar_TKE)
    prior_bar_TK = -weight_TK.astype(log_prior_TK.dtype)
    nll_T = jnp.where(weights_T != 0, nll_T, 0.0).astype(weights_T.dtype)
    return parts.weighted(weights_T, nll_T), (bars, prior_bar_TK, nll_T)


def _loss_backward(apply, options, saved, loss_bar):
    del apply
    return parts.loss_backward(saved, loss_bar, options)


_loss.defvjp(_loss_forward, _loss_backward)


def _over_chunks(chunk, carry, tokens, table_VE, options):
    """Scan `chunk(carry, tokens) -> (carry, by_token)` over chunks of tokens."""
    context_TKE = tokens[0] if isinstance(tokens, tuple) else tokens
    count, components = context_TKE.shape[:2]
    itemsize = sum_dtype(context_TKE, table_VE).itemsize
    row_bytes = components * table_VE.shape[0] * itemsize
    chunks = chunk_count(count, row_bytes, options.block_bytes)
    return parts.over_chunks(chunk, carry, tokens, chunks)


def _zero_sums(theta, context_TKE, table_VE, bias_V):
    """Zero accumulators, as float32 or better, for theta, table and bias."""
    dtype = sum_dtype(context_TKE, table_VE)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(
            jnp.shape(leaf), jnp.promote_types(jnp.result_type(leaf), dtype)
        ),
        (theta, table_VE, bias_V),
    )
    axes = jax.typeof(context_TKE).manual_axis_type.varying
    return parts.vary_over(axes, *zeros)


def _add_products(sums, theta_bar, z_bar_CKV, context_CKE, table_VE):
    """Add a chunk's gradient of theta, table and bias; return that of its contexts."""
    theta_sum, table_sum_VE, bias_sum_V = sums
    wide = z_bar_CKV.dtype
    dtype = table_VE.dtype
    z_cast_CKV = z_bar_CKV.astype(dtype)
    table_sum_VE += jnp.einsum(
        "ckv,cke->ve",
        z_cast_CKV,
        context_CKE.astype(dtype),
        preferred_element_type=wide,
    )
    context_bar_CKE = jnp.einsum(
        "ckv,ve->cke", z_cast_CKV, table_VE, preferred_element_type=wide
    )
    bias_sum_V += jnp.sum(z_bar_CKV, axis=(0, 1))
    theta_sum = jax.tree.map(jnp.add, theta_sum, theta_bar)
    return (theta_sum, table_sum_VE, bias_sum_V), context_bar_CKE


def _like(inputs, sums, context_TKE, context_bar_TKE):
    """The gradients in their inputs' dtypes: theta, context, table, bias."""
    theta_bar, table_bar_VE, bias_bar_V = jax.tree.map(
        lambda array, total: total.astype(jnp.result_type(array)), inputs, sums
    )
    return (
        theta_bar,
        context_bar_TKE.astype(context_TKE.dtype),
        table_bar_VE,
        bias_bar_V,
    )


def _cast(options, context_TKE, table_VE):
    return table_VE.astype(product_dtype(options, context_TKE, table_VE))


def _masked_lse(g_CKV, options):
    live_V = parts.live_rows(g_CKV.shape[-1], options)
    g_CKV = jnp.where(live_V[None, None], g_CKV, -jnp.inf)
    top_CK = jnp.max(g_CKV, axis=-1)
    # A shard may hold nothing but padding; its maximum is then -inf.
    top_CK = jnp.where(jnp.isneginf(top_CK), jnp.finfo(top_CK.dtype).min, top_CK)
    return top_CK + jnp.log(jnp.sum(jnp.exp(g_CKV - top_CK[:, :, None]), axis=-1))


def _probabilities(g_CKV, lse_CK, options):
    live_V = parts.live_rows(g_CKV.shape[-1], options)
    return jnp.where(live_V[None, None], jnp.exp(g_CKV - lse_CK[:, :, None]), 0.0)


def _hits(labels_C, rows, options):
    ids_V = jnp.arange(rows) + parts.first_row(rows, options)
    return labels_C[:, None] == ids_V[None]
