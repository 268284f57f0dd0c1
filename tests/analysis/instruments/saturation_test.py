"""Anisotropy, singular entropy and outliers."""

import math

import numpy as np
import pytest

from softbottle.analysis import report
from softbottle.analysis.instruments import saturation


def random_states(count=101, width=7, seed=0):
    return np.random.default_rng(seed).standard_normal((count, width))


def test_states_that_point_one_way_have_anisotropy_one():
    one_D = np.array([1.0, -2.0, 0.5])
    states_ND = np.arange(1, 6)[:, None] * one_D
    assert saturation.anisotropy(states_ND) == pytest.approx(1, rel=1e-12)


def test_orthogonal_states_have_anisotropy_zero_and_opposite_ones_less():
    assert saturation.anisotropy(3 * np.eye(5)) == pytest.approx(0, abs=1e-12)
    assert saturation.anisotropy(np.array([[2.0], [-3.0]])) == pytest.approx(-1)


def test_random_states_are_nearly_isotropic():
    assert abs(saturation.anisotropy(random_states(2003, 97))) < 1e-3


def test_anisotropy_is_the_mean_cosine_of_different_states():
    states_ND = 0.7 + random_states(13)
    cosines = [
        (a @ b) / (np.linalg.norm(a) * np.linalg.norm(b))
        for i, a in enumerate(states_ND)
        for j, b in enumerate(states_ND)
        if i != j
    ]
    assert saturation.anisotropy(states_ND) == pytest.approx(np.mean(cosines))


def test_intervals_of_the_anisotropy_cover_the_truth_at_about_their_rate():
    rng = np.random.default_rng(0)
    rows, count, width = 120, 64 * 12, 6
    noise = rng.normal(size=(count, rows, width))
    for at in range(1, count):  # neighbors are alike
        noise[at] = 0.6 * noise[at - 1] + 0.8 * noise[at]
    states = 0.9 * np.eye(width)[0] + noise
    # Two independent states: the squared length of the mean direction.
    fresh = 0.9 * np.eye(width)[0] + rng.normal(size=(400_000, width))
    mean_D = np.mean(fresh / np.linalg.norm(fresh, axis=1, keepdims=True), axis=0)
    ends = [saturation.anisotropy_interval(states[:, row]) for row in range(rows)]
    covered = np.mean([low <= mean_D @ mean_D <= high for low, high in ends])
    # Of 120, 95% are 114 with a deviation of 2.4.
    assert 0.88 < covered < 0.995


def test_the_interval_of_equal_windows_is_the_value_itself():
    once_ND = 0.5 + random_states(64, 5)
    found = saturation.layers([np.tile(once_ND, (20, 1))])
    value = found.anisotropy_L[0]
    # But for pairs within a window, which are one in 20 and lack n of n^2.
    np.testing.assert_allclose(found.interval_L2[0], value, atol=0.01)
    assert found.positions == 20 * 64 and np.isfinite(found.interval_L2).all()
    moved = saturation.anisotropy_interval(7 * np.tile(once_ND, (20, 1)))
    np.testing.assert_allclose(moved, found.interval_L2[0], rtol=1e-9)


@pytest.mark.parametrize(
    "states, why", [(np.eye(1, 3), "got 1"), (np.eye(3, 2), "1 of")]
)
def test_anisotropy_needs_two_states_that_are_not_zero(states, why):
    with pytest.raises(ValueError, match=why):
        saturation.anisotropy(states)


def test_a_flat_spectrum_has_entropy_zero_and_one_direction_has_log_r():
    orthogonal_VE, _ = np.linalg.qr(random_states(29, 5))
    flat = saturation.head(4 * orthogonal_VE)
    np.testing.assert_allclose(flat.sigma, 4)
    assert flat.entropy == pytest.approx(0, abs=1e-12)
    single = saturation.head(np.outer(np.arange(1, 30), np.arange(1, 6)))
    assert single.entropy == pytest.approx(math.log(5), abs=1e-9)


