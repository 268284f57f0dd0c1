"""A cache of past states: how much of its mass falls on the label.

    score[q, m] = scale * query[q] . key[m],          over the visible m,
    lse[q]      = logsumexp_m score[q, m],
    target[q]   = logsumexp_{m : word[m] = label[q]} score[q, m].

exp(target - lse) is the probability that the cache alone gives to the label. Neither
needs an array over the vocabulary. Write C for exp(lse) and C_v for the mass on word v.

Joined to a softmax under one normalizer the cache gives

    P(v) = (exp g(z_v) + C_v) / (sum_u exp g(z_u) + C).

A mixture has a normalizer for every component, and the same cache joins each of them:

    P(v) = sum_k prior_k (exp g(z_kv) + C_v) / (exp(lse_k) + C).

Every term of the sum is a distribution, so P is one; with K = 1 it is the formula
above; and with C = 0 it is the mixture itself. (One normalizer over all components,
sum_k prior_k exp(lse_k) + C, would not do: without a cache it weighs the components by
prior_k exp(lse_k), which is another mixture.) Taken apart by where a word comes from,

    P(v) = sum_k prior'_k softmax_k(v) + gate C_v / C,
    prior'_k = prior_k exp(lse_k) / (exp(lse_k) + C),
    gate     = sum_k prior_k C / (exp(lse_k) + C),

it is a mixture of K + 1 distributions: to draw a word, choose one of them, and within
the cache an entry. The neural cache of Grave et al. is the same with a constant gate.

Every function takes any number of leading axes, the same for all of its arrays.

Axes: Q queries, M entries of the cache.
"""

import jax
import jax.numpy as jnp

from softbottle.ops.log_sum import log_sum


def similarities(
    query_QD: jax.Array,
    key_MD: jax.Array,
    visible_QM: jax.Array,
    scale: float | jax.Array,
) -> jax.Array:
    """scale * query . key in float32 or better, -inf where not visible: [Q, M]."""
    wide = jnp.promote_types(query_QD.dtype, jnp.float32)
    score_QM = scale * jnp.einsum(
        "...qd,...md->...qm", query_QD, key_MD, preferred_element_type=wide
    )
    return jnp.where(visible_QM, score_QM, -jnp.inf)


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
    hold the label; there the gradient is 0.
    """
    score_QM = similarities(query_QD, key_MD, visible_QM, scale)
    hit_QM = label_Q[..., :, None] == word_M[..., None, :]
    target_Q = log_sum(jnp.where(hit_QM, score_QM, -jnp.inf))
    return target_Q, log_sum(score_QM)


def past(segments_BS: jax.Array) -> jax.Array:
    """Which positions of its own segment are before a position: [B, S, S].

    Segment 0 is padding, which sees nothing and is seen by nothing.
    """
    positions_S = jnp.arange(segments_BS.shape[-1])
    before_SS = positions_S[:, None] > positions_S[None, :]
    same_BSS = segments_BS[:, :, None] == segments_BS[:, None, :]
    return before_SS[None] & same_BSS & (segments_BS > 0)[:, :, None]


def window(positions: int, size: int) -> jax.Array:
    """Which of `size` older states, followed by the block's own, a position sees.

    Position q sees the `size` states just before it: [Q, size + Q].
    """
    query_Q1 = jnp.arange(positions)[:, None]
    key_1M = jnp.arange(size + positions)[None]
    return (key_1M >= query_Q1) & (key_1M < query_Q1 + size)


def join(
    log_prior_TK: jax.Array,
    score_TK: jax.Array,
    lse_TK: jax.Array,
    target_T: jax.Array,
    cache_T: jax.Array,
) -> jax.Array:
    """log P(label) of a mixture and a cache under the joint normalizers, [T].

    Args:
        log_prior_TK: of the mixture's components.
        score_TK: g(z) of the label.
        lse_TK: the log-normalizers over the vocabulary.
        target_T: the cache's log-mass on the label.
        cache_T: the cache's log-mass in all.
    """
    target_TK = jnp.broadcast_to(target_T[:, None], score_TK.shape)
    # Both are -inf for a label that is ruled out and in no entry, as padding's may be.
    score_TK = log_sum(jnp.stack([score_TK, target_TK], axis=-1))
    lse_TK = jnp.logaddexp(lse_TK, cache_T[:, None])
    return log_sum(log_prior_TK + score_TK - lse_TK)


def gates(
    log_prior_TK: jax.Array, lse_TK: jax.Array, cache_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(log prior' [T, K], log gate [T]): the weights of the K + 1 distributions."""
    joint_TK = jnp.logaddexp(lse_TK, cache_T[:, None])
    gate_T = jax.nn.logsumexp(log_prior_TK - joint_TK, axis=-1) + cache_T
    return log_prior_TK + lse_TK - joint_TK, gate_T


def interpolate(
    log_p_T: jax.Array, log_cache_T: jax.Array, share: float | jax.Array
) -> jax.Array:
    """log((1 - share) p + share cache), the neural cache's constant gate."""
    return jnp.logaddexp(jnp.log1p(-share) + log_p_T, jnp.log(share) + log_cache_T)


def log_probs(score_QM: jax.Array, word_M: jax.Array, vocab: int) -> jax.Array:
    """log(C_v / C) of every word, [Q, V]; -inf everywhere where the cache is empty.

    NaN everywhere where an entry that is visible holds no word of the `vocab` there
    are: its mass would be nowhere.

    It scatters over the vocabulary: for evaluation and generation.
    """
    lse_Q = log_sum(score_QM)
    share_QM = jnp.exp(score_QM - jnp.where(jnp.isneginf(lse_Q), 0.0, lse_Q)[:, None])
    share_QV = jnp.zeros((len(score_QM), vocab), score_QM.dtype)
    strange_M = (word_M < 0) | (word_M >= vocab)
    seen_Q = jnp.any(~jnp.isneginf(score_QM) & strange_M[None], axis=-1)
    share_QV = share_QV.at[:, word_M].add(share_QM)
    none_QV = share_QV == 0
    log_QV = jnp.where(none_QV, -jnp.inf, jnp.log(jnp.where(none_QV, 1.0, share_QV)))
    return jnp.where(seen_Q[:, None], jnp.nan, log_QV)


def best_word(score_QM: jax.Array, word_M: jax.Array) -> jax.Array:
    """The word to which the cache gives most, [Q]; -1 where it is empty.

    It compares entries with entries, and needs no array over the vocabulary.
    """
    top_Q1 = jnp.max(score_QM, axis=-1, keepdims=True)
    some_Q1 = ~jnp.isneginf(top_Q1)
    mass_QM = jnp.exp(score_QM - jnp.where(some_Q1, top_Q1, 0.0))
    same_MM = (word_M[:, None] == word_M[None, :]).astype(mass_QM.dtype)
    best_Q = jnp.argmax(jnp.where(mass_QM > 0, mass_QM @ same_MM, -1.0), axis=-1)
    return jnp.where(some_Q1[:, 0], word_M[best_Q], -1)
