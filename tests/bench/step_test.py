import functools
import json

import pytest

from softbottle import config as configs
from softbottle.bench import step

pytestmark = pytest.mark.usefixtures("quick_keys", "brief")


@pytest.mark.slow
def test_a_step_is_timed_whole_and_by_part_and_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(step, "measure", functools.partial(step.measure, seconds=0.0))
    config = configs.Config()
    config.data.rows, config.head.name, config.head.components = 3, "mos", 2
    config.head.context = "tanh"
    model, regularise = config.model, config.regularise
    model.embed_dim, model.hidden_dim, model.last_dim, model.layers = 3, 7, 5, 1
    regularise.recurrent = regularise.latent = 0.5
    config.optim.name, config.optim.averaging = "sgd", "nt"
    result = step.run(config, vocab=13, length=5)
    assert all(result[f"{part}_ms"] > 0 for part in ("step", "head", "recurrence"))
    whole = result["head_ms"] + result["recurrence_ms"] + result["rest_ms"]
    assert whole == pytest.approx(result["step_ms"])
    assert result["tokens"] == 15 and result["vocab"] == 13
    assert result["peak_bytes"] > result["made_bytes"] > 0
    assert result["head_name"] == "mos" and result["components"] == 2
    recurrence, head = 4 * 5 * (3 + 5 + 2), 2 * 3 * (5 + 1) + 5 * 2
    assert result["flop"] == 6 * 15 * (recurrence + head + 13 + 2 * 13 * 3)
    speed = 1e3 * 15 / result["step_ms"]
    assert result["tokens_per_second"] == pytest.approx(speed)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in result.items()
    }
