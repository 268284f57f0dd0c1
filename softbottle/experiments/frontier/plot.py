"""The frontier as a picture: lower and farther to the left is better.

A point is the mean of its seeds, and a vertical line goes from the best to the worst.
What is far above the softmax is a triangle at the upper edge, with its perplexity.

Axes: N deciles of the words.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.backends.backend_agg
import matplotlib.ticker
import numpy as np
from matplotlib.lines import Line2D

from softbottle import drawing
from softbottle.experiments.frontier import report
from softbottle.experiments.frontier.arms import SOFTMAX

Place = tuple[float, float]

_NAMED = 8  # more points than these are numbered
# What is shown, over the highest perplexity of the softmax, and over its by decile.
_HIGHEST, _HIGHEST_RATIO = 1.05, 1.1
# Titles of the panels; the field of a row and the unit that it is drawn in.
_COSTS = {
    "seconds of training": ("seconds", 1.0),
    "parameters, millions": ("parameters", 1e-6),
    "peak memory, GiB": ("peak_bytes", 2.0**-30),
}
# Of a label's place about its point.
_ANGLES = math.pi * (0.25 + np.arange(16) / 8)


def draw(rows: Sequence[dict[str, Any]]) -> drawing.Figure:
    """Perplexity by seconds, parameters and memory, and by the words' frequency."""
    found = report.points(rows)
    figure = drawing.Figure(figsize=(14, 11))
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    labels = _labels(found)
    _frequencies(panels[1, 1], found, labels)
    _legend(figure, found, labels, "lower center", ncols=6)
    _draw_costs(figure, panels.flat[:3], found, labels)
    return figure


def cover(rows: Sequence[dict[str, Any]]) -> drawing.Figure:
    """Perplexity by seconds and by parameters alone, of the arms that were timed.

    Of all arms, where none was. Every point has its arm's name, or, of many points,
    those on the line alone: all others have their head's color.
    """
    found = sorted(report.points(rows), key=lambda point: -point.perplexity)
    found = [point for point in found if point.mean("seconds") > 0] or found
    figure = drawing.Figure(figsize=(9, 3.9))
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    many = len(found) > _NAMED
    if many:
        _name_heads(figure, found)
    labels = {point.arm: point.arm for point in found}
    _draw_costs(figure, panels, found, labels, front_alone=many)
    return figure


