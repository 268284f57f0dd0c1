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

    delta[r] = weight[token] posterior[r] (exp(g(z[r, label]) - lse[r]) - 1) g'

on [rows, width] only. This is the part of the gradient that matters most.

bfloat16 has float32's range of exponents, so ref need not be the maximum. The platform
chooses it (`Route.first`): plain XLA, whose logits are in memory, takes the maximum; a
kernel begins with the label's score. Nothing here depends on a value that the host
would have to wait for. The table is padded to sizes that matrix units like, its padding
never enters a sum, and the same inputs give the same bits.

The gradient of the normalizers themselves, for any cotangent, is the same with
scale[r] = cotangent[r] exp(ref[r] - lse[r]) and no label: `lse_backward`.

Words in classes (classes.py) have three products and a reference for each class, on its
own words and contexts, under one normalizer.

Words elsewhere (arrays.py) only add to the normalizers that `scale` has; where one of
them is the label, delta is 0. Their own gradients are

    d lse_elsewhere[r] = weight[token] posterior[r] exp(lse_elsewhere[r] - lse[r])
    d score[r]         = -weight[token] posterior[r]        where the label is theirs.

Axes: P words; Q, F and M the width, padded for the first, second and third product.
"""

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


class Route(NamedTuple):
    """How a platform computes the products, and the sizes that it likes.

    Attributes:
        first: (context_RQ, table_PQ, bias_P, near_R, activation, options) ->
            (E_RP, sum_R, ref_R), where near_R are scores, usually near the largest.
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
    padded = tuple(_pad(route, *part) for part in parts)
    whole = Vocabulary(table_VE.astype(padded[0].table_PQ.dtype), vocabulary.bias_V)
    one_chunk = functools.partial(_chunk, route, activation, options, whole, padded)

    def chunk(sums, tokens):
        return one_chunk(sums, *tokens)

    sums = _no_sums(route, context_TKE, padded, table_VE)
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


def lse_backward(
    route: Route,
    activation: Activation,
    options: Options,
    saved: tuple[jax.Array, Vocabulary, jax.Array],
    lse_bar_TK: jax.Array,
) -> tuple[jax.Array, Vocabulary]:
    """The gradients of contexts and vocabulary by a cotangent of the normalizers.

    Args:
        route: the platform's.
        activation: a fixed one.
        options: those of the forward pass.
        saved: its contexts [T, K, E], vocabulary and normalizers [T, K].
        lse_bar_TK: the cotangent; where it is 0, nothing is read.
    """
    context_TKE, vocabulary, lse_TK = saved
    part = _pad(route, context_TKE, vocabulary, options)
    dtype = part.table_PQ.dtype

    def chunk(sums, tokens):
        context_CKE, lse_CK, bar_CK = tokens
        asked_CK = bar_CK != 0
        cast_CKE = jnp.where(asked_CK[:, :, None], context_CKE, 0).astype(dtype)
        near_CK = jnp.where(asked_CK, lse_CK, 0.0)
        e_RP, _, ref_CK = _exponentials(
            route, activation, options, part, cast_CKE, near_CK
        )
        scale_CK = jnp.where(asked_CK, bar_CK * jnp.exp(ref_CK - near_CK), 0.0)
        product_CKE = _second_product(e_RP, part, cast_CKE, scale_CK.dtype)
        sums = table_sums.add_products(sums, [e_RP], [cast_CKE], [scale_CK])
        return sums, scale_CK[:, :, None] * product_CKE

    sums = _no_sums(route, context_TKE, [part], vocabulary.table_VE)
    tokens = (context_TKE, lse_TK, lse_bar_TK)
    count = chunks(route, context_TKE, vocabulary.table_VE, options)
    sums, context_bar_TKE = likelihood.over_chunks(chunk, sums, tokens, count)
    bars = table_sums.gradient(sums, [len(part.bias_V)], vocabulary)
    return context_bar_TKE.astype(context_TKE.dtype), bars


class _Padded(NamedTuple):
    """A class's words in the products' dtype and widths, and what goes with them."""

    bias_V: jax.Array
    table_PQ: jax.Array
    table_PF: jax.Array
    bias_P: jax.Array


def _pad(route, context_TKE, vocabulary, options):
    table_VE, bias_V = vocabulary
    rows = len(table_VE)
    wide = sum_dtype(context_TKE, table_VE)
    cast_VE = table_VE.astype(product_dtype(options, context_TKE, table_VE))
    live_V = shards.live_rows(rows, options)
    masked_V = jnp.where(live_V, bias_V.astype(wide), DEAD)
    more = (0, round_up(rows, route.multiples[1]) - rows)
    table_PE = jnp.pad(cast_VE, (more, (0, 0)))
    return _Padded(
        bias_V,
        pad_width(table_PE, route.multiples[2]),
        # A library's product wants rows of whole 16 bytes, and needs no more.
        pad_width(table_PE, min(8, route.width)),
        jnp.pad(masked_V, (more,), constant_values=DEAD),
    )


