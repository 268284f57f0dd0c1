"""What a mixture costs as it grows: time against components and against words."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.ticker
import numpy as np

from softbottle import drawing

Row = dict[str, Any]
# The size on the axis: its place in a row's case, and its name.
AXES = {"components": (2, "components K"), "vocab": (4, "words V")}


def cost(paths: Sequence[pathlib.Path | str], out: pathlib.Path | str) -> None:
    """Draw the sweeps in JSON files of `--suite head --sweep`, one panel for each.

    Each variant is drawn with the straight line that fits it best; its name comes with
    the line's constant and slope.

    Raises:
        ValueError: if a file holds no sweep, or one in which every variant failed.
    """
    results = [json.loads(pathlib.Path(path).read_text()) for path in paths]
    for path, result in zip(paths, results, strict=True):
        if result.get("sweep") not in AXES:
            raise ValueError(f"{path} is not the result of --suite head --sweep.")
        if not _timed(result):
            raise ValueError(f"{path} has no variant that was timed.")
    figure = drawing.Figure(figsize=(6 * len(results), 4))
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, result in zip(panels, results, strict=True):
        _panel(axes, result)
    pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.save(pathlib.Path(out))


def line(rows: list[Row], sweep: str) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Sizes, milliseconds, and the constant and slope of their least-squares line.

    Residuals are weighed by 1 / ms, so that small sizes count as much as large ones.
    """
    size = np.array([row["case"][AXES[sweep][0]] for row in rows], float)
    ms = np.array([row["ms"] for row in rows])
    slope, constant = np.polyfit(size, ms, 1, w=1 / ms)
    return size, ms, constant, slope


def _timed(result):
    """The rows that have a time of their own."""
    return [
        row
        for row in result["rows"]
        if row["status"] == "ok" and "same_program_as" not in row
    ]


def _panel(axes, result):
    sweep, rows = result["sweep"], _timed(result)
    unit, per = (1, "component") if sweep == "components" else (1000, "1,000 words")
    for variant in dict.fromkeys(row["variant"] for row in rows):
        points = [row for row in rows if row["variant"] == variant]
        size, ms, constant, slope = line(points, sweep)
        # "auto" is what a user gets without asking.
        name = "softbottle" if variant == "auto" else variant
        label = f"{name}\n{constant:.2f} ms + {unit * slope:.3g} ms\nper {per}"
        (dots,) = axes.plot(size, ms, "o", label=label)
        fit = constant + slope * size
        axes.plot(size, fit, "-", color=dots.get_color(), linewidth=1)
    _, tokens, components, dim, vocab = rows[0]["case"]
    fixed = f"K={components}" if sweep == "vocab" else f"V={vocab:,}"
    axes.set_title(f"N={tokens}, d={dim}, {fixed} on {result['device']}")
    axes.set_xlabel(AXES[sweep][1])
    axes.set_ylabel("loss and gradient, ms")
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    drawing.label(axes)
