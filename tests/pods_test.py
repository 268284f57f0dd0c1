"""The job files of launch/pods: read, linted, and run against stand-ins.

A stand-in is a small bash script under the name of gcloud, srun or python that writes
down how it was called. tests/slurm_run.sh runs the Slurm job under a real Slurm.
"""

import ast
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess

import pytest
import yaml

from softbottle import config as configs

ROOT = pathlib.Path(__file__).parents[1]
PODS = ROOT / "launch" / "pods"
SCRIPTS = sorted(
    [*PODS.glob("*.sh"), *PODS.glob("*.sbatch"), ROOT / "tests" / "slurm_run.sh"]
)
JOBSET = PODS / "gke_jobset.yaml"
JOBS = [*SCRIPTS, JOBSET]
by_name = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)


def shell(script, folder, *arguments, **environment):
    """A script's result; stand-ins are found in folder/bin."""
    paths = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", script, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": paths,
            "CALLS": str(folder / "calls"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def stand_in(folder, name, body):
    """A program of that name that notes its arguments and does as `body` says."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n{body}\n')
    program.chmod(0o755)


def calls(folder):
    return (folder / "calls").read_text().splitlines()


def train_flags():
    tree = ast.parse((ROOT / "launch" / "train.py").read_text())
    return {
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("flags.D")
    } | {"config"}


def flags_given(path):
    """The flags after train.py or worker.sh in a job file's commands."""
    text = path.read_text().replace("\\\n", " ")
    commands = re.findall(r"(?:train\.py|worker\.sh)([^\n]*)", text)
    if path == JOBSET:
        commands += job_container()["args"]
    if path.name == "slurm_run.sh":
        commands.append(re.search(r"SMALL=\((.*?)\n\)", text, re.DOTALL)[1])
    return {flag for line in commands for flag in re.findall(r"--([a-z][\w.]*)", line)}


def load_config(name):
    file, _, argument = name.partition(":")
    spec = importlib.util.spec_from_file_location("config_of_a_pod", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(argument) if argument else module.get_config()


def jobset():
    return yaml.safe_load(JOBSET.read_text())


def job():
    (only,) = jobset()["spec"]["replicatedJobs"]
    return only["template"]["spec"]


def job_container():
    (only,) = job()["template"]["spec"]["containers"]
    return only


@by_name
def test_a_script_parses_and_stops_at_errors(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert "\nset -euo pipefail\n" in path.read_text()
    assert path.suffix == ".sbatch" or os.access(path, os.X_OK)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck not installed")
@by_name
def test_shellcheck_has_nothing_to_say(path):
    result = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_flags_and_settings_given_to_train_exist(path):
    given = flags_given(path)
    settings = {flag for flag in given if flag.startswith("config.")}
    assert given - settings <= train_flags()
    for setting in settings:
        value = configs.Config()
        for name in setting.split(".")[1:]:
            value = getattr(value, name)


def test_flags_are_found_where_they_are_given():
    assert {"config", "workdir", "distributed"} <= train_flags()
    for name in ("slurm.sbatch", "worker.sh"):
        given = flags_given(PODS / name)
        assert {"distributed", "workdir", "config.mesh.model"} <= given
    for name in ("tpu_vm.sh", "gke_xpk.sh", "gke_jobset.yaml"):
        assert "config.data.rows" in flags_given(PODS / name)


def test_configs_that_are_named_exist():
    texts = [path.read_text() for path in [*JOBS, PODS / "README.md"]]
    names = re.findall(r"configs/\w+\.py(?::\w+)?", " ".join(texts))
    assert len(set(names)) > 1
    for name in set(names):
        configs.validate(load_config(name))


# Of the JobSet API v1alpha2, batch/v1 and v1: what there is at each place.
FIELDS = {
    "jobset": """replicatedJobs network successPolicy failurePolicy startupPolicy
        suspend coordinator managedBy ttlSecondsAfterFinished""",
    "failurePolicy": "maxRestarts restartStrategy rules",
    "replicatedJob": "name template replicas",
    "job": """parallelism completions activeDeadlineSeconds podFailurePolicy
        successPolicy backoffLimit backoffLimitPerIndex maxFailedIndexes selector
        manualSelector template ttlSecondsAfterFinished completionMode suspend
        podReplacementPolicy managedBy""",
    "pod": """volumes initContainers containers restartPolicy
        terminationGracePeriodSeconds dnsPolicy nodeSelector serviceAccountName
        hostNetwork subdomain affinity schedulerName tolerations priorityClassName""",
    "container": """name image command args workingDir ports envFrom env resources
        volumeMounts volumeDevices livenessProbe readinessProbe startupProbe lifecycle
        imagePullPolicy securityContext""",
}


def test_the_jobset_has_no_field_that_its_api_does_not_have():
    document = jobset()
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert document["kind"] == "JobSet"
    spec = document["spec"]
    for name, given in {
        "jobset": spec,
        "failurePolicy": spec["failurePolicy"],
        "replicatedJob": spec["replicatedJobs"][0],
        "job": job(),
        "pod": job()["template"]["spec"],
        "container": job_container(),
    }.items():
        assert set(given) <= set(FIELDS[name].split()), name
    # Kubernetes refuses numbers and booleans where it wants text.
    texts = [entry["value"] for entry in job_container()["env"]]
    texts += job()["template"]["metadata"]["annotations"].values()
    texts += job()["template"]["spec"]["nodeSelector"].values()
    texts += job_container()["args"]
    assert all(isinstance(text, str) for text in texts)


def test_the_jobset_has_a_host_for_every_four_chips_and_starts_them_together():
    pod, container = job()["template"]["spec"], job_container()
    sides = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = int(sides[0]) * int(sides[1])
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    hosts = chips // resources["limits"]["google.com/tpu"]
    assert job()["parallelism"] == job()["completions"] == hosts
    assert job()["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert jobset()["spec"]["failurePolicy"] == {
        "maxRestarts": 100,
        "restartStrategy": "BlockingRecreate",
    }
    rows = next(text for text in container["args"] if "data.rows" in text)
    assert int(rows.partition("=")[2]) % chips == 0


def test_the_jobsets_workdir_is_on_a_mounted_share():
    pod, container = job()["template"]["spec"], job_container()
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    (mount,) = container["volumeMounts"]
    assert environment["WORKDIR"].startswith(mount["mountPath"] + "/")
    (volume,) = pod["volumes"]
    assert volume["name"] == mount["name"]
    assert volume["csi"]["driver"] == "gcsfuse.csi.storage.gke.io"
    assert job()["template"]["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
    script = re.search(r"[\w/]+\.sh", " ".join(container["command"]))[0]
    assert (ROOT / script).exists()


@pytest.mark.parametrize(
    "body, status",
    [
        ('touch "$WORKDIR/summary.json"', 0),
        ("true", 75),
        ("exit 70", 70),
        ("kill -KILL $$", 137),
    ],
)
def test_a_worker_tells_a_finished_run_from_one_that_was_stopped(
    tmp_path, body, status
):
    stand_in(tmp_path, "python", body)
    result = shell(PODS / "worker.sh", tmp_path, "--x=1", WORKDIR=str(tmp_path))
    assert result.returncode == status, result.stderr
    (call,) = calls(tmp_path)
    assert f"--workdir {tmp_path} --distributed" in call and call.endswith(" --x=1")


def test_a_worker_passes_a_signal_to_stop_on(tmp_path):
    stand_in(
        tmp_path,
        "python",
        'trap "echo saved; exit 0" TERM; echo begun\n'
        "for _ in {1..400}; do sleep 0.05; done",
    )
    paths = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": paths, "CALLS": str(tmp_path / "calls")}
    worker = subprocess.Popen(
        ["bash", PODS / "worker.sh"],
        cwd=ROOT,
        env={**os.environ, **environment, "WORKDIR": str(tmp_path)},
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


# A cloud whose slice is what the file $STATE says; $RUNS are what training makes of it,
# one after the other.
CLOUD = """
state=$(cat "$STATE" 2>/dev/null || true)
case "$*" in
*"queued-resources create"*) echo READY >"$STATE" ;;
*"queued-resources delete"*) rm "$STATE" ;;
*"queued-resources describe"*)
    case $state in READY | FINISHED) echo ACTIVE ;; PREEMPTED) echo SUSPENDED ;; esac ;;
*"tpu-vm describe"*) echo "${state/FINISHED/READY}" ;;
*"test -e"*) [[ $state == FINISHED ]] ;;
*worker.sh*)
    runs=($RUNS)
    echo "${runs[$(grep -c worker.sh "$CALLS") - 1]}" >"$STATE"
    exit 255 ;;
esac
"""


def on_tpu_vm(folder, runs, share):
    stand_in(folder, "gcloud", CLOUD)
    given = {"PROJECT": "p", "ZONE": "z", "SHARE": share, "PAUSE": "0", "RETRIES": "2"}
    state = str(folder / "state")
    return shell(
        PODS / "tpu_vm.sh", folder, "--config.seed=2", RUNS=runs, STATE=state, **given
    )


def test_a_preempted_slice_is_made_anew_and_deleted_when_the_run_is_finished(tmp_path):
    result = on_tpu_vm(tmp_path, "PREEMPTED FINISHED", share="10.0.0.2:/share")
    assert result.returncode == 0, result.stderr
    found = [
        re.search(r"resources (create|delete)|(scp|worker\.sh)\b", line)
        for line in calls(tmp_path)
    ]
    once = ["create", "scp", "worker.sh", "delete"]
    assert [match[1] or match[2] for match in found if match] == [*once, *once]
    runs = [line for line in calls(tmp_path) if "worker.sh" in line]
    assert all("--worker=all" in line and "--config.seed=2" in line for line in runs)
    assert "mount -t nfs 10.0.0.2:/share" in "\n".join(calls(tmp_path))


def test_a_run_that_fails_on_a_slice_that_is_well_is_not_tried_forever(tmp_path):
    result = on_tpu_vm(tmp_path, "READY READY READY", share="bucket")
    assert result.returncode == 1, result.stderr
    assert sum("worker.sh" in line for line in calls(tmp_path)) == 2
    assert "gcsfuse" in "\n".join(calls(tmp_path))


def test_xpk_restarts_on_the_statuses_that_ask_for_it(tmp_path):
    stand_in(tmp_path, "xpk", "true")
    given = {"PROJECT": "p", "ZONE": "z", "CLUSTER": "c", "IMAGE": "i"}
    result = shell(PODS / "gke_xpk.sh", tmp_path, "run", "--config.seed=2", **given)
    assert result.returncode == 0, result.stderr
    call = " ".join(calls(tmp_path))
    assert "--restart-on-exit-codes=70,75" in call and "--config.seed=2" in call


def slurm(folder, attempt, **environment):
    """One start of the Slurm job, with stand-ins for Slurm."""
    stand_in(folder, "scontrol", 'echo "node1"; echo "node2"')
    stand_in(folder, "scancel", "true")
    return shell(
        PODS / "slurm.sbatch",
        folder,
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"},
        **{"SLURM_RESTART_COUNT": str(attempt), "SLURM_GPUS_PER_NODE": "h100:4"},
        **{"SLURM_NTASKS_PER_NODE": "1", "WORKDIR": str(folder / "run")},
        **environment,
    )


def requeues(folder):
    return sum("requeue 7" in line for line in calls(folder))


def test_the_slurm_job_asks_to_be_told_and_to_be_requeued():
    text = (PODS / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert {"requeue", "nodes", "ntasks-per-node", "gpus-per-node"} <= set(options)
    assert options["signal"].startswith("B:USR1@")
    assert options["open-mode"] == "append"


def test_a_finished_slurm_job_is_not_requeued(tmp_path):
    body = 'touch "$WORKDIR/summary.json"; env | grep JAX_ >>"$CALLS"'
    stand_in(tmp_path, "srun", body)
    assert slurm(tmp_path, attempt=0).returncode == 0
    assert requeues(tmp_path) == 0
    assert "JAX_LOCAL_DEVICE_IDS=0,1,2,3" in calls(tmp_path)


def test_a_slurm_job_that_was_stopped_is_requeued_and_moves_its_port(tmp_path):
    stand_in(tmp_path, "srun", 'env | grep JAX_COORDINATOR >>"$CALLS"')
    for attempt in range(6):
        assert slurm(tmp_path, attempt, RETRIES="1").returncode == 0
    assert requeues(tmp_path) == 6
    places = {line for line in calls(tmp_path) if line.startswith("JAX_COORDINATOR")}
    assert len(places) == 6 and all("=node1:" in place for place in places)


def test_a_slurm_job_gives_up_only_when_failures_bring_no_checkpoint(tmp_path):
    stand_in(tmp_path, "srun", "exit 70")
    steps = tmp_path / "run" / "checkpoints"
    (steps / "90").mkdir(parents=True)
    statuses = [slurm(tmp_path, attempt, RETRIES="2").returncode for attempt in (0, 1)]
    (steps / "100").mkdir()
    statuses += [slurm(tmp_path, n, RETRIES="2").returncode for n in (2, 3, 4)]
    assert statuses == [0, 0, 0, 0, 70]
    assert requeues(tmp_path) == 4
