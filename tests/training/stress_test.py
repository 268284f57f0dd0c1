"""What is promised about kills, collisions and damage, many times over.

    SOFTBOTTLE_STRESS=50 python -m pytest tests/training/stress_test.py -n 0 -s

A killed process kills itself at a chosen place of the code, so that every kill hits a
window that is microseconds wide in an ordinary run.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings

import pytest

from softbottle import config as configs
from softbottle.training import checkpoint, state
from softbottle.training import loop as train
from tests import tiny
from tests.training import distributed_test
from tests.training.loop_test import curve, without_time

ROUNDS = int(os.environ.get("SOFTBOTTLE_STRESS", 0))
pytestmark = [
    pytest.mark.skipif(
        not ROUNDS, reason="takes minutes: set SOFTBOTTLE_STRESS to a number of rounds"
    ),
    pytest.mark.usefixtures("quick_keys"),
]
FIELDS = {
    "train__steps": 60,
    "train__eval_every": 2,
    "train__checkpoint_every": 3,
    "train__series": True,
}

# The moments at which a process can be killed: a module, a function of it, and whether
# to die before the call or after it.
MOMENTS = {
    "a step is written and not sealed": ("checkpoint", "_write_manifest", "before"),
    "a step is sealed, the one before not deleted": (
        *("checkpoint", "_write_manifest"),
        "after",
    ),
    "a step to be deleted has no seal": ("shutil", "rmtree", "before"),
    "a step was deleted": ("shutil", "rmtree", "after"),
    "a file is written and not renamed": ("os", "fsync", "after"),
    "a file is being written": ("os", "fsync", "before"),
    "a run's words are being written": ("Vocab", "save", "before"),
    "a run's words are written": ("Vocab", "save", "after"),
}
PROGRAM = """
import os, shutil, signal, sys
from softbottle import config
from softbottle.data.vocab import Vocab
from softbottle.training import checkpoint, loop
import jax, json
jax.config.update("jax_default_prng_impl", "unsafe_rbg")
workdir, values, owner, name, when, count = sys.argv[1:]
owner = {"checkpoint": checkpoint, "shutil": shutil, "os": os, "Vocab": Vocab}[owner]
function, calls = getattr(owner, name), [int(count)]
def call(*arguments, **named):
    calls[0] -= 1
    if when == "before" and not calls[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    result = function(*arguments, **named)
    if when == "after" and not calls[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, name, call)
loop.run(config.from_dict(json.loads(values)), workdir)
"""


def config():
    return tiny.make_config(**FIELDS)


def as_json():
    return json.dumps(configs.to_dict(config()))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    return workdir, without_time(train.run(config(), workdir))


def test_a_run_killed_in_every_window_ends_like_an_undisturbed_one(
    undisturbed, tmp_path
):
    chance, kills, workdir = random.Random(ROUNDS), 0, tmp_path / "run"
    while kills < ROUNDS:
        moment = chance.choice(list(MOMENTS))
        # The words of a run are written once per start, the rest again and again.
        count = 1 if "words" in moment else chance.randint(1, 12)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(workdir), as_json()]
            + [*MOMENTS[moment], str(count)],
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, -signal.SIGKILL), (moment, done.stderr[-3000:])
        if done.returncode:
            kills += 1
            steps = checkpoint.sealed_steps(workdir / "checkpoints")
            print(f"kill {kills}, {moment} ({count}): checkpoints {steps}")
            continue
        # Finished, or the moment did not come as often as it was waited for.
        assert curve(workdir) == curve(undisturbed[0])
        shutil.rmtree(workdir)
    with warnings.catch_warnings():
        # The last kill may have left a step that was never sealed.
        warnings.simplefilter("ignore")
        again = train.run(config(), workdir)
    assert without_time(again) == undisturbed[1]
    assert curve(workdir) == curve(undisturbed[0])


def flip(path, chance):
    raw = bytearray(path.read_bytes())
    place = chance.randrange(len(raw))
    raw[place] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(raw))


def test_flips_in_the_best_parameters_lose_no_run(undisturbed, tmp_path):
    chance, told = random.Random(ROUNDS), 0
    for number in range(ROUNDS):
        workdir = shutil.copytree(undisturbed[0], tmp_path / str(number))
        paths = [path for path in (workdir / "best").rglob("*") if path.is_file()]
        victim = chance.choice([path for path in paths if path.stat().st_size])
        flip(victim, chance)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            summary = train.run(config(), workdir)
        told += any("IS DAMAGED" in str(warning.message) for warning in caught)
        assert without_time(summary) == undisturbed[1], victim
        shutil.rmtree(workdir)
    assert told == ROUNDS
    print(f"{ROUNDS} flips in best: {told} told, no run lost")


def test_flips_in_a_runs_words_are_never_silent(undisturbed, tmp_path):
    chance = random.Random(ROUNDS)
    right = (undisturbed[0] / "vocab.txt").read_bytes()
    workdir = shutil.copytree(undisturbed[0], tmp_path / "run")
    for _ in range(ROUNDS):
        flip(workdir / "vocab.txt", chance)
        with pytest.raises(ValueError, match="vocab.txt"):
            state.load_run(workdir)
        with pytest.warns(UserWarning, match="vocab.txt was damaged"):
            summary = train.run(config(), workdir)
        assert without_time(summary) == undisturbed[1]
        assert (workdir / "vocab.txt").read_bytes() == right
    print(f"{ROUNDS} flips in vocab.txt: all refused by readers and mended")


def test_two_processes_whose_saves_collide_finish(tmp_path, monkeypatch):
    sizes = {"train.checkpoint_every": 9, "train.eval_every": 10}
    monkeypatch.setattr(distributed_test, "SIZES", distributed_test.SIZES | sizes)
    for number in range(ROUNDS):
        job = distributed_test.Job(tmp_path / str(number))
        try:
            assert job.wait(300) == [0, 0], job.told()
        finally:
            job.close()
        assert (job.workdir / "summary.json").exists()
        print(f"job {number + 1} of {ROUNDS} finished")


def test_of_two_trainers_in_a_folder_one_finishes(undisturbed, tmp_path):
    chance = random.Random(ROUNDS)
    for number in range(ROUNDS):
        workdir = tmp_path / str(number)
        command = [sys.executable, "-c", PROGRAM, str(workdir), as_json()]
        command += ["os", "fsync", "before", "0"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        first = subprocess.Popen(command, **pipes)
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(chance.uniform(0, 2))
        second = subprocess.Popen(command, **pipes)
        told = [process.communicate(timeout=300)[1] for process in (first, second)]
        codes = [first.returncode, second.returncode]
        # Either may come first; one that comes late enough only sums the run up.
        assert 0 in codes, told
        for code, errors in zip(codes, told, strict=True):
            assert code == 0 or "is in use: process" in errors.splitlines()[-1]
        assert curve(workdir) == curve(undisturbed[0])
        print(f"pair {number + 1} of {ROUNDS}: statuses {codes}")
