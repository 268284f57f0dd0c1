import pytest

from softbottle import config as configs
from softbottle.bench import objective, table

MILLISECONDS = {"plain": 4.0, "trime": 5.0, "histalign": 7.0}


def answers(failing=None):
    """Canned rows, so that the arithmetic on them can be seen."""

    def ask(module, task):
        del module
        if task["kind"] == "device":
            return {"status": "ok", "platform": "cpu", "device": "a", "jax": "b"}
        assert task["config"]["cache"]["objective"] == task["variant"]
        assert (task["vocab"], task["length"], task["kind"]) == (13, 5, "step")
        if task["variant"] == failing:
            return task | {"status": "failed", "reason": "out of memory"}
        facts = {"status": "ok", "ms": MILLISECONDS[task["variant"]]}
        return task | facts | {"peak_bytes": 2**30}

    return ask


def test_every_objective_is_timed_and_compared_with_plain_training():
    result = objective.run(answers(), configs.Config(), 13, 5)
    rows = {row["variant"]: row for row in result["rows"]}
    assert list(rows) == list(configs.OBJECTIVES)
    assert "over" not in rows["plain"]
    assert rows["trime"]["over"] == {"plain": pytest.approx(1.25)}
    assert rows["histalign"]["over"] == {"plain": pytest.approx(1.75)}
    text = table.render(result)
    assert "32 rows of 5, V=13" in text and "GiB" in text and "/ plain" in text


def test_an_objective_that_fails_costs_its_own_row_alone():
    result = objective.run(answers("trime"), configs.Config(), 13, 5)
    rows = {row["variant"]: row for row in result["rows"]}
    assert "over" not in rows["trime"] and "over" in rows["histalign"]
    assert "out of memory" in table.render(result)
