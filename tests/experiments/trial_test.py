import json
import os
import shlex
import shutil
import signal

import pytest

from softbottle import cli
from softbottle import config as configs
from softbottle.analysis import inspection
from softbottle.analysis.settings import Settings
from softbottle.experiments import ending, trial
from softbottle.training import metrics
from tests import pictures, tiny

pytestmark = pytest.mark.usefixtures("quick_keys", "shared_evaluators")


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """(folder, summary) of a trial; copied before it is changed."""
    workdir = tmp_path_factory.mktemp("trial")
    return workdir, trial.run(tiny.make_config(), workdir)


@pytest.mark.slow
def test_a_trial_adds_the_truth_and_its_pictures_to_the_summary(tried):
    workdir, summary = tried
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
        assert trial.run(tiny.make_config(), workdir)["kl"] > 0
    assert not (workdir / "valid.png").exists()


@pytest.mark.parametrize("unit", sorted({*configs.UNITS} - {"answers"}))
def test_templates_without_answers_are_refused_before_they_are_trained(unit, tmp_path):
    config = tiny.make_config(data__name="templates", data__unit=unit)
    with pytest.raises(ValueError, match=f"unit must be 'answers', got '{unit}'"):
        trial.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_stopped_beside_its_rival_says_so_and_goes_on(
    tmp_path, monkeypatch, capsys
):
    fields = {"train__steps": 2, "train__equal_softmax": True}
    fields["train__same_width_softmax"] = True
    pictures.leave_out(monkeypatch)
    add, seen = metrics.Report.add, []

    def stop_in_rival(report, step, *arguments):
        seen.append(step)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        add(report, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Report, "add", stop_in_rival)
        assert trial.run(tiny.make_config(**fields), tmp_path) == {}
    assert not (tmp_path / "summary.json").exists()
    summary = trial.run(tiny.make_config(**fields), tmp_path)
    for name in ending.RIVALS:
        rival = summary[name]
        assert rival["head"] == "softmax" and rival["steps"] == 2
        assert rival == json.loads((tmp_path / name / "summary.json").read_text())
    assert summary["equal_softmax"]["parameters"] <= summary["parameters"]
    assert summary["same_width_softmax"]["context_dim"] == summary["context_dim"]
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert f"Figures: {tmp_path / 'comparison.png'}" in printed
    program, *words = shlex.split(printed.splitlines()[-1])
    assert program == "softbottle"
    assert words == [
        "analyze",
        *("--workdir", str(tmp_path)),
        *("--workdir", str(tmp_path / "same_width_softmax")),
        *("--out", str(tmp_path / "report")),
    ]
    assert words[0] in cli.COMMANDS
    runs = [words[2], words[4]]
    (section,) = inspection.of_runs(runs, ["rank"], "test", 50, Settings())
    assert "same_width_softmax" in section.reading
