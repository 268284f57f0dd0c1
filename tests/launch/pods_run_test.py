"""The job files of launch/pods, run against stand-ins.

tests/launch/slurm_run.sh runs the Slurm job under a real Slurm.
"""

import json
import re
import runpy
import signal
import subprocess
import sys
import threading

import pytest

from softbottle import config as configs
from tests.launch.stand_ins import (
    PODS,
    ROOT,
    TRAINING,
    calls,
    environment,
    shell,
    stand_in,
)

# What training leaves behind when it is finished.
FINISH = """
echo '{"steps": 100}' >"$WORKDIR/summary.json"
echo '{"train": {"steps": 100, "epochs": 0}}' >"$WORKDIR/config.json"
"""


def leave_a_summary(workdir, reached, **train):
    """A run that ended at step `reached`, in a folder that now has other settings."""
    workdir.mkdir(exist_ok=True)
    config = configs.Config()
    for name, value in train.items():
        setattr(config.train, name, value)
    (workdir / "config.json").write_text(json.dumps(configs.to_dict(config)))
    (workdir / "summary.json").write_text(json.dumps({"steps": reached}))


@pytest.fixture
def is_finished(monkeypatch, capsys):
    """What finished.py says of a folder, run in this process."""

    def ask(workdir, *flags):
        program = str(PODS / "finished.py")
        monkeypatch.setattr(sys, "argv", [program, *flags, "--", str(workdir)])
        status = 0
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as ended:
            status = ended.code
        return tell(status, *capsys.readouterr())

    return ask


def tell(status, output, errors):
    assert status in (0, 1) and not output
    # One line that says why, or none.
    assert errors.count("\n") == status
    assert status == 0 or errors.startswith("not finished: ")
    return status == 0


@pytest.mark.parametrize(
    "reached, train, finished",
    [
        (100, {"steps": 100}, True),
        (100, {"steps": 200}, False),
        (200, {"steps": 100}, True),
        (100, {"steps": 0, "epochs": 3}, True),
        (100, {"steps": 200, "epochs": 3}, True),
        (100, {"steps": 200, "stop_patience": 5}, True),
    ],
)
def test_a_run_is_finished_if_its_summary_reached_its_config(
    tmp_path, is_finished, reached, train, finished
):
    leave_a_summary(tmp_path, reached, **train)
    assert is_finished(tmp_path) == finished


