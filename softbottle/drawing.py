"""Figures in one style, which show names as they are.

Colors are those of Okabe and Ito, which people with any form of color blindness tell
apart, and every head has the same one in all figures. A line is named at its right end
where there are few, so that a print without color can be read too; the font is the one
that comes with Matplotlib, so that a figure looks the same on every machine.

Runs, texts and models are called whatever their users like. Matplotlib takes what
stands between two `$` for a formula, and fails if it is none.
"""

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import cycler
import matplotlib.artist
import matplotlib.axes
import matplotlib.axis
import matplotlib.backend_bases
import matplotlib.container
import matplotlib.figure
import matplotlib.lines
import matplotlib.text
import matplotlib.ticker
import numpy as np

from softbottle import files

BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY, BLACK = "#CC79A7", "#E69F00", "#56B4E9", "#000000"
GRAY = "#767676"  # of what is not data: bounds, tolerances, leaders
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
HEADS = {
    "softmax": BLACK,
    "mos": BLUE,
    "moc": GREEN,
    "partition": ORANGE,
    "mixtape": PURPLE,
    "sigsoftmax": VERMILION,
    "moss": SKY,
    "softcap": SKY,
}
SMALL = 9  # points, of all text but titles
_DECADE = 12  # by which an axis may grow and have numbers between its decades
_FEW = 6  # lines that are named at their ends
_EDGE = 0.85  # of the width; a line that ends before it is named where it ends
_LONG = 30  # characters, from which a name is put into the legend


