"""The scaling law: its formula, its fit and the gaps to it."""

import numpy as np
import pytest
from scipy import optimize

from softbottle.analysis import report
from softbottle.analysis.instruments import scaling

PARAMETERS_M = np.array([4.1e8, 1e9, 1.4e9, 2.8e9, 6.9e9, 1.2e10])
TOKENS_M = np.array([3e11, 3e11, 2e11, 3e11, 1e11, 3e11])


def test_a_law_is_its_formula():
    law = scaling.Law(a=100.0, alpha=0.5, b=8.0, beta=1.0, e=1.5)
    assert law.loss(1e4, 4.0) == pytest.approx(1.0 + 2.0 + 1.5)
    assert law.gap(1e4, 4.0, 4.95) == pytest.approx(0.1)
    assert tuple(scaling.PYTHIA) == (119.09, 0.246, 410.7, 0.28, 1.69)


@pytest.mark.parametrize("a, alpha", [(119.09, 0.246), (40.0, 0.2), (900.0, 0.37)])
def test_a_planted_law_is_recovered(a, alpha):
    truth = scaling.Law(a, alpha)
    found = scaling.fit(PARAMETERS_M, TOKENS_M, truth.loss(PARAMETERS_M, TOKENS_M))
    assert found.a == pytest.approx(a, rel=1e-4)
    assert found.alpha == pytest.approx(alpha, rel=1e-5)
    assert (found.b, found.beta, found.e) == (410.7, 0.28, 1.69)


def test_a_law_under_noise_is_recovered_to_the_noise():
    noise_M = np.exp(0.002 * np.random.default_rng(0).standard_normal(6))
    loss_M = scaling.PYTHIA.loss(PARAMETERS_M, TOKENS_M) * noise_M
    found = scaling.fit(PARAMETERS_M, TOKENS_M, loss_M)
    assert found.alpha == pytest.approx(0.246, abs=0.02)
    gap_M = found.gap(PARAMETERS_M, TOKENS_M, loss_M)
    assert abs(gap_M).max() < 0.006


def test_the_section_of_a_law_names_each_gap(tmp_path):
    loss = 1.08 * scaling.PYTHIA.loss(7e7, 3e11)
    section = scaling.section(scaling.PYTHIA, ["70M"], [7e7], [3e11], [loss])
    assert "70M +8.0%" in section.reading
    report.write(tmp_path, "A law", [section])


def test_intervals_are_those_of_an_independent_fit():
    noise_M = np.exp(0.004 * np.random.default_rng(3).standard_normal(6))
    loss_M = scaling.PYTHIA.loss(PARAMETERS_M, TOKENS_M) * noise_M
    law = scaling.fit(PARAMETERS_M, TOKENS_M, loss_M)

    def log_loss(parameters_M, log_a, alpha):
        size_M = np.exp(log_a) / parameters_M**alpha
        return np.log(size_M + 410.7 / TOKENS_M**0.28 + 1.69)

    theta, covariance = optimize.curve_fit(
        log_loss, PARAMETERS_M, np.log(loss_M), (np.log(119.09), 0.246)
    )
    reach = 2.7764451 * np.sqrt(np.diag(covariance))  # Student's t, 4 degrees
    found = scaling.intervals(law, PARAMETERS_M, TOKENS_M, loss_M)
    expected = theta[0] - reach[0], theta[0] + reach[0]
    np.testing.assert_allclose(np.log(found["a"]), expected, rtol=1e-3)
    expected = theta[1] - reach[1], theta[1] + reach[1]
    np.testing.assert_allclose(found["alpha"], expected, rtol=1e-3)


def test_the_section_says_what_was_given_and_what_was_fitted():
    noise_M = np.exp(0.004 * np.random.default_rng(3).standard_normal(6))
    loss_M = scaling.PYTHIA.loss(PARAMETERS_M, TOKENS_M) * noise_M
    names = ["a", "b", "c", "d", "e", "f"]
    fitted_M = np.arange(6) > 1
    models = PARAMETERS_M, TOKENS_M, loss_M
    section = scaling.of_models(*models, names, fitted_M)
    law = scaling.fit(*(array[fitted_M] for array in models))
    low, high = scaling.intervals(law, *(array[fitted_M] for array in models))["alpha"]
    assert "to 4 models (95% intervals " in section.reading
    assert f"and {low:.3f} to {high:.3f}): c, d, e, f." in section.reading
    assert "The other three constants are given" in section.reading
    assert section.numbers["fitted to"] == names[2:]
    exact = scaling.of_models(*models, names, np.arange(6) > 3)
    assert "two models, which they meet exactly: there is no interval: e, f" in (
        exact.reading
    )
    assert exact.numbers["intervals of 95%"] is None
    alone = scaling.section(scaling.PYTHIA, names, *models)
    assert "All of its constants are given." in alone.reading


def test_a_law_needs_two_sizes_and_positive_numbers():
    with pytest.raises(ValueError, match="two sizes or more"):
        scaling.fit([1e9, 1e9], [1e11, 1e11], [2.0, 2.1])
    with pytest.raises(ValueError, match="-2.0"):
        scaling.fit([1e8, 1e9], [1e11, 1e11], [2.0, -2.0])
    with pytest.raises(ValueError, match="nan"):
        scaling.fit([1e8, 1e9], [1e11, 1e11], [2.0, np.nan])


def test_control_characters_of_names_are_shown_and_not_obeyed():
    sizes = np.array([1e7, 3e7, 1e9, 3e9])
    losses = np.array([3.0, 2.8, 2.5, 2.4])
    names = ["\x1b[2J", "b", "c", "d"]
    section = scaling.of_models(sizes, np.full(4, 1e11), losses, names)
    assert "\x1b" not in section.reading and r"\x1b[2J" in section.reading


def test_models_of_one_size_have_names_of_their_own():
    sizes = np.array([1e7, 3e7, 3e7, 1e9, 3e9])
    losses = np.array([3.0, 2.8, 2.9, 2.5, 2.4])
    section = scaling.of_models(sizes, np.full(5, 1e11), losses)
    gaps = section.numbers["gaps"]
    assert [*gaps] == ["1e+07", "3e+07 (1)", "3e+07 (2)", "1e+09", "3e+09"]
    assert gaps["3e+07 (1)"] < gaps["3e+07 (2)"]
