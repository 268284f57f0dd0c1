"""Words that can never be first, and sets of words that can be on top."""

import itertools

import numpy as np
import pytest

from softbottle.analysis import report
from softbottle.analysis.instruments import argmax

SQUARE = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])


def with_inside_point(point):
    return np.vstack([SQUARE, [point]])


def is_corner(table_VE, word):
    """By brute force in the plane: is some direction's largest product this word's?"""
    angle_N = np.linspace(0, 2 * np.pi, 20_001)
    logits_NV = np.column_stack([np.cos(angle_N), np.sin(angle_N)]) @ table_VE.T
    return word in np.unique(logits_NV.argmax(axis=1))


@pytest.mark.parametrize("point", [(0.2, -0.3), (0.0, 0.0), (0.0, 1.0), (0.9, 0.9)])
def test_a_point_inside_the_hull_is_never_first(point):
    found = argmax.reach(with_inside_point(point))
    assert found.reachable_V.tolist() == [True] * 4 + [False]
    assert found.margin_V[4] <= argmax.MARGIN
    assert found.programs == 1


def test_a_point_outside_is_first_and_may_cover_another():
    found = argmax.reach(with_inside_point((3.0, 3.0)))
    assert found.reachable_V.tolist() == [False, True, True, True, True]


def test_a_bias_brings_an_inside_point_out_and_a_lower_one_does_not():
    table_VE = with_inside_point((0.0, 0.0))
    assert argmax.reach(table_VE, np.array([0, 0, 0, 0, 1.0])).reachable_V.all()
    low = argmax.reach(table_VE, np.array([0, 0, 0, 0, -1.0]))
    assert low.reachable_V.tolist() == [True] * 4 + [False]


def test_a_bias_can_bury_a_corner_in_the_box_and_only_there():
    # |h| <= 100 gives the corner's logit 200 at most above any other's.
    deep_V = np.array([-201.0, 0, 0, 0])
    assert argmax.reach(SQUARE, deep_V).reachable_V.tolist() == [False] + [True] * 3
    assert argmax.reach(SQUARE, deep_V + [2.0, 0, 0, 0]).reachable_V.all()


def test_equal_rows_tie_unless_a_bias_parts_them():
    table_VE = np.vstack([SQUARE, SQUARE[:1]])
    assert np.flatnonzero(~argmax.reach(table_VE).reachable_V).tolist() == [0, 4]
    parted = argmax.reach(table_VE, np.array([0, 0, 0, 0, 0.5]))
    assert np.flatnonzero(~parted.reachable_V).tolist() == [0]


@pytest.mark.parametrize("seed", range(3))
def test_reach_agrees_with_a_sweep_of_all_directions_in_the_plane(seed):
    table_VE = np.random.default_rng(seed).normal(size=(29, 2))
    expected_V = [is_corner(table_VE, word) for word in range(29)]
    assert argmax.reach(table_VE).reachable_V.tolist() == expected_V


def test_the_quick_search_changes_no_verdict_and_saves_programmes(monkeypatch):
    rng = np.random.default_rng(0)
    table_VE, bias_V = rng.normal(size=(97, 4)), rng.normal(size=97)
    quick = argmax.reach(table_VE, bias_V)
    monkeypatch.setattr(argmax, "_REFLECTIONS", 0)
    exact = argmax.reach(table_VE, bias_V)
    np.testing.assert_array_equal(quick.reachable_V, exact.reachable_V)
    assert 0 < np.sum(~quick.reachable_V) <= quick.programs < 97
    assert exact.programs == 97


def test_the_largest_margin_is_the_radius_of_the_largest_ball():
    # Word 4 is first where |h_0| + |h_1| < 1: a ball of radius 1 / sqrt 2.
    table_VE = with_inside_point((0.0, 0.0))
    bias_V = np.array([0, 0, 0, 0, 1.0])
    margin = argmax._largest_margin(table_VE, bias_V, 4)
    assert margin == pytest.approx(np.sqrt(0.5), rel=1e-8)


