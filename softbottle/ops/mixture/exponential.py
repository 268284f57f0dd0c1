"""The mixture loss and its gradient from stored exponentials: three products in all.

Rows r are the (token, component) pairs of one chunk of tokens. With any reference
ref[r] near the row's largest score,

    E[r, v]  = exp(g(z[r, v]) - ref[r]) g'(z[r, v])     first product, stored rounded
    S[r]     = sum_v exp(g(z[r, v]) - ref[r])           from the unrounded values
    lse[r]   = ref[r] + log S[r]
    pull[r]  = weight[token] posterior[r] (+ 2 / K z_weight[token] lse[r])
    scale[r] = pull[r] exp(ref[r] - lse[r])

    d context[r] = scale[r] (E[r] @ table)                          second product
    d table      = E' @ (scale context)                             third product

Normaliser, responsibility and weight are one factor a row, so nothing passes over
[rows, vocabulary] besides the products. What they hold for the label's word is then
taken out again and its exact float32 value, with the one-hot part, is put in its place:

    delta[r] = (pull[r] exp(g(z[r, label]) - lse[r]) - weight[token] posterior[r]) g'

(+ score_weight[token] g') on [rows, width] only. This is the part of the gradient that
matters most.

bfloat16 has float32's range of exponents, so ref need not be the maximum. The platform
chooses it (`Route.first`): plain XLA, whose logits are in memory, takes the maximum; a
kernel begins with the label's score. Nothing here depends on a value that the host
would have to wait for. The table is padded to sizes that matrix units like, its padding
never enters a sum, and the same inputs give the same bits.

The gradient of the normalizers themselves, for any cotangent, is the same with
pull[r] = lse_bar[r] (`scores_backward`), and the label's score may have a cotangent,
too:

    delta[r] = (pull[r] exp(g(z[r, label]) - lse[r]) + own_bar[r]) g'.

The entropy of each row, H = lse - sum_v p g, may have another, of which

    d z[r, v] = p (lse_bar - H_bar (g - lse + H)) g',

so that E has a factor more, linear in g - lse, which pull then is at the label, and
scale[r] is exp(ref[r] - lse[r]).

Words in classes (classes.py) have products and references of their own for each class,
on its words and contexts, under one normalizer. All arrays have an axis for them; most
heads have one class.

Words elsewhere (arrays.py) only add to the normalizers that `scale` has; where one of
them is the label, delta is 0. Their own gradients are

    d lse_elsewhere[r] = pull[r] exp(lse_elsewhere[r] - lse[r])
    d score[r]         = -weight[token] posterior[r]        where the label is theirs.

Axes: N classes of words; P words of a class; Q, F and M the width, padded for the
first, second and third product.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, likelihood, shards, table_sums
from softbottle.ops.mixture.activations import DEAD, Activation
from softbottle.ops.mixture.arrays import (
    Elsewhere,
    Mixture,
    Scores,
    Targets,
    Vocabulary,
)
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    product_dtype,
    sum_dtype,
)
from softbottle.ops.mixture.products import pad_width, product, round_up, seen


class Peak(NamedTuple):
    """The largest score of each row, and where in its class that word is.

    Of equal ones the first.
    """

    score: jax.Array
    place: jax.Array


class Route(NamedTuple):
    """How a platform computes the products, and the sizes that it likes.

    Attributes:
        first: (context_NRQ, table_NPQ, bias_NP, near_R, tilt_2R, activation, options,
            peaks, settled) -> (E_NRP, sum_NR, ref_NR, peak), where near_R are scores,
            usually near the largest, or, if that is settled, no lower than any. E has
            the factor tilt_0R + tilt_1R (g - near_R) if there is a tilt, which is for
            settled ones. The peak is a `Peak` [N, R] if peaks are asked for (never with
            a tilt) and else None.
        scores: as an `Implementation` has them.
        multiples: what rows, words and width of the first product are padded to.
        width: what the width of the third product is padded to.
    """

    first: Callable
    scores: Callable
    multiples: tuple[int, int, int]
    width: int


def takes(activation: Activation) -> bool:
    """Whether the activation is fixed, so that its parameters need no gradient."""
    return not activation.params


def loss(route: Route, *inputs: Any) -> jax.Array:
    """`Implementation.loss` on its inputs: its gradient is computed in forward."""
    return loss_and_argmax(route, *inputs, argmax=False)[0]


def loss_and_argmax(
    route: Route,
    mixture: Mixture,
    vocabulary: Vocabulary,
    targets: Targets,
    activation: Activation,
    options: Options,
    elsewhere: Elsewhere | None = None,
    *,
    argmax: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The loss, and the most probable word of each token [T], of one component."""
    _, *inputs, by_token = likelihood.vary(
        (), mixture, vocabulary, (targets, elsewhere)
    )
    return _loss(route, activation, options, argmax, *inputs, *by_token)


