import importlib.util

import numpy as np
import pytest

from softbottle import config as configs
from softbottle.data import corpus, lines, templates
from softbottle.experiments import ambiguity
from softbottle.training import loop as train
from softbottle.training import state
from tests import ROOT

FILE = ROOT / "configs" / "templates.py"
pytestmark = pytest.mark.usefixtures("quick_keys")


def test_accuracy_counts_right_answers_among_the_first_k():
    with np.errstate(divide="ignore"):
        log_p_NV = np.log([[0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.0, 0.0]])
    right_NA = np.array([[0, 3], [1, 2]])
    found = [ambiguity.accuracy_at(log_p_NV, right_NA, k) for k in (1, 2, 3, 4)]
    # Of two words that are equally probable both are first; one of no mass never is.
    assert found == [0.5, 0.5, 0.5, 0.75]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of a few steps of the file's own settings."""
    spec = importlib.util.spec_from_file_location("templates_under_test", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config("histalign")
    config.data.templates.train_lines, config.data.templates.eval_lines = 50, 30
    config.data.rows, config.model.layers = 5, 1
    config.data.eval_rows = config.data.test_rows = 10
    config.model.embed_dim = config.model.hidden_dim = config.model.last_dim = 8
    config.train.steps, config.train.log_every = 12, 1
    workdir = tmp_path_factory.mktemp("run")
    train.run(config, workdir)
    return workdir


@pytest.mark.slow
def test_a_run_on_the_templates_tells_accuracy_and_rank(workdir):
    run = state.load_run(workdir)
    text = corpus.load(run.config.data)
    summary = ambiguity.summarize(run, text)
    for name in ambiguity.NAMES:
        shares = [summary[f"{name}_acc@{k}"] for k in ambiguity.PLACES]
        assert shares == sorted(shares) and 0 <= shares[0] <= shares[-1] <= 1
    # A softmax 8 wide; the cache is not bound by that.
    assert summary["plain_rank"] <= 10 < summary["joint_rank"]
    assert len(ambiguity.table(summary).splitlines()) == 4


def test_distributions_are_those_of_the_lines_last_words(workdir):
    run = state.load_run(workdir)
    text = corpus.load(run.config.data)
    batches = lines.cut(run.config.data, text.vocab)(text.test, 10, 20)
    found = ambiguity.answers(run.model, run.params, batches)
    right_NA = ambiguity.right_answers(found.read, text.vocab)
    assert right_NA.shape == (30, 2)
    for log_p_NV in found[:3]:
        assert log_p_NV.shape == (30, len(text.vocab))
        np.testing.assert_allclose(np.exp(log_p_NV).sum(axis=1), 1, atol=1e-5)
    nouns = templates.nouns()
    for log_p_V, read, right_A in zip(
        found.cache_NV, found.read, right_NA, strict=True
    ):
        # The cache holds what the line has named so far, and nothing else.
        held = {text.vocab.words[word] for word in np.flatnonzero(np.isfinite(log_p_V))}
        assert held == set(text.vocab.decode(read[1:]))
        assert {text.vocab.words[word] for word in right_A} == held & nouns


def test_an_objective_that_does_not_exist_is_refused():
    config = configs.Config()
    config.cache.objective = "trim"
    with pytest.raises(ValueError, match="'histalign'.*got 'trim'"):
        configs.validate(config)
