"""Ranks of matrices that come in blocks, and what else one pass over a text tells."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, Readout, Tokens
from softbottle.analysis.instruments import (
    factors,
    mixture,
    predictions,
    rank,
    rank_section,
)
from softbottle.analysis.sources import run as source
from softbottle.ops.mixture.options import Options
from softbottle.training import evaluate
from tests import pictures, tiny

pytestmark = pytest.mark.usefixtures("quick_keys")
WORDS, WIDTH = 23, 3


def made_of(sigma, rows, columns, seed=0):
    random = np.random.default_rng(seed)
    left, _ = np.linalg.qr(random.standard_normal((rows, len(sigma))))
    right, _ = np.linalg.qr(random.standard_normal((columns, len(sigma))))
    return left * np.asarray(sigma) @ right.T


def cut(matrix, size=7):
    return (matrix[at : at + size] for at in range(0, len(matrix), size))


def log_softmax(logits_TV):
    return logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))


def random_log_p(rows, columns=WORDS, seed=0):
    random = np.random.default_rng(seed)
    return log_softmax(2 * random.standard_normal((rows, columns)))


@pytest.fixture(params=["cpu", "accelerator"])
def library(request, monkeypatch):
    """Both array libraries, whatever machine this is."""
    arrays = {"cpu": np, "accelerator": jnp}[request.param]
    monkeypatch.setattr(factors, "library", lambda array: arrays)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(83, 11), (11, 29)])
def test_blocks_have_the_spectrum_of_the_whole(library, shape, precision):
    matrix = np.random.default_rng(0).standard_normal(shape)
    found = rank.streamed(cut(matrix), precision)
    np.testing.assert_allclose(
        found.sigma, rank.spectrum(matrix, np.float64).sigma, rtol=1e-9
    )
    assert found.shape == shape and found.entries == "float64"
    for name, tolerance in found.tolerances.items():
        assert tolerance == pytest.approx(rank.spectrum(matrix, name).tolerance)


def test_each_tolerance_counts_what_stands_above_it():
    # 1e-5 is above both tolerances, 1e-10 above that of float64 only.
    matrix = made_of([1.0, 0.3, 1e-5, 1e-10], 97, 19)
    found = rank.streamed(cut(matrix), "float64")
    assert found.ranks == {"float32": 3, "float64": 4} and found.precision == "float64"
    np.testing.assert_allclose(found.sigma[:4], [1.0, 0.3, 1e-5, 1e-10], rtol=1e-4)
    coarse = rank.streamed(cut(matrix), "float32")
    # A Gram matrix squares 1e-10 out of sight, so it does not pretend to know.
    assert coarse.ranks == {"float32": 3, "float64": None}
    assert coarse.precision == "float32"


def test_float32_entries_are_of_full_rank_by_the_tolerance_of_float64():
    matrix = made_of([3.0, 2.0, 1.0], 61, 17).astype(np.float32)
    found = rank.streamed(cut(matrix), "float64")
    assert found.ranks == {"float32": 3, "float64": 17} and found.precision == "float32"


def test_the_effective_rank_leaves_no_more_than_it_may():
    sigma = np.sqrt([0.9, 0.0995, 4.95e-4, 4.5e-6, 5e-7])
    found = rank.streamed(cut(made_of(sigma, 41, 5)))
    assert found.effective == {1e-3: 2, 1e-4: 3, 1e-5: 3}
    assert rank.effective(sigma, 0) == 5 and rank.effective(sigma, 0.2) == 1
    with pytest.raises(ValueError, match="got 1.5"):
        rank.effective(sigma, 1.5)


def test_pairwise_divergence_is_the_mean_over_all_pairs(library):
    log_p_TV = random_log_p(17)
    pairs = rank.PairwiseKL()
    for block in cut(log_p_TV):
        pairs.add(block)
    expected = np.mean(
        [[np.exp(p) @ (p - q) for q in log_p_TV] for p in log_p_TV], axis=None
    )
    assert pairs.value == pytest.approx(expected, rel=1e-12)


def test_contexts_that_agree_do_not_diverge():
    pairs = rank.PairwiseKL()
    pairs.add(np.repeat(random_log_p(1), 5, axis=0))
    assert pairs.value == pytest.approx(0, abs=1e-12)


def test_logits_are_no_probabilities():
    with pytest.raises(ValueError, match="miss it by 2.0"):
        rank.PairwiseKL().add(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="no contexts"):
        print(rank.PairwiseKL().value)


def test_blocks_that_no_rank_can_be_taken_of_are_refused():
    bad = np.ones((5, 3))
    bad[2, 1] = np.nan
    with pytest.raises(ValueError, match="1 entries not finite"):
        rank.streamed([np.ones((2, 3)), bad])
    with pytest.raises(ValueError, match=r"3 columns wide, got \(2, 4\)"):
        rank.streamed([np.ones((2, 3)), np.ones((2, 4))])
    with pytest.raises(ValueError, match=r"two axes, got the shape \(3,\)"):
        rank.streamed([np.ones(3)])
    with pytest.raises(ValueError, match="no rows"):
        rank.streamed([])
    with pytest.raises(ValueError, match="'float16'"):
        rank.streamed([np.ones((2, 3))], "float16")


def test_mixing_is_what_bayes_says_token_by_token():
    prior_TK = np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    label_TK = np.array([[0.2, 0.4, 0.0001], [0.3, 0.3, 0.3]])
    found = mixture.mixing(np.log(prior_TK), np.log(label_TK))
    posterior_TK = np.array(
        [
            [p * q / (prior @ label) for p, q in zip(prior, label, strict=True)]
            for prior, label in zip(prior_TK, label_TK, strict=True)
        ]
    )
    for p_TK, entropy in (
        (prior_TK, found.prior_entropy),
        (posterior_TK, found.responsibility_entropy),
    ):
        assert entropy == pytest.approx(-np.mean([p @ np.log(p) for p in p_TK]))
    np.testing.assert_allclose(found.responsibility_K, posterior_TK.mean(axis=0))
    np.testing.assert_allclose(found.usage_K, [0.3, 0.525, 0.175])
    np.testing.assert_allclose(found.first_K, [0.5, 0.5, 0.0])
    low_K, high_K = found.usage_interval_2K
    assert np.all((low_K <= found.usage_K) & (found.usage_K <= high_K))
    # Two windows of a token each: 0.8 and 0.25 of the second component.
    assert high_K[1] - low_K[1] > 0.5 and found.responsibility_interval_2K.min() >= 0


def test_components_that_weigh_the_same_share_the_first_place():
    even_TK = np.log(np.full((4, 5), 0.2))
    found = mixture.mixing(even_TK, even_TK)
    np.testing.assert_allclose(found.first_K, 0.2)
    assert found.prior_entropy == pytest.approx(np.log(5))


@pytest.mark.slow
def test_components_of_a_sparse_mixture_are_told_apart():
    random = np.random.default_rng(0)
    head = softbottle.mos(4, active=2)
    shapes = jax.eval_shape(lambda key: head.init(key, WIDTH, WIDTH), jax.random.key(0))
    params = jax.tree.map(
        lambda leaf: np.float32(2 * random.normal(size=leaf.shape)), shapes
    )
    hidden_TD = random.normal(size=(60, WIDTH)).astype(np.float32)
    labels_T = random.integers(0, WORDS, 60)
    output = params, random.normal(size=(WORDS, WIDTH)), np.zeros(WORDS)
    readout = Readout(head, output, Options(vocab=WORDS))
    tokens = [
        Tokens(hidden_TD[:23], labels_T[:23]),
        Tokens(hidden_TD[23:], labels_T[23:]),
    ]
    capture = Capture("m", *output[1:], readout=readout, tokens=tokens)
    found = rank.measure(capture).mixing
    log_prior_TK = np.asarray(softbottle.mos(4).log_prior(params, hidden_TD))
    order_TK = np.argsort(-log_prior_TK, axis=1)
    prior_TK = np.exp(log_prior_TK)
    np.put_along_axis(prior_TK, order_TK[:, 2:], 0.0, axis=1)
    prior_TK /= prior_TK.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.usage_K, prior_TK.mean(axis=0), rtol=1e-5)
    first_K = np.bincount(order_TK[:, 0], minlength=4) / 60
    np.testing.assert_allclose(found.first_K, first_K, atol=1e-12)
    assert (
        found.responsibility_K.sum() == pytest.approx(1) and found.usage_K.min() > 0.1
    )
    assert found.prior_entropy < np.log(2)


def test_weights_and_labels_must_be_finite_and_alike():
    with pytest.raises(ValueError, match=r"\(2, 3\) and labels \(2, 4\)"):
        mixture.mixing(np.zeros((2, 3)), np.zeros((2, 4)))
    with pytest.raises(ValueError, match="6 entries are not finite"):
        mixture.mixing(np.zeros((2, 3)), np.full((2, 3), np.nan))
    with pytest.raises(ValueError, match="1 entries are not finite"):
        mixture.mixing(np.array([[0.0, -np.inf], [-np.inf, -np.inf]]), np.zeros((2, 2)))


def make_run(name, components):
    run, corpus = tiny.make_narrow_run(
        *(name, components, WORDS, WIDTH),
        data__synthetic__eval_tokens=151,
        data__eval_rows=1,  # so that blocks are in the order of the text
        model__vocab_multiple=8,
    )
    params = run.params
    params["bias_V"] = jnp.linspace(-1, 1, len(params["bias_V"]))
    params["head"] = jax.tree.map(lambda leaf: 4 * leaf, params["head"])
    return run, corpus.test


def captured(run, ids):
    return source.capture("run", run, ids, {"tokens"})


@pytest.fixture(scope="module")
def runs():
    return {name: make_run(name, k) for name, k in (("softmax", 1), ("mos", 3))}


@pytest.fixture(scope="module")
def measured(runs):
    return {
        "softmax": rank.measure(captured(*runs["softmax"]), "float64"),
        "mos": rank.measure(captured(*runs["mos"])),
    }


@pytest.mark.slow
def test_a_run_is_measured_as_its_dense_log_probabilities_are(runs, measured):
    run, ids = runs["mos"]
    found = measured["mos"]
    log_p_TV, _ = evaluate.log_probs(run.model, run.params, ids, len(ids), 70)
    dense = rank.spectrum(log_p_TV, np.float32)
    assert found.ranks.shape == log_p_TV.shape == (len(ids) - 1, WORDS)
    assert found.ranks.entries == "float32"
    assert found.ranks.ranks["float32"] == dense.rank > found.bound == WIDTH + 2
    np.testing.assert_allclose(found.ranks.sigma[:9], dense.sigma[:9], rtol=1e-5)
    log_p_TV = log_p_TV.astype(np.float64)
    kl_TT = [[np.exp(p) @ (p - q) for q in log_p_TV] for p in log_p_TV]
    assert found.kl == pytest.approx(np.mean(kl_TT), rel=1e-4)


def test_responsibilities_and_label_probabilities_are_those_of_the_loss(runs, measured):
    run, ids = runs["mos"]
    blocks = list(predictions.mixtures(captured(run, ids)))
    log_joint_TK = np.concatenate([b.log_prior_CK + b.log_label_CK for b in blocks])
    log_p_TV = np.concatenate([b.log_p_CV for b in blocks])
    expected_T = log_p_TV[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(
        np.logaddexp.reduce(log_joint_TK, axis=1), expected_T, rtol=1e-5
    )
    found = measured["mos"].mixing
    assert found.usage_K.sum() == pytest.approx(1, rel=1e-6)
    assert found.responsibility_K.sum() == pytest.approx(1, rel=1e-6)


def test_in_float64_a_softmax_stops_at_its_bound_by_both_tolerances(measured):
    found = measured["softmax"]
    assert found.ranks.entries == "float64" and found.mixing is None
    assert found.ranks.ranks == {"float32": WIDTH + 2, "float64": WIDTH + 2}
    # What follows the cliff is rounding of float64, not of float32.
    assert found.ranks.sigma[WIDTH + 2] < 1e-13 * found.ranks.sigma[0]
    assert jnp.zeros(()).dtype == jnp.float32


def headed(head):
    table_VE = np.random.default_rng(0).normal(size=(WORDS, WIDTH)).astype(np.float32)
    init = lambda key: head.init(key, WIDTH, WIDTH)  # noqa: E731
    output = jax.eval_shape(init, jax.random.key(0)), table_VE, None
    return Capture(
        "made",
        table_VE,
        readout=Readout(head, output, Options(vocab=WORDS)),
        tokens=[Tokens(table_VE[:7], np.arange(7))],
    )


@pytest.mark.slow
def test_a_head_beyond_the_bound_of_a_softmax_is_not_said_to_use_its_dimensions():
    capped = rank.measure(headed(softbottle.softcap(30.0)))
    # As of more positions, so that these are not the limit.
    ranks = capped.ranks._replace(shape=(99, WORDS), ranks={"float32": WIDTH})
    verdict = rank_section.verdict(capped._replace(ranks=ranks))
    assert verdict.startswith(f"has rank {WIDTH}, within the {WIDTH + 1} of a softmax")
    lifted = softbottle.partition(2), softbottle.mixtape(2, frequent=5)
    assert all(rank._lifts(headed(head)) for head in lifted)
    bounded = softbottle.softmax(), softbottle.moc(2)
    assert not any(rank._lifts(headed(head)) for head in bounded)


def test_the_section_is_a_page_with_each_head_on_it(measured, tmp_path, monkeypatch):
    section = rank_section.section(measured)
    assert f"softmax: rank {WIDTH + 2} of at most {WORDS}" in section.reading
    assert [one.name for one in section.figures] == ["rank-spectrum", "rank-components"]
    pictures.lay_out_only(monkeypatch)
    report.write(tmp_path, "Runs", [section])
    assert len(rank_section.section({"softmax": measured["softmax"]}).figures) == 1
