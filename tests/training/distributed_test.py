"""Jobs of real processes on this machine: two of them, with two devices each."""

import os
import random
import signal
import socket
import time
import warnings

import numpy as np
import pytest

from softbottle.training import loop, metrics
from tests import commands, tiny
from tests.configs_test import load

STEPS, HEARTBEAT = 60, 10
# Of the heads the one that compiles fastest; six processes do.
LANGUAGE = "softmax,random"
# A process that is left alone stops by itself within this time: a broken connection
# is noticed at once, a silent one after the heartbeat.
NOTICED = 3 * HEARTBEAT
SIZES = {
    "mesh.data": "none",
    "mesh.model": 2,
    "train.steps": STEPS,
    "train.eval_every": 30,
    "train.checkpoint_every": 20,
    "train.log_every": 1,
    "train.equal_softmax": False,
    "train.same_width_softmax": False,
    "data.rows": 8,
    "data.length": 5,
    "data.eval_rows": 4,
    "data.test_rows": 4,
    "data.synthetic.train_tokens": 20_000,
    "data.synthetic.eval_tokens": 500,
}


class Job:
    """Processes that train one run together."""

    def __init__(self, workdir, processes=2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = [f"--config=configs/quickstart.py:{LANGUAGE}", "--distributed"]
        flags += [f"--workdir={workdir}", f"--coordinator=127.0.0.1:{port}"]
        flags += [f"--processes={processes}", f"--heartbeat_seconds={HEARTBEAT}"]
        flags += [f"--config.{name}={value}" for name, value in SIZES.items()]
        self.workdir = workdir
        self.programs = [
            commands.start("train.py", *flags, f"--process={n}", devices=2)
            for n in range(processes)
        ]

    def reach(self, step, limit=120):
        """Wait until a step's metrics are written."""
        end = time.monotonic() + limit
        while not any(line["step"] >= step for line in metrics.read(self.workdir)):
            alive = all(program.process.is_alive() for program in self.programs)
            assert alive and time.monotonic() < end, self.told()
            time.sleep(0.02)

    def send(self, number, process):
        """Send a signal to one of the processes."""
        os.kill(self.programs[process].process.pid, number)

    def wait(self, limit):
        """The exit statuses of all processes."""
        statuses = [program.wait(limit) for program in self.programs]
        assert None not in statuses, f"a process hangs. {self.told()}"
        return statuses

    def told(self, *processes):
        """What the processes, or some of them, have written."""
        chosen = [self.programs[n] for n in processes] or self.programs
        return "\n".join(text for program in chosen for text in program.written())

    def close(self):
        for program in self.programs:
            program.process.kill()
            program.wait()


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start():
        jobs.append(Job(tmp_path / "run"))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def losses(workdir):
    return [line["loss"] for line in metrics.read(workdir) if "loss" in line]


def train_alone(workdir, **more):
    """Train on four devices of this process."""
    config = load("quickstart").get_config(LANGUAGE)
    fields = {name.replace(".", "__"): value for name, value in SIZES.items()}
    loop.run(tiny.change(config, **(fields | {"mesh__data": 2} | more)), workdir)
    return losses(workdir)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run that nobody disturbs."""
    return train_alone(tmp_path_factory.mktemp("alone"))


def check_finished(job, undisturbed):
    assert job.wait(300) == [0] * len(job.programs), job.told()
    found = losses(job.workdir)
    assert len(found) == STEPS
    np.testing.assert_allclose(found, undisturbed, rtol=1e-5)
    assert (job.workdir / "summary.json").exists()


def kill(job, victim, step):
    """Kill a process at a step; the others must stop by themselves and say why."""
    job.reach(step)
    job.send(signal.SIGKILL, victim)
    statuses = job.wait(NOTICED)
    others = [n for n in range(len(statuses)) if n != victim]
    assert all(statuses[n] != 0 for n in others), statuses
    # Where a collective does not notice, jax's runtime does, in its own words.
    reasons = ("Start the job again with the same --workdir", "another task died")
    told = job.told(others[0])
    assert any(reason in told for reason in reasons), told[-3000:]


def ask(job, process, step):
    """Ask one process to stop at a step; all save and end, before the run does."""
    job.reach(step)
    job.send(signal.SIGTERM, process)
    assert job.wait(60) == [0] * len(job.programs), job.told()
    assert "asked to stop" in job.told(0) and len(losses(job.workdir)) < STEPS


@pytest.mark.slow
def test_a_job_killed_and_preempted_goes_on_with_other_processes(
    start, undisturbed, tmp_path
):
    kill(start(), 1, 23)
    # The checkpoint of two processes is good for one of four devices, and back. Of one
    # that was still being written there is a warning, and the run begins anew.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*IS INCOMPLETE")
        assert len(train_alone(tmp_path / "run", train__steps=30)) == 30
    # One is asked, and both save at the same step.
    ask(start(), 1, 31)
    job = start()
    check_finished(job, undisturbed)
    # The first process alone speaks.
    first, second = job.told(0), job.told(1)
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
        job = start()
        done = len(losses(job.workdir))
        if done > STEPS - 15:
            break
        step, victim = done + moment.randint(1, 12), moment.randint(0, 1)
        asked = moment.random() < 0.3
        print(f"from {done}: process {victim} is", "asked" if asked else "killed", step)
        if asked:
            ask(job, victim, step)
        else:
            kill(job, victim, step)
        job.close()
    check_finished(start(), undisturbed)
