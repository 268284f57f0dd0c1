"""A job of several processes: how one joins it, waits for the others, and exits."""

import os
import sys
import traceback
from typing import NoReturn

import jax
from jax.experimental import multihost_utils

# Exit statuses. BROKEN: another process has died, and the job should be started again.
# FAILED: an error of this process's own, which would come again.
BROKEN, FAILED = 70, 1


def initialize(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    heartbeat_seconds: int,
) -> None:
    """Join a job; jax finds out by itself what is None.

    A process that dies is detected after `heartbeat_seconds` without a heartbeat, if
    not at once, and the others are stopped; tests/training/distributed_test.py allows
    three times that.
    """
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        heartbeat_timeout_seconds=heartbeat_seconds,
    )


def barrier(name: str) -> None:
    """Return when every process of the job is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def exit_process(error: BaseException) -> NoReturn:
    """End this process at once, so that those that wait for it find out."""
    traceback.print_exception(error)
    who = f"process {jax.process_index()} of {jax.process_count()}"
    status = BROKEN if _is_of_the_runtime(error) else FAILED
    if status == BROKEN:
        message = (
            f"{who} cannot go on: its device failed (see above), or a process that it "
            "works with has died. Start the job again with the same --workdir: it "
            "resumes from the last complete checkpoint."
        )
    else:
        message = f"{who} failed (see above). The last complete checkpoint is intact."
    print(message, file=sys.stderr, flush=True)
    # An orderly exit would wait for the others, who wait for this one.
    os._exit(status)


def _is_of_the_runtime(error):
    """Whether an error, or its cause, is what jax raises when a process is lost."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False
