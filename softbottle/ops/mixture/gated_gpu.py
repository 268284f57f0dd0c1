"""Scores of the frequent words on Hopper GPUs: one kernel, then four GEMMs.

The kernel (gated_kernel.py) leaves E = exp(logit - ref) times the derivatives of the
logit by its products and by the gates' levels. With pull = lse_bar exp(ref - lse), one
factor per token, the gradients are GEMMs of these arrays:

    d context[t, k] = pull[t] sum_s E_k[s, t] table[s]
    d table         = sum_tk E_k[s, t] (pull[t] context[t, k])

and the same with what the gates read in the place of contexts and table. The label's
entries of these arrays are written before: in them the gradient of its own score and
what it adds to the normalizer nearly cancel.

References are the labels' scores, of a rare label that of the last of these words: the
first may be ruled out, as padding is. Tokens whose sum shows that theirs is too low are
done again, as in pallas_gpu.py, which also says why the host need not wait for that.

What a gate reads of a token is its feature, its level in two bfloat16 terms, and which
gate it is; of a word its vector, ones, and its offsets in two terms. So a level is one
product, and the gradients of levels and offsets are columns of those of the products.
E itself takes the place of a last gate, and gives the bias's gradient.

Axes: S words, C tokens, K components, J = K - 1 gates, G width of a gate's feature;
P, Q, R, X as in gated_kernel.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from softbottle.ops.mixture import gated_kernel, gated_parts, gated_tree, pallas_gpu
from softbottle.ops.mixture.activations import DEAD
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.gated_parts import Tokens, Words
from softbottle.ops.mixture.options import Options
from softbottle.ops.mixture.products import (
    pad_width,
    product,
    round_up,
    seen,
    two_terms,
)

# The least factor of a token over the gradient of its label's score. With a smaller one
# the label's entry would leave bfloat16's range; all others add nothing to it then.
_LEAST = 1e-30


class _Own(NamedTuple):
    """The label's logit, and its derivatives by products and by levels and bias."""

    score_C: jax.Array
    by_product_CK: jax.Array
    by_level_CK: jax.Array


