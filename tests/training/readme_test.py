import pathlib
import re
import shlex

import pytest

from softbottle import cli
from softbottle.training import readme
from tests import ROOT


def commands_of(text):
    """The commands that a README tells, split into words."""
    text = text.replace("\\\n", "")
    return [shlex.split(line) for line in re.findall(r"^ +(softbottle .*)", text, re.M)]


def test_it_tells_commands_with_the_runs_own_path(tmp_path):
    readme.write(tmp_path, pathlib.Path("runs/my run"))
    found = commands_of((tmp_path / "README.txt").read_text())
    assert {words[1] for words in found} < {*cli.COMMANDS}
    for _, name, flag, path, *_ in found:
        expected = "runs/my run/config.json" if name == "train" else "runs/my run"
        assert path == expected and flag in ("--config", "--workdir")


def test_a_model_that_was_only_imported_is_trained_on_elsewhere(tmp_path):
    readme.write(tmp_path, pathlib.Path("runs/there"), resumes=False)
    text = (tmp_path / "README.txt").read_text()
    assert "resumes it" not in text
    (train,) = (words for words in commands_of(text) if words[1] == "train")
    assert train[4:] == [
        "--workdir",
        "runs/there-on",
        "--config.train.init_from=runs/there",
    ]


@pytest.mark.parametrize("resumes", [True, False])
def test_every_flag_that_it_tells_is_one_of_the_command(tmp_path, resumes):
    readme.write(tmp_path, tmp_path, resumes)
    for _, name, *words in commands_of((tmp_path / "README.txt").read_text()):
        source = (ROOT / "softbottle" / "commands" / f"{name}.py").read_text()
        for word in words:
            if re.match(r"--(?!config\b)", word):
                assert re.search(rf'DEFINE_\w+\(\s*"{word[2:]}"', source), (name, word)


def test_one_that_is_there_stays(tmp_path):
    readme.write(tmp_path, tmp_path)
    before = (tmp_path / "README.txt").read_text()
    readme.write(tmp_path, pathlib.Path("elsewhere"))
    assert (tmp_path / "README.txt").read_text() == before
