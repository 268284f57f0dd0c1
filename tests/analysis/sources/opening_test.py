"""Pretrained models side by side, and the checkpoints of one, from real files."""

import json

import numpy as np
import pytest

from softbottle.analysis import inspection, pair
from softbottle.analysis.instruments import saturation
from softbottle.analysis.sources import hugging_face, opening, pretrained
from softbottle.analysis.sources.reading import Reading
from tests import commands
from tests.analysis.inspection_test import make_arrays
from tests.analysis.sources.pretrained_test import (
    DIM,
    log_probs,
    make_ids,
    make_model,
    needs_torch,
)


def make_checkpoints(folder, steps):
    """Other numbers of layers make models that differ, with one name."""
    return {
        step: make_model(folder / f"checkpoint-{step}", "GPT2", n_layer=1 + at % 2)
        for at, step in enumerate(steps)
    }


@needs_torch
def test_a_hub_model_s_revision_is_what_transformers_is_asked_for(
    tmp_path, monkeypatch
):
    asked = []

    def load(source, attention, **options):
        asked.append(source)
        raise OSError("nothing is downloaded here")

    monkeypatch.setattr(pretrained, "_load", load)
    with pytest.raises(OSError):
        hugging_face.from_hf("some/model", Reading("text"), "step1000")
    (source,) = asked
    assert source.where["revision"] == "step1000" and source.name == "model@step1000"
    assert source.where["pretrained_model_name_or_path"] == "some/model"
    assert not source.where["local_files_only"]


@needs_torch
@pytest.mark.slow
def test_checkpoints_of_a_folder_are_a_series_and_one_may_be_damaged(tmp_path):
    models = make_checkpoints(tmp_path / "m", (10, 20, 30))
    damaged = tmp_path / "m" / "checkpoint-20" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:99])
    path = make_ids(tmp_path)
    sources = opening.hub([f"{tmp_path / 'm'}@*"], Reading(path, 32, 16))
    made = inspection.inspect(sources, ["rank", "training"])
    rank, training = made.sections
    curves = training.numbers["m"]
    assert curves["step_M"].tolist() == [10, 30]
    assert "m, not read: checkpoint-20: " in training.reading
    assert "\n" not in training.reading
    ids = np.load(path)
    for at, step in enumerate((10, 30)):
        rows = [log_probs(models[step], ids[at : at + 16]) for at in (0, 16)]
        loss = -np.concatenate(rows)[np.arange(32), ids[1:33]].mean()
        assert curves["loss_M"][at] == pytest.approx(loss, rel=1e-5)
        table_VE = models[step].lm_head.weight.detach().numpy()
        assert curves["entropy_M"][at] == pytest.approx(
            saturation.head(table_VE).entropy
        )
    # The model of the other sections is the last checkpoint.
    assert rank.numbers["m"]["loss"] == pytest.approx(curves["loss_M"][1], rel=1e-6)
    assert any(
        "checkpoint-30, the last that was read of 3" in f for f in made.facts["m"]
    )


@needs_torch
@pytest.mark.slow
def test_two_checkpoints_of_one_model_are_compared(tmp_path):
    models = make_checkpoints(tmp_path / "m", (10, 20))
    path = make_ids(tmp_path)
    name = f"{tmp_path / 'm'}@checkpoint-10,checkpoint-20"
    made = pair.inspect(opening.checkpoints([name], Reading(path, 32, 16)))
    assert list(made.shapes) == ["m@checkpoint-10", "m@checkpoint-20"]
    numbers, ids = made.sections[0].numbers, np.load(path)
    for step, model in ((10, "a"), (20, "b")):
        rows = [log_probs(models[step], ids[at : at + 16]) for at in (0, 16)]
        loss = -np.concatenate(rows)[np.arange(32), ids[1:33]].mean()
        told = numbers[f"loss of {model}"]["value"]
        assert told == pytest.approx(loss, rel=1e-5)


@needs_torch
@pytest.mark.slow
def test_the_command_puts_all_kinds_of_models_into_one_report(tmp_path):
    small = make_model(tmp_path / "a" / "small", "GPT2")
    make_model(tmp_path / "b" / "small", "Llama", hidden_size=2 * DIM)
    make_model(tmp_path / "short", "GPT2", n_positions=8)
    flags = [f"--hf={tmp_path / name}" for name in ("a/small", "b/small", "short")]
    flags += [f"--gguf={tmp_path / 'none.gguf'}"]
    flags += [f"--arrays={make_arrays(tmp_path / 'states.npz')}"]
    flags += [f"--text={make_ids(tmp_path)}", "--positions=32", "--window=16"]
    flags += ["--instruments=rank,sizes", f"--out={tmp_path / 'out'}"]
    printed = commands.run("analyze.py", *flags)
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(numbers["Rank"]) == {"a/small", "b/small", "states"}
    assert numbers["Rank"]["a/small"]["bound"] == DIM + 1
    assert set(numbers["Left out"]["refused"]) == {"short", "none"}
    for where in (printed, (tmp_path / "out" / "report.html").read_text()):
        assert "short has 8 positions" in where and "there is no file" in where
    count = sum(parameter.numel() for parameter in small.parameters())
    assert numbers["Models by size"]["a/small"]["parameters"] == count
