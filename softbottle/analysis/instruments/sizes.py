"""Models of several sizes on one text: loss by parameters, rank by width.

Godey et al. fit a scaling law to the larger models of a family and see the small ones
fall behind it. Here the law is the models' own wherever there are enough of them:

    L(N) = A / N^alpha + C

with all three constants fitted to the larger half, four or more, and the gap of every
smaller model taken from it. With fewer models, of runs whose training tokens are known,
A and alpha alone are fitted and the rest is given (scaling.py); else there is no law.
Losses are compared between models of one architecture that read the same tokens.

Axes: M models.
"""

import functools
import hashlib
import operator
from typing import NamedTuple

import numpy as np

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, joined, present
from softbottle.analysis.instruments import power_law, rank, saturation, scaling
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "The loss of each model beside its number of parameters, and the rank of its "
    "log-probabilities beside its width.",
    "A small model whose loss lies above the law of the larger ones, and whose rank is "
    "at its bound, is one that its output layer may hold back.",
    "Scaling laws and gaps",
)
_ALIKE = 0.05  # by which the tokens that models were trained on may differ


class Size(NamedTuple):
    """A model as a point of its family.

    Attributes:
        parameters: how many it has.
        width: of its output table.
        trained: tokens that it was trained on, or None.
        ranks: of its log-probabilities, with its loss.
        words: tells the tokens that it was read on from others.
        family: of which it is a size.
    """

    parameters: int
    width: int
    trained: int | None
    ranks: rank.HeadRanks
    words: str
    family: str = ""


class Fit(NamedTuple):
    """A law, and how the models lie about it.

    Attributes:
        sentence: the law, and which of its constants were given.
        gaps: by model, the share by which it lies above.
        within: by model, 95% intervals of the gaps of those it was not fitted to.
        line: sizes and losses of the law, to be drawn.
        fitted: the models that it was fitted to.
    """

    sentence: str
    gaps: dict[str, float]
    within: dict[str, tuple[float, float]]
    line: tuple[np.ndarray, np.ndarray]
    fitted: list[str]


def of_capture(capture: Capture, settings: Settings, ranks: rank.HeadRanks) -> Size:
    """The size of a model, with what was measured of its log-probabilities."""
    del settings
    labels_T = joined(present("tokens", capture.tokens)).labels_T
    known = b"" if labels_T is None else np.asarray(labels_T, np.int64).tobytes()
    return Size(
        present("parameters", capture.parameters),
        present("table_VE", capture.table_VE).shape[1],
        capture.trained,
        ranks,
        hashlib.sha256(known).hexdigest(),
        capture.family,
    )


