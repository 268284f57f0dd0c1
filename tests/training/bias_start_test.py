import jax
import numpy as np
import pytest

import softbottle
from softbottle import model as models
from softbottle.data import synthetic
from softbottle.data.batches import Batch
from softbottle.training import loop, optim, state
from softbottle.training import step as steps
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_keys")


@pytest.mark.slow
def test_a_run_may_start_from_the_words_frequencies(tmp_path):
    config = tiny.make_config(
        head__name="softmax",
        head__components=None,
        model__last_dim=3,
        model__bias_start="frequency",
        model__vocab_multiple=4,
        optim__name="sgd",
        optim__learning_rate=1e-9,
        train__steps=1,
        train__eval_every=1,
    )
    loop.run(config, tmp_path / "run")
    run = state.load_run(tmp_path / "run")
    text = synthetic.corpus(config.data.synthetic).train
    counts_V = np.bincount(text, minlength=11)
    bias_V = softbottle.log_frequencies(counts_V)
    np.testing.assert_allclose(run.params["bias_V"][:11], bias_V, atol=1e-6)
    np.testing.assert_allclose(run.params["bias_V"][11:], 0, atol=1e-6)


@pytest.mark.slow
def test_cells_count_words_where_the_bias_has_to_be_learned():
    # Words as frequent as in a text and without any order: all there is to be learned
    # is how frequent they are.
    words, rows, length = 500, 16, 10
    share_V = 1 / np.arange(1, words + 1)
    share_V /= share_V.sum()
    config = tiny.make_softmax(
        *("awd_lstm", 16),
        model__table_range=0.1,
        data__rows=rows,
        optim__learning_rate=0.01,
        optim__clip=1.0,
    )
    model, tx = models.make(config, words), optim.make(config.optim)
    step, counting = steps.make_step(config, model, tx), []
    weights_BS = np.ones((rows, length), np.float32)
    segments_BS = np.ones((rows, length), np.int32)
    start = jax.device_get(steps.init_state(config, model, tx))
    for bias_V in (start.params["bias_V"], softbottle.log_frequencies(1e6 * share_V)):
        # Put there as often as it is donated.
        trained = jax.device_put(
            start.replace(params=start.params | {"bias_V": bias_V})
        )
        rng = np.random.default_rng(0)
        for number in range(100):
            ids_BS = rng.choice(words, (rows, length + 1), p=share_V).astype(np.int32)
            batch = Batch(ids_BS[:, :-1], ids_BS[:, 1:], weights_BS, segments_BS)
            trained, _ = step(trained, batch, number == 0)
        _, cell_BD = jax.tree.leaves(trained.carry)
        # Open gates add 1 per word, others hold less.
        counting.append(np.mean(np.abs(cell_BD) > 3))
    assert counting[0] > 0.9 and counting[1] == 0
