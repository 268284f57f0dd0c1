"""Families of models by size: their own law, the given one, or none."""

import numpy as np
import pytest
from scipy import optimize

from softbottle.analysis.instruments import power_law, rank, scaling, sizes

PARAMETERS_M = np.array([7e7, 1.6e8, 4.1e8, 1e9, 1.4e9, 2.8e9, 6.9e9, 1.2e10])
LAW = power_law.Law(119.09, 0.246, 1.9)


def make_ranks(width, loss, rank_found=None):
    sigma = np.geomspace(1, 1e-3, 40)
    found = min(width + 1, 40) if rank_found is None else rank_found
    ranks = rank.Ranks(
        (400, 900),
        "float32",
        sigma,
        {"float32": 1e-6, "float64": 1e-12},
        {"float32": found, "float64": None},
        {loss: 7 for loss in rank.LOSSES},
    )
    return rank.HeadRanks(ranks, width + 1, 1.0, None, loss)


def family(loss_M, parameters_M=PARAMETERS_M, trained=None, words="one"):
    return {
        f"m{at}": sizes.Size(
            int(count), 8 * (at + 1), trained, make_ranks(8 * (at + 1), loss), words
        )
        for at, (count, loss) in enumerate(zip(parameters_M, loss_M, strict=True))
    }


@pytest.mark.parametrize("alpha, c", [(0.246, 1.9), (0.1, 0.0), (0.6, 2.5)])
def test_a_planted_law_is_recovered_with_nothing_given(alpha, c):
    a = 2.0 / 1e9**-alpha
    truth = power_law.Law(a, alpha, c)
    found = power_law.fit(PARAMETERS_M, truth.loss(PARAMETERS_M))
    np.testing.assert_allclose(
        found.loss(PARAMETERS_M), truth.loss(PARAMETERS_M), rtol=1e-6
    )
    assert found.alpha == pytest.approx(alpha, rel=1e-2)
    assert found.c == pytest.approx(c, abs=0.05)


def test_the_intervals_of_gaps_are_those_of_an_independent_fit():
    noise_M = np.exp(0.003 * np.random.default_rng(1).standard_normal(8))
    loss_M = LAW.loss(PARAMETERS_M) * noise_M
    fitted = PARAMETERS_M[2:], loss_M[2:]
    law = power_law.fit(*fitted)

    def log_loss(parameters_M, log_a, alpha, c):
        return np.log(np.exp(log_a - alpha * np.log(parameters_M)) + c)

    theta, covariance = optimize.curve_fit(
        log_loss, fitted[0], np.log(fitted[1]), (np.log(119), 0.25, 1.9), maxfev=20000
    )
    np.testing.assert_allclose(
        np.log(law.loss(fitted[0])), log_loss(fitted[0], *theta), rtol=1e-5
    )
    others = PARAMETERS_M[:2], loss_M[:2]
    found = power_law.gaps(law, fitted, others)
    residual_M = log_loss(fitted[0], *theta) - np.log(fitted[1])
    scatter = np.square(residual_M).sum() / 3
    for at in range(2):
        step = 1e-5
        slope = np.array(
            [
                (
                    log_loss(others[0][at], *(theta + step * unit))
                    - log_loss(others[0][at], *(theta - step * unit))
                )
                / (2 * step)
                for unit in np.eye(3)
            ]
        )
        deviation = np.sqrt(scatter + slope @ covariance @ slope)
        reach = 3.1824463 * deviation  # Student's t, 3 degrees
        middle = np.log(others[1][at]) - log_loss(others[0][at], *theta)
        expected = np.expm1([middle - reach, middle + reach])
        np.testing.assert_allclose(found[at], expected, rtol=2e-2, atol=1e-4)


def test_the_gap_of_a_small_model_is_taken_from_the_larger_ones_own_law():
    loss_M = LAW.loss(PARAMETERS_M)
    loss_M[0] *= 1.07
    section = sizes.section(family(loss_M))
    law = section.numbers["law"]
    assert law["fitted"] == ["m4", "m5", "m6", "m7"]
    assert law["gaps"]["m0"] == pytest.approx(0.07, abs=2e-3)
    assert abs(law["gaps"]["m1"]) < 2e-3
    low, high = law["within"]["m0"]
    assert low <= law["gaps"]["m0"] <= high
    assert "all three constants are fitted, to m4, m5, m6, m7, and none is given" in (
        section.reading
    )
    assert "Hoffmann" not in section.reading


