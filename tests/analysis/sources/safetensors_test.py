"""Of a Hugging Face folder safetensors alone are read: a pickle can run any code."""

import configparser
import importlib.util
import json
import sys
import types

import numpy as np
import pytest

from softbottle.analysis.sources import hugging_face
from softbottle.analysis.sources.reading import Reading
from tests import ROOT

HAS_TORCH = all(map(importlib.util.find_spec, ("torch", "transformers")))
needs_torch = pytest.mark.skipif(
    not HAS_TORCH,
    reason="needs torch and transformers: pip install 'softbottle[hf]'",
)


def make_reading(folder):
    path = folder / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 31, 40))
    return Reading(path, positions=16, window=16)


@needs_torch
def test_a_folder_that_holds_a_pickle_alone_is_refused(tmp_path):
    import torch
    import transformers

    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}
    words = {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**sizes, **words)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError), match="safetensors") as raised:
        hugging_face.from_hf(tmp_path / "model", make_reading(tmp_path))
    assert "\n" not in str(raised.value).strip()
    assert str(tmp_path / "model") in str(raised.value)
    # The same parameters as safetensors are read.
    model.save_pretrained(tmp_path / "model")
    capture = hugging_face.from_hf(tmp_path / "model", make_reading(tmp_path))
    assert len(capture.states[-1]) == 16


def test_transformers_is_asked_for_safetensors(tmp_path, monkeypatch):
    """Where transformers is not installed, what it is asked for can still be seen."""
    asked = []

    def from_pretrained(**settings):
        asked.append(settings)
        raise OSError("nothing is loaded here")

    stand_in = types.SimpleNamespace(
        AutoModelForCausalLM=types.SimpleNamespace(from_pretrained=from_pretrained)
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(OSError, match="nothing is loaded"):
        hugging_face.from_hf(tmp_path, make_reading(tmp_path))
    assert [settings["use_safetensors"] for settings in asked] == [True]


def test_the_extra_asks_for_versions_that_load_safely():
    """CVE-2025-32434 is mended in torch 2.6; transformers 4.52 checks for that."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.extras_require"]["hf"].split("\n")
    floors = dict(line.split(" >=") for line in lines if " >=" in line)
    versions = {
        name: tuple(map(int, floor.split("."))) for name, floor in floors.items()
    }
    assert versions["torch"] >= (2, 6)
    assert versions["transformers"] >= (4, 52)
