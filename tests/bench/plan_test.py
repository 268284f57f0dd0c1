import jax
import pytest

from softbottle import config as configs
from softbottle import model
from softbottle.bench import plan
from tests import commands


def make_config():
    config = configs.Config()
    config.data.length, config.head.name, config.head.components = 5, "mos", 3
    config.model.vocab_multiple, config.mesh.data, config.mesh.model = 8, None, 2
    return config


def measured(tokens, needs, limit=1000):
    return {"bytes": {"a": needs - 5, "b": 5}, "tokens_per_chip": tokens} | {
        "limit_bytes": limit
    }


@pytest.mark.parametrize("told", ["Used 7.5G of 1.0G hbm", "no number"])
def test_the_largest_batch_is_one_that_was_compiled(told):
    # Flat at first, steep later, as when other buffers hide what a batch needs.
    def needs(tokens):
        return 100 + tokens // 10 + max(0, tokens - 200) * 2

    def measure_at(tokens):
        tried.append(tokens)
        if needs(tokens) > 1000:
            raise plan.DoesNotFitError(told)
        return measured(tokens, needs(tokens))

    tried = []
    found = plan.largest(measure_at, measured(10, needs(10)))
    assert found["tokens_per_chip"] in tried and plan.total(found) <= 1000
    assert len(tried) <= 5
    # 619 tokens are the most that fit.
    assert 200 < found["tokens_per_chip"] <= 619


def test_a_straight_line_is_followed_to_its_end():
    found = plan.largest(lambda n: measured(n, 100 + 2 * n), measured(10, 120))
    assert found["tokens_per_chip"] == 450


def test_if_nothing_larger_fits_the_first_is_the_largest():
    def measure_at(tokens):
        raise plan.DoesNotFitError("Used 1.5G of 1.0G")

    first = measured(10, 999)
    assert plan.largest(measure_at, first) is first


def test_a_first_batch_beyond_the_chips_memory_is_not_said_to_fit():
    found = plan.largest(pytest.fail, measured(10, 1001))
    assert found is None and "the first does not fit" in plan.render_largest(found)


def test_what_does_not_fit_says_how_much_it_needs():
    error = plan.DoesNotFitError("RESOURCE_EXHAUSTED: Used 54.5G of 15.75G hbm.")
    assert error.bytes == 54.5 * 2**30 and "54.5G of 15.75G" in str(error)


@pytest.mark.slow
def test_a_step_is_compiled_for_devices_and_read(monkeypatch):
    monkeypatch.setattr(plan, "devices", lambda topology: jax.devices())
    row = plan.measure(make_config(), "v5e:2x4", 61, tokens=12)
    assert row["mesh"] == {"data": 4, "model": 2} and row["chips"] == 8
    assert row["tokens_per_chip"] == 15  # three whole rows
    assert row["choices"]["implementation"] == "blocked"
    assert "loss by blocked" in plan.render(row)
    params = jax.eval_shape(model.make(make_config(), 61).init, jax.random.key(0))
    assert row["flop"] == model.step_flop(make_config(), params, 15)
    assert row["parameters"] == model.count_parameters(params, 61)
    # Parameters and two moments of them, the tables' on two devices each.
    assert 0 < row["bytes"]["arguments"] < 3 * 4 * row["parameters"]
    assert row["bytes"]["temporaries"] > 0 and row["collectives"]["all-reduce"]["bytes"]
    assert row["seconds"]["step"] > row["seconds"]["links"] > 0
    text = plan.render(row)
    assert "8 chips" in text and "not measured" in text
    assert "15 tokens per chip, compiled" in plan.render_largest(row)


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
    for name in ("v5e", "v5e:", "v5e:two", "v5e:4"):
        with pytest.raises(ValueError, match="named like v5e:16x16, got"):
            plan.devices(name)


@pytest.mark.parametrize(
    ("topology", "host"),
    [
        ("v5e:16x16", {}),
        ("v5p:4x4x4", {}),
        ("v6e:1x1", {"chips_per_host_bounds": [1, 1, 1]}),
        ("v5e:1x2", {"chips_per_host_bounds": [1, 2, 1]}),
    ],
)
def test_a_slice_smaller_than_a_host_says_so(monkeypatch, topology, host):
    asked = {}

    def describe(**settings):
        asked.update(settings)
        return type("Description", (), {"devices": ()})

    monkeypatch.setattr(plan.topologies, "get_topology_desc", describe)
    plan.devices(topology)
    assert asked == {"platform": "tpu", "topology_name": topology} | host


@pytest.mark.slow
def test_the_command_says_what_is_wrong_with_its_flags():
    flags = ("--config", "configs/lm1b.py:mos", "--tokens-per-chip", "40")
    answer = commands.finish(
        commands.start("compile.py", *flags, "--topology", "v9:2x2")
    )
    assert answer.code == 2 and "no chip is called 'v9'" in answer.errors
    assert "Traceback" not in answer.errors
