"""Models along their training, side by side: which saturate, and under which head?

A row is a run: what it is, what the instrument `training` measures at the checkpoints
of its series (analysis/instruments/turns.py), and its losses in training between them.
Rows are lines of saturation.jsonl; whether a curve turns is worked out when they are
read, so that table and figure need nothing but the rows.

The text of the instrument is held out. A model that learns its training text by heart
has a loss there that turns, too, while its loss in training goes on falling: a turn is
that of saturation where both turn.

Axes: M checkpoints.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from softbottle import config as config_lib
from softbottle.analysis import curves as curves_lib
from softbottle.analysis.instruments import turns
from softbottle.analysis.sources import run as run_source
from softbottle.data import corpus as corpus_lib
from softbottle.data import lines as lines_lib
from softbottle.data.vocab import Split
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.frontier.arms import fingerprint
from softbottle.training import metrics
from softbottle.training.state import load_corpus

FILE = "saturation.jsonl"
# Of a row's curves, and of `turns.Curves`.
CURVES = {
    "step": "step_M",
    "loss": "loss_M",
    "entropy": "entropy_M",
    "anisotropy": "anisotropy_M",
    "outliers": "outliers_M",
    "states_rank": "states_rank_M",
    "table_rank": "table_rank_M",
}
# What all rows of a table have in common; those of before do not have all.
MEASURED = ("split", "positions", "text")
_DIGITS = 7  # of what is stored, significant


class Key(NamedTuple):
    """Which run a row is of."""

    width: int
    head: str
    seed: int


class Course(NamedTuple):
    """A run from its start to where all runs of its width have come.

    Attributes:
        row: of the run.
        step_M: the steps of its checkpoints.
        curves: by the names of `CURVES`, at these steps.
        training_M: loss in training between a checkpoint and the one before, or NaN
            where no line of the metrics lies between.
    """

    row: rows_lib.Row
    step_M: np.ndarray
    curves: dict[str, np.ndarray]
    training_M: np.ndarray

    @property
    def pass_M(self) -> np.ndarray:
        """How often the training text was read."""
        return self.step_M / self.row["steps_per_pass"]

    def turn(self, name: str) -> turns.Turn | None:
        """Where a curve turns, by its name or `training`; None if it is too short."""
        value_M = self.training_M if name == "training" else self.curves[name]
        known = np.isfinite(value_M)
        if known.sum() < turns.LEAST:
            return None
        return turns.turn(self.step_M[known], value_M[known])

    def turned(self, name: str) -> bool:
        """Whether a curve falls, and rises after it."""
        found = self.turn(name)
        return found is not None and found.turned


def key(row: rows_lib.Row) -> Key:
    """Which run a row is of."""
    return Key(int(row["width"]), str(row["head"]), int(row["seed"]))


def measure(
    workdir: pathlib.Path | str,
    split: Split = "test",
    positions: int = run_source.POSITIONS,
) -> rows_lib.Row:
    """The row of a run that stored its series.

    Args:
        workdir: the run's folder; it need not have come to its end.
        split: the text of states and losses. All of it has a loss: a late rise may be
            of hundredths of a nat.
        positions: from its start, those whose states are taken.

    Raises:
        ValueError: for a folder without a run, or one without a series.
    """
    workdir = pathlib.Path(workdir)
    capture = run_source.read(workdir, {"series"}, split, positions)
    if not isinstance(capture.series, run_source.Series):
        raise ValueError(
            f"{workdir} has no series of checkpoints: train.series=True stores one."
        )
    run, lines = capture.series.run, metrics.read(workdir)
    config, text = run.config, load_corpus(workdir, run, split)
    digest, scored = corpus_lib.digest(text), text.splits[split]
    measured = turns.measure(dataclasses.replace(capture.series, scored=scored))
    stream = lines_lib.stream(config.data, text.vocab, text.train, config.seed)
    start: dict[str, Any] = next((at["start"] for at in lines if "start" in at), {})
    return {
        "fingerprint": _fingerprint(config, digest, split),
        "head": repr(run.model.head),
        "width": config_lib.context_dim(config),
        "seed": config.seed,
        "parameters": capture.parameters,
        "steps_per_pass": stream.steps_per_epoch,
        "tokens_per_step": config.data.rows * config.data.length,
        "split": split,
        "text": digest[split],
        "positions": {
            "loss": len(scored) - 1,
            "states": min(positions, len(scored) - 1),
        },
        "device": start.get("device"),
        "versions": start.get("versions"),
        "curves": {
            name: [_rounded(value) for value in getattr(measured, field)]
            for name, field in CURVES.items()
        },
        "training": _losses(lines, "loss"),
        "validations": _losses(curves_lib.validations(lines), "valid_loss"),
    }


def add(workdir: pathlib.Path | str, row: rows_lib.Row) -> None:
    """Put a row into a folder's file, in the place of an earlier one of its run.

    Raises:
        ValueError: if the file has a run of the same width, head and seed that had
            other settings or another text, or a run that was measured by another text
            or at other positions.
    """
    path = pathlib.Path(workdir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {key(old): old for old in rows_lib.read(path, key)}
    mark = {"fingerprint": row["fingerprint"]}
    # Rows of before have none.
    rows_lib.check(path, key(row), mark | rows.get(key(row), {}), row["fingerprint"])
    for run, old in rows.items():
        for name in MEASURED:
            if name in old and old[name] != row[name]:
                raise ValueError(
                    f"{path.name} has {run} of another {name}, {old[name]} instead of "
                    f"{row[name]}; runs of one table are measured alike."
                )
    rows[key(row)] = row
    rows_lib.write(path, [rows[each] for each in sorted(rows)])


def _fingerprint(config, text, split):
    """A hash of what a run is, but for its length, and of the text it is scored by."""
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=None)
    )
    told = text | {"scored": split}
    if config.train.init_from is not None:
        told |= {"init_from": config.train.init_from}
    return fingerprint(config, told)


def courses(rows: Sequence[rows_lib.Row]) -> list[Course]:
    """The runs, those of a width cut to the length of the shortest of them."""
    last: dict[int, float] = {}
    for row in rows:
        end = row["curves"]["step"][-1]
        last[row["width"]] = min(end, last.get(row["width"], end))
    return [_course(row, last[row["width"]]) for row in sorted(rows, key=key)]


def _course(row, end):
    step_M = np.array(row["curves"]["step"], float)
    known = step_M <= end
    curves = {name: np.array(row["curves"][name], float)[known] for name in CURVES}
    training_M = _between(step_M[known], row["training"])
    return Course(row, step_M[known], curves, training_M)


def _between(step_M, training):
    """The mean of the lines after each checkpoint's predecessor, up to its own step."""
    at, loss = np.array(training, float).reshape(-1, 2).T
    place = np.searchsorted(step_M, at)
    inside = place < len(step_M)
    count_M = np.bincount(place[inside], minlength=len(step_M))
    total_M = np.bincount(place[inside], loss[inside], minlength=len(step_M))
    return np.where(count_M > 0, total_M / np.maximum(count_M, 1), np.nan)


def _losses(lines, name):
    return [
        [line["step"], _rounded(line[name])]
        for line in lines
        if line.get(name) is not None
    ]


def _rounded(value):
    return float(f"{value:.{_DIGITS}g}")
