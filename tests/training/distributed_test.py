"""Jobs of real processes on this machine: two of them, with two devices each."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from softbottle.training import metrics
from tests import ROOT

STEPS, HEARTBEAT = 60, 10
# A process that is left alone stops by itself within this time: a broken connection
# is noticed at once, a silent one after the heartbeat.
NOTICED = 3 * HEARTBEAT
SIZES = {
    "mesh.data": "none",
    "mesh.model": 2,
    "train.steps": STEPS,
    "train.eval_every": 30,
    "train.checkpoint_every": 10,
    "train.log_every": 1,
    "train.equal_softmax": False,
    "data.rows": 8,
    "data.length": 5,
    "data.eval_rows": 4,
    "data.synthetic.train_tokens": 20_000,
    "data.synthetic.eval_tokens": 500,
}


class Job:
    """Processes that train one run together."""

    def __init__(self, workdir, processes=2, devices=2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, str(ROOT / "launch" / "train.py")]
        command += [f"--config={ROOT}/configs/quickstart.py:mos", "--distributed"]
        command += [f"--workdir={workdir}", f"--coordinator=127.0.0.1:{port}"]
        command += [f"--processes={processes}", f"--heartbeat_seconds={HEARTBEAT}"]
        command += [f"--config.{name}={value}" for name, value in SIZES.items()]
        self.workdir = workdir
        self.logs = [workdir.with_suffix(f".{n}.log") for n in range(processes)]
        self.processes = [
            subprocess.Popen(
                [*command, f"--process={n}"],
                env=environment,
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for n, log in enumerate(self.logs)
        ]

    def reach(self, step, limit=120):
        """Wait until a step's metrics are written."""
        end = time.monotonic() + limit
        while not any(line["step"] >= step for line in metrics.read(self.workdir)):
            dead = [p.poll() for p in self.processes if p.poll() is not None]
            assert not dead and time.monotonic() < end, self.told()
            time.sleep(0.02)

    def wait(self, limit):
        """The exit statuses of all processes."""
        try:
            return [process.wait(limit) for process in self.processes]
        except subprocess.TimeoutExpired:
            pytest.fail(f"a process hangs. {self.told()}")

    def told(self):
        return "\n".join(log.read_text()[-3000:] for log in self.logs)

    def close(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(name, **sizes):
        jobs.append(Job(tmp_path / name, **sizes))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def losses(job):
    lines = metrics.read(job.workdir)
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run that nobody disturbs, in one process of four devices."""
    job = Job(tmp_path_factory.mktemp("alone") / "run", processes=1, devices=4)
    try:
        assert job.wait(300) == [0], job.told()
        return losses(job)
    finally:
        job.close()


def check_finished(job, undisturbed):
    assert job.wait(300) == [0] * len(job.processes), job.told()
    found = losses(job)
    assert len(found) == STEPS
    np.testing.assert_allclose(found, undisturbed, rtol=1e-5)
    assert (job.workdir / "summary.json").exists()


def kill(job, victim, step):
    """Kill a process at a step; the others must stop by themselves and say why."""
    job.reach(step)
    job.processes[victim].send_signal(signal.SIGKILL)
    statuses = job.wait(NOTICED)
    others = [n for n in range(len(statuses)) if n != victim]
    assert all(statuses[n] != 0 for n in others), statuses
    # Where a collective does not notice, jax's runtime does, in its own words.
    reasons = ("Start the job again with the same --workdir", "another task died")
    told = job.logs[others[0]].read_text()
    assert any(reason in told for reason in reasons), told[-3000:]


@pytest.mark.slow
def test_a_killed_process_stops_the_job_which_resumes(start, undisturbed):
    kill(start("run"), 1, 13)
    # The checkpoint of two processes is good for one of four devices.
    check_finished(start("run", processes=1, devices=4), undisturbed)


@pytest.mark.slow
def test_a_preempted_job_saves_and_goes_on_with_other_processes(start, undisturbed):
    job = start("run", processes=1, devices=4)
    job.reach(7)
    job.processes[0].send_signal(signal.SIGTERM)
    assert job.wait(60) == [0], job.told()
    assert "asked to stop" in job.told()
    job = start("run")
    job.reach(23)
    # One is asked, and both save at the same step.
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.wait(60) == [0, 0], job.told()
    assert "asked to stop" in job.told() and len(losses(job)) < STEPS
    job = start("run")
    check_finished(job, undisturbed)
    # The first process alone speaks.
    first, second = (log.read_text() for log in job.logs)
    assert "test ppl" in first and "step 60" in first
    assert "test ppl" not in second and "step 60" not in second


@pytest.mark.skipif(
    "SOFTBOTTLE_STRESS" not in os.environ,
    reason="takes minutes: set SOFTBOTTLE_STRESS to a number of rounds",
)
def test_nothing_is_lost_whatever_dies_whenever(start, undisturbed):
    rounds = int(os.environ["SOFTBOTTLE_STRESS"])
    moment = random.Random(rounds)
    for _ in range(rounds):
        job = start("run")
        done = len(losses(job))
        if done > STEPS - 15:
            break
        step, victim = done + moment.randint(1, 12), moment.randint(0, 1)
        asked = moment.random() < 0.3
        print(f"from {done}: process {victim} is", "asked" if asked else "killed", step)
        if asked:
            job.reach(step)
            job.processes[victim].send_signal(signal.SIGTERM)
            assert job.wait(60) == [0, 0], job.told()
        else:
            kill(job, victim, step)
        job.close()
    check_finished(start("run"), undisturbed)
