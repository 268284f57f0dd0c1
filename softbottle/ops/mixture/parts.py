"""The pieces that every implementation of the mixture likelihood shares.

A table split over a mesh axis needs two exchanges and no more: the log-normalisers
combine as lse = logsumexp over the shards of their own lse, and the target's score is
the sum over the shards of what the one that owns the row computes. Both are ordinary
differentiable code of size [T, K].
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.options import Options, product_dtype, sum_dtype


@functools.cache
def note(message: str) -> None:
    """Say something in the log, once."""
    logging.getLogger("softbottle").info(message)


def logits(
    context_CKE: jax.Array, table_VE: jax.Array, bias_V: jax.Array, options: Options
) -> jax.Array:
    """z = context . table + bias, accumulated in float32 or better: [C, K, V]."""
    dtype = product_dtype(options, context_CKE, table_VE)
    z_CKV = jnp.einsum(
        "cke,ve->ckv",
        context_CKE.astype(dtype),
        table_VE.astype(dtype),
        preferred_element_type=sum_dtype(context_CKE, table_VE),
    )
    return z_CKV + bias_V.astype(z_CKV.dtype)[None, None]


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


def first_row(rows: int, options: Options) -> jax.Array | int:
    """The id of this shard's first table row."""
    if options.vocab_axis is None:
        return 0
    return jax.lax.axis_index(options.vocab_axis) * rows


def live_rows(rows: int, options: Options) -> jax.Array:
    """Which of the local table rows are words, [V]."""
    ids_V = jnp.arange(rows) + first_row(rows, options)
    return ids_V < vocabulary(rows, options)


def over_shards(lse_TK: jax.Array, options: Options) -> jax.Array:
    """Log-normalisers over the whole vocabulary from those over each shard."""
    if options.vocab_axis is None:
        return lse_TK
    top_TK = jax.lax.pmax(jax.lax.stop_gradient(lse_TK), options.vocab_axis)
    total_TK = jax.lax.psum(jnp.exp(lse_TK - top_TK), options.vocab_axis)
    return top_TK + jnp.log(total_TK)


