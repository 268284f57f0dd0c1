"""A table whose rows are split over a mesh axis: who has which, and what is exchanged.

Vocabulary-parallel operations need two exchanges and no more: the log-normalizers
combine as lse = logsumexp over the shards of their own lse, and the label's score is
the sum over the shards of what the one that owns the row computes. Both are ordinary
differentiable code of size [T, K].
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from softbottle.ops.mixture.options import Options


def word_count(rows: int, options: Options) -> int:
    """How many words there are, on all shards together."""
    if options.vocab is not None:
        return options.vocab
    if options.vocab_axis is None:
        return rows
    return rows * jax.lax.axis_size(options.vocab_axis)


def first_row(rows: int, options: Options) -> jax.Array | int:
    """The id of this shard's first table row."""
    if options.vocab_axis is None:
        return 0
    return jax.lax.axis_index(options.vocab_axis) * rows


def live_rows(rows: int, options: Options) -> jax.Array:
    """Which of the local table rows are words, [V]."""
    ids_V = jnp.arange(rows) + first_row(rows, options)
    return ids_V < word_count(rows, options)


def local_labels(
    labels_T: jax.Array, rows: int, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Each label's row of this shard, 0 where another has it, and whether it has it."""
    local_T = labels_T - first_row(rows, options)
    owned_T = (local_T >= 0) & (local_T < rows)
    return jnp.where(owned_T, local_T, 0), owned_T


def joint_lse(lse_TK: jax.Array, options: Options) -> jax.Array:
    """Log-normalizers over the whole vocabulary from those over each shard."""
    if options.vocab_axis is None:
        return lse_TK
    top_TK = jax.lax.pmax(jax.lax.stop_gradient(lse_TK), options.vocab_axis)
    total_TK = jax.lax.psum(jnp.exp(lse_TK - top_TK), options.vocab_axis)
    return top_TK + jnp.log(total_TK)


def joint_entropy(
    lse_TK: jax.Array, entropy_TK: jax.Array, joint_TK: jax.Array, options: Options
) -> jax.Array:
    """Entropies over the whole vocabulary from those over each shard.

    Args:
        lse_TK: log-normalizers over each shard.
        entropy_TK: entropies over each shard, normalized by itself.
        joint_TK: log-normalizers over all.
        options: which axis.
    """
    if options.vocab_axis is None:
        return entropy_TK
    # A shard without a word that has a probability has no share: 0 times inf.
    none_TK = jnp.isneginf(lse_TK)
    behind_TK = joint_TK - jnp.where(none_TK, joint_TK, lse_TK)
    share_TK = jnp.where(none_TK, 0.0, jnp.exp(-behind_TK))
    return jax.lax.psum(share_TK * (entropy_TK + behind_TK), options.vocab_axis)


def from_owner(
    array_TK: jax.Array, labels_T: jax.Array, rows: int, options: Options
) -> jax.Array:
    """What the shard that has the label's row says; NaN where the label is no word.

    The others say 0.
    """
    if options.vocab_axis is not None:
        array_TK = jax.lax.psum(array_TK, options.vocab_axis)
    word_T = (labels_T >= 0) & (labels_T < word_count(rows, options))
    return jnp.where(word_T[:, None], array_TK, jnp.nan)


def gathered(array_Tk: jax.Array, options: Options) -> jax.Array:
    """What each shard says of every token, [T, N k], the first shard's first.

    The same on all shards, and known to be; an all-gather's result is not.
    """
    axis = options.vocab_axis
    if axis is None:
        return array_Tk
    (tokens, k), count = array_Tk.shape, jax.lax.axis_size(axis)
    own_1N1 = (jnp.arange(count) == jax.lax.axis_index(axis))[None, :, None]
    own_TNk = jnp.where(own_1N1, array_Tk[:, None], jnp.zeros((), array_Tk.dtype))
    return jax.lax.psum(own_TNk, axis).reshape(tokens, count * k)


def total(array: jax.Array, options: Options) -> jax.Array:
    """The sum over the shards."""
    if options.vocab_axis is None:
        return array
    return jax.lax.psum(array, options.vocab_axis)


def largest(array: jax.Array, options: Options) -> jax.Array:
    """The largest of the shards'."""
    if options.vocab_axis is None:
        return array
    return jax.lax.pmax(array, options.vocab_axis)


def varying_together(*trees: Any) -> tuple[Any, ...]:
    """The trees with every leaf varying over the union of their manual mesh axes.

    Inside `shard_map` a replicated input that meets a split one must be marked as
    varying before a `custom_vjp`, so that its gradient is summed over the mesh by the
    transpose of the mark; outside `shard_map` nothing happens.
    """
    return vary_over(axes(*trees), *trees)


def axes(*trees: Any) -> frozenset[str]:
    """The manual mesh axes that some leaf of the trees varies over."""
    return frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(trees)))


def vary_over(names: Iterable[str], *trees: Any) -> tuple[Any, ...]:
    """The trees with every leaf varying over these manual mesh axes."""

    def vary(leaf):
        missing = tuple(sorted(set(names) - _varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary, trees)


def shared_cotangent(loss_bar: jax.Array, options: Options) -> jax.Array:
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
