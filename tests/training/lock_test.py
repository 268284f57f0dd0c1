import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from softbottle.training import lock
from softbottle.training.lock import Lock, LockedError

HOLD = """
import sys, pathlib
from softbottle.training.lock import Lock
held = Lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def owner_of(folder):
    return json.loads((folder / lock.FILE).read_text())


def write_owner(folder, **fields):
    """What a process of another machine leaves when it dies, or keeps writing."""
    owner = {"host": "far", "boot": "b", "process": 12, "token": "t", "beat": 3}
    (folder / lock.FILE).write_text(json.dumps(owner | fields).ljust(512))


def test_a_second_process_is_told_the_host_and_the_process(holder, tmp_path):
    expected = f"in use: process {holder.pid} on host {os.uname().nodename}"
    with pytest.raises(LockedError, match=expected):
        Lock(tmp_path)


def test_a_killed_process_leaves_no_lock(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    held = Lock(tmp_path)
    assert owner_of(tmp_path)["process"] == os.getpid()
    held.release()


def test_a_released_folder_is_free_and_belongs_to_nobody(tmp_path):
    Lock(tmp_path / "run").release()
    assert owner_of(tmp_path / "run") == {}
    held = Lock(tmp_path / "run")
    with pytest.raises(LockedError):
        Lock(tmp_path / "run")
    held.release()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.5)


@pytest.fixture
def no_locks(quick, monkeypatch):
    """A file system that has none."""

    def refuse(*_):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture(params=["quick", "no_locks"])
def far_file_system(request):
    """One that does not tell of other machines' locks."""
    request.getfixturevalue(request.param)


def test_without_locks_an_owner_at_work_on_this_machine_keeps_the_folder(
    no_locks, tmp_path
):
    with Lock(tmp_path) as held:
        with pytest.raises(LockedError, match=f"process {os.getpid()} on host"):
            Lock(tmp_path)
        held.check()


def test_without_locks_a_silent_owner_on_this_machine_is_replaced(no_locks, tmp_path):
    with Lock(tmp_path):
        left = owner_of(tmp_path) | {"process": 12, "token": "t"}
    write_owner(tmp_path, **left)
    with Lock(tmp_path):
        assert owner_of(tmp_path)["process"] == os.getpid()


def test_a_silent_owner_on_another_machine_is_replaced(
    far_file_system, tmp_path, capsys
):
    write_owner(tmp_path)
    held = Lock(tmp_path)
    assert "not given back by process 12 on host far" in capsys.readouterr().err
    assert owner_of(tmp_path)["process"] == os.getpid()
    held.release()


def test_an_owner_at_work_on_another_machine_keeps_the_folder(
    far_file_system, tmp_path, monkeypatch
):
    write_owner(tmp_path)
    monkeypatch.setattr(lock.time, "sleep", lambda _: write_owner(tmp_path, beat=4))
    with pytest.raises(LockedError, match="process 12 on host far"):
        Lock(tmp_path)
    assert owner_of(tmp_path)["host"] == "far"


def test_an_owner_whose_folder_was_taken_is_told_and_leaves_it_alone(quick, tmp_path):
    held = Lock(tmp_path)
    held.check()
    write_owner(tmp_path)
    held._beating.join(10)
    with pytest.raises(LockedError, match="process 12 on host far"):
        held.check()
    held.release()
    assert owner_of(tmp_path)["host"] == "far"


def test_the_beat_rises_while_a_process_works(quick, tmp_path):
    held = Lock(tmp_path)
    beats = {owner_of(tmp_path)["beat"]}
    while max(beats) < 3:
        held.check()
        beats.add(owner_of(tmp_path)["beat"])
    held.release()
    assert len(beats) > 1


def test_a_lock_file_that_says_nothing_is_no_obstacle(tmp_path):
    (tmp_path / lock.FILE).write_bytes(b"\xff\x00 no JSON")
    held = Lock(tmp_path)
    assert owner_of(tmp_path)["process"] == os.getpid()
    held.release()
