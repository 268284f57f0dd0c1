"""The rows of a retrofit as pictures."""

import itertools
from collections.abc import Sequence

import matplotlib.backends.backend_agg
import matplotlib.ticker
import numpy as np

from softbottle import drawing
from softbottle.experiments.frontier.plot import name_points
from softbottle.experiments.retrofit.arms import OWN, SOFTMAX
from softbottle.experiments.retrofit.report import Point

# Titles; the field of a row and the unit that it is drawn in.
_COSTS = {
    "parameters, millions": ("parameters", 1e-6),
    "table in bfloat16, MB": ("table_bytes", 1e-6),
    "Mflop per token": ("flop", 1e-6),
}
_STYLES = ("-", "--", ":", "-.")


def costs(found: Sequence[Point]) -> drawing.Figure:
    """Loss and KL by what a head costs, where that differs between them.

    Softmaxes of all ranks are a dashed line. Where there are several widths of tables,
    every other arm is a line as well.
    """
    shown = {
        title: (cost, unit)
        for title, (cost, unit) in _COSTS.items()
        if len({point.mean(cost) for point in found}) > 1
    } or _COSTS
    figure = drawing.Figure(figsize=(5 * len(shown), 9))
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(shown), squeeze=False)
    drawn = []
    several = len({point.asked for point in found if point.arm != OWN}) > 1
    own = [point.mean("loss") for point in found if point.arm == OWN]
    kinds = {"loss": "held-out loss minus own, nats", "kl": "KL to the own head, nats"}
    for row, (field, name) in zip(panels, kinds.items(), strict=True):
        base = own[0] if own and field == "loss" else 0.0
        for axes, (title, (cost, unit)) in zip(row, shown.items(), strict=True):
            places = [(p.mean(cost) * unit, p.mean(field) - base) for p in found]
            _scatter(axes, found, places)
            if several:
                _lines(axes, found, places)
            axes.set(xlabel=title, ylabel=name if axes is row[0] else "")
            drawn.append((axes, places))
    if several:
        panels[0, 0].legend(fontsize=drawing.SMALL)
        return figure
    # Sizes of texts are known only once everything else has its place.
    figure.draw_without_rendering()
    for axes, places in drawn:
        named = zip(places, map(_label, found), map(_color, found), strict=True)
        name_points(axes, [*named])
    return figure


def frequencies(found: Sequence[Point]) -> drawing.Figure:
    """Loss less the own head's by the frequency of the word; one width of tables."""
    figure = drawing.Figure(figsize=(9, 5))
    axes = figure.subplots()
    axes.set(
        xlabel="decile of the training tokens, most frequent words first",
        ylabel="held-out loss minus own, nats",
    )
    own = [point for point in found if point.arm == OWN]
    others = [point for point in found if point.arm != OWN]
    if not own or not others:
        axes.text(0.5, 0.5, "nothing to compare", ha="center")
        return figure
    base_N = _deciles(own[0])
    styles: dict[str, itertools.cycle[str]] = {}
    for point in others:
        if point.asked == others[0].asked:
            color = _color(point)
            style = next(styles.setdefault(color, itertools.cycle(_STYLES)))
            gap_N = _deciles(point) - base_N
            places = np.arange(1, len(gap_N) + 1)
            axes.plot(
                places, gap_N, style, color=color, marker=".", label=_label(point)
            )
    axes.axhline(0, color=drawing.GRAY, lw=0.6)
    drawing.label(axes)
    return figure


def _scatter(axes, found, places):
    # The own head is where softmaxes end that are to give its distribution back.
    distilled = found[-1].runs[0]["objective"] == "distill"
    ranks = (SOFTMAX, OWN) if distilled else (SOFTMAX,)
    line = sorted(
        place
        for point, place in zip(found, places, strict=True)
        if point.arm.startswith(ranks)
    )
    if len(line) > 1:
        line = zip(*line, strict=True)
        settings = {"color": drawing.BLACK, "lw": 1, "zorder": 1}
        axes.plot(*line, "--", label=f"{SOFTMAX} of any rank", **settings)
    for point, place in zip(found, places, strict=True):
        axes.plot(*place, "o", color=_color(point), markersize=6)
    axes.set_xscale("log")
    axes.margins(0.1)
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:.4g}")
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def _lines(axes, found, places):
    """A line through the widths of every arm but softmaxes, by its name."""
    styles: dict[str, itertools.cycle[str]] = {}
    by_arm: dict[str, list[tuple[float, float]]] = {}
    for point, place in zip(found, places, strict=True):
        if not point.arm.startswith((SOFTMAX, OWN)):
            by_arm.setdefault(point.arm, []).append(place)
    for arm, line in by_arm.items():
        color = _color_of(arm)
        style = next(styles.setdefault(color, itertools.cycle(_STYLES)))
        axes.plot(*zip(*sorted(line), strict=True), style, color=color, label=arm)


def _label(point):
    return point.arm if point.asked is None else f"{point.arm} {point.width}"


def _deciles(point):
    """Loss by decile, mean over the seeds; NaN where there is no token."""
    runs = [[part["loss"] for part in row["deciles"]] for row in point.runs]
    return np.mean(np.array(runs, float), axis=0)


def _color(point):
    return _color_of(point.arm)


def _color_of(arm):
    name = SOFTMAX if arm == OWN else arm.partition("-")[0]
    return drawing.HEADS.get(name, drawing.GRAY)
