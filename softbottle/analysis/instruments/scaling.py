"""The scaling law a saturated model falls behind.

    L(N, T) = A / N^alpha + B / T^beta + E

for N parameters and T tokens. B, beta and E are given, as Godey et al. keep them from
Hoffmann et al.; A and alpha are fitted to models large enough not to saturate, and the
gap of a smaller one is how far its loss lies above the law.

Of models that were trained on one text the last two terms are one constant, which can
be fitted as well where there are models enough (power_law.py).

Axes: M models.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.optimize
import scipy.special
from numpy.typing import ArrayLike

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, Models, present, real
from softbottle.analysis.settings import Settings
from softbottle.data import vocab

ABOUT = report.About(
    "The losses of models of several sizes beside the law that fits the larger ones.",
    "A small model far above the law does worse than its size explains, and a "
    "saturated output layer is one of the possible causes.",
    "Scaling laws and gaps",
)


class Law(NamedTuple):
    """L(N, T) = a / N^alpha + b / T^beta + e, for N parameters and T tokens."""

    a: float
    alpha: float
    b: float = 410.7
    beta: float = 0.28
    e: float = 1.69

    def loss(self, parameters: ArrayLike, tokens: ArrayLike) -> np.ndarray:
        """The loss the law predicts."""
        parameters = real("parameters", parameters)
        tokens = real("tokens", tokens)
        size = self.a * parameters**-self.alpha
        return size + self.b * tokens**-self.beta + self.e

    def gap(
        self, parameters: ArrayLike, tokens: ArrayLike, loss: ArrayLike
    ) -> np.ndarray:
        """How far a loss lies above the law, as a share of what it predicts."""
        return real("loss", loss) / self.loss(parameters, tokens) - 1


PYTHIA = Law(119.09, 0.246)  # the fit of Godey et al. to the models from 410M up


def fit(
    parameters_M: np.ndarray,
    tokens_M: np.ndarray,
    loss_M: np.ndarray,
    start: Law = PYTHIA,
) -> Law:
    """The law nearest to the losses: sum (log L - log loss)^2 least over a and alpha.

    Args:
        parameters_M: N of each model, two different ones or more.
        tokens_M: T that it was trained on.
        loss_M: that it reached, in nats.
        start: where the search starts; its b, beta and e are kept.

    Raises:
        ValueError: if the arrays do not match or are not positive, or no fit is found.
    """
    named = {"parameters": parameters_M, "tokens": tokens_M, "loss": loss_M}
    data = [real(name, array) for name, array in named.items()]
    bad = [array.shape for array in data if array.ndim != 1 or not np.all(array > 0)]
    if bad or len({array.shape for array in data}) > 1 or len(np.unique(data[0])) < 2:
        raise ValueError(
            f"a law needs two sizes or more, with positive tokens and losses for each, "
            f"got {[array.tolist() for array in data]}."
        )

    def law(theta):
        return start._replace(a=float(np.exp(theta[0])), alpha=float(theta[1]))

    solution = scipy.optimize.least_squares(
        lambda theta: np.log(law(theta).loss(*data[:2]) / data[2]),
        (np.log(start.a), start.alpha),
        xtol=1e-12,
        ftol=1e-12,
    )
    if not solution.success:
        raise ValueError(f"no law fits: {solution.message}")
    return law(solution.x)


def intervals(
    law: Law, parameters_M: np.ndarray, tokens_M: np.ndarray, loss_M: np.ndarray
) -> dict[str, tuple[float, float]] | None:
    """95% intervals of the fitted a and alpha; None if two models fit them exactly.

    With r the residuals of log L and J their derivatives by (log a, alpha), the
    covariance is |r|^2 / (M - 2) (J'J)^-1 and the quantile Student's with M - 2 degrees
    of freedom; b, beta and e are taken as exact.
    """
    spare = len(parameters_M) - 2
    if spare < 1:
        return None
    predicted_M = law.loss(parameters_M, tokens_M)
    share_M = law.a * real("parameters", parameters_M) ** -law.alpha / predicted_M
    jacobian_M2 = share_M[:, None] * np.stack(
        [np.ones_like(share_M), -np.log(parameters_M)], axis=1
    )
    residual_M = np.log(predicted_M / real("loss", loss_M))
    covariance = np.linalg.inv(jacobian_M2.T @ jacobian_M2)
    covariance *= np.square(residual_M).sum() / spare
    reach = scipy.special.stdtrit(spare, 0.975) * np.sqrt(np.diag(covariance))
    low, high = np.exp(np.log(law.a) + np.array([-reach[0], reach[0]]))
    return {
        "a": (float(low), float(high)),
        "alpha": (float(law.alpha - reach[1]), float(law.alpha + reach[1])),
    }


def of_models(
    parameters_M: np.ndarray,
    tokens_M: np.ndarray,
    loss_M: np.ndarray,
    names: Sequence[str] | None = None,
    fitted_M: np.ndarray | None = None,
) -> report.Section:
    """The law of the models that do not saturate, and the gap of every one to it.

    Args:
        parameters_M, tokens_M, loss_M: as of `fit`.
        names: of the models; their numbers of parameters if there are none.
        fitted_M: which models the law is fitted to; by default the larger half.

    Raises:
        ValueError: as `fit`, or if there is not one of everything for each model.
    """
    data = (parameters_M, tokens_M, loss_M)
    shapes = [np.shape(array) for array in data]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise ValueError(f"parameters, tokens and loss must be [M] each, got {shapes}.")
    if names is None:
        names = [f"{count:.3g}" for count in np.ravel(parameters_M)]
    if fitted_M is None:
        fitted_M = parameters_M >= np.median(parameters_M)
    fitted_M = np.asarray(fitted_M, bool)
    if not np.shape(names) == np.shape(fitted_M) == shapes[0]:
        raise ValueError(
            f"{np.size(parameters_M)} models need a name each and to be fitted or not, "
            f"got {np.size(names)} and {np.size(fitted_M)}."
        )
    # Names come out of a file, and go to the terminal.
    names = _apart([vocab.printable(str(name)) for name in names])
    chosen = [np.asarray(array)[fitted_M] for array in data]
    fitted = [name for name, taken in zip(names, fitted_M, strict=True) if taken]
    law = fit(*chosen)
    return section(law, names, *data, fitted=fitted, within=intervals(law, *chosen))


def _apart(names):
    """Names that several models have, with a number."""
    seen = collections.Counter()
    apart = []
    for name in names:
        seen[name] += 1
        apart.append(f"{name} ({seen[name]})" if names.count(name) > 1 else name)
    return apart


def of_capture(capture: Capture, settings: Settings) -> Models:
    """The trained models of a file, which has one list of them."""
    del settings
    return present("models", capture.models)


def compare(models: Models) -> report.Section:
    """The section on what `of_capture` gave."""
    return of_models(*models)


def section(
    law: Law,
    names: Sequence[str],
    parameters_M: np.ndarray,
    tokens_M: np.ndarray,
    loss_M: np.ndarray,
    *,
    fitted: Sequence[str] = (),
    within: dict[str, tuple[float, float]] | None = None,
) -> report.Section:
    """Models beside the law, with the gap of each.

    Args:
        law: the law.
        names: of the models.
        parameters_M, tokens_M, loss_M: as of `fit`.
        fitted: names of the models that a and alpha were fitted to; none if the whole
            law was given.
        within: what `intervals` gave for them.
    """
    predicted_M = law.loss(parameters_M, tokens_M)
    gap_M = law.gap(parameters_M, tokens_M, loss_M)
    figure = drawing.Figure(figsize=(6.4, 4.0))
    axes = figure.subplots()
    axes.loglog(parameters_M, loss_M, "o", label="measured")
    axes.loglog(parameters_M, predicted_M, "_", markersize=16, label="the law")
    axes.set(xlabel="parameters", ylabel="loss (nats)")
    drawing.plain(axes.yaxis)
    drawing.label(axes)
    gaps = ", ".join(f"{n} {gap:+.1%}" for n, gap in zip(names, gap_M, strict=True))
    remarks = (
        f"The law is {law.a:.4g} / N^{law.alpha:.3f} + {law.b:.4g} / T^{law.beta:.2f} "
        f"+ {law.e:.2f}. {_provenance(fitted, within)}"
    )
    lines = f"{remarks} Above it (+) or below it (-): {gaps}."
    columns = zip(
        names, parameters_M, tokens_M, loss_M, predicted_M, gap_M, strict=True
    )
    table = report.Table(
        ("model", "parameters", "tokens", "loss", "the law", "gap"),
        [
            (name, f"{n:.3g}", f"{t:.3g}", f"{loss:.3f}", f"{said:.3f}", f"{gap:+.1%}")
            for name, n, t, loss, said, gap in columns
        ],
    )
    reading = "A dot above its dash is a model that does worse than its size promises."
    numbers = law._asdict() | {
        "gaps": dict(zip(names, gap_M, strict=True)),
        "predicted": dict(zip(names, predicted_M, strict=True)),
        "fitted to": list(fitted),
        "intervals of 95%": within,
    }
    figures = [report.Figure("scaling-law", figure, reading)]
    return report.Section(
        "Scaling law", lines, figures, numbers, tables=[table], remarks=remarks
    )


def _provenance(fitted, within):
    """Which of the constants are given, which are fitted, and how closely."""
    if not fitted:
        return "All of its constants are given."
    if within is None:
        how = "two models, which they meet exactly: there is no interval"
    else:
        low, high = within["a"]
        first, last = within["alpha"]
        how = (
            f"{len(fitted)} models (95% intervals {low:.4g} to {high:.4g} and "
            f"{first:.3f} to {last:.3f})"
        )
    return (
        f"Fitted are the first factor and its exponent, to {how}: {', '.join(fitted)}. "
        "The other three constants are given (Hoffmann et al., 2022)."
    )
