"""The validation curve of a run."""

import json

import pytest

from softbottle.analysis import curves


def make_lines():
    return [
        {"step": 0, "start": {}},
        {"step": 5, "loss": 4.0, "epoch": 0},
        {"step": 7, "epoch": 1, "valid_perplexity": 90.0, "averaging": False},
        {"step": 14, "epoch": 2, "valid_perplexity": 70.0, "averaging": False},
        {"step": 21, "epoch": 3, "valid_perplexity": 61.5, "averaging": True},
    ]


def test_the_curve_has_a_line_before_and_one_after_averaging():
    (axes,) = curves.draw(make_lines(), "a run").axes
    before, after = axes.lines
    assert list(before.get_xdata()) == [1, 2] and list(before.get_ydata()) == [90, 70]
    assert list(after.get_xdata()) == [3] and list(after.get_ydata()) == [61.5]
    names = {text.get_text() for text in axes.texts}
    assert names == {"weights: 70.00", "averaged weights: 61.50"}


def test_validations_within_an_epoch_lie_side_by_side():
    lines = [line | {"epoch": 0} for line in make_lines()]
    (axes,) = curves.draw(lines, "a run").axes
    places = [place for line in axes.lines for place in line.get_xdata()]
    assert places == [7, 14, 21] and axes.get_xlabel() == "step"


def test_runs_are_compared_by_the_tokens_they_have_seen():
    lines = make_lines()
    lines[0]["start"] = {"config": {"data": {"rows": 4, "length": 250_000}}}
    (axes,) = curves.compare({"one": lines, "two": lines[:-1]}).axes
    first, second = axes.lines
    assert list(first.get_xdata()) == [7, 14, 21]
    assert list(second.get_ydata()) == [90, 70]
    assert {text.get_text() for text in axes.texts} == {"one: 61.50", "two: 70.00"}


def test_a_run_without_validation_has_no_curve():
    with pytest.raises(ValueError, match="no validation"):
        curves.draw(make_lines()[:2], "a run")


def test_the_curve_is_written_beside_the_metrics(tmp_path):
    text = "".join(json.dumps(line) + "\n" for line in make_lines())
    (tmp_path / "metrics.jsonl").write_text(text)
    curves.write(tmp_path, "a run")
    assert (tmp_path / "valid.png").read_bytes().startswith(b"\x89PNG")
