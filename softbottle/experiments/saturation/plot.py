"""Runs along their training as small multiples: a column per width."""

from collections.abc import Sequence

import numpy as np
from matplotlib.lines import Line2D

from softbottle import drawing
from softbottle.experiments.saturation.run import Course

# Titles of the rows, and the curve of a run that they show.
_ROWS = {
    "held-out loss, nats": "loss",
    "anisotropy": "anisotropy",
    "singular entropy": "entropy",
    "effective rank of the states": "states_rank",
}
_EARLY = 0.1  # of the training, whose losses the panels of the loss leave out
_SEEDS = ("-", "--", "-.", ":")


def draw(found: Sequence[Course]) -> drawing.Figure:
    """Loss, anisotropy, singular entropy and effective rank by passes over the text.

    A color is a head and a line style a seed; faint, in the panels of the loss: the
    loss in training. A mark is where a curve turns.
    """
    widths = sorted({course.row["width"] for course in found})
    figure = drawing.Figure(figsize=(1.2 + 3.6 * len(widths), 10.5))
    panels = figure.subplots(len(_ROWS), len(widths), squeeze=False)
    for column, width in enumerate(widths):
        runs = [course for course in found if course.row["width"] == width]
        for axes, (title, name) in zip(panels[:, column], _ROWS.items(), strict=True):
            for course in runs:
                _line(axes, course, name)
            axes.set_xscale("log")
            if name == "loss":
                _late(axes, runs)
                axes.set_title(f"width {width}")
            if not column:
                axes.set_ylabel(title)
            drawing.plain(axes.xaxis)
        axes.set_xlabel("passes over the training text")
    figure.legend(
        handles=_handles(found),
        loc="outside lower center",
        ncols=4,
        fontsize=drawing.SMALL,
        frameon=False,
    )
    return figure


def _line(axes, course, name):
    value_M, color = course.curves[name], _color(course)
    style = _SEEDS[course.row["seed"] % len(_SEEDS)]
    axes.plot(course.pass_M, value_M, style, color=color, lw=1)
    if name == "loss":
        axes.plot(course.pass_M, course.training_M, style, color=color, lw=1, alpha=0.3)
    turn = course.turn(name) if name != "states_rank" else None
    if turn is not None and turn.turned:
        at = turn.step / course.row["steps_per_pass"]
        height = np.interp(at, course.pass_M, value_M)
        axes.plot(at, height, "v", color=color, markersize=6)


def _late(axes, runs):
    """Limits that show the last nine tenths: the first fall would hide all else."""
    axes.set_xlim(_EARLY * max(run.pass_M[-1] for run in runs))
    late = [run.pass_M >= _EARLY * run.pass_M[-1] for run in runs]
    shown = np.concatenate(
        [
            values[at]
            for run, at in zip(runs, late, strict=True)
            for values in (run.curves["loss"], run.training_M)
        ]
    )
    low, high = np.nanmin(shown), np.nanmax(shown)
    axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def _handles(found):
    heads = {course.row["head"]: _color(course) for course in found}
    seeds = sorted({course.row["seed"] for course in found})
    handles = [Line2D([], [], color=color, label=head) for head, color in heads.items()]
    handles += [
        Line2D([], [], color=drawing.GRAY, ls=_SEEDS[seed % 4], label=f"seed {seed}")
        for seed in seeds
    ]
    turn = Line2D([], [], color=drawing.GRAY, ls="", marker="v", label="a turn")
    training = Line2D([], [], color=drawing.GRAY, alpha=0.3, label="loss in training")
    return [*handles, training, turn]


def _color(course):
    name = course.row["head"].partition("(")[0]
    return drawing.HEADS.get(name, drawing.GRAY)
