"""The limits of attention, against brute force and against their bounds."""

import numpy as np
import pytest

from softbottle.analysis import report
from softbottle.analysis.instruments import attention, normalizers


def make_inputs(rows=6, length=23, dim=5, scale=2.0, seed=0):
    rng = np.random.default_rng(seed)
    logits_RL = scale * rng.normal(size=(rows, length))
    return logits_RL, rng.normal(size=(length, dim)) + rng.normal(size=dim)


def brute_force(weights_L, values_LD, count):
    """(s, the distances outside, the distances inside) of one row."""
    order = np.argsort(-weights_L, kind="stable")
    total = sum(weights_L[i] * values_LD[i] for i in order[:count])
    away = [np.linalg.norm(weights_L[i] * values_LD[i] - total) for i in order]
    return total, np.array(away[count:]), np.array(away[:count])


@pytest.mark.parametrize("name", normalizers.ALL)
@pytest.mark.parametrize("count", [1, 4, 22])
def test_distance_and_separability_are_those_of_brute_force(name, count):
    logits_RL, values_LD = make_inputs()
    weights_RL = normalizers.ALL[name](logits_RL)
    found = attention.selection(weights_RL, values_LD, count)
    for row, weights_L in enumerate(weights_RL):
        total, outside, inside = brute_force(weights_L, values_LD, count)
        np.testing.assert_allclose(found.distance_R[row], outside.sum(), rtol=1e-7)
        summed = weights_L @ values_LD - total - len(outside) * total
        np.testing.assert_allclose(found.summed_R[row], np.linalg.norm(summed))
        share = np.mean(inside <= outside.min() + 1e-12)
        assert found.inside_R[row] == pytest.approx(share)


