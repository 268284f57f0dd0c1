import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.backbones import dropout

KEY = jax.random.key(3)


@pytest.mark.parametrize("rate", [0.1, 0.4, 0.65])
def test_a_mask_holds_zeros_at_its_rate_and_has_mean_one(rate):
    mask = np.asarray(dropout.elements(KEY, rate, 211, 223))
    np.testing.assert_allclose(np.unique(mask), [0, 1 / (1 - rate)], rtol=1e-6)
    sigma = np.sqrt(rate * (1 - rate) / mask.size)
    assert abs(np.mean(mask == 0) - rate) < 5 * sigma
    assert abs(np.mean(mask) - 1) < 5 * sigma / (1 - rate)


def test_a_locked_mask_is_drawn_for_every_row_and_unit_and_for_no_position():
    mask_B1D = np.asarray(dropout.locked(KEY, 0.5, 7, 401))
    assert mask_B1D.shape == (7, 1, 401)
    shared_BB = np.corrcoef(mask_B1D[:, 0])
    np.fill_diagonal(shared_BB, 0)
    assert np.max(np.abs(shared_BB)) < 5 / np.sqrt(401)


def test_a_table_mask_drops_whole_rows():
    mask_V1 = dropout.table_rows(KEY, 0.1, 997)
    dropped_VE = np.asarray(jnp.ones((997, 3)) * mask_V1)
    assert np.all(np.ptp(dropped_VE, axis=1) == 0)
    assert 60 < np.sum(dropped_VE[:, 0] == 0) < 140


def test_a_mask_is_a_function_of_its_key():
    first = dropout.elements(KEY, 0.5, 5, 7)
    chex.assert_trees_all_equal(first, dropout.elements(KEY, 0.5, 5, 7))
    other = dropout.elements(jax.random.key(4), 0.5, 5, 7)
    assert np.any(np.asarray(first) != np.asarray(other))


def test_rate_zero_is_no_mask():
    assert dropout.elements(KEY, 0.0, 5, 7) is None
    assert dropout.locked(KEY, 0.0, 5, 7) is None
    assert dropout.table_rows(KEY, 0.0, 5) is None
    values = jnp.ones((5, 7), jnp.bfloat16)
    assert dropout.masked(values, None) is values
    mask = dropout.elements(KEY, 0.5, 5, 7)
    assert dropout.masked(values, mask).dtype == jnp.bfloat16
