"""How a model saturates along its training, and where its curves turn.

A curve turns where it is lowest. Godey et al. see the loss of small models turn late in
training, and the singular entropy and the anisotropy (saturation.py) rise with it.
Beside these three stand, of the last layer's states, the dimensions that are outliers
and the effective rank, and the effective rank of the output table: the number of
directions that hold 99.9% of the sum of squares (rank.py).

Axes: M checkpoints, W of them near the turn, B refits, G candidates for the knot, N
positions of a text.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import matplotlib.ticker
import numpy as np

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, Checkpoint, Missing, present, real
from softbottle.analysis.instruments import rank, saturation
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "Loss, singular entropy, anisotropy, outlier dimensions and effective ranks at the "
    "checkpoints of a training, and the step at which the first three stop falling.",
    "Where the loss turns up together with the other two, the output layer saturates: "
    "a longer training of this width will not help, a wider one or another head may.",
    "Saturation along a training",
)
DRAWS = 400  # of a bootstrap
CANDIDATES = 101  # turning points that are tried
_SHOWN = 12  # checkpoints in the table; the numbers have all
_QUANTITIES = {
    "loss": "loss_M",
    "singular entropy": "entropy_M",
    "anisotropy": "anisotropy_M",
    "outlier dimensions": "outliers_M",
    "effective rank of the states": "states_rank_M",
    "effective rank of the table": "table_rank_M",
}
_NAMED = ("loss", "singular entropy", "anisotropy")  # whose turns are looked for
_COUNTS = ("outliers_M", "states_rank_M", "table_rank_M")
_SMOOTH = 2  # points on either side that are averaged
LEAST = 9  # points of a curve, and of the stretch that is fitted


_NONE = np.zeros(0)


class Curves(NamedTuple):
    """What the checkpoints of a run measure, in the order of their steps.

    Attributes:
        step_M: the steps.
        loss_M: in nats per token.
        entropy_M: singular entropy of the table.
        anisotropy_M: of the last layer's states.
        outliers_M: dimensions of those states that are outliers.
        states_rank_M: effective rank of the states.
        table_rank_M: effective rank of the table.
        missing: checkpoints that could not be read, with the reason.
    """

    step_M: np.ndarray
    loss_M: np.ndarray
    entropy_M: np.ndarray
    anisotropy_M: np.ndarray
    outliers_M: np.ndarray = _NONE
    states_rank_M: np.ndarray = _NONE
    table_rank_M: np.ndarray = _NONE
    missing: Sequence[str] = ()


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


def measure(checkpoints: Iterable[Checkpoint | Missing]) -> Curves:
    """What there is to see of each checkpoint.

    An iterable is enough, so that one checkpoint is held at a time.

    Raises:
        ValueError: if the steps do not rise, or there is no checkpoint.
    """
    rows, missing = [], []
    for checkpoint in checkpoints:
        if isinstance(checkpoint, Missing):
            missing.append(f"{checkpoint.name}: {checkpoint.reason}")
        else:
            rows.append(_measured(*checkpoint))
    measured = np.array(rows, np.float64).reshape(-1, 7).T
    curves = Curves(*measured)._replace(missing=missing)
    _check_curve(curves.step_M, curves.loss_M, least=1)
    return curves


def _measured(step, table_VE, states_ND, loss):
    head, last = saturation.head(table_VE), saturation.layers([states_ND])
    sigma = np.linalg.svd(real("states", states_ND), compute_uv=False)
    return (
        *(step, loss, head.entropy, last.anisotropy_L[0], last.outliers_L[0]),
        rank.effective(sigma, rank.LOSSES[0]),
        rank.effective(head.sigma, rank.LOSSES[0]),
    )


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
    near = np.sort(near[: max(LEAST, len(x_M) // 3)])
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
    turns = {name: turning(curves) for name, curves in runs.items()}
    lines = [
        f"{name}: {_sentence(curves, turns[name])}" for name, curves in runs.items()
    ]
    lines += [
        f"{name}, not read: {why}." for name in runs for why in runs[name].missing
    ]
    numbers = {}
    for name, curves in runs.items():
        numbers[name] = curves._asdict() | {"lags": _lags(turns[name])}
        for quantity, at in turns[name].items():
            numbers[name][f"turn of the {quantity}"] = at._asdict() | {"draws": None}
    figures = [
        _draw(quantity, field, runs, {name: turns[name].get(quantity) for name in runs})
        for quantity, field in _QUANTITIES.items()
        if any(len(getattr(curves, field)) > 1 for curves in runs.values())
    ]
    shown = max(4, _SHOWN // len(runs))
    points = report.Table(
        ("model", "step", *_QUANTITIES),
        [row for name, curves in runs.items() for row in _rows(name, curves, shown)],
    )
    return report.Section(
        "Saturation in training",
        " ".join(lines),
        figures,
        numbers,
        tables=[_turns(runs, turns), points],
        remarks=" ".join(lines[len(runs) :]),
        verdicts=_verdicts(turns),
    )


def _turns(runs, turns):
    """Where each curve of each run turns."""
    rows = []
    for name, curves in runs.items():
        few = f"{len(curves.step_M)} checkpoints are too few"
        found = [turns[name].get(quantity) for quantity in _named(curves)]
        rows.append((name, *(few if at is None else _at(at) for at in found)))
    return report.Table(("model", *(f"{name} is lowest" for name in _NAMED)), rows)


def _at(turn):
    if not turn.turned:
        return "no turn"
    low, high = turn.interval
    return f"at step {turn.step:,.0f} ({low:,.0f} to {high:,.0f})"


def _draw(quantity, field, runs, turns):
    """One quantity of all runs by step, with the turns that were found."""
    figure = drawing.Figure(figsize=saturation.PANEL)
    axes = figure.subplots()
    drawn = False
    for name, curves in runs.items():
        value_M = getattr(curves, field)
        if not len(value_M):
            continue
        label = name if len(runs) > 1 else None
        (line,) = axes.plot(curves.step_M, value_M, marker=".", label=label)
        at = turns[name]
        if at is not None and at.turned:
            axes.axvline(at.step, color=line.get_color(), linestyle=":")
            axes.axvspan(*at.interval, color=line.get_color(), alpha=0.12)
            drawn = True
    axes.set_xscale("symlog", linthresh=1)  # there may be a step 0
    axes.set(xlabel="step", title=quantity)
    if field in _COUNTS:
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    if field == "outliers_M":
        axes.set_ylim(-0.05, max(1.0, axes.get_ylim()[1]))
    if len(runs) > 1:
        drawing.label(axes)
    reading = f"{quantity[0].upper()}{quantity[1:]} by step."
    if drawn:
        reading += " Dotted: where it stops falling; shaded: where 95% of refits do."
    return report.Figure(f"training-{quantity.replace(' ', '-')}", figure, reading)


def _rows(name, curves, most):
    """The checkpoints of a run for a table: all, or `most` of them evenly."""
    count = len(curves.step_M)
    chosen = np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))
    for at in chosen:
        cells = [name, f"{curves.step_M[at]:,.0f}"]
        for field in _QUANTITIES.values():
            value_M = getattr(curves, field)
            shown = "{:,.0f}" if field in _COUNTS else "{:.3f}"
            cells.append(shown.format(value_M[at]) if len(value_M) else "–")
        yield cells


def _verdicts(turns):
    """Of each run whose loss turns, that it does, and what turns with it."""
    verdicts = {}
    for name, found in turns.items():
        turned = [quantity for quantity, at in found.items() if at.turned]
        if "loss" in turned:
            turned.remove("loss")
            others = f", as its {' and '.join(turned)} do" if turned else ""
            at = f"{found['loss'].step:,.0f}"
            verdicts[name] = (
                f"its loss is lowest at step {at} and rises after it{others}"
            )
    return verdicts


def of_capture(capture: Capture, settings: Settings) -> Curves:
    """`measure` on the series of checkpoints that a capture has."""
    del settings
    return measure(present("series", capture.series))


def turning(curves: Curves) -> dict[str, Turn]:
    """The turns of the loss, the singular entropy and the anisotropy.

    Empty where there are too few checkpoints to look for any.
    """
    if len(curves.step_M) < LEAST:
        return {}
    return {
        name: turn(curves.step_M, value_M, seed)
        for seed, (name, value_M) in enumerate(_named(curves).items())
    }


def _named(curves):
    return dict(zip(_NAMED, curves[1:4], strict=True))


def _sentence(curves, turns):
    if not turns:
        return (
            f"{len(curves.step_M)} checkpoints are too few to look for a turn; "
            f"{LEAST} would do."
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


def _check_curve(step_M, value_M, least=LEAST):
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
