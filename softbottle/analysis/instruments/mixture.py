"""How a mixture uses its components: weights, and responsibilities given labels."""

from typing import NamedTuple

import matplotlib.ticker
import numpy as np
from scipy import special

from softbottle import drawing
from softbottle.analysis import bootstrap, report
from softbottle.analysis.capture import real


class Mixing(NamedTuple):
    """How a mixture uses its components; entropies in nats, means over tokens.

    Attributes:
        prior_entropy: of the mixture weights.
        usage_K: mean weight.
        first_K: share of the tokens at which the component weighs most.
        responsibility_K: mean posterior given the label.
        responsibility_entropy: of that posterior.
        usage_interval_2K: both ends, of `usage_K`, over windows of tokens.
        responsibility_interval_2K: the same of `responsibility_K`.
    """

    prior_entropy: float
    usage_K: np.ndarray
    first_K: np.ndarray
    responsibility_K: np.ndarray
    responsibility_entropy: float
    usage_interval_2K: np.ndarray
    responsibility_interval_2K: np.ndarray


def mixing(log_prior_TK: np.ndarray, log_label_TK: np.ndarray) -> Mixing:
    """Entropy and usage of mixture weights pi, and responsibilities given labels.

        r_k = pi_k P_k(label) / sum_j pi_j P_j(label).

    Args:
        log_prior_TK: log pi; -inf for a component that is not active.
        log_label_TK: log P_k(label), each component's own.

    Raises:
        ValueError: if the two are not matrices of one shape, or an entry is not finite
            that has to be.
    """
    log_prior_TK = real("weights", log_prior_TK)
    log_label_TK = real("labels", log_label_TK)
    matched = log_prior_TK.ndim == 2 and log_prior_TK.shape == log_label_TK.shape
    known_TK = np.isfinite(log_prior_TK) | np.isneginf(log_prior_TK)
    bad = np.sum(~known_TK) + np.sum(~np.isfinite(log_label_TK))
    bad += np.sum(np.all(np.isneginf(log_prior_TK), axis=-1))
    if not matched or bad:
        raise ValueError(
            f"weights {log_prior_TK.shape} and labels {log_label_TK.shape} must be "
            f"finite matrices of one shape; {bad} entries are not finite."
        )
    prior_TK = np.exp(log_prior_TK)
    log_joint_TK = log_prior_TK + log_label_TK
    log_r_TK = log_joint_TK - np.logaddexp.reduce(log_joint_TK, axis=1, keepdims=True)
    first_TK = prior_TK == prior_TK.max(axis=1, keepdims=True)
    return Mixing(
        float(special.entr(prior_TK).sum(axis=1).mean()),
        prior_TK.mean(axis=0),
        (first_TK / first_TK.sum(axis=1, keepdims=True)).mean(axis=0),
        np.exp(log_r_TK).mean(axis=0),
        float(special.entr(np.exp(log_r_TK)).sum(axis=1).mean()),
        np.stack(bootstrap.of_mean(prior_TK, (0, 1))),
        np.stack(bootstrap.of_mean(np.exp(log_r_TK), (0, 1))),
    )


def draw(mixed: dict[str, Mixing]) -> report.Figure:
    """Mean weights and responsibilities of the components, largest first."""
    figure = drawing.Figure(figsize=(6.4, 3.5))
    axes = figure.subplots()
    for name, mixing in mixed.items():
        order_K = np.argsort(-mixing.usage_K)
        place_K = np.arange(1, len(order_K) + 1)
        given_K = mixing.responsibility_K[order_K]
        lines = [
            *axes.plot(place_K, mixing.usage_K[order_K], "o-", label=f"{name}: weight"),
            *axes.plot(place_K, given_K, "x--", label=f"{name}: given the word"),
        ]
        intervals = mixing.usage_interval_2K, mixing.responsibility_interval_2K
        for line, ends_2K in zip(lines, intervals, strict=True):
            ends = ends_2K[:, order_K]
            axes.fill_between(place_K, *ends, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="component, by weight", ylabel="mean share", ylim=(0, None))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    drawing.label(axes)
    reading = (
        "Mean weight of each component, and its mean responsibility for the words that "
        "came; shaded: their intervals over windows of text. A component near zero is "
        "idle."
    )
    return report.Figure("rank-components", figure, reading)
