"""Where the curves of a training turn: loss, singular entropy and anisotropy.

A curve turns where it is lowest. Godey et al. see the loss of small models turn late in
training, and the singular entropy and the anisotropy (saturation.py) rise with it.

Axes: M checkpoints, W of them near the turn, B refits, G candidates for the knot, N
positions of a text.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, Checkpoint, present, real
from softbottle.analysis.instruments import saturation
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "Loss, singular entropy and anisotropy at the checkpoints of a training, and the "
    "step at which each stops falling.",
    "Where the loss turns up together with the other two, the output layer saturates: "
    "a longer training of this width will not help, a wider one or another head may.",
)
DRAWS = 400  # of a bootstrap
CANDIDATES = 101  # turning points that are tried
_SMOOTH = 2  # points on either side that are averaged
_LEAST = 9  # points of a curve, and of the stretch that is fitted


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


def measure(checkpoints: Iterable[Checkpoint]) -> Curves:
    """Loss, singular entropy and anisotropy of checkpoints.

    An iterable is enough, so that one checkpoint is held at a time.

    Raises:
        ValueError: if the steps do not rise.
    """
    rows = [
        (
            step,
            loss,
            saturation.head(table_VE).entropy,
            saturation.anisotropy(states_ND),
        )
        for step, table_VE, states_ND, loss in checkpoints
    ]
    curves = Curves(*np.array(rows, np.float64).reshape(-1, 4).T)
    _check_curve(curves.step_M, curves.loss_M, least=1)
    return curves


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
    step_M = real("the steps", step_M)
    value_M = real("the values", value_M)
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


def section(runs: dict[str, Curves]) -> report.Section:
    """Runs over their checkpoints: where their curves turn, and in which order."""
    figure = drawing.Figure(figsize=(11, 3.6 * len(runs)))
    grid, lines, numbers = figure.subplots(len(runs), 3, squeeze=False), [], {}
    drawn = False
    for row, (name, curves) in zip(grid, runs.items(), strict=True):
        turns = turning(curves)
        for axes, (quantity, value_M) in zip(row, _named(curves).items(), strict=True):
            axes.plot(curves.step_M, value_M, marker=".")
            axes.set_xscale("symlog", linthresh=1)  # there may be a step 0
            axes.set(xlabel="step", title=f"{name}: {quantity}")
            if quantity in turns and turns[quantity].turned:
                axes.axvline(turns[quantity].step, color=drawing.GRAY, linestyle=":")
                axes.axvspan(*turns[quantity].interval, color=drawing.GRAY, alpha=0.2)
                drawn = True
        lines.append(f"{name}: {_sentence(curves, turns)}")
        numbers[name] = curves._asdict() | {"lags": _lags(turns)}
        for quantity, at in turns.items():
            numbers[name][f"turn of the {quantity}"] = at._asdict() | {"draws": None}
    reading = "What each checkpoint of the series measures, by its step."
    if drawn:
        reading = (
            "Dotted: where a curve stops falling; shaded: where 95% of refits put it."
        )
    figures = [report.Figure("saturation-steps", figure, reading)]
    return report.Section("Saturation in training", " ".join(lines), figures, numbers)


def inspect(captures: Sequence[Capture], settings: Settings) -> report.Section:
    """The section on some runs that kept a series of checkpoints."""
    del settings
    return section(
        {
            capture.name: measure(present("series", capture.series))
            for capture in captures
        }
    )


def turning(curves: Curves) -> dict[str, Turn]:
    """The turns of the loss, the singular entropy and the anisotropy.

    Empty where there are too few checkpoints to look for any.
    """
    if len(curves.step_M) < _LEAST:
        return {}
    return {
        name: turn(curves.step_M, value_M, seed)
        for seed, (name, value_M) in enumerate(_named(curves).items())
    }


def _named(curves):
    names = ("loss", "singular entropy", "anisotropy")
    return dict(zip(names, curves[1:], strict=True))


def _sentence(curves, turns):
    if not turns:
        return (
            f"{len(curves.step_M)} checkpoints are too few to look for a turn; "
            f"{_LEAST} would do."
        )
    clauses = (
        f"the {name} is lowest at step {at.step:,.0f} "
        f"({at.interval[0]:,.0f} to {at.interval[1]:,.0f}) and rises after it"
        if at.turned
        else f"the {name} shows no turn"
        for name, at in turns.items()
    )
    return "; ".join(clauses) + "."


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
