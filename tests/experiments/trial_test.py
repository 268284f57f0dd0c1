import contextlib
import io
import json
import os
import shlex
import shutil
import signal

import pytest

from softbottle import cli, drawing
from softbottle import config as configs
from softbottle.analysis import inspection
from softbottle.analysis.settings import Settings
from softbottle.experiments import ending, trial
from softbottle.training import metrics
from tests import pictures, tiny

pytestmark = pytest.mark.usefixtures("quick_keys", "shared_evaluators")


def make_config(**fields):
    return tiny.make_config(train__steps=2, **fields)


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """(folder, summary, what was printed) of a trial that was stopped beside a rival.

    The folder is copied before it is changed.
    """
    workdir = tmp_path_factory.mktemp("trial")
    rivals = {f"train__{name}": True for name in ending.RIVALS}
    add, seen = metrics.Report.add, []

    def stop_in_rival(report, step, *arguments):
        seen.append(step)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        add(report, step, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        pictures.leave_out(patch)
        patch.setattr(metrics.Report, "add", stop_in_rival)
        assert trial.run(make_config(**rivals), workdir) == {}
    assert not (workdir / "summary.json").exists()
    paint = drawing.Figure.save

    def paint_the_run_s_own(figure, path):
        if path.parent == workdir:
            paint(figure, path)

    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        patch.setattr(drawing.Figure, "save", paint_the_run_s_own)
        summary = trial.run(make_config(**rivals), workdir)
    return workdir, summary, printed.getvalue()


@pytest.mark.slow
def test_a_trial_adds_the_truth_and_its_pictures_to_the_summary(tried):
    workdir, summary, _ = tried
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert {
        *("test_perplexity", "true_perplexity", "kl", "rank", "softmax_rank_bound"),
        *("true_rank", "parameters", "seconds"),
    } <= set(summary)
    for picture in ("quickstart.png", "valid.png"):
        assert (workdir / picture).stat().st_size > 0


def test_a_trial_whose_metrics_were_lost_draws_no_curve_and_says_so(tried, tmp_path):
    workdir = shutil.copytree(tried[0], tmp_path / "copied")
    for name in ("metrics.jsonl", "valid.png"):
        (workdir / name).unlink()
    with (
        pytest.warns(UserWarning, match="metrics.jsonl was deleted or cut short"),
        pytest.warns(UserWarning, match="no curve is drawn"),
    ):
        assert trial.run(make_config(), workdir)["kl"] > 0
    assert not (workdir / "valid.png").exists()


@pytest.mark.parametrize("unit", sorted({*configs.UNITS} - {"answers"}))
def test_templates_without_answers_are_refused_before_they_are_trained(unit, tmp_path):
    config = tiny.make_config(data__name="templates", data__unit=unit)
    with pytest.raises(ValueError, match=f"unit must be 'answers', got '{unit}'"):
        trial.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rival", ending.RIVALS)
def test_softmaxes_beside_a_run_that_starts_from_another_are_refused(rival, tmp_path):
    config = tiny.make_config(
        train__init_from="runs/other", **{f"train__{rival}": True}
    )
    with pytest.raises(ValueError, match="init_from='runs/other' is no start for the"):
        trial.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_stopped_beside_its_rival_says_so_and_goes_on(tried):
    workdir, summary, printed = tried
    for name in ending.RIVALS:
        rival = summary[name]
        assert rival["head"] == "softmax" and rival["steps"] == 2
        assert rival == json.loads((workdir / name / "summary.json").read_text())
    assert summary["equal_softmax"]["parameters"] <= summary["parameters"]
    assert summary["same_width_softmax"]["context_dim"] == summary["context_dim"]
    assert (workdir / "comparison.png").stat().st_size > 10_000
    assert f"Figures: {workdir / 'comparison.png'}" in printed
    program, *words = shlex.split(printed.splitlines()[-1])
    assert program == "softbottle"
    assert words == [
        "analyze",
        *("--workdir", str(workdir)),
        *("--workdir", str(workdir / "same_width_softmax")),
        *("--out", str(workdir / "report")),
    ]
    assert words[0] in cli.COMMANDS
    runs = [words[2], words[4]]
    (section,) = inspection.of_runs(runs, ["rank"], "test", 50, Settings())
    assert "same_width_softmax" in section.reading
