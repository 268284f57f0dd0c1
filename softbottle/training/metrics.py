"""What a run reports: JSON lines always, TensorBoard when its writer is installed.

`metrics.jsonl` holds one object per line, each with its `step`; the first is the run's
config and the versions that ran it. A resumed run drops the lines of what it will do
again, which are those beyond the step it resumes from and sometimes that step's
validation, so that the file reads like that of an undisturbed run. The file is a
report, not the run: one that was deleted, cut short or damaged costs a warning and the
lines that are gone.
"""

import collections
import errno
import importlib.util
import json
import math
import os
import pathlib
import shutil
import sys
import time
import warnings
from typing import Any

import tqdm

from softbottle import files

# Between two lines of progress where stderr is no terminal.
PLAIN_SECONDS = 60.0
# How many steps may be under way before the host waits for the first of them.
AHEAD = 16


class Writer:
    """Appends to `workdir/metrics.jsonl`, and to event files beside it.

    Args:
        workdir: the run's folder.
        step: that the run resumes from; later lines are dropped.
        start: what the first line tells of the run.
        logged: the last step up to `step` that was given a line of its own.
        validates: the run validates `step`; an earlier validation of it is dropped.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        step: int,
        start: dict[str, Any],
        logged: int = 0,
        validates: bool = False,
    ):
        path = workdir / "metrics.jsonl"
        # At step 0 nothing has come of an earlier start, whose settings may be others.
        earlier = _lines(path) if step else []
        lines = [line for line in earlier if line["step"] <= step]
        if validates:
            lines = [
                line
                for line in lines
                if line["step"] < step or "valid_loss" not in line
            ]
        if not any("start" in line for line in lines):
            lines = [{"step": 0, "start": start}, *lines]
        if logged and not any(line["step"] == logged for line in lines):
            warnings.warn(
                f"{path} was deleted or cut short: it has no line of step {logged}, "
                f"and the run resumes from step {step}. What is gone stays missing in "
                "its curves.",
                stacklevel=2,
            )
        files.replace(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._path = path
        # Unbuffered, so that nothing is left to be written when it is closed.
        self._file = path.open("ab", buffering=0)
        self._events = _event_writer(workdir, step)

    def write(self, step: int, **values: Any) -> None:
        """One line; numbers also go to TensorBoard.

        Raises:
            WriteError: if the disk does not take it.
        """
        finite = {
            name: None
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for name, value in values.items()
        }
        raw = (json.dumps({"step": step, **finite}) + "\n").encode()
        try:
            if self._file.write(raw) < len(raw):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise WriteError(
                f"step {step}: {self._path} could not be written: {error}. The last "
                "complete checkpoint is intact; mend the cause and start again."
            ) from error
        if self._events is not None:
            self._events.write(step, values)

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


class Progress:
    """A bar with its ETA on stderr, and human lines above it.

    Where stderr is no terminal, a plain line now and then takes the bar's place.
    """

    def __init__(self, total: int, step: int, label: str):
        self._bar = tqdm.tqdm(
            total=total,
            initial=step,
            desc=label,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.2,
            disable=not sys.stderr.isatty(),
        )
        self._total, self._label, self._first = total, label, step
        self._clock = self._printed = time.monotonic()

    def advance(self, step: int) -> None:
        """Move the bar to a step."""
        self._bar.update(step - self._bar.n)
        now = time.monotonic()
        if self._bar.disable and now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            seconds = (now - self._clock) / max(1, step - self._first)
            left = tqdm.tqdm.format_interval(seconds * max(0, self._total - step))
            self.say(f"{self._label}: step {step:,} of {self._total:,}, {left} left")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


class Silence:
    """Takes the place of `Writer` and `Progress` in all processes but the first."""

    def write(self, step: int, **values: Any) -> None:
        """Nothing."""

    def advance(self, step: int) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class WriteError(RuntimeError):
    """The metrics could not be written."""


class UnfinishedError(RuntimeError):
    """Runs ended without a result."""


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient stopped being a number."""


