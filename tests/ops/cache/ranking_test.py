import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.cache import ranking

QUERIES, ENTRIES, MARGIN = 7, 11, 0.3
NO_POSITIVE, NO_NEGATIVE, EMPTY = 1, 2, 3


def make_inputs(seed=0):
    random = np.random.default_rng(seed)
    score_QM = random.normal(size=(QUERIES, ENTRIES))
    # Few values, so that many entries are equally close.
    closeness_QM = random.integers(-2, 3, (QUERIES, ENTRIES)) / 2
    positive_QM = random.random((QUERIES, ENTRIES)) < 0.3
    visible_QM = random.random((QUERIES, ENTRIES)) < 0.8
    positive_QM[NO_POSITIVE] = False
    positive_QM[NO_NEGATIVE] = True
    visible_QM[EMPTY] = False
    score_QM[~visible_QM] = -np.inf
    return score_QM, closeness_QM, positive_QM, visible_QM


def brute(score_QM, closeness_QM, positive_QM, visible_QM, margin):
    """Means over pairs and their number, by a loop over pairs of an ordered list."""
    means, counts = [], []
    for query in range(len(score_QM)):
        entries = np.flatnonzero(visible_QM[query])
        positive = positive_QM[query]
        order = sorted(
            entries, key=lambda m: (not positive[m], -closeness_QM[query, m])
        )
        losses = [
            max(0.0, score_QM[query, j] - score_QM[query, i] + margin * (b - a))
            for a, i in enumerate(order)
            for b, j in enumerate(order)
            if a < b and positive[i] and not positive[j]
        ]
        means.append(np.mean(losses) if losses else 0.0)
        counts.append(len(losses))
    return np.array(means), np.array(counts)


@pytest.mark.parametrize("margin", [0.0, 0.001, MARGIN])
def test_the_loss_is_that_of_a_loop_over_pairs(margin, float64):
    inputs = make_inputs()
    mean_Q, paired_Q = jax.jit(ranking.hinge, static_argnums=4)(*inputs, margin)
    expected_Q, count_Q = brute(*inputs, margin)
    np.testing.assert_allclose(mean_Q, expected_Q, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(paired_Q, count_Q > 0)
    assert not np.any(count_Q[[NO_POSITIVE, NO_NEGATIVE, EMPTY]])
    assert np.sum(count_Q > 0) == QUERIES - 3


def test_the_gradient_is_that_of_central_differences(float64):
    score_QM, *rest = make_inputs()
    cotangent_Q = np.random.default_rng(1).normal(size=QUERIES)

    def ours(score_QM):
        return jnp.vdot(cotangent_Q, ranking.hinge(score_QM, *rest, MARGIN)[0])

    found_QM = jax.jit(jax.grad(ours))(score_QM)
    step, expected_QM = 1e-6, np.zeros_like(score_QM)
    for place in zip(*np.nonzero(rest[-1]), strict=True):
        ends = []
        for sign in (1, -1):
            moved_QM = score_QM.copy()
            moved_QM[place] += sign * step
            ends.append(cotangent_Q @ brute(moved_QM, *rest, MARGIN)[0])
        expected_QM[place] = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(found_QM, expected_QM, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_the_order_has_no_gradient(float64):
    score_QM, closeness_QM, *rest = make_inputs()

    def total(closeness_QM):
        return ranking.hinge(score_QM, closeness_QM, *rest, MARGIN)[0].sum()

    bar_QM = jax.jit(jax.grad(total))(closeness_QM)
    assert not np.any(bar_QM)


def test_neither_the_loss_nor_its_gradient_holds_all_pairs():
    size = 256
    random = np.random.default_rng(0)
    score_QM = random.normal(size=(size, size)).astype(np.float32)
    positive_QM = random.random((size, size)) < 0.1
    visible_QM = np.tri(size, k=-1, dtype=bool)

    def loss(score_QM):
        mean_Q, _ = ranking.hinge(score_QM, score_QM, positive_QM, visible_QM, MARGIN)
        return mean_Q.sum()

    compiled = jax.jit(jax.value_and_grad(loss)).lower(score_QM).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    # A few arrays [Q, M], of which there would be 256 if the pairs were there.
    assert held < 32 * score_QM.nbytes
    chex.assert_tree_all_finite(compiled(score_QM))