@pytest.mark.parametrize("name", ["summary.json", "config.json"])
@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"steps": null}'])
def test_a_run_is_not_finished_without_a_whole_summary_and_config(
    tmp_path, is_finished, name, content
):
    leave_a_summary(tmp_path, 100, steps=100)
    assert is_finished(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert not is_finished(tmp_path)


def test_a_summary_that_the_share_shows_late_is_waited_for(tmp_path):
    writer = threading.Timer(0.2, leave_a_summary, (tmp_path, 100), {"steps": 100})
    writer.start()
    program = [sys.executable, PODS / "finished.py", "--wait=50", "--", tmp_path]
    result = subprocess.run(program, capture_output=True, text=True)
    assert tell(result.returncode, result.stdout, result.stderr)
    writer.join()


@pytest.mark.parametrize(
    "body, status",
    [
        (FINISH, 0),
        ("true", 75),
        ("exit 75", 75),
        ("exit 70", 70),
        ("kill -KILL $$", 137),
    ],
)
def test_a_worker_tells_a_finished_run_from_one_that_was_stopped(
    tmp_path, body, status
):
    stand_in(tmp_path, "python", TRAINING + body)
    result = shell(PODS / "worker.sh", tmp_path, "--x=1", WORKDIR=str(tmp_path))
    assert result.returncode == status, result.stderr
    (call,) = (line for line in calls(tmp_path) if "train.py" in line)
    assert f"--workdir {tmp_path} --distributed" in call and call.endswith(" --x=1")
    assert " --stopped_status=75 " in call


@pytest.mark.parametrize("status", [0, 75])
def test_a_summary_of_a_shorter_run_does_not_make_a_worker_finished(tmp_path, status):
    leave_a_summary(tmp_path / "run", 100, steps=200)
    stand_in(tmp_path, "python", TRAINING + f"exit {status}")
    result = shell(PODS / "worker.sh", tmp_path, WORKDIR=str(tmp_path / "run"))
    assert result.returncode == 75


def test_a_worker_that_was_stopped_is_not_finished_whatever_the_summary_says(tmp_path):
    leave_a_summary(tmp_path / "run", 100, steps=100)
    stand_in(tmp_path, "python", TRAINING + "exit 75")
    result = shell(PODS / "worker.sh", tmp_path, WORKDIR=str(tmp_path / "run"))
    assert result.returncode == 75


def test_a_worker_passes_a_signal_to_stop_on(tmp_path):
    stand_in(
        tmp_path,
        "python",
        TRAINING + 'trap "echo saved; exit 0" TERM; echo begun\n'
        "for _ in {1..400}; do sleep 0.05; done",
    )
    worker = subprocess.Popen(
        ["bash", PODS / "worker.sh"],
        cwd=ROOT,
        env=environment(tmp_path, WORKDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout.readline() == "begun\n"
    worker.send_signal(signal.SIGTERM)
    assert worker.communicate(timeout=20)[0] == "saved\n"
    assert worker.returncode == 75


def test_a_worker_refuses_a_buckets_address(tmp_path):
    result = shell(PODS / "worker.sh", tmp_path, WORKDIR="gs://bucket/run")
    assert result.returncode == 64 and "mount the bucket" in result.stderr


# A cloud whose slice is what the file $STATE says, and whose share has a summary if
# there is a file $STATE.summary; $RUNS are what training makes of it, one after the
# other.
CLOUD = """
state=$(cat "$STATE" 2>/dev/null || true)
case "$*" in
*"queued-resources create"*) echo READY >"$STATE" ;;
*"queued-resources delete"*) rm "$STATE" ;;
*"queued-resources describe"*)
    case $state in READY) echo ACTIVE ;; PREEMPTED) echo SUSPENDED ;; esac ;;
*"tpu-vm describe"*) echo "$state" ;;
*finished.py* | *"test -e"*) [[ -e $STATE.summary ]] ;;
*worker.sh*)
    runs=($RUNS)
    case ${runs[$(grep -c worker.sh "$CALLS") - 1]} in
    FINISHED) touch "$STATE.summary" ;;
    CUT_OFF) touch "$STATE.summary" && exit 255 ;;
    STOPPED) exit 75 ;;
    FAILED) exit 255 ;;
    PREEMPTED) echo PREEMPTED >"$STATE" && exit 255 ;;
    esac ;;
esac
"""


def on_tpu_vm(folder, runs, share="bucket"):
    """The result, and what was done to the slice, in order."""
    stand_in(folder, "gcloud", CLOUD)
    given = {"PROJECT": "p", "ZONE": "z", "SHARE": share, "PAUSE": "0", "RETRIES": "2"}
    state = str(folder / "state")
    result = shell(
        PODS / "tpu_vm.sh", folder, "--config.seed=2", RUNS=runs, STATE=state, **given
    )
    pattern = r"resources (create|delete)|(scp|worker\.sh)\b"
    deeds = [re.search(pattern, line) for line in calls(folder)]
    return result, [deed[1] or deed[2] for deed in deeds if deed]


def test_a_preempted_slice_is_made_anew_and_deleted_when_the_run_is_finished(tmp_path):
    result, deeds = on_tpu_vm(tmp_path, "PREEMPTED FINISHED", share="10.0.0.2:/share")
    assert result.returncode == 0, result.stderr
    once = ["create", "scp", "worker.sh", "delete"]
    assert deeds == [*once, *once]
    runs = [line for line in calls(tmp_path) if "worker.sh" in line]
    assert all("--worker=all" in line and "--config.seed=2" in line for line in runs)
    assert "mount -t nfs 10.0.0.2:/share" in "\n".join(calls(tmp_path))


def test_a_run_that_fails_on_a_slice_that_is_well_is_not_tried_forever(tmp_path):
    result, deeds = on_tpu_vm(tmp_path, "FAILED FAILED FAILED")
    assert result.returncode == 1, result.stderr
    assert deeds == ["create", "scp", "worker.sh", "worker.sh"]
    assert "gcsfuse" in "\n".join(calls(tmp_path))


def test_a_finished_run_that_is_to_go_on_is_trained_and_its_slice_kept(tmp_path):
    (tmp_path / "state").write_text("READY\n")
    (tmp_path / "state.summary").touch()
    result, deeds = on_tpu_vm(tmp_path, "STOPPED FINISHED")
    assert result.returncode == 0, result.stderr
    assert deeds == ["scp", "worker.sh", "worker.sh", "delete"]


def test_a_connection_that_breaks_at_the_end_costs_one_start_more(tmp_path):
    result, deeds = on_tpu_vm(tmp_path, "CUT_OFF FINISHED")
    assert result.returncode == 0, result.stderr
    assert deeds == ["create", "scp", "worker.sh", "worker.sh", "delete"]


def test_xpk_restarts_on_the_statuses_that_ask_for_it(tmp_path):
    stand_in(tmp_path, "xpk", "true")
    given = {"PROJECT": "p", "ZONE": "z", "CLUSTER": "c", "IMAGE": "i"}
    result = shell(PODS / "gke_xpk.sh", tmp_path, "run", "--config.seed=2", **given)
    assert result.returncode == 0, result.stderr
    call = " ".join(calls(tmp_path))
    assert "--restart-on-exit-codes=70,75" in call and "--config.seed=2" in call


def slurm(folder, attempt, **variables):
    """One start of the Slurm job, with stand-ins for Slurm."""
    stand_in(folder, "scontrol", 'echo "node1"; echo "node2"')
    stand_in(folder, "scancel", "true")
    return shell(
        PODS / "slurm.sbatch",
        folder,
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"},
        **{"SLURM_RESTART_COUNT": str(attempt), "SLURM_GPUS_PER_NODE": "h100:4"},
        **{"SLURM_NTASKS_PER_NODE": "1", "WORKDIR": str(folder / "run")},
        **{"PYTHON": sys.executable},
        **variables,
    )


def requeues(folder):
    return sum("requeue 7" in line for line in calls(folder))


def test_a_finished_slurm_job_is_not_requeued(tmp_path):
    stand_in(tmp_path, "srun", FINISH + 'env | grep JAX_ >>"$CALLS"')
    assert slurm(tmp_path, attempt=0).returncode == 0
    assert requeues(tmp_path) == 0
    assert "JAX_LOCAL_DEVICE_IDS=0,1,2,3" in calls(tmp_path)
    (call,) = (line for line in calls(tmp_path) if "train.py" in line)
    assert " --stopped_status=75 " in call


def test_a_slurm_job_that_was_stopped_is_requeued_and_moves_its_port(tmp_path):
    stand_in(tmp_path, "srun", 'env | grep JAX_COORDINATOR >>"$CALLS"; exit 75')
    for attempt in range(6):
        assert slurm(tmp_path, attempt, RETRIES="1").returncode == 0
    assert requeues(tmp_path) == 6
    places = {line for line in calls(tmp_path) if line.startswith("JAX_COORDINATOR")}
    assert len(places) == 6 and all("=node1:" in place for place in places)


def test_a_slurm_job_that_was_stopped_is_requeued_whatever_the_summary_says(tmp_path):
    leave_a_summary(tmp_path / "run", 100, steps=100)
    stand_in(tmp_path, "srun", "exit 75")
    assert slurm(tmp_path, attempt=0, RETRIES="0").returncode == 0
    assert requeues(tmp_path) == 1


def test_a_summary_of_a_shorter_run_does_not_make_a_slurm_job_finished(tmp_path):
    leave_a_summary(tmp_path / "run", 100, steps=200)
    stand_in(tmp_path, "srun", "exit 0")
    results = [slurm(tmp_path, attempt, RETRIES="1") for attempt in (0, 1)]
    # It can only go wrong again, so it counts as a failure.
    assert [result.returncode for result in results] == [0, 1]
    assert requeues(tmp_path) == 1
    assert "train.steps is 200" in results[0].stderr


def test_a_slurm_job_gives_up_only_when_failures_bring_no_checkpoint(tmp_path):
    stand_in(tmp_path, "srun", "exit 70")
    steps = tmp_path / "run" / "checkpoints"
    (steps / "90").mkdir(parents=True)
    statuses = [slurm(tmp_path, attempt, RETRIES="2").returncode for attempt in (0, 1)]
    (steps / "100").mkdir()
    statuses += [slurm(tmp_path, n, RETRIES="2").returncode for n in (2, 3, 4)]
    assert statuses == [0, 0, 0, 0, 70]
    assert requeues(tmp_path) == 4


def test_what_others_write_into_the_file_of_failures_is_not_executed(tmp_path):
    planted, run = tmp_path / "planted", tmp_path / "run"
    (run / "checkpoints" / "90").mkdir(parents=True)
    text = f"a[$(touch${{IFS}}{planted})] 90\n"
    (run / "failures-of-job-7").write_text(text)
    stand_in(tmp_path, "srun", "exit 70")
    assert slurm(tmp_path, attempt=0).returncode == 0
    assert not planted.exists()
    assert (run / "failures-of-job-7").read_text() == "1 90\n"