def test_singular_entropy_is_the_divergence_from_a_flat_spectrum():
    found = saturation.head(np.diag([5.0, 3.0, 2.0]))
    expected = sum(p * math.log(3 * p) for p in (0.5, 0.3, 0.2))
    assert found.entropy == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"\(4, 3\) is zero"):
        saturation.head(np.zeros((4, 3)))


def test_kurtosis_of_two_values_a_normal_law_and_a_rare_spike():
    assert saturation.kurtosis(np.array([-1.0, 1.0] * 8)) == pytest.approx(1)
    normal = np.random.default_rng(0).standard_normal(200_000)
    assert saturation.kurtosis(normal) == pytest.approx(3, abs=0.05)
    # One of n: p = 1/n gives (1 - 3p + 3p^2) / (p (1 - p)).
    p = 0.01
    expected = (1 - 3 * p + 3 * p * p) / (p * (1 - p))
    assert saturation.kurtosis(np.eye(1, 100)) == pytest.approx(expected)
    with pytest.raises(ValueError, match="all 4 values are equal"):
        saturation.kurtosis(np.ones(4))


def test_a_large_dimension_is_the_outlier_of_its_layer():
    plain_ND = random_states(211, 17)
    spiked_ND = plain_ND.copy()
    spiked_ND[:, 3] += 60
    found = saturation.layers([plain_ND, spiked_ND])
    assert found.outliers_L.tolist() == [0, 0]
    # A constant one of 17 reaches sqrt(16) deviations; a few entries reach more.
    spiked_ND = plain_ND.copy()
    spiked_ND[:5, 3] += 60
    found = saturation.layers([plain_ND, spiked_ND])
    assert found.outliers_L.tolist() == [0, 1] and found.peak_LD[1].argmax() == 3
    expected = abs(spiked_ND - spiked_ND.mean()).max() / spiked_ND.std()
    assert found.peak_LD[1, 3] == pytest.approx(expected)
    assert found.kurtosis_L[1] > 10 * found.kurtosis_L[0]
    assert found.anisotropy_L[0] == saturation.anisotropy(plain_ND)


def test_layers_of_different_positions_or_with_nan_are_refused():
    with pytest.raises(ValueError, match=r"\(3, 2\), \(4, 2\)"):
        saturation.layers([np.ones((3, 2)), np.ones((4, 2))])
    with pytest.raises(ValueError, match="layer 1 .* 1 entries not finite"):
        saturation.layers([np.eye(2), np.array([[np.nan, 1.0], [1.0, 0.0]])])
    with pytest.raises(ValueError, match=r"the table .* \(3,\)"):
        saturation.head(np.ones(3))


def test_layers_of_different_widths_have_no_peaks_where_they_have_no_dimensions():
    wide, narrow = random_states(53, 7), random_states(53, 3)
    found = saturation.layers([wide, narrow])
    alone = saturation.layers([narrow])
    np.testing.assert_array_equal(found.peak_LD[1, :3], alone.peak_LD[0])
    assert np.isnan(found.peak_LD[1, 3:]).all() and np.isfinite(found.peak_LD[0]).all()
    assert found.anisotropy_L[1] == alone.anisotropy_L[0]


def test_the_section_of_models_names_each(tmp_path):
    layers = saturation.layers([random_states(), random_states(seed=1)])
    low, high = layers.interval_L2[-1]
    assert low < layers.anisotropy_L[-1] < high
    head = saturation.head(random_states(31))
    section = saturation.section({"small": layers, "large": layers}, {"small": head})
    assert "small: in its last layer" in section.reading
    shown = f"{layers.anisotropy_L[-1]:.2f} ({low:.2f} to {high:.2f})"
    assert {row[0]: row[1] for row in section.tables[0].rows}["large"] == shown
    assert shown in section.reading and "bootstrap over" in section.remarks
    assert set(section.numbers) == {"small", "large", "small, head"}
    report.write(tmp_path, "Models", [section])
