"""Frequent words with gates of their own: each mixes the K logits by itself.

    l[t, s, j] = feature[t, j] . vector[s] + level[t, j] + offset[s, j]
    logit[t, s] = tree(sigmoid(l[t, s]), (context[t, k] . table[s])_k) + bias[s]

`tree` is the mean of K = 2^n values by K - 1 gates in a binary tree (gated_tree.py), of
which gate j weights its left branch with gamma_j. For K = 4 the weights are

    (g0 g1, g0 (1 - g1), (1 - g0) g2, (1 - g0) (1 - g2)).

Tokens are taken in chunks, each of which is computed again for its gradient, so that no
[T, K, S] is ever stored; if one chunk holds all tokens, it keeps its products. These
read `product_dtype` and sum in float32 or better; those of the gates, which sigmoids
follow, are rounded to it. What is between the products reads and writes [C, S] arrays
of all components in one pass: with S a tenth of the words it would else take as long
as the products do.

On a Hopper GPU a kernel computes the scores where it can (gated_gpu.py).

Axes: S frequent words, J = K - 1 gates, G width of a gate's feature.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import (
    decode,
    gated_parts,
    gated_tree,
    likelihood,
    sampling,
    shards,
)
from softbottle.ops.mixture.activations import DEAD
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.gated_parts import Tokens, Words
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    note,
    product_dtype,
    sum_dtype,
)
from softbottle.ops.mixture.products import pad_width

# Columns that fill 16 bytes of bfloat16.
_ALIGNED = 8


def scores(
    tokens: Tokens, words: Words, labels_T: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    """The labels' logits and the log-sum-exp of all, both [T, 1], differentiable.

    A label that is none of these words has the logit of another.
    """
    options = options.resolve()
    tokens, words, dtype = _prepared(tokens, words, options)
    place_T = jnp.clip(labels_T, 0, len(words.vector_SG) - 1)
    local, held = _implementation(tokens, words, dtype, options)
    chunks = _chunks(tokens, words, held, options)

    def chunk(_, inputs):
        return (), local(dtype, chunks == 1, words, *inputs)

    return likelihood.over_chunks(chunk, (), (tokens, place_T), chunks)[1]


def _implementation(tokens, words, dtype, options):
    """What computes a chunk's scores, and the bytes it keeps per token and word."""
    count, components, _ = tokens.context_TKE.shape
    if options.implementation == "pallas_gpu" and count:
        # Pallas takes a while to import.
        from softbottle.ops.mixture import gated_gpu

        reason = gated_gpu.refusal(tokens, dtype)
        if reason is None:
            kept = 2 * components * dtype.itemsize
            return functools.partial(gated_gpu.scores, options), kept
        note(f"The frequent words take the XLA path: {reason}.")
    return _scores, _held(tokens, words, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores(dtype, keeps, words, tokens, place_C):
    return _scores_forward(dtype, keeps, words, tokens, place_C)[0]


def _scores_forward(dtype, keeps, words, tokens, place_C):
    products = gated_parts.products(dtype, tokens, words)
    logit_CS = gated_parts.mixed(products, tokens, words)
    own_CS = _own(logit_CS, place_C)
    score_C1 = jnp.sum(jnp.where(own_CS, logit_CS, 0.0), axis=1, keepdims=True)
    # Where all of these words have a bias of -inf, -inf would make the gradient NaN.
    floored_CS = jnp.maximum(logit_CS, DEAD)
    lse_C1 = jax.nn.logsumexp(floored_CS, axis=1, keepdims=True)
    # Under `vmap` over places alone both results have to be batched: of one that is
    # not, the gradient would be counted for every element.
    lse_C1 += 0 * place_C[:, None].astype(lse_C1.dtype)
    saved = (words, tokens, place_C, lse_C1, products if keeps else None)
    return (score_C1, lse_C1), saved


def _scores_backward(dtype, keeps, saved, bars):
    words, tokens, place_C, lse_C1, products = saved
    score_bar_C1, lse_bar_C1 = bars
    if not keeps:
        products = gated_parts.products(dtype, tokens, words)
    # Else what both passes compute is written by the one and read by the other, which
    # moves more bytes than to compute it again.
    products = jax.lax.optimization_barrier(products)
    gates, z = gated_parts.parts(products, tokens, words)
    nodes = gated_tree.nodes(gates, z)
    logit_CS = nodes[0] + words.vocabulary.bias_V[None]
    bar_CS = jnp.exp(logit_CS - lse_C1) * lse_bar_C1
    bar_CS += jnp.where(_own(logit_CS, place_C), score_bar_C1, 0.0)
    level_bars, z_bars = gated_tree.pull(gates, nodes, bar_CS)
    # Written once: else they are computed again inside every product that reads them.
    bar_CS, level_bars, z_bars = jax.lax.optimization_barrier(
        jax.tree.map(lambda bar: bar.astype(dtype), (bar_CS, level_bars, z_bars))
    )
    bias_bar_S = jnp.sum(bar_CS, axis=0, dtype=lse_C1.dtype)
    by_words, by_tokens = _gradients(dtype, words, tokens, level_bars, z_bars)
    table_bar_SE, vector_bar_SG, offset_bar_SJ = by_words
    words_bar = Words(
        Vocabulary(table_bar_SE, bias_bar_S), vector_bar_SG, offset_bar_SJ
    )
    return (
        gated_parts.like(words_bar, words),
        gated_parts.like(Tokens(*by_tokens), tokens),
        None,
    )


_scores.defvjp(_scores_forward, _scores_backward)


def _gradients(dtype, words, tokens, level_bars, z_bars):
    """Gradients by (table, vector, offset) and by (context, feature, level)."""
    context_CKE, feature_CJG, _ = tokens
    table_SE, vector_SG = words.vocabulary.table_VE, words.vector_SG
    by_word, by_token = "cs,ce->se", "cs,se->ce"
    table_bar_SE = sum(
        gated_parts.einsum(by_word, dtype, bar_CS, context_CKE[:, k])
        for k, bar_CS in enumerate(z_bars)
    )
    context_bars = [
        gated_parts.einsum(by_token, dtype, bar_CS, table_SE) for bar_CS in z_bars
    ]
    # A column of ones sums the gates' gradients in the same products.
    dim = vector_SG.shape[1]
    feature_CJG, vector_SG = _with_ones(feature_CJG), _with_ones(vector_SG)
    vector_bars = [
        gated_parts.einsum(by_word, dtype, bar_CS, feature_CJG[:, j])
        for j, bar_CS in enumerate(level_bars)
    ]
    feature_bars = [
        gated_parts.einsum(by_token, dtype, bar_CS, vector_SG) for bar_CS in level_bars
    ]
    vector_bar_SJG, feature_bar_CJG = (
        jnp.stack(bars, axis=1) for bars in (vector_bars, feature_bars)
    )
    return (
        (
            table_bar_SE,
            vector_bar_SJG[..., :dim].sum(axis=1),
            vector_bar_SJG[..., dim],
        ),
        (
            jnp.stack(context_bars, axis=1),
            feature_bar_CJG[..., :dim],
            feature_bar_CJG[..., dim],
        ),
    )


def _with_ones(array):
    array = jnp.concatenate([array, jnp.ones_like(array[..., :1])], axis=-1)
    return pad_width(array, _ALIGNED)


def _own(logit_CS, place_C):
    return jnp.arange(logit_CS.shape[1])[None] == place_C[:, None]


def label_score(
    tokens: Tokens, words: Words, labels_T: jax.Array, options: Options
) -> jax.Array:
    """The labels' logits alone, [T, 1], as `scores` has them."""
    tokens, words, dtype = _prepared(tokens, words, options.resolve())
    place_T = jnp.clip(labels_T, 0, len(words.vector_SG) - 1)

    def one(token, word):
        # A chunk of one token, with one word.
        tokens, words = jax.tree.map(lambda leaf: leaf[None], (token, word))
        return gated_parts.logits_of(dtype, tokens, words)[0]

    return jax.vmap(one)(tokens, jax.tree.map(lambda leaf: leaf[place_T], words))


def logits(tokens: Tokens, words: Words, options: Options) -> jax.Array:
    """The logits of all frequent words, [T, S]."""
    return _over(lambda logit_CS, _: logit_CS, tokens, words, (), options)


def total(tokens: Tokens, words: Words, options: Options) -> jax.Array:
    """The sum of the logits of all frequent words, [T]."""
    return _over(
        lambda logit_CS, _: jnp.sum(logit_CS, axis=1), tokens, words, (), options
    )


def blocks(tokens: Tokens, words: Words, options: Options) -> decode.Fold:
    """The frequent words, by their logits; of a split table on the first shard."""
    here = shards.first_row(1, options) == 0

    def fold(add, by_token=(), state=None):
        def block(logit_CS, inputs):
            by_token, state = inputs
            logit_CS = jnp.where(here, logit_CS, -jnp.inf)
            return add(state, by_token, decode.FIRST, logit_CS)

        return _over(block, tokens, words, (by_token, state), options)

    return fold


def sample(tokens: Tokens, words: Words, key: jax.Array, options: Options) -> jax.Array:
    """One of the frequent words per token, by their logits: ids [T]."""
    keys = sampling.token_keys(key)

    def draw(logit_CS, token_C):
        return sampling.winner(logit_CS, keys(token_C), decode.FIRST)[1]

    number_T = jnp.arange(len(tokens.context_TKE))
    return _over(draw, tokens, words, number_T, options)


def _over(
    function: Callable[[jax.Array, Any], Any],
    tokens: Tokens,
    words: Words,
    by_token: Any,
    options: Options,
) -> Any:
    """`function(logit_CS, by_token)` of every chunk of tokens."""
    options = options.resolve()
    tokens, words, dtype = _prepared(tokens, words, options)
    held = _held(tokens, words, dtype)
    chunks = _chunks(tokens, words, held, options)

    # In a loop nothing can be merged with what is computed again.
    @functools.partial(jax.checkpoint, prevent_cse=chunks == 1)
    def one_chunk(words, tokens, by_token):
        return function(gated_parts.logits_of(dtype, tokens, words), by_token)

    def chunk(_, inputs):
        return (), one_chunk(words, *inputs)

    return likelihood.over_chunks(chunk, (), (tokens, by_token), chunks)[1]


def _prepared(tokens, words, options):
    """The arrays, and the dtype of their products."""
    tokens, words = shards.varying_together(tokens, words)
    table_SE = words.vocabulary.table_VE
    dtype = jnp.dtype(product_dtype(options, tokens.context_TKE, table_SE))
    wide = sum_dtype(tokens.context_TKE, table_SE)
    # As wide as their gradients, which are summed over the chunks.
    words = jax.tree.map(lambda array: array.astype(wide), words)
    if options.on_gpu:
        # Of other widths its library has slower products, by a factor of two.
        table_SE = pad_width(words.vocabulary.table_VE, _ALIGNED)
        vocabulary = words.vocabulary._replace(table_VE=table_SE)
        words = words._replace(vocabulary=vocabulary)
        context_TKE = pad_width(tokens.context_TKE, _ALIGNED)
        tokens = tokens._replace(context_TKE=context_TKE)
    return tokens, words, dtype


def _held(tokens, words, dtype):
    """The bytes of a token and word: products, and gradients the next products read."""
    components, wide = tokens.context_TKE.shape[1], words.offset_SJ.dtype
    return components * (wide.itemsize + dtype.itemsize) + (
        (2 * components - 1) * dtype.itemsize
    )


def _chunks(tokens, words, held, options):
    token_bytes = held * len(words.vector_SG)
    return chunk_count(len(tokens.context_TKE), token_bytes, options.block_bytes)