class Report:
    """The metrics of steps, to the file, the bar and the screen.

    They are read when the device has them, so that the host runs ahead of it.

    Args:
        writer: where the lines go.
        progress: where a person looks.
        every: steps between two lines.
        seconds: training time of the run's earlier stretches.
        window: sum, count and steps that they had not yet reported.
    """

    def __init__(
        self,
        writer: Writer | Silence,
        progress: Progress | Silence,
        every: int,
        seconds: float = 0.0,
        window: tuple[float, float, int] = (0.0, 0.0, 0),
    ):
        self._writer, self._progress, self._every = writer, progress, every
        self._pending: collections.deque[tuple[int, dict[str, int], dict[str, Any]]]
        self._pending = collections.deque()
        self._last: tuple[int, int, dict[str, float]] | None = None
        self._total, self._count, self._steps = window
        self._since = 0
        self._before, self._clock = seconds, time.perf_counter()
        # Time of the window's steps, and since when they run again: what is done
        # between a `settle` and the next step is not theirs.
        self._spent = 0.0
        self._lap: float | None = self._clock

    @property
    def seconds(self) -> float:
        """Training time so far, earlier stretches of the run included."""
        return self._before + time.perf_counter() - self._clock

    @property
    def window(self) -> tuple[float, float, int]:
        """Sum, count and steps that are read but not yet reported."""
        return self._total, self._count, self._steps

    def add(
        self, step: int, position: dict[str, int], measured: dict[str, Any]
    ) -> None:
        """Take a step's metrics, and read those of steps that are done.

        Args:
            step: how many there are with this one.
            position: of the step's batch in the text.
            measured: scalars on the device.

        Raises:
            NonFiniteLossError: if one of these lost its loss or its gradient.
        """
        if self._lap is None:
            self._lap = time.perf_counter()
        self._pending.append((step, position, measured))
        while self._pending and (
            len(self._pending) > AHEAD or _are_ready(self._pending[0][2])
        ):
            self._read(*self._pending.popleft())

    def settle(self) -> None:
        """Read the metrics of all steps so far; the steps' clock stops."""
        if self._lap is None:
            return
        while self._pending:
            self._read(*self._pending.popleft())
        self._spent, self._lap = self._elapsed(), None

    def finish(self) -> None:
        """Read and report whatever is left."""
        self.settle()
        if self._last is not None and self._steps:
            self._log(*self._last)

    def say(self, line: str) -> None:
        """Print a line for people."""
        self._progress.say(line)

    def evaluated(self, step: int, epoch: int, loss: float, averaging: bool) -> None:
        """Report a validation."""
        self._writer.write(
            step,
            epoch=epoch,
            valid_loss=loss,
            valid_perplexity=perplexity(loss),
            averaging=averaging,
            seconds=round(self.seconds, 3),
        )
        note = "  (averaged)" if averaging else ""
        self.say(
            f"step {step:,}  epoch {epoch}  valid ppl {perplexity(loss):.2f}{note}"
        )

    def close(self) -> None:
        """Close the bar and the file."""
        self._progress.close()
        self._writer.close()

    def _elapsed(self):
        running = 0.0 if self._lap is None else time.perf_counter() - self._lap
        return self._spent + running

    def _read(self, step, position, measured):
        values = _floats(measured)
        loss = values["total"] / values["count"]
        if not (math.isfinite(loss) and math.isfinite(values["grad_norm"])):
            raise NonFiniteLossError(
                f"step {step}: loss {loss}, gradient norm {values['grad_norm']}, at "
                f"the batch of position {position}. Checkpoints of earlier steps are "
                "intact; a smaller learning rate or a gradient clip usually helps."
            )
        self._total += values["total"]
        self._count += values["count"]
        self._steps, self._since = self._steps + 1, self._since + 1
        self._progress.advance(step)
        self._last = (step, position["epoch"], values)
        if step % self._every == 0:
            self._log(*self._last)

    def _log(self, step, epoch, values):
        elapsed = self._elapsed()
        loss, share = self._total / self._count, self._since / self._steps
        # A window begun before a resume has tokens that took none of this time.
        step_ms = 1e3 * elapsed / self._since
        speed = share * self._count / elapsed
        self._total, self._count, self._steps, self._since = 0.0, 0.0, 0, 0
        self._spent, self._lap = 0.0, time.perf_counter()
        self._writer.write(
            step,
            loss=loss,
            perplexity=perplexity(loss),
            grad_norm=values["grad_norm"],
            penalty=values["penalty"],
            learning_rate=values["learning_rate"],
            tokens_per_second=round(speed, 1),
            step_ms=round(step_ms, 3),
            epoch=epoch,
        )
        self.say(
            f"step {step:,}  loss {loss:.3f}  ppl {perplexity(loss):.1f}  "
            f"{speed / 1e3:.1f}k tok/s"
        )


def _are_ready(measured):
    return all(value.is_ready() for value in measured.values())


def _floats(measured):
    return {name: float(value) for name, value in measured.items()}


def perplexity(loss: float) -> float:
    """exp(loss), infinite where it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def read(workdir: pathlib.Path | str) -> list[dict[str, Any]]:
    """All lines of a run's metrics."""
    return _lines(pathlib.Path(workdir) / "metrics.jsonl")


def _lines(path):
    """The lines that are objects with their step; a warning names the others."""
    if not path.exists():
        return []
    # What follows the last line break is being written, or its writer was killed.
    *complete, rest = path.read_bytes().split(b"\n")
    lines = [_line(raw) for raw in complete]
    dropped = [number for number, line in enumerate(lines, 1) if line is None]
    if dropped:
        shown = ", ".join(map(str, dropped[:8])) + (", ..." if dropped[8:] else "")
        warnings.warn(
            f"{path} is damaged: {len(dropped)} of its lines are no JSON objects with "
            f"a step and are left out (lines {shown}).",
            stacklevel=3,
        )
    return [line for line in [*lines, _line(rest)] if line is not None]


def _line(raw):
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    is_line = isinstance(line, dict) and type(line.get("step")) is int
    return line if is_line else None


class _Events:
    """TensorBoard's own event writer, without TensorFlow."""

    def __init__(self, workdir, step):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import event_file_writer

        folder = workdir / "events"
        if not step:
            shutil.rmtree(folder, ignore_errors=True)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = event_file_writer.EventFileWriter(str(folder))
        if step:
            # TensorBoard then leaves out what an earlier process wrote of later steps.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(step=step + 1, session_log=start))

    def write(self, step, values):
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        if scalars:
            summary = self._summary(value=scalars)
            self._writer.add_event(self._event(step=step, summary=summary))

    def close(self):
        self._writer.close()


def _event_writer(workdir, step):
    if importlib.util.find_spec("tensorboard") is None:
        return None
    return _Events(workdir, step)
