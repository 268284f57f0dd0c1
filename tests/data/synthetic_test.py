import numpy as np
import pytest

from softbottle.config import Synthetic
from softbottle.data import synthetic

WORDS = 11


def make_config(seed=0, **fields):
    sizes = {"words": WORDS, "train_tokens": 1009, "eval_tokens": 503}
    return Synthetic(seed=seed, **(sizes | fields))


@pytest.fixture(scope="module")
def truth():
    return synthetic.language(make_config())


def test_every_row_is_a_distribution(truth):
    assert truth.log_p_VV.shape == (WORDS, WORDS)
    assert truth.log_p_VV.dtype == np.float64
    np.testing.assert_allclose(np.exp(truth.log_p_VV).sum(axis=1), 1, rtol=1e-12)


def test_the_stationary_distribution_is_where_many_steps_lead(truth):
    after_VV = np.linalg.matrix_power(np.exp(truth.log_p_VV), 200)
    for row_V in after_VV:
        np.testing.assert_allclose(row_V, truth.stationary_V, rtol=1e-9)
    np.testing.assert_allclose(truth.stationary_V.sum(), 1, rtol=1e-12)


def test_a_language_of_words_that_hardly_ever_occur_has_a_text():
    config = make_config(words=64, spread=50.0)
    rare = synthetic.language(config)
    assert rare.stationary_V.min() >= 0
    np.testing.assert_allclose(rare.stationary_V.sum(), 1, rtol=1e-12)
    assert len(synthetic.corpus(config).train) == config.train_tokens


def test_the_entropy_is_the_mean_surprise_of_the_next_word(truth):
    entropy = 0.0
    for word, share in enumerate(truth.stationary_V):
        for log_p in truth.log_p_VV[word]:
            entropy -= share * np.exp(log_p) * log_p
    assert truth.entropy == pytest.approx(entropy, rel=1e-12)


@pytest.mark.parametrize("words", [11, 37])
@pytest.mark.parametrize("readings", [None, 2])
def test_the_log_probabilities_have_full_rank(words, readings):
    config = make_config(words=words, readings=readings, rank=3, spread=4.0)
    log_p_VV = synthetic.language(config).log_p_VV
    assert np.linalg.matrix_rank(log_p_VV) == words


def test_a_language_of_one_reading_is_a_softmax_of_its_rank():
    config = make_config(words=37, readings=1, rank=3)
    assert np.linalg.matrix_rank(synthetic.language(config).log_p_VV) == 3 + 1


def test_a_word_is_followed_by_what_any_of_its_readings_asks_for():
    config = make_config(readings=2, rank=3, spread=4.0)
    random = np.random.default_rng(config.seed)
    words, *readings = (random.standard_normal((WORDS, 3)) for _ in range(3))
    for word, log_p_V in enumerate(synthetic.language(config).log_p_VV):
        expected_V = np.zeros(WORDS)
        for reading in readings:
            weights_V = np.exp(4.0 / np.sqrt(3) * (words @ reading[word]))
            expected_V += 0.5 * weights_V / weights_V.sum()
        np.testing.assert_allclose(np.exp(log_p_V), expected_V, rtol=1e-12)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, "11 words, random"),
        ({"readings": 2, "rank": 3}, "11 words with 2 readings of rank 3"),
    ],
)
def test_a_language_is_described_by_what_it_is(fields, expected):
    assert synthetic.describe(make_config(**fields)) == expected


def test_a_wider_spread_makes_the_next_word_surer():
    entropies = [
        synthetic.language(make_config(spread=spread)).entropy
        for spread in (0.01, 1, 4)
    ]
    assert np.log(WORDS) > entropies[0] > entropies[1] > entropies[2] > 0


def test_texts_follow_the_law_of_the_language(truth):
    tokens = 60_000
    corpus = synthetic.corpus(make_config(train_tokens=tokens))
    for ids in (corpus.train, corpus.valid, corpus.test):
        assert ids.ndim == 1 and ids.min() >= 0 and ids.max() < WORDS
    counts_VV = np.zeros((WORDS, WORDS))
    np.add.at(counts_VV, (corpus.train[:-1], corpus.train[1:]), 1)
    joint_VV = truth.stationary_V[:, None] * np.exp(truth.log_p_VV)
    # Five deviations of a binomial, widened because the steps of a walk hang together.
    deviation_VV = np.sqrt(joint_VV / tokens)
    error_VV = np.abs(counts_VV / (tokens - 1) - joint_VV)
    assert np.all(error_VV < 1e-4 + 5 * 1.5 * deviation_VV)
    surprise_T = -truth.log_p_VV[corpus.train[:-1], corpus.train[1:]]
    spread = surprise_T.std() / np.sqrt(tokens)
    assert abs(surprise_T.mean() - truth.entropy) < 5 * 1.5 * spread


def test_sizes_and_words_are_those_of_the_config():
    corpus = synthetic.corpus(make_config())
    assert [len(ids) for ids in corpus[:3]] == [1009, 503, 503]
    assert len(corpus.vocab) == WORDS
    assert not np.array_equal(corpus.valid, corpus.test)


def test_the_same_seed_gives_the_same_language_and_text_and_another_another():
    first, again, other = (
        synthetic.corpus(make_config(seed=seed)) for seed in (3, 3, 4)
    )
    for ours, theirs, others in zip(first[:3], again[:3], other[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert not np.array_equal(ours, others)
    truth, different = (synthetic.language(make_config(seed=s)) for s in (3, 4))
    assert not np.allclose(truth.log_p_VV, different.log_p_VV)


def test_a_longer_text_is_in_the_same_language():
    short, long = (
        synthetic.language(make_config(train_tokens=tokens)) for tokens in (100, 1000)
    )
    np.testing.assert_array_equal(short.log_p_VV, long.log_p_VV)


def test_the_truth_does_not_diverge_from_itself(truth):
    previous_T = np.arange(WORDS).repeat(3)
    log_q_TV = truth.log_p_VV[previous_T]
    assert synthetic.divergence(truth, previous_T, log_q_TV) == 0


def test_the_divergence_is_the_one_computed_by_hand():
    p_VV = np.array([[0.5, 0.5], [0.75, 0.25]])
    truth = synthetic.Language(np.log(p_VV), np.array([0.6, 0.4]), 0.0)
    log_q_TV = np.log(np.array([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]))
    previous_T = np.array([0, 0, 1])
    # 1/2 log 2 + 1/2 log 2/3 = 0.1438410; 3/4 log 3/2 + 1/4 log 1/2 = 0.1308120.
    expected = (0 + 0.1438410 + 0.1308120) / 3
    found = synthetic.divergence(truth, previous_T, log_q_TV)
    assert found == pytest.approx(expected, abs=1e-6)