def by_setting(rows: Sequence[dict[str, Any]], field: str) -> drawing.Figure | None:
    """Perplexity by a field of `Setting`; None if no arm has had several values."""
    tried = report.by_setting(rows, field)
    if not tried:
        return None
    found = {point.arm: point for point in report.points(rows)}
    figure = drawing.Figure(figsize=(7, 4))
    axes = figure.subplots()
    values = sorted(set().union(*tried.values()))
    markers: dict[str, Iterator[str]] = {}
    for arm, perplexity in tried.items():
        color = _color(found[arm])
        # Arms of one head have one color, and markers of their own.
        marker = next(markers.setdefault(color, itertools.cycle("os^Dv")))
        # A thin line alone over values that others have had and this arm has not.
        axes.plot(list(perplexity), list(perplexity.values()), ":", color=color, lw=1)
        axes.plot(
            values,
            [perplexity.get(value, math.nan) for value in values],
            "--" if arm.startswith(f"{SOFTMAX}-") else "-",
            marker=marker,
            color=color,
            label=arm,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set(xlabel=report.SETTINGS[field], ylabel="test perplexity")
    drawing.label(axes)
    return figure


def _labels(found):
    """What is written beside the points: the arms, or numbers if there are many."""
    numbered = len(found) > _NAMED
    return {
        point.arm: str(number) if numbered else point.arm
        for number, point in enumerate(found, 1)
    }


def _legend(figure, found, labels, place, **columns):
    """What the numbers mean, if there are any."""
    numbered = [point for point in found if labels[point.arm] != point.arm]
    if numbered:
        handles = [
            _dot(_color(point), f"{labels[point.arm]}  {point.arm}")
            for point in numbered
        ]
        where = {"loc": f"outside {place}", "fontsize": 9}
        figure.legend(handles=handles, **where, **columns)


def _name_heads(figure, found):
    """Which color is which head's."""
    heads = {_head(point): _color(point) for point in found}
    dots = [_dot(color, head) for head, color in heads.items()]
    place = "outside lower center"
    figure.legend(handles=dots, loc=place, ncols=len(dots), fontsize=9)


def _draw_costs(figure, panels, found, labels, front_alone=False):
    """The points in a panel for each cost; the names of all or of the line's alone."""
    costs = dict(zip(panels, _COSTS.items(), strict=False))
    for axes, (title, (field, unit)) in costs.items():
        axes.set(xlabel=title, ylabel="test perplexity", title=f"By {title}")
        if not axes.get_subplotspec().is_first_col():
            axes.set_ylabel("")
        _scatter(axes, found, field, unit)
    # Sizes of texts are known only once everything else has its place.
    figure.draw_without_rendering()
    names = {
        point: f"{labels[point.arm]} ({point.perplexity:.1f})"
        if point.perplexity > _edge(found)
        else labels[point.arm]
        for point in found
    }
    for axes, (_, (field, unit)) in costs.items():
        located = _located(found, field, unit)
        front = _front(_shown(located, found))
        points = [
            (place, names[point], _color(point))
            for point, place in located.items()
            if not front_alone or place in front or point.perplexity > _edge(found)
        ]
        name_points(axes, points, front, list(located.values()))


def _scatter(axes, found, field, unit):
    located = _located(found, field, unit)
    edge = _edge(found)
    for point, (x, y) in located.items():
        marker = "^" if point.perplexity > edge else "o"
        axes.plot(x, y, marker, color=_color(point), markersize=6)
        seeds = [min(run["test_perplexity"], edge) for run in point.runs]
        axes.vlines(x, min(seeds), max(seeds), color=_color(point), lw=1)
    if not located:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
        return
    if front := _front(_shown(located, found)):
        line = {"where": "post", "color": drawing.GRAY, "lw": 1, "zorder": 1}
        axes.step(*zip(*front, strict=True), **line)
    axes.set_xscale("log")
    axes.margins(x=0.2, y=0.12)
    # At least a factor of two, or costs that hardly differ would look far apart.
    low, high = axes.get_xlim()
    spread = math.sqrt(max(1.0, 2 * low / high))
    axes.set_xlim(low / spread, high * spread)
    # Near enough to each other for a factor of two, and apart over several.
    between = (1.25, 1.5) if high / low < 4 else (1.5,)
    ticks = matplotlib.ticker.LogLocator(subs=(1, *between, 2, 3, 5, 7))
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_minor_formatter("")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.4g}")
    axes.tick_params(axis="x", which="both", labelsize=8, length=3, pad=4)


def _frequencies(axes, found, labels):
    axes.set(
        xlabel="decile of the training tokens, most frequent words first",
        ylabel="test perplexity over the softmax's",
        title="By word frequency",
    )
    softmax = [point for point in found if point.arm == SOFTMAX]
    if not softmax:
        axes.text(0.5, 0.5, "no softmax", ha="center", transform=axes.transAxes)
        return
    base_N = _losses(softmax[0])
    ends = []
    for point in found:
        ratio_N = np.exp(_losses(point) - base_N)
        places = np.arange(1, len(ratio_N) + 1)
        axes.plot(places, ratio_N, color=_color(point), lw=1, marker=".")
        finite = np.flatnonzero(np.isfinite(ratio_N))
        if len(finite):
            ends.append((min(ratio_N[finite[-1]], _HIGHEST_RATIO), point))
    axes.set_xticks(places)
    axes.set_xlim(0.8, len(places) + 2.2)
    # Labels at the right, each at least a line above the one below.
    ends.sort(key=lambda end: end[0])
    low, high = axes.get_ylim()
    high = min(high, _HIGHEST_RATIO)
    gap, heights = (high - low) / 34, []
    for ratio, _ in ends:
        heights.append(max([ratio, *(height + gap for height in heights[-1:])]))
    above = np.mean(heights) - np.mean([ratio for ratio, _ in ends]) if ends else 0.0
    for (ratio, point), height in zip(ends, heights, strict=True):
        axes.annotate(
            labels[point.arm],
            (len(places), ratio),
            (len(places) + 0.4, height - above),
            va="center",
            fontsize=8,
            color=_color(point),
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": drawing.GRAY},
        )
    top, bottom = max([high, *heights]), min([low, *heights[:1]]) - above
    axes.set_ylim(min(low, bottom - gap), max(high, top - above + gap))


