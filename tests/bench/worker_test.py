import pytest

from softbottle.bench import worker


@pytest.mark.slow
def test_a_child_that_fails_dies_or_hangs_costs_its_row_alone():
    with worker.children(limit_s=60) as ask:
        first = ask("tests.bench.faulty", {"do": "well", "variant": "a"})
        again = ask("tests.bench.faulty", {"do": "well"})
        died = ask("tests.bench.faulty", {"do": "die"})
        after = ask("tests.bench.faulty", {"do": "well"})
    assert first["status"] == "ok" and first["variant"] == "a"
    assert first["task_seconds"] > 0
    assert again["pid"] == first["pid"], "a child serves more than one task"
    assert died["status"] == "failed"
    assert "code 7" in died["reason"] and "illegal address" in died["reason"]
    assert after["status"] == "ok" and after["pid"] != first["pid"]
    with worker.children(limit_s=0.5) as ask:
        hung = ask("tests.bench.faulty", {"do": "hang"})
    assert hung["status"] == "failed" and "no answer within" in hung["reason"]


def test_an_exception_becomes_a_row_that_says_why():
    row = worker.in_process("tests.bench.faulty", {"do": "raise", "variant": "a"})
    assert row["variant"] == "a" and row["status"] == "failed"
    assert row["reason"].startswith("out of memory")
    row = worker.in_process("tests.bench.faulty", {})
    assert row["reason"] == "KeyError: 'do'"


def test_the_reason_in_a_row_is_plain_text():
    def fail(task):
        raise RuntimeError("\x1b[91m\x1b[1merror:\x1b[0m no\n  kernel [16]")

    reason = worker.guarded(fail, {})["reason"]
    assert reason == "RuntimeError: error: no kernel [16]"
