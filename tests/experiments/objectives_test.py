import json

import pytest

from softbottle import config as configs
from softbottle.experiments import objectives, sweep


def make_config():
    config = configs.Config()
    config.data.name, config.data.unit = "templates", "answers"
    return config


def summary(accuracy, rank, perplexity):
    """What a run on the templates leaves, with one accuracy for everything."""
    values = {"test_perplexity": perplexity, "plain_rank": rank, "joint_rank": rank + 1}
    for name in objectives.DISTRIBUTIONS:
        values |= {f"{name}_acc@{k}": accuracy for k in objectives.PLACES}
    return values


@pytest.fixture
def trained(monkeypatch):
    """The configs that were trained, by their folder's name."""
    seen = {}

    def run(config, workdir):
        workdir.mkdir(parents=True)
        seen[workdir.name] = configs.validate(config)
        return summary(0.5 + 0.1 * config.seed, 30, 2.0)

    monkeypatch.setattr(sweep.trial, "run", run)
    return seen


def test_rows_are_replaced_whole(trained, monkeypatch, tmp_path):
    def full_disk(_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    (tmp_path / "objectives.json").write_text("of before")
    with pytest.raises(OSError, match="No space"):
        objectives.run(make_config(), tmp_path, {"plain": [1e-3]}, [0])
    assert (tmp_path / "objectives.json").read_text() == "of before"


def test_every_objective_rate_and_seed_is_a_run_of_its_own(trained, tmp_path):
    config = make_config()
    config.train.init_from = "somewhere/plain-{seed}"
    rates = dict.fromkeys(["plain", "trime"], [1e-3, 0.02])
    rows = objectives.run(config, tmp_path, rates, [0, 3])
    assert list(trained) == [
        *("plain-0.001-0", "plain-0.001-3", "plain-0.02-0", "plain-0.02-3"),
        *("trime-0.001-0", "trime-0.001-3", "trime-0.02-0", "trime-0.02-3"),
    ]
    last = trained["trime-0.02-3"]
    assert (last.cache.objective, last.optim.learning_rate) == ("trime", 0.02)
    assert last.seed == last.data.templates.seed == 3
    assert last.train.init_from == "somewhere/plain-3"
    assert json.loads((tmp_path / "objectives.json").read_text()) == rows
    assert (tmp_path / "objectives.md").read_text() == objectives.table(rows) + "\n"


def test_nothing_is_trained_before_all_settings_are_known_to_go(trained, tmp_path):
    rates = {"plain": [1e-3], "histaling": [1e-3]}
    with pytest.raises(ValueError, match="cache.objective.*'histaling'"):
        objectives.run(make_config(), tmp_path, rates, [0])
    assert not trained


def test_a_row_has_the_range_over_its_seeds():
    runs = [summary(0.861, 34, 3.174), summary(1.0, 34, 3.59), summary(0.9, 34, 3.2)]
    text = objectives.table([{"objective": "plain", "rate": 3e-3, "runs": runs}])
    accuracies = "86-100 / 86-100 / 86-100"
    assert text.splitlines()[2] == (
        f"| plain | 0.003 | 3 | {accuracies} | {accuracies} | {accuracies} | 34 / 35 | "
        "3.17-3.59 |"
    )
    titles, rule = text.splitlines()[:2]
    assert titles.count("|") == rule.count("|") and "cache alone, Acc@2 / 5" in titles


def test_a_text_without_right_answers_is_refused(tmp_path):
    config = make_config()
    config.data.name = "ptb"
    with pytest.raises(ValueError, match="templates, and data.name is 'ptb'"):
        objectives.run(config, tmp_path, {"plain": [1e-3]}, [0])


def test_objectives_asked_to_stop_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep.trial, "run", lambda config, workdir: {})
    with pytest.raises(SystemExit, match="asked to stop"):
        objectives.run(make_config(), tmp_path, {"plain": [1e-3]}, [0])
