"""A cache of past states: how much of its mass falls on the label.

    score[q, m] = scale * query[q] . key[m],          over the visible m,
    lse[q]      = logsumexp_m score[q, m],
    target[q]   = logsumexp_{m : word[m] = label[q]} score[q, m].

exp(target - lse) is the probability that the cache alone gives to the label. Neither
needs an array over the vocabulary.
"""

import jax
import jax.numpy as jnp


def masses(
    query_QD: jax.Array,
    key_MD: jax.Array,
    word_M: jax.Array,
    label_Q: jax.Array,
    visible_QM: jax.Array,
    scale: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Log-mass on the label and in all, (target [Q], lse [Q]).

    Both are -inf where nothing is visible, and the target's where the cache does not
    hold the label.
    """
    wide = jnp.promote_types(query_QD.dtype, jnp.float32)
    score_QM = scale * jnp.einsum(
        "qd,md->qm", query_QD, key_MD, preferred_element_type=wide
    )
    score_QM = jnp.where(visible_QM, score_QM, -jnp.inf)
    hit_QM = label_Q[:, None] == word_M[None]
    target_Q = jax.nn.logsumexp(jnp.where(hit_QM, score_QM, -jnp.inf), axis=-1)
    return target_Q, jax.nn.logsumexp(score_QM, axis=-1)


def window(positions: int, size: int) -> jax.Array:
    """Which of `size` older states, followed by the block's own, a position sees.

    Position q sees the `size` states just before it: [Q, size + Q].
    """
    query_Q1 = jnp.arange(positions)[:, None]
    key_1M = jnp.arange(size + positions)[None]
    return (key_1M >= query_Q1) & (key_1M < query_Q1 + size)
