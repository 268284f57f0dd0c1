"""Mixtures by their number of components."""

import json

import jax
import numpy as np
import pytest

import softbottle
from softbottle import model
from softbottle.analysis.sources import run as run_source
from softbottle.experiments import components, sweep
from softbottle.training import metrics, state
from tests import pictures, tiny

pytestmark = pytest.mark.usefixtures("quick_keys", "shared_evaluators")
FIELDS = ("parameters", "test_perplexity", "valid_perplexity")


def make_config(**fields):
    return tiny.make_config(train__steps=3, train__eval_every=3, **fields)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(folder, rows, first row) of a sweep that was stopped after its first run."""
    workdir = tmp_path_factory.mktemp("components")
    with pytest.MonkeyPatch.context() as patch:
        pictures.leave_out(patch)
        first = components.run(make_config(), workdir, ["mos"], [3], [5])
        lines = (workdir / "mos-k3-5" / "metrics.jsonl").read_text()
        rows = components.run(make_config(), workdir, ["mos"], [3, 1], [5])
    assert (workdir / "mos-k3-5" / "metrics.jsonl").read_text() == lines
    return workdir, rows, first


def log_p(folder):
    """log P along the test text, dense."""
    run = state.load_run(folder, "float32")
    text = state.load_corpus(folder, run, "test").test
    tokens = run_source.capture("run", run, text, {"tokens"}).tokens
    hidden_TD = np.concatenate([block.hidden_TD for block in tokens])
    dense = jax.jit(run.model.head.log_probs)
    log_p_TV = dense(*run.model.output(run.params), hidden_TD)
    return np.asarray(log_p_TV, np.float64)[:, : len(run.vocab)]


@pytest.mark.slow
def test_a_row_has_the_numbers_of_its_runs(swept):
    workdir, rows, _ = swept
    assert [(row["head"], row["components"]) for row in rows] == [
        ("mos", 3),
        ("mos", 1),
    ]
    assert json.loads((workdir / "components.json").read_text()) == rows
    for row in rows:
        (run,) = row["runs"]
        folder = workdir / f"mos-k{row['components']}-5"
        summary = json.loads((folder / "summary.json").read_text())
        assert [run[name] for name in FIELDS] == [summary[name] for name in FIELDS]
        config = state.load_config(folder)
        assert config.head.components == row["components"]
        assert config.seed == config.data.synthetic.seed == 5 == run["seed"]
        lines = metrics.read(folder)
        times = [line["step_ms"] for line in lines if "step_ms" in line]
        assert run["step_ms"] == pytest.approx(np.median(times))
        assert run["bound"] == 3 + 2
    # The rank of one, not by its bound but by all of its log P.
    (run,) = rows[0]["runs"]
    log_p_TV = log_p(workdir / "mos-k3-5")
    # The rule of Press et al. for entries in float32.
    tolerance = 0.5 * np.sqrt(sum(log_p_TV.shape) + 1) * np.finfo(np.float32).eps
    assert run["shape"] == list(log_p_TV.shape)
    assert run["rank"] == np.linalg.matrix_rank(log_p_TV, rtol=tolerance)


@pytest.mark.slow
def test_a_sweep_started_again_trains_only_what_is_missing(swept):
    workdir, rows, first = swept
    assert rows[:1] == first  # its time per step, too: nothing was trained again
    assert (workdir / "components.md").read_text() == components.table(rows) + "\n"
    picture = (workdir / "components.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def make_rows(**heads):
    run = {"parameters": 7, "bound": 5, "effective": 3, "rank": 9, "step_ms": 1.5}
    return [
        {"head": head, "components": k, "runs": [run | change for change in changes]}
        for head, changes in heads.items()
        for k in (1, 8)
    ]


def test_the_table_has_means_and_deviations():
    rows = make_rows(mos=[{"test_perplexity": 60.0}, {"test_perplexity": 62.0}])
    line = components.table(rows).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["mos", "1", "7", "61.00 ± 1.41"]
    assert cells[4:] == ["9 ± 0", "1.50 ± 0.00", "3 ± 0", "5"]


def test_every_measure_has_a_panel_with_its_heads_named():
    rows = make_rows(mos=[{"test_perplexity": 6.0}], moc=[{"test_perplexity": 7.0}])
    panels = components.draw(rows).axes
    titles = [axes.get_title() for axes in panels]
    assert titles == ["test perplexity", "rank of log P", "ms per step"]
    for axes in panels:
        assert {"mos", "moc"} <= {text.get_text() for text in axes.texts}
    assert "a softmax's bound, 5" in {text.get_text() for text in panels[1].texts}


def test_a_line_goes_from_left_to_right():
    row, _ = make_rows(mos=[{"test_perplexity": 6.0}])
    rows = [row | {"components": count} for count in (4, 1, 2)]
    for axes in components.draw(rows).axes:
        assert list(axes.lines[0].get_xdata()) == [1, 2, 4]


def test_what_cannot_be_swept_is_refused_before_anything_is_trained(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sweep.trial, "run", lambda *_: pytest.fail("it trained"))
    with pytest.raises(ValueError, match="'softmax' has no components"):
        components.run(make_config(), tmp_path, ["mos", "softmax"], [1], [0])
    with pytest.raises(ValueError, match="got 0"):
        components.run(make_config(), tmp_path, ["mos"], [2, 0], [0])
    monkeypatch.setattr(sweep.trial, "run", lambda *_: {})
    with pytest.raises(SystemExit, match="asked to stop"):
        components.run(make_config(), tmp_path, ["mos"], [2], [0])
    assert list(tmp_path.iterdir()) == []


def test_the_components_may_be_those_of_a_head_that_the_config_has_not(
    tmp_path, monkeypatch
):
    trained = []
    monkeypatch.setattr(sweep.trial, "run", lambda config, _: trained.append(config))
    softmax = make_config(head__name="softmax", head__components=None)
    with pytest.raises(SystemExit, match="asked to stop"):
        components.run(softmax, tmp_path, ["mos"], [2], [0])
    assert [model.make_head(config) for config in trained] == [softbottle.mos(2)]
