"""Ways to turn attention logits into weights that sum to one.

    softmax_i   = exp(l_i / T) / sum_j exp(l_j / T)
    sparsemax   = argmin_p ||p - l||^2 over distributions p
    entmax      = argmax_p  p . l + (1 - sum_i p_i^alpha) / (alpha (alpha - 1))
    scalable    = softmax of s log(L) l
    top-k       = softmax over the k largest l, 0 elsewhere

Each works along the last axis, in float64.

Axes: R rows (a head, a query), L tokens.
"""

import functools
from collections.abc import Callable

import numpy as np
from scipy import special

from softbottle.analysis.capture import real

Normalizer = Callable[[np.ndarray], np.ndarray]

KEPT = 8  # k of the top-k that is measured
_BISECTIONS = 60


def softmax(logits_RL: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """exp(l / T) over its sum, along the last axis."""
    return special.softmax(finite("logits", logits_RL) / temperature, axis=-1)


def scalable_softmax(logits_RL: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """Softmax of s log(L) l, which does not fade as L grows (Nakanishi, 2025)."""
    return softmax(scale * np.log(np.shape(logits_RL)[-1]) * np.asarray(logits_RL))


def sparsemax(logits_RL: np.ndarray) -> np.ndarray:
    """max(l - tau, 0) with tau such that it sums to one: the nearest distribution."""
    logits_RL = finite("logits", logits_RL)
    sorted_RL = -np.sort(-logits_RL, axis=-1)
    rank_L = np.arange(1, logits_RL.shape[-1] + 1)
    excess_RL = np.cumsum(sorted_RL, axis=-1) - 1
    support_R1 = np.sum(rank_L * sorted_RL > excess_RL, axis=-1, keepdims=True)
    tau_R1 = np.take_along_axis(excess_RL, support_R1 - 1, axis=-1) / support_R1
    return np.maximum(logits_RL - tau_R1, 0)


def entmax(logits_RL: np.ndarray, alpha: float = 1.5) -> np.ndarray:
    """max((alpha - 1) l - tau, 0)^(1 / (alpha - 1)), summing to one, by bisection.

    Raises:
        ValueError: if alpha <= 1 (softmax is its limit there; 2 is sparsemax).
    """
    if alpha <= 1:
        raise ValueError(f"alpha must be > 1, got {alpha}.")
    scaled_RL = (alpha - 1) * finite("logits", logits_RL)
    power, length = 1 / (alpha - 1), scaled_RL.shape[-1]
    top_R1 = scaled_RL.max(axis=-1, keepdims=True)
    low_R1, high_R1 = top_R1 - 1, top_R1 - length ** (1 - alpha)
    for _ in range(_BISECTIONS):
        middle_R1 = (low_R1 + high_R1) / 2
        sum_R1 = np.sum(
            np.maximum(scaled_RL - middle_R1, 0) ** power, axis=-1, keepdims=True
        )
        low_R1 = np.where(sum_R1 >= 1, middle_R1, low_R1)
        high_R1 = np.where(sum_R1 >= 1, high_R1, middle_R1)
    weights_RL = np.maximum(scaled_RL - low_R1, 0) ** power
    return weights_RL / weights_RL.sum(axis=-1, keepdims=True)


def top_k(logits_RL: np.ndarray, count: int) -> np.ndarray:
    """Softmax over the `count` largest logits; all others have weight 0.

    However many tokens there are, the largest weight is at least 1 / k. Of equal logits
    the first ones are taken.

    Raises:
        ValueError: if the count is not positive.
    """
    if count < 1:
        raise ValueError(f"k must be positive, got {count}.")
    logits_RL = finite("logits", logits_RL)
    order_RL = np.argsort(-logits_RL, axis=-1, kind="stable")[..., :count]
    weights_RL = np.zeros_like(logits_RL)
    largest_RL = softmax(np.take_along_axis(logits_RL, order_RL, axis=-1))
    np.put_along_axis(weights_RL, order_RL, largest_RL, axis=-1)
    return weights_RL


ALL: dict[str, Normalizer] = {
    "softmax": softmax,
    "scalable softmax": scalable_softmax,
    "1.5-entmax": functools.partial(entmax, alpha=1.5),
    "sparsemax": sparsemax,
    f"top-{KEPT}": functools.partial(top_k, count=KEPT),
}


def finite(name: str, array: np.ndarray) -> np.ndarray:
    """The array in float64.

    Raises:
        ValueError: if it has no axes, nothing in it, or an entry that is not finite.
    """
    array = real(name, array)
    wrong = np.sum(~np.isfinite(array))
    if not array.ndim or not array.size or wrong:
        raise ValueError(
            f"{name} must be finite and not empty, got the shape {array.shape} with "
            f"{wrong} entries not finite."
        )
    return array
