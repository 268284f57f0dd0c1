"""The pieces that every implementation of the mixture likelihood shares.

A table split over a mesh axis needs two exchanges and no more: the log-normalisers
combine as lse = logsumexp over the shards of their own lse, and the target's score is
the sum over the shards of what the one that owns the row computes. Both are ordinary
differentiable code of size [T, K].
"""

import jax
import jax.numpy as jnp

from softbottle.ops.activations import Activation
from softbottle.ops.options import Options, product_dtype, sum_dtype


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


def first_row(rows: int, options: Options) -> jax.Array | int:
    """The id of this shard's first table row."""
    if options.vocab_axis is None:
        return 0
    return jax.lax.axis_index(options.vocab_axis) * rows


def live_rows(rows: int, options: Options) -> jax.Array:
    """Which of the local table rows are words, [V]."""
    ids_V = jnp.arange(rows) + first_row(rows, options)
    return ids_V < _vocab(rows, options)


def over_shards(lse_TK: jax.Array, options: Options) -> jax.Array:
    """Log-normalisers over the whole vocabulary from those over each shard."""
    if options.vocab_axis is None:
        return lse_TK
    top_TK = jax.lax.pmax(jax.lax.stop_gradient(lse_TK), options.vocab_axis)
    total_TK = jax.lax.psum(jnp.exp(lse_TK - top_TK), options.vocab_axis)
    return top_TK + jnp.log(total_TK)


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
    rows = table_VE.shape[0]
    local_T = labels_T - first_row(rows, options)
    owned_T = (local_T >= 0) & (local_T < rows)
    safe_T = jnp.where(owned_T, local_T, 0)
    dtype = product_dtype(options, context_TKE, table_VE)
    wide = sum_dtype(context_TKE, table_VE)
    z_TK = jnp.einsum(
        "tke,te->tk",
        context_TKE.astype(dtype).astype(wide),
        table_VE[safe_T].astype(dtype).astype(wide),
    )
    z_TK += bias_V[safe_T].astype(wide)[:, None]
    score_TK = activation.apply(activation.theta, z_TK)
    score_TK = jnp.where(owned_T[:, None], score_TK, 0.0)
    if options.vocab_axis is not None:
        score_TK = jax.lax.psum(score_TK, options.vocab_axis)
    word_T = (labels_T >= 0) & (labels_T < _vocab(rows, options))
    return jnp.where(word_T[:, None], score_TK, jnp.nan)


def _vocab(rows, options):
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


def _varying(leaf):
    return jax.typeof(leaf).manual_axis_type.varying
