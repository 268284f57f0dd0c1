import os
import re
import runpy
import subprocess
import sys

import pytest

from softbottle import cli
from tests import ROOT

# A command is forked from an interpreter that has imported large packages and, of
# softbottle, what all commands import: one that forgets to import a module of ours
# fails here as it does for a user. The first, train, does without some of them: a first
# step does not wait for what a run needs at its end.
PAGES = """
import os, sys
import flax.linen, optax
from softbottle import cli
from softbottle.cli import program
for name in cli.COMMANDS:
    if os.fork() == 0:
        sys.argv = [f"softbottle {name}", "--help"]
        try:
            cli.run(name)
        except SystemExit as end:
            sys.stdout.flush()
            late = {"matplotlib", "scipy"} & {*sys.modules} if name == "train" else ()
            # Not a second per process for tidying up.
            os._exit(end.code or len(late))
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print(f"==== {name} {status}", flush=True)
    import matplotlib.figure, scipy.optimize, scipy.stats
"""


def python(*arguments):
    """A finished process of an interpreter of its own."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def pages():
    """What --help prints, by command."""
    done = python("-c", PAGES)
    assert done.returncode == 0, done.stderr
    parts = re.findall(r"(.*?)\n==== (\w+) (\d+)\n", done.stdout, re.DOTALL)
    assert {status for *_, status in parts} == {"0"}, done.stderr
    return {name: page for page, name, _ in parts}


@pytest.mark.slow
def test_every_command_starts_and_has_a_page_of_a_screen(pages):
    assert [*pages] == [*cli.COMMANDS]
    for name, page in pages.items():
        lines = page.splitlines()
        assert len(lines) <= 45 and max(map(len, lines)) <= 100, name
        assert f"    softbottle {name} --" in page, f"{name} has no example"
        assert "\n  --traceback " in page, name


def test_a_page_has_the_commands_flags_with_their_defaults(pages):
    assert re.search(r"--share +Cache: .* \(default 0\.1\)", pages["evaluate"])
    assert re.search(r"--split +<train\|valid\|test>: .*default test", pages["analyze"])
    assert re.search(r"--workdir +A run; .* May be repeated\.\n", pages["analyze"])
    assert "--learning_rate" not in pages["generate"]


def test_the_page_of_train_names_every_setting(pages):
    assert "  optim: name learning_rate " in pages["train"]
    assert "  data.synthetic: words " in pages["train"]
    for name in ("train", "sweep", "bench"):
        assert f"softbottle {name} --helpfull" in pages[name]
    assert "--helpfull" not in pages["evaluate"]


def test_the_overview_waits_for_nothing():
    watch = "import sys; sys.argv = ['softbottle']; from softbottle import cli; "
    done = python("-c", watch + "cli.main(); print(*sys.modules)")
    *lines, modules = done.stdout.splitlines()
    assert not {"jax", "numpy", "absl", "softbottle.heads"} & set(modules.split())
    for name in cli.COMMANDS:
        assert any(line.startswith(f"    {name} ") for line in lines)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", ["trane", "", "command"])
def test_an_unknown_command_is_answered_with_those_there_are(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["softbottle", name, "--help"])
    assert cli.main() == 2
    output, errors = capsys.readouterr()
    assert output == "" and f"no command {name!r}; there are train, " in errors


def test_a_command_takes_the_rest_of_the_line(monkeypatch):
    called = []
    monkeypatch.setattr(cli, "run", lambda name: called.append((name, [*sys.argv])))
    monkeypatch.setattr(sys, "argv", ["bin/softbottle", "export", "--read"])
    cli.main()
    assert called == [("export", ["softbottle export", "--read"])]


def test_every_command_is_documented():
    page = (ROOT / "docs" / "recipes.md").read_text()
    documented = re.findall(r"^\| `softbottle (\w+)` \|", page, re.MULTILINE)
    assert documented == [*cli.COMMANDS]


def test_every_command_has_a_file_of_launch_and_no_other_is_there(monkeypatch):
    called = []
    monkeypatch.setattr(cli, "run", called.append)
    for path in sorted((ROOT / "launch").glob("*.py")):
        runpy.run_path(str(path), run_name="__main__")
        assert called[-1] == path.stem
    assert sorted(called) == sorted(cli.COMMANDS)
    files = {path.stem for path in (ROOT / "softbottle" / "commands").glob("*.py")}
    assert files == {*cli.COMMANDS, "__init__"}


def test_the_version_is_the_packages(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["softbottle", "--version"])
    assert cli.main() == 0
    assert re.fullmatch(r"softbottle \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_interrupt_while_packages_are_loaded_is_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.run("train")
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
