"""What is asked of all words of a token: entropy, smoothing, temperature, divergence.

Log-probabilities are formed for a chunk of tokens at a time, [C, V] from [C, K, V]
within the budget, and reduced to a few numbers per token before the next chunk. Under
differentiation a chunk is computed again: four products per context in all, where the
loss of one component has three, and passes over [C, K, V] between them. Every gradient
is that of jax but for the products, whose inputs are rounded as in the loss and which
sum in float32 or better.

A row that is no word, and a word whose bias is -inf, has a log-probability of about
DEAD: finite, so that 0 times it is 0.

Axes: N classes of words, P words of one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, likelihood, shards
from softbottle.ops.mixture.activations import DEAD, Activation
from softbottle.ops.mixture.arrays import Mixture, Vocabulary
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    product_dtype,
    sum_dtype,
)


class Source(NamedTuple):
    """Where the log-probabilities of chunks of tokens come from.

    Attributes:
        tokens: arrays by token.
        shared: arrays that all tokens read, as wide as their gradients' sums.
        log_probs: (shared, tokens) -> log P of the local words, [C, V].
        token_bytes: what is held per token.
    """

    tokens: Any
    shared: Any
    log_probs: Callable[[Any, Any], jax.Array]
    token_bytes: int


def over_words(
    function: Callable[..., Any], sources: Sequence[Source], by_token: Any, options: Any
) -> Any:
    """`function(*log_probs_CV, by_token)` of every chunk of tokens, differentiable.

    Args:
        function: reduces the log-probabilities of one or more sources to arrays by
            token.
        sources: of the same tokens and words.
        by_token: what else the function reads of them.
        options: resolved; the budget is shared by the sources.
    """
    tokens = [source.tokens for source in sources]
    shared = [source.shared for source in sources]
    count = len(jax.tree.leaves(tokens)[0])
    token_bytes = sum(source.token_bytes for source in sources)
    chunks = chunk_count(count, token_bytes, options.block_bytes)

    # In a loop nothing can be merged with what is computed again.
    @functools.partial(jax.checkpoint, prevent_cse=chunks == 1)
    def one_chunk(shared, tokens, by_token):
        each = zip(sources, shared, tokens, strict=True)
        log_probs = [source.log_probs(own, chunk) for source, own, chunk in each]
        return function(*log_probs, by_token)

    def chunk(_, inputs):
        return (), one_chunk(shared, *inputs)

    return likelihood.over_chunks(chunk, (), (tokens, by_token), chunks)[1]


def of_mixture(
    mixture: Mixture, vocabulary: Vocabulary, activation: Activation, options: Options
) -> Source:
    """The log-probabilities of a mixture that meets the whole vocabulary."""
    table_VE = vocabulary.table_VE
    components = mixture.context_TKE.shape[-2]
    wide = sum_dtype(mixture.context_TKE, table_VE)
    dtype = product_dtype(options, mixture.context_TKE, table_VE)
    options = dataclasses.replace(options, compute_dtype=dtype)
    theta = jax.tree.map(jnp.asarray, activation.theta)

    def log_probs(shared, mixture):
        theta, vocabulary = shared
        score_CKV = scores(mixture.context_TKE, vocabulary, options)
        score_CKV = live(activation.apply(theta, score_CKV), options)
        lse_CK = joint_lse(score_CKV, options)
        log_prior_CK = mixture.log_prior_TK.astype(wide)
        # The large ones first: their difference is exact.
        log_p_CKV = score_CKV - lse_CK[:, :, None] + log_prior_CK[:, :, None]
        return jax.nn.logsumexp(log_p_CKV, axis=1)

    # Logits and their gradient, and as many numbers again of the mixture.
    token_bytes = 2 * (components + 1) * len(table_VE) * wide.itemsize
    shared = (theta, jax.tree.map(lambda array: array.astype(wide), vocabulary))
    return Source(mixture, shared, log_probs, token_bytes)


def of_dense(log_p_TV: jax.Array) -> Source:
    """Log-probabilities that are given."""
    wide = sum_dtype(log_p_TV)
    token_bytes = log_p_TV.shape[1] * wide.itemsize

    def log_probs(_, log_p_CV):
        return jnp.maximum(log_p_CV.astype(wide), DEAD)

    return Source(log_p_TV, (), log_probs, token_bytes)


def scores(context: jax.Array, vocabulary: Vocabulary, options: Options) -> jax.Array:
    """z of every local word, [C, K, V]; its gradient's products read rounded inputs."""
    table_VE, bias_V = vocabulary
    dtype = jnp.dtype(product_dtype(options, context, table_VE))
    count = classes.count(context)
    context_CNKE = context[:, None] if context.ndim == 3 else context
    words = -(-len(table_VE) // count)
    table_NPE = classes.split(table_VE, count, words)
    context_CNKE, table_NPE = shards.varying_together(context_CNKE, table_NPE)
    z_CKPN = _product(dtype, context_CNKE, table_NPE)
    z_CKV = z_CKPN.reshape(*z_CKPN.shape[:2], -1)[:, :, : len(table_VE)]
    return z_CKV + bias_V.astype(z_CKV.dtype)[None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype, context_CNKE, table_NPE):
    return _einsum("cnke,npe->ckpn", dtype, context_CNKE, table_NPE)


def _product_forward(dtype, context_CNKE, table_NPE):
    return _product(dtype, context_CNKE, table_NPE), (context_CNKE, table_NPE)


def _product_backward(dtype, saved, bar_CKPN):
    context_CNKE, table_NPE = saved
    context_bar = _einsum("ckpn,npe->cnke", dtype, bar_CKPN, table_NPE)
    table_bar = _einsum("ckpn,cnke->npe", dtype, bar_CKPN, context_CNKE)
    return context_bar.astype(context_CNKE.dtype), table_bar.astype(table_NPE.dtype)


_product.defvjp(_product_forward, _product_backward)


def _einsum(formula, dtype, left, right):
    return jnp.einsum(
        formula,
        left.astype(dtype),
        right.astype(dtype),
        preferred_element_type=sum_dtype(left, right),
    )


def live(score: jax.Array, options: Options) -> jax.Array:
    """Scores over the local words, [..., V], finite and DEAD where there is no word."""
    live_V = shards.live_rows(score.shape[-1], options)
    live_V = live_V.reshape(*(1,) * (score.ndim - 1), -1)
    return jnp.where(live_V, jnp.maximum(score, DEAD), DEAD)


def joint_lse(score: jax.Array, options: Options) -> jax.Array:
    """The log-sum-exp over the words of all shards."""
    return shards.joint_lse(jax.nn.logsumexp(score, axis=-1), options)


def total(array_CV: jax.Array, options: Options) -> jax.Array:
    """The sum over the words of all shards, [C]."""
    sum_C = jnp.sum(array_CV, axis=1)
    if options.vocab_axis is None:
        return sum_C
    return jax.lax.psum(sum_C, options.vocab_axis)


def tempered(log_p_CV: jax.Array, temperature: float, options: Options) -> jax.Array:
    """log of P^(1/temperature), normalized again."""
    if temperature == 1:
        return log_p_CV
    log_p_CV = log_p_CV / temperature
    return log_p_CV - joint_lse(log_p_CV, options)[:, None]


def of_label(log_p_CV: jax.Array, labels_C: jax.Array, options: Options) -> jax.Array:
    """log P of the labels, [C]; NaN where a label is no word."""
    rows = log_p_CV.shape[1]
    label_C, owned_C = shards.local_labels(labels_C, rows, options)
    hit_CV = jnp.arange(rows)[None] == label_C[:, None]
    own_C1 = jnp.sum(jnp.where(hit_CV, log_p_CV, 0.0), axis=1, keepdims=True)
    return shards.from_owner(own_C1, owned_C, labels_C, rows, options)[:, 0]


def mean(log_p_CV: jax.Array, options: Options) -> jax.Array:
    """The mean of log P over all words, [C]."""
    rows = log_p_CV.shape[1]
    live_V = shards.live_rows(rows, options)
    kept_CV = jnp.where(live_V[None], log_p_CV, 0.0)
    return total(kept_CV, options) / shards.word_count(rows, options)


def entropy(log_p_CV: jax.Array, options: Options) -> jax.Array:
    """-sum_v P log P, [C]."""
    return -total(jnp.exp(log_p_CV) * log_p_CV, options)


def divergence(log_p_CV: jax.Array, log_q_CV: jax.Array, options: Options) -> jax.Array:
    """KL(P || Q), [C]."""
    return total(jnp.exp(log_p_CV) * (log_p_CV - log_q_CV), options)
