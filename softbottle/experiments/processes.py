"""Runs in processes of their own, one after the other, that can be asked to stop.

A device counts the most memory that a process ever held there and cannot be told to
forget it, and a run that fails must not take the others with it.
"""

import contextlib
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

from softbottle.training import metrics

T = TypeVar("T")
_PATIENCE = 1.0  # seconds between two requests to stop


def leave_devices() -> None:
    """Keep this process, which looks at shapes alone, on the CPU: runs have the rest.

    To be called before jax is used: a process that has a GPU has its memory.
    """
    jax.config.update("jax_platforms", "cpu")


def supervise(
    target: Callable[..., None], arguments: tuple[Any, ...], seconds: float | None
) -> int:
    """Call a function of a module in a new process and wait for its end.

    Args:
        target: what is called.
        arguments: its arguments.
        seconds: after which it is asked to stop, by SIGTERM; None for never.

    Returns:
        The exit status.

    Raises:
        KeyboardInterrupt: on SIGINT, when the run has been asked to stop and has ended.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([target.__module__])
    process = processes.Process(target=target, args=arguments)
    process.start()
    try:
        process.join(None if seconds is None else max(0.0, seconds))
    finally:
        # More than once: while it loads its text or is evaluated it takes no notice.
        while process.is_alive():
            process.terminate()
            process.join(_PATIENCE)
    return process.exitcode or 0


def one_by_one(
    minutes: float | None,
    broken: dict[T, str],
    choose: Callable[[float], T | None],
    do: Callable[[T, float | None], int | None],
) -> None:
    """Do one thing after the other, until none is left, the time is up or a signal.

    Args:
        minutes: how long; None for no limit.
        broken: gets what ended without a result, and how; `choose` leaves it out.
        choose: what is next, if anything, of the seconds that are left.
        do: does it within so many seconds, None for no limit. Returns the status of a
            process that left no result, None where there is one.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with _interruptible(), contextlib.suppress(KeyboardInterrupt):
        while (seconds := deadline - time.monotonic()) > 0:
            chosen = choose(seconds)
            if chosen is None:
                break
            status = do(chosen, None if math.isinf(seconds) else seconds)
            if status in (0, -signal.SIGTERM):
                break  # asked to stop, in the loop or before it could take notice
            if status is not None:
                broken[chosen] = f"ended with status {status}"


def check(broken: Mapping[Any, str]) -> None:
    """Raise UnfinishedError, naming them, if something ended without a result."""
    if broken:
        named = ", ".join(f"{name} {how}" for name, how in broken.items())
        raise metrics.UnfinishedError(f"{named}; the next start tries again.")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is an interrupt, too: the run under way saves, and the program ends."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def attempt(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a run comes to; {"failed": reason} if it loses its loss or lacks memory."""
    try:
        return function()
    except metrics.NonFiniteLossError as error:
        return {"failed": str(error)}
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return {"failed": f"out of memory: {' '.join(str(error).split())[:300]}"}
        raise
