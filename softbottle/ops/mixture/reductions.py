"""What is asked of all words of a token: entropy, smoothing, temperature, divergence.

Log-probabilities are formed for a chunk of tokens at a time, [C, V] from [C, K, V]
within the budget, and reduced to a few numbers per token before the next chunk.

`over_words` gives numbers that take any cotangent: under differentiation a chunk is
computed again, four products with the table per context. `sum_over_words` gives their
weighted sum, whose gradient is known up to a factor as soon as a chunk is computed:
three products, as the loss has. Both pass over [C, K, V] between them. Every gradient
is that of jax but for the products' (word_scores.py).

A row that is no word, and a word whose bias is -inf, has a log-probability of about
DEAD: finite, so that 0 times it is 0.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, likelihood, shards
from softbottle.ops.mixture.activations import DEAD, Activation, identity
from softbottle.ops.mixture.arrays import Mixture, Vocabulary
from softbottle.ops.mixture.options import Options, product_dtype, sum_dtype
from softbottle.ops.mixture.products import round_up
from softbottle.ops.mixture.word_scores import (
    fused_scores,
    joint_lse,
    live,
    scores,
    words_of,
)

# What GPUs' matrix units like the number of tokens to be a multiple of.
MULTIPLE = 128


class Source(NamedTuple):
    """Where the log-probabilities of chunks of tokens come from.

    Attributes:
        tokens: arrays by token.
        shared: arrays that all tokens read, as wide as their gradients' sums.
        read: (shared, tokens) -> what a function of all words is given of a chunk, log
            P of the local words [C, V], unless a caller puts `scores` in its place.
        token_bytes: what is held per token.
        gradient_bytes: what is held besides if there is a gradient.
        row_bytes: of one row of logits.
        scores: the same of one softmax before it is normalized: scores [C, V] and their
            log-sum-exp [C]. None if there are none.
    """

    tokens: Any
    shared: Any
    read: Callable[[Any, Any], Any]
    token_bytes: int
    gradient_bytes: int
    row_bytes: int
    scores: Callable[[Any, Any], tuple[jax.Array, jax.Array]] | None = None


def over_words(
    function: Callable[..., Any],
    sources: Sequence[Source],
    by_token: Any,
    options: Options,
) -> Any:
    """`function(*log_probs_CV, by_token)` of every chunk of tokens, differentiable.

    Args:
        function: reduces what one or more sources read, as a rule log-probabilities, to
            arrays by token.
        sources: of the same tokens and words.
        by_token: what else the function reads of them.
        options: resolved; the budget is shared by the sources.
    """
    tokens, shared, chunks = _parts(sources, options, len(sources))

    # In a loop nothing can be merged with what is computed again.
    @functools.partial(jax.checkpoint, prevent_cse=chunks[0] == 1)
    def one_chunk(shared, tokens, by_token):
        return function(*_read(sources, shared, tokens), by_token)

    def chunk(_, inputs):
        return (), one_chunk(shared, *inputs)

    return likelihood.over_chunks(chunk, (), (tokens, by_token), *chunks)[1]


def sum_over_words(
    function: Callable[..., jax.Array],
    sources: Sequence[Source],
    by_token: Any,
    weights_T: jax.Array,
    options: Options,
    learning: int | None = None,
) -> jax.Array:
    """sum_t weight[t] function[t], a scalar whose gradient is computed in forward.

    Args:
        function: as of `over_words`, to one number per token.
        sources: as of `over_words`.
        by_token: has no gradient.
        weights_T: of the tokens.
        options: resolved.
        learning: how many sources, of the first, have a gradient; None is all.
    """
    count = len(sources) if learning is None else learning
    tokens, shared, chunks = _parts(sources, options, count)

    def value(learned, fixed, by_token):
        shared, tokens = (a + b for a, b in zip(learned, fixed, strict=True))
        return function(*_read(sources, shared, tokens), by_token)

    @jax.custom_vjp
    def run(learned, fixed, by_token, weights_T):
        def chunk(_, inputs):
            (own, other), by_token = inputs
            pairs = ((learned[0], own), (fixed[0], other))
            return (), value(*pairs, by_token)

        inputs = ((learned[1], fixed[1]), by_token)
        value_T = likelihood.over_chunks(chunk, (), inputs, *chunks)[1]
        return jnp.sum(weights_T.astype(value_T.dtype) * value_T)

    def forward(learned, fixed, by_token, weights_T):
        def chunk(sums, inputs):
            (own, other), by_token, weights_C = inputs

            def of(shared, own):
                return value((shared, own), (fixed[0], other), by_token)

            value_C, pull = jax.vjp(of, learned[0], own)
            shared_bar, tokens_bar = pull(weights_C.astype(value_C.dtype))
            sums = jax.tree.map(jnp.add, sums, shared_bar)
            return sums, (tokens_bar, value_C)

        sums = jax.tree.map(_zeros, learned[0])
        inputs = ((learned[1], fixed[1]), by_token, weights_T)
        sums, (tokens_bar, value_T) = likelihood.over_chunks(
            chunk, sums, inputs, *chunks
        )
        total = jnp.sum(weights_T.astype(value_T.dtype) * value_T)
        return total, ((sums, tokens_bar), value_T)

    def backward(saved, bar):
        learned_bar, value_T = jax.tree.map(
            lambda array: (bar * array).astype(array.dtype), saved
        )
        return learned_bar, None, None, value_T.astype(weights_T.dtype)

    run.defvjp(forward, backward)
    # Constants, such as a prior of one component, vary as what they are used with.
    tokens, shared, weights_T = shards.vary_over(
        shards.axes(tokens), tokens, shared, weights_T
    )
    learned = (shared[:count], tokens[:count])
    return run(learned, (shared[count:], tokens[count:]), by_token, weights_T)


def _parts(sources, options, learning):
    """What tokens have, what they share, and how they are cut into chunks.

    So many sources, of the first, have a gradient.
    """
    tokens = [source.tokens for source in sources]
    shared = [source.shared for source in sources]
    count = len(jax.tree.leaves(tokens)[0])
    token_bytes = sum(source.token_bytes for source in sources)
    token_bytes += sum(source.gradient_bytes for source in sources[:learning])
    budget = options.loss_bytes(max(source.row_bytes for source in sources))
    most = max(1, min(count, budget // max(1, token_bytes)))
    multiple = MULTIPLE if options.on_gpu and most >= MULTIPLE else 1
    return tokens, shared, chunking(count, most, multiple)


def chunking(count: int, most: int, multiple: int) -> tuple[int, int]:
    """How many chunks of at most so many tokens, and what divides their size.

    A few chunks more than there need be may fill the last one better.
    """
    if count <= most:
        return 1, 1
    fewest = -(-count // (most - most % multiple))

    def padded(chunks):
        return chunks * round_up(-(-count // chunks), multiple)

    return min(range(fewest, 2 * fewest), key=padded), multiple


def _zeros(array):
    """Zeros like an array, which vary over the mesh as it does."""
    nothing = jnp.zeros(jnp.shape(array), jnp.result_type(array))
    return shards.vary_over(shards.axes(array), nothing)[0]


def _read(sources, shared, tokens):
    each = zip(sources, shared, tokens, strict=True)
    return [source.read(own, chunk) for source, own, chunk in each]


def of_mixture(
    mixture: Mixture,
    vocabulary: Vocabulary,
    activation: Activation,
    options: Options,
    fused: Callable | None = None,
) -> Source:
    """The log-probabilities of a mixture that meets the whole vocabulary.

    Args:
        mixture: of the tokens.
        vocabulary: all words, or those of a shard.
        activation: of their logits.
        options: resolved.
        fused: `logits_and_lse` of an implementation, used where it can be.
    """
    table_VE = vocabulary.table_VE
    components = mixture.context_TKE.shape[-2]
    wide = sum_dtype(mixture.context_TKE, table_VE)
    dtype = product_dtype(options, mixture.context_TKE, table_VE)
    theta = jax.tree.map(jnp.asarray, activation.theta)
    if (
        activation.apply is not identity
        or classes.count(mixture.context_TKE) > 1
        or dtype != jnp.bfloat16
    ):
        fused = None

    def scores_and_lse(shared, mixture):
        theta, words = shared
        if fused is not None:
            z_CKV, lse_CK = fused_scores(fused, options, mixture.context_TKE, words)
            return live(z_CKV, options), shards.joint_lse(lse_CK, options)
        score_CKV = scores(mixture.context_TKE, words)
        score_CKV = live(activation.apply(theta, score_CKV), options)
        return score_CKV, joint_lse(score_CKV, options)

    def log_probs(shared, mixture):
        score_CKV, lse_CK = scores_and_lse(shared, mixture)
        # The large ones first: their difference is exact.
        log_p_CKV = score_CKV - lse_CK[:, :, None]
        log_prior_CK = mixture.log_prior_TK.astype(wide)
        if components == 1:
            return log_p_CKV[:, 0] + log_prior_CK
        return jax.nn.logsumexp(log_p_CKV + log_prior_CK[:, :, None], axis=1)

    row_bytes = len(table_VE) * wide.itemsize
    if fused is not None and components == 1:
        # The kernel's logits and, as the products read it, their gradient.
        sizes = (row_bytes, len(table_VE) * dtype.itemsize)
    else:
        # Logits and their gradient, and as many numbers again of the mixture.
        sizes = ((2 if components == 1 else 2 * components + 2) * row_bytes, 0)
    shared = (theta, words_of(mixture.context_TKE, vocabulary, options))
    only = None
    if components == 1:

        def only(shared, mixture):
            score_CKV, lse_CK = scores_and_lse(shared, mixture)
            return score_CKV[:, 0], lse_CK[:, 0]

    return Source(mixture, shared, log_probs, *sizes, row_bytes, only)


def of_dense(log_p_TV: jax.Array) -> Source:
    """Log-probabilities that are given."""
    wide = sum_dtype(log_p_TV)
    row_bytes = log_p_TV.shape[1] * wide.itemsize

    def log_probs(_, log_p_CV):
        return jnp.maximum(log_p_CV.astype(wide), DEAD)

    return Source(log_p_TV, (), log_probs, row_bytes, 0, row_bytes)


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
    # As of `activations.scaled`: what has no probability is not scaled.
    log_p_CV = jnp.where(log_p_CV < DEAD / 2, log_p_CV, log_p_CV / temperature)
    return log_p_CV - joint_lse(log_p_CV, options)[:, None]


def of_label(log_p_CV: jax.Array, labels_C: jax.Array, options: Options) -> jax.Array:
    """log P of the labels, [C]; NaN where a label is no word."""
    rows = log_p_CV.shape[1]
    label_C, owned_C = shards.local_labels(labels_C, rows, options)
    hit_CV = (jnp.arange(rows)[None] == label_C[:, None]) & owned_C[:, None]
    own_C1 = jnp.sum(jnp.where(hit_CV, log_p_CV, 0.0), axis=1, keepdims=True)
    return shards.from_owner(own_C1, labels_C, rows, options)[:, 0]


def of_words(log_p_CV: jax.Array, words_CM: jax.Array, options: Options) -> jax.Array:
    """log P of M given words of each token, [C, M]; NaN where one is no word."""
    rows = log_p_CV.shape[1]
    local_CM, owned_CM = shards.local_labels(words_CM, rows, options)
    log_p_CM = jnp.take_along_axis(log_p_CV, local_CM, axis=1)
    own_CM = jnp.where(owned_CM, log_p_CM, 0.0)

    def one(own_C, words_C):
        return shards.from_owner(own_C[:, None], words_C, rows, options)[:, 0]

    return jax.vmap(one, in_axes=1, out_axes=1)(own_CM, words_CM)


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


@jax.custom_vjp
def divergence_of_scores(
    log_p_CV: jax.Array, score_CV: jax.Array, lse_C: jax.Array
) -> jax.Array:
    """KL(P || softmax of the scores), [C], where no words are on other shards.

    P is normalized, so that the derivative by the log-sum-exp is 1. jax, which cannot
    know that, would sum P up again before it knows the gradient of any score.
    """
    return _divergence_forward(log_p_CV, score_CV, lse_C)[0]


def _divergence_forward(log_p_CV, score_CV, lse_C):
    ahead_CV = log_p_CV - (score_CV - lse_C[:, None])
    divergence_C = jnp.sum(jnp.exp(log_p_CV) * ahead_CV, axis=1)
    return divergence_C, (log_p_CV, score_CV, lse_C)


def _divergence_backward(saved, bar_C):
    log_p_CV, score_CV, lse_C = saved
    pulled_CV = bar_C[:, None] * jnp.exp(log_p_CV)
    ahead_CV = log_p_CV - (score_CV - lse_C[:, None])
    return pulled_CV * (ahead_CV + 1), -pulled_CV, bar_C


divergence_of_scores.defvjp(_divergence_forward, _divergence_backward)
