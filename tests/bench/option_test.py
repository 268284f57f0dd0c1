"""Losses with something asked of them; command_test.py races one of a mixture."""

import pytest

from softbottle.bench import layer, option, problem, race, worker


@pytest.fixture(autouse=True)
def small(brief, monkeypatch):
    """As many tokens as are checked: what is checked is the program that is timed."""
    case = problem.CASES["tiny"]._replace(tokens=layer.CHECKED)
    monkeypatch.setitem(problem.CASES, "tiny", case)


def race_of(*asked, heads=None, ask=worker.in_process):
    settings = {"asked": asked, "heads": heads, "seconds": 0.01}
    result = race.head(ask, ["tiny"], ["blocked"], [], **settings)
    return {row["variant"]: row for row in result["rows"]}


def test_all_heads_are_asked_for_unless_some_are_named():
    def ask(module, task):
        del module
        facts = {"platform": "cpu", "device": "a", "jax": "b", "tflops": 1.0}
        return task | facts | {"status": "ok", "ms": 1.0}

    rows = race_of("smoothing", ask=ask)
    names = ("plain", "smoothing")
    assert list(rows) == [f"{head}, {n}" for head in option.HEADS for n in names]


@pytest.mark.slow
def test_a_formula_that_is_not_kept_is_not_timed(monkeypatch):
    (_, dense), (smoothed, _) = option.OPTIONS["plain"], option.OPTIONS["smoothing"]
    monkeypatch.setitem(option.OPTIONS, "smoothing", (smoothed, dense))
    rows = race_of("smoothing", heads=["softmax"])
    assert list(rows) == ["softmax, plain", "softmax, smoothing"]
    assert rows["softmax, plain"]["status"] == "ok"
    row = rows["softmax, smoothing"]
    assert row["status"] == "wrong" and "ms" not in row


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no option is called 'smooth'; there are"):
        race_of("smooth")
    with pytest.raises(ValueError, match="no head is called 'moc-7'; there are"):
        race_of("smoothing", heads=["moc-7"])
