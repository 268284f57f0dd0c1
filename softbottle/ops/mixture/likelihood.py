"""The pieces of the mixture likelihood that its implementations share."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, rows, shards
from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.arrays import (
    Elsewhere,
    Mixture,
    Scores,
    Targets,
    Vocabulary,
)
from softbottle.ops.mixture.options import Options, product_dtype, sum_dtype
from softbottle.ops.mixture.products import round_up, seen


def logits(
    context_CKE: jax.Array, vocabulary: Vocabulary, options: Options
) -> jax.Array:
    """z = context . table + bias, accumulated in float32 or better: [C, K, V].

    Args:
        context_CKE: contexts.
        vocabulary: what `as_read` gives.
        options: of the products.
    """
    table_VE, bias_V = vocabulary
    dtype = product_dtype(options, context_CKE, table_VE)
    z_CKV = jnp.einsum(
        "cke,ve->ckv",
        seen(context_CKE, dtype, options),
        table_VE.astype(dtype),
        preferred_element_type=sum_dtype(context_CKE, table_VE),
    )
    return z_CKV + bias_V.astype(z_CKV.dtype)[None, None]


def as_read(
    vocabulary: Vocabulary, context_TKE: jax.Array, options: Options
) -> Vocabulary:
    """The vocabulary with the table as products with these contexts read it."""
    table_VE, bias_V = vocabulary
    dtype = product_dtype(options, context_TKE, table_VE)
    return Vocabulary(seen(table_VE, dtype, options), bias_V)


def word_ids(**named_ids: jax.Array) -> jax.Array:
    """Word ids as int32; one that int32 cannot hold becomes -1, which is no word.

    Raises:
        ValueError: if they are not integers; by the keyword that names them.
    """
    ((name, ids),) = named_ids.items()
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {ids.dtype}.")
    if ids.dtype == jnp.int32:
        return ids
    narrow = jnp.asarray(ids.astype(jnp.int32))
    if ids.dtype.itemsize < 4:
        return narrow
    return jnp.where((ids >= 0) & (ids <= jnp.iinfo(jnp.int32).max), narrow, -1)


def target_score(
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """g(z) of the label, [T, K]; NaN where the label is no word of the vocabulary.

    The contexts may be by class of words.

    The row of the label is gathered and multiplied in float32 or better, from the same
    rounded inputs that the normalizer's products read, so that the two agree.
    """
    context_TKE = classes.of_label(context_TKE, labels_T)
    own_TK = own_score(context_TKE, vocabulary, labels_T, activation, options)
    return shards.from_owner(own_TK, labels_T, len(vocabulary.table_VE), options)


def own_score(
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """g(z) of the label, [T, K]; 0 where none of the local rows is it."""
    z_TK, owned_T = _target_logit(context_TKE, vocabulary, labels_T, options)
    score_TK = activation.apply(activation.theta, z_TK)
    return jnp.where(owned_T[:, None], score_TK, 0.0)


def with_own(
    lse_TK: jax.Array,
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array | None,
    activation: Activation,
    options: Options,
    entropy_TK: jax.Array | None = None,
) -> Scores:
    """The log-normalizers, with the scores of the labels if there are any."""
    if labels_T is None:
        return Scores(None, lse_TK, entropy_TK)
    inputs = (context_TKE, vocabulary, labels_T, activation, options)
    # Under `vmap` over labels alone all have to be batched: of one that is not, the
    # gradient would be counted for every element.
    batched_T1 = 0 * labels_T[:, None].astype(lse_TK.dtype)
    if entropy_TK is not None:
        entropy_TK += batched_T1
    return Scores(own_score(*inputs), lse_TK + batched_T1, entropy_TK)


def own_score_and_slope(
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`own_score` and g'(z) of the label, both [T, K]."""
    z_TK, owned_T = _target_logit(context_TKE, vocabulary, labels_T, options)
    both = with_slope(activation, z_TK)
    score_TK, slope_TK = (jnp.where(owned_T[:, None], each, 0.0) for each in both)
    return score_TK, slope_TK


