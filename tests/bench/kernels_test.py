"""Kernels of a call, by a trace."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from softbottle.bench import kernels, ours, race, table


def event(name, microseconds):
    return SimpleNamespace(name=name, start_ns=0, duration_ns=1e3 * microseconds)


def profile(*events):
    line = SimpleNamespace(name="Stream #1", events=events)
    other = SimpleNamespace(name="XLA Modules", events=[event("all", 99.0)])
    plane = SimpleNamespace(name="/device:GPU:0", lines=[line, other])
    return SimpleNamespace(planes=[plane])


def test_kernels_are_summed_by_name_and_the_longest_are_named():
    events = [event("gemm", 30.0), event("add", 1.0), event("add", 2.0)]
    found = kernels.summed(profile(*events, *events), calls=2, most=1)
    assert found["kernels"] == [["gemm", 1, pytest.approx(30.0)]]
    assert found["launches"] == 3 and found["kernel_ms"] == pytest.approx(0.033)
    row = {"group": "tiny: N=1", "variant": "auto", "status": "ok", "ms": 0.034}
    machine = {"suite": "head", "device": "x", "jax": "0", "torch": None}
    text = table.render(machine | {"rows": [row | found]})
    title, _, line = text.splitlines()[-3:]
    assert title == "tiny, auto: 3 kernels take 0.0330 ms, 0.0340 without a trace"
    assert line.split() == ["30.0", "1", "gemm"]


def test_nothing_is_traced_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(jax.profiler, "trace", None)
    assert kernels.of(lambda: jnp.zeros(1)) == {}


@pytest.mark.slow
def test_a_row_on_a_cpu_says_that_it_has_no_kernels():
    def ask(module, task):
        assert module == race.OURS
        return task | {"status": "ok"} | ours.run_task(task | {"trace": 3})

    result = race.head(ask, ["tiny"], ["blocked"], [], heads=[], seconds=0.0)
    traced = [row for row in result["rows"] if "kernels" in row]
    assert {row["variant"] for row in traced} >= {"blocked", "bare products"}
    if jax.default_backend() == "cpu":
        text = table.render(result)
        assert "tiny, blocked: no kernels, which only an accelerator has" in text
