"""A scaling law of which no constant is given, for models trained on one text.

    L(N) = A / N^alpha + C

is the law of scaling.py where T is the same for all: what it says of T, and the loss
that no model can pass below, are one constant C.

Axes: M models.
"""

from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.special
from numpy.typing import ArrayLike

from softbottle.analysis.capture import real

OWN = 4  # sizes, at least, that all three constants of a power law are fitted to


class Law(NamedTuple):
    """L(N) = a / N^alpha + c, of models of N parameters trained on one text."""

    a: float
    alpha: float
    c: float

    def loss(self, parameters: ArrayLike) -> np.ndarray:
        """The loss the law predicts."""
        return self.a * real("parameters", parameters) ** -self.alpha + self.c

    def gap(self, parameters: ArrayLike, loss: ArrayLike) -> np.ndarray:
        """How far a loss lies above the law, as a share of what it predicts."""
        return real("loss", loss) / self.loss(parameters) - 1


def fit(parameters_M: np.ndarray, loss_M: np.ndarray) -> Law:
    """The law with no constant given: sum (log L - log loss)^2 least over all three.

    The search starts from the exponent of a grid at which a and c, both positive, fit
    best.

    Raises:
        ValueError: if there are fewer than `OWN` sizes, or a number is not positive.
    """
    parameters_M, loss_M = _positive(parameters_M, loss_M)
    if len(np.unique(parameters_M)) < OWN:
        raise ValueError(
            f"a law of their own needs {OWN} sizes or more, got "
            f"{parameters_M.tolist()}."
        )
    # Sizes over their geometric mean: a is then of the order of the losses.
    middle = np.exp(np.log(parameters_M).mean())
    n_M = parameters_M / middle

    def linear(alpha):
        basis_M2 = np.stack([n_M**-alpha, np.ones_like(n_M)], axis=1) / loss_M[:, None]
        return scipy.optimize.nnls(basis_M2, np.ones_like(n_M))

    grid = np.geomspace(0.01, 3, 120)
    start = min(grid, key=lambda alpha: linear(alpha)[1])
    a, c = linear(start)[0]
    solution = scipy.optimize.least_squares(
        lambda theta: np.log((theta[0] * n_M ** -theta[1] + theta[2]) / loss_M),
        (max(a, 1e-6), start, max(c, 1e-6)),
        bounds=([1e-12, 1e-3, 0], [np.inf, 5, np.inf]),
        xtol=1e-14,
        ftol=1e-14,
        gtol=1e-14,
        x_scale=(1.0, 0.1, 1.0),
    )
    a, alpha, c = map(float, solution.x)
    return Law(a * middle**alpha, alpha, c)


def gaps(
    law: Law,
    fitted: tuple[np.ndarray, np.ndarray],
    others: tuple[np.ndarray, np.ndarray],
) -> list[tuple[float, float]]:
    """95% intervals of the gaps of models that a law was not fitted to.

    They hold the uncertainty of the three constants and the scatter of a single model
    about the law, with r the residuals of log L, J their derivatives and j those of the
    other model: variance |r|^2 / (M - 3) (1 + j' (J'J)^-1 j), Student's t with M - 3
    degrees of freedom.

    Args:
        law: what `fit` gave.
        fitted: parameters and losses that it was fitted to, four or more.
        others: parameters and losses of the others.
    """
    spare = len(fitted[0]) - 3
    jacobian_M3 = _slopes(law, fitted[0])
    residual_M = np.log1p(law.gap(*fitted))
    inverse = np.linalg.pinv(jacobian_M3.T @ jacobian_M3, rcond=1e-14)
    slope_M3 = _slopes(law, others[0])
    share_M = 1 + np.einsum("mi,ij,mj->m", slope_M3, inverse, slope_M3)
    variance_M = np.square(residual_M).sum() / spare * share_M
    reach_M = scipy.special.stdtrit(spare, 0.975) * np.sqrt(variance_M)
    middle_M = np.log1p(law.gap(*others))
    return [
        (float(np.expm1(middle - reach)), float(np.expm1(middle + reach)))
        for middle, reach in zip(middle_M, reach_M, strict=True)
    ]


def _positive(*arrays):
    """Arrays [M] of positive numbers, in float64."""
    data = [real("parameters and losses", array) for array in arrays]
    if len({array.shape for array in data}) > 1 or not all(
        array.ndim == 1 and np.all(array > 0) for array in data
    ):
        raise ValueError(
            "a law needs a positive number of parameters and a positive loss for each "
            f"model, got {[array.tolist() for array in data]}."
        )
    return data


def _slopes(law, parameters_M):
    """d log L / d (log a, alpha, c) at each size."""
    parameters_M = real("parameters", parameters_M)
    loss_M = law.loss(parameters_M)
    share_M = law.a * parameters_M**-law.alpha / loss_M
    return np.stack([share_M, -share_M * np.log(parameters_M), 1 / loss_M], axis=1)
