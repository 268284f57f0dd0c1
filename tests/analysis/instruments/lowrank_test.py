"""Rank-constrained heads on frozen states whose need is known."""

import numpy as np
import pytest

from softbottle.analysis.instruments import lowrank

pytestmark = pytest.mark.usefixtures("quick_keys")
STATES, WIDTH, WORDS, TRUE_RANK = 3001, 7, 11, 2
LONG = lowrank.Training(steps=300, batch=256, learning_rate=3e-2)


def make_text(rank=TRUE_RANK):
    """States whose next word depends on them through `rank` dimensions only."""
    random = np.random.default_rng(0)
    hidden_ND = random.normal(size=(STATES, WIDTH))
    table_VD = random.normal(size=(WORDS, rank)) @ random.normal(size=(rank, WIDTH))
    logits_NV = hidden_ND @ table_VD.T
    labels_N = np.argmax(logits_NV + random.gumbel(size=logits_NV.shape), axis=1)
    log_p_NV = logits_NV - np.log(np.exp(logits_NV).sum(axis=1, keepdims=True))
    truth = -log_p_NV[np.arange(STATES), labels_N][STATES * 9 // 10 :].mean()
    return hidden_ND, labels_N, table_VD, truth


@pytest.fixture(scope="module")
def found():
    hidden_ND, labels_N, table_VD, _ = make_text()
    return lowrank.train(hidden_ND, labels_N, WORDS, [4, 1, 2], table_VD, LONG)


@pytest.mark.slow
def test_the_knee_is_the_rank_that_the_words_depend_on(found):
    assert list(found.ranks_R) == [1, 2, 4]
    assert found.knee == TRUE_RANK
    assert found.loss_R[0] > found.loss_R[1] + 0.1


def test_a_head_of_the_true_rank_comes_near_the_true_loss(found):
    truth = make_text()[-1]
    assert abs(found.loss_R[1] - truth) < 0.1


def test_w_error_is_what_the_singular_values_leave(found):
    sigma = np.linalg.svd(make_text()[2], compute_uv=False)
    assert found.w_error_R[0] == pytest.approx(sigma[1] / np.hypot(*sigma[:2]))
    assert found.w_error_R[1:] == pytest.approx(0, abs=1e-7)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses(found):
    hidden_ND, labels_N, _, _ = make_text()
    again = lowrank.train(hidden_ND, labels_N, WORDS, [1], training=LONG)
    assert again.loss_R[0] == found.loss_R[0]
    assert np.isnan(again.w_error_R).all()


def test_a_cut_is_the_nearest_head_of_its_rank_in_the_logits_of_the_states():
    hidden_ND, labels_N, table_VD, _ = make_text(WIDTH)
    hidden_ND = hidden_ND * np.geomspace(1, 30, WIDTH)[None]
    own = lowrank.Own(table_VD, np.linspace(-1, 1, WORDS))
    split = lowrank._split(hidden_ND, labels_N)
    root_DD, basis_DD = lowrank.leading(split.hidden_SD, table_VD)
    params, table_VR, bias_V = lowrank.nearest(
        root_DD, basis_DD[:, :3], own, split.scale
    )
    found_SV = split.hidden_SD @ params["project_DE"] @ table_VR.T
    logits_SV = hidden_ND[: len(found_SV)] @ table_VD.T
    left, sigma, right = np.linalg.svd(logits_SV, full_matrices=False)
    expected_SV = left[:, :3] * sigma[None, :3] @ right[:3]
    np.testing.assert_allclose(found_SV, expected_SV, atol=1e-4 * sigma[0])
    np.testing.assert_allclose(bias_V, own.bias_V, rtol=1e-6)


@pytest.mark.slow
def test_heads_that_begin_with_the_model_s_own_know_what_it_knows():
    hidden_ND, labels_N, table_VD, truth = make_text(rank=4)
    own = lowrank.Own(table_VD, np.zeros(WORDS))
    short = lowrank.FROM_OWN._replace(steps=20)
    found = lowrank.cut(hidden_ND, labels_N, [2, 4, 7], own, short)
    assert found.own == pytest.approx(truth, rel=1e-5)
    # The table is the truth and has rank 4: cutting it there costs nothing.
    assert found.cut_R[1:] == pytest.approx(truth, rel=1e-4)
    assert found.knee == 4 and found.cut_R[1] < found.cut_R[0] - 0.05
    assert found.loss_R[0] < found.cut_R[0]
    assert "own head, over the same words" in lowrank.section({"a": found}).reading


def test_the_section_names_the_knee(found):
    section = lowrank.section({"a model": found})
    assert "rank 2 is as good as any" in section.reading
    assert section.numbers["a model"]["knee"] == TRUE_RANK


def test_bad_input_is_an_error_that_names_it():
    hidden_ND, labels_N, _, _ = make_text()
    with pytest.raises(ValueError, match=r"\[1, 7\].*got \[1, 8\]"):
        lowrank.train(hidden_ND, labels_N, WORDS, [8, 1])
    with pytest.raises(ValueError, match="labels must lie in"):
        lowrank.train(hidden_ND, labels_N, 3, [1])
    with pytest.raises(ValueError, match="1 entries not finite"):
        poisoned_ND = hidden_ND.copy()
        poisoned_ND[5, 5] = np.inf
        lowrank.train(poisoned_ND, labels_N, WORDS, [1])
    with pytest.raises(ValueError, match=r"\(9,\)"):
        lowrank.train(hidden_ND, labels_N[:9], WORDS, [1])
    with pytest.raises(ValueError, match="differ in width"):
        own = lowrank.Own(np.ones((WORDS, 3)), np.zeros(WORDS))
        lowrank.cut(hidden_ND, labels_N, [1], own)
