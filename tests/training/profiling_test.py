import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from softbottle.training import profiling


def event(start, stop, name="kernel"):
    return SimpleNamespace(start_ns=start, duration_ns=stop - start, name=name)


def profile(**planes):
    """A profile by plane and line: plane__line=[events]."""
    made = {}
    for name, events in planes.items():
        plane, line = name.split("__")
        line = SimpleNamespace(name=line.replace("_", " "), events=events)
        made.setdefault(plane, []).append(line)
    return SimpleNamespace(
        planes=[
            SimpleNamespace(name="/" + name.replace("_", ":"), lines=lines)
            for name, lines in made.items()
        ]
    )


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(5, 6), (1, 3)], 3),
        ([(1, 4), (2, 3), (3, 6)], 5),
        ([(1, 2), (1, 5), (5, 7)], 6),
    ],
)
def test_the_union_of_intervals(spans, length):
    assert profiling.union(spans) == length


def test_streams_of_a_device_are_joined_and_copies_are_no_work():
    found = profiling.busy_shares(
        profile(
            device_GPU__Stream_1=[event(0, 4), event(4, 8, "MemcpyH2D")],
            device_GPU__Stream_2=[event(3, 5), event(8, 10)],
            device_GPU__XLA_Modules=[event(0, 10)],
            device_TPU__XLA_Ops=[event(100, 101), event(103, 104)],
            host_CPU__Stream_1=[event(0, 10)],
        )
    )
    assert found == [pytest.approx(0.7), pytest.approx(0.5)]


def test_the_steps_asked_for_are_traced_once_and_told(tmp_path):
    said = []
    trace = profiling.Trace(tmp_path / "profile", 3, 2, said.append)
    for step in range(4, 3 + profiling.WARM_UP + 5):
        trace.after(step, jnp.ones(()))
    trace.close()
    (line,) = said
    assert "traced 2 steps" in line and str(tmp_path) in line
    (file,) = pathlib.Path(tmp_path).glob("**/*.xplane.pb")
    assert list(jax.profiler.ProfileData.from_file(str(file)).planes)


def test_nothing_is_traced_unless_asked_and_a_run_may_end_within(tmp_path):
    none = profiling.Trace(tmp_path / "none", 0, 0, pytest.fail)
    said = []
    cut = profiling.Trace(tmp_path / "cut", 0, 9, said.append)
    for step in range(1, profiling.WARM_UP + 3):
        none.after(step, jnp.ones(()))
        cut.after(step, jnp.ones(()))
    cut.close()
    none.close()
    assert "traced 2 steps" in said[0]
    late = profiling.Trace(tmp_path / "late", 5, 9, said.append)
    late.after(6, jnp.ones(()))
    late.close()
    assert "begins at step 25, 20 after the start, and this ended at step 6" in said[1]
    assert not (tmp_path / "none").exists()
    # The profiler is free again.
    with jax.profiler.trace(tmp_path / "again"):
        pass
