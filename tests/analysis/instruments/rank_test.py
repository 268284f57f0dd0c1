import numpy as np
import pytest

from softbottle.analysis.instruments import rank


def low_rank(rows, columns, width, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((rows, width)) @ random.standard_normal(
        (width, columns)
    )


def test_singular_values_are_those_the_matrix_was_made_of():
    random = np.random.default_rng(0)
    sigma = np.array([5.0, 3.0, 1e-3])
    left, _ = np.linalg.qr(random.standard_normal((13, 3)))
    right, _ = np.linalg.qr(random.standard_normal((7, 3)))
    found = rank.spectrum(left * sigma @ right.T, np.float64)
    np.testing.assert_allclose(found.sigma[:3], sigma, rtol=1e-9)
    assert found.sigma.shape == (7,)
    assert found.rank == 3


@pytest.mark.parametrize("width", [1, 4, 17])
@pytest.mark.parametrize("shape", [(41, 23), (23, 41)])
def test_the_rank_of_a_product_is_its_inner_width(shape, width):
    assert rank.spectrum(low_rank(*shape, width), np.float64).rank == width


def test_entries_in_float32_are_judged_by_the_precision_of_float32():
    matrix = low_rank(53, 31, 6).astype(np.float32)
    assert rank.spectrum(matrix, np.float32).rank == 6
    # The error made before, of rounding taken for rank.
    assert rank.spectrum(matrix, np.float64).rank == 31


@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_the_tolerance_is_that_of_press(precision):
    found = rank.spectrum(3 * np.eye(5, 7), precision)
    eps = {np.float32: 2.0**-23, np.float64: 2.0**-52}[precision]
    expected = 0.5 * np.sqrt(13) * 3 * eps
    assert found.tolerance == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_entries_that_are_not_finite_are_refused_and_counted(bad):
    matrix = np.ones((5, 3))
    matrix[2, 1] = matrix[4, 0] = bad
    with pytest.raises(ValueError, match="2 entries not finite"):
        rank.spectrum(matrix, np.float64)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), ()])
def test_anything_but_a_matrix_is_refused(shape):
    with pytest.raises(ValueError, match="two axes"):
        rank.spectrum(np.ones(shape), np.float64)


@pytest.mark.parametrize("bias, bound", [(False, 6), (True, 7)])
def test_a_generic_softmax_attains_its_bound(bias, bound):
    random = np.random.default_rng(1)
    logits_TV = low_rank(41, 23, 5)
    if bias:
        logits_TV += random.standard_normal(23)
    log_p_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    assert rank.softmax_bound(5, bias) == bound
    assert rank.spectrum(log_p_TV, np.float64).rank == bound
