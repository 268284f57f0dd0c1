import pytest

from softbottle import config as configs
from softbottle.bench import race, slowdown, step

MILLISECONDS = {"mos": 9.0, "softmax": 5.0, "one component": 6.0}
HEADS = {"mos": 4.0, "softmax": 2.0, "one component": 2.5}


def recipe():
    config = configs.Config()
    config.data.rows, config.data.length = 3, 5
    config.head.name, config.head.components = "mos", 4
    model = config.model
    model.embed_dim, model.hidden_dim, model.last_dim = 6, 11, 7
    config.regularise.latent = 0.5
    return config


def answers(torch_ms):
    """Canned rows, so that the arithmetic on them can be seen."""

    def ask(module, task):
        if task["kind"] == "device":
            return {"status": "ok", "platform": "cpu", "device": "a", "jax": "b"}
        if task["kind"] == "ceiling":
            return task | {"status": "ok", "ms": 1.0, "tflops": 8.0}
        if module == race.THEIRS:
            assert task["case"] == ("ptb", 15, 1, 6, 13) and task["peer"] == "compile"
            return task | {"status": "ok", "ms": torch_ms, "torch": "c"}
        name = task["variant"]
        facts = {"ms": MILLISECONDS[name], "head_ms": HEADS[name], "status": "ok"}
        return task | facts | {"tokens_per_second": 1.0, "tflops": 2.0}

    return ask


@pytest.mark.parametrize("torch_ms, best_ms", [(1.25, 4.25), (3.0, 5.0)])
def test_the_softmax_of_the_ratio_has_the_faster_of_two_heads(
    monkeypatch, torch_ms, best_ms
):
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: name)
    recipes = {"ptb": (recipe(), 13)}
    result = slowdown.run(answers(torch_ms), recipes, ["torch"])
    rows = {row["variant"]: row for row in result["rows"]}
    assert rows["softmax, faster head"]["ms"] == pytest.approx(best_ms)
    assert rows["mos"]["over"] == {
        "softmax": pytest.approx(9 / 5),
        "one component": pytest.approx(9 / 6),
        "softmax, faster head": pytest.approx(9 / best_ms),
    }
    assert rows["mos"]["of_ceiling"] == 0.25 and result["ceiling_tflops"] == 8
    assert rows["softmax, faster head"]["of_ceiling"] is None
    assert result["torch"] == "c" and result["suite"] == "step"


def test_without_torch_the_softmax_is_ours():
    result = slowdown.run(answers(None), {"ptb": (recipe(), 13)}, [])
    assert [row["variant"] for row in result["rows"]] == list(MILLISECONDS)


def test_rivals_share_the_backbone_and_differ_in_the_head():
    rivals = step.rivals(recipe())
    assert {name: c.head.components for name, c in rivals.items()} == {
        "mos": 4,
        "softmax": None,
        "one component": 1,
    }
    softmax, single = rivals["softmax"], rivals["one component"]
    assert softmax.head.name == "softmax" and softmax.model.last_dim == 6
    assert single.model == rivals["mos"].model and single.head.name == "mos"
    assert softmax.model.hidden_dim == 11 and softmax.regularise.latent == 0


def test_a_step_whose_loss_is_not_a_beginners_is_refused(monkeypatch):
    row = {"loss": 5.0, "ms": 1.0, "flop": 3e9}
    monkeypatch.setattr(step, "measure", lambda *arguments: dict(row))
    task = {"config": configs.to_dict(recipe()), "length": 5, "seconds": 0.01}
    assert step.run_task(task | {"vocab": 148}) == row | {"tflops": 3.0}
    refused = step.run_task(task | {"vocab": 13})
    assert refused["status"] == "wrong" and "ms" not in refused