def name_points(
    axes: matplotlib.axes.Axes,
    points: Sequence[tuple[Place, str, str]],
    steps: Sequence[Place] = (),
    unnamed: Sequence[Place] = (),
) -> None:
    """Write a name beside each point, where no other name, no point and no line is.

    To be called when everything else has its place (`draw_without_rendering`).

    Args:
        axes: where the points are.
        points: place, name and color of each.
        steps: places that a line joins, to the right and then down.
        unnamed: of points that have no name and are not to be covered.
    """
    scale = axes.figure.dpi / 72
    pixels = [tuple(axes.transData.transform(place)) for place, *_ in points]
    dots = [*pixels, *(tuple(axes.transData.transform(place)) for place in unnamed)]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    corners = [tuple(axes.transData.transform(place)) for place in steps]
    for (x, y), (right, low) in itertools.pairwise(corners):
        taken += [(x, y, right, y), (right, low, right, y)]
    frame = axes.get_window_extent()
    for (x, y), (place, name, color) in sorted(
        zip(pixels, points, strict=True), key=lambda pair: -pair[0][1]
    ):
        text = axes.annotate(name, place, fontsize=8, color=color)
        box = text.get_window_extent()
        width, height = box.width, box.height
        left, low = _place(x, y, width, height, taken, frame)
        taken.append((left, low, left + width, low + height))
        text.set(position=((left - x) / scale, (low - y) / scale))
        text.set_anncoords("offset points")
        if math.hypot(left + width / 2 - x, low + height / 2 - y) > width / 2 + 24:
            axes.annotate(
                "",
                place,
                ((left + width / 2 - x) / scale, (low + height / 2 - y) / scale),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "lw": 0.4, "shrinkA": 5, "shrinkB": 2},
            )


def _place(x, y, width, height, taken, frame):
    """The free place of a box that is nearest to a point, or the first if none is."""
    places = []
    for distance in (8, 14, 24, 36, 50, 66):
        for angle in _ANGLES:
            left = x + math.cos(angle) * (distance + width / 2) - width / 2
            low = y + math.sin(angle) * (distance + height / 2) - height / 2
            places.append((left, low))
    for left, low in places:
        box = (left, low, left + width, low + height)
        inside = box[0] > frame.x0 and box[2] < frame.x1
        inside = inside and box[1] > frame.y0 and box[3] < frame.y1
        if inside and not any(_overlap(box, other) for other in taken):
            return left, low
    return places[0]


def _overlap(box, other):
    apart = box[2] < other[0] or other[2] < box[0]
    return not (apart or box[3] < other[1] or other[3] < box[1])


def _edge(found):
    """The highest perplexity that is shown."""
    runs = [run for point in found if point.arm == SOFTMAX for run in point.runs]
    highest = max((run["test_perplexity"] for run in runs), default=math.inf)
    return _HIGHEST * highest


def _located(found, field, unit):
    means, edge = {point: point.mean(field) for point in found}, _edge(found)
    return {
        point: (mean * unit, min(point.perplexity, edge))
        for point, mean in means.items()
        if not math.isnan(mean)
    }


def _shown(located, found):
    """The places of the points that are where their perplexity is."""
    edge = _edge(found)
    return [place for point, place in located.items() if point.perplexity <= edge]


def _front(places):
    """Places with no other that is as low and as far to the left."""
    front, lowest = [], math.inf
    for x, y in sorted(places):
        if y < lowest:
            front.append((x, y))
            lowest = y
    return front


def _losses(point):
    """Test loss by decile, mean over the seeds; NaN where there is no token."""
    by_run = [[row["loss"] for row in run["deciles"]] for run in point.runs]
    return np.mean(np.array(by_run, float), axis=0)


def _dot(color, label):
    return Line2D([], [], marker="o", linestyle="", color=color, label=label)


def _head(point):
    """The head's name; a mixture of one is a softmax behind a projection."""
    one = point.arm.startswith(SOFTMAX)
    return SOFTMAX if one else point.head.partition("(")[0]


def _color(point):
    return drawing.HEADS.get(_head(point), drawing.GRAY)
