"""What each head of each layer selects, in a model that reads a text.

The measures of `attention` on captured logits. A stretch of L tokens gives one row of
weights alpha per head: those of its last position, which sees all L, or in a layer of
sliding-window attention the last of them; such a layer is measured as one over the
tokens that it sees. A beginning-of-sequence token is one of the L. The tokens' vectors
are the states that enter the layer, scaled to length 1, the sphere of the theorem on
separability; stretches of text give further rows. Beside them stands

    spread = exp(-sum_i alpha_i log alpha_i) / L,

the share of the tokens that a head would read if it read some of them equally. What
other normalisers would make of the same logits, which were trained for softmax, is told
as a mean over all heads, and in full (`attention.limits`) for the heads of the middle
layer on the first stretch.

Axes: L layers, W stretches, H heads, S tokens of a stretch, N = W S; R rows, one per
head, or heads of all layers; M quantities; B draws of the bootstrap.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib.ticker
import numpy as np
from scipy import special, stats

from softbottle import drawing
from softbottle.analysis import bootstrap, report
from softbottle.analysis.capture import Capture, present
from softbottle.analysis.instruments import attention, normalizers
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "What the weights of each attention head select: how many tokens it reads, and "
    "whether these stand out from the rest.",
    "A head that spreads over most tokens averages them and finds none; past the "
    "number of tokens where a choice looks blind, larger weights single nothing out.",
    "What attention can tell apart",
)
_FEW = 2  # models up to which the limits of their middle layers are drawn
SELECTED = 5  # tokens that `inside` and `tightness` are about
_COMPARED = {
    "spread": "spread",
    "inside": f"share of {SELECTED} within reach",
    "largest": "largest weight",
}
PUBLISHED = 0.06  # share of the tokens that Mudarisov et al. find critical in GPT-2


class Heads(NamedTuple):
    """One number for each layer and head, averaged over stretches of text.

    Attributes:
        length: L, tokens of a stretch.
        spans_L: how many of them the last position of each layer sees.
        stretches: how many of them.
        inside_LH: share of the `SELECTED` largest no farther from their sum than the
            nearest token outside.
        tightness_LH: distance of the selected sum over its bound.
        largest_LH: the largest weight.
        spread_LH: from the head of this file.
        critical_L: the first of `attention.COUNTS` whose distances are not told from
            those of random sets over all rows of a layer; 0 where each is.
        interval_M2: both ends, over stretches, of the medians over layers and heads of
            "spread", "inside" and "largest".
        normalised: by normaliser, "spread", "inside" and "largest" of its weights,
            averaged over layers and heads, and with "_interval" both ends of each.
        limits: of the middle layer's heads on the first stretch.
    """

    length: int
    spans_L: np.ndarray
    stretches: int
    inside_LH: np.ndarray
    tightness_LH: np.ndarray
    largest_LH: np.ndarray
    spread_LH: np.ndarray
    critical_L: np.ndarray
    interval_M2: np.ndarray
    normalised: dict[str, dict[str, Any]]
    limits: attention.Limits


def measure(
    logits_LWHS: np.ndarray,
    states: Sequence[np.ndarray],
    seed: int = 0,
    spans_L: Sequence[int] | np.ndarray | None = None,
) -> Heads:
    """Measure the heads of every layer.

    Args:
        logits_LWHS: by layer, stretch and head, over the stretch's S tokens.
        states: for each layer what enters it, [W S, D], stretch after stretch.
        seed: of the random sets.
        spans_L: how many tokens the last position of each layer sees, the last ones;
            None for all.

    Raises:
        ValueError: if a layer sees `SELECTED` tokens or fewer, the shapes disagree or
            an entry is not finite.
    """
    logits_LWHS = normalizers.finite("logits", logits_LWHS)
    layers, stretches, _, length = logits_LWHS.shape
    rows = {len(layer_ND) for layer_ND in states}
    if len(states) != layers or rows != {stretches * length} or length <= SELECTED:
        raise ValueError(
            f"logits {logits_LWHS.shape} [layers, stretches, heads, tokens > "
            f"{SELECTED}] need as many layers of states, with a row per token; got "
            f"{[layer_ND.shape for layer_ND in states]}."
        )
    spans_L = np.full(layers, length) if spans_L is None else np.asarray(spans_L)
    if len(spans_L) != layers or spans_L.max() > length or spans_L.min() <= SELECTED:
        raise ValueError(
            f"each of {layers} layers must see more than {SELECTED} and at most "
            f"{length} tokens, got {spans_L.tolist()}."
        )
    logits = [
        logits_WHS[..., length - span :]
        for logits_WHS, span in zip(logits_LWHS, spans_L, strict=True)
    ]
    values = [
        _unit(layer_ND).reshape(stretches, length, -1)[:, length - span :]
        for layer_ND, span in zip(states, spans_L, strict=True)
    ]
    maps = {
        name: _maps([apply(logits_WHS) for logits_WHS in logits], values)
        for name, apply in normalizers.ALL.items()
    }
    critical = [
        _critical(
            list(zip(normalizers.softmax(logits_WHS), values_WSD, strict=True)), seed
        )
        for logits_WHS, values_WSD in zip(logits, values, strict=True)
    ]
    middle = layers // 2
    softmax = {key: map_LWH.mean(axis=1) for key, map_LWH in maps["softmax"].items()}
    medians = [_interval(maps["softmax"][key], np.median) for key in _COMPARED]
    return Heads(
        length,
        spans_L,
        stretches,
        softmax["inside"],
        softmax["tightness"],
        softmax["largest"],
        softmax["spread"],
        np.array(critical),
        np.array(medians),
        {name: _means(measured) for name, measured in maps.items()},
        attention.survey(logits[middle][0], values[middle][0]),
    )


def section(models: dict[str, Heads]) -> report.Section:
    """Models side by side: a map of layers and heads each, and critical numbers."""
    lines = [_sentence(name, heads) for name, heads in models.items()]
    remarks = (
        "The number from which a choice looks blind is published for GPT-2 as "
        f"{PUBLISHED} of the tokens."
    )
    stretches = [heads.stretches for heads in models.values()]
    if max(stretches) > 1:
        intervals = bootstrap.over(stretches, "stretches of text")
        lines.append(intervals)
        remarks = f"{remarks} {intervals}"
    figures = [
        figure
        for place, (name, heads) in enumerate(models.items())
        for figure in _draw_maps(f"{name}: " if len(models) > 1 else "", heads, place)
    ]
    figures += _draw_normalizers(models)
    numbers = {name: heads._asdict() for name, heads in models.items()}
    for place, (name, heads) in enumerate(models.items()):
        inner = attention.section(heads.limits)
        numbers[name]["limits"] = inner.numbers
        if len(models) <= _FEW:
            figures += [
                drawn._replace(
                    name=f"{drawn.name}-{place}",
                    reading=f"{name}, heads of the middle layer on one stretch. "
                    f"{drawn.reading}",
                )
                for drawn in inner.figures
            ]
    if len(models) > _FEW:
        remarks += (
            f" The limits of middle layers are drawn for up to {_FEW} models, of "
            "more they are among the numbers."
        )
    return report.Section(
        "Attention by layer",
        " ".join(lines),
        figures,
        numbers,
        tables=[_table(models)],
        remarks=remarks,
    )


def _table(models):
    """Medians over layers and heads, a model per row."""
    medians = {name: _medians(heads) for name, heads in models.items()}
    return report.Table(
        (
            *("model", "over", "tokens that a head reads", "its largest weight"),
            f"of its {SELECTED} largest, within reach",
            "picking looks blind",
        ),
        [
            (
                *(name, _lengths(heads)),
                medians[name]["spread"].text(".1%"),
                medians[name]["largest"].text(".2f"),
                medians[name]["inside"].text(".0%"),
                _firsts(heads),
            )
            for name, heads in models.items()
        ],
    )


def _draw_maps(title, heads, place):
    """A map of layers and heads for each quantity."""
    readings = {
        "spread": "The share of the tokens that a head reads.",
        "inside": "How well the tokens with the largest weights are told from others.",
        "largest": "The largest weight.",
    }
    maps = []
    for key, values_LH in (
        ("spread", heads.spread_LH),
        ("inside", heads.inside_LH),
        ("largest", heads.largest_LH),
    ):
        figure = drawing.Figure(figsize=(5, 3.4))
        axes = figure.subplots()
        layers, count = values_LH.shape
        # White at 0: at night the page turns it round, and 0 is dark.
        # From 1: layer l makes the states l of the saturation, 0 the embedding.
        image = axes.imshow(
            values_LH.T,
            aspect="auto",
            vmin=0,
            vmax=1,
            cmap="Blues",
            extent=(0.5, layers + 0.5, count + 0.5, 0.5),
        )
        axes.set(xlabel="layer", ylabel="head", title=f"{title}{_COMPARED[key]}")
        axes.grid(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        figure.colorbar(image, ax=axes)
        name = f"attention-heads-{key}-{place}"
        maps.append(report.Figure(name, figure, f"{title}{readings[key]}"))
    return maps


def of_capture(capture: Capture, settings: Settings) -> Heads:
    """`measure` on a capture, the tokens before its text among the states."""
    del settings
    logits_LWHS = present("logits_LWHS", capture.logits_LWHS)
    entering = list(present("states", capture.states)[: len(logits_LWHS)])
    if capture.front is not None:
        entering = [
            _behind(front_WPD, layer_ND)
            for front_WPD, layer_ND in zip(
                capture.front[: len(entering)], entering, strict=True
            )
        ]
    return measure(logits_LWHS, entering, spans_L=capture.spans_L)


def _medians(heads):
    """Over layers and heads, by the keys of `_COMPARED`."""
    maps = (heads.spread_LH, heads.inside_LH, heads.largest_LH)
    return {
        key: bootstrap.Estimate(np.median(map_LH), *ends)
        for key, map_LH, ends in zip(_COMPARED, maps, heads.interval_M2, strict=True)
    }


def _sentence(name, heads):
    spread, inside, largest = _medians(heads).values()
    return (
        f"{name}: over {_lengths(heads)} a head reads like one that spreads evenly "
        f"over {spread.text('.1%')} of them (median), its largest weight is "
        f"{largest.text('.2f')}, and of its {SELECTED} largest tokens "
        f"{inside.text('.0%')} stay nearer to their sum than any other; picking the "
        f"largest looks like picking blindly {_firsts(heads)}."
    )


def _behind(front_WPD, layer_ND):
    """States of all tokens, stretch after stretch, with those before the text."""
    dim = layer_ND.shape[1]
    layer_WSD = layer_ND.reshape(len(front_WPD), -1, dim)
    return np.concatenate([front_WPD, layer_WSD], axis=1).reshape(-1, dim)


def _draw_normalizers(models):
    """The means under each normaliser, a figure per quantity."""
    figures, width = [], 0.8 / len(models)
    for key, title in _COMPARED.items():
        figure = drawing.Figure(figsize=(5, 3.4))
        axes = figure.subplots()
        for index, (name, heads) in enumerate(models.items()):
            heights = [measured[key] for measured in heads.normalised.values()]
            at = np.arange(len(heights)) + width * (index - (len(models) - 1) / 2)
            axes.bar(at, heights, width, label=name)
            ends = [
                measured[f"{key}_interval"] for measured in heads.normalised.values()
            ]
            axes.vlines(at, *np.array(ends).T, color=drawing.BLACK, linewidth=1)
        axes.set_xticks(range(len(heights)), normalizers.ALL, rotation=20, ha="right")
        axes.set(title=title, ylim=(0, 1))
        if key == "spread":
            # From one token to all of them.
            longest = max(heads.length for heads in models.values())
            axes.set(yscale="log", ylim=(0.5 / longest, 1))
        if len(models) > 1:
            drawing.label(axes)
        reading = "The same logits under other normalisers, mean over all heads."
        if max(heads.stretches for heads in models.values()) > 1:
            reading += " Strokes: intervals over stretches of text."
        if key == "spread":
            reading += (
                " They were trained for softmax, so this shows what a normaliser does, "
                "not how a model trained with it would do."
            )
        figures.append(report.Figure(f"attention-normalisers-{key}", figure, reading))
    return figures


def _maps(weights, values):
    """What the weights of each layer, stretch and head select."""
    inside, tightness, largest, spread = [], [], [], []
    for weights_WHS, values_WSD in zip(weights, values, strict=True):
        picked = [
            attention.selection(*pair, SELECTED)
            for pair in zip(weights_WHS, values_WSD, strict=True)
        ]
        inside.append([selection.inside_R for selection in picked])
        tightness.append(
            [selection.distance_R / selection.bound_R for selection in picked]
        )
        largest.append(weights_WHS.max(axis=-1))
        entropy_WH = special.entr(weights_WHS).sum(axis=-1)
        spread.append(np.exp(entropy_WH) / weights_WHS.shape[-1])
    return {
        "inside": np.stack(inside),
        "tightness": np.stack(tightness),
        "largest": np.stack(largest),
        "spread": np.stack(spread),
    }


def _means(measured):
    """Means over layers, stretches and heads, with their intervals."""
    means = {}
    for key in _COMPARED:
        means[key] = float(measured[key].mean())
        means[f"{key}_interval"] = _interval(measured[key], np.mean)
    return means


def _interval(map_LWH, summary):
    """Both ends, over stretches, of a summary of the layers' and heads' means."""
    layers, stretches, count = map_LWH.shape
    flat_WR = np.moveaxis(map_LWH, 1, 0).reshape(stretches, layers * count)

    def summarized(weight_BW):
        mean_BR = weight_BW @ flat_WR / weight_BW.sum(axis=1, keepdims=True)
        return summary(mean_BR, axis=1)

    low, high = bootstrap.interval(summarized, stretches, bounds=(0, 1))
    return float(low), float(high)


def _critical(pairs, seed):
    rng, length = np.random.default_rng(seed), pairs[0][0].shape[-1]
    for count in (count for count in attention.COUNTS if count < length):
        rows = [attention.beside_blind(*pair, count, rng) for pair in pairs]
        chosen, blind = (np.concatenate(part) for part in zip(*rows, strict=True))
        if stats.ks_2samp(chosen, blind).pvalue > attention.LEVEL:
            return count
    return 0


def _firsts(heads):
    counts = heads.critical_L[heads.critical_L > 0]
    if not len(counts):
        most = max(count for count in attention.COUNTS if count < heads.length)
        return f"in no layer, up to {most} tokens"
    first = int(np.median(counts))
    tokens = "token" if first == 1 else "tokens"
    if len(counts) == 1:
        return f"from {first:,} {tokens} on in 1 layer of {len(heads.critical_L)}"
    return (
        f"from {first:,} {tokens} on (median) in {len(counts)} layers of "
        f"{len(heads.critical_L)}"
    )


def _lengths(heads):
    """The tokens of a stretch, and how many a layer sees where that is fewer."""
    few_L = heads.spans_L[heads.spans_L < heads.length]
    if not len(few_L):
        return f"{heads.length} tokens"
    spans = " or ".join(map(str, sorted(set(few_L.tolist()))))
    return (
        f"{heads.length} tokens (the last {spans} of them in {len(few_L)} of "
        f"{len(heads.spans_L)} layers, which see no more)"
    )


def _unit(states_ND):
    states_ND = np.asarray(states_ND, np.float64)
    norm_N1 = np.linalg.norm(states_ND, axis=1, keepdims=True)
    return states_ND / np.maximum(norm_N1, 1e-200)
