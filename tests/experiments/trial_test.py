import json
import os
import signal

import pytest

from softbottle.experiments import trial
from softbottle.training import metrics
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_keys")


@pytest.mark.slow
def test_a_trial_adds_the_truth_and_its_pictures_to_the_summary(tmp_path):
    summary = trial.run(tiny.make_config(), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert {
        *("test_perplexity", "true_perplexity", "kl", "rank", "softmax_rank_bound"),
        *("true_rank", "parameters", "seconds"),
    } <= set(summary)
    for picture in ("quickstart.png", "valid.png"):
        assert (tmp_path / picture).stat().st_size > 0


def test_a_trial_whose_metrics_were_lost_draws_no_curve_and_says_so(tmp_path):
    trial.run(tiny.make_config(), tmp_path)
    for name in ("metrics.jsonl", "valid.png"):
        (tmp_path / name).unlink()
    with pytest.warns(UserWarning, match="no curve is drawn"):
        assert trial.run(tiny.make_config(), tmp_path)["kl"] > 0
    assert not (tmp_path / "valid.png").exists()


@pytest.mark.slow
def test_a_run_stopped_beside_its_rival_says_so_and_goes_on(tmp_path, monkeypatch):
    fields = {"train__steps": 2, "train__equal_softmax": True}
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
    rival = summary["equal_softmax"]
    assert rival["head"] == "softmax" and rival["steps"] == 2
    assert rival["parameters"] <= summary["parameters"]
