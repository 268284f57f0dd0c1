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
        self._file.write(json.dumps({"step": step, **values}) + "\n")
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
