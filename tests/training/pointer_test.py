import jax
import numpy as np
import pytest

from softbottle.training import evaluate
from tests.training.evaluate_test import bigram_oracle, make, make_ids

THETA, SHARE, LENGTH = 0.7, 0.3, 7
CLOSE = {"rel": 1e-5}
pytestmark = pytest.mark.usefixtures("quick_keys")


@pytest.fixture(scope="module")
def model():
    """(functions, params) of a bigram model under MoS."""
    return make()


def state_oracle(params):
    """The state after each word of the order-1 window model, in NumPy."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    inner, outer = (params["backbone"][name] for name in ("inner", "outer"))
    state_VH = np.tanh(params["table_VE"] @ inner["kernel"] + inner["bias"][None])
    return state_VH @ outer["kernel"] + outer["bias"][None]


def brute(params, ids, pointer):
    """Sum of -log P(word) under the model and its cache, by loops."""
    log_p_VV, state_VD = bigram_oracle(params), state_oracle(params)
    total = 0.0
    for now in range(len(ids) - 1):
        following = ids[now + 1]
        p = np.exp(log_p_VV[ids[now], following])
        past = range(max(0, now - pointer.window), now)
        if past:
            mass = hits = 0.0
            for then in past:
                score = pointer.theta * state_VD[ids[now]] @ state_VD[ids[then]]
                mass += np.exp(score)
                hits += np.exp(score) * (ids[then + 1] == following)
            p = (1 - pointer.share) * p + pointer.share * hits / mass
        total -= np.log(p)
    return total


# Shorter than a batch, longer than one, longer than the text.
@pytest.mark.parametrize("window", [3, 11, 50])
def test_the_cache_gives_what_a_loop_over_positions_gives(model, window):
    functions, params = model
    ids = make_ids(38)  # five batches and a part of one
    pointer = evaluate.Pointer(window, THETA, SHARE)
    found = evaluate.evaluate_with_cache(functions, params, ids, LENGTH, pointer)
    assert found.count == 37
    assert found.total == pytest.approx(brute(params, ids, pointer), **CLOSE)


@pytest.mark.slow
def test_a_cache_with_hardly_a_share_leaves_the_model_as_it_is(model):
    functions, params = model
    ids = make_ids(38)
    static = evaluate.make_evaluator(functions)(params, ids, 1, LENGTH)
    for share in (0.0, 1e-7):
        pointer = evaluate.Pointer(11, THETA, share)
        found = evaluate.evaluate_with_cache(functions, params, ids, LENGTH, pointer)
        assert found.count == static.count
        assert found.total == pytest.approx(static.total, **CLOSE)


def test_the_first_word_has_no_past_and_is_the_models_alone(model):
    functions, params = model
    ids = make_ids(2)
    # Even a cache that has all the say says nothing here.
    pointer = evaluate.Pointer(11, THETA, 1.0)
    found = evaluate.evaluate_with_cache(functions, params, ids, LENGTH, pointer)
    assert found.count == 1
    assert found.total == pytest.approx(-bigram_oracle(params)[tuple(ids)], **CLOSE)
