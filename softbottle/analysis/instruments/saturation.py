"""How a model's states and head degenerate, over its layers and over its training.

    anisotropy         mean_{i != j} cos(h_i, h_j) = (|sum_i u_i|^2 - n) / (n^2 - n),
                       u_i = h_i / |h_i|
    singular entropy   log r - H(p),   p_i = sigma_i / sum_j sigma_j
    kurtosis           mean((x - m)^4) / mean((x - m)^2)^2, 3 for a normal law
    peak               of a dimension, its largest |x - m| over the layer's deviation

The singular entropy is the divergence of the head's normalised spectrum from a flat
one: 0 when all r singular values are equal, log r when only one is left. A curve turns
where it is lowest; Godey et al. see the loss of small models turn late in training,
and the entropy and the anisotropy rise with it. A dimension that stands far out at
every position peaks at about sqrt(D - 1), since it is itself part of the deviation.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import matplotlib.ticker
import numpy as np

from softbottle.analysis import drawing, report
from softbottle.analysis.sources import arrays as arrays_lib

OUTLIER = 6.0  # deviations from which a dimension is an outlier
DRAWS = 400  # of a bootstrap
CANDIDATES = 101  # turning points that are tried

_SMOOTH = 2  # points on either side that are averaged
_LEAST = 9  # points of a curve, and of the stretch that is fitted


class Head(NamedTuple):
    """Singular values of a table in descending order, and their entropy."""

    sigma: np.ndarray
    entropy: float


class Layers(NamedTuple):
    """One number for each layer, and `peak_LD` for each of its dimensions.

    A layer narrower than the widest has NaN for the dimensions it lacks.
    """

    anisotropy_L: np.ndarray
    kurtosis_L: np.ndarray
    peak_LD: np.ndarray

    @property
    def outliers_L(self) -> np.ndarray:
        """How many dimensions of each layer peak above `OUTLIER` deviations."""
        return (self.peak_LD > OUTLIER).sum(axis=1)


class Curves(NamedTuple):
    """What the checkpoints of a run measure, in the order of their steps."""

    step_M: np.ndarray
    loss_M: np.ndarray
    entropy_M: np.ndarray
    anisotropy_M: np.ndarray


class Turn(NamedTuple):
    """Where a curve stops falling.

    Attributes:
        step: the estimate; the curve's lowest end if it does not turn.
        interval: that holds 95% of the bootstrap's draws.
        turned: whether the minimum lies inside and at least 97.5% of the draws fall
            before theirs and rise after it.
        draws: steps estimated from resampled residuals.
    """

    step: float
    interval: tuple[float, float]
    turned: bool
    draws: np.ndarray


def anisotropy(states_ND: np.ndarray) -> float:
    """Mean cosine between the states of two different positions.

    Raises:
        ValueError: if there are fewer than two states, or one is zero.
    """
    states_ND = _checked("states", states_ND)
    norm_N = np.linalg.norm(states_ND, axis=1)
    if len(norm_N) < 2 or not norm_N.all():
        raise ValueError(
            f"anisotropy needs two or more states and none of them zero, got "
            f"{len(norm_N)} with {(norm_N == 0).sum()} of them zero."
        )
    total = np.sum(states_ND / norm_N[:, None], axis=0)
    count = len(norm_N)
    return float((total @ total - count) / (count * count - count))


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
    if len({len(one) for one in states}) != 1:
        raise ValueError(
            f"the layers need states of the same positions, got "
            f"{[np.shape(one) for one in states]}."
        )
    # One layer at a time in float64: a deep model has dozens of them.
    rows = [_layer(f"layer {at}", one) for at, one in enumerate(states)]
    cosines, tails, peaks = zip(*rows, strict=True)
    peak_LD = np.full((len(rows), max(map(len, peaks))), np.nan)
    for at, peak_D in enumerate(peaks):
        peak_LD[at, : len(peak_D)] = peak_D
    return Layers(np.array(cosines), np.array(tails), peak_LD)


def _layer(name, states_ND):
    states_ND = _checked(name, states_ND)
    measured = anisotropy(states_ND), kurtosis(states_ND)
    peak_D = abs(states_ND - states_ND.mean()).max(axis=0) / states_ND.std()
    return *measured, peak_D


def curves(
    checkpoints: Iterable[tuple[int, np.ndarray, np.ndarray, float]],
) -> Curves:
    """Loss, singular entropy and anisotropy over (step, table, states, loss).

    An iterable is enough, so that one checkpoint is held at a time.

    Raises:
        ValueError: if the steps do not rise.
    """
    rows = [
        (step, loss, head(table_VE).entropy, anisotropy(states_ND))
        for step, table_VE, states_ND, loss in checkpoints
    ]
    found = Curves(*np.array(rows, np.float64).reshape(-1, 4).T)
    _check_curve(found.step_M, found.loss_M, least=1)
    return found


def turn(step_M: np.ndarray, value_M: np.ndarray, seed: int = 0) -> Turn:
    """The step at which a curve stops falling, with its uncertainty.

    The minimum of a moving average says about where. Then two straight lines in
    log(1 + step) that meet at x are fitted to the nearest third of the points,

        y = a + b min(x' - x, 0) + c max(x' - x, 0),

    with b <= 0 where that can be, and x is the estimate. Fits to the same lines plus
    resampled residuals give the interval: it holds the noise and the spacing, not the
    error of taking a round minimum for a corner, where it is too narrow. Two lines
    through the whole curve would find the end of its first fall.

    Raises:
        ValueError: if the steps do not rise, or there are fewer than nine.
    """
    step_M = arrays_lib.real("the steps", step_M)
    value_M = arrays_lib.real("the values", value_M)
    _check_curve(step_M, value_M)
    lowest = int(np.argmin(_smoothed(value_M)))
    if lowest in (0, len(step_M) - 1):
        step = float(step_M[lowest])
        return Turn(step, (step, step), False, np.full(DRAWS, step))
    x_M = np.log1p(step_M)
    near = np.argsort(abs(np.arange(len(x_M)) - lowest), kind="stable")
    near = np.sort(near[: max(_LEAST, len(x_M) // 3)])
    x_W, y_W = x_M[near], value_M[near]
    knots, _, fitted_1W = _hinges(x_W, y_W[None])
    residual_W = (y_W - fitted_1W[0]) * np.sqrt(len(y_W) / (len(y_W) - 4))
    rng = np.random.default_rng(seed)
    drawn_BW = rng.choice(residual_W, (DRAWS, len(y_W)))
    draws, theta_B3, _ = _hinges(x_W, fitted_1W + drawn_BW)
    # No estimate is finer than the distance between two checkpoints.
    draws = draws + np.mean(np.diff(x_W)) * rng.uniform(-0.5, 0.5, DRAWS)
    low, high = np.quantile(draws, (0.025, 0.975))
    turned = np.mean((theta_B3[:, 1] < 0) & (theta_B3[:, 2] > 0)) >= 0.975
    step, low, high = (float(np.expm1(value)) for value in (knots[0], low, high))
    return Turn(step, (low, high), bool(turned), np.expm1(draws))


def lag(later: Turn, earlier: Turn) -> tuple[float, tuple[float, float]]:
    """Steps from one turn to another, and the interval of 95% of their draws."""
    low, high = np.quantile(later.draws - earlier.draws, (0.025, 0.975))
    return later.step - earlier.step, (float(low), float(high))


def section(states: dict[str, Layers], heads: dict[str, Head]) -> report.Section:
    """Models side by side: their layers, and the spectra of their heads."""
    figure = drawing.Figure(figsize=(11, 3.8), layout="constrained")
    cosines, peaks, spectra = figure.subplots(1, 3)
    for name, one in states.items():
        cosines.plot(one.anisotropy_L, marker=".", label=name)
        peaks.semilogy(np.nanmax(one.peak_LD, axis=1), marker=".", label=name)
    for name, one in heads.items():
        spectra.semilogy(one.sigma / one.sigma[0], label=f"{name}: {one.entropy:.2f}")
    peaks.axhline(OUTLIER, color="grey", linestyle=":")
    cosines.set(xlabel="layer", title="anisotropy", ylim=(None, 1))
    peaks.set(xlabel="layer", title="largest entry, in deviations")
    spectra.set(xlabel="index", title="singular values of the head, entropy")
    for axes in (cosines, peaks, spectra):
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    for axes in (cosines, peaks, spectra) if states else (spectra,):
        axes.legend()
    lines = [
        f"{name}: in its last layer two states have a cosine of "
        f"{one.anisotropy_L[-1]:.2f} on average, and {one.outliers_L[-1]} of "
        f"{np.isfinite(one.peak_LD[-1]).sum()} dimensions reach {OUTLIER:.0f} "
        "deviations."
        for name, one in states.items()
    ]
    lines += [
        f"{name}: the singular entropy of its head is {one.entropy:.2f} of at most "
        f"{np.log(len(one.sigma)):.2f}."
        for name, one in heads.items()
    ]
    reading = (
        "The first of several layers is the embedded words. A cosine near 1 means that "
        "all states point one way. A head whose singular values fall at once (entropy "
        "far above 0) uses few of its dimensions."
    )
    numbers = {
        name: one._asdict() | {"outliers_L": one.outliers_L}
        for name, one in states.items()
    } | {f"{name}, head": one._asdict() for name, one in heads.items()}
    figures = [report.Figure("saturation-layers", figure, reading)]
    return report.Section("Saturation", " ".join(lines), figures, numbers)


def run_section(found: dict[str, Curves]) -> report.Section:
    """Runs over their checkpoints: where their curves turn, and in which order."""
    figure = drawing.Figure(figsize=(11, 3.6 * len(found)), layout="constrained")
    grid, lines, numbers = figure.subplots(len(found), 3, squeeze=False), [], {}
    for row, (name, one) in zip(grid, found.items(), strict=True):
        turns = turning(one)
        for axes, (what, value_M) in zip(row, _named(one).items(), strict=True):
            axes.plot(one.step_M, value_M, marker=".")
            axes.set_xscale("symlog", linthresh=1)  # there may be a step 0
            axes.set(xlabel="step", title=f"{name}: {what}")
            if what in turns and turns[what].turned:
                axes.axvline(turns[what].step, color="grey", linestyle=":")
                axes.axvspan(*turns[what].interval, color="grey", alpha=0.2)
        lines.append(f"{name}: {_said(one, turns)}")
        numbers[name] = one._asdict() | {"lags": _lags(turns)}
        for what, at in turns.items():
            numbers[name][f"turn of the {what}"] = at._replace(draws=None)._asdict()
    reading = "Dotted: where a curve stops falling; shaded: where 95% of refits put it."
    figures = [report.Figure("saturation-steps", figure, reading)]
    return report.Section("Saturation in training", " ".join(lines), figures, numbers)


def turning(found: Curves) -> dict[str, Turn]:
    """The turns of the loss, the singular entropy and the anisotropy.

    Empty where there are too few checkpoints to look for any.
    """
    if len(found.step_M) < _LEAST:
        return {}
    return {
        name: turn(found.step_M, value_M, seed)
        for seed, (name, value_M) in enumerate(_named(found).items())
    }


def _named(found):
    names = ("loss", "singular entropy", "anisotropy")
    return dict(zip(names, found[1:], strict=True))


def _said(found, turns):
    if not turns:
        return (
            f"{len(found.step_M)} checkpoints are too few to look for a turn; "
            f"{_LEAST} would do."
        )
    found = "; ".join(
        f"the {name} is lowest at step {at.step:,.0f} "
        f"({at.interval[0]:,.0f} to {at.interval[1]:,.0f}) and rises after it"
        if at.turned
        else f"the {name} shows no turn"
        for name, at in turns.items()
    )
    return found + "."


def _lags(turns):
    turned = {name: at for name, at in turns.items() if at.turned}
    loss = turned.pop("loss", None)
    if loss is None:
        return {}
    return {f"loss after {name}": lag(loss, at) for name, at in turned.items()}


def _smoothed(value_M):
    """A moving average, narrower at both ends so that it leans to neither side."""
    last = len(value_M) - 1
    reach = [min(_SMOOTH, at, last - at) for at in range(last + 1)]
    return [value_M[at - r : at + r + 1].mean() for at, r in enumerate(reach)]


def _hinges(x_W, y_BW):
    """Two lines that meet, fitted to each row: knots, (height, slopes), fit."""
    knot_G = np.linspace(x_W[1], x_W[-2], CANDIDATES)
    shift_GW = x_W[None] - knot_G[:, None]
    basis_GW3 = np.stack(
        [np.ones_like(shift_GW), np.minimum(shift_GW, 0), np.maximum(shift_GW, 0)], -1
    )
    theta_BG3 = np.einsum("giw,bw->bgi", np.linalg.pinv(basis_GW3), y_BW)
    error_BGW = np.einsum("gwi,bgi->bgw", basis_GW3, theta_BG3) - y_BW[:, None]
    # A first line that rises is the worst fit: its knot is no end of a fall.
    rising_BG = theta_BG3[..., 1] > 0
    best_B = np.lexsort((np.square(error_BGW).sum(axis=-1), rising_BG), axis=1)[:, 0]
    rows = np.arange(len(y_BW))
    fitted_BW = error_BGW[rows, best_B] + y_BW
    return knot_G[best_B], theta_BG3[rows, best_B], fitted_BW


def _checked(name, matrix):
    matrix = arrays_lib.real(name, matrix)
    if matrix.ndim != 2 or not np.all(np.isfinite(matrix)):
        raise ValueError(
            f"{name} must be a finite matrix, got the shape {matrix.shape} with "
            f"{matrix.size - np.isfinite(matrix).sum()} entries not finite."
        )
    return matrix


def _check_curve(step_M, value_M, least=_LEAST):
    same = step_M.ndim == 1 and step_M.shape == value_M.shape
    if not same or len(step_M) < least:
        raise ValueError(
            f"a curve needs {least} points or more, with a step each, got "
            f"{step_M.shape} steps and {value_M.shape} values."
        )
    if (
        not np.all(np.isfinite(value_M))
        or np.any(np.diff(step_M) <= 0)
        or step_M[0] < 0
    ):
        raise ValueError(f"steps must rise and values be finite: {step_M}, {value_M}.")
