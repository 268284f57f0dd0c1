import numpy as np
import pytest

import softbottle
from softbottle.data import synthetic
from softbottle.training import loop, state
from tests import tiny


@pytest.mark.slow
def test_a_run_may_start_from_the_words_frequencies(tmp_path):
    config = tiny.make_config(
        model__bias_start="frequency",
        model__vocab_multiple=4,
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