def chunks(route: Route, context_TKE: Any, table_VE: Any, options: Options) -> int:
    """How many chunks of tokens there are; of the arrays only shapes are read."""
    tokens, components = context_TKE.shape[0], context_TKE.shape[-2]
    count = classes.count(context_TKE)
    words = count * round_up(-(-table_VE.shape[0] // count), route.multiples[1])
    row_bytes = words * product_dtype(options, context_TKE, table_VE).itemsize
    return chunk_count(tokens, components * row_bytes, options.loss_bytes(row_bytes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _loss(route, activation, options, argmax, mixture, vocabulary, targets, elsewhere):
    if argmax:
        # Of what the gradient needs, the compiler leaves out all but E.
        inputs = (mixture, vocabulary, targets, elsewhere)
        return _loss_forward(route, activation, options, argmax, *inputs)[0]
    total = likelihood.loss_from(
        route.scores, mixture, vocabulary, targets, activation, options, elsewhere
    )
    return total, None


def _loss_forward(
    route, activation, options, argmax, mixture, vocabulary, targets, elsewhere
):
    # A constant of a jitted function comes as NumPy's, which no tracer indexes.
    vocabulary = jax.tree.map(jnp.asarray, vocabulary)
    context_TKE, table_VE = mixture.context_TKE, vocabulary.table_VE
    padded = _pad(route, context_TKE, vocabulary, options)
    dtype = padded.table_NPQ.dtype
    whole = Vocabulary(seen(table_VE, dtype, options), vocabulary.bias_V)

    def chunk(sums, tokens):
        how = (route, activation, options, argmax)
        return _chunk(*how, whole, padded, sums, *tokens)

    sums = table_sums.zeros(route.width, context_TKE, padded.bias_NP, table_VE)
    tokens = (mixture, targets, elsewhere)
    count = chunks(route, context_TKE, table_VE, options)
    sums, by_token = likelihood.over_chunks(chunk, sums, tokens, count)
    context_bar_TKE, weight_TK, terms, elsewhere_bar, argmax_T = by_token
    total, targets_bar = likelihood.weighted_and_bars(targets, terms)
    bars = (
        Mixture(
            -weight_TK.astype(mixture.log_prior_TK.dtype),
            context_bar_TKE.astype(context_TKE.dtype),
        ),
        table_sums.gradient(sums, vocabulary),
        (targets_bar, elsewhere_bar),
    )
    return (total, argmax_T), bars


def _loss_backward(route, activation, options, argmax, saved, bars):
    del route, activation, argmax
    loss_bar, _ = bars
    _, *bars, by_token = likelihood.loss_backward(((), *saved), loss_bar, options)
    return *bars, *by_token


_loss.defvjp(_loss_forward, _loss_backward)


def scores_backward(
    route: Route,
    activation: Activation,
    options: Options,
    saved: tuple[jax.Array, Vocabulary, jax.Array | None, Scores],
    bars: Scores,
) -> tuple[jax.Array, Vocabulary]:
    """The gradients of contexts and vocabulary by cotangents of the scores.

    Args:
        route: the platform's.
        activation: a fixed one.
        options: those of the forward pass.
        saved: its contexts [T, K, E], vocabulary, labels [T] and scores.
        bars: the cotangents; where all are 0, nothing is read.
    """
    context_TKE, vocabulary, labels_T, found = saved
    padded = _pad(route, context_TKE, vocabulary, options)
    table_VE, dtype = vocabulary.table_VE, padded.table_NPQ.dtype
    whole = Vocabulary(seen(table_VE, dtype, options), vocabulary.bias_V)

    def chunk(sums, tokens):
        return _pulled(route, activation, options, whole, padded, sums, *tokens)

    sums = table_sums.zeros(
        route.width, context_TKE, padded.bias_NP, vocabulary.table_VE
    )
    tokens = (context_TKE, labels_T, found, bars)
    count = chunks(route, context_TKE, vocabulary.table_VE, options)
    sums, context_bar_TKE = likelihood.over_chunks(chunk, sums, tokens, count)
    vocabulary_bar = table_sums.gradient(sums, vocabulary)
    return context_bar_TKE.astype(context_TKE.dtype), vocabulary_bar


def _pulled(
    route,
    activation,
    options,
    whole,
    padded,
    sums,
    context_CKE,
    labels_C,
    found,
    bars,
):
    """Add a chunk's part of the table's gradient; return that of its contexts."""
    asked_CK = bars.lse_TK != 0
    if bars.entropy_TK is not None:
        asked_CK |= bars.entropy_TK != 0
    if labels_C is not None:
        label_C, owned_C = shards.local_labels(labels_C, len(whole.table_VE), options)
        asked_CK |= owned_C[:, None] & (bars.own_TK != 0)
    # Beside nothing that is asked for E is 0, whatever the words' biases are.
    lse_CK = jnp.where(asked_CK, found.lse_TK, -DEAD)
    bar_CK, tilt_2CK = bars.lse_TK, None
    if bars.entropy_TK is not None:
        level_CK = bars.lse_TK - bars.entropy_TK * found.entropy_TK
        tilt_2CK = jnp.stack([level_CK, -bars.entropy_TK])
        tilt_2CK = jnp.where(asked_CK[None], tilt_2CK, 0.0)
        bar_CK = jnp.ones_like(level_CK)
    context_CKE = jnp.where(asked_CK[:, :, None], context_CKE, 0)
    cast_CKE = seen(context_CKE, whole.table_VE.dtype, options)
    cast_NCKE = cast_CKE[None]
    how = (route, activation, options, padded, cast_NCKE)
    e_NRP, _, ref_NCK, _ = _exponentials(*how, lse_CK, tilt_2CK, settled=True)
    factor_NCK = jnp.exp(ref_NCK - lse_CK[None])
    scale_NCK = jnp.where(asked_CK[None], bar_CK[None] * factor_NCK, 0.0)
    product_NCKE = _second_product(e_NRP, padded, cast_NCKE, scale_NCK.dtype)
    context_bar_CKE = (scale_NCK[..., None] * product_NCKE)[0]
    sums = table_sums.add_products(sums, e_NRP, cast_NCKE, scale_NCK, options)
    if labels_C is None:
        return sums, context_bar_CKE

    here_CK = owned_C[:, None] & asked_CK
    _, slope_CK = likelihood.own_score_and_slope(
        cast_CKE, whole, labels_C, activation, options
    )
    ahead_CK = jnp.where(here_CK, found.own_TK - lse_CK, 0.0)
    pull_CK = bars.lse_TK if tilt_2CK is None else tilt_2CK[0] + tilt_2CK[1] * ahead_CK
    delta_CK = (pull_CK * jnp.exp(ahead_CK) + bars.own_TK) * slope_CK
    delta_CK = jnp.where(here_CK, delta_CK, 0.0)
    stored_CK = jnp.where(here_CK, _stored(e_NRP, label_C, lse_CK), 0.0)
    of_label_CK = delta_CK - scale_NCK[0] * stored_CK
    label_row_CE = whole.table_VE[label_C].astype(lse_CK.dtype)
    context_bar_CKE += of_label_CK[..., None] * label_row_CE[:, None]
    factors = (scale_NCK[0], stored_CK, delta_CK)
    labels = (label_C, owned_C)
    sums = table_sums.add_labels(sums, cast_CKE, factors, *labels, options)
    return sums, context_bar_CKE


class _Padded(NamedTuple):
    """The words by class, in the products' dtype and widths."""

    table_NPQ: jax.Array
    table_NPF: jax.Array
    bias_NP: jax.Array


def _pad(route, context_TKE, vocabulary, options):
    table_VE, bias_V = vocabulary
    rows, count = len(table_VE), classes.count(context_TKE)
    words = round_up(-(-rows // count), route.multiples[1])
    dtype = product_dtype(options, context_TKE, table_VE)
    cast_VE = seen(table_VE, dtype, options)
    live_V = shards.live_rows(rows, options)
    bias_V = bias_V.astype(sum_dtype(context_TKE, table_VE))
    table_NPE = classes.split(cast_VE, count, words)
    return _Padded(
        pad_width(table_NPE, route.multiples[2]),
        # A library's product wants rows of whole 16 bytes, and needs no more.
        pad_width(table_NPE, min(8, route.width)),
        classes.split(jnp.where(live_V, bias_V, DEAD), count, words, DEAD),
    )


def _chunk(
    route, activation, options, argmax, whole, padded, sums, mixture, targets, elsewhere
):
    """Add a chunk's part of the table's gradient; return the rest of its results."""
    log_prior_CK, context_CKE = mixture
    labels_C, weights_C, z_weights_C, score_weights_C = targets
    cast_CKE = seen(context_CKE, whole.table_VE.dtype, options)
    own_CKE = classes.of_label(cast_CKE, labels_C)
    both = likelihood.own_score_and_slope(own_CKE, whole, labels_C, activation, options)
    score_CK, slope_CK = (
        shards.from_owner(each_CK, labels_C, len(whole.table_VE), options)
        for each_CK in both
    )
    near_CK = likelihood.beside(score_CK, score_CK, elsewhere)[0]
    # Finite, or a word of bias -inf less a label of bias -inf would be NaN.
    near_CK = jnp.maximum(near_CK, DEAD)
    cast_NCKE = cast_CKE[None] if cast_CKE.ndim == 3 else jnp.moveaxis(cast_CKE, 1, 0)
    e_NRP, total_NCK, ref_NCK, peak = _exponentials(
        route, activation, options, padded, cast_NCKE, near_CK, peaks=argmax
    )
    lse_CK = classes.joint_lse(list(ref_NCK + jnp.log(total_NCK)))
    lse_CK = shards.joint_lse(lse_CK, options)
    score_CK, lse_CK = likelihood.beside(score_CK, lse_CK, elsewhere)
    nll_C = likelihood.nll(log_prior_CK, score_CK, lse_CK)
    posterior_CK = likelihood.posterior(log_prior_CK, score_CK, lse_CK, nll_C)
    weight_CK = weights_C[:, None] * posterior_CK
    pull_CK = likelihood.lse_weight(weight_CK, lse_CK, z_weights_C)
    scale_NCK = pull_CK[None] * jnp.exp(ref_NCK - lse_CK[None])

    label_C, owned_C = shards.local_labels(labels_C, len(whole.table_VE), options)
    if elsewhere is not None:
        owned_C &= ~elsewhere.owned_T
    here_CK = owned_C[:, None] & (pull_CK != 0)
    scale_CK = classes.of_class(scale_NCK, label_C)
    stored_CK = jnp.where(here_CK, _stored(e_NRP, label_C, lse_CK), 0.0)
    delta_CK = weight_CK * jnp.expm1(score_CK - lse_CK)
    if z_weights_C is not None:
        delta_CK += (pull_CK - weight_CK) * jnp.exp(score_CK - lse_CK)
    if score_weights_C is not None:
        delta_CK += score_weights_C[:, None]
    delta_CK = jnp.where(here_CK, delta_CK * slope_CK, 0.0)

    product_NCKE = _second_product(e_NRP, padded, cast_NCKE, lse_CK.dtype)
    of_label_CK = delta_CK - scale_CK * stored_CK
    class_N1 = jnp.arange(len(scale_NCK))[:, None]
    of_class_NC = class_N1 == label_C[None] % len(scale_NCK)
    of_label_NCK = jnp.where(of_class_NC[:, :, None], of_label_CK[None], 0.0)
    label_row_CE = whole.table_VE[label_C].astype(lse_CK.dtype)
    context_bar_NCKE = scale_NCK[..., None] * product_NCKE
    context_bar_NCKE += of_label_NCK[..., None] * label_row_CE[None, :, None]
    context_bar_CKE = jnp.moveaxis(context_bar_NCKE, 0, 1).reshape(context_CKE.shape)
    sums = table_sums.add_products(sums, e_NRP, cast_NCKE, scale_NCK, options)
    factors = (scale_CK, stored_CK, delta_CK)
    labels = (label_C, owned_C)
    sums = table_sums.add_labels(sums, own_CKE, factors, *labels, options)
    score_bar_CK = -weight_CK
    if score_weights_C is not None:
        score_bar_CK += score_weights_C[:, None]
    elsewhere_bar = _elsewhere_bar(elsewhere, lse_CK, score_bar_CK, pull_CK)
    terms = likelihood.terms(nll_C, score_CK, lse_CK)
    argmax_C = _argmax(peak, len(whole.table_VE), options) if argmax else None
    return sums, (context_bar_CKE, weight_CK, terms, elsewhere_bar, argmax_C)


def _argmax(peak, rows, options):
    """The most probable words of one component, [C]; of equal ones the first."""
    score_NC, place_NC = (array_NCK[:, :, 0] for array_NCK in peak)
    count = len(score_NC)
    word_NC = place_NC * count + jnp.arange(count, dtype=place_NC.dtype)[:, None]
    word_NC += shards.first_row(rows, options)
    top_C = shards.largest(jnp.max(score_NC, axis=0), options)
    beyond = jnp.iinfo(word_NC.dtype).max
    word_C = jnp.min(jnp.where(score_NC == top_C[None], word_NC, beyond), axis=0)
    return -shards.largest(-word_C, options)


def _elsewhere_bar(elsewhere, lse_CK, score_bar_CK, pull_CK):
    """The gradients of what is elsewhere; None if nothing is."""
    if elsewhere is None:
        return None
    score_CK, own_CK, owned_C = elsewhere
    score_bar_CK = jnp.where(owned_C[:, None], score_bar_CK, 0.0)
    lse_bar_CK = pull_CK * jnp.exp(own_CK - lse_CK)
    return Elsewhere(
        score_bar_CK.astype(score_CK.dtype), lse_bar_CK.astype(own_CK.dtype), None
    )


def _stored(e_NRP, label_C, like_CK):
    """What E holds for the labels' words, [C, K]."""
    count = len(e_NRP)
    class_C1, word_C1 = (label_C % count)[:, None], (label_C // count)[:, None]
    row_CK = jnp.arange(like_CK.size).reshape(like_CK.shape)
    return e_NRP[class_C1, row_CK, word_C1].astype(like_CK.dtype)


def _second_product(e_NRP, padded, cast_NCKE, dtype):
    """E @ table, [N, C, K, E]."""
    _, size, components, width = cast_NCKE.shape
    product_NRF = product(e_NRP, padded.table_NPF, (2, 1), dtype)
    return product_NRF[:, : size * components, :width].reshape(cast_NCKE.shape)


def _exponentials(
    route,
    activation,
    options,
    padded,
    cast_NCKE,
    near_CK,
    tilt_2CK=None,
    peaks=False,
    settled=False,
):
    """E [N, rows, P]; its sums and references [N, C, K], and peaks if asked for."""
    count, size, components, width = cast_NCKE.shape
    rows = size * components
    more = (0, round_up(rows, route.multiples[0]) - rows)
    context_NRE = cast_NCKE.reshape(count, rows, width)
    context_NRE = jnp.pad(context_NRE, ((0, 0), more, (0, 0)))
    context_NRQ = pad_width(context_NRE, route.multiples[2])
    highest = -DEAD if settled else 0.0
    near_R = jnp.pad(near_CK.reshape(rows), (more,), constant_values=highest)
    tilt_2R = None
    if tilt_2CK is not None:
        tilt_2R = jnp.pad(tilt_2CK.reshape(2, rows), ((0, 0), more))
    inputs = (context_NRQ, padded.table_NPQ, padded.bias_NP, near_R, tilt_2R)
    e_NRP, *by_row = route.first(*inputs, activation, options, peaks, settled)
    shape = cast_NCKE.shape[:3]
    return e_NRP, *jax.tree.map(
        lambda array_NR: array_NR[:, :rows].reshape(shape), by_row
    )
