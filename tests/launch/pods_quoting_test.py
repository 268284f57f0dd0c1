"""Settings reach the hosts of a pod whole, and nothing in them is executed there."""

import pytest

from tests.launch.stand_ins import PODS, TRAINING, calls, shell, stand_in

AWKWARD = [
    "two  words",
    'it\'s "quoted"',
    "$(touch planted)",
    "`touch planted`",
    "; touch planted #",
    "&& touch planted || true",
    "$HOME ~ * ? [a] {b} \\ ! | <x >y",
    "two\nlines",
]
awkwardly = pytest.mark.parametrize("text", AWKWARD)

# What arrives at the host's part of a job.
WORKER = """
printf '%s\\0' "$CONFIG" "$WORKDIR" "$NAME" "$@" >"$CALLS.arrived"
"""
# gcloud and xpk: the command is read by a shell of the host, in that user's home.
HOST = """
for argument in "$@"; do
    case $argument in
    --command=*) cd "$REMOTE" && HOME=$REMOTE bash -c "${argument#--command=}" ;;
    esac
done
"""


def make_host(folder):
    """A host's home, with programs that only write down how they were called."""
    home = folder / "home"
    for pods in (home / "softbottle/launch/pods", home / "launch/pods"):
        pods.mkdir(parents=True)
        (pods / "worker.sh").write_text(WORKER)
        for name in ("finished.py", "process.sh"):
            (pods / name).write_text((PODS / name).read_text())
    for name in ("tar", "git", "python3", "pkill", "mountpoint"):
        stand_in(folder, name, "[[ $0 != */mountpoint ]]")
    words = """printf '%s\\0' "$@" >>"$CALLS.words" """
    stand_in(folder, "sudo", words)
    stand_in(folder, "gcsfuse", words)
    for name in (".local/bin/uv", "venv/bin/python"):
        stand_in(folder, "program", TRAINING)
        (home / name).parent.mkdir(parents=True)
        (folder / "bin" / "program").rename(home / name)
    stand_in(folder, "gcloud", HOST)
    stand_in(folder, "xpk", HOST)
    return home


def words(folder, suffix):
    return (folder / f"calls.{suffix}").read_text().split("\0")[:-1]


def run_stage(folder, script, stage, *arguments, **variables):
    home = make_host(folder)
    given = {"PROJECT": "p", "ZONE": "z", "CLUSTER": "c", "IMAGE": "i", "SHARE": "s"}
    given |= {"REMOTE": str(home)}
    result = shell(PODS / script, folder, stage, *arguments, **given | variables)
    assert not list(folder.rglob("planted"))
    return result


@awkwardly
@pytest.mark.parametrize("script", ["tpu_vm.sh", "gke_xpk.sh"])
def test_settings_of_a_run_arrive_whole(tmp_path, script, text):
    result = run_stage(
        tmp_path,
        script,
        "run",
        f"--config.data.cache={text}",
        CONFIG=text,
        WORKDIR=text,
        DATA=text,
        MODEL=text,
        ROWS=text,
    )
    assert result.returncode == 0, result.stderr
    config, workdir, name, path, cache, rows, last = words(tmp_path, "arrived")
    assert (config, workdir, name) == (text, text, "softbottle")
    assert (path, rows) == (f"--config.data.path={text}", f"--config.data.rows={text}")
    assert cache == "--config.data.cache=/mnt/share/cache"
    assert last == f"--config.data.cache={text}"


@awkwardly
@pytest.mark.parametrize("prefix", ["10.0.0.2:/", ""])
def test_a_share_and_a_folder_on_it_arrive_whole(tmp_path, text, prefix):
    workdir = tmp_path / text.replace("/", "_")
    share = {"SHARE": prefix + text, "WORKDIR": str(workdir)}
    result = run_stage(tmp_path, "tpu_vm.sh", "install", **share)
    assert result.returncode == 0, result.stderr
    assert workdir.is_dir()
    assert words(tmp_path, "words")[-2:] == [prefix + text, "/mnt/share"]


@awkwardly
def test_versions_to_install_arrive_whole(tmp_path, text):
    run_stage(tmp_path, "tpu_vm.sh", "install", JAX=text, WORKDIR=str(tmp_path))
    assert f"jax[tpu]=={text}" in "\n".join(calls(tmp_path))


@awkwardly
def test_kubernetes_finds_no_variable_of_its_own_in_a_command(tmp_path, text):
    """It replaces $(NAME) in a container's command, inside quotes too."""
    settings = {"WORKDIR": text + "$(HOME)", "CONFIG": text}
    result = run_stage(tmp_path, "gke_xpk.sh", "run", **settings)
    if "\n" in text:
        assert result.returncode == 64 and "control character" in result.stderr
        return
    (call,) = (line for line in calls(tmp_path) if "worker.sh" in line)
    assert "$(" not in call


@pytest.mark.parametrize("stage", ["run", "stop"])
def test_the_name_of_a_run_is_not_executed(tmp_path, stage):
    for text in AWKWARD:
        folder = tmp_path / str(AWKWARD.index(text))
        folder.mkdir()
        run_stage(folder, "tpu_vm.sh", stage, NAME=text, WORKDIR="w")
