"""How long a call takes, in any framework."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

# Of a function that takes long, and more of one that does not.
LEAST_ROUNDS = 5
# Short, so that a clock that drifts does so between rounds and not between functions.
_ROUND_SECONDS = 0.03
_MOST_CALLS = 100


def milliseconds(
    function: Callable[[], Any], wait: Callable[[Any], Any], seconds: float = 0.5
) -> float:
    """Median over rounds of the mean time of a call, the device included.

    A round has several calls in flight, so that the host's share is hidden where the
    device is the slower of the two.

    Args:
        function: what is timed; compiled already or compiled by its first call.
        wait: blocks until the result of a call is there.
        seconds: about how long all rounds together may take.
    """
    return alternately([function], wait, seconds)[0]


def alternately(
    functions: Sequence[Callable[[], Any]],
    wait: Callable[[Any], Any],
    seconds: float = 0.5,
) -> list[float]:
    """`milliseconds` of functions to be compared: a round of each, then the next round.

    Whatever the clock does meanwhile, it does to all of them.

    Args:
        functions: what is timed.
        wait: as `milliseconds` takes it.
        seconds: about how long the rounds of one function may take.
    """
    calls, longest = [], 0.0
    for function in functions:
        wait(function())
        once = max(_mean_seconds(function, wait, 1), 1e-9)
        count = max(1, min(_MOST_CALLS, int(_ROUND_SECONDS / once)))
        calls.append(count)
        longest = max(longest, count * once)
    pairs = list(zip(functions, calls, strict=True))
    rounds = [
        [_mean_seconds(function, wait, count) for function, count in pairs]
        for _ in range(max(LEAST_ROUNDS, int(seconds / longest)))
    ]
    return [1e3 * statistics.median(times) for times in zip(*rounds, strict=True)]


def _mean_seconds(function, wait, calls):
    start = time.perf_counter()
    for _ in range(calls):
        result = function()
    wait(result)
    return (time.perf_counter() - start) / calls