class Figure(matplotlib.figure.Figure):
    """A figure in which a `$` is a dollar, but for the powers that ticks are.

    A notebook shows it where a cell ends with it.
    """

    def __init__(
        self, figsize: tuple[float, float] = (7.0, 4.0), **settings: Any
    ) -> None:
        defaults = {"facecolor": "white", "layout": "constrained"}
        super().__init__(figsize, **(defaults | settings))

    def subplots(self, *args: Any, **kwargs: Any) -> Any:
        """Axes in the style, as `matplotlib.figure.Figure.subplots` has them."""
        panels = super().subplots(*args, **kwargs)
        for axes in np.ravel(panels):
            _dress(axes)
        return panels

    def draw(self, renderer: matplotlib.backend_bases.RendererBase) -> None:
        """Draw all that is in the figure."""
        for text in set(self.findobj(matplotlib.text.Text)) - _tick_labels(self):
            text.set_parse_math(False)
        for axes in self.axes:
            axes.title.set(x=0, ha="left")
        super().draw(renderer)

    def png(self) -> bytes:
        """The figure as a picture."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()

    _repr_png_ = png  # what notebooks call

    def save(self, path: pathlib.Path) -> None:
        """Write the picture, all of it or nothing."""
        files.replace(path, self.png())


def label(axes: matplotlib.axes.Axes, most: int = _FEW) -> None:
    """Name the lines: each at its right end where they are few, else in a legend.

    To be called last, when the lines and the limits of the axes are what they will be.

    Args:
        axes: with lines that have a label.
        most: how many lines are few.
    """
    handles, names = axes.get_legend_handles_labels()
    lines = [_line(handle) for handle in handles]
    longest = max((len(row) for name in names for row in name.split("\n")), default=0)
    few = len(lines) <= most and longest <= _LONG
    if not few or not all(lines):
        axes.legend(fontsize=SMALL, frameon=False)
        return
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    ends = [_end(axes, line) for line in lines]
    named = sorted(
        (end[1], end[0], name, line.get_color())
        for end, name, line in zip(ends, names, lines, strict=True)
        if end is not None
    )
    inside = [entry for entry in named if entry[1] <= _EDGE]
    outside = [entry for entry in named if entry[1] > _EDGE]
    for height, (y, x, name, color) in zip(
        _spread(axes, outside), outside, strict=True
    ):
        leader = {"arrowstyle": "-", "lw": 0.6, "color": color, "alpha": 0.5}
        leader["relpos"] = (0, 0.5)
        _name(axes, name, color, (x, y), (1.02, height), va="center", arrowprops=leader)
    for height, (y, x, name, color) in zip(_spread(axes, inside), inside, strict=True):
        _name(axes, name, color, (x, y), (x + 0.015, height), va="bottom")


def bars(
    axes: matplotlib.axes.Axes, values: Mapping[str, float], shown: str | None = None
) -> None:
    """Lying bars from 0, one under the other, each with its name.

    Args:
        axes: where.
        values: by name, the first on top.
        shown: the format of a number at the end of each, such as "{:.2f}".
    """
    places = np.arange(len(values))
    drawn = axes.barh(places, list(values.values()), 0.6, color=BLUE)
    if shown is not None:
        numbers = [shown.format(value) for value in values.values()]
        axes.bar_label(drawn, numbers, padding=3, fontsize=SMALL)
    axes.set_yticks(places, list(values))
    axes.set(ylim=(len(values) - 0.4, -0.6))
    axes.grid(False, axis="y")
    axes.margins(x=0.15)


def plain(axis: matplotlib.axis.Axis) -> None:
    """Numbers as they are on a logarithmic axis, not as products of powers.

    Between the decades they are shown where there is little more than one of these.
    """

    def between(value, place):
        low, high = sorted(axis.get_view_interval())
        return f"{value:,.10g}" if high <= _DECADE * low else ""

    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_formatter(matplotlib.ticker.FuncFormatter(between))


def tag(
    axes: matplotlib.axes.Axes, x: Sequence[float], y: Sequence[float], names: list[str]
) -> None:
    """Name points beside them."""
    for at, height, name in zip(x, y, names, strict=True):
        axes.annotate(
            name,
            (at, height),
            (4, 4),
            textcoords="offset points",
            fontsize=SMALL - 1,
            color=GRAY,
            annotation_clip=False,
        )


def _dress(axes):
    # Dashed from the eighth line on: no two of 14 are alike.
    styles = cycler.cycler(linestyle=["-", "--"])
    axes.set_prop_cycle(styles * cycler.cycler(color=COLORS))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", labelsize=SMALL, color=GRAY)
    axes.title.set_fontsize(SMALL + 2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(SMALL + 1)


def _name(axes, name, color, point, place, **settings):
    axes.annotate(
        name,
        point,
        place,
        xycoords="axes fraction",
        textcoords="axes fraction",
        fontsize=SMALL,
        color=color,
        annotation_clip=False,
        **settings,
    )


def _line(handle):
    """The line that a handle of a legend stands for, or None."""
    if isinstance(handle, matplotlib.container.ErrorbarContainer):
        handle = handle.lines[0]
    return handle if isinstance(handle, matplotlib.lines.Line2D) else None


def _end(axes, line):
    """The last point of a line that is in view, as a fraction of the axes."""
    points = line.get_transform().transform(np.asarray(line.get_xydata(), float))
    points = axes.transAxes.inverted().transform(points)
    inside = np.all((points >= -1e-6) & (points <= 1 + 1e-6), axis=1)
    return tuple(points[inside][-1]) if inside.any() else None


def _spread(axes, named):
    """Heights of the names, moved apart as little as lets each have its rows.

    Less the middle that each has where all are packed, heights may not fall: their
    isotonic regression, by pooling neighbors that do.
    """
    points = 72 * axes.figure.get_figheight() * axes.get_position().height
    rows = np.array([1 + name.count("\n") for _, _, name, _ in named])
    middles = 1.3 * SMALL / points * (np.cumsum(rows) - rows / 2)
    pools = []
    for (y, *_), middle in zip(named, middles, strict=True):
        pools.append([y - middle])
        while len(pools) > 1 and np.mean(pools[-1]) < np.mean(pools[-2]):
            last = pools.pop()
            pools[-1] += last
    levels = [np.mean(pool) for pool in pools for _ in pool]
    return [level + middle for level, middle in zip(levels, middles, strict=True)]


def _tick_labels(figure: matplotlib.figure.Figure) -> set[matplotlib.artist.Artist]:
    return {
        text
        for axis in figure.findobj(matplotlib.axis.Axis)
        for tick in (*axis.majorTicks, *axis.minorTicks)
        for text in (tick.label1, tick.label2)
    }
