import functools

import jax
import numpy as np
import pytest

from softbottle import config as configs
from softbottle import model, sharding
from softbottle.training import evaluate
from tests import tiny

VOCAB, WIDTH = 11, 3
pytestmark = pytest.mark.usefixtures("quick_keys")


@functools.cache  # for files with quick keys, all of them
def make(backbone="window", multiple=1):
    config = configs.Config()
    config.head.name, config.head.components = "mos", 2
    config.head.context = "tanh"
    config.model.backbone, config.model.tied = backbone, False
    config.model.embed_dim, config.model.hidden_dim = 5, 7
    config.model.context_dim, config.model.last_dim = WIDTH, 7
    config.model.table_range, config.model.vocab_multiple = 1.0, multiple
    # Neither may have any part in an evaluation.
    config.regularise.output = config.regularise.latent = 0.5
    config.regularise.rows = config.regularise.activation = 0.5
    functions = model.make(configs.validate(config), VOCAB)
    shapes = jax.eval_shape(functions.init, jax.random.key(0))
    return functions, jax.device_put(tiny.draw(shapes))


def make_ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def bigram_oracle(params):
    """log P(next | previous) of the order-1 window model under MoS, in NumPy."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    inner, outer = (params["backbone"][name] for name in ("inner", "outer"))
    head = params["head"]
    log_p_VV = np.zeros((VOCAB, VOCAB))
    for word in range(VOCAB):
        state_H = np.tanh(params["table_VE"][word] @ inner["kernel"] + inner["bias"])
        state_D = state_H @ outer["kernel"] + outer["bias"]
        prior_K = np.exp(state_D @ head["prior_DK"])
        prior_K /= prior_K.sum()
        p_V = np.zeros(VOCAB)
        for component, weight in enumerate(prior_K):
            latent_E = state_D @ head["latent_DKE"][:, component]
            context_E = np.tanh(latent_E + head["latent_bias_KE"][component])
            odds_V = np.exp(params["output_VE"] @ context_E + params["bias_V"])[:VOCAB]
            p_V += weight * odds_V / odds_V.sum()
        log_p_VV[word] = np.log(p_V)
    return log_p_VV


@pytest.mark.slow
@pytest.mark.parametrize("rows, length", [(1, 1), (3, 7), (500, 2)])
def test_perplexity_is_that_of_a_loop_over_tokens_however_they_are_cut(rows, length):
    functions, params = make()
    ids = make_ids(101)
    log_p_VV = bigram_oracle(params)
    total = 0.0
    for previous, following in zip(ids[:-1], ids[1:], strict=True):
        total -= log_p_VV[previous, following]
    found = evaluate.make_evaluator(functions)(params, ids, rows, length)
    assert found.count == 100
    assert found.total == pytest.approx(total, rel=1e-5)
    assert found.loss == pytest.approx(total / 100, rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(total / 100), rel=1e-5)


@pytest.mark.slow
def test_a_recurrent_state_is_carried_from_batch_to_batch():
    functions, params = make("awd_lstm")
    evaluator = evaluate.make_evaluator(functions)
    ids = make_ids(48)
    whole, parts = (evaluator(params, ids, 1, length) for length in (47, 5))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    # From an empty state for every few words it would be another loss.
    cut = [evaluator(params, ids[start : start + 6], 1, 5) for start in range(0, 47, 5)]
    assert sum(each.count for each in cut) == whole.count
    assert sum(each.total for each in cut) != pytest.approx(whole.total, rel=1e-5)


def test_an_evaluation_compiles_one_program(compiled):
    functions, params = make("awd_lstm")
    # As those of a run that is loaded are.
    params = sharding.committed(params)
    evaluator = evaluate.make_evaluator(functions)
    compiled.clear()
    found = evaluator(params, make_ids(48), 1, 5)
    assert found.count == 47
    assert sum("score" in name for name in compiled) == 1


def test_rows_side_by_side_give_the_states_of_each_word_once():
    functions, params = make()
    ids = make_ids(48)
    (one,), parts = (
        list(evaluate.states(functions, params, ids, rows, 5)) for rows in (1, 3)
    )
    many = [np.concatenate(part) for part in zip(*parts, strict=True)]
    pairs = np.sort(ids[:-1] * 100 + ids[1:])
    # This trunk knows one word back, so that where a row starts makes no difference.
    for found in (one, many):
        np.testing.assert_array_equal(np.sort(found[1] * 100 + found[2]), pairs)
    places = [np.lexsort(found[1:]) for found in (one, many)]
    np.testing.assert_allclose(one[0][places[0]], many[0][places[1]], rtol=1e-5)


@pytest.mark.slow
def test_log_probs_are_distributions_over_the_words_alone():
    functions, params = make(multiple=8)
    assert len(params["output_VE"]) == 16
    # More positions are asked for than there are.
    ids = make_ids(30)
    log_p_TV, previous_T = evaluate.log_probs(functions, params, ids, 100, 7)
    assert log_p_TV.shape == (29, VOCAB) and log_p_TV.dtype == np.float32
    np.testing.assert_array_equal(previous_T, ids[:29])
    np.testing.assert_allclose(np.exp(log_p_TV).sum(axis=1), 1, rtol=1e-5)
    expected_TV = bigram_oracle(params)[ids[:29]]
    np.testing.assert_allclose(log_p_TV, expected_TV, rtol=1e-4, atol=1e-5)
