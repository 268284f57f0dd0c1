"""Signals that ask a run to save and exit."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def watch() -> Iterator[Callable[[int], bool]]:
    """Give a function of the step that says whether to save and exit after it.

    SIGTERM and SIGINT ask for it; a second SIGINT ends the process at once, without
    saving. In a job of several processes all of them stop at the same step, whichever
    was asked. Signals are only seen in the main thread.
    """
    asked = threading.Event()

    def interrupt(*_):
        if asked.is_set():
            _say("left at once; the last complete checkpoint is intact")
            os._exit(128 + signal.SIGINT)
        asked.set()
        _say("saving; interrupt again to leave at once")
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    if jax.process_count() > 1:
        # SIGTERM is jax's own, which agrees on a step with the other processes.
        handlers = {signal.SIGINT: interrupt}
        has_to_stop = multihost_utils.reached_preemption_sync_point
    else:
        handlers = {signal.SIGINT: interrupt, signal.SIGTERM: lambda *_: asked.set()}

        def has_to_stop(step):
            return asked.is_set()

    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    before = {number: signal.signal(number, new) for number, new in handlers.items()}
    try:
        yield has_to_stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(line):
    # Not through the progress bar, which the signal may have interrupted.
    print(f"\n{line}", file=sys.stderr, flush=True)