def _no_sums(route, context_TKE, padded, table_VE):
    return tuple(
        table_sums.zeros(route.width, context_TKE, len(part.table_PQ), table_VE)
        for part in padded
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
    near_CK = likelihood.beside(score_CK, score_CK, elsewhere)[0]
    by_class = _each(cast_CKE)
    es, totals, refs = zip(
        *(
            _exponentials(route, activation, options, part, cast, near_CK)
            for part, cast in zip(padded, by_class, strict=True)
        ),
        strict=True,
    )
    each = [
        ref_CK + jnp.log(total_CK)
        for ref_CK, total_CK in zip(refs, totals, strict=True)
    ]
    lse_CK = shards.joint_lse(classes.joint_lse(each), options)
    score_CK, lse_CK = likelihood.beside(score_CK, lse_CK, elsewhere)
    nll_C = likelihood.nll(log_prior_CK, score_CK, lse_CK)
    posterior_CK = likelihood.posterior(log_prior_CK, score_CK, lse_CK, nll_C)
    weight_CK = weights_C[:, None] * posterior_CK
    scales = [weight_CK * jnp.exp(ref_CK - lse_CK) for ref_CK in refs]

    label_C, owned_C = shards.local_labels(labels_C, len(whole.table_VE), options)
    if elsewhere is not None:
        owned_C &= ~elsewhere.owned_T
    here_CK = owned_C[:, None] & (weight_CK != 0)
    members = classes.memberships(label_C, len(es))
    stored_CK = _of_class(_stored(es, label_C, lse_CK), members)
    stored_CK = jnp.where(here_CK, stored_CK, 0.0)
    delta_CK = weight_CK * slope_CK * jnp.expm1(score_CK - lse_CK)
    delta_CK = jnp.where(here_CK, delta_CK, 0.0)
    scale_CK = _of_class(scales, members)

    label_row_CE = whole.table_VE[label_C].astype(lse_CK.dtype)
    of_label_CK = delta_CK - scale_CK * stored_CK
    bars = []
    for n, in_class_C1 in enumerate(members):
        product_CKE = _second_product(es[n], padded[n], by_class[n], lse_CK.dtype)
        part_CK = jnp.where(in_class_C1, of_label_CK, 0.0)
        bars.append(scales[n][:, :, None] * product_CKE)
        bars[n] += part_CK[:, :, None] * label_row_CE[:, None]
    context_bar_CKE = bars[0] if len(bars) == 1 else jnp.stack(bars, axis=1)
    sums = table_sums.add_products(sums, es, by_class, scales)
    factors = (scale_CK, stored_CK, delta_CK)
    sums = table_sums.add_labels(sums, own_CKE, factors, label_C, owned_C)
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


def _stored(es, label_C, like_CK):
    """What the E of every class holds for the labels' words, [C, K]."""
    rows = jnp.arange(like_CK.size).reshape(like_CK.shape)
    row_CK = jnp.broadcast_to(label_C[:, None] // len(es), like_CK.shape)
    return [e_RP[rows, row_CK].astype(like_CK.dtype) for e_RP in es]


def _of_class(arrays, members):
    """Of arrays [C, K] by class, those of the labels' classes."""
    chosen = arrays[0]
    for array_CK, in_class_C1 in zip(arrays[1:], members[1:], strict=True):
        chosen = jnp.where(in_class_C1, array_CK, chosen)
    return chosen


def _second_product(e_RP, part, cast_CKE, dtype):
    """E @ table, [C, K, E]."""
    size, components, width = cast_CKE.shape
    product_RF = product(e_RP, part.table_PF, (1, 0), dtype)
    return product_RF[: size * components, :width].reshape(cast_CKE.shape)


def _exponentials(route, activation, options, part, cast_CKE, near_CK):
    """E [rows, P] of a class, its sums and references [C, K]."""
    size, components, width = cast_CKE.shape
    count = size * components
    more = (0, round_up(count, route.multiples[0]) - count)
    context_RE = jnp.pad(cast_CKE.reshape(count, width), (more, (0, 0)))
    context_RQ = pad_width(context_RE, route.multiples[2])
    near_R = jnp.pad(near_CK.reshape(count), (more,))
    tables = (part.table_PQ, part.bias_P)
    e_RP, *by_row = route.first(context_RQ, *tables, near_R, activation, options)
    total_CK, ref_CK = (array_R[:count].reshape(near_CK.shape) for array_R in by_row)
    return e_RP, total_CK, ref_CK
