import jax
import pytest

from softbottle import config as configs
from softbottle import model, plan


def make_config():
    config = configs.Config()
    config.data.length, config.head.name, config.head.components = 5, "mos", 3
    config.model.vocab_multiple, config.mesh.data, config.mesh.model = 8, -1, 2
    return config


def test_the_largest_batch_lies_on_the_line_through_two():
    rows = [
        {"bytes": {"a": 10 + 2 * n, "b": 5}, "tokens_per_chip": n, "limit_bytes": 100}
        for n in (10, 20)
    ]
    assert plan.largest(*rows) == 42  # 15 + 2 * 42 = 99
    rows[1]["bytes"] = rows[0]["bytes"]
    assert plan.largest(*rows) == 20


def test_a_step_is_compiled_for_devices_and_read(monkeypatch):
    monkeypatch.setattr(plan, "devices", lambda topology: jax.devices())
    row = plan.measure(make_config(), "v5e:2x4", 61, tokens=12)
    assert row["mesh"] == {"data": 4, "model": 2} and row["chips"] == 8
    assert row["tokens_per_chip"] == 15  # three whole rows
    params = jax.eval_shape(model.make(make_config(), 61).init, jax.random.key(0))
    assert row["flop"] == model.step_flop(make_config(), params, 15)
    assert row["parameters"] == model.count_parameters(params, 61)
    # Parameters and two moments of them, the tables' on two devices each.
    assert 0 < row["bytes"]["arguments"] < 3 * 4 * row["parameters"]
    assert row["bytes"]["temporaries"] > 0 and row["collectives"]["all-reduce"]["bytes"]
    assert row["seconds"]["step"] > row["seconds"]["links"] > 0
    text = plan.render(row | {"largest_tokens_per_chip": 7})
    assert "8 chips" in text and "not measured" in text


def test_chips_and_compilers_that_are_not_there_are_named(monkeypatch):
    with pytest.raises(ValueError, match="no chip is called 'v9'"):
        plan.devices("v9:2x2")

    def fail(**_):
        raise RuntimeError("no libtpu")

    monkeypatch.setattr(plan.topologies, "get_topology_desc", fail)
    with pytest.raises(ValueError, match="cannot compile for v5e: no libtpu.*x86-64"):
        plan.devices("v5e:2x2")
    with pytest.raises(ValueError, match="cannot compile for h200"):
        plan.devices("h200")
