"""Which kernels a call consists of, and how long each takes, by a profiler's trace.

A trace slows the host down, so that it comes after the timing and is not part of it.
"""

import collections
import contextlib
import contextvars
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from softbottle.training import profiling

Row = dict[str, Any]
CALLS = 10
_ASKED = contextvars.ContextVar("asked", default=0)


@contextlib.contextmanager
def asked(most: int) -> Iterator[None]:
    """Let `of` trace inside this context, and name so many kernels; 0: it does not."""
    token = _ASKED.set(most)
    try:
        yield
    finally:
        _ASKED.reset(token)


def of(function: Callable[[], Any]) -> Row:
    """The kernels of a call, as entries of its row; none unless they are asked for.

    Args:
        function: compiled already; what it returns is waited for.

    Returns:
        `launches` and `kernel_ms` of a call, all kernels together, and in `kernels`
        [name, times, microseconds] of those that take the longest.
    """
    if not _ASKED.get():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                result = function()
            jax.block_until_ready(result)
        (file,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    return summed(profile, CALLS, _ASKED.get())


def summed(profile: jax.profiler.ProfileData, calls: int, most: int) -> Row:
    """What `of` returns, from the trace of so many calls; a CPU has no kernels."""
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for event in itertools.chain(*profiling.kernels(profile)):
        by_name[event.name].append(event.duration_ns)
    longest = sorted(by_name, key=lambda name: -sum(by_name[name]))
    return {
        "launches": sum(map(len, by_name.values())) / calls,
        "kernel_ms": sum(map(sum, by_name.values())) / calls / 1e6,
        "kernels": [
            [name, len(by_name[name]) / calls, sum(by_name[name]) / calls / 1e3]
            for name in longest[:most]
        ],
    }
