"""Folders that earlier versions wrote still open, resume and evaluate.

tests/fixtures/version-0 was written by the code before folders said their version: an
AWD-LSTM with a mixture, all dropouts, averaging and odd lengths, stopped at step 40,
its export, and what that code computed from both.
"""

import json
import pathlib
import shutil

import pytest

from softbottle import config as configs
from softbottle.data import batches, corpus
from softbottle.scoring import export
from softbottle.training import evaluate, metrics, state
from softbottle.training import loop as train
from tests import ROOT

FIXTURES = ROOT / "tests" / "fixtures"
EXPECTED = json.loads((FIXTURES / "version-0" / "expected.json").read_text())
# Other processors round sums in another order.
CLOSE = {"rel": 1e-5}


@pytest.fixture
def written(tmp_path):
    return pathlib.Path(shutil.copytree(FIXTURES / "version-0", tmp_path / "written"))


def evaluated(workdir, folder):
    """The loss of a run's best parameters on the test text of the fixture."""
    run = state.load_run(workdir, "float32")
    ids = corpus.read([str(folder / "text" / "test.txt")], run.vocab)[1:]
    return run, evaluate.make_evaluator(run.model)(run.params, ids, 1, 11)


@pytest.mark.slow
def test_a_run_is_read_as_it_was(written):
    run, found = evaluated(written / "run", written)
    assert (run.step, found.count) == (EXPECTED["step"], EXPECTED["tokens"])
    assert found.loss == pytest.approx(EXPECTED["test_loss"], **CLOSE)


@pytest.mark.slow
def test_a_run_goes_on_as_it_would_have(written, monkeypatch):
    # One padded width to compile in the place of four: padding changes no number.
    monkeypatch.setattr(batches, "WIDTHS", 1)
    stored = json.loads((written / "run" / "config.json").read_text())
    config = configs.from_dict(stored)
    config.data.path = str(written / "text")
    config.data.cache = str(written / "cache")
    config.train.steps = 60
    with pytest.warns(UserWarning, match=r"no corpus\.json"):
        summary = train.run(config, written / "run")
    expected = pytest.approx(EXPECTED["resumed_test_perplexity"], **CLOSE)
    assert summary["test_perplexity"] == expected
    lines = [line for line in metrics.read(written / "run") if line["step"] > 40]
    assert len(lines) == len(EXPECTED["resumed"])
    for line, before in zip(lines, EXPECTED["resumed"], strict=True):
        found = {name: line[name] for name in before}
        assert found == pytest.approx(before, rel=1e-4)


def test_an_export_is_read_as_it_was(written):
    export.read(written / "export", written / "moved")
    _, found = evaluated(written / "moved", written)
    assert found.loss == pytest.approx(EXPECTED["exported_test_loss"], **CLOSE)
