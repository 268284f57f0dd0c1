"""Device utilization: the share of some steps' time in which a kernel runs.

    busy = |union of the kernels' intervals| / (end of the last - start of the first)

of a profiler's trace. The rest is time in which the device had nothing to compute: it
waited for input, for Python, or for a transfer that was not hidden behind its work.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax

# Steps of a process before its trace: compilation and the first transfers are in them.
WARM_UP = 20


class Trace:
    """A trace of `steps` steps, a few after a process has begun; of none if 0.

    Args:
        folder: where the trace goes, for TensorBoard or Perfetto.
        begun: the step the process goes on from.
        steps: how many are traced.
        say: takes the line that sums it up.
    """

    def __init__(
        self, folder: pathlib.Path, begun: int, steps: int, say: Callable[[str], None]
    ):
        self._folder, self._say = folder, say
        self._first, self._last = begun + WARM_UP, begun + WARM_UP + steps
        self._tracing, self._at = False, begun

    def after(self, step: int, measured: Any) -> None:
        """Begin or end the trace if it is time, when all work up to now is done."""
        self._at = step
        if step == self._first != self._last:
            jax.block_until_ready(measured)
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        elif step == self._last and self._tracing:
            jax.block_until_ready(measured)
            self.close()

    def close(self) -> None:
        """End the trace, if it is under way, and say what there is of it."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            self._say(self._sum_up())
        elif self._at < self._first != self._last:
            self._say(
                f"nothing was traced: that begins at step {self._first}, {WARM_UP} "
                f"after the start, and this ended at step {self._at}."
            )

    def _sum_up(self):
        file = max(
            self._folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime
        )
        shares = busy_shares(jax.profiler.ProfileData.from_file(str(file)))
        percentages = ", ".join(f"{100 * share:.1f}%" for share in shares)
        summary = (
            f"a device computed for {percentages} of the time"
            if shares
            else "no accelerator is in it"
        )
        return f"traced {self._at - self._first} steps to {self._folder}: {summary}"


def busy_shares(profile: jax.profiler.ProfileData) -> list[float]:
    """For each accelerator, the share of its trace in which some kernel ran."""
    shares = []
    for events in kernels(profile):
        spans = [(each.start_ns, each.start_ns + each.duration_ns) for each in events]
        shares.append(union(spans) / (max(b for _, b in spans) - min(spans)[0]))
    return shares


def kernels(profile: jax.profiler.ProfileData) -> list[list[Any]]:
    """For each accelerator that did something, its events but for copies."""
    by_device = [
        [
            event
            for line in plane.lines
            # A GPU's streams, a TPU's operations; other lines sum these up.
            if line.name.startswith(("Stream", "XLA Ops"))
            for event in line.events
            if not event.name.startswith(("MemcpyH2D", "MemcpyD2H"))
        ]
        for plane in profile.planes
        if plane.name.startswith("/device:")
    ]
    return [events for events in by_device if events]


def union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of some intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
