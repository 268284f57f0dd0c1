"""Statements of docs/theory.md that tests/theory_test.py does not check.

Everything is float64 NumPy, and ranks are counted as they are there.
"""

import re

import numpy as np
import pytest
from scipy import special

from softbottle.analysis import inspection
from softbottle.analysis.instruments import divergence_section
from tests import ROOT

WIDTH, CONTEXTS, WORDS = 3, 61, 59


def rank_of(matrix):
    sigma = np.linalg.svd(matrix, compute_uv=False)
    eps = np.finfo(np.float64).eps
    return int(np.sum(sigma > 0.5 * np.sqrt(sum(matrix.shape) + 1) * sigma[0] * eps))


def product(seed=0, width=WIDTH, words=WORDS):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(CONTEXTS, width)) @ rng.normal(size=(width, words))


def centred(matrix_CV):
    return matrix_CV - matrix_CV.mean(axis=1, keepdims=True)


def log_sigsoftmax(logits_CV):
    return special.log_softmax(logits_CV + special.log_expit(logits_CV), axis=1)


def log_mixture(parts, prior_CK):
    log_prior_KC1 = np.log(prior_CK).T[:, :, None]
    stacked_KCV = np.stack([special.log_softmax(part, axis=1) for part in parts])
    return special.logsumexp(stacked_KCV + log_prior_KC1, axis=0)


def even_mixture(components, width=WIDTH, words=WORDS):
    """K products that share their table, as the components of a head do."""
    rng = np.random.default_rng(5)
    table_DV = rng.normal(size=(width, words))
    parts = [rng.normal(size=(CONTEXTS, width)) @ table_DV for _ in range(components)]
    prior_CK = np.full((CONTEXTS, components), 1 / components)
    return log_mixture(parts, prior_CK), parts


def test_logits_give_a_distribution_exactly_if_they_are_in_its_family():
    rng = np.random.default_rng(0)
    log_p_CV = special.log_softmax(rng.normal(size=(CONTEXTS, WORDS)), axis=1)
    member_CV = log_p_CV + rng.normal(size=(CONTEXTS, 1))
    np.testing.assert_allclose(
        special.log_softmax(member_CV, axis=1), log_p_CV, atol=1e-12
    )
    # One entry moved, which no shift of its row undoes, and the row is another.
    member_CV[2, 3] += 0.1
    moved_C = np.abs(special.log_softmax(member_CV, axis=1) - log_p_CV).max(axis=1)
    assert np.flatnonzero(moved_C > 1e-3).tolist() == [2]


@pytest.mark.parametrize("seed", range(4))
def test_the_centred_member_has_the_least_rank_and_all_others_at_most_one_more(seed):
    rng = np.random.default_rng(seed)
    matrix_CV = product(seed) + rng.normal(size=(CONTEXTS, 1))
    least = rank_of(centred(matrix_CV))
    shifts = [rng.normal(size=(CONTEXTS, 1)) for _ in range(4)]
    shifts += [-matrix_CV.mean(axis=1, keepdims=True), matrix_CV[:, :1]]
    for shift_C1 in shifts:
        member_CV = matrix_CV + shift_C1
        np.testing.assert_allclose(centred(member_CV), centred(matrix_CV), atol=1e-12)
        assert rank_of(member_CV) - least in (0, 1)


def test_a_head_narrower_than_the_rank_less_one_misses_and_a_wide_one_need_not():
    log_p_CV = special.log_softmax(product(width=9), axis=1)
    assert rank_of(log_p_CV) == 10
    left, sigma, right = np.linalg.svd(centred(log_p_CV), full_matrices=False)

    def best_error(width):
        logits_CV = left[:, :width] * sigma[:width] @ right[:width]
        return np.abs(special.log_softmax(logits_CV, axis=1) - log_p_CV).max()

    assert best_error(9) < 1e-10
    assert best_error(8) > 1e-2
    # What no eight dimensions can do: the centred ranks would have to be equal.
    assert rank_of(centred(log_p_CV)) == 9


def test_a_mean_of_contexts_is_one_context_and_adds_no_rank():
    rng = np.random.default_rng(0)
    context_KCD = rng.normal(size=(4, CONTEXTS, WIDTH))
    prior_CK = rng.dirichlet(np.ones(4), size=CONTEXTS)
    mean_CD = np.einsum("ck,kcd->cd", prior_CK, context_KCD)
    table_DV = rng.normal(size=(WIDTH, WORDS))
    log_p_CV = special.log_softmax(mean_CD @ table_DV, axis=1)
    assert rank_of(log_p_CV) == WIDTH + 1


@pytest.mark.parametrize("components", [2, 3])
def test_the_log_of_a_mixture_passes_every_multiple_of_the_width(components):
    log_p_CV, _ = even_mixture(components, width=2)
    assert rank_of(log_p_CV) > components * (2 + 1)
    assert rank_of(log_p_CV) > 30


