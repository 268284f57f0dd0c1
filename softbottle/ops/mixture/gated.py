"""Frequent words with gates of their own: each mixes the K logits by itself.

    l[t, s, j] = feature[t, j] . vector[s] + level[t, j] + offset[s, j]
    logit[t, s] = tree(sigmoid(l[t, s]), (context[t, k] . table[s])_k) + bias[s]

`tree` is the mean of K = 2^n values by K - 1 gates in a binary tree: gate j weights its
left branch with gamma_j and its right one with 1 - gamma_j, and the branches of gate j
are those of the gates 2 j + 1 and 2 j + 2. For K = 4 the weights are

    (g0 g1, g0 (1 - g1), (1 - g0) g2, (1 - g0) (1 - g2)).

Tokens are taken in chunks and a chunk is computed again for its gradient, so that no
[T, K, S] is ever stored. Products read `product_dtype` and sum in float32 or better.

Axes: S frequent words, J = K - 1 gates, G width of a gate's feature.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import decode, likelihood, shards
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    product_dtype,
    sum_dtype,
)


class Tokens(NamedTuple):
    """Contexts, and what the gates read, of every token."""

    context_TKE: jax.Array
    feature_TJG: jax.Array
    level_TJ: jax.Array


class Words(NamedTuple):
    """The frequent words: rows of the table, and what their gates are made of."""

    vocabulary: Vocabulary
    vector_SG: jax.Array
    offset_SJ: jax.Array


def tree(level: Sequence[jax.Array], values: Sequence[jax.Array]) -> jax.Array:
    """The mean of the values by the sigmoids of the gates' levels.

    Args:
        level: l of the K - 1 gates, arrays that broadcast to the values.
        values: K arrays of one shape, K a power of two.
    """
    values = list(values)
    while len(values) > 1:
        half = len(values) // 2
        # The lowest gates that are left: those before them have them as branches.
        gates = [jax.nn.sigmoid(level[half - 1 + n]) for n in range(half)]
        values = [
            right + gate * (left - right)
            for gate, left, right in zip(gates, values[::2], values[1::2], strict=True)
        ]
    return values[0]


def scores(
    tokens: Tokens, words: Words, labels_T: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    """The labels' logits and the log-sum-exp of all, both [T, 1], differentiable.

    A label that is none of these words has the logit of another.
    """
    count = len(words.vector_SG)

    def read(logit_CS, label_C):
        place_C1 = jnp.clip(label_C, 0, count - 1)[:, None]
        score_C1 = jnp.take_along_axis(logit_CS, place_C1, axis=1)
        return score_C1, jax.nn.logsumexp(logit_CS, axis=1, keepdims=True)

    return _over(read, tokens, words, labels_T, options)


def logits(tokens: Tokens, words: Words, options: Options) -> jax.Array:
    """The logits of all frequent words, [T, S]."""
    return _over(lambda logit_CS, _: logit_CS, tokens, words, (), options)


def top_k(
    tokens: Tokens, words: Words, k: int, options: Options
) -> tuple[jax.Array, jax.Array]:
    """The k largest logits of each token and their words, [T, k]."""
    return _over(
        lambda logit_CS, _: jax.lax.top_k(logit_CS, k), tokens, words, (), options
    )


def sample(tokens: Tokens, words: Words, key: jax.Array, options: Options) -> jax.Array:
    """One of the frequent words per token, by their logits: ids [T]."""
    keys = decode.token_keys(key)

    def draw(logit_CS, token_C):
        return decode.winner(logit_CS, keys(token_C), 0)[1]

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
    tokens, words = shards.varying_together(tokens, words)
    table_SE = words.vocabulary.table_VE
    dtype = product_dtype(options, tokens.context_TKE, table_SE)
    wide = sum_dtype(tokens.context_TKE, table_SE)
    # As wide as their gradients, which are summed over the chunks.
    words = jax.tree.map(lambda array: array.astype(wide), words)
    count, components, _ = tokens.context_TKE.shape
    row_bytes = (3 * components - 1) * len(table_SE) * wide.itemsize
    chunks = chunk_count(count, row_bytes, options.block_bytes)

    # In a loop nothing can be merged with what is computed again.
    @functools.partial(jax.checkpoint, prevent_cse=chunks == 1)
    def one_chunk(words, tokens, by_token):
        return function(_logits(dtype, tokens, words), by_token)

    def chunk(_, inputs):
        return (), one_chunk(words, *inputs)

    return likelihood.over_chunks(chunk, (), (tokens, by_token), chunks)[1]


def _logits(dtype, tokens, words):
    """[C, S]."""
    (table_SE, bias_S), vector_SG, offset_SJ = words
    context_CKE, feature_CJG, level_CJ = tokens
    z_CKS = _product(dtype, context_CKE, table_SE)
    level_CJS = _product(dtype, feature_CJG, vector_SG)
    level_CJS += level_CJ.astype(z_CKS.dtype)[:, :, None] + offset_SJ.T[None]
    return tree(_along(level_CJS), _along(z_CKS)) + bias_S[None]


def _along(array_CKS):
    return [array_CKS[:, k] for k in range(array_CKS.shape[1])]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype, left_CKE, right_SE):
    """left . right, [C, K, S]; its gradients are products of the same dtype."""
    return _einsum("cke,se->cks", dtype, left_CKE, right_SE)


def _product_forward(dtype, left_CKE, right_SE):
    return _product(dtype, left_CKE, right_SE), (left_CKE, right_SE)


def _product_backward(dtype, saved, bar_CKS):
    left_CKE, right_SE = saved
    left_bar_CKE = _einsum("cks,se->cke", dtype, bar_CKS, right_SE)
    right_bar_SE = _einsum("cks,cke->se", dtype, bar_CKS, left_CKE)
    return left_bar_CKE.astype(left_CKE.dtype), right_bar_SE.astype(right_SE.dtype)


_product.defvjp(_product_forward, _product_backward)


def _einsum(formula, dtype, left, right):
    return jnp.einsum(
        formula,
        left.astype(dtype),
        right.astype(dtype),
        preferred_element_type=sum_dtype(left, right),
    )
