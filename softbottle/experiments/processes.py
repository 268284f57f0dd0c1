"""Runs in processes of their own, one after the other, that can be asked to stop.

A device counts the most memory that a process ever held there and cannot be told to
forget it, and a run that fails must not take the others with it.
"""

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax

from softbottle.training import metrics

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


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
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