def local_labels(
    labels_T: jax.Array, rows: int, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Each label's row of this shard, 0 where another has it, and whether it has it."""
    local_T = labels_T - first_row(rows, options)
    owned_T = (local_T >= 0) & (local_T < rows)
    return jnp.where(owned_T, local_T, 0), owned_T


def target_score(
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array,
    labels_T: jax.Array,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """g(z) of the label, [T, K]; NaN where the label is no word of the vocabulary.

    The row of the label is gathered and multiplied in float32 or better, from the same
    rounded inputs that the normaliser's products read, so that the two agree.
    """
    z_TK, owned_T = _target_logit(context_TKE, table_VE, bias_V, labels_T, options)
    score_TK = activation.apply(activation.theta, z_TK)
    return _from_owner(score_TK, owned_T, labels_T, table_VE.shape[0], options)


def target_score_and_slope(
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array,
    labels_T: jax.Array,
    activation: Activation,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """`target_score` and g'(z) of the label, both [T, K]."""
    z_TK, owned_T = _target_logit(context_TKE, table_VE, bias_V, labels_T, options)
    score_TK, slope_TK = with_slope(activation, z_TK)
    rows = table_VE.shape[0]
    return tuple(
        _from_owner(array_TK, owned_T, labels_T, rows, options)
        for array_TK in (score_TK, slope_TK)
    )


def with_slope(activation: Activation, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """g(z) and g'(z)."""
    apply = functools.partial(activation.apply, activation.theta)
    return jax.jvp(apply, (z,), (jnp.ones_like(z),))


def nll(log_prior_TK: jax.Array, score_TK: jax.Array, lse_TK: jax.Array) -> jax.Array:
    """-log P(label) of each token, [T]."""
    return -jax.nn.logsumexp(log_prior_TK + score_TK - lse_TK, axis=-1)


def responsibility(
    log_prior_TK: jax.Array,
    score_TK: jax.Array,
    lse_TK: jax.Array,
    nll_T: jax.Array,
    weights_T: jax.Array,
) -> jax.Array:
    """weight[t] P(component | label), [T, K]; 0 where the weight is, NaN or not."""
    posterior_TK = jnp.exp(log_prior_TK + score_TK - lse_TK + nll_T[:, None])
    weight_TK = weights_T[:, None] * posterior_TK
    return jnp.where(weights_T[:, None] != 0, weight_TK, 0.0)


def weighted(weights_T: jax.Array, nll_T: jax.Array) -> jax.Array:
    """sum_t weight[t] nll[t]; a token of weight 0 adds nothing, NaN or not."""
    return jnp.sum(jnp.where(weights_T != 0, weights_T * nll_T, 0.0))


def loss_backward(saved: Any, loss_bar: jax.Array, options: Options) -> tuple:
    """The gradients that a loss computed in forward, times its cotangent.

    Args:
        saved: (those of all that meets the table, that of log_prior, that of weights).
        loss_bar: the cotangent of the loss.
        options: those of the loss.

    Returns:
        Gradients in the order of the inputs: the table's, then log_prior, labels and
        weights; None for the labels.
    """
    bars, prior_bar_TK, weights_bar_T = saved
    # What a shard adds to the normaliser reaches the loss of every shard; the prior and
    # the weights only enter that of their own.
    summed_bar = _over_unchecked_shards(loss_bar, options)
    bars = jax.tree.map(lambda bar: (summed_bar * bar).astype(bar.dtype), bars)
    tokens = jax.tree.map(
        lambda bar: (loss_bar * bar).astype(bar.dtype), (prior_bar_TK, weights_bar_T)
    )
    return *bars, tokens[0], None, tokens[1]


def over_chunks(function: Callable, carry: Any, tokens: Any, chunks: int):
    """Scan `function(carry, tokens) -> (carry, by_token)` over equal chunks of tokens.

    The last chunk is filled with zeros, of which nothing is returned.
    """
    if chunks == 1:
        return function(carry, tokens)
    count = jax.tree.leaves(tokens)[0].shape[0]
    size = -(-count // chunks)

    def split(array):
        pad = [(0, chunks * size - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, pad).reshape(chunks, size, *array.shape[1:])

    def join(array):
        return array.reshape(chunks * size, *array.shape[2:])[:count]

    carry, by_chunk = jax.lax.scan(function, carry, jax.tree.map(split, tokens))
    return carry, jax.tree.map(join, by_chunk)


def _target_logit(context_TKE, table_VE, bias_V, labels_T, options):
    label_T, owned_T = local_labels(labels_T, table_VE.shape[0], options)
    dtype = product_dtype(options, context_TKE, table_VE)
    wide = sum_dtype(context_TKE, table_VE)
    z_TK = jnp.einsum(
        "tke,te->tk",
        context_TKE.astype(dtype).astype(wide),
        table_VE[label_T].astype(dtype).astype(wide),
    )
    return z_TK + bias_V[label_T].astype(wide)[:, None], owned_T


def _from_owner(array_TK, owned_T, labels_T, rows, options):
    """What the shard that has the label's row says; NaN where the label is no word."""
    array_TK = jnp.where(owned_T[:, None], array_TK, 0.0)
    if options.vocab_axis is not None:
        array_TK = jax.lax.psum(array_TK, options.vocab_axis)
    word_T = (labels_T >= 0) & (labels_T < vocabulary(rows, options))
    return jnp.where(word_T[:, None], array_TK, jnp.nan)


def vocabulary(rows: int, options: Options) -> int:
    """How many words there are, on all shards together."""
    if options.vocab is not None:
        return options.vocab
    if options.vocab_axis is None:
        return rows
    return rows * jax.lax.axis_size(options.vocab_axis)


def varying_together(*trees):
    """The trees with every leaf varying over the union of their manual mesh axes.

    Inside `shard_map` a replicated input that meets a split one must be marked as
    varying before a `custom_vjp`, so that its gradient is summed over the mesh by the
    transpose of the mark; outside `shard_map` nothing happens.
    """
    axes = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(trees)))
    return vary_over(axes, *trees)


def vary_over(axes, *trees):
    """The trees with every leaf varying over these manual mesh axes."""

    def vary(leaf):
        missing = tuple(sorted(axes - _varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, trees)


def _over_unchecked_shards(loss_bar, options):
    """A loss's cotangent as the transpose of the sum over shards hands it on.

    `shard_map` transposes a psum to the identity, because it knows that the cotangent
    is the same on all shards. With check_vma=False it does not, and takes a psum; what
    a `custom_vjp` computes instead of jax has to follow. An index along the axis is
    what certainly varies, if anything is known to.
    """
    axis = options.vocab_axis
    if axis is None or axis in _varying(jax.lax.axis_index(axis)):
        return loss_bar
    return jax.lax.psum(loss_bar, axis)


def _varying(leaf):
    return jax.typeof(leaf).manual_axis_type.varying
