"""How far a number might lie from what another stretch of the text would give.

The positions of a text depend on their neighbors, so that windows of consecutive
positions are resampled, whole, and not positions: W windows are drawn from W with
replacement, again and again, which gives window w the weight c_w, and the number is
computed from the weighted windows. With s the deviation of the draws around their mean,

    interval = value -+ t s sqrt(W / (W - 1)),

t the 97.5% quantile of Student's law with W - 1 degrees of freedom. The factor and t
make up for few windows, of which the quantiles of the draws themselves would tell too
little. Taken for granted is that windows differ as other parts of the text would.

Axes: B draws, W windows, N positions, M numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

LEVEL = 0.95
DRAWS = 1000
LENGTH = 64  # positions of a window
_LEAST = 16  # windows that a short text is cut into


class Estimate(NamedTuple):
    """A number and the interval that holds it, both NaN where nothing is known."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".3f") -> str:
        """The number, with its interval where there is one, for a sentence."""
        return f"{self.value:{form}}{between(self.low, self.high, form)}"


class Interval(NamedTuple):
    """Both ends of an interval, of the shape of what was estimated."""

    low: np.ndarray
    high: np.ndarray


def between(low: float, high: float, form: str = ".3f") -> str:
    """An interval for a sentence, behind what it is of; nothing if it is not known."""
    return f" ({low:{form}} to {high:{form}})" if np.isfinite(low) else ""


def windows(count: int) -> np.ndarray:
    """The window of each of `count` positions, [N], in their order from 0.

    Windows have `LENGTH` positions, or fewer so that there are at least 16; what is
    left over at the end belongs to the last.
    """
    length = max(1, min(LENGTH, count // _LEAST))
    last = max(count // length - 1, 0)
    return np.minimum(np.arange(count) // length, last)


def sums(values_N: np.ndarray, window_N: np.ndarray) -> np.ndarray:
    """Sums over the positions of each window, [W, ...] of [N, ...]."""
    starts_W = np.flatnonzero(np.diff(window_N, prepend=-1))
    return np.add.reduceat(values_N, starts_W, axis=0)


def interval(
    statistic: Callable[[np.ndarray], np.ndarray],
    count: int,
    seed: int = 0,
    bounds: tuple[float, float] = (-np.inf, np.inf),
) -> Interval:
    """The interval of a number, or of several at once.

    Args:
        statistic: weights of the windows [B, W] -> the numbers of each draw [B, ...],
            NaN where a draw has none.
        count: W.
        seed: of the draws.
        bounds: that the number cannot leave.

    Returns:
        Both ends, NaN where there are fewer than two windows or two draws.
    """
    value = np.asarray(statistic(np.ones((1, count))), np.float64)[0]
    if count < 2:
        return Interval(np.full_like(value, np.nan), np.full_like(value, np.nan))
    rng = np.random.default_rng(seed)
    weight_BW = rng.multinomial(count, np.full(count, 1 / count), DRAWS)
    drawn_B = np.asarray(statistic(weight_BW.astype(np.float64)), np.float64)
    reach = special.stdtrit(count - 1, (1 + LEVEL) / 2) * np.sqrt(count / (count - 1))
    reach = reach * _deviation(drawn_B)
    return Interval(np.clip(value - reach, *bounds), np.clip(value + reach, *bounds))


def of_mean(
    values_N: np.ndarray, bounds: tuple[float, float] = (-np.inf, np.inf)
) -> Interval:
    """The interval of the mean over positions, in their order, [...] of [N, ...]."""
    window_N = windows(len(values_N))
    flat_NM = np.reshape(values_N, (len(values_N), -1))
    sum_WM, count_W = sums(flat_NM, window_N), np.bincount(window_N)

    def mean(weight_BW):
        return (weight_BW @ sum_WM) / (weight_BW @ count_W)[:, None]

    ends = interval(mean, len(count_W), bounds=bounds)
    return Interval(*(end_M.reshape(np.shape(values_N)[1:]) for end_M in ends))


def described(*counts: int) -> str:
    """The sentence that tells what the intervals of a section are.

    Args:
        counts: positions that were looked at, of each model.
    """
    cuts = [np.bincount(windows(count)) for count in counts]
    lengths = " or ".join(map(str, sorted({int(cut[0]) for cut in cuts})))
    return over([len(cut) for cut in cuts], f"windows of {lengths} positions")


def over(counts: Sequence[int], what: str) -> str:
    """The same where other things than windows are drawn.

    Args:
        counts: how many there are, of each model.
        what: they are, in the plural.
    """
    told = " or ".join(f"{count:,}" for count in sorted({*counts}) if count > 1)
    if not told:
        return "The text is too short for intervals."
    return f"Intervals hold {LEVEL:.0%}: a bootstrap over {told} {what}."


def _deviation(drawn_B):
    """Of the draws that have a number; NaN where fewer than two have."""
    known_B = np.isfinite(drawn_B)
    count = known_B.sum(axis=0)
    filled_B = np.where(known_B, drawn_B, 0.0)
    mean = filled_B.sum(axis=0) / np.maximum(count, 1)
    square = np.where(known_B, np.square(drawn_B - mean), 0.0).sum(axis=0)
    return np.sqrt(np.where(count > 1, square / np.maximum(count - 1, 1), np.nan))