def refusal(tokens: Tokens, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot do this, or None where it can."""
    _, gates, dim = tokens.feature_TJG.shape
    most = gated_kernel.GATE_WIDTH - (_read_width(tokens) - dim)
    if dtype != jnp.bfloat16:
        return f"products are in {dtype}, not bfloat16"
    if gates + 1 not in gated_kernel.COMPONENTS:
        return f"there are {gates + 1} components, not 2 or 4"
    if dim > most:
        return f"gate_dim is {dim}, above {most}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def scores(
    options: Options,
    dtype: jnp.dtype,
    keeps: bool,
    words: Words,
    tokens: Tokens,
    place_C: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """A chunk's logits at some words, and the log-sum-exp of all, both [C, 1].

    Args:
        options: with the device.
        dtype: of the GEMMs.
        keeps: whether the arrays that the gradient needs are kept, or made again.
        words: with sums' dtypes.
        tokens: of the chunk.
        place_C: the words.
    """
    del keeps
    own = _own(options, dtype, words, tokens, place_C)
    inputs = _inputs(dtype, words, tokens)
    components = tokens.context_TKE.shape[1]
    lse_C = pallas_gpu.combined(*gated_kernel.call(options, components, inputs))
    lse_C = lse_C[: place_C.size].astype(own.score_C.dtype)
    # Under `vmap` over places alone both results have to be batched: of one that is
    # not, the gradient would be counted for every element.
    lse_C += 0 * place_C.astype(lse_C.dtype)
    return own.score_C[:, None], lse_C[:, None]


def _forward(options, dtype, keeps, words, tokens, place_C):
    own = _own(options, dtype, words, tokens, place_C)
    inputs, components = _inputs(dtype, words, tokens), tokens.context_TKE.shape[1]
    near_C = jnp.maximum(own.score_C, DEAD)
    stored, lse_C, ref_C = _exponentials(options, components, inputs, near_C)
    lse_C = lse_C.astype(own.score_C.dtype)
    saved = (words, tokens, place_C, own, lse_C)
    kept = (stored, ref_C) if keeps else None
    return (own.score_C[:, None], lse_C[:, None]), (*saved, kept)


def _backward(options, dtype, keeps, saved, bars):
    words, tokens, place_C, own, lse_C, kept = saved
    score_bar_C, lse_bar_C = (bar_C1[:, 0] for bar_C1 in bars)
    inputs = _inputs(dtype, words, tokens)
    count, components, _ = tokens.context_TKE.shape
    if keeps:
        (z_PR, level_PR), ref_C = kept
    else:
        padded_C = _pad_tokens(lse_C, components, -DEAD)
        settled = inputs._replace(ref_C=padded_C.astype(jnp.float32))
        (z_PR, level_PR), _ = gated_kernel.call(options, components, settled)
        ref_C = lse_C
    pull_C = lse_bar_C * jnp.exp(ref_C - lse_C)
    least_C = _LEAST * score_bar_C
    scale_C = jnp.where(jnp.abs(pull_C) < jnp.abs(least_C), least_C, pull_C)
    total_C = jnp.exp(own.score_C - lse_C) * lse_bar_C + score_bar_C
    some_C = scale_C != 0
    entry_C1 = jnp.where(some_C, total_C / jnp.where(some_C, scale_C, 1.0), 0.0)
    entry_C1 = entry_C1[:, None]
    column_CK = _column(count, components)
    z_PR, level_PR = (
        array_PR.at[place_C[:, None], column_CK].set(
            (entry_C1 * by_CK).astype(dtype),
            unique_indices=True,
            mode="promise_in_bounds",
        )
        for array_PR, by_CK in (
            (z_PR, own.by_product_CK),
            (level_PR, own.by_level_CK),
        )
    )
    scale_CK = jnp.broadcast_to(scale_C[:, None], column_CK.shape)
    scale_R1 = by_group(scale_CK[:, :, None], components)

    def gradients(array_PR, by_word_PX, by_token_RX):
        wide = scale_R1.dtype
        scaled_RX = seen(scale_R1 * by_token_RX.astype(wide), dtype, options)
        word_bar = product(array_PR[None], scaled_RX[None], (2, 1), wide)[0]
        token_bar = product(array_PR[None], by_word_PX[None], (1, 1), wide)[0]
        return word_bar, by_token(scale_R1 * token_bar, components)[:count]

    table_bar_PQ, context_bar_CKQ = gradients(z_PR, inputs.table_PQ, inputs.context_RQ)
    word_bar_PX, read_bar_CKX = gradients(level_PR, inputs.word_PX, inputs.read_RX)
    size, width = words.vocabulary.table_VE.shape
    _, gates, dim = tokens.feature_TJG.shape
    first = dim + 2
    words_bar = Words(
        Vocabulary(table_bar_PQ[:size, :width], word_bar_PX[:size, first + 2 * gates]),
        word_bar_PX[:size, :dim],
        word_bar_PX[:size, first : first + gates],
    )
    tokens_bar = Tokens(
        context_bar_CKQ[..., :width],
        read_bar_CKX[:, :gates, :dim],
        read_bar_CKX[:, :gates, dim],
    )
    return (
        gated_parts.like(words_bar, words),
        gated_parts.like(tokens_bar, tokens),
        None,
    )


scores.defvjp(_forward, _backward)


def by_group(array_CKX: jax.Array, components: int) -> jax.Array:
    """Tokens and components as the kernel's columns, padded with zeros: [R, X]."""
    tokens = gated_kernel.GROUP_COLUMNS // components
    array_CKX = _pad_tokens(array_CKX, components)
    array = array_CKX.reshape(-1, tokens, *array_CKX.shape[1:])
    return jnp.swapaxes(array, 1, 2).reshape(-1, array_CKX.shape[2])


def by_token(array_RX: jax.Array, components: int) -> jax.Array:
    """The inverse of `by_group`, with the padding: [C, K, X]."""
    tokens, width = gated_kernel.GROUP_COLUMNS // components, array_RX.shape[1]
    array = array_RX.reshape(-1, components, tokens, width)
    return jnp.swapaxes(array, 1, 2).reshape(-1, components, width)


def _column(count, components):
    """The column of each token and component, [C, K]."""
    tokens = gated_kernel.GROUP_COLUMNS // components
    token_C1 = jnp.arange(count)[:, None]
    group_C1, place_C1 = token_C1 // tokens, token_C1 % tokens
    component_1K = jnp.arange(components)[None]
    return group_C1 * gated_kernel.GROUP_COLUMNS + component_1K * tokens + place_C1


def _pad_tokens(array, components, value=0.0):
    size = gated_kernel.BLOCK_COLUMNS // components
    more = ((0, -len(array) % size), *((0, 0),) * (array.ndim - 1))
    return jnp.pad(array, more, constant_values=value)


def _read_width(tokens):
    """Columns of what gates read: feature, level twice, offsets twice, bias."""
    _, gates, dim = tokens.feature_TJG.shape
    return dim + 2 + 2 * gates + 1


def _inputs(dtype, words, tokens):
    """The kernel's inputs but for references."""
    (table_SE, bias_S), vector_SG, offset_SJ = words
    context_CKE, feature_CJG, level_CJ = tokens
    # Else XLA makes the token the fastest axis, and transposes contexts for the kernel.
    context_CKE = with_layout_constraint(context_CKE, Layout((0, 1, 2)))
    components, (size, gates) = context_CKE.shape[1], offset_SJ.shape
    more = round_up(size, gated_kernel.BLOCK_WORDS) - size

    def columns(*parts):
        joined = jnp.concatenate([part.astype(dtype) for part in parts], axis=-1)
        return pad_width(joined, gated_kernel.GATE_WIDTH)

    ones_S2 = jnp.ones_like(offset_SJ, shape=(size, 2))
    none_S1 = jnp.zeros_like(offset_SJ, shape=(size, 1))
    word_SX = columns(vector_SG, ones_S2, *two_terms(offset_SJ, dtype), none_S1)
    which_JJ = jnp.eye(gates, dtype=dtype)
    which_CJJ = jnp.broadcast_to(which_JJ[None], (len(level_CJ), gates, gates))
    levels = two_terms(level_CJ[:, :, None], dtype)
    read_CJX = columns(feature_CJG, *levels, which_CJJ, which_CJJ)
    # The last gate's place is that of E, which gives the bias's gradient.
    bias_X = jnp.arange(read_CJX.shape[2]) == _read_width(tokens) - 1
    bias_C1X = jnp.broadcast_to(bias_X, (len(level_CJ), 1, bias_X.size)).astype(dtype)
    read_CKX = jnp.concatenate([read_CJX, bias_C1X], axis=1)
    context_RE = by_group(context_CKE.astype(dtype), components)
    table_SQ = pad_width(table_SE.astype(dtype), gated_kernel.BLOCK_WIDTH)
    return gated_kernel.Inputs(
        jnp.pad(table_SQ, ((0, more), (0, 0))),
        pad_width(context_RE, gated_kernel.BLOCK_WIDTH),
        jnp.pad(word_SX, ((0, more), (0, 0))),
        by_group(read_CKX, components),
        jnp.pad(jnp.maximum(bias_S, DEAD), (0, more), constant_values=DEAD),
    )


def _own(options, dtype, words, tokens, place_C):
    """What the labels have, from what the products read, in the sums' dtype."""
    (table_SE, bias_S), vector_SG, offset_SJ = words
    wide = table_SE.dtype
    read = (table_SE[place_C], vector_SG[place_C], *tokens[:2])
    row_CE, vector_CG, context_CKE, feature_CJG = (
        seen(array, dtype, options).astype(wide) for array in read
    )
    z_CK = jnp.einsum("cke,ce->ck", context_CKE, row_CE)
    level_CJ = jnp.einsum("cjg,cg->cj", feature_CJG, vector_CG)
    level_CJ += tokens.level_TJ.astype(wide) + offset_SJ[place_C]
    gates = [jax.nn.sigmoid(level_C) for level_C in level_CJ.T]
    nodes = gated_tree.nodes(gates, list(z_CK.T))
    levels, products = gated_tree.pull(gates, nodes, jnp.ones_like(nodes[0]))
    return _Own(
        nodes[0] + bias_S[place_C],
        jnp.stack(products, axis=1),
        jnp.stack([*levels, jnp.ones_like(nodes[0])], axis=1),
    )


def _exponentials(options, components, inputs, near_C):
    """What is stored, and normalizers and references, [C]."""
    count = near_C.size
    near_C = _pad_tokens(near_C.astype(jnp.float32), components, -DEAD)
    call = functools.partial(gated_kernel.call, options, components)
    stored, sum_JC = call(inputs._replace(ref_C=near_C))
    total_C = jnp.sum(sum_JC, axis=0)
    tile = gated_kernel.BLOCK_COLUMNS // components
    far_C, which = pallas_gpu.far_tiles(total_C, tile)
    # What these give for other tokens was never written.
    lse_C = pallas_gpu.combined(*call(inputs._replace(which=which)))
    ref_C = jnp.where(far_C, lse_C, near_C)
    again = inputs._replace(ref_C=ref_C, which=which, stored=stored)
    stored, _ = call(again)
    # Behind their normalizers exponentials add up to 1.
    lse_C = ref_C + jnp.log(jnp.where(far_C, 1.0, total_C))
    return stored, lse_C[:count], ref_C[:count]
