"""The rows of runs along their training as a table, with what they decide."""

import math
import pathlib
from collections.abc import Sequence

import numpy as np

from softbottle import files
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.saturation import plot
from softbottle.experiments.saturation.run import FILE, Course, courses, key

SOFTMAX = "softmax"


def write(workdir: pathlib.Path | str) -> str:
    """Write `saturation.md` and `saturation.png` beside a folder's rows.

    Returns:
        The table and the decisions, as they are in the file.

    Raises:
        ValueError: if there are no rows, or a line is none.
    """
    workdir = pathlib.Path(workdir)
    rows = rows_lib.read(workdir / FILE, key)
    if not rows:
        raise ValueError(f"{workdir / FILE} has no rows: give a --run.")
    found = courses(rows)
    listed = "\n".join(f"- {sentence}" for sentence in decisions(found))
    text = f"{_measured(rows[0])}\n\n{table(found)}\n\n{listed}\n"
    files.replace(workdir / "saturation.md", f"# Along the training\n\n{text}")
    plot.draw(found).save(workdir / "saturation.png")
    return text


def _measured(row):
    """By what all runs were measured."""
    counts = row["positions"]
    return (
        f"Losses of {counts['loss']:,} tokens of the split {row['split']}, states of "
        f"the first {counts['states']:,}."
    )


def table(found: Sequence[Course]) -> str:
    """A line per run: its losses, and which of its curves turn."""
    titles = [
        *("width", "head", "seed", "passes", "lowest loss", "after passes"),
        *("loss at the end", "training, then", "training, end"),
        *("loss turns", "training loss", "anisotropy", "singular entropy"),
        *("effective rank, states", "table"),
    ]
    return rows_lib.table(titles, map(_cells, found))


def decisions(found: Sequence[Course]) -> list[str]:
    """By width and head, what the rules of docs/results/saturation.md come to."""
    sentences = []
    groups: dict[tuple[int, str], list[Course]] = {}
    for course in found:
        place = (course.row["width"], course.row["head"])
        groups.setdefault(place, []).append(course)
    for width in sorted({width for width, _ in groups}):
        heads = {head: runs for (at, head), runs in groups.items() if at == width}
        softmax = [name for name in heads if name.partition("(")[0] == SOFTMAX]
        base = heads[softmax[0]] if softmax else []
        sentences += [
            f"Width {width}, `{head}`: {_decision(runs, base)}"
            for head, runs in heads.items()
        ]
    return sentences


def _decision(runs, base):
    """One head's loss, and what it is beside the softmax's."""
    count, turning = len(runs), [run for run in runs if run.turned("loss")]
    said = f"the held-out loss turns in {len(turning)} of {count} seeds"
    if turning:
        both = sum(run.turned("training") for run in turning)
        said += f", the training loss with it in {both}"
    if runs is base or not base:
        return said + "."
    if min(count, len(base)) < 2:
        return said + "; one seed decides nothing."
    before = [run for run in base if run.turned("loss")]
    if not before:
        return said + "; nothing to cure: the softmax does not turn."
    if len(before) < len(base) or turning:
        return said + f"; undecided: the softmax turns in {len(before)} of {len(base)}."
    if not all(run.turned("training") for run in base):
        return said + "; the softmax turns in all, but by overfitting: no saturation."
    return said + ": a cure, the softmax turns in all."


def _cells(course):
    row, curves = course.row, course.curves
    low = int(np.argmin(curves["loss"]))
    return [
        *(str(row["width"]), f"`{row['head']}`", str(row["seed"])),
        *(f"{course.pass_M[-1]:.2f}", f"{curves['loss'][low]:.4f}"),
        *(f"{course.pass_M[low]:.2f}", f"{curves['loss'][-1]:.4f}"),
        *(f"{_training(course, at):.4f}" for at in (low, -1)),
        *(
            _turn(course, name)
            for name in ("loss", "training", "anisotropy", "entropy")
        ),
        *(f"{curves[name][-1]:.0f}" for name in ("states_rank", "table_rank")),
    ]


def _training(course, at):
    """The loss in training up to a checkpoint: of the last steps that have a line."""
    until = course.training_M[: at + 1] if at >= 0 else course.training_M
    known = until[np.isfinite(until)]
    return known[-1] if len(known) else math.nan


def _turn(course, name):
    """The pass at which a curve turns, with its interval."""
    found = course.turn(name)
    if found is None:
        return "too short"
    if not found.turned:
        return "no"
    each = course.row["steps_per_pass"]
    low, high = (end / each for end in found.interval)
    return f"{found.step / each:.2f} ({low:.2f} to {high:.2f})"
