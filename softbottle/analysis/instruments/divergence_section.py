"""The section on two models: how their predictions differ, in words and figures.

What is measured, and by which formulas, is in divergence.py.

Axes: N deciles, the whole text last; M quantities; J numbers k of words.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from softbottle import drawing
from softbottle.analysis import bootstrap, report
from softbottle.analysis.capture import Capture, present
from softbottle.analysis.instruments import divergence
from softbottle.analysis.instruments.divergence import Comparison
from softbottle.analysis.settings import Settings
from softbottle.data import frequency

ABOUT = report.About(
    "Two models read the same tokens, and at each position the distributions that "
    "they give of the next one are compared: how far apart, which words come first, "
    "and what each loses.",
    "Models of equal loss that agree seldom know different things, and an ensemble or "
    "a distillation has something to gain; where they differ by frequency says for "
    "which words a head pays.",
    "How far two models are apart",
)
_LOSS = "loss on the same tokens (nats)"
_PANEL = (5.0, 3.6)  # inches
_SHIFT = 0.15  # of lines in a panel, so that their intervals stand side by side
_SMALLEST = 1e-9  # nats that are drawn; less is rounding


def inspect(captures: Sequence[Capture], settings: Settings) -> report.Section:
    """The section on two captures.

    Raises:
        ValueError: if there are not two, and as `check`.
    """
    if len(captures) != 2:
        raise ValueError(f"two models are compared, not {len(captures)}.")
    a, b = captures
    positions = divergence.measure(a, b, settings.precision)
    text = a.text or b.text
    counted = positions.labels_T if text is None else text.ids
    decile_V = frequency.deciles(counted, len(present("table_VE", a.table_VE)))
    unknown = [model.name for model in captures if model.words is None]
    return section(a.name, b.name, divergence.compare(positions, decile_V), unknown)


def section(
    a: str, b: str, comparison: Comparison, unknown: Sequence[str] = ()
) -> report.Section:
    """Two models by their names: divergences, agreement and losses.

    Args:
        a: the name of the first.
        b: the name of the second.
        comparison: of their predictions.
        unknown: names of those whose words are not known.
    """
    count = len(comparison.positions.labels_T)
    forward, backward, variation, first, loss_a, loss_b, gap, correlation = map(
        comparison.whole,
        (
            *(divergence.FORWARD, divergence.BACKWARD, divergence.TV),
            *(divergence.FIRST, divergence.LOSS_A, divergence.LOSS_B),
            *(divergence.AHEAD, divergence.CORRELATION),
        ),
    )
    names = f"a is {a}, b is {b}; {count:,} positions."
    told = [bootstrap.described(count)]
    if unknown:
        told.append(
            f"The words of {' and '.join(unknown)} are not known: that both have one "
            "vocabulary was told from its size alone."
        )
    lines = [
        names,
        f"KL(a||b) is {forward.text()} nats and KL(b||a) {backward.text()}; the total "
        f"variation is {variation.text()}.",
        f"Both put the same word first at {first.text('.1%')} of the positions.",
        f"Per token a loses {loss_a.text()} nats and b {loss_b.text()}: "
        f"{_ahead(a, b, gap)}.",
        f"Token by token their losses correlate by {correlation.text('.2f')}.",
        *told,
    ]
    figures = [
        *_draw_deciles(a, b, comparison),
        _draw_losses(a, b, comparison.positions),
        _draw_spread(comparison.positions),
        _draw_sets(a, b, comparison),
    ]
    return report.Section(
        "Between two models",
        " ".join(lines),
        figures,
        _numbers(a, b, comparison),
        tables=[_table(comparison)],
        remarks=" ".join([names, *told]),
        key={a: {_LOSS: loss_a.text()}, b: {_LOSS: loss_b.text()}},
        verdicts={f"{a} and {b}": _verdict(a, b, comparison)},
    )


def _table(comparison):
    """Over the text, a quantity per row."""
    rows = []
    for name, unit, form in (
        (divergence.FORWARD, " (nats)", ".3f"),
        (divergence.BACKWARD, " (nats)", ".3f"),
        (divergence.JS, " (nats)", ".3f"),
        (divergence.TV, "", ".3f"),
        (divergence.FIRST, ", share of the positions", ".1%"),
        (divergence.LOSS_A, " (nats per token)", ".3f"),
        (divergence.LOSS_B, " (nats per token)", ".3f"),
        (divergence.AHEAD, " (nats per token)", "+.3f"),
        (divergence.CORRELATION, "", ".2f"),
    ):
        value, *ends = comparison.whole(name)
        interval = bootstrap.between(*ends, form).strip(" ()") or "–"
        rows.append((f"{name}{unit}", f"{value:{form}}", interval))
    return report.Table(("over the text", "value", "interval"), rows)


def _verdict(a, b, comparison):
    """Which model predicts better, and how far both agree."""
    gap = comparison.whole(divergence.AHEAD)
    first = comparison.whole(divergence.FIRST)
    agree = f"put the same word first at {first.text('.1%')} of the positions"
    if not _sure(gap):
        return (
            f"{agree}; their losses differ by {gap.text('+.3f')} nats per token, which "
            "cannot be told from chance"
        )
    better, lead = b, gap
    if gap.value < 0:
        better, lead = a, bootstrap.Estimate(-gap.value, -gap.high, -gap.low)
    return f"{agree}; {better} predicts better, by {lead.text()} nats per token"


def _ahead(a, b, gap):
    """Which of them is better, if that can be told."""
    difference = f"a less b is {gap.text('+.3f')}"
    if not _sure(gap):
        return f"{difference}, no difference that can be told from chance"
    return f"{difference}, so that {b if gap.value > 0 else a} is better"


def _sure(gap):
    """Whether the interval leaves 0 out."""
    return gap.low > 0 or gap.high < 0


def _draw_deciles(a, b, comparison):
    """Divergences, losses and agreement by frequency, a figure each."""
    many = divergence.OVERLAP.format(10)
    agreement = {
        divergence.FIRST: "same first\nword",
        divergence.CORRELATION: "losses,\ncorrelation",
    }
    if many in comparison.quantities:
        agreement[many] = "10 first words\nin common"
    apart = {
        divergence.FORWARD: divergence.FORWARD,
        divergence.BACKWARD: divergence.BACKWARD,
        divergence.JS: "JS",
    }
    whose = f"a is {a}, b is {b}."
    return [
        _draw_lines(comparison, "divergence", "divergence (nats)", apart, whose),
        _draw_lines(
            *(comparison, "losses", "loss of a less loss of b (nats)"),
            {divergence.AHEAD: None},
            f"{whose} Above zero b predicts these words better, below it a.",
        ),
        _draw_lines(comparison, "agreement", "agreement", agreement, whose),
    ]


def _draw_lines(comparison, name, title, lines, reading):
    """Quantities by decile, with their intervals."""
    figure = drawing.Figure(figsize=_PANEL)
    axes = figure.subplots()
    known_N = comparison.tokens_N[:-1] > 0
    place_N = np.arange(1, len(known_N) + 1)
    for shift, (quantity, label) in enumerate(lines.items()):
        at = comparison.quantities.index(quantity)
        value_N, low_N, high_N = (
            part_NM[:-1, at][known_N]
            for part_NM in (comparison.value_NM, comparison.low_NM, comparison.high_NM)
        )
        axes.errorbar(
            place_N[known_N] + _SHIFT * (shift - (len(lines) - 1) / 2),
            value_N,
            np.nan_to_num([value_N - low_N, high_N - value_N]),
            marker=".",
            capsize=2,
            linewidth=1,
            label=label,
        )
    axes.set_xticks(place_N)
    axes.set(xlabel="decile of the word's frequency", title=title)
    axes.set_xlim(0.5, len(place_N) + 0.5)
    if name == "losses":
        axes.axhline(0, color=drawing.GRAY, linewidth=1)
    else:
        drawing.label(axes)
    reading = (
        f"{reading} By how often the word that came occurs in the text, the most "
        "frequent first, a tenth of the tokens each; strokes: the intervals."
    )
    return report.Figure(f"compare-{name}-frequency", figure, reading)


def _draw_losses(a, b, positions):
    figure = drawing.Figure(figsize=_PANEL)
    axes = figure.subplots()
    most = float(max(positions.loss_a_T.max(), positions.loss_b_T.max()))
    drawn = axes.hexbin(
        positions.loss_a_T,
        positions.loss_b_T,
        gridsize=30,
        extent=(0, most, 0, most),
        bins="log",
        mincnt=1,
        cmap="Blues",
        vmin=0.3,
    )
    axes.plot([0, most], [0, most], color=drawing.GRAY, linewidth=1)
    axes.set(xlabel="loss of a (nats)", ylabel="loss of b (nats)")
    axes.set_title("tokens by both losses")
    figure.colorbar(drawn, ax=axes, label="tokens")
    reading = (
        f"a is {a}, b is {b}. On the line both lose the same, above it a predicts "
        "better."
    )
    return report.Figure("compare-losses", figure, reading)


def _draw_spread(positions):
    figure = drawing.Figure(figsize=_PANEL)
    axes = figure.subplots()
    share_T = np.arange(1, len(positions.labels_T) + 1) / len(positions.labels_T)
    for label, value_T in (
        ("KL(a||b)", positions.forward_T),
        ("KL(b||a)", positions.backward_T),
        ("JS", positions.shannon_T),
    ):
        axes.plot(np.sort(np.maximum(value_T, _SMALLEST)), share_T, label=label)
    axes.set(xscale="log", xlabel="nats", ylim=(0, 1))
    axes.set_title("share of the positions below")
    axes.legend(fontsize=drawing.SMALL, frameon=False, loc="upper left")
    reading = (
        "The share of the positions at which the two distributions are no farther "
        "apart than that."
    )
    return report.Figure("compare-divergences", figure, reading)


def _draw_sets(a, b, comparison):
    figure = drawing.Figure(figsize=_PANEL)
    axes = figure.subplots()
    counts_J = comparison.positions.counts_J
    for label, quantity in (
        ("k first words\nin common", divergence.OVERLAP),
        ("first of a among\nk first of b", divergence.A_IN_B),
        ("first of b among\nk first of a", divergence.B_IN_A),
    ):
        names = [divergence.FIRST if k == 1 else quantity.format(k) for k in counts_J]
        value_J, low_J, high_J = np.array([comparison.whole(name) for name in names]).T
        (line,) = axes.plot(counts_J, value_J, marker=".", label=label)
        axes.fill_between(counts_J, low_J, high_J, alpha=0.15, color=line.get_color())
    axes.set(xscale="log", xlabel="k", title="share of the positions, or of k words")
    axes.set_ylim(None, 1)
    axes.set_xticks(counts_J, [str(k) for k in counts_J])
    axes.tick_params(which="minor", bottom=False, labelbottom=False)
    drawing.label(axes)
    reading = (
        f"a is {a}, b is {b}. What the k words that each puts first have in common, "
        "and how often one's first word is among the other's k. Shaded: the intervals."
    )
    return report.Figure("compare-first-words", figure, reading)


def _numbers(a: str, b: str, comparison: Comparison) -> dict[str, Any]:
    whole = {name: comparison.whole(name) for name in comparison.quantities}
    return {
        "a": a,
        "b": b,
        "positions": len(comparison.positions.labels_T),
        **{name: estimate._asdict() for name, estimate in whole.items()},
        "by decile": {
            "tokens": comparison.tokens_N[:-1],
            **{
                name: {
                    "value": comparison.value_NM[:-1, at],
                    "low": comparison.low_NM[:-1, at],
                    "high": comparison.high_NM[:-1, at],
                }
                for at, name in enumerate(comparison.quantities)
            },
        },
    }
