"""Perplexity and rank by the components of a mixture, and trainings side by side."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from softbottle import drawing
from softbottle.experiments.reproduce import published as published_lib
from softbottle.experiments.reproduce.plan import Plan, Unit
from softbottle.experiments.reproduce.tables import BY_COMPONENTS
from softbottle.training import metrics

Row = dict[str, Any]
# (components, number)
Points = Sequence[tuple[int, float]]
# Lines of a table that are drawn, and the titles of their panels.
_TITLES = {
    "test": "test perplexity, not finetuned",
    "rank": "rank of log P on the test text",
}
_NAMED = 12  # lines of a panel that are named at their ends
_STEEP = 0.1  # share of a training that does not have to be seen
_LOOKS = ((drawing.PURPLE, "s--"), (drawing.ORANGE, "^--"), (drawing.SKY, "d--"))


class Panel(NamedTuple):
    """What one panel shows.

    Attributes:
        title: what the numbers are.
        ours: points of our mixtures, one per run, by the name of their line.
        published: points by source.
        levels: our means of other heads, by head.
    """

    title: str
    ours: Mapping[str, Points]
    published: Mapping[str, Points]
    levels: Mapping[str, float]


def panels(plan: Plan, rows: Mapping[Unit, Row]) -> list[Panel]:
    """Of every line for which there are several numbers of components.

    Runs that were cut short are left out. Mixtures of another learning rate have a line
    of their own.
    """
    found = []
    for line in plan.table.lines:
        if line.key not in _TITLES:
            continue
        ours, levels = _measured(plan, rows, line)
        if len({count for count, _ in itertools.chain(*ours.values())}) > 1:
            title, scale = _TITLES[line.key], plan.grid.scale
            if scale != 1:
                title += f"\nours at {scale:g} of the epochs"
            found.append(Panel(title, ours, _published(plan, line), levels))
    return found


def draw(shown: Sequence[Panel]) -> drawing.Figure:
    """Panels side by side; a line goes through the means of a number of components."""
    figure = drawing.Figure(figsize=(1.0 + 5.2 * len(shown), 4.2))
    places = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, panel in zip(places, shown, strict=True):
        _fill(axes, panel)
    return figure


def curves(plan: Plan, rows: Mapping[Unit, Row]) -> drawing.Figure | None:
    """Validation perplexity along the trainings, one panel for each of their stages.

    None where no training has several validations. Those that are not ended are there
    as far as they came. The axis ends where the best run was after a tenth, or at the
    highest end of a run.
    """
    by_stage: dict[str, dict[Unit, Row]] = {}
    for unit in plan.units:
        row = _training(plan, unit, rows.get(unit, {}))
        if len(_perplexities(row)) > 1:
            by_stage.setdefault(unit.stage, {})[unit] = row
    if not by_stage:
        return None
    figure = drawing.Figure(figsize=(1.0 + 5.2 * len(by_stage), 4.2))
    places = figure.subplots(1, len(by_stage), squeeze=False)[0]
    for axes, (stage, trainings) in zip(places, by_stage.items(), strict=True):
        _trainings(axes, trainings)
        axes.set_title(stage)
    return figure


def _training(plan, unit, row):
    """A row; of a training that is begun, what its folder tells so far."""
    if "begun" not in row:
        return row
    recorded = metrics.read(plan.folder(unit))
    lines = [line for line in recorded if line.get("valid_loss") is not None]
    row = row | {"validations": [(line["step"], line["valid_loss"]) for line in lines]}
    if lines:
        row |= {"steps": lines[-1]["step"], "epochs": lines[-1]["epoch"]}
    return row


def _trainings(axes, rows):
    """A line for each run of a stage, named by head, and seed where there are more."""
    heads = [unit.head for unit in rows]
    epochs = all(row["epochs"] for row in rows.values())
    known = all(head in drawing.HEADS for head in heads)
    tenths, ends, lowest = [], [], []
    for unit, row in rows.items():
        steps, perplexities = zip(*_perplexities(row), strict=True)
        scale = row["epochs"] / row["steps"] if epochs else 1e-3
        name = unit.head if heads.count(unit.head) == 1 else unit.run
        name += ", not ended" if "begun" in row else ""
        axes.plot(
            [step * scale for step in steps],
            perplexities,
            label=f"{name}: {perplexities[-1]:.2f}",
            color=drawing.HEADS[unit.head] if known else None,
            lw=1.2,
        )
        tenths.append(perplexities[bisect.bisect_left(steps, steps[-1] * _STEEP)])
        ends.append(perplexities[-1])
        lowest.append(min(perplexities))
    limits = min(lowest) / 1.01, max(min(tenths), *ends) * 1.01
    axes.set(xlabel="epoch" if epochs else "thousand steps", yscale="log")
    axes.set(ylabel="validation perplexity", ylim=limits)
    drawing.plain(axes.yaxis)
    drawing.label(axes, most=_NAMED)


def _perplexities(row):
    """Step and perplexity of the validations whose perplexity is finite."""
    found = ((s, metrics.perplexity(loss)) for s, loss in row.get("validations", ()))
    return [(step, value) for step, value in found if math.isfinite(value)]


def _measured(plan, rows, line):
    """Points of our mixtures by the name of their line, and means of other heads."""
    by_rate, levels = {}, {}
    for head in plan.heads:
        units = [u for u in plan.units if (u.head, u.stage) == (head, line.stage)]
        found = [rows[unit] for unit in units if line.field in rows.get(unit, {})]
        values = [row[line.field] for row in found if row.get("complete", True)]
        if not values:
            continue
        if head in BY_COMPONENTS:
            config = _config(plan, head)
            points = by_rate.setdefault(config.optim.learning_rate, [])
            points += [(config.head.components, value) for value in values]
        else:
            levels[head] = sum(values) / len(values)
    if len(by_rate) == 1:
        return {"ours": by_rate.popitem()[1]}, levels
    return {f"ours, rate {rate:g}": by_rate[rate] for rate in sorted(by_rate)}, levels


def _published(plan, line):
    """Points by source, of sources that have several."""
    found = {}
    for head in (head for head in plan.heads if head in BY_COMPONENTS):
        count = _config(plan, head).head.components
        for value, source in published_lib.find(plan.table.published, head, line.key):
            number = float(value.split()[0].replace(",", ""))
            found.setdefault(source, []).append((count, number))
    return {source: points for source, points in found.items() if len(points) > 1}


def _config(plan, head):
    """What a head is first trained with."""
    return plan.config(next(unit for unit in plan.units if unit.head == head))


def _fill(axes, panel):
    for name, points in panel.ours.items():
        axes.plot(*zip(*points, strict=True), "o", color=drawing.BLUE, markersize=4)
        axes.plot(*zip(*_means(points), strict=True), color=drawing.BLUE, label=name)
    for place, (source, points) in enumerate(panel.published.items()):
        (color, style), means = _LOOKS[place % len(_LOOKS)], _means(points)
        look = {"color": color, "markersize": 4, "lw": 1}
        name = source.split(" (")[0]
        axes.plot(*zip(*means, strict=True), style, label=name, **look)
    drawn = itertools.chain(*panel.ours.values(), *panel.published.values())
    counts = sorted({count for count, _ in drawn})
    for head, level in panel.levels.items():
        color = drawing.HEADS.get(head, drawing.GRAY)
        axes.plot((counts[0], counts[-1]), 2 * (level,), ":", color=color, label=head)
    axes.set_xscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("components of the mixture, K")
    axes.set_title(panel.title)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    drawing.label(axes, most=_NAMED)


def _means(points):
    """One point for each number of components, in their order."""
    values: dict[int, list[float]] = {}
    for count, value in points:
        values.setdefault(count, []).append(value)
    return [(count, sum(each) / len(each)) for count, each in sorted(values.items())]
