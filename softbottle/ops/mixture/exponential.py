"""The mixture loss and its gradient from stored exponentials: three products in all.

Rows r are the (token, component) pairs of one chunk of tokens. With any reference
ref[r] near the row's largest score,

    E[r, v]  = exp(g(z[r, v]) - ref[r]) g'(z[r, v])     first product, stored rounded
    S[r]     = sum_v exp(g(z[r, v]) - ref[r])           from the unrounded values
    lse[r]   = ref[r] + log S[r]
    scale[r] = weight[token] posterior[r] exp(ref[r] - lse[r])

    d context[r] = scale[r] (E[r] @ table)                          second product
    d table      = E' @ (scale context)                             third product

Normaliser, responsibility and weight are one factor a row, so nothing passes over
[rows, vocabulary] besides the products. What they hold for the label's word is then
taken out again and its exact float32 value, with the one-hot part, is put in its place:

    delta[r] = scale[r] exp(g(z[r, label]) - ref[r]) g' - weight[token] posterior[r] g'

on [rows, width] only. This is the part of the gradient that matters most.

bfloat16 has float32's range of exponents, so ref need not be the maximum: it is the
larger of the label's score and the maximum over a sample of words. Where that is too
far below the truth (`FAR` nats), the chunk's first product is done again with ref =
lse, from a pass over the normalizers. The table is padded to sizes that matrix units
like, its padding never enters a sum, and the same inputs give the same bits.

Axes: P words; Q, F and M the width, padded for the first, second and third product.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import likelihood, shards
from softbottle.ops.mixture.activations import DEAD, Activation
from softbottle.ops.mixture.arrays import Mixture, Targets, Vocabulary
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    product_dtype,
    sum_dtype,
)

# exp(40) leaves as much room again, on either side, for the factors in `scale`.
FAR = 40.0
SAMPLE = 256
SCATTER_TOKENS = 1024
REDO_BYTES = 32 * 2**20


class Route(NamedTuple):
    """How a platform computes the products, and the sizes that it likes.

    Attributes:
        first: (context_RQ, table_PQ, bias_P, ref_R, activation, options) ->
            (E_RP, sum_R).
        lse: (context_TKE, vocabulary, activation, options) -> normalizers [T, K].
        multiples: what rows, words and width of the first product are padded to.
        width: what the width of the third product is padded to.
    """

    first: Callable
    lse: Callable
    multiples: tuple[int, int, int]
    width: int


def takes(activation: Activation) -> bool:
    """Whether the activation is fixed, so that its parameters need no gradient."""
    return not activation.params


def loss(
    route: Route,
    mixture: Mixture,
    vocabulary: Vocabulary,
    targets: Targets,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """Weighted sum of the tokens' negative log-likelihoods, gradient in forward."""
    _, *inputs = likelihood.vary((), mixture, vocabulary, targets)
    return _loss(route, activation, options, *inputs)


