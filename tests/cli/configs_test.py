import runpy

import pytest

from softbottle.cli import configs
from softbottle.config import to_dict
from softbottle.training import state
from tests import ROOT, commands, tiny


def test_a_name_stands_for_the_file_of_the_checkout():
    path = ROOT / "configs" / "ptb.py"
    assert configs.files()["ptb"] == path
    assert configs.resolve("ptb:mos,finetune") == f"{path}:mos,finetune"
    assert configs.resolve("ptb") == str(path)


def test_a_file_is_taken_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ptb").write_text("")
    assert configs.resolve("ptb:mos") == "ptb:mos"


def test_the_settings_of_a_run_are_a_config(tmp_path):
    workdir = tmp_path / "run"
    config = tiny.make_config(model__hidden_dim=6)
    state.write_run(workdir, config, tiny.make_words(5))
    value = configs.resolve(f"{workdir}/config.json")
    assert configs.run_folder(value) == workdir
    assert configs.run_folder(configs.resolve("ptb:mos")) is None
    file, _, path = value.partition(":")
    get_config = runpy.run_path(file)["get_config"]
    assert to_dict(get_config(path)) == to_dict(config)
    (workdir / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        get_config(path)


@pytest.mark.parametrize("value", ["nothing", "configs/nothing.py:mos", ""])
def test_what_is_not_there_is_answered_with_what_is(value):
    file = value.partition(":")[0]
    told = f"no file {file!r} here, .* lm1b, ptb, quickstart, saturation, templates"
    with pytest.raises(ValueError, match=told):
        configs.resolve(value)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--config=wt2:sofmax", "--config|wt2:sofmax"])
def test_a_command_takes_a_name_whose_file_imports_its_neighbour(flag):
    answer = commands.finish(commands.start("train", *flag.split("|")))
    assert answer.code == 2 and "'sofmax' is not HEAD[,STAGE]" in answer.errors