def test_with_few_models_the_given_constants_are_said_or_there_is_no_law():
    given = scaling.Law(100.0, 0.3)
    parameters_M = PARAMETERS_M[:4]
    loss_M = given.loss(parameters_M, np.full(4, 3e11))
    section = sizes.section(family(loss_M, parameters_M, trained=3e11))
    assert "the other three constants are given (Hoffmann" in section.reading
    assert abs(section.numbers["law"]["gaps"]["m0"]) < 1e-6
    section = sizes.section(family(loss_M, parameters_M))
    assert "There is no law: one of their own needs 5 sizes" in section.reading
    assert "law" not in section.numbers


def test_several_models_of_the_largest_size_leave_the_law_its_sizes():
    own = np.array([1e5, 2e5, 3e5, 4e5, 5e5, *4 * [1e6]])
    section = sizes.section(family(LAW.loss(own), own))
    assert len(section.numbers["law"]["gaps"]) == len(own)
    given, few = scaling.Law(100.0, 0.3), np.array([1e5, 2e5, 1e6, 1e6])
    loss_M = given.loss(few, np.full(4, 3e11))
    section = sizes.section(family(loss_M, few, trained=3e11))
    assert abs(section.numbers["law"]["gaps"]["m0"]) < 1e-6


def test_given_constants_that_cannot_hold_are_no_law():
    parameters_M = PARAMETERS_M[:4]
    section = sizes.section(family(np.full(4, 3.0), parameters_M, trained=150_000))
    assert "give more than these losses for the text alone" in section.reading
    assert "law" not in section.numbers


def test_runs_trained_on_texts_of_other_lengths_have_no_law_of_their_own():
    models = family(LAW.loss(PARAMETERS_M) + 1, trained=1e11)
    models["m0"] = models["m0"]._replace(trained=2e11)
    assert "are given" in sizes.section(models).reading


def test_losses_on_other_tokens_are_not_compared():
    models = family(LAW.loss(PARAMETERS_M))
    for name in ("m0", "m1"):
        models[name] = models[name]._replace(words="other")
    section = sizes.section(models)
    assert set(section.numbers["law"]["gaps"]) == {f"m{at}" for at in range(2, 8)}
    assert "not comparable" in section.reading
    assert "m0, m1: There is no law" in section.reading


def test_two_models_are_bars_and_more_are_points():
    loss_M = LAW.loss(PARAMETERS_M)
    few = sizes.section(family(loss_M[:2], PARAMETERS_M[:2]))
    many = sizes.section(family(loss_M))
    for section, lines in ((few, False), (many, True)):
        losses, ranks = (figure.figure.axes[0] for figure in section.figures)
        assert bool(losses.lines) == lines
        assert bool(losses.patches) == bool(ranks.patches) == (not lines)
    # The bound of the widths, and each model's rank on it.
    bound, found, _ = many.figures[1].figure.axes[0].lines
    assert list(bound.get_xdata()) == [8 * at for at in range(1, 9)]
    assert list(bound.get_ydata()) == [8 * at + 1 for at in range(1, 9)]
    assert list(found.get_ydata()) == [min(8 * at + 1, 40) for at in range(1, 9)]


def test_models_that_do_not_compare_are_all_drawn_and_others_are_counted():
    models = family(LAW.loss(PARAMETERS_M[:3]), PARAMETERS_M[:3])
    apart = {name: m._replace(words=name) for name, m in models.items()}
    figure, _ = sizes.section(apart).figures
    assert len(figure.figure.axes[0].patches) == 3
    assert "No two of them have one text" in figure.reading
    models["m2"] = models["m2"]._replace(words="other")
    figure, _ = sizes.section(models).figures
    assert len(figure.figure.axes[0].patches) == 2
    assert figure.reading.endswith("1 of other texts or architectures are not shown.")


def test_a_law_of_their_own_needs_four_sizes_and_positive_numbers():
    with pytest.raises(ValueError, match="4 sizes or more"):
        power_law.fit([1e8, 1e8, 1e9, 2e9], [3.0, 3.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        power_law.fit([1e8, 2e8, 1e9, 2e9], [3.0, 3.0, -2.0, 2.0])