def chunks(route: Route, context_TKE: Any, table_VE: Any, options: Options) -> int:
    """How many chunks of tokens there are; of the arrays only shapes are read."""
    tokens, components = context_TKE.shape[:2]
    words = _round_up(table_VE.shape[0], route.multiples[1])
    row_bytes = words * product_dtype(options, context_TKE, table_VE).itemsize
    return chunk_count(tokens, components * row_bytes, options.loss_bytes(row_bytes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _loss(route, activation, options, mixture, vocabulary, targets):
    return likelihood.loss_from(
        route.lse, mixture, vocabulary, targets, activation, options
    )


def _loss_forward(route, activation, options, mixture, vocabulary, targets):
    context_TKE, table_VE = mixture.context_TKE, vocabulary.table_VE
    padded = _pad(route, context_TKE, vocabulary, options)

    # Under `vmap` one element after the other: a batched guard would take both ways.
    one_chunk = jax.custom_batching.sequential_vmap(
        functools.partial(_chunk, route, activation, options)
    )

    def chunk(sums, tokens):
        return one_chunk(padded, sums, *tokens)

    sums = _zero_sums(route, context_TKE, len(padded.table_PQ), table_VE)
    sums, by_token = likelihood.over_chunks(
        chunk, sums, (mixture, targets), chunks(route, context_TKE, table_VE, options)
    )
    context_bar_TKE, nll_T, weight_TK = by_token
    nll_T = nll_T.astype(targets.weights_T.dtype)
    bars = (
        Mixture(
            -weight_TK.astype(mixture.log_prior_TK.dtype),
            context_bar_TKE.astype(context_TKE.dtype),
        ),
        _vocabulary_bar(sums, vocabulary),
        Targets(None, nll_T),
    )
    return likelihood.weighted(targets.weights_T, nll_T), bars


def _loss_backward(route, activation, options, saved, loss_bar):
    del route, activation
    return likelihood.loss_backward(((), *saved), loss_bar, options)[1:]


_loss.defvjp(_loss_forward, _loss_backward)


class _Padded(NamedTuple):
    """The table in the products' dtype and in their widths, and what goes with it."""

    local: Vocabulary  # without padding, for the label's rows and the safe path
    table_PQ: jax.Array
    table_PF: jax.Array
    bias_P: jax.Array
    sample_WE: jax.Array
    sample_bias_W: jax.Array


def _pad(route, context_TKE, vocabulary, options):
    table_VE, bias_V = vocabulary
    rows = len(table_VE)
    wide = sum_dtype(context_TKE, table_VE)
    cast_VE = table_VE.astype(product_dtype(options, context_TKE, table_VE))
    live_V = shards.live_rows(rows, options)
    masked_V = jnp.where(live_V, bias_V.astype(wide), DEAD)
    # Strided, because words are usually sorted by frequency.
    stride = -(-rows // SAMPLE)
    more = (0, _round_up(rows, route.multiples[1]) - rows)
    table_PE = jnp.pad(cast_VE, (more, (0, 0)))
    return _Padded(
        Vocabulary(cast_VE, bias_V),
        _pad_width(table_PE, route.multiples[2]),
        # A library's product wants rows of whole 16 bytes, and needs no more.
        _pad_width(table_PE, min(8, route.width)),
        jnp.pad(masked_V, (more,), constant_values=DEAD),
        cast_VE[::stride],
        masked_V[::stride],
    )


class _Sums(NamedTuple):
    """The gradients of table and bias so far.

    The bias's is a column of the table's where the padded width has room for it or is
    so large that a column is nothing. Else (1,024 would become 1,056, a sixth slower)
    it is an array and a product of its own.
    """

    table_PM: jax.Array
    bias_P: jax.Array | None


def _vocabulary_bar(sums, vocabulary):
    """The gradients of table and bias, without padding and in their dtypes."""
    table_VE, bias_V = vocabulary
    rows, width = table_VE.shape
    bias_P = sums.table_PM[:, width] if sums.bias_P is None else sums.bias_P
    return Vocabulary(
        sums.table_PM[:rows, :width].astype(table_VE.dtype),
        bias_P[:rows].astype(bias_V.dtype),
    )


def _zero_sums(route, context_TKE, words, table_VE):
    width = table_VE.shape[1]
    wide = sum_dtype(context_TKE, table_VE)
    rides = route.width == 1 or width % 128 != 0 or width >= 4096
    columns = _round_up(width + rides, route.width)
    zeros = _Sums(
        jnp.zeros((words, columns), wide), None if rides else jnp.zeros(words, wide)
    )
    axes = jax.typeof(context_TKE).manual_axis_type.varying
    return shards.vary_over(axes, zeros)[0]


def _chunk(route, activation, options, padded, sums, mixture, targets):
    """Add a chunk's part of the table's gradient; return the rest of its results."""
    (log_prior_CK, context_CKE), (labels_C, weights_C) = mixture, targets
    local_VE = padded.local.table_VE
    cast_CKE = context_CKE.astype(local_VE.dtype)
    score_CK, slope_CK = likelihood.target_score_and_slope(
        cast_CKE, padded.local, labels_C, activation, options
    )
    e_RP, total_CK, ref_CK = _exponentials(
        route, activation, options, padded, cast_CKE, score_CK
    )
    lse_CK = shards.joint_lse(ref_CK + jnp.log(total_CK), options)
    nll_C = likelihood.nll(log_prior_CK, score_CK, lse_CK)
    posterior_CK = likelihood.posterior(log_prior_CK, score_CK, lse_CK, nll_C)
    weight_CK = weights_C[:, None] * posterior_CK
    scale_CK = weight_CK * jnp.exp(ref_CK - lse_CK)

    label_C, owned_C = shards.local_labels(labels_C, len(local_VE), options)
    here_CK = owned_C[:, None] & (weight_CK != 0)
    rows = jnp.arange(ref_CK.size).reshape(ref_CK.shape)
    stored_CK = e_RP[rows, jnp.broadcast_to(label_C[:, None], ref_CK.shape)]
    stored_CK = jnp.where(here_CK, stored_CK.astype(ref_CK.dtype), 0.0)
    delta_CK = scale_CK * jnp.exp(score_CK - ref_CK) * slope_CK - weight_CK * slope_CK
    delta_CK = jnp.where(here_CK, delta_CK, 0.0)

    product_RF = product(e_RP, padded.table_PF, (1, 0), ref_CK.dtype)
    product_RE = product_RF[: ref_CK.size, : context_CKE.shape[2]]
    product_CKE = product_RE.reshape(context_CKE.shape)
    label_row_CE = local_VE[label_C].astype(ref_CK.dtype)
    of_label_CK = delta_CK - scale_CK * stored_CK
    context_bar_CKE = scale_CK[:, :, None] * product_CKE
    context_bar_CKE += of_label_CK[:, :, None] * label_row_CE[:, None]
    factors = (scale_CK, stored_CK, delta_CK)
    sums = _add_to_table(sums, e_RP, cast_CKE, factors, label_C, owned_C)
    return sums, (context_bar_CKE, nll_C, weight_CK)


def _exponentials(route, activation, options, padded, cast_CKE, score_CK):
    """E [rows, P], its sums and references [C, K], the guard passed."""
    size, components, width = cast_CKE.shape
    count = size * components
    context_RE = cast_CKE.reshape(count, width)
    more = (0, _round_up(count, route.multiples[0]) - count)
    context_RQ = _pad_width(jnp.pad(context_RE, (more, (0, 0))), route.multiples[2])

    def first(context_RQ, ref_R):
        ref_R = jnp.pad(ref_R, (more,))
        tables = (padded.table_PQ, padded.bias_P)
        return route.first(context_RQ, *tables, ref_R, activation, options)

    def redo(state):
        small = dataclasses.replace(options, budget_bytes=REDO_BYTES)
        lse_CK = route.lse(cast_CKE, padded.local, activation, small)
        lse_R = shards.joint_lse(lse_CK, options).reshape(count)
        done = state[3] & jnp.zeros((), bool)
        return shards.varying_together(*first(context_RQ, lse_R), lse_R, done)

    ref_R = _reference(context_RE, score_CK.reshape(count), padded, activation, options)
    e_RP, total_R = first(context_RQ, ref_R)
    # A sample that is the whole vocabulary has its maximum: nothing to guard against.
    if len(padded.sample_WE) < len(padded.local.table_VE):
        far = ~jnp.all(total_R[:count] <= jnp.exp(jnp.asarray(FAR, ref_R.dtype)))
        if options.vocab_axis is not None:
            far = jax.lax.pmax(far.astype(jnp.int32), options.vocab_axis) > 0
        state = shards.varying_together(e_RP, total_R, ref_R, far)
        # A loop of at most one turn: unlike `cond`, it leaves E where it is.
        e_RP, total_R, ref_R, _ = jax.lax.while_loop(lambda s: s[3], redo, state)
    by_token = (size, components)
    return e_RP, total_R[:count].reshape(by_token), ref_R.reshape(by_token)


def _reference(context_RE, score_R, padded, activation, options):
    """The label's score or the best of a sample of words, whichever is larger."""
    z_RW = product(context_RE, padded.sample_WE, (1, 1), score_R.dtype)
    g_RW = activation.apply(activation.theta, z_RW + padded.sample_bias_W[None])
    best_R = jnp.max(g_RW, axis=1)
    if options.vocab_axis is not None:
        best_R = jax.lax.pmax(best_R, options.vocab_axis)
    # The score of a label that is no word is NaN, which must stay with its token.
    return jnp.where(score_R > best_R, score_R, best_R)


def _add_to_table(sums, e_RP, cast_CKE, factors, label_C, owned_C):
    """The third product, and the label's part put right."""
    scale_CK, stored_CK, delta_CK = factors
    size, components, width = cast_CKE.shape
    wide, dtype = scale_CK.dtype, e_RP.dtype
    columns = max(sums.table_PM.shape[1], width + 1)
    # A column of ones beside the contexts gives the bias its gradient.
    ones_CK1 = jnp.ones((size, components, 1), wide)
    context_CKM = jnp.concatenate([cast_CKE.astype(wide), ones_CK1], axis=-1)
    context_CKM = _pad_width(context_CKM, columns)
    scaled_CKM = (scale_CK[:, :, None] * context_CKM).astype(dtype)
    more = ((0, e_RP.shape[0] - size * components), (0, 0))
    scaled_RM = jnp.pad(scaled_CKM.reshape(size * components, columns), more)
    update_CKM = delta_CK[:, :, None] * context_CKM
    update_CKM -= stored_CK[:, :, None] * scaled_CKM.astype(wide)
    update_CM = jnp.sum(update_CKM, axis=1)

    if sums.bias_P is None:
        table_PM = sums.table_PM + product(e_RP, scaled_RM, (0, 0), wide)
        (table_PM,) = _add_rows((table_PM,), label_C, owned_C, (update_CM,), dtype)
        return _Sums(table_PM, None)
    table_PM = sums.table_PM + product(e_RP, scaled_RM[:, :width], (0, 0), wide)
    bias_P = sums.bias_P + product(e_RP, scaled_RM[:, width:], (0, 0), wide)[:, 0]
    updates = (update_CM[:, :width], update_CM[:, width])
    return _Sums(*_add_rows((table_PM, bias_P), label_C, owned_C, updates, dtype))


def _add_rows(sums, label_C, owned_C, updates, dtype):
    """sum[label[c]] += update[c], equal labels added up in a fixed order.

    Within a block of tokens those with equal labels are summed by a product with the
    matrix of their equality, and the first of them writes; so no two writes meet.
    """
    words = sums[0].shape[0]
    for start in range(0, label_C.size, SCATTER_TOKENS):
        block = slice(start, start + SCATTER_TOKENS)
        label_B, owned_B = label_C[block], owned_C[block]
        place_B = jnp.arange(label_B.size)
        equal_BB = (label_B[:, None] == label_B[None]) & owned_B[None]
        earlier_BB = equal_BB & (place_B[None] < place_B[:, None])
        writes_B = owned_B & ~jnp.any(earlier_BB, axis=1)
        target_B = jnp.where(writes_B, label_B, words + place_B)
        # Or XLA would compute it again for every element that is written.
        target_B = jax.lax.optimization_barrier(target_B)
        sums = tuple(
            total.at[target_B].add(
                _sum_equal(equal_BB, update[block], dtype),
                mode="drop",
                unique_indices=True,
            )
            for total, update in zip(sums, updates, strict=True)
        )
    return sums


def _sum_equal(equal_BB, update_B, dtype):
    """equal @ update; beside bfloat16 products as two terms of it, 16 bits in all."""
    if dtype != jnp.bfloat16:
        equal_BB = equal_BB.astype(update_B.dtype)
        return jnp.matmul(equal_BB, update_B, precision=jax.lax.Precision.HIGHEST)
    equal_BB = equal_BB.astype(dtype)
    high_B = update_B.astype(dtype)
    low_B = (update_B - high_B.astype(update_B.dtype)).astype(dtype)
    return sum(
        jnp.matmul(equal_BB, term_B, preferred_element_type=update_B.dtype)
        for term_B in (high_B, low_B)
    )


def product(
    left: jax.Array, right: jax.Array, contract: tuple[int, int], dtype: jnp.dtype
) -> jax.Array:
    """A product by itself, without what makes its inputs: a call of the library."""
    left, right = jax.lax.optimization_barrier((left, right))
    dims = ((contract[:1], contract[1:]), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=dtype)


def _round_up(size, multiple):
    return -(-size // multiple) * multiple


def _pad_width(array, multiple):
    more = _round_up(array.shape[-1], multiple) - array.shape[-1]
    return jnp.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, more),))
