"""Models trained, evaluated and read from with a cache of their own history."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle import model as models
from softbottle.data.batches import Batch
from softbottle.heads import cache
from softbottle.ops.mixture import decode, sampling
from softbottle.scoring import generate
from softbottle.training import evaluate
from tests import tiny
from tests.training import evaluate_test, pointer_test

VOCAB, WIDTH = 11, 6
CLOSE = {"rel": 1e-5}
ALPHA = 0.7
pytestmark = pytest.mark.usefixtures("quick_keys")


@functools.cache
def make(objective, backbone):
    config = tiny.make_softmax(
        backbone,
        WIDTH,
        cache__objective=objective,
        cache__alpha=ALPHA,
        cache__margin=0.1,
    )
    return tiny.draw_run(config, tiny.make_words(VOCAB), seed=2)


def make_batch():
    ids_BS = np.random.default_rng(0).integers(0, 4, (3, 10)).astype(np.int32)
    segments_BS = np.ones((3, 9), np.int32)
    segments_BS[0, 5:], segments_BS[2, 7:] = 2, 0
    weights_BS = (segments_BS > 0).astype(np.float32)
    weights_BS[1, :4] = 0
    return Batch(ids_BS[:, :-1], ids_BS[:, 1:], weights_BS, segments_BS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective, backbone", [("trime", "transformer"), ("histalign", "awd_lstm")]
)
def test_an_objective_is_the_likelihood_with_the_cache_and_the_ranking(
    objective, backbone
):
    batch = make_batch()
    run = make(objective, backbone)
    model, params = run.model, run.params
    carry = model.initial_carry(3)

    @jax.jit
    def both(params):
        loss, _ = model.loss(params, batch, carry, jax.random.key(0))
        hidden_BSD, _ = model.hidden(params, batch, carry)
        memory = cache.history(hidden_BSD, batch.labels_BS, batch.segments_BS)
        table_VE, tokens = model.output(params)[1], (batch.labels_BS, batch.weights_BS)
        misranked = cache.ranking_loss(table_VE, hidden_BSD, *tokens, memory, 0.1)
        return loss, model.cached_nll(params, batch, carry)[0].sum(), misranked

    loss, joined, misranked = both(params)
    assert float(loss.total) == pytest.approx(float(joined), **CLOSE)
    weight = ALPHA if objective == "histalign" else 0.0
    assert float(loss.penalty) == pytest.approx(weight * float(misranked), **CLOSE)
    assert loss.tokens == batch.weights_BS.sum() and misranked > 0


def joint_brute(params, ids, window):
    """(sum of -log P, words that the cache puts first) under the joint, by loops."""
    state_VD = pointer_test.state_oracle(params)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    head, total, hits = params["head"], 0.0, 0
    for now in range(len(ids) - 1):
        state_D, mass_V = state_VD[ids[now]], np.zeros(VOCAB)
        for then in range(max(0, now - window), now):
            score = state_D @ state_VD[ids[then]] / np.sqrt(len(state_D))
            mass_V[ids[then + 1]] += np.exp(score)
        prior_K = np.exp(state_D @ head["prior_DK"])
        p = 0.0
        for component, weight in enumerate(prior_K / prior_K.sum()):
            latent_E = state_D @ head["latent_DKE"][:, component]
            context_E = np.tanh(latent_E + head["latent_bias_KE"][component])
            odds_V = np.exp(params["output_VE"] @ context_E + params["bias_V"]) + mass_V
            p += weight * odds_V[ids[now + 1]] / odds_V.sum()
        total -= np.log(p)
        hits += mass_V.any() and mass_V.argmax() == ids[now + 1]
    return total, hits


@pytest.mark.slow
def test_the_joint_cache_of_a_text_is_that_of_loops():
    model, params = evaluate_test.make()
    ids = evaluate_test.make_ids(38)
    window = evaluate.Joint(9)  # longer than a batch, shorter than the text
    found = evaluate.evaluate_with_cache(model, params, ids, 7, window)
    total, hits = joint_brute(params, ids, 9)
    assert (found.count, found.hits) == (37, hits)
    assert found.total == pytest.approx(total, **CLOSE)
    assert hits > 0
    # In one row and one batch the history of the batch is that window.
    evaluator = evaluate.make_evaluator(model, cached=True)
    whole = evaluate.evaluate_with_cache(model, params, ids, 7, evaluate.Joint(50))
    joint = evaluator(params, ids, 1, 37)
    assert joint.total == pytest.approx(whole.total, **CLOSE)
    assert joint.hits == whole.hits > 0


def test_batches_that_begin_anew_have_no_state_from_before():
    def cut(ids, rows, length):
        del ids, rows, length
        yield from [make_batch()] * 3

    class Counting(models.Model):
        def nll(self, params, batch, carry):
            del params
            return batch.weights_BS * carry, carry + 1.0

        def initial_carry(self, rows):
            return jnp.zeros(())

    model, _ = evaluate_test.make()
    model = Counting(model.config, model.vocab, model.head)
    found = evaluate.make_evaluator(model, cut=cut)({}, np.zeros(9), 3, 9)
    assert found.total == 0 and found.count == 3 * make_batch().weights_BS.sum()


@pytest.mark.slow
def test_words_are_drawn_from_all_the_text_and_its_cache():
    run = make("trime", "awd_lstm")
    model, params = run.model, run.params
    prompt, options = [3, 1, 4, 3], {"temperature": 2.0, "seed": 5}
    words = list(generate.generate(run, prompt, 12, cache=True, **options))
    text = np.array([[*prompt, *words]], np.int32)
    ones = np.ones_like(text[:, :-1])
    batch = Batch(text[:, :-1], text[:, 1:], ones.astype(np.float32), ones)

    @jax.jit
    def drawn(params):
        """The words of the same keys, with all of the text at hand at once."""
        hidden_BSD, _ = model.hidden(params, batch, model.initial_carry(1))
        memory = cache.history(hidden_BSD, batch.labels_BS, batch.segments_BS)
        arguments = (*model.output(params), hidden_BSD, memory)
        log_p_BSV = model.cached.log_probs(*arguments, options=model.options)
        log_p_TV = log_p_BSV[0, len(prompt) - 1 :]
        keys = jax.random.split(jax.random.key(5), 12)

        def draw(step):
            key, log_p_V = step
            whole, chosen = decode.whole(log_p_V[None]), sampling.Sampling(2.0)
            return sampling.draw(whole, 1, key, chosen, model.options)[0]

        return jax.lax.map(draw, (keys, log_p_TV))

    assert words == np.asarray(drawn(params)).tolist()
    assert len(set(words)) > 2


@pytest.mark.slow
def test_a_word_drawn_exactly_may_come_from_the_cache():
    run = make("trime", "transformer")
    # Nothing but the cache has any mass to speak of.
    run = run._replace(params=run.params | {"bias_V": jnp.full(VOCAB, -50.0)})
    words = list(generate.generate(run, [3, 1, 4, 3], 12, cache=True))
    assert set(words) <= {1, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "backbone, joined", [("awd_lstm", True), ("transformer", False)]
)
def test_prompts_side_by_side_go_on_as_each_does_alone(backbone, joined):
    run = make("trime", backbone)
    prompts_BP = np.array([[3, 1, 4], [1, 5, 9], [2, 2, 6]])
    go_on = generate.make_continuer(run, 7, top_k=1, cache=joined)
    alone = [
        list(generate.generate(run, prompt, 7, top_k=1, cache=joined))
        for prompt in prompts_BP
    ]
    assert go_on(prompts_BP, 0).tolist() == alone


@pytest.mark.slow
def test_a_single_prompt_draws_with_the_keys_of_one_text():
    run, prompt = make("trime", "transformer"), [3, 1, 4]
    go_on = generate.make_continuer(run, 7)
    with pytest.raises(ValueError, match="at least one word; an empty one is"):
        go_on(np.zeros((2, 0), int), 4)
    one_BN = go_on(np.array([prompt]), 4)
    assert one_BN[0].tolist() == list(generate.generate(run, prompt, 7, seed=4))
