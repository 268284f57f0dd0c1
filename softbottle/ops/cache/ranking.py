"""The ranking loss of HistAlign: cached states in the order of their words' closeness.

For one query the n visible entries are put in order of closeness to the label, those
that hold the label itself first. With r_m the place of entry m in that order and s_m
its score, the loss of a positive i (an entry that holds the label) and a negative j is

    max(0, s_j - s_i + margin (r_j - r_i)),

and that of the query its mean over all such pairs. Since every positive is placed
before every negative, with a_m = s_m + margin r_m it is the sum over all pairs of
max(0, a_j - a_i): linear in a once it is known how many pairs of each entry are in the
wrong order,

    sum_j a_j #{i : a_i < a_j} - sum_i a_i #{j : a_j > a_i},

and those numbers come from sorting a. So neither the n^2 pairs nor a loop over the
distances j - i is needed, and the gradient is the numbers themselves. The order and
the places have no gradient.

Axes: Q queries.
"""

import jax
import jax.numpy as jnp


def hinge(
    score_QM: jax.Array,
    closeness_QM: jax.Array,
    positive_QM: jax.Array,
    visible_QM: jax.Array,
    margin: float,
) -> tuple[jax.Array, jax.Array]:
    """(mean hinge over the pairs of each query [Q], whether it has any pair [Q]).

    Args:
        score_QM: similarity of the query to each entry; the only one with a gradient.
        closeness_QM: of the entries' words to the label; it gives the order alone.
        positive_QM: whether an entry holds the label.
        visible_QM: which entries there are; the others may hold anything but NaN.
        margin: lambda, for every place between the two.
    """
    positive_QM &= visible_QM
    negative_QM = visible_QM & ~positive_QM
    fixed_QM = jax.lax.stop_gradient(score_QM)
    place_QM = _places(closeness_QM, positive_QM, visible_QM)
    offset_QM = margin * place_QM.astype(score_QM.dtype)
    wrong_QM = _wrong_pairs(fixed_QM + offset_QM, positive_QM, negative_QM)
    wrong_QM = wrong_QM.astype(score_QM.dtype)
    total_Q = jnp.sum(
        jnp.where(visible_QM, wrong_QM * (score_QM + offset_QM), 0.0), axis=-1
    )
    pairs_Q = jnp.sum(positive_QM, axis=-1) * jnp.sum(negative_QM, axis=-1)
    mean_Q = total_Q / jnp.maximum(pairs_Q, 1).astype(total_Q.dtype)
    return mean_Q, pairs_Q > 0


def _places(closeness_QM, positive_QM, visible_QM):
    """The place of each entry: positives, then by closeness, then what is not there.

    Of equally close entries the older comes first.
    """
    group_QM = jnp.where(positive_QM, 0, jnp.where(visible_QM, 1, 2))
    far_QM = -jax.lax.stop_gradient(closeness_QM)
    # A word that is exactly as close as the label itself comes after it all the same.
    order = jax.lax.sort((group_QM, far_QM, _entries(far_QM)), num_keys=2)[2]
    return _back(order, _entries(order))


def _wrong_pairs(value_QM, positive_QM, negative_QM):
    """Of each negative the positives below it; of each positive minus those above."""
    flags = (positive_QM.astype(jnp.int32), negative_QM.astype(jnp.int32))
    _, order_QM, positive_QM, negative_QM = jax.lax.sort(
        (value_QM, _entries(value_QM), *flags), num_keys=1
    )
    last = value_QM.ndim - 1
    below_QM = jax.lax.cumsum(positive_QM, axis=last)
    above_QM = jax.lax.cumsum(negative_QM, axis=last, reverse=True)
    return _back(order_QM, negative_QM * below_QM - positive_QM * above_QM)


def _entries(array_QM):
    return jax.lax.broadcasted_iota(jnp.int32, array_QM.shape, array_QM.ndim - 1)


def _back(order_QM, value_QM):
    """Values of a sorted array in the order before it was sorted."""
    return jax.lax.sort((order_QM, value_QM), num_keys=1)[1]
