"""What a run reports: JSON lines always, TensorBoard when its writer is installed.

`metrics.jsonl` holds one object a line, each with its `step`; the first is the run's
config and the versions that ran it. A resumed run drops the lines beyond the step it
resumes from, so that the file reads like that of an undisturbed run.
"""

import importlib.util
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import tqdm


class Writer:
    """Appends to `workdir/metrics.jsonl`, and to event files beside it."""

    def __init__(self, workdir: pathlib.Path, step: int, start: dict[str, Any]):
        path = workdir / "metrics.jsonl"
        kept = [line for line in _lines(path) if line["step"] <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a")
        self._events = _event_writer(workdir)
        if not kept:
            self.write(0, start=start)

    def write(self, step: int, **values: Any) -> None:
        """One line; numbers also go to TensorBoard."""
        finite = {
            name: None
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for name, value in values.items()
        }
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if self._events is not None:
            self._events.write(step, values)

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()


class Progress:
    """A bar with its ETA on stderr, and human lines above it."""

    def __init__(self, total: int, step: int, label: str):
        terminal = sys.stderr.isatty()
        self._bar = tqdm.tqdm(
            total=total,
            initial=step,
            desc=label,
            unit="step",
            dynamic_ncols=terminal,
            mininterval=0.2 if terminal else 10.0,
        )

    def advance(self, step: int) -> None:
        """Move the bar to a step."""
        self._bar.update(step - self._bar.n)

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


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient stopped being a number."""


class Report:
    """The metrics of steps, read one step late: to the file, the bar and the screen.

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
        window: Sequence[float] = (0.0, 0.0, 0),
    ):
        self._writer, self._progress, self._every = writer, progress, every
        self._pending: tuple | None = None
        self._total, self._count, self._steps = window
        self._since = 0
        self._before, self._clock = seconds, time.perf_counter()
        # Time of the window's steps, and since when they run again: what is done
        # between a `settle` and the next step is not theirs.
        self._spent, self._lap = 0.0, self._clock

    @property
    def seconds(self) -> float:
        """Training time so far, earlier stretches of the run included."""
        return self._before + time.perf_counter() - self._clock

    @property
    def window(self) -> tuple[float, float, int]:
        """Sum, count and steps that are read but not yet reported."""
        return self._total, self._count, self._steps

    def add(self, step: int, position: dict[str, int], measured: dict) -> None:
        """Take a step's metrics, and read those of the step before.

        Raises:
            NonFiniteLossError: if the step before lost its loss or its gradient.
        """
        if self._lap is None:
            self._lap = time.perf_counter()
        late, self._pending = self._pending, (step, position, measured)
        if late is not None:
            self._read(*late)

    def settle(self) -> None:
        """Read the metrics of the last step now; the steps' clock stops."""
        if self._pending is not None:
            late, self._pending = self._pending, None
            self._read(*late)
            self._spent, self._lap = self._elapsed(), None

    def finish(self) -> None:
        """Read and report whatever is left."""
        last = self._pending
        self.settle()
        if last is not None and self._steps:
            step, position, measured = last
            self._log(step, position["epoch"], _floats(measured))

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
                f"the batch of position {position}. The last checkpoint is intact; "
                "a smaller learning rate or a gradient clip usually helps."
            )
        self._total += values["total"]
        self._count += values["count"]
        self._steps, self._since = self._steps + 1, self._since + 1
        self._progress.advance(step)
        if step % self._every == 0:
            self._log(step, position["epoch"], values)

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


def _floats(measured):
    return {name: float(value) for name, value in measured.items()}


def perplexity(loss: float) -> float:
    """exp(loss), infinite where it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def read(workdir: pathlib.Path | str) -> list[dict[str, Any]]:
    """All lines of a run's metrics."""
    return _lines(pathlib.Path(workdir) / "metrics.jsonl")


def _lines(path):
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            # A killed process may leave half a line, and nothing after it.
            break
    return lines


class _Events:
    """TensorBoard's own event writer, without TensorFlow."""

    def __init__(self, workdir):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import event_file_writer

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = event_file_writer.EventFileWriter(str(workdir / "events"))

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


def _event_writer(workdir):
    if importlib.util.find_spec("tensorboard") is None:
        return None
    return _Events(workdir)
