"""How a process leaves a job; jobs of real processes: training/distributed_test.py."""

import jax
import pytest

from softbottle import distributed


def raised(error, cause=None):
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (raised(ValueError("rows must be positive")), distributed.FAILED, "intact"),
        (raised(OSError(28, "no space")), distributed.FAILED, "intact"),
        (
            raised(jax.errors.JaxRuntimeError("gone")),
            distributed.BROKEN,
            "Start the job",
        ),
        (
            raised(ValueError("unsaved"), jax.errors.JaxRuntimeError("gone")),
            distributed.BROKEN,
            "Start the job",
        ),
    ],
)
def test_who_leaves_a_job_says_whether_to_start_it_again(
    monkeypatch, capsys, error, status, told
):
    statuses = []
    monkeypatch.setattr(distributed.os, "_exit", statuses.append)
    distributed.exit_process(error)
    assert statuses == [status]
    written = capsys.readouterr().err
    assert str(error) in written and told in written and "process 0 of 1" in written
