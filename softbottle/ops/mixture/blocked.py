"""The mixture likelihood in plain XLA without the [T, K, V] logits.

Tokens are taken in chunks, each against the whole table, all K components of a token
together. Two differentiable functions come out of it.

`scores`, the label's score and the normalizer, take any cotangents. Their backward pass
computes a chunk's logits again, four products in all:

    d z[t, k, v] = (lse_bar[t, k] exp(g(z[t, k, v]) - lse[t, k])
                    + [v == label[t]] own_bar[t, k]) g'(z[t, k, v]).

`loss` is a scalar, so its gradient is known up to a factor as soon as a chunk's
normalizers are: it is computed in the forward rule, three products in all, as
exponential.py describes. An activation with parameters to learn goes by float logits,

    d loss / d z[t, k, v] = weight[t] r[t, k] (exp(g - lse) - [v == label[t]]) g',

where r[t, k] is the posterior of component k given the label. All equal reference.py
to rounding; without learned segments they give the same bits twice.

Axes: N classes of words; P words and Q width, both padded.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, exponential, likelihood, products, shards
from softbottle.ops.mixture.activations import DEAD, Activation
from softbottle.ops.mixture.arrays import Mixture, Scores, Vocabulary
from softbottle.ops.mixture.implementation import Choice, Implementation, Shaped
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    sum_dtype,
)


def _lse(context_TKE, vocabulary, activation, options):
    return _scores(context_TKE, vocabulary, None, activation, options).lse_TK


def _scores(context_TKE, vocabulary, labels_T, activation, options):
    theta = jax.tree.map(jnp.asarray, activation.theta)
    inputs = shards.varying_together(theta, context_TKE, vocabulary, labels_T)
    return _fused_scores(activation.apply, options, *inputs)


def _loss(mixture, vocabulary, targets, activation, options, elsewhere=None):
    if exponential.takes(activation):
        inputs = (mixture, vocabulary, targets, activation, options, elsewhere)
        return exponential.loss(route(options), *inputs)
    if classes.count(mixture.context_TKE) > 1 or elsewhere is not None:
        return likelihood.loss_from(
            _scores, mixture, vocabulary, targets, activation, options, elsewhere
        )
    theta = jax.tree.map(jnp.asarray, activation.theta)
    inputs = likelihood.vary(theta, mixture, vocabulary, targets)
    return _learned_loss(activation.apply, options, *inputs)


def _loss_and_argmax(mixture, vocabulary, targets, activation, options):
    if not exponential.takes(activation):
        return None
    inputs = (mixture, vocabulary, targets, activation, options)
    return exponential.loss_and_argmax(route(options), *inputs)


def _choice(context_TKE, table_VE, activation, options):
    if exponential.takes(activation):
        count = exponential.chunks(route(options), context_TKE, table_VE, options)
    else:
        count = chunks(context_TKE, table_VE, options)
    return Choice("blocked", -(-context_TKE.shape[0] // count))


def route(options: Options) -> exponential.Route:
    """Plain XLA; matrix units of GPUs want aligned tables, CPUs gain nothing."""
    if options.on_gpu:
        return exponential.Route(_first_product, _scores, (8, 128, 64), 32)
    return exponential.Route(_first_product, _scores, (1, 1, 1), 1)


def _first_product(
    context_NRQ,
    table_NPQ,
    bias_NP,
    near_R,
    tilt_2R,
    activation,
    options,
    peaks,
    settled,
):
    """E, its row sums before rounding, the rows' maxima, and where these are."""
    del settled  # the maxima are references as good as any
    z_NRP = products.product(context_NRQ, table_NPQ, (2, 2), near_R.dtype)
    g_NRP, slope_NRP = likelihood.with_slope(activation, z_NRP + bias_NP[:, None])
    ref_NR = _finite(jnp.max(g_NRP, axis=2))
    exp_NRP = jnp.exp(g_NRP - ref_NR[:, :, None])
    e_NRP = exp_NRP * slope_NRP
    if tilt_2R is not None:
        level_R1, tilt_R1 = tilt_2R[:, :, None]
        # A word of bias -inf has no probability: 0 times what is finite.
        ahead_NRP = jnp.maximum(g_NRP - near_R[None, :, None], DEAD)
        e_NRP *= level_R1[None] + tilt_R1[None] * ahead_NRP
    e_NRP = products.seen(e_NRP, context_NRQ.dtype, options)
    peak = None
    if peaks:
        peak = exponential.Peak(ref_NR, jnp.argmax(g_NRP, axis=2).astype(jnp.int32))
    return e_NRP, jnp.sum(exp_NRP, axis=2), ref_NR, peak


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused_scores(apply, options, theta, context_TKE, vocabulary, labels_T):
    cast = likelihood.as_read(vocabulary, context_TKE, options)
    activation = Activation(apply, params=theta)

    def chunk(_, context_CKE):
        g_CKV = apply(theta, likelihood.logits(context_CKE, cast, options))
        return (), _masked_lse(g_CKV, options)

    count = chunks(context_TKE, vocabulary.table_VE, options)
    lse_TK = likelihood.over_chunks(chunk, (), context_TKE, count)[1]
    words = (context_TKE, vocabulary, labels_T, activation, options)
    return likelihood.with_own(lse_TK, *words)


