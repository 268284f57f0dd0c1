"""The job files of launch/pods, read and linted; pods_run_test.py runs them."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess

import pytest
import yaml

from softbottle import config as configs
from tests.launch.stand_ins import PODS, ROOT

SCRIPTS = sorted(
    [
        *PODS.glob("*.sh"),
        *PODS.glob("*.sbatch"),
        ROOT / "tests" / "launch" / "slurm_run.sh",
    ]
)
JOBSET = PODS / "gke_jobset.yaml"
JOBS = [*SCRIPTS, JOBSET]
by_name = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)


def train_flags():
    tree = ast.parse((ROOT / "softbottle" / "commands" / "train.py").read_text())
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


def test_the_slurm_job_asks_to_be_told_and_to_be_requeued():
    text = (PODS / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert {"requeue", "nodes", "ntasks-per-node", "gpus-per-node"} <= set(options)
    assert options["signal"].startswith("B:USR1@")
    assert options["open-mode"] == "append"


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
        hostNetwork subdomain affinity schedulerName tolerations priorityClassName
        securityContext""",
    "podSecurity": """runAsNonRoot runAsUser runAsGroup fsGroup seccompProfile
        supplementalGroups fsGroupChangePolicy sysctls""",
    "containerSecurity": """allowPrivilegeEscalation capabilities privileged
        readOnlyRootFilesystem runAsNonRoot runAsUser runAsGroup seccompProfile""",
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
        "podSecurity": job()["template"]["spec"]["securityContext"],
        "containerSecurity": job_container()["securityContext"],
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


def setting(name, file):
    """The default of a variable of a Dockerfile or a script."""
    pattern = rf"^(?:ARG )?{name}=(?:\${{{name}:-)?([^}}\s]+)"
    return re.search(pattern, (PODS / file).read_text(), re.MULTILINE)[1]


def test_the_image_and_jax_are_of_one_exact_version_everywhere():
    text = (PODS / "Dockerfile").read_text()
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", setting("BASE", "Dockerfile"))
    assert re.findall(r"^FROM (.*)$", text, re.MULTILINE) == ["${BASE}"]
    assert '"jax[${JAX}]==${JAX_VERSION}"' in text
    version = setting("JAX_VERSION", "Dockerfile")
    assert version == setting("JAX", "tpu_vm.sh")
    assert "jax[tpu]==$JAX" in (PODS / "tpu_vm.sh").read_text()
    floor = re.search(r"\bjax >=([\d.]+)", (ROOT / "setup.cfg").read_text())[1]
    assert [*map(int, version.split("."))] >= [*map(int, floor.split("."))]


def test_a_container_runs_as_a_user_who_is_not_root_and_owns_the_share():
    text = (PODS / "Dockerfile").read_text()
    user, group = re.search(r"^USER (\d+):(\d+)$", text, re.MULTILINE).groups()
    assert user == group == setting("USER_ID", "gke_xpk.sh") != "0"
    # What is copied or installed after USER would belong to that user.
    assert not re.search(r"^(COPY|RUN)", text.partition("\nUSER")[2], re.MULTILINE)
    pod = job()["template"]["spec"]
    identity = pod["securityContext"]
    assert identity["runAsNonRoot"] is True
    ids = {identity[name] for name in ("runAsUser", "runAsGroup", "fsGroup")}
    assert ids == {int(user)}
    options = pod["volumes"][0]["csi"]["volumeAttributes"]["mountOptions"].split(",")
    assert {f"uid={user}", f"gid={user}"} <= set(options)
    security = job_container()["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not security.get("privileged")


def test_a_pod_has_a_network_of_its_own():
    pod = job()["template"]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


@by_name
def test_no_process_is_ended_by_its_name(path):
    commands = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE)
    assert not re.search(r"\b(pkill|killall|skill)\b", commands)


def test_the_page_says_that_a_config_is_code():
    text = " ".join((PODS / "README.md").read_text().split())
    assert "a config is Python code" in text and "run only those you trust" in text
