"""Turning points of the curves of a training."""

import numpy as np
import pytest

from softbottle.analysis import report
from softbottle.analysis.instruments import saturation, turns
from softbottle.training import loop
from tests import pictures
from tests.analysis.instruments.saturation_test import random_states


def planted(step_M, turn, noise=0.0, seed=0, rise=0.5):
    """A power law that turns at a step, and noise."""
    fall_M = 2.5 + 20 * (1.0 + step_M) ** -0.35
    rise_M = rise * np.maximum(np.log((1 + step_M) / (1 + turn)), 0)
    random = np.random.default_rng(seed)
    return fall_M + rise_M + noise * random.standard_normal(len(step_M))


STEP_M = np.linspace(0, 143_000, 73)


@pytest.mark.parametrize("turn", [40_000, 61_234, 90_000])
def test_a_planted_turn_is_found_within_its_uncertainty(turn):
    inside = 0
    for seed in range(10):
        found = turns.turn(STEP_M, planted(STEP_M, turn, 0.01, seed), seed)
        low, high = found.interval
        assert found.turned and low <= found.step <= high < low + 0.4 * turn
        inside += low <= turn <= high
    assert inside >= 8


@pytest.mark.parametrize("turn", [60_000, 90_000])
def test_the_steps_of_a_long_run_s_series_tell_where_it_turns(turn):
    steps = [step for step in range(1, 143_001) if loop.in_series(step, 1000)]
    step_M = np.array(steps, float)
    found = [
        turns.turn(step_M, planted(step_M, turn, 0.03, seed), seed)
        for seed in range(20)
    ]
    near = [abs(at.step - turn) < 0.2 * turn for at in found if at.turned]
    assert sum(near) == 20
    # Powers of two alone have three points after it, and tell nothing.
    step_M = 2.0 ** np.arange(18)
    found = [
        turns.turn(step_M, planted(step_M, turn, 0.03, seed), seed)
        for seed in range(20)
    ]
    assert sum(at.turned and abs(at.step - turn) < 0.2 * turn for at in found) < 5


def test_without_noise_the_turn_is_nearly_exact():
    found = turns.turn(STEP_M, planted(STEP_M, 61_234))
    assert found.step == pytest.approx(61_234, rel=0.03)


def test_more_noise_is_more_uncertainty():
    widths = [
        np.ptp(turns.turn(STEP_M, planted(STEP_M, 61_234, noise)).interval)
        for noise in (0.003, 0.03)
    ]
    assert widths[1] > 3 * widths[0]


def test_a_curve_that_falls_to_its_end_does_not_turn():
    found = turns.turn(STEP_M, planted(STEP_M, 0, rise=0))
    assert not found.turned and found.step == STEP_M[-1]


def test_a_rise_that_quickens_is_no_turn():
    rise_M = np.maximum(STEP_M - 90_000, 0) / 1e5 + STEP_M / 1e6
    noise_M = 0.02 * np.random.default_rng(0).standard_normal(len(STEP_M))
    assert not turns.turn(STEP_M, rise_M + noise_M).turned


def test_the_lag_is_the_difference_of_two_turns():
    early, late = (
        turns.turn(STEP_M, planted(STEP_M, at, 0.005, at), at)
        for at in (45_000, 80_000)
    )
    steps, (low, high) = turns.lag(late, early)
    assert steps == late.step - early.step and low <= 35_000 <= high
    assert turns.lag(early, late)[0] == -steps


def test_curves_that_are_short_or_unordered_are_refused():
    with pytest.raises(ValueError, match=r"9 points or more.*\(4,\)"):
        turns.turn(np.arange(4), np.arange(4))
    with pytest.raises(ValueError, match="steps must rise"):
        turns.turn(np.arange(10)[::-1], np.arange(10))
    with pytest.raises(ValueError, match="nan"):
        turns.turn(np.arange(10), np.full(10, np.nan))


def make_checkpoints():
    """Head and states collapse from step 600 on, the loss rises from 800 on."""
    loss_M = planted(np.arange(0, 1600, 40.0), 800, rise=1.5)
    for step, loss in zip(range(0, 1600, 40), loss_M, strict=True):
        shape = 1 + 0.3 * abs(step - 600) / 600
        table_VE = np.diag([shape, 1.0, 1.0])
        drift = np.array([abs(step - 600) / 300, 0, 0])
        balanced_ND = np.concatenate([random_states(53, 3), -random_states(53, 3)])
        yield step, table_VE, balanced_ND + drift, loss


def test_curves_measure_each_checkpoint_and_their_section_tells_the_order(
    tmp_path, monkeypatch
):
    found = turns.measure(make_checkpoints())
    step, table_VE, states_ND, loss = list(make_checkpoints())[7]
    assert (found.step_M[7], found.loss_M[7]) == (step, loss)
    assert found.entropy_M[7] == saturation.head(table_VE).entropy
    assert found.anisotropy_M[7] == saturation.anisotropy(states_ND)
    deviation_ND = abs(states_ND - states_ND.mean()) / states_ND.std()
    assert found.outliers_M[7] == (deviation_ND.max(axis=0) > 6).sum()
    for matrix, field in ((states_ND, "states_rank_M"), (table_VE, "table_rank_M")):
        share = np.cumsum(np.linalg.svd(matrix)[1] ** 2) / np.square(matrix).sum()
        assert getattr(found, field)[7] == 1 + np.argmax(share >= 0.999)
    short = turns.Curves(*(one[:4] for one in found))
    section = turns.section({"long": found, "short": short})
    assert "long: the loss" in section.reading
    assert "the singular entropy is lowest at step 6" in section.reading
    assert "short: 4 checkpoints are too few" in section.reading
    lags = section.numbers["long"]["lags"]
    assert set(lags) == {"loss after singular entropy", "loss after anisotropy"}
    assert all(100 < steps < 300 for steps, _ in lags.values())
    assert section.numbers["short"]["lags"] == {}
    assert len(section.figures) == 6 and len(section.verdicts) == 1
    assert "as its singular entropy and anisotropy do" in section.verdicts["long"]
    pictures.lay_out_only(monkeypatch)
    report.write(tmp_path, "Runs", [section])


def test_outliers_and_ranks_of_a_state_that_collapses():
    """One dimension grows until it is an outlier and nearly all that there is."""
    states_ND = random_states(400, 64)
    points = []
    for step, size in enumerate((0, 10, 500)):
        moved_ND = states_ND.copy()
        moved_ND[:, 3] += size
        points.append((step, states_ND[:20], moved_ND, 3.0))
    found = turns.measure(points)
    assert found.outliers_M.tolist() == [0, 1, 1]
    assert found.states_rank_M[0] > 60 and found.states_rank_M[2] == 1
    assert found.table_rank_M[0] == found.table_rank_M[2] > 15
    section = turns.section({"a": found})
    (_, points) = section.tables
    assert [row[1] for row in points.rows] == ["0", "1", "2"]
    assert [row[5] for row in points.rows] == ["0", "1", "1"]
