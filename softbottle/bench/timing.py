"""How long a call takes, in any framework."""

import statistics
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 5
MOST_CALLS = 100


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
    wait(function())
    once = _mean_seconds(function, wait, 1)
    calls = int(seconds / ROUNDS / max(once, 1e-9))
    calls = max(1, min(MOST_CALLS, calls))
    times = [_mean_seconds(function, wait, calls) for _ in range(ROUNDS)]
    return 1e3 * statistics.median(times)


def _mean_seconds(function, wait, calls):
    start = time.perf_counter()
    for _ in range(calls):
        result = function()
    wait(result)
    return (time.perf_counter() - start) / calls