def _scores_forward(apply, options, *inputs):
    found = _fused_scores(apply, options, *inputs)
    return found, (*inputs, found.lse_TK)


def scores_backward(
    apply: Any, options: Options, saved: Any, bars: Scores
) -> tuple[Any, jax.Array, Vocabulary, None]:
    """The gradients of theta, context and vocabulary, from what a forward saved."""
    theta, context_TKE, vocabulary, labels_T, lse_TK = saved
    cast = likelihood.as_read(vocabulary, context_TKE, options)

    def chunk(sums, tokens):
        context_CKE, labels_C, lse_CK, bars = tokens
        z_CKV = likelihood.logits(context_CKE, cast, options)
        g_CKV, pull = jax.vjp(apply, theta, z_CKV)
        p_CKV = _probabilities(g_CKV, lse_CK, options)
        lse_bar_CK1 = bars.lse_TK[:, :, None]
        bar_CKV = jnp.where(lse_bar_CK1 != 0, lse_bar_CK1 * p_CKV, 0.0)
        if labels_C is not None:
            hit_CV = _hits(labels_C, len(cast.table_VE), options)
            bar_CKV += jnp.where(hit_CV[:, None], bars.own_TK[:, :, None], 0.0)
        theta_bar, z_bar_CKV = pull(bar_CKV)
        return _add_products(sums, theta_bar, z_bar_CKV, context_CKE, cast.table_VE)

    sums = _zero_sums(theta, context_TKE, vocabulary)
    tokens = (context_TKE, labels_T, lse_TK, bars)
    count = chunks(context_TKE, vocabulary.table_VE, options)
    sums, context_bar_TKE = likelihood.over_chunks(chunk, sums, tokens, count)
    theta_bar, vocabulary_bar = _like((theta, vocabulary), sums)
    return theta_bar, context_bar_TKE.astype(context_TKE.dtype), vocabulary_bar, None


_fused_scores.defvjp(_scores_forward, scores_backward)


