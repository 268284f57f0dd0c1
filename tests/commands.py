"""The commands, each in a process of its own on the CPU.

To start Python and import what a program needs takes seconds. So a program is forked
from a server that has imported it all and has touched no device; `start_fresh` starts
an interpreter instead, as users do.
"""

import atexit
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from absl.testing import flagsaver

from tests import ROOT

SECONDS = 300  # after which a program counts as hanging

_FORKS = multiprocessing.get_context("forkserver")
# What commands import, and what their pictures are drawn with. Not the commands
# themselves, whose flags belong to a process.
_FORKS.set_forkserver_preload(
    [
        *("pytest", "tests.commands", "matplotlib.backends.backend_agg"),
        *("softbottle.cli.configs", "softbottle.cli.program"),
        *("softbottle.bench.race", "softbottle.bench.plan", "softbottle.bench.table"),
        *("softbottle.analysis.inspection", "softbottle.analysis.overview"),
        *("softbottle.analysis.pair", "softbottle.analysis.sources.opening"),
        *("softbottle.experiments.continuation", "softbottle.experiments.dropin"),
        *("softbottle.experiments.frontier.run", "softbottle.experiments.objectives"),
        *("softbottle.experiments.reproduce.run", "softbottle.experiments.sweep"),
        *("softbottle.experiments.retrofit.run", "softbottle.experiments.trial"),
        *("softbottle.experiments.retrofit.trial", "softbottle.experiments.components"),
        *("softbottle.experiments.retrofit.trunk", "softbottle.experiments.ending"),
        *("softbottle.experiments.saturation.run", "softbottle.scoring.dynamic"),
        *("softbottle.scoring.export", "softbottle.scoring.generate"),
    ]
)


class Answer(NamedTuple):
    """The exit code, and what was written."""

    code: int
    output: str
    errors: str


class Program:
    """A program under way: several side by side take little longer than one.

    Attributes:
        process: has its id and ends it.
    """

    def __init__(self, script, arguments, typed, log, devices, absent):
        self._folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self._folder.name)
        (folder / "typed").write_text(typed)
        self._written = (log, log) if log else (folder / "output", folder / "errors")
        self.process = _FORKS.Process(
            target=_main,
            args=(script, [*map(str, arguments)])
            + ([folder / "typed", *self._written], devices, absent),
            daemon=True,  # ends with the tests at the latest
        )
        self.process.start()

    def wait(self, seconds: float = SECONDS) -> int | None:
        """The exit code, or None if the program still runs after `seconds`."""
        self.process.join(seconds)
        return self.process.exitcode

    def written(self) -> list[str]:
        """What it has written to stdout and to stderr so far."""
        return [path.read_text() if path.exists() else "" for path in self._written]


def start(
    script: str,
    *arguments: Any,
    typed: str = "",
    log: pathlib.Path | None = None,
    devices: int = 1,
    absent: tuple[str, ...] = (),
) -> Program:
    """Start a program.

    Args:
        script: a file of launch/, or the name of a command of `softbottle`.
        typed: what it finds on stdin.
        log: where stdout and stderr are appended, or None for files of its own.
        devices: how many it has.
        absent: modules that it cannot import.
    """
    return Program(script, arguments, typed, log, devices, absent)


def _main(script, arguments, streams, devices, absent):
    """In the new process: be `python launch/script`, or `softbottle script`."""
    modes = (os.O_RDONLY, *2 * [os.O_WRONLY | os.O_CREAT | os.O_APPEND])
    for stream, (path, mode) in enumerate(zip(streams, modes, strict=True)):
        os.dup2(os.open(path, mode), stream)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(ROOT)
    sys.modules.update(dict.fromkeys(absent))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    try:
        _be(script, arguments)
    finally:
        # A forked process leaves them out, and jax and orbax have some.
        atexit._run_exitfuncs()


def _be(script, arguments):
    if script.endswith(".py"):
        sys.argv = [f"launch/{script}", *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.argv = ["softbottle", script, *arguments]
        runpy.run_module("softbottle", run_name="__main__")


def finish(program: Program) -> Answer:
    """What came of it."""
    code = program.wait()
    assert code is not None, f"it hangs: {program.written()}"
    return Answer(code, *program.written())


def run(script: str, *arguments: Any) -> str:
    """The output of a program that succeeds."""
    answer = finish(start(script, *arguments))
    assert answer.code == 0, answer.errors[-2000:]
    return answer.output


def check(lines: Sequence[tuple[str, Sequence[str]]]) -> list[Answer]:
    """The answers of one command to lines that it parses and does not act on.

    To parse is quick: all are parsed in one process, from the same defaults.

    Args:
        lines: for each the script, all of them of the same command, and the arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "answers"
        process = _FORKS.Process(target=_check, args=(lines, path), daemon=True)
        process.start()
        process.join(SECONDS)
        assert process.exitcode == 0, lines
        return [Answer(*answer) for answer in json.loads(path.read_text())]


def _check(lines, path):
    """In the new process: write what comes of each line to a file."""
    os.chdir(ROOT)
    answers = []
    # Imported here, or its flags are gone with the first line's values.
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(f"softbottle.commands.{command(lines[0][0])}")
    for script, arguments in lines:
        output, errors, code = io.StringIO(), io.StringIO(), 0
        streams = contextlib.ExitStack()
        streams.enter_context(contextlib.redirect_stdout(output))
        streams.enter_context(contextlib.redirect_stderr(errors))
        with streams, flagsaver.flagsaver():
            try:
                _be(script, [*arguments, "--only_check_args"])
            except SystemExit as ended:
                code = ended.code or 0
            except Exception as error:
                code = 1
                print(repr(error), file=errors)
        answers.append((code, output.getvalue(), errors.getvalue()))
    path.write_text(json.dumps(answers))


def command(script: str) -> str:
    """The name of the command that a script is, or that it is called by."""
    return script.removesuffix(".py")


def start_fresh(script: str, *arguments: Any) -> subprocess.Popen:
    """A program under way in an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, f"launch/{script}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_fresh(process: subprocess.Popen) -> Answer:
    """What came of it."""
    output, errors = process.communicate(timeout=SECONDS)
    return Answer(process.returncode, output, errors)
