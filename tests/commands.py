"""The programs of launch/, each in a process of its own on the CPU."""

import os
import subprocess
import sys
from typing import Any, NamedTuple

from tests import ROOT

SECONDS = 300  # after which a program counts as hanging


class Answer(NamedTuple):
    """The exit code, and what was written."""

    code: int
    output: str
    errors: str


def start(script: str, *arguments: Any) -> subprocess.Popen:
    """A program under way: several side by side take little longer than one."""
    return subprocess.Popen(
        [sys.executable, f"launch/{script}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, typed: str = "") -> Answer:
    """What came of it."""
    output, errors = process.communicate(typed, timeout=SECONDS)
    return Answer(process.returncode, output, errors)


def run(script: str, *arguments: Any) -> str:
    """The output of a program that succeeds."""
    answer = finish(start(script, *arguments))
    assert answer.code == 0, answer.errors[-2000:]
    return answer.output
