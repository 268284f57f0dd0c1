"""How a model's states and head degenerate, over its layers.

    anisotropy         mean_{i != j} cos(h_i, h_j) = (|sum_i u_i|^2 - n) / (n^2 - n),
                       u_i = h_i / |h_i|
    singular entropy   log r - H(p),   p_i = sigma_i / sum_j sigma_j
    kurtosis           mean((x - m)^4) / mean((x - m)^2)^2, 3 for a normal law
    peak               of a dimension, its largest |x - m| over the layer's deviation

The singular entropy is the divergence of the head's normalised spectrum from a flat
one: 0 when all r singular values are equal, log r when only one is left. A dimension
that stands far out at every position peaks at about sqrt(D - 1), since it is itself
part of the deviation. The same along a training: turns.py.

Axes: N positions, L layers; B draws and W windows of the bootstrap.
"""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib.ticker
import numpy as np

from softbottle import drawing
from softbottle.analysis import bootstrap, report
from softbottle.analysis.capture import Capture, present, real
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "Anisotropy is the mean cosine of two states, and singular entropy tells how "
    "unevenly the output table uses its dimensions.",
    "If all states point one way, or the table's singular values fall at once, part "
    "of the width that you pay for is idle.",
    "Saturation of states and head",
)
PANEL = (5.0, 3.4)  # inches, of figures that stand side by side
OUTLIER = 6.0  # deviations from which a dimension is an outlier


class Head(NamedTuple):
    """Singular values of a table in descending order, and their entropy."""

    sigma: np.ndarray
    entropy: float


class Layers(NamedTuple):
    """One number for each layer, and `peak_LD` for each of its dimensions.

    A layer narrower than the widest has NaN for the dimensions it lacks. `interval_L2`
    are both ends of the anisotropy's intervals, over windows of `positions`; NaN where
    there are too few.
    """

    anisotropy_L: np.ndarray
    kurtosis_L: np.ndarray
    peak_LD: np.ndarray
    interval_L2: np.ndarray
    positions: int

    @property
    def outliers_L(self) -> np.ndarray:
        """How many dimensions of each layer peak above `OUTLIER` deviations."""
        return (self.peak_LD > OUTLIER).sum(axis=1)


def anisotropy(states_ND: np.ndarray) -> float:
    """Mean cosine between the states of two different positions.

    Raises:
        ValueError: if there are fewer than two states, or one is zero.
    """
    unit_ND = _unit(states_ND)
    total, count = np.sum(unit_ND, axis=0), len(unit_ND)
    return float((total @ total - count) / (count * count - count))


def anisotropy_interval(states_ND: np.ndarray) -> tuple[float, float]:
    """Both ends of the interval of the anisotropy, over windows of positions.

    A pair of positions in two windows has the product of the windows' weights, and one
    within a window its weight: a window that is drawn twice is not paired with its own
    copy, whose cosines of 1 no other text would have.

    Raises:
        ValueError: as `anisotropy`.
    """
    unit_ND = _unit(states_ND)
    window_N = bootstrap.windows(len(unit_ND))
    sum_WD, count_W = bootstrap.sums(unit_ND, window_N), np.bincount(window_N)
    gram_WW, pairs_WW = sum_WD @ sum_WD.T, np.outer(count_W, count_W)

    def weighted(weight_BW, matrix_WW):
        across_WW = matrix_WW - np.diag(np.diag(matrix_WW))
        within_W = np.diag(matrix_WW) - count_W
        across_B = np.einsum("bw,bw->b", weight_BW @ across_WW, weight_BW)
        return across_B + weight_BW @ within_W

    def mean_cosine(weight_BW):
        pairs_B = weighted(weight_BW, pairs_WW)
        # One window of one position, drawn again and again, has no pairs.
        pairs_B = np.where(pairs_B > 0, pairs_B, np.nan)
        return weighted(weight_BW, gram_WW) / pairs_B

    low, high = bootstrap.interval(mean_cosine, len(count_W), bounds=(-1, 1))
    return float(low), float(high)


def head(table_VE: np.ndarray) -> Head:
    """Singular values of an output table, and log r - H(sigma / sum sigma).

    Raises:
        ValueError: if the table is zero.
    """
    table_VE = _checked("the table", table_VE)
    sigma = np.linalg.svd(table_VE, compute_uv=False)
    if not sigma[0]:
        raise ValueError(f"the table {table_VE.shape} is zero: it has no spectrum.")
    p = sigma / sigma.sum()
    log_p = np.log(p, where=p > 0, out=np.zeros_like(p))
    return Head(sigma, float(np.log(len(p)) + p @ log_p))