def _entropies(context_TKE, vocabulary, labels_T, activation, options):
    inputs = shards.varying_together(context_TKE, vocabulary, labels_T)
    return _fused_entropies(activation, options, *inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused_entropies(activation, options, context_TKE, vocabulary, labels_T):
    cast = likelihood.as_read(vocabulary, context_TKE, options)

    def chunk(_, context_CKE):
        z_CKV = likelihood.logits(context_CKE, cast, options)
        g_CKV = activation.apply(activation.theta, z_CKV)
        return (), _masked_lse_and_entropy(g_CKV, options)

    count = chunks(context_TKE, vocabulary.table_VE, options)
    lse_TK, entropy_TK = likelihood.over_chunks(chunk, (), context_TKE, count)[1]
    words = (context_TKE, vocabulary, labels_T, activation, options)
    return likelihood.with_own(lse_TK, *words, entropy_TK)


def _entropies_forward(activation, options, *inputs):
    found = _fused_entropies(activation, options, *inputs)
    return found, (*inputs, found)


def _entropies_backward(activation, options, saved, bars):
    way = route(options)
    return *exponential.scores_backward(way, activation, options, saved, bars), None


_fused_entropies.defvjp(_entropies_forward, _entropies_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _learned_loss(apply, options, theta, mixture, vocabulary, targets):
    activation = Activation(apply, params=theta)
    inputs = (mixture, vocabulary, targets, activation, options)
    return likelihood.loss_from(_scores, *inputs)


def _learned_forward(apply, options, theta, mixture, vocabulary, targets):
    cast = likelihood.as_read(vocabulary, mixture.context_TKE, options)
    activation = Activation(apply, params=theta)

    def chunk(sums, tokens):
        (log_prior_CK, context_CKE), targets = tokens
        labels_C, weights_C, z_weights_C, score_weights_C = targets
        z_CKV = likelihood.logits(context_CKE, cast, options)
        g_CKV, pull = jax.vjp(apply, theta, z_CKV)
        lse_CK = shards.joint_lse(_masked_lse(g_CKV, options), options)
        score_CK = likelihood.target_score(
            context_CKE, cast, labels_C, activation, options
        )
        nll_C = likelihood.nll(log_prior_CK, score_CK, lse_CK)
        posterior_CK = likelihood.posterior(log_prior_CK, score_CK, lse_CK, nll_C)
        weight_CK = weights_C[:, None] * posterior_CK
        p_CKV = _probabilities(g_CKV, lse_CK, options)
        hit_CV = _hits(labels_C, len(cast.table_VE), options)
        pull_CK = likelihood.lse_weight(weight_CK, lse_CK, z_weights_C)
        bar_CKV = pull_CK[:, :, None] * p_CKV
        hit_CK = weight_CK
        if score_weights_C is not None:
            hit_CK -= score_weights_C[:, None]
        bar_CKV -= jnp.where(hit_CV[:, None], hit_CK[:, :, None], 0.0)
        theta_bar, z_bar_CKV = pull(bar_CKV)
        sums, context_bar_CKE = _add_products(
            sums, theta_bar, z_bar_CKV, context_CKE, cast.table_VE
        )
        terms = likelihood.terms(nll_C, score_CK, lse_CK)
        return sums, (context_bar_CKE, weight_CK, terms)

    sums = _zero_sums(theta, mixture.context_TKE, vocabulary)
    count = chunks(mixture.context_TKE, vocabulary.table_VE, options)
    sums, by_token = likelihood.over_chunks(chunk, sums, (mixture, targets), count)
    context_bar_TKE, weight_TK, terms = by_token
    total, targets_bar = likelihood.weighted_and_bars(targets, terms)
    theta_bar, vocabulary_bar = _like((theta, vocabulary), sums)
    mixture_bar = _like(mixture, Mixture(-weight_TK, context_bar_TKE))
    return total, (theta_bar, mixture_bar, vocabulary_bar, targets_bar)


def _learned_backward(apply, options, saved, loss_bar):
    del apply
    return likelihood.loss_backward(saved, loss_bar, options)


_learned_loss.defvjp(_learned_forward, _learned_backward)


def chunks(context_TKE: Shaped, table_VE: Shaped, options: Options) -> int:
    """How many chunks of tokens there are, all logits of one within the budget."""
    tokens, components = context_TKE.shape[0], context_TKE.shape[-2]
    itemsize = sum_dtype(context_TKE, table_VE).itemsize
    row_bytes = components * table_VE.shape[0] * itemsize
    return chunk_count(tokens, row_bytes, options.block_bytes)


def _zero_sums(theta, context_TKE, vocabulary):
    """Zero accumulators, as float32 or better, for theta and the vocabulary."""
    dtype = sum_dtype(context_TKE, vocabulary.table_VE)
    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(
            jnp.shape(leaf), jnp.promote_types(jnp.result_type(leaf), dtype)
        ),
        (theta, vocabulary),
    )
    axes = jax.typeof(context_TKE).manual_axis_type.varying
    return shards.vary_over(axes, *zeros)


def _add_products(sums, theta_bar, z_bar_CKV, context_CKE, table_VE):
    """Add a chunk's gradient of theta, table and bias; return that of its contexts."""
    theta_sum, (table_sum_VE, bias_sum_V) = sums
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
    return (theta_sum, Vocabulary(table_sum_VE, bias_sum_V)), context_bar_CKE


def _like(inputs, bars):
    """The gradients in their inputs' dtypes."""
    return jax.tree.map(
        lambda array, bar: bar.astype(jnp.result_type(array)), inputs, bars
    )


def _masked_lse(g_CKV, options):
    ahead_CKV, top_CK = _ahead(g_CKV, options)
    return top_CK + jnp.log(jnp.sum(jnp.exp(ahead_CKV), axis=-1))


def _masked_lse_and_entropy(g_CKV, options):
    ahead_CKV, top_CK = _ahead(g_CKV, options)
    exp_CKV = jnp.exp(ahead_CKV)
    total_CK = jnp.sum(exp_CKV, axis=-1)
    # A shard may hold no word that has a probability; its entropy does not count.
    some_CK = jnp.where(total_CK == 0, 1.0, total_CK)
    # 0 times what is finite, where a word has no probability.
    behind_CK = jnp.sum(exp_CKV * jnp.maximum(ahead_CKV, DEAD), axis=-1) / some_CK
    return top_CK + jnp.log(total_CK), jnp.log(some_CK) - behind_CK


def _ahead(g_CKV, options):
    """Scores less the largest of their row, and these."""
    live_V = shards.live_rows(g_CKV.shape[-1], options)
    g_CKV = jnp.where(live_V[None, None], g_CKV, -jnp.inf)
    top_CK = _finite(jnp.max(g_CKV, axis=-1))
    return g_CKV - top_CK[:, :, None], top_CK


def _finite(top):
    """Maxima; where a shard holds nothing but padding or words of bias -inf, finite."""
    return jnp.where(jnp.isneginf(top), jnp.finfo(top.dtype).min, top)


def _probabilities(g_CKV, lse_CK, options):
    live_V = shards.live_rows(g_CKV.shape[-1], options)
    return jnp.where(live_V[None, None], jnp.exp(g_CKV - lse_CK[:, :, None]), 0.0)


def _hits(labels_C, rows, options):
    ids_V = jnp.arange(rows) + shards.first_row(rows, options)
    return labels_C[:, None] == ids_V[None]


IMPLEMENTATION = Implementation(
    _lse, _loss, _loss_and_argmax, _choice, _scores, _entropies
)
