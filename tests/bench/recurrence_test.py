import pytest

from softbottle.bench import problem, race, recurrence, table, worker
from softbottle.ops.lstm import api as lstm


@pytest.fixture(autouse=True)
def small(brief, monkeypatch):
    stack = problem.Stack("tiny", rows=3, positions=5, widths=(3, 3, 3))
    monkeypatch.setitem(problem.STACKS, "tiny", stack)
    monkeypatch.setattr(race, "UNROLLS", (1,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, worst, names",
    [("float32", 1e-5, ["scan", "wavefront"]), ("bfloat16", 3e-2, ["wavefront"])],
)
def test_both_implementations_agree_with_the_plain_loop(dtype, worst, names):
    result = race.lstm(worker.in_process, [], names, [], dtype=dtype, seconds=0.01)
    for row in result["rows"]:
        assert row["status"] == "ok", row
        assert row["gradient_error"] < worst and row["ms"] > 0
        assert row["flop"] == 3 * problem.STACKS["tiny"].product_flop
    text = table.render(result)
    assert "3-3-3, 3 rows of 5" in text and "wavefront, unroll 1" in text


def test_a_recurrence_that_forgets_its_state_is_refused(monkeypatch):
    whole = lstm.stack

    def forgetful(inputs_SBI, carries, layers, **options):
        layers = [w._replace(recurrent_HG=0.9 * w.recurrent_HG) for w in layers]
        return whole(inputs_SBI, carries, layers, **options)

    monkeypatch.setattr(recurrence.lstm, "stack", forgetful)
    result = race.lstm(worker.in_process, [], ["scan"], [], seconds=0.01)
    (row,) = result["rows"]
    assert row["status"] == "wrong" and "ms" not in row
    assert "error_parameters" in row["reason"]