def test_sets_on_top_are_those_a_sweep_of_the_plane_finds():
    table_VE = np.random.default_rng(4).normal(size=(7, 2))
    angle_N = np.linspace(0, 2 * np.pi, 5_003)
    logits_NV = np.column_stack([np.cos(angle_N), np.sin(angle_N)]) @ table_VE.T
    order_NV = np.argsort(-logits_NV, axis=1)
    for size in (1, 2, 3):
        on_top = {tuple(sorted(row)) for row in order_NV[:, :size].tolist()}
        for words in itertools.combinations(range(7), size):
            margin = argmax.set_margin(table_VE, None, np.array(words))
            assert (margin > argmax.MARGIN) == (words in on_top)


def test_a_bias_can_put_a_set_on_top():
    words = np.array([0, 3])
    assert argmax.set_margin(SQUARE, None, words) <= argmax.MARGIN
    bias_V = np.array([1.0, 0, 0, 1.0])
    # Opposite corners of the square: half the bias is all the gap there can be.
    assert argmax.set_margin(SQUARE, bias_V, words) == pytest.approx(0.5)


def test_small_sets_are_feasible_large_ones_not_and_the_random_bound_is_below():
    rng = np.random.default_rng(0)
    dim, table_VE = 24, rng.normal(size=(101, 24))
    top = argmax.top_sets(table_VE, sizes=[1, 2, 9, 50], trials=5)
    assert top.fraction_N[0] == top.fraction_N[1] == 1
    assert top.fraction_N[-1] == 0 and top.random_N[-1] == 0
    assert np.all(top.fraction_N >= top.random_N - 0.2)
    assert top.random_N[0] > 0.9 and np.all(np.diff(top.random_N) <= 0)
    assert top.dim == dim


def test_bad_heads_and_sizes_are_named():
    with pytest.raises(ValueError, match=r"got shape \(4,\)"):
        argmax.reach(np.ones(4))
    with pytest.raises(ValueError, match=r"bias of shape \(3,\)"):
        argmax.reach(SQUARE, np.zeros(3))
    with pytest.raises(ValueError, match="1 entries"):
        argmax.reach(with_inside_point((np.nan, 0.0)))
    with pytest.raises(ValueError, match=r"\[1, 4\), got \[4\]"):
        argmax.top_sets(SQUARE, sizes=[4], trials=1)
    with pytest.raises(ValueError, match="got .* and 0"):
        argmax.top_sets(SQUARE, sizes=[1], trials=0)
    with pytest.raises(ValueError, match="not all"):
        argmax.set_margin(SQUARE, None, np.arange(4))


def test_some_words_among_all_their_rivals_have_the_verdict_they_have_among_all():
    rng = np.random.default_rng(3)
    table_VE, bias_V = rng.normal(size=(61, 3)), rng.normal(size=61)
    whole = argmax.reach(table_VE, bias_V)
    words = np.array([44, 2, 17, 60, 5])
    some = argmax.reach(table_VE, bias_V, words)
    assert some.words_V.tolist() == sorted(words)
    assert not whole.reachable_V.all()
    np.testing.assert_array_equal(some.reachable_V, whole.reachable_V[some.words_V])
    with pytest.raises(ValueError, match="some of 61"):
        argmax.reach(table_VE, bias_V, np.array([61]))


def test_the_report_counts_the_words_that_are_lost(tmp_path):
    table_VE = with_inside_point((0.1, 0.1))
    section = argmax.section(
        {"square": argmax.reach(table_VE)},
        {"square": argmax.top_sets(table_VE, sizes=[1, 2], trials=3)},
    )
    assert "square: 1 of 5" in section.reading
    assert section.numbers["words"]["square"]["unreachable"].tolist() == [4]
    report.write(tmp_path, "Heads", [section])
    assert (tmp_path / "argmax-top-sets.png").exists()
