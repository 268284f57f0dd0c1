import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.cache import api as cache

QUERIES, KEYS, WIDTH, SCALE = 5, 11, 3, 0.7
EMPTY, ABSENT = 1, 3  # a query that sees nothing, one whose label is nowhere
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
STEP = 1e-6
DIFFERENCES = {"rtol": 1e-6, "atol": 1e-8}


def make_inputs(seed=0):
    random = np.random.default_rng(seed)
    query_QD = random.normal(size=(QUERIES, WIDTH))
    key_MD = random.normal(size=(KEYS, WIDTH))
    word_M = random.integers(0, 3, KEYS).astype(np.int32)
    label_Q = np.array([0, 1, 2, 7, 1], np.int32)
    visible_QM = random.random((QUERIES, KEYS)) < 0.8
    visible_QM[EMPTY] = False
    visible_QM[:EMPTY, :3] = visible_QM[EMPTY + 1 :, :3] = True
    word_M[:3] = [0, 1, 2]
    return query_QD, key_MD, word_M, label_Q, visible_QM


def brute(query_QD, key_MD, word_M, label_Q, visible_QM):
    """(target, lse) by a loop over pairs."""
    target_Q, lse_Q = [], []
    for query_D, label, visible_M in zip(query_QD, label_Q, visible_QM, strict=True):
        total = hits = 0.0
        for key_D, word, visible in zip(key_MD, word_M, visible_M, strict=True):
            if visible:
                mass = math.exp(SCALE * sum(query_D * key_D))
                total += mass
                hits += mass * (word == label)
        target_Q.append(math.log(hits) if hits else -math.inf)
        lse_Q.append(math.log(total) if total else -math.inf)
    return np.array(target_Q), np.array(lse_Q)


def test_masses_are_those_of_a_loop_over_pairs(float64):
    inputs = make_inputs()
    found = jax.jit(cache.masses)(*inputs, SCALE)
    for ours, theirs in zip(found, brute(*inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


def test_nothing_visible_has_no_mass_and_an_absent_label_none_of_it():
    query_QD, key_MD, *rest = make_inputs()
    states = (query_QD.astype(np.float32), key_MD.astype(np.float32))
    target_Q, lse_Q = jax.jit(cache.masses)(*states, *rest, SCALE)
    assert list(np.flatnonzero(np.isneginf(lse_Q))) == [EMPTY]
    assert list(np.flatnonzero(np.isneginf(target_Q))) == [EMPTY, ABSENT]
    assert target_Q.dtype == lse_Q.dtype == jnp.float32


def test_scores_of_bfloat16_states_are_float32(mixed_dtypes):
    query_QD, key_MD, *rest = make_inputs()
    states = [jnp.asarray(array, jnp.bfloat16) for array in (query_QD, key_MD)]
    exact = [np.asarray(array, np.float64) for array in states]
    found = jax.jit(cache.masses)(*states, *rest, SCALE)
    for ours, theirs in zip(found, brute(*exact, *rest), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_central_differences(float64):
    query_QD, key_MD, word_M, label_Q, visible_QM = make_inputs()
    rest = (word_M, label_Q, visible_QM)
    # Queries without mass are chosen away, as a caller does who mixes the cache in.
    target_bar_Q = np.array([0.9, 0.0, -1.3, 0.0, 0.4])
    lse_bar_Q = np.array([-0.7, 0.0, 0.2, 1.1, 0.6])

    def objective(query_QD, key_MD, masses, where):
        target_Q, lse_Q = masses(query_QD, key_MD)
        total = where(target_bar_Q != 0, target_bar_Q * target_Q, 0.0)
        return (total + where(lse_bar_Q != 0, lse_bar_Q * lse_Q, 0.0)).sum()

    def ours(query_QD, key_MD):
        def masses(*states):
            return cache.masses(*states, *rest, SCALE)

        return objective(query_QD, key_MD, masses, jnp.where)

    def theirs(*states):
        def where(chosen, value, other):
            return np.where(chosen, np.nan_to_num(value, neginf=0.0), other)

        with np.errstate(invalid="ignore"):
            return objective(*states, lambda *states: brute(*states, *rest), where)

    grads = jax.jit(jax.grad(ours, argnums=(0, 1)))(query_QD, key_MD)
    for index, grad in enumerate(grads):
        expected = np.zeros(grad.shape)
        for place in np.ndindex(grad.shape):
            ends = []
            for sign in (1, -1):
                states = [query_QD.copy(), key_MD.copy()]
                states[index][place] += sign * STEP
                ends.append(theirs(*states))
            expected[place] = (ends[0] - ends[1]) / (2 * STEP)
        np.testing.assert_allclose(grad, expected, **DIFFERENCES)


@pytest.mark.parametrize("positions, size", [(1, 1), (5, 3), (3, 7)])
def test_a_position_sees_the_states_just_before_it(positions, size):
    found_QM = np.asarray(cache.window(positions, size))
    assert found_QM.shape == (positions, size + positions)
    for query in range(positions):
        for key in range(size + positions):
            age = query - (key - size)  # how many positions ago the state was
            assert found_QM[query, key] == (1 <= age <= size)


@pytest.mark.slow
def test_the_best_word_is_that_of_the_largest_sum(float64):
    query_QD, key_MD, word_M, _, visible_QM = make_inputs()

    @jax.jit
    def run(query_QD, key_MD, word_M):
        score_QM = cache.similarities(query_QD, key_MD, visible_QM, SCALE)
        return cache.best_word(score_QM, word_M), cache.log_probs(score_QM, word_M, 5)

    found_Q, log_p_QV = map(np.asarray, run(query_QD, key_MD, word_M))
    for query, log_p_V in enumerate(log_p_QV):
        if query == EMPTY:
            assert found_Q[query] == -1 and np.all(np.isneginf(log_p_V))
        else:
            assert found_Q[query] == log_p_V.argmax()
            assert np.exp(log_p_V).sum() == pytest.approx(1)


@pytest.mark.parametrize("word", [-1, -5, 5, 10**6])
def test_a_visible_entry_that_holds_no_word_makes_all_words_nan(word):
    query_QD, key_MD, word_M, _, visible_QM = make_inputs()
    states = (query_QD.astype(np.float32), key_MD.astype(np.float32))
    score_QM = cache.similarities(*states, visible_QM, SCALE)
    word_M[5] = word
    log_p_QV = np.asarray(
        jax.jit(cache.log_probs, static_argnums=2)(score_QM, word_M, 5)
    )
    sees_Q = visible_QM[:, 5]
    assert 0 < sees_Q.sum() < QUERIES
    np.testing.assert_array_equal(np.isnan(log_p_QV), np.repeat(sees_Q[:, None], 5, 1))


def test_the_past_is_strictly_before_and_of_the_same_segment():
    segments_BS = np.array([[1, 1, 2, 2, 2, 0, 0], [4, 3, 3, 4, 4, 0, 1]])
    found_BSS = np.asarray(cache.past(segments_BS))
    for row, now, then in np.ndindex(found_BSS.shape):
        same = segments_BS[row, now] == segments_BS[row, then] != 0
        assert found_BSS[row, now, then] == (then < now and same)