def mean_logit(
    context_TKE: jax.Array, vocabulary: Vocabulary, options: Options
) -> jax.Array:
    """The mean of z over all words, [T, K]: the logit of a mean row.

    From the same rounded inputs as the normalizer's products.
    """
    table_VE, bias_V = vocabulary
    dtype = product_dtype(options, context_TKE, table_VE)
    wide = sum_dtype(context_TKE, table_VE)
    rows, count = len(table_VE), classes.count(context_TKE)
    live_V = shards.live_rows(rows, options)
    wide_VE = seen(table_VE, dtype, options).astype(wide)
    kept_VE = jnp.where(live_V[:, None], wide_VE, 0.0)
    row_NE = jnp.sum(classes.split(kept_VE, count, -(-rows // count)), axis=1)
    bias = jnp.sum(jnp.where(live_V, bias_V.astype(wide), 0.0))
    context_TNKE = context_TKE.reshape(len(context_TKE), count, *context_TKE.shape[-2:])
    context_TNKE = seen(context_TNKE, dtype, options).astype(wide)
    z_TK = jnp.einsum("tnke,ne->tk", context_TNKE, row_NE)
    z_TK = z_TK + bias
    if options.vocab_axis is not None:
        z_TK = jax.lax.psum(z_TK, options.vocab_axis)
    return z_TK / shards.word_count(rows, options)


def with_slope(activation: Activation, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """g(z) and g'(z)."""
    apply = functools.partial(activation.apply, activation.theta)
    return jax.jvp(apply, (z,), (jnp.ones_like(z),))


def beside(
    score_TK: jax.Array, lse_TK: jax.Array, elsewhere: Elsewhere | None
) -> tuple[jax.Array, jax.Array]:
    """The label's score and the log-normalizers with the words that are elsewhere."""
    if elsewhere is None:
        return score_TK, lse_TK
    score_TK = jnp.where(elsewhere.owned_T[:, None], elsewhere.score_TK, score_TK)
    return score_TK, jnp.logaddexp(lse_TK, elsewhere.lse_TK)


def nll(log_prior_TK: jax.Array, score_TK: jax.Array, lse_TK: jax.Array) -> jax.Array:
    """-log P(label) of each token, [T].

    Of a label whose bias is -inf it is inf, without a gradient: padding has such a
    label where the first word is ruled out, and must not make its gradient NaN.
    """
    by_component_TK = log_prior_TK + score_TK - lse_TK
    impossible_T = jnp.all(jnp.isneginf(score_TK), axis=-1)
    by_component_TK = jnp.where(impossible_T[:, None], 0.0, by_component_TK)
    log_p_T = jax.nn.logsumexp(by_component_TK, axis=-1)
    return jnp.where(impossible_T, jnp.inf, -log_p_T)


def posterior(
    log_prior_TK: jax.Array, score_TK: jax.Array, lse_TK: jax.Array, nll_T: jax.Array
) -> jax.Array:
    """P(component | label), [T, K]; 0 of a label that has no probability."""
    impossible_T1 = jnp.isposinf(nll_T)[:, None]
    ahead_TK = log_prior_TK + score_TK - lse_TK + nll_T[:, None]
    return jnp.exp(jnp.where(impossible_T1, -jnp.inf, ahead_TK))


class Terms(NamedTuple):
    """What the weights of the tokens weigh, in the order of `Targets`, [T] each."""

    nll_T: jax.Array
    square_T: jax.Array
    score_T: jax.Array


def terms(nll_T: jax.Array, score_TK: jax.Array, lse_TK: jax.Array) -> Terms:
    """The nll, the log-normalizers' mean square, and the sum of the label's scores."""
    return Terms(nll_T, square(lse_TK), jnp.sum(score_TK, axis=-1))


def square(lse_TK: jax.Array) -> jax.Array:
    """The mean over the components of the squared log-normalizers, [T]."""
    return jnp.mean(jnp.square(lse_TK), axis=-1)


def weighted(targets: Targets, terms: Terms) -> jax.Array:
    """The sum of all terms of all tokens, each by its own weight."""
    total = jnp.sum(times(targets.weights_T, terms.nll_T))
    for weight_T, term_T in zip(targets[2:], terms[1:], strict=True):
        if weight_T is not None:
            total += jnp.sum(times(weight_T, term_T))
    return total


def times(weight_T: jax.Array, term_T: jax.Array) -> jax.Array:
    """The product, 0 for a weight of 0, whatever the term: padding's may be inf."""
    return jnp.where(weight_T != 0, weight_T * term_T, 0.0)


def weighted_and_bars(targets: Targets, terms: Terms) -> tuple[jax.Array, Targets]:
    """`weighted`, and its gradients by the weights."""
    wide = targets.weights_T.dtype
    terms = Terms(*(term.astype(wide) for term in terms))
    pairs = zip(targets[1:], terms, strict=True)
    # Labels have no gradient, nor have weights that there are not.
    bars: list[Any] = [None if weight is None else term for weight, term in pairs]
    labels_bar: Any = None
    return weighted(targets, terms), Targets(labels_bar, *bars)


def lse_weight(
    weight_TK: jax.Array, lse_TK: jax.Array, z_weights_T: jax.Array | None
) -> jax.Array:
    """The loss's derivative by the log-normalizers, from that of the nll, [T, K]."""
    if z_weights_T is None:
        return weight_TK
    return weight_TK + 2 / lse_TK.shape[1] * z_weights_T[:, None] * lse_TK


def loss_from(
    local_scores: Callable[..., Scores],
    mixture: Mixture,
    vocabulary: Vocabulary,
    targets: Targets,
    activation: Activation,
    options: Options,
    elsewhere: Elsewhere | None = None,
) -> jax.Array:
    """The loss from an implementation's scores, for jax to differentiate."""
    log_prior_TK, context_TKE = mixture
    inputs = (context_TKE, vocabulary, targets.labels_T, activation, options)
    score_TK, lse_TK = beside(*joint_scores(local_scores, *inputs), elsewhere)
    nll_T = nll(log_prior_TK, score_TK, lse_TK)
    return weighted(targets, terms(nll_T, score_TK, lse_TK))


def joint_scores(
    local_scores: Callable[..., Scores],
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """The label's score and the log-normalizers over the whole vocabulary, [T, K]."""
    inputs = (context_TKE, vocabulary, labels_T, activation, options)
    own_TK, lse_TK, _ = classes.scores(local_scores, *inputs)
    rows = len(vocabulary.table_VE)
    score_TK = shards.from_owner(own_TK, labels_T, rows, options)
    return score_TK, shards.joint_lse(lse_TK, options)


def vary(
    theta: tuple, mixture: Mixture, vocabulary: Vocabulary, by_token: Any
) -> tuple[tuple, Mixture, Vocabulary, Any]:
    """A loss's inputs, marked for `shard_map` before a `custom_vjp`.

    What meets the table varies with it; the rest, such as the targets, varies with the
    tokens alone.
    """
    log_prior_TK, context_TKE = mixture
    theta, context_TKE, vocabulary = shards.varying_together(
        theta, context_TKE, vocabulary
    )
    log_prior_TK, by_token = shards.varying_together(log_prior_TK, by_token)
    return theta, Mixture(log_prior_TK, context_TKE), vocabulary, by_token


def loss_backward(saved: Any, loss_bar: jax.Array, options: Options) -> tuple:
    """The gradients that a loss computed in forward, times its cotangent.

    Args:
        saved: gradients of what `vary` returns; the labels' is None.
        loss_bar: the cotangent of the loss.
        options: those of the loss.
    """
    theta_bar, mixture_bar, vocabulary_bar, by_token_bar = saved
    # What a shard adds to the normalizer reaches the loss of every shard; the prior and
    # what else is by token only enter that of their own.
    shared_bar = shards.shared_cotangent(loss_bar, options)

    def times(factor, tree):
        return jax.tree.map(lambda bar: (factor * bar).astype(bar.dtype), tree)

    prior_bar_TK, context_bar_TKE = mixture_bar
    return (
        times(shared_bar, theta_bar),
        Mixture(times(loss_bar, prior_bar_TK), times(shared_bar, context_bar_TKE)),
        times(shared_bar, vocabulary_bar),
        times(loss_bar, by_token_bar),
    )


def over_chunks(
    function: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    tokens: Any,
    chunks: int,
    multiple: int = 1,
) -> tuple[Any, Any]:
    """Scan `function(carry, tokens) -> (carry, by_token)` over equal chunks of tokens.

    The last chunk is filled with zeros, of which nothing is returned. If there are
    several, their size is a multiple of the given number.
    """
    if chunks == 1:
        return function(carry, tokens)
    count = jax.tree.leaves(tokens)[0].shape[0]
    size = round_up(-(-count // chunks), multiple)

    def split(array):
        pad = [(0, chunks * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, pad).reshape(chunks, size, *array.shape[1:])

    def join(array):
        return array.reshape(chunks * size, *array.shape[2:])[:count]

    carry, by_chunk = jax.lax.scan(function, carry, jax.tree.map(split, tokens))
    return carry, jax.tree.map(join, by_chunk)


def _target_logit(context_TKE, vocabulary, labels_T, options):
    table_VE = vocabulary.table_VE
    label_T, owned_T = shards.local_labels(labels_T, len(table_VE), options)
    dtype = product_dtype(options, context_TKE, table_VE)
    wide = sum_dtype(context_TKE, table_VE)
    row_TE, bias_T = rows.take(vocabulary, label_T, dtype, wide, options)
    context_TKE = seen(context_TKE, dtype, options).astype(wide)
    z_TK = jnp.einsum("tke,te->tk", context_TKE, row_TE)
    return z_TK + bias_T[:, None], owned_T
