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

from softbottle.ops.mixture import classes, likelihood, shards, table_sums
from softbottle.ops.mixture.activations import DEAD, Activation
from softbottle.ops.mixture.arrays import Elsewhere, Mixture, Targets, Vocabulary
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    product_dtype,
    sum_dtype,
)
from softbottle.ops.mixture.products import pad_width, product, round_up

# exp(40) leaves as much room again, on either side, for the factors in `scale`.
FAR = 40.0
SAMPLE = 256
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
    words = count * round_up(-(-table_VE.shape[0] // count), route.multiples[1])
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
        table_sums.zeros(route.width, context_TKE, len(part.table_PQ), table_VE)
        for part in padded
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
        table_sums.gradient(sums, [len(part.bias_V) for part in padded], vocabulary),
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
    more = (0, round_up(rows, route.multiples[1]) - rows)
    table_PE = jnp.pad(cast_VE, (more, (0, 0)))
    return _Padded(
        bias_V,
        pad_width(table_PE, route.multiples[2]),
        # A library's product wants rows of whole 16 bytes, and needs no more.
        pad_width(table_PE, min(8, route.width)),
        jnp.pad(masked_V, (more,), constant_values=DEAD),
        cast_VE[::stride],
        masked_V[::stride],
    )


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
    for n, in_class_C1 in enumerate(classes.memberships(label_C, len(bars))):
        part_CK = jnp.where(in_class_C1, of_label_CK, 0.0)
        bars[n] += part_CK[:, :, None] * label_row_CE[:, None]
    context_bar_CKE = bars[0] if len(bars) == 1 else jnp.stack(bars, axis=1)
    factors = (scale_CK, stored_CK, delta_CK)
    sums = table_sums.add(sums, es, by_class, own_CKE, factors, label_C, owned_C)
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


def _stored(es, label_C, ref_CK):
    """What E holds for the labels' words, [C, K]."""
    rows = jnp.arange(ref_CK.size).reshape(ref_CK.shape)
    row_CK = jnp.broadcast_to(label_C[:, None] // len(es), ref_CK.shape)
    found = [e_RP[rows, row_CK].astype(ref_CK.dtype) for e_RP in es]
    if len(found) == 1:
        return found[0]
    members = classes.memberships(label_C, len(es))
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
    more = (0, round_up(count, route.multiples[0]) - count)
    contexts = [cast_CKE.reshape(count, width) for cast_CKE in by_class]
    wide = [
        pad_width(jnp.pad(context_RE, (more, (0, 0))), route.multiples[2])
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
