"""Times of functions that are compared."""

import itertools

import pytest

from softbottle.bench import timing


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, 5), (0.002, 17)])
def test_what_is_compared_is_timed_in_turn(monkeypatch, seconds, rounds):
    clock, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def make(name, seconds):
        def function():
            calls.append(name)
            # A clock that gets slower all the time.
            clock[0] += seconds * (1 + clock[0] / 10)

        return function

    functions = [make("a", seconds), make("b", 2 * seconds)]
    first, second = timing.alternately(functions, lambda result: result, 0.5)
    timed = "".join(name for name, _ in itertools.groupby(calls[4:]))
    assert timed == "ab" * rounds
    assert second / first == pytest.approx(2, rel=0.02)