def test_an_even_mixture_of_two_is_their_mean_plus_the_log_of_a_cosh():
    log_p_CV, (one_CV, two_CV) = even_mixture(2)
    one_CV, two_CV = (special.log_softmax(part, axis=1) for part in (one_CV, two_CV))
    bend_CV = np.log(np.cosh((one_CV - two_CV) / 2))
    np.testing.assert_allclose(log_p_CV, (one_CV + two_CV) / 2 + bend_CV, atol=1e-10)


def test_log_softmax_fills_the_space_of_the_logits_and_the_ones():
    rng = np.random.default_rng(0)
    table_DV = rng.normal(size=(WIDTH, WORDS))
    log_p_CV = special.log_softmax(
        rng.normal(size=(CONTEXTS, WIDTH)) @ table_DV, axis=1
    )
    space_XV = np.vstack([table_DV, np.ones(WORDS)])
    assert rank_of(log_p_CV) == WIDTH + 1
    assert rank_of(np.vstack([log_p_CV, space_XV])) == WIDTH + 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_log_sigsoftmax_contains_that_space_and_leaves_it(seed, scale):
    rng = np.random.default_rng(seed)
    table_DV = rng.normal(size=(WIDTH, WORDS))
    logits_CV = scale * rng.normal(size=(CONTEXTS, WIDTH)) @ table_DV
    bent_CV = log_sigsoftmax(logits_CV)
    space_XV = np.vstack([table_DV, np.ones(WORDS)])
    assert rank_of(bent_CV) >= rank_of(special.log_softmax(logits_CV, axis=1))
    # The squares of logits alone add d (d + 1) / 2 dimensions.
    assert rank_of(bent_CV) >= 1 + WIDTH + WIDTH * (WIDTH + 1) // 2
    assert rank_of(np.vstack([bent_CV, space_XV])) == rank_of(bent_CV)


def test_derivatives_at_zero_put_logits_and_their_squares_in_the_span():
    rng = np.random.default_rng(0)
    logits_CV = rng.normal(size=(1, WIDTH)) @ rng.normal(size=(WIDTH, WORDS))
    step = 1e-3
    ahead, here, behind = (log_sigsoftmax(t * logits_CV) for t in (step, 0.0, -step))
    np.testing.assert_allclose(here, -np.log(WORDS), rtol=1e-12)
    slope_CV = centred((ahead - behind) / (2 * step))
    np.testing.assert_allclose(slope_CV, 1.5 * centred(logits_CV), atol=1e-4)
    bend_CV = centred((ahead - 2 * here + behind) / step**2)
    np.testing.assert_allclose(bend_CV, -0.25 * centred(logits_CV**2), atol=1e-4)


def test_the_rank_of_p_says_nothing_of_the_rank_of_log_p():
    log_p_CV = special.log_softmax(4 * product(), axis=1)
    assert rank_of(log_p_CV) == WIDTH + 1
    assert rank_of(np.exp(log_p_CV)) > 10 * (WIDTH + 1)


def test_the_normaliser_is_subtracted():
    logits_CV = product()
    normaliser_C1 = special.logsumexp(logits_CV, axis=1, keepdims=True)
    np.testing.assert_allclose(np.exp(logits_CV - normaliser_C1).sum(axis=1), 1)
    assert np.all(np.exp(logits_CV + normaliser_C1).sum(axis=1) > 100)
    # The sign is invisible to the rank, which is how the slip survives.
    assert rank_of(logits_CV + normaliser_C1) == WIDTH + 1


def test_rank_can_rise_to_the_full_while_the_model_gets_worse_or_stays():
    logits_CV = product()
    log_p_CV = special.log_softmax(logits_CV, axis=1)
    noise_CV = np.random.default_rng(1).normal(size=logits_CV.shape)
    for size, worse in ((1e-6, False), (1.0, True)):
        log_q_CV = special.log_softmax(logits_CV + size * noise_CV, axis=1)
        divergence = np.mean(np.sum(np.exp(log_p_CV) * (log_p_CV - log_q_CV), axis=1))
        assert rank_of(log_q_CV) == min(CONTEXTS, WORDS)
        assert (divergence > 0.1) == worse


def test_every_test_that_the_page_names_exists_in_the_file_it_names():
    page = (ROOT / "docs" / "theory.md").read_text()
    letters = {"T": "tests/theory_test.py", "M": "tests/analysis/theory_more_test.py"}
    named = re.findall(r"\b([TM])\s+((?:`test_\w+`(?:,\s+)?)+)", page)
    named = [
        (letters[letter], test) for letter, tests in named for test in tests.split()
    ]
    named += re.findall(r"`(tests/\S+\.py)`\s+(`test_\w+`)", page)
    assert len(named) == len(re.findall(r"`test_\w+`", page)) > 20
    for path, test in named:
        name = test.strip("`,")
        assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


def test_every_instrument_s_heading_is_one_of_the_page():
    page = (ROOT / "docs" / "theory.md").read_text()
    headings = set(re.findall(r"^#+ (.*)$", page, re.MULTILINE))
    named = {name: line.about.theory for name, line in inspection.INSTRUMENTS.items()}
    named["compare"] = divergence_section.ABOUT.theory
    assert set(named.values()) <= headings, named
