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

Words in classes (classes.py) have three products for each class, on its own words and
contexts, under one reference and one normalizer.

Words elsewhere (arrays.py) only add to the normalizers that `scale` has; where one of
them is the label, delta is 0. Their own gradients are

    d lse_elsewhere[r] = weight[token] posterior[r] exp(lse_elsewhere[r] - lse[r])
    d score[r]         = -weight[token] posterior[r]        where the label is theirs.

Axes: P words; Q, F and M the width, padded for the first, second and third product.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, likelihood, shards
from softbottle.ops.mixture.activations import DEAD, Activation
from softbottle.ops.mixture.arrays import Elsewhere, Mixture, Targets, Vocabulary
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
    elsewhere: Elsewhere | None = None,
) -> jax.Array:
    """Weighted sum of the tokens' negative log-likelihoods, gradient in forward."""
    _, *inputs, by_token = likelihood.vary(
        (), mixture, vocabulary, (targets, elsewhere)
    )
    return _loss(route, activation, options, *inputs, *by_token)


def chunks(route: Route, context_TKE: Any, table_VE: Any, options: Options) -> int:
    """How many chunks of tokens there are; of the arrays only shapes are read."""
    tokens, components = context_TKE.shape[0], context_TKE.shape[-2]
    count = classes.count(context_TKE)
    words = count * _round_up(-(-table_VE.shape[0] // count), route.multiples[1])
    row_bytes = words * product_dtype(options, context_TKE, table_VE).itemsize
    return chunk_count(tokens, components * row_bytes, options.loss_bytes(row_bytes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _loss(route, activation, options, mixture, vocabulary, targets, elsewhere):
    return likelihood.loss_from(
        route.lse, mixture, vocabulary, targets, activation, options, elsewhere
    )


def _loss_forward(route, activation, options, mixture, vocabulary, targets, elsewhere):
    context_TKE, table_VE = mixture.context_TKE, vocabulary.table_VE
    parts = classes.of(context_TKE, vocabulary, options)
    padded = tuple(_pad(route, *part, max(1, SAMPLE // len(parts))) for part in parts)
    dtype = padded[0].table_PQ.dtype
    whole = Vocabulary(table_VE.astype(dtype), vocabulary.bias_V)

    # Under `vmap` one element after the other: a batched guard would take both ways.
    one_chunk = jax.custom_batching.sequential_vmap(
        functools.partial(_chunk, route, activation, options)
    )

    def chunk(sums, tokens):
        return one_chunk(whole, padded, sums, *tokens)

    sums = tuple(
        _zero_sums(route, context_TKE, len(part.table_PQ), table_VE) for part in padded
    )
    tokens = (mixture, targets, elsewhere)
    count = chunks(route, context_TKE, table_VE, options)
    sums, by_token = likelihood.over_chunks(chunk, sums, tokens, count)
    context_bar_TKE, nll_T, weight_TK, elsewhere_bar = by_token
    nll_T = nll_T.astype(targets.weights_T.dtype)
    bars = (
        Mixture(
            -weight_TK.astype(mixture.log_prior_TK.dtype),
            context_bar_TKE.astype(context_TKE.dtype),
        ),
        _vocabulary_bar(sums, padded, vocabulary),
        (Targets(None, nll_T), elsewhere_bar),
    )
    return likelihood.weighted(targets.weights_T, nll_T), bars


def _loss_backward(route, activation, options, saved, loss_bar):
    del route, activation
    _, *bars, by_token = likelihood.loss_backward(((), *saved), loss_bar, options)
    return *bars, *by_token


_loss.defvjp(_loss_forward, _loss_backward)


class _Padded(NamedTuple):
    """A class's words in the products' dtype and widths, and what goes with them."""

    bias_V: jax.Array
    table_PQ: jax.Array
    table_PF: jax.Array
    bias_P: jax.Array
    sample_WE: jax.Array
    sample_bias_W: jax.Array


def _pad(route, context_TKE, vocabulary, options, sample):
    table_VE, bias_V = vocabulary
    rows = len(table_VE)
    wide = sum_dtype(context_TKE, table_VE)
    cast_VE = table_VE.astype(product_dtype(options, context_TKE, table_VE))
    live_V = shards.live_rows(rows, options)
    masked_V = jnp.where(live_V, bias_V.astype(wide), DEAD)
    # Strided, because words are usually sorted by frequency.
    stride = -(-rows // sample)
    more = (0, _round_up(rows, route.multiples[1]) - rows)
    table_PE = jnp.pad(cast_VE, (more, (0, 0)))
    return _Padded(
        bias_V,
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


def _vocabulary_bar(sums, padded, vocabulary):
    """The gradients of table and bias, without padding and in their dtypes."""
    table_VE, bias_V = vocabulary
    width = table_VE.shape[1]
    tables, biases = [], []
    if len(sums) > 1 or table_VE.dtype != sums[0].table_PM.dtype:
        # Or XLA would copy each sum to cut it, and once more to join or to round them.
        sums = jax.lax.optimization_barrier(sums)
    for own, part in zip(sums, padded, strict=True):
        rows = len(part.bias_V)
        bias_P = own.table_PM[:, width] if own.bias_P is None else own.bias_P
        tables.append(own.table_PM[:rows, :width].astype(table_VE.dtype))
        biases.append(bias_P[:rows].astype(bias_V.dtype))
    return Vocabulary(classes.joined(tables), classes.joined(biases))


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


def _chunk(
    route, activation, options, whole, padded, sums, mixture, targets, elsewhere
):
    """Add a chunk's part of the table's gradient; return the rest of its results."""
    (log_prior_CK, context_CKE), (labels_C, weights_C) = mixture, targets
    cast_CKE = context_CKE.astype(whole.table_VE.dtype)
    own_CKE = classes.of_label(cast_CKE, labels_C)
    score_CK, slope_CK = likelihood.target_score_and_slope(
        own_CKE, whole, labels_C, activation, options
    )
    by_class = _each(cast_CKE)
    es, total_CK, ref_CK = _exponentials(
        route, activation, options, padded, by_class, score_CK
    )
    lse_CK = shards.joint_lse(ref_CK + jnp.log(total_CK), options)
    score_CK, lse_CK = likelihood.beside(score_CK, lse_CK, elsewhere)
    nll_C = likelihood.nll(log_prior_CK, score_CK, lse_CK)
    posterior_CK = likelihood.posterior(log_prior_CK, score_CK, lse_CK, nll_C)
    weight_CK = weights_C[:, None] * posterior_CK
    scale_CK = weight_CK * jnp.exp(ref_CK - lse_CK)

    label_C, owned_C = shards.local_labels(labels_C, len(whole.table_VE), options)
    if elsewhere is not None:
        owned_C &= ~elsewhere.owned_T
    here_CK = owned_C[:, None] & (weight_CK != 0)
    stored_CK = jnp.where(here_CK, _stored(es, label_C, ref_CK), 0.0)
    delta_CK = scale_CK * jnp.exp(score_CK - ref_CK) * slope_CK - weight_CK * slope_CK
    delta_CK = jnp.where(here_CK, delta_CK, 0.0)

    products = [
        _second_product(e_RP, part, cast, ref_CK)
        for e_RP, part, cast in zip(es, padded, by_class, strict=True)
    ]
    label_row_CE = whole.table_VE[label_C].astype(ref_CK.dtype)
    of_label_CK = delta_CK - scale_CK * stored_CK
    bars = [scale_CK[:, :, None] * product_CKE for product_CKE in products]
    for n, in_class_C1 in enumerate(_memberships(label_C, len(bars))):
        part_CK = jnp.where(in_class_C1, of_label_CK, 0.0)
        bars[n] += part_CK[:, :, None] * label_row_CE[:, None]
    context_bar_CKE = bars[0] if len(bars) == 1 else jnp.stack(bars, axis=1)
    factors = (scale_CK, stored_CK, delta_CK)
    sums = _add_to_table(sums, es, by_class, own_CKE, factors, label_C, owned_C)
    context_bar_CKE = context_bar_CKE.reshape(context_CKE.shape)
    elsewhere_bar = _elsewhere_bar(elsewhere, lse_CK, weight_CK)
    return sums, (context_bar_CKE, nll_C, weight_CK, elsewhere_bar)


def _elsewhere_bar(elsewhere, lse_CK, weight_CK):
    """The gradients of what is elsewhere; None if nothing is."""
    if elsewhere is None:
        return None
    score_CK, own_CK, owned_C = elsewhere
    score_bar_CK = jnp.where(owned_C[:, None], -weight_CK, 0.0)
    lse_bar_CK = weight_CK * jnp.exp(own_CK - lse_CK)
    return Elsewhere(
        score_bar_CK.astype(score_CK.dtype), lse_bar_CK.astype(own_CK.dtype), None
    )


def _each(context_CKE):
    """The contexts [C, K, E] of every class."""
    if context_CKE.ndim == 3:
        return [context_CKE]
    return [context_CKE[:, n] for n in range(context_CKE.shape[1])]


def _memberships(label_C, count):
    """Which labels are of each class, [C, 1]; all, if there is one."""
    if count == 1:
        return [jnp.ones((1, 1), bool)]
    return [(label_C % count == n)[:, None] for n in range(count)]


def _stored(es, label_C, ref_CK):
    """What E holds for the labels' words, [C, K]."""
    rows = jnp.arange(ref_CK.size).reshape(ref_CK.shape)
    row_CK = jnp.broadcast_to(label_C[:, None] // len(es), ref_CK.shape)
    found = [e_RP[rows, row_CK].astype(ref_CK.dtype) for e_RP in es]
    if len(found) == 1:
        return found[0]
    members = _memberships(label_C, len(es))
    return sum(
        jnp.where(in_class_C1, stored_CK, 0.0)
        for in_class_C1, stored_CK in zip(members, found, strict=True)
    )


def _second_product(e_RP, part, cast_CKE, ref_CK):
    """E @ table, [C, K, E]."""
    product_RF = product(e_RP, part.table_PF, (1, 0), ref_CK.dtype)
    return product_RF[: ref_CK.size, : cast_CKE.shape[2]].reshape(cast_CKE.shape)


def _exponentials(route, activation, options, padded, by_class, score_CK):
    """E [rows, P] of each class, its sums and references [C, K], the guard passed."""
    size, components, width = by_class[0].shape
    count = size * components
    more = (0, _round_up(count, route.multiples[0]) - count)
    contexts = [cast_CKE.reshape(count, width) for cast_CKE in by_class]
    wide = [
        _pad_width(jnp.pad(context_RE, (more, (0, 0))), route.multiples[2])
        for context_RE in contexts
    ]

    def first(ref_R):
        ref_R = jnp.pad(ref_R, (more,))
        es, totals = [], []
        for context_RQ, part in zip(wide, padded, strict=True):
            tables = (part.table_PQ, part.bias_P)
            e_RP, total_R = route.first(context_RQ, *tables, ref_R, activation, options)
            es.append(e_RP)
            totals.append(total_R)
        return es, functools.reduce(jnp.add, totals)

    def redo(state):
        small = dataclasses.replace(options, budget_bytes=REDO_BYTES)
        rows = sum(len(part.bias_V) for part in padded)
        each = []
        for n, (cast_CKE, part) in enumerate(zip(by_class, padded, strict=True)):
            own = classes.own_options(small, rows, n, len(padded))
            # Cut here, where it is seldom needed, rather than kept beside the padded.
            table_VE = part.table_PQ[: len(part.bias_V), :width]
            local = Vocabulary(table_VE, part.bias_V)
            each.append(route.lse(cast_CKE, local, activation, own))
        lse_CK = each[0] if len(each) == 1 else jax.nn.logsumexp(jnp.stack(each), 0)
        lse_R = shards.joint_lse(lse_CK, options).reshape(count)
        done = state[3] & jnp.zeros((), bool)
        return shards.varying_together(*first(lse_R), lse_R, done)

    ref_R = _reference(contexts, score_CK.reshape(count), padded, activation, options)
    es, total_R = first(ref_R)
    # A sample that is the whole vocabulary has its maximum: nothing to guard against.
    if any(len(part.sample_WE) < len(part.bias_V) for part in padded):
        far = ~jnp.all(total_R[:count] <= jnp.exp(jnp.asarray(FAR, ref_R.dtype)))
        if options.vocab_axis is not None:
            far = jax.lax.pmax(far.astype(jnp.int32), options.vocab_axis) > 0
        state = shards.varying_together(es, total_R, ref_R, far)
        # A loop of at most one turn: unlike `cond`, it leaves E where it is.
        es, total_R, ref_R, _ = jax.lax.while_loop(lambda s: s[3], redo, state)
    by_token = (size, components)
    return es, total_R[:count].reshape(by_token), ref_R.reshape(by_token)


def _reference(contexts, score_R, padded, activation, options):
    """The label's score or the best of a sample of words, whichever is larger."""
    bests = []
    for context_RE, part in zip(contexts, padded, strict=True):
        z_RW = product(context_RE, part.sample_WE, (1, 1), score_R.dtype)
        g_RW = activation.apply(activation.theta, z_RW + part.sample_bias_W[None])
        bests.append(jnp.max(g_RW, axis=1))
    best_R = functools.reduce(jnp.maximum, bests)
    if options.vocab_axis is not None:
        best_R = jax.lax.pmax(best_R, options.vocab_axis)
    # The score of a label that is no word is NaN, which must stay with its token.
    return jnp.where(score_R > best_R, score_R, best_R)


def _add_to_table(sums, es, by_class, own_CKE, factors, label_C, owned_C):
    """The third product of each class, and the labels' part put right."""
    scale_CK, stored_CK, delta_CK = factors
    wide, dtype = scale_CK.dtype, es[0].dtype
    columns = max(sums[0].table_PM.shape[1], own_CKE.shape[2] + 1)

    def scaled(cast_CKE):
        # A column of ones beside the contexts gives the bias its gradient.
        ones_CK1 = jnp.ones((*cast_CKE.shape[:2], 1), wide)
        context_CKM = jnp.concatenate([cast_CKE.astype(wide), ones_CK1], axis=-1)
        context_CKM = _pad_width(context_CKM, columns)
        return context_CKM, (scale_CK[:, :, None] * context_CKM).astype(dtype)

    added = [
        _add_product(own, e_RP, scaled(cast_CKE)[1], own_CKE.shape[2])
        for own, e_RP, cast_CKE in zip(sums, es, by_class, strict=True)
    ]
    context_CKM, scaled_CKM = scaled(own_CKE)
    update_CKM = delta_CK[:, :, None] * context_CKM
    update_CKM -= stored_CK[:, :, None] * scaled_CKM.astype(wide)
    update_CM = jnp.sum(update_CKM, axis=1)
    return _add_rows(added, label_C, owned_C, update_CM, own_CKE.shape[2], dtype)


def _add_product(sums, e_RP, scaled_CKM, width):
    """The sums with E' @ scaled."""
    wide = sums.table_PM.dtype
    rows, columns = e_RP.shape[0], scaled_CKM.shape[2]
    flat_RM = scaled_CKM.reshape(-1, columns)
    scaled_RM = jnp.pad(flat_RM, ((0, rows - len(flat_RM)), (0, 0)))
    if sums.bias_P is None:
        return _Sums(sums.table_PM + product(e_RP, scaled_RM, (0, 0), wide), None)
    return _Sums(
        sums.table_PM + product(e_RP, scaled_RM[:, :width], (0, 0), wide),
        sums.bias_P + product(e_RP, scaled_RM[:, width:], (0, 0), wide)[:, 0],
    )


def _add_rows(sums, label_C, owned_C, update_CM, width, dtype):
    """sum[label[c]] += update[c], equal labels added up in a fixed order.

    Within a block of tokens those with equal labels are summed by a product with the
    matrix of their equality, and the first of them writes; so no two writes meet.
    """
    rides = sums[0].bias_P is None
    updates = (update_CM,) if rides else (update_CM[:, :width], update_CM[:, width])
    for start in range(0, label_C.size, SCATTER_TOKENS):
        block = slice(start, start + SCATTER_TOKENS)
        label_B, owned_B = label_C[block], owned_C[block]
        place_B = jnp.arange(label_B.size)
        equal_BB = (label_B[:, None] == label_B[None]) & owned_B[None]
        earlier_BB = equal_BB & (place_B[None] < place_B[:, None])
        writes_B = owned_B & ~jnp.any(earlier_BB, axis=1)
        each = [_sum_equal(equal_BB, update[block], dtype) for update in updates]
        members = _memberships(label_B, len(sums))
        sums = [
            _write(own, each, writes_B & in_class_B1[:, 0], label_B // len(sums))
            for own, in_class_B1 in zip(sums, members, strict=True)
        ]
    return tuple(sums)


def _write(sums, updates, writes_B, row_B):
    """The sums with rows added to where `writes_B` says so."""
    beyond_B = len(sums.table_PM) + jnp.arange(row_B.size)
    # Or XLA would compute it again for every element that is written.
    target_B = jax.lax.optimization_barrier(jnp.where(writes_B, row_B, beyond_B))
    totals = [array for array in sums if array is not None]
    added = [
        total.at[target_B].add(update, mode="drop", unique_indices=True)
        for total, update in zip(totals, updates, strict=True)
    ]
    return _Sums(added[0], added[1] if len(added) > 1 else None)


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
