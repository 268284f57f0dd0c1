"""Softmax and its sparse and scaled relatives, against independent oracles."""

import numpy as np
import pytest
from scipy import optimize

from softbottle.analysis.instruments import normalizers


def make_logits(rows=5, length=17, scale=2.0, seed=0):
    return scale * np.random.default_rng(seed).normal(size=(rows, length))


def entmax_by_root(logits_L, alpha):
    """One row, by a root finder on the sum of the weights."""
    scaled_L = (alpha - 1) * logits_L

    def weights(tau):
        return np.maximum(scaled_L - tau, 0) ** (1 / (alpha - 1))

    tau = optimize.brentq(
        lambda tau: weights(tau).sum() - 1,
        scaled_L.max() - 1,
        scaled_L.max(),
        xtol=1e-15,
    )
    return weights(tau)


@pytest.mark.parametrize("name", normalizers.ALL)
def test_weights_are_distributions_in_the_order_of_the_logits(name):
    logits_RL = make_logits()
    weights_RL = normalizers.ALL[name](logits_RL)
    assert weights_RL.min() >= 0
    np.testing.assert_allclose(weights_RL.sum(axis=-1), 1, rtol=1e-12)
    sorted_RL = np.take_along_axis(weights_RL, np.argsort(logits_RL), axis=-1)
    assert np.all(np.diff(sorted_RL) >= -1e-15)


def test_sparsemax_is_the_nearest_distribution():
    logits_RL = make_logits(scale=0.7)
    for logits_L, weights_L in zip(
        logits_RL, normalizers.sparsemax(logits_RL), strict=True
    ):
        # Optimal if and only if no distribution's corner is nearer in first order.
        gradient_L = weights_L - logits_L
        assert gradient_L.min() >= gradient_L @ weights_L - 1e-12


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
def test_entmax_is_what_a_root_finder_gives(alpha, scale):
    logits_RL = make_logits(scale=scale)
    expected_RL = [entmax_by_root(logits_L, alpha) for logits_L in logits_RL]
    found_RL = normalizers.entmax(logits_RL, alpha)
    np.testing.assert_allclose(found_RL, expected_RL, atol=1e-10)


def test_entmax_joins_sparsemax_and_softmax():
    logits_RL = make_logits()
    np.testing.assert_allclose(
        normalizers.entmax(logits_RL, 2.0), normalizers.sparsemax(logits_RL), atol=1e-12
    )
    np.testing.assert_allclose(
        normalizers.entmax(logits_RL, 1.0001), normalizers.softmax(logits_RL), atol=1e-3
    )


def test_scalable_softmax_keeps_a_token_that_softmax_lets_fade():
    def largest(apply, length):
        return apply(np.eye(1, length) * 2.0).max()

    softmax = [largest(normalizers.softmax, n) for n in (10, 1000)]
    scalable = [largest(normalizers.scalable_softmax, n) for n in (10, 1000)]
    assert softmax[0] > 20 * softmax[1]
    # L^2 / (L^2 + L - 1), by hand.
    expected = [100 / 109, 1e6 / (1e6 + 999)]
    np.testing.assert_allclose(scalable, expected, rtol=1e-12)


@pytest.mark.parametrize("count", [1, 3, 17, 40])
def test_top_k_is_softmax_over_the_largest_logits(count):
    logits_RL = make_logits()
    found_RL = normalizers.top_k(logits_RL, count)
    for logits_L, weights_L in zip(logits_RL, found_RL, strict=True):
        lowest = sorted(logits_L)[-min(count, 17)]
        expected_L = [np.exp(z) if z >= lowest else 0.0 for z in logits_L]
        np.testing.assert_allclose(weights_L, expected_L / np.sum(expected_L))
    if count >= 17:
        np.testing.assert_allclose(found_RL, normalizers.softmax(logits_RL))


def test_top_k_keeps_k_of_equal_logits_and_a_weight_that_length_does_not_lower():
    weights_RL = normalizers.top_k(np.zeros((2, 19)), 4)
    np.testing.assert_array_equal(weights_RL, np.tile([0.25] * 4 + [0] * 15, (2, 1)))
    for length in (10, 1000):
        noise_RL = 0.1 * make_logits(length=length)
        assert normalizers.top_k(noise_RL, 4).max(axis=-1).min() >= 0.25
    assert normalizers.softmax(noise_RL).max() < 0.01
    with pytest.raises(ValueError, match="k must be positive, got 0"):
        normalizers.top_k(np.ones((1, 2)), 0)


@pytest.mark.parametrize("name", normalizers.ALL)
def test_bad_logits_are_named(name):
    with pytest.raises(ValueError, match=r"shape \(1, 2\) with 1 entries"):
        normalizers.ALL[name](np.array([[0.0, np.nan]]))


def test_alpha_of_one_is_refused():
    with pytest.raises(ValueError, match=r"alpha must be > 1, got 1"):
        normalizers.entmax(np.ones((1, 2)), 1)
