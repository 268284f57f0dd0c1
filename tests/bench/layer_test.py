"""Whole heads, from the state to the loss and back."""

import pytest

from softbottle.bench import layer, problem, race, worker

pytestmark = pytest.mark.usefixtures("brief", "quick_keys")


@pytest.mark.slow
def test_a_whole_head_is_checked_and_set_beside_a_softmax(monkeypatch):
    # As many tokens as are checked: what is checked is the program that is timed.
    case = problem.CASES["tiny"]._replace(tokens=layer.CHECKED)
    monkeypatch.setitem(problem.CASES, "tiny", case)

    def ask(module, task):
        """The head itself; of the other rows only who they are."""
        if task["kind"] in ("layer", "device"):
            return worker.in_process(module, task)
        return task | {"status": "ok", "ms": 1.0, "tflops": 1.0}

    how = {"heads": ["mos-1"], "seconds": 0.0}
    rows = race.head(ask, ["tiny"], ["blocked"], [], **how)["rows"]
    names = ["blocked", "blocked, evaluation", "blocked, per token"]
    names += ["bare products", "softmax", "mos-1"]
    assert [row["variant"] for row in rows] == names
    row = rows[-1]
    assert row["status"] == "ok" and row["same_bits"], row
    assert row["checked_tokens"] == layer.CHECKED and row["loss_error"] < 2e-2
    assert row["over"] == {"softmax": row["ms"] / row["beside_ms"]}
