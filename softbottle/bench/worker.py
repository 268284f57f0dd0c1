"""Child processes that measure: one task in, one row out.

jax and torch each want the GPU's memory for themselves, and a kernel that faults takes
its process along. So a suite is a list of tasks for modules with a `run_task`,
which a child process serves one after the other. A child that fails, dies or hangs
costs its row alone and is replaced.
"""

import contextlib
import importlib
import json
import os
import pathlib
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
Ask = Callable[[str, Row], Row]


@contextlib.contextmanager
def children(limit_s: float) -> Iterator[Ask]:
    """`ask(module, task)`: the task with its row, measured by a child.

    There is one child at a time, of the module that was asked last.

    Args:
        limit_s: how long a task may take before its child is ended.
    """
    current: dict[str, _Child] = {}

    def close():
        while current:
            current.popitem()[1].close()

    def ask(module, task):
        if module not in current:
            close()
            current[module] = _Child(module, errors)
        start = time.perf_counter()
        row = current[module].ask(task, limit_s)
        # A fault may have left the device or its memory in any state.
        if row["status"] == "failed":
            close()
        return task | row | {"task_seconds": time.perf_counter() - start}

    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            yield ask
        finally:
            close()


def in_process(module: str, task: Row) -> Row:
    """The task with its row, measured here."""
    return task | guarded(importlib.import_module(module).run_task, task)


def guarded(run_task: Callable[[Row], Row], task: Row) -> Row:
    """The task's row; an exception becomes its reason."""
    try:
        return {"status": "ok"} | run_task(task)
    except Exception as error:
        # Some libraries color what they say.
        text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
        if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
            return {"status": "failed", "reason": f"out of memory: {text[:200]}"}
        return {"status": "failed", "reason": f"{type(error).__name__}: {text[:300]}"}


class _Child:
    """A process that answers tasks, line by line."""

    def __init__(self, module, errors):
        self._errors = errors
        root = str(pathlib.Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environment = {
            "PYTHONPATH": path,
            # Memory is measured, so it is taken as it is needed.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "softbottle.bench.worker", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | environment,
            text=True,
        )

    def ask(self, task, limit_s):
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
            line = self._process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line is None:
            self._process.kill()
            return {"status": "failed", "reason": f"no answer within {limit_s:.0f} s"}
        if not line:
            return {"status": "failed", "reason": self._last_words()}
        return json.loads(line)

    def close(self):
        """End the process, gently if it is idle."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _last_words(self):
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"the child ended with code {code}: {' | '.join(lines[-2:])[:300]}"


def _serve(module):
    """Answer each line of stdin on the stdout that the child was given."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # What libraries print must not be taken for an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.suppress(KeyboardInterrupt):
        run_task = None
        for line in sys.stdin:
            run_task = run_task or importlib.import_module(module).run_task
            answers.write(json.dumps(guarded(run_task, json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