def law(models: dict[str, Size]) -> Fit | str:
    """The law of models that read the same tokens, or why there is none."""
    sizes = len({size.parameters for size in models.values()})
    tokens = [size.trained for size in models.values()]
    known = [count for count in tokens if count is not None]
    alike = len(known) < len(tokens) or max(known) <= (1 + _ALIKE) * min(known)
    least = power_law.OWN + 1
    if alike and sizes >= least:
        return _own(models, _largest(models, max(power_law.OWN, (sizes + 1) // 2)))
    none = (
        f"There is no law: one of their own needs {least} sizes trained on one text, "
        f"here {'is' if sizes == 1 else 'are'} {sizes}"
    )
    if sizes < 3 or len(known) < len(tokens):
        return f"{none}."
    if not _holds(models):
        return (
            f"{none}, and the published constants (Hoffmann et al., 2022) give more "
            "than these losses for the text alone."
        )
    return _given(models, _largest(models, max(2, sizes // 2)))


def _largest(models, count):
    """The names of all models of so many sizes, the largest, in their order."""
    least = sorted({size.parameters for size in models.values()})[-count]
    by_size = sorted(models, key=lambda name: models[name].parameters)
    return [name for name in by_size if models[name].parameters >= least]


def section(models: dict[str, Size]) -> report.Section:
    """The models in the order of their sizes, with the law of those that compare."""
    models = dict(sorted(models.items(), key=lambda item: item[1].parameters))
    groups: dict[tuple[str, str], dict[str, Size]] = {}
    for name, size in models.items():
        if size.ranks.loss is not None:
            groups.setdefault((size.words, size.family), {})[name] = size
    several = {key: group for key, group in groups.items() if len(group) > 1}
    lines, fits = [], {}
    for key, group in several.items():
        found = law(group)
        which = f"{', '.join(group)}: " if len(groups) > 1 else ""
        lines.append(f"{which}{found if isinstance(found, str) else found.sentence}")
        if not isinstance(found, str):
            fits[key] = found
    if len(groups) > 1:
        lines.append(
            "A law is of models of one architecture that read the same tokens; between "
            "others losses are not comparable, or not by size."
        )
    main = max(groups, key=lambda key: (key in fits, len(groups[key])), default=None)
    shown = {} if main is None else groups[main]
    if not several:
        # None comes before the others.
        shown = functools.reduce(operator.or_, groups.values(), {})
    fit = None if main is None else fits.get(main)
    remarks = " ".join(lines)
    lines += [_told(found.gaps, found.within) for found in fits.values()]
    lines += [f"{name}: {_bottleneck(size)}." for name, size in models.items()]
    gaps = {name: gap for fit in fits.values() for name, gap in fit.gaps.items()}
    within = {name: ends for fit in fits.values() for name, ends in fit.within.items()}
    numbers = {
        name: {
            "parameters": size.parameters,
            "width": size.width,
            "trained": size.trained,
            "loss": size.ranks.loss,
            "rank": size.ranks.rank,
            "bound": size.ranks.bound,
        }
        for name, size in models.items()
    }
    if fit is not None:
        numbers["law"] = {k: v for k, v in fit._asdict().items() if k != "line"}
    others = sum(map(len, groups.values())) - len(shown)
    figures = [_draw_losses(shown, fit, others)] if shown else []
    return report.Section(
        "Models by size",
        " ".join(lines),
        [*figures, _draw_ranks(models)],
        numbers,
        tables=[_table(models, gaps, within)],
        remarks=remarks,
        key={name: {"gap to the law": f"{gap:+.1%}"} for name, gap in gaps.items()},
        verdicts={
            name: f"does {gaps[name]:.1%} worse than the law of the larger ones"
            for name, (low, _) in within.items()
            if low > 0
        },
    )


def _table(models, gaps, within):
    rows = []
    for name, size in models.items():
        gap = "–"
        if name in gaps:
            gap = f"{gaps[name]:+.1%}{_interval(within.get(name))}"
        rows.append(
            (
                *(name, f"{size.parameters:,}", f"{size.width:,}"),
                "–" if size.trained is None else f"{size.trained:,}",
                "–" if size.ranks.loss is None else f"{size.ranks.loss:.3f}",
                *(gap, f"{size.ranks.rank:,}", f"{size.ranks.bound:,}"),
                f"{size.ranks.ranks.effective[rank.LOSSES[0]]:,}",
            )
        )
    heads = ("model", "parameters", "width", "trained on (tokens)", "loss (nats)")
    return report.Table(
        (
            *heads,
            "gap to the law",
            "rank of log P",
            "softmax's bound",
            "effective rank",
        ),
        rows,
    )


def _own(models, fitted):
    """All constants from the models themselves."""
    chosen = _arrays(models, fitted)
    found = power_law.fit(*chosen)
    names = list(models)
    gap_M = found.gap(*_arrays(models, names))
    others = [name for name in names if name not in fitted]
    bounds = power_law.gaps(found, chosen, _arrays(models, others))
    sentence = (
        f"The law is {found.a:.4g} / N^{found.alpha:.3f} + {found.c:.3f}, of these "
        f"models' own: all three constants are fitted, to {', '.join(fitted)}, and "
        "none is given."
    )
    within = dict(zip(others, bounds, strict=True))
    gaps = dict(zip(names, map(float, gap_M), strict=True))
    return Fit(
        sentence,
        gaps,
        within,
        _line(models, found.loss),
        list(fitted),
    )


def _given(models, fitted):
    """The first factor and its exponent from the models, the rest from Hoffmann."""
    names = list(models)
    trained = {name: float(size.trained) for name, size in models.items()}
    sizes, losses = _arrays(models, fitted)
    found = scaling.fit(sizes, np.array([trained[name] for name in fitted]), losses)
    tokens_M = np.array([trained[name] for name in names])
    sizes, losses = _arrays(models, names)
    gaps = dict(zip(names, map(float, found.gap(sizes, tokens_M, losses)), strict=True))
    sentence = (
        f"The law is {found.a:.4g} / N^{found.alpha:.3f} + {found.b:.4g} / "
        f"T^{found.beta:.2f} + {found.e:.2f}. Its first factor and exponent are fitted "
        f"to {', '.join(fitted)}; the other three constants are given (Hoffmann et "
        f"al., 2022), since these models are too few, or trained on too different "
        f"texts, for a law of their own."
    )
    middle = float(np.median(tokens_M))
    line = _line(models, lambda sizes: found.loss(sizes, np.full(len(sizes), middle)))
    return Fit(sentence, gaps, {}, line, list(fitted))


def _holds(models):
    """Whether what the given constants say of the text leaves room for the size."""
    law = scaling.PYTHIA
    return all(
        law.b * size.trained**-law.beta + law.e < size.ranks.loss
        for size in models.values()
    )


def _told(gaps, within):
    parts = []
    for name, gap in gaps.items():
        parts.append(f"{name} {gap:+.1%}{_interval(within.get(name))}")
    return f"Above their law (+) or below it (-): {', '.join(parts)}."


def _interval(ends):
    """An interval behind a gap; too few models for one that says anything say so."""
    if ends is None:
        return ""
    low, high = ends
    if high - low > 1:
        return " (too few models for an interval)"
    return f" ({low:+.1%} to {high:+.1%})"


def _arrays(models, names):
    sizes = np.array([models[name].parameters for name in names], float)
    return sizes, np.array([models[name].ranks.loss for name in names], float)


def _line(models, loss):
    sizes = [size.parameters for size in models.values()]
    grid = np.geomspace(min(sizes), max(sizes), 60)
    return grid, loss(grid)


def _bottleneck(size):
    ranks = size.ranks
    effective = ranks.ranks.effective[rank.LOSSES[0]]
    return (
        f"{size.parameters:,} parameters, width {size.width:,}, rank {ranks.rank:,} "
        f"where a softmax stops at {ranks.bound:,}, {effective:,} of which hold "
        f"{1 - rank.LOSSES[0]:.1%} of it"
    )


def _draw_losses(models, fit, others):
    """The losses of some models; others there are of other texts or architectures."""
    figure = drawing.Figure(figsize=saturation.PANEL)
    axes = figure.subplots()
    names = list(models)
    sizes, losses = _arrays(models, names)
    more = f" {others} of other texts or architectures are not shown." if others else ""
    alike = len({(size.words, size.family) for size in models.values()}) == 1
    if len(names) < 3 or not alike:
        # Two points are an empty plane, and a plane compares what is in it.
        drawing.bars(axes, dict(zip(names, losses, strict=True)), "{:.3f}")
        axes.set(xlabel="loss (nats per token)")
        reading = "The loss of each model."
        if not alike:
            reading += " No two of them have one text and one architecture."
        return report.Figure("sizes-loss", figure, reading + more)
    axes.plot(sizes, losses, "o", color=drawing.BLUE, linestyle="none")
    drawing.tag(axes, sizes, losses, names)
    reading = "Each dot is a model. Further right is larger, lower is better."
    if fit is not None:
        axes.plot(*fit.line, color=drawing.GRAY, linestyle="--")
        reading += " Dashed: the law; a dot above it does worse than its size explains."
    axes.set(xlabel="parameters", ylabel="loss (nats per token)", xscale="log")
    return report.Figure("sizes-loss", figure, reading + more)


def _draw_ranks(models):
    figure = drawing.Figure(figsize=saturation.PANEL)
    axes = figure.subplots()
    shares = {
        name: min(size.ranks.rank / size.ranks.bound, 10)
        for name, size in models.items()
    }
    if len(models) < 3:
        drawing.bars(axes, shares, "{:.2f}")
        axes.axvline(1, color=drawing.GRAY, linestyle="--", lw=1)
        axes.set(xlabel="rank of log P over the bound of a softmax of its width")
        reading = "At 1 (dashed) a model uses all that its softmax can."
        return report.Figure("sizes-rank", figure, reading)
    widths = np.array([size.width for size in models.values()])
    found = np.array([size.ranks.rank for size in models.values()])
    bounds = sorted((size.width, size.ranks.bound) for size in models.values())
    effective = [size.ranks.ranks.effective[rank.LOSSES[0]] for size in models.values()]
    axes.loglog(*zip(*bounds, strict=True), color=drawing.GRAY, linestyle="--")
    axes.loglog(widths, found, "o", color=drawing.BLUE, label="rank")
    axes.loglog(widths, effective, "s", color=drawing.VERMILION, label="effective rank")
    axes.set(xlabel="width", ylabel="rank of log P")
    drawing.plain(axes.xaxis)
    drawing.plain(axes.yaxis)
    axes.legend(fontsize=drawing.SMALL, frameon=False)
    reading = (
        "Dots: the rank of each model's log-probabilities; dashed: where a softmax of "
        "that width stops, so that a dot on it is at its bottleneck. Squares: how many "
        f"directions hold {1 - rank.LOSSES[0]:.1%} of the sum of squares."
    )
    return report.Figure("sizes-rank", figure, reading)
