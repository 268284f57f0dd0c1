"""Kernels of a call, by a trace."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from softbottle.bench import kernels, ours, table

MACHINE = {"suite": "head", "device": "x", "jax": "0", "torch": None}


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
    text = table.render(MACHINE | {"rows": [row | found]})
    title, _, line = text.splitlines()[-3:]
    assert title == "tiny, auto: 3 kernels take 0.0330 ms, 0.0340 without a trace"
    assert line.split() == ["30.0", "1", "gemm"]


def test_nothing_is_traced_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(jax.profiler, "trace", None)
    assert kernels.of(lambda: jnp.zeros(1)) == {}


@pytest.mark.usefixtures("brief")
def test_a_call_on_a_cpu_is_traced_and_has_no_kernels():
    task = {"kind": "ceiling", "case": ("ceiling", 1, 1, 8, 1), "seconds": 0.0}
    row = ours.run_task(task | {"products": 0, "trace": 3})
    if jax.default_backend() == "cpu":
        assert row["kernels"] == [] and row["launches"] == 0
    else:
        assert row["launches"] >= 1 and len(row["kernels"]) >= 1
    row |= {"group": "ceiling", "variant": "square", "status": "ok", "kernels": []}
    text = table.render(MACHINE | {"rows": [row]})
    assert "ceiling, square: no kernels, which only an accelerator has" in text
