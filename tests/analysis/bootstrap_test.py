"""Intervals over windows: on data whose truth is known, and on short texts."""

import numpy as np
import pytest

from softbottle.analysis import bootstrap


def test_windows_are_whole_and_the_rest_belongs_to_the_last():
    window_N = bootstrap.windows(64 * 16 + 5)
    assert np.bincount(window_N).tolist() == [64] * 15 + [69]
    assert np.bincount(bootstrap.windows(100)).tolist() == [6] * 15 + [10]
    assert bootstrap.windows(3).tolist() == [0, 1, 2]


def test_sums_are_over_the_positions_of_each_window():
    values_N2 = np.arange(74.0).reshape(37, 2)
    window_N = bootstrap.windows(37)
    expected = [values_N2[window_N == w].sum(axis=0) for w in range(window_N[-1] + 1)]
    np.testing.assert_allclose(bootstrap.sums(values_N2, window_N), expected)


def test_the_interval_of_a_mean_is_about_student_s():
    values_N = np.random.default_rng(0).normal(size=64 * 30)
    low, high = bootstrap.of_mean(values_N)
    means_W = values_N.reshape(30, 64).mean(axis=1)
    reach = 2.045 * means_W.std(ddof=1) / np.sqrt(30)
    assert high - means_W.mean() == pytest.approx(reach, rel=0.1)
    assert means_W.mean() - low == pytest.approx(reach, rel=0.1)
    # Several numbers at once are each what it is alone.
    both_N2 = np.stack([values_N, 3 * values_N + 1], axis=1)
    lows, highs = bootstrap.of_mean(both_N2)
    np.testing.assert_allclose(lows, [low, 3 * low + 1])
    np.testing.assert_allclose(highs, [high, 3 * high + 1])


def correlated(rng, rows, count):
    """Rows of an autoregression of deviation 1 about 3."""
    noise = rng.normal(size=(count, rows))
    state, steps = noise[0], [noise[0]]
    for step in noise[1:]:
        state = 0.7 * state + np.sqrt(1 - 0.49) * step
        steps.append(state)
    return 3 + np.stack(steps, axis=1)


@pytest.mark.parametrize("count", [64 * 4, 64 * 24])
def test_intervals_cover_the_truth_at_about_their_rate(count):
    rows = correlated(np.random.default_rng(1), 300, count)
    covered = 0
    for values_N in rows:
        low, high = bootstrap.of_mean(values_N)
        covered += low <= 3 <= high
    # Of 300, 95% are 285 with a deviation of 3.8.
    assert 0.91 < covered / 300 < 0.985
    # Positions taken for independent would cover far less.
    naive = 1.96 * rows.std(axis=1) / np.sqrt(count)
    assert np.mean(abs(rows.mean(axis=1) - 3) < naive) < 0.8


def test_draws_are_the_same_twice_and_bounds_hold():
    values_N = np.random.default_rng(0).integers(0, 2, 640).astype(float)
    values_N[:600] = 1
    first, second = (bootstrap.of_mean(values_N, (0, 1)) for _ in range(2))
    assert first == second and first.high == 1 and first.low < values_N.mean()


def test_one_window_has_no_interval():
    def mean(weight_BW):
        return weight_BW @ np.ones((1, 2))

    low, high = bootstrap.interval(mean, 1)
    assert np.isnan(low).all() and np.isnan(high).all() and low.shape == (2,)
    assert bootstrap.Estimate(0.5, np.nan, np.nan).text(".1%") == "50.0%"
    assert bootstrap.Estimate(0.5, 0.25, 0.75).text() == "0.500 (0.250 to 0.750)"
    assert "too short" in bootstrap.described(1)
    assert bootstrap.described(64 * 16, 64 * 16, 32 * 16) == (
        "Intervals hold 95%: a bootstrap over 16 windows of 32 or 64 positions."
    )
    assert "over 2 or 5 stretches." in bootstrap.over([5, 2, 5, 1], "stretches")
