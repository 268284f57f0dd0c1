"""Scores of all words for a chunk of tokens, [C, K, V], and their log-sum-exp.

Gradients are computed from stored inputs by products that read them rounded, as in the
loss, and sum in float32 or better.

Axes: N classes of words, P words of one; R rows of contexts.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, shards
from softbottle.ops.mixture.activations import DEAD
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options, product_dtype, sum_dtype
from softbottle.ops.mixture.products import product, round_up

# What GPUs' matrix units, and the kernel, like the number of words to be a multiple of.
MULTIPLE = 256


class Words(NamedTuple):
    """The words by class, padded to sizes that matrix units like.

    Products read `cast_NPE`. The table's gradient goes to `table_NPE`, which is as wide
    as its sums and else not read; that of the gradient itself, in second derivatives,
    to `cast_NPE`.
    """

    table_NPE: jax.Array
    cast_NPE: jax.Array
    bias_V: jax.Array


def words_of(context: jax.Array, vocabulary: Vocabulary, options: Options) -> Words:
    """The words for `scores` of such contexts."""
    table_VE, bias_V = vocabulary
    wide = sum_dtype(context, table_VE)
    cast_VE = table_VE.astype(product_dtype(options, context, table_VE))
    count = classes.count(context)
    size = round_up(-(-len(table_VE) // count), MULTIPLE if options.on_gpu else 1)
    return Words(
        classes.split(table_VE.astype(wide), count, size),
        classes.split(cast_VE, count, size),
        bias_V.astype(wide),
    )


def scores(context: jax.Array, words: Words) -> jax.Array:
    """z of every local word, [C, K, V]; its gradient's products read rounded inputs."""
    context_CNKE = context[:, None] if context.ndim == 3 else context
    return _scores(*shards.varying_together(context_CNKE, words))


@jax.custom_vjp
def _scores(context_CNKE, words):
    table_NPE, cast_NPE, bias_V = words
    tokens, count, components, _ = context_CNKE.shape
    context_NRE = _rows(context_CNKE, cast_NPE.dtype)
    z_NRP = product(context_NRE, cast_NPE, (2, 2), table_NPE.dtype)
    size = cast_NPE.shape[1]
    z_CKPN = jnp.moveaxis(z_NRP.reshape(count, tokens, components, size), 0, 3)
    z_CKV = z_CKPN.reshape(tokens, components, size * count)[:, :, : len(bias_V)]
    return z_CKV + bias_V[None, None]


def _rows(array_CNKE, dtype):
    """Rows for the products of each class."""
    tokens, count, components, width = array_CNKE.shape
    array_NCKE = jnp.moveaxis(array_CNKE, 1, 0).astype(dtype)
    return array_NCKE.reshape(count, tokens * components, width)


def _scores_forward(context_CNKE, words):
    return _scores(context_CNKE, words), (context_CNKE, words.cast_NPE)


def _scores_backward(saved, bar_CKV):
    context_CNKE, cast_NPE = saved
    wide, dtype, rows = bar_CKV.dtype, cast_NPE.dtype, bar_CKV.shape[2]
    count, words, width = cast_NPE.shape
    tokens, _, components, _ = context_CNKE.shape
    beyond = ((0, 0), (0, 0), (0, count * words - rows))
    # Written once, rounded and padded: else every product would do it again.
    bar_CKV = jnp.pad(bar_CKV.astype(dtype), beyond)
    bar_CKV = jax.lax.optimization_barrier(bar_CKV)
    bar_RPN = bar_CKV.reshape(tokens * components, words, count)
    bar_NRP = jnp.moveaxis(bar_RPN, 2, 0)
    context_bar_NRE = product(bar_NRP, cast_NPE, (2, 1), wide)
    context_bar_NCKE = context_bar_NRE.reshape(count, tokens, components, width)
    words_bar = Words(
        product(bar_NRP, _rows(context_CNKE, dtype), (1, 1), wide),
        None,
        jnp.sum(bar_CKV, axis=(0, 1), dtype=wide)[:rows],
    )
    context_bar_CNKE = jnp.moveaxis(context_bar_NCKE, 0, 1)
    return context_bar_CNKE.astype(context_CNKE.dtype), words_bar


_scores.defvjp(_scores_forward, _scores_backward)


def fused_scores(
    fused: Callable, options: Options, context_CKE: jax.Array, words: Words
) -> tuple[jax.Array, jax.Array]:
    """z of every local word [C, K, V] and its log-sum-exp [C, K], in one pass."""
    inputs = shards.varying_together(context_CKE[:, None], words)
    return _scores_and_lse(fused, options, *inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scores_and_lse(fused, options, context_C1KE, words):
    return _both_forward(fused, options, context_C1KE, words)[0]


def _both_forward(fused, options, context_C1KE, words):
    _, cast_1PE, bias_V = words
    tokens, _, components, _ = context_C1KE.shape
    rows, padded = len(bias_V), cast_1PE.shape[1]
    bias_V = jnp.where(shards.live_rows(rows, options), bias_V, DEAD)
    bias_P = jnp.pad(bias_V, (0, padded - rows), constant_values=DEAD)
    context_RE = _rows(context_C1KE, cast_1PE.dtype)[0]
    z_RP, lse_R = fused(context_RE, cast_1PE[0], bias_P, options)
    z_CKV = z_RP[:, :rows].reshape(tokens, components, rows)
    lse_CK = lse_R.reshape(tokens, components)
    return (z_CKV, lse_CK), ((context_C1KE, cast_1PE), z_CKV, lse_CK)


def _both_backward(fused, options, saved, bars):
    del fused, options
    saved, z_CKV, lse_CK = saved
    z_bar_CKV, lse_bar_CK = bars
    p_CKV = jnp.exp(z_CKV - lse_CK[:, :, None])
    return _scores_backward(saved, z_bar_CKV + lse_bar_CK[:, :, None] * p_CKV)


_scores_and_lse.defvjp(_both_forward, _both_backward)


def live(score: jax.Array, options: Options) -> jax.Array:
    """Scores over the local words, [..., V], finite and DEAD where there is no word."""
    live_V = shards.live_rows(score.shape[-1], options)
    live_V = live_V.reshape(*(1,) * (score.ndim - 1), -1)
    return jnp.where(live_V, jnp.maximum(score, DEAD), DEAD)


def joint_lse(score: jax.Array, options: Options) -> jax.Array:
    """The log-sum-exp over the words of all shards."""
    return shards.joint_lse(jax.nn.logsumexp(score, axis=-1), options)
