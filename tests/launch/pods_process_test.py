"""Training processes on a host of a pod: known by their id, and ended by it alone."""

import contextlib
import os
import pathlib
import signal
import stat
import subprocess
import sys

import pytest

from tests.launch.stand_ins import (
    PODS,
    ROOT,
    TRAINING,
    calls,
    environment,
    shell,
    stand_in,
)

TRAINS = TRAINING + 'trap "echo saved; exit 75" TERM; echo begun $$\n'
TRAINS += "for _ in {1..400}; do sleep 0.05; done"


@contextlib.contextmanager
def started(folder, *command):
    """A process with its first line of output; ended in the end, whatever happened."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(folder, WORKDIR=str(folder), NAME="a run"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def send(folder, name):
    return shell(PODS / "process.sh", folder, "signal", name, NAME="a run")


def test_a_host_s_training_is_stopped_by_its_id_and_a_namesake_is_left_alone(tmp_path):
    stand_in(tmp_path, "python", TRAINS)
    namesake = "echo begun; exec -a launch/train.py sleep 60"
    with (
        started(tmp_path, "bash", "-c", namesake) as (other, _),
        started(tmp_path, "bash", PODS / "worker.sh") as (worker, line),
    ):
        (record,) = (tmp_path / "records").iterdir()
        assert record.read_text().split()[0] == line.split()[1]
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
        assert send(tmp_path, "TERM").returncode == 0
        assert worker.communicate(timeout=20)[0] == "saved\n"
        assert worker.returncode == 75
        assert other.poll() is None


def runs(pid):
    """Whether a process has a thread left, even if nobody has asked for its end."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    state, threads = fields.split()[0], int(fields.split()[17])
    return state != "Z" or threads > 1


def test_a_training_that_is_killed_is_gone_when_the_command_returns(tmp_path):
    stand_in(tmp_path, "python", TRAINS.replace("exit 75", "true"))
    with started(tmp_path, "bash", PODS / "worker.sh") as (worker, line):
        assert runs(line.split()[1])
        assert send(tmp_path, "KILL").returncode == 0
        assert not runs(line.split()[1])
        assert worker.wait(timeout=20) == 128 + signal.SIGKILL
    assert "no process trains a run" in send(tmp_path, "KILL").stderr


def test_a_process_whose_first_thread_has_ended_is_not_gone(tmp_path):
    program = """if True:
        import ctypes, platform, threading, time
        threading.Thread(target=time.sleep, args=(60,)).start()
        print("begun", flush=True)
        exit_thread = {"x86_64": 60, "aarch64": 93}[platform.machine()]
        ctypes.CDLL(None).syscall(exit_thread, 0)
    """
    with started(tmp_path, sys.executable, "-c", program) as (process, _):
        stat_file = pathlib.Path(f"/proc/{process.pid}/stat")
        while (fields := stat_file.read_text().rpartition(") ")[2].split())[0] != "Z":
            os.sched_yield()
        record = tmp_path / "records" / "a run.pid"
        record.parent.mkdir()
        record.write_text(f"{process.pid} {fields[19]}\n")
        assert send(tmp_path, "KILL").stderr == ""
        assert not runs(process.pid)


def test_a_process_that_got_the_id_later_is_left_alone(tmp_path):
    with started(tmp_path, "bash", "-c", "echo begun; exec sleep 60") as (
        other,
        _,
    ):
        record = tmp_path / "records" / "a run.pid"
        record.parent.mkdir()
        for started_at in ("1", "", "x"):
            record.write_text(f"{other.pid} {started_at}\n")
            result = send(tmp_path, "KILL")
            assert result.returncode == 0 and "no process" in result.stderr
        assert other.poll() is None


@pytest.mark.parametrize("content", ["", "\n", "-1 5\n", "0 5\n", "a[$(touch x)] 5\n"])
def test_a_record_that_is_none_is_no_process(tmp_path, content):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "a run.pid").write_text(content)
    result = send(tmp_path, "KILL")
    assert result.returncode == 0 and "no process" in result.stderr


def test_a_worker_does_not_start_beside_one_that_still_trains(tmp_path):
    stand_in(tmp_path, "python", TRAINS)
    with started(tmp_path, "bash", PODS / "worker.sh") as (_, line):
        script, workdir = PODS / "worker.sh", str(tmp_path)
        result = shell(script, tmp_path, WORKDIR=workdir, NAME="a run")
        assert result.returncode == 1
        assert f"process {line.split()[1]} still trains a run" in result.stderr
        assert sum("train.py" in call for call in calls(tmp_path)) == 1
        send(tmp_path, "KILL")


def test_a_record_is_not_written_through_a_link(tmp_path):
    stand_in(tmp_path, "python", TRAINING + "exit 75")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "records").symlink_to(elsewhere)
    result = shell(PODS / "worker.sh", tmp_path, WORKDIR=str(tmp_path))
    assert result.returncode == 1 and "RECORDS" in result.stderr
    assert not any(elsewhere.iterdir())