def kurtosis(values: np.ndarray) -> float:
    """mean((x - m)^4) / mean((x - m)^2)^2, over all entries.

    Raises:
        ValueError: if all entries are equal.
    """
    square = np.square(values - np.mean(values, dtype=np.float64))
    if not square.any():
        raise ValueError(f"all {np.size(values)} values are equal: no kurtosis.")
    return float(np.mean(square**2) / np.mean(square) ** 2)


def layers(states: Sequence[np.ndarray]) -> Layers:
    """Anisotropy, kurtosis and peaks of each layer's states, arrays [N, D].

    Raises:
        ValueError: if there are no layers or the layers have other numbers of states.
    """
    if len({len(layer_ND) for layer_ND in states}) != 1:
        raise ValueError(
            f"the layers need states of the same positions, got "
            f"{[np.shape(layer_ND) for layer_ND in states]}."
        )
    # One layer at a time in float64: a deep model has dozens of them.
    rows = [_layer(f"layer {at}", layer_ND) for at, layer_ND in enumerate(states)]
    cosines, tails, peaks, intervals = zip(*rows, strict=True)
    peak_LD = np.full((len(rows), max(map(len, peaks))), np.nan)
    for at, peak_D in enumerate(peaks):
        peak_LD[at, : len(peak_D)] = peak_D
    measured = np.array(cosines), np.array(tails), peak_LD
    return Layers(*measured, np.array(intervals), len(states[0]))


def _layer(name, states_ND):
    states_ND = _checked(name, states_ND)
    measured = anisotropy(states_ND), kurtosis(states_ND)
    peak_D = abs(states_ND - states_ND.mean()).max(axis=0) / states_ND.std()
    return *measured, peak_D, anisotropy_interval(states_ND)


def section(states: dict[str, Layers], heads: dict[str, Head]) -> report.Section:
    """Models side by side: their layers, and the spectra of their heads."""
    # One layer is a number, which the table has: no panel with a dot in it.
    deep = {k: layers for k, layers in states.items() if len(layers.anisotropy_L) > 1}
    figures = _draw_layers(deep) if deep else []
    figures.append(_draw_spectra(heads))
    lines = [
        f"{name}: in its last layer two states have a cosine of "
        f"{_last(layers).text('.2f')} on average, and {layers.outliers_L[-1]} of "
        f"{np.isfinite(layers.peak_LD[-1]).sum()} dimensions reach {OUTLIER:.0f} "
        "deviations."
        for name, layers in states.items()
    ]
    lines += [
        f"{name}: the singular entropy of its head is {entropy:.2f} of at most "
        f"{np.log(len(sigma)):.2f}."
        for name, (sigma, entropy) in heads.items()
    ]
    remarks = ""
    if states:
        counts = [layers.positions for layers in states.values()]
        remarks = bootstrap.described(*counts)
        lines.append(remarks)
    numbers = {
        name: layers._asdict() | {"outliers_L": layers.outliers_L}
        for name, layers in states.items()
    } | {f"{name}, head": head._asdict() for name, head in heads.items()}
    return report.Section(
        "Saturation",
        " ".join(lines),
        figures,
        numbers,
        tables=[_table(states, heads)],
        remarks=remarks,
        key={name: _key(states.get(name), heads.get(name)) for name in states | heads},
    )


def _key(layers, head):
    """Cells of the table of models."""
    cells = {}
    if layers is not None:
        cells["anisotropy"] = f"{layers.anisotropy_L[-1]:.2f}"
        cells["outlier dimensions"] = f"{layers.outliers_L[-1]:,}"
    if head is not None:
        cells["singular entropy"] = f"{head.entropy:.2f}"
    return cells


def _last(layers):
    """The anisotropy of the last layer."""
    return bootstrap.Estimate(layers.anisotropy_L[-1], *layers.interval_L2[-1])