@pytest.mark.parametrize("seed", range(30))
def test_no_distance_exceeds_the_bound(seed):
    rng = np.random.default_rng(seed)
    length = int(rng.integers(2, 40))
    logits_RL, values_LD = make_inputs(
        50, length, int(rng.integers(1, 9)), rng.exponential(3.0), seed
    )
    name = list(normalizers.ALL)[seed % len(normalizers.ALL)]
    weights_RL = normalizers.ALL[name](logits_RL)
    for count in {1, length // 2 or 1, length - 1}:
        found = attention.selection(weights_RL, values_LD, count)
        assert np.all(found.distance_R <= found.bound_R * (1 + 1e-9) + 1e-9)
        assert np.all(found.summed_R <= found.distance_R * (1 + 1e-9) + 1e-9)


def test_the_bound_is_attained_by_vectors_on_a_line_through_the_origin():
    # One direction, the selected at M and the others at -a: every norm adds up.
    values_LD = np.array([[2.0], [-1.0], [-1.0], [-1.0]])
    weights_RL = np.array([[0.4, 0.2, 0.2, 0.2]])
    found = attention.selection(weights_RL, values_LD, 1)
    np.testing.assert_allclose(found.distance_R, 3 * (0.2 + 0.8))
    np.testing.assert_allclose(found.bound_R, 3 * 0.6 + 2 * (3 * 0.4 - 0.6))
    assert found.distance_R == pytest.approx(found.bound_R[0])


def test_distance_grows_with_the_length_and_falls_as_all_are_selected():
    _, values_LD = make_inputs(length=400)
    peaked_RL = normalizers.softmax(10.0 * np.eye(1, 400))
    lengths = [50, 100, 200, 400]
    distance = [
        attention.selection(
            normalizers.softmax(10.0 * np.eye(1, n)), values_LD[:n], 1
        ).distance_R[0]
        for n in lengths
    ]
    # A weight of almost one on the first token: nearly (L - 1) times its norm.
    expected = (np.array(lengths) - 1) * np.linalg.norm(values_LD[0])
    np.testing.assert_allclose(distance, expected, rtol=0.05)
    near_all = attention.selection(peaked_RL, values_LD, 399)
    assert near_all.distance_R[0] < distance[-1] / 300


def test_weights_of_equal_logits_are_even_and_of_one_token_not():
    _, values_LD = make_inputs(length=301)
    even = attention.selection(np.full((1, 301), 1 / 301), values_LD, 7)
    np.testing.assert_allclose(even.uneven_R, 0, atol=1e-12)
    weights_RL = np.array([[0.5, 0.3, 0.2, 0.0]])
    found = attention.selection(weights_RL, values_LD[:4], 2)
    # (5/8, 3/8) against (1/2, 1/2).
    np.testing.assert_allclose(found.uneven_R, 1 / 8)


@pytest.mark.parametrize("count", [3, 12, 22])
def test_the_separability_bounds_hold_on_average_for_points_of_a_sphere(count):
    rng = np.random.default_rng(0)
    shares, lowers, uppers = [], [], []
    for _ in range(200):
        values_LD = rng.normal(size=(24, 6))
        values_LD /= np.linalg.norm(values_LD, axis=-1, keepdims=True)
        weights_RL = normalizers.softmax(rng.normal(size=(1, 24)))
        found = attention.selection(weights_RL, values_LD, count)
        shares.append(found.inside_R[0])
        lowers.append(found.inside_lower_R[0])
        uppers.append(found.inside_upper_R[0])
    assert np.mean(lowers) <= np.mean(shares) <= np.mean(uppers)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_softmax_weights_of_bounded_logits_obey_the_law_of_one_over_length(
    temperature,
):
    rng = np.random.default_rng(0)
    for length in (2, 31, 997):
        logits_RL = rng.uniform(-1.5, 1.5, size=(20, length))
        weights_RL = normalizers.softmax(logits_RL, temperature)
        least, most = attention.length_law(1.5, [length], temperature)[0]
        assert least <= weights_RL.min() and weights_RL.max() <= most
    # The constants are the best there are: one logit against many of the other sign.
    logits_RL = np.full((1, 10_000), -1.5)
    logits_RL[0, 0] = 1.5
    largest = normalizers.softmax(logits_RL).max()
    assert largest > 0.99 * attention.length_law(1.5, [10_000])[0, 1]


def test_the_jacobian_of_softmax_is_below_one_over_two_t_and_not_one_over_four_t():
    rng = np.random.default_rng(0)
    norms = []
    for scale in np.geomspace(0.1, 30, 60):
        alpha_L = normalizers.softmax(scale * rng.normal(size=7))
        norms.append(np.linalg.norm(np.diag(alpha_L) - np.outer(alpha_L, alpha_L), 2))
    assert 0.25 < max(norms) <= 0.5
    half = np.full(2, 0.5)
    worst = np.linalg.norm(np.diag(half) - np.outer(half, half), 2)
    assert worst == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize("temperature", [0.02, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("step", [1e-3, 0.1, 10.0])
def test_sensitivity_is_below_both_of_its_bounds(temperature, step):
    logits_RL, _ = make_inputs(rows=200, length=2, scale=0.1)
    found_R = attention.sensitivity(logits_RL, temperature, step)
    bound = min(1 / (2 * temperature), np.sqrt(2) / step)
    assert np.all(found_R <= bound * (1 + 1e-9))
    if temperature >= 1 and step < 1:
        # Beyond the line that the paper draws.
        assert found_R.max() > 1.5 / (4 * temperature)


def test_nearly_equal_weights_look_blind_and_peaked_ones_do_not():
    logits_RL, values_LD = make_inputs(rows=60, length=64, scale=1.0)
    counts = [1, 8]
    flat_RL = normalizers.softmax(1e-4 * logits_RL)
    assert attention.critical_count(flat_RL, values_LD, counts) == 1
    peaked_RL = normalizers.softmax(8 * logits_RL)
    assert attention.critical_count(peaked_RL, values_LD, counts) is None


def test_bad_weights_values_and_counts_are_named():
    logits_RL, values_LD = make_inputs()
    weights_RL = normalizers.softmax(logits_RL)
    with pytest.raises(ValueError, match=r"counts must lie in \[1, 23\), got \[23\]"):
        attention.selection(weights_RL, values_LD, 23)
    with pytest.raises(ValueError, match=r"\(6, 23\) and values of \(22, 5\)"):
        attention.selection(weights_RL, values_LD[1:], 2)
    with pytest.raises(ValueError, match="values must be finite"):
        attention.selection(weights_RL, values_LD * np.nan, 2)
    with pytest.raises(ValueError, match="no distribution"):
        attention.selection(2 * weights_RL, values_LD, 2)
    with pytest.raises(ValueError, match="got 0.0 and 1.0"):
        attention.sensitivity(logits_RL, 0.0, 1.0)


def test_all_limits_go_into_one_report(tmp_path):
    logits_RL, values_LD = make_inputs(rows=12, length=37)
    found = attention.limits(logits_RL, values_LD, [1, 3, 9], [0.1, 1.0, 10.0])
    assert set(found.selections) == set(found.critical) == set(normalizers.ALL)
    assert found.lengths_N[-1] == 37
    assert np.all(found.largest_N["softmax"] <= found.law_N2[:, 1])
    section = attention.section(found)
    report.write(tmp_path, "Attention", [section])
    assert (tmp_path / "attention-limits.png").exists()
    assert "blindly" in section.reading