def _table(states, heads):
    """The last layer's numbers and the head's, a model per row."""
    rows = []
    for name in heads | states:
        cells = ["–"] * 5
        if name in states:
            layers = states[name]
            count = np.isfinite(layers.peak_LD[-1]).sum()
            cells[0] = _last(layers).text(".2f")
            cells[1] = f"{layers.outliers_L[-1]:,} of {count:,}"
            cells[2] = f"{layers.kurtosis_L[-1]:.1f}"
        if name in heads:
            cells[3] = f"{heads[name].entropy:.2f}"
            cells[4] = f"{np.log(len(heads[name].sigma)):.2f}"
        rows.append((name, *cells))
    heading = (
        *("model", "mean cosine of two states"),
        f"dimensions that reach {OUTLIER:.0f} deviations",
        *("kurtosis", "singular entropy of the head", "at most"),
    )
    return report.Table(heading, rows)


def _draw_layers(states):
    """Mean cosines and largest entries of the layers, a line per model."""
    panels = []
    for name, title, reading in (
        (
            *("anisotropy", "mean cosine of two states"),
            "By layer, the embedded words first; near 1 all states point one way. "
            "Shaded: the intervals.",
        ),
        (
            *("peaks", "largest entry, in deviations"),
            f"Of each layer; dotted: {OUTLIER:.0f} deviations, from where it is an "
            "outlier.",
        ),
    ):
        figure = drawing.Figure(figsize=PANEL)
        axes = figure.subplots()
        for model, layers in states.items():
            value_L = layers.anisotropy_L
            if name == "peaks":
                value_L = np.nanmax(layers.peak_LD, axis=1)
            label = model if len(states) > 1 else None
            (line,) = axes.plot(value_L, marker=".", label=label)
            if name == "anisotropy":
                axes.fill_between(
                    np.arange(len(value_L)),
                    *layers.interval_L2.T,
                    color=line.get_color(),
                    alpha=0.15,
                    linewidth=0,
                )
        axes.set(xlabel="layer", title=title)
        if name == "peaks":
            axes.set_yscale("log")
            drawing.plain(axes.yaxis)
            axes.axhline(OUTLIER, color=drawing.GRAY, linestyle=":")
        else:
            axes.set_ylim(None, 1)
        _count_from(axes)
        panels.append(report.Figure(f"saturation-{name}", figure, reading))
    return panels


def _draw_spectra(heads):
    figure = drawing.Figure(figsize=PANEL)
    axes = figure.subplots()
    for name, (sigma, entropy) in heads.items():
        axes.semilogy(
            np.arange(1, len(sigma) + 1),
            sigma / sigma[0],
            label=f"{name}: {entropy:.2f}",
        )
    axes.set(xlabel="index, from 1", title="singular values of the head, entropy")
    drawing.plain(axes.yaxis)
    _count_from(axes)
    reading = (
        "A head whose singular values fall at once (entropy far above 0) uses few of "
        "its dimensions."
    )
    return report.Figure("saturation-spectrum", figure, reading)


def _count_from(axes):
    """Whole numbers below, and the lines by their names."""
    axes.xaxis.set_major_locator(
        matplotlib.ticker.MaxNLocator(integer=True, min_n_ticks=1)
    )
    drawing.label(axes)


def of_capture(capture: Capture, settings: Settings) -> tuple[Layers | None, Head]:
    """The layers and the head; of a head by itself, its spectrum."""
    del settings
    states = None if capture.states is None else layers(capture.states)
    return states, head(present("table_VE", capture.table_VE))


def compare(measured: dict[str, tuple[Layers | None, Head]]) -> report.Section:
    """The section on what `of_capture` gave for each model."""
    states = {name: layers for name, (layers, _) in measured.items() if layers}
    return section(states, {name: head for name, (_, head) in measured.items()})


def _unit(states_ND):
    """States of length 1."""
    states_ND = _checked("states", states_ND)
    norm_N = np.linalg.norm(states_ND, axis=1)
    if len(norm_N) < 2 or not norm_N.all():
        raise ValueError(
            f"anisotropy needs two or more states and none of them zero, got "
            f"{len(norm_N)} with {(norm_N == 0).sum()} of them zero."
        )
    return states_ND / norm_N[:, None]


def _checked(name, matrix):
    matrix = real(name, matrix)
    if matrix.ndim != 2 or not np.all(np.isfinite(matrix)):
        raise ValueError(
            f"{name} must be a finite matrix, got the shape {matrix.shape} with "
            f"{matrix.size - np.isfinite(matrix).sum()} entries not finite."
        )
    return matrix
