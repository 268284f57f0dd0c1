"""Models that others trained: every door leads to the same arrays."""

import dataclasses
import importlib.util
import json
import pathlib
import sys
import types

import numpy as np
import pytest
from scipy import special

from softbottle.analysis import inspection, pair
from softbottle.analysis.instruments import predictions
from softbottle.analysis.sources import gguf, hugging_face
from softbottle.analysis.sources.reading import Reading
from tests import commands

VOCAB, DIM = 37, 12
WORDS = ["<unk>", "<bos>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", *map(str, range(8))]
HAS_TORCH = all(map(importlib.util.find_spec, ("torch", "transformers")))
needs_torch = pytest.mark.skipif(
    not HAS_TORCH,
    reason="needs torch and transformers: pip install 'softbottle[hf]'",
)


def make_ids(folder, count=100, vocab=VOCAB):
    path = folder / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(3, vocab, count))
    return path


def make_config(name, **changes):
    import transformers

    shared = {"vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": 2}
    shared |= {"num_attention_heads": 3, "max_position_embeddings": 64}
    gated = shared | {"num_key_value_heads": 1, "intermediate_size": 20}
    sizes = {
        "GPT2": {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": 2, "n_head": 3}
        | {"n_positions": 64},
        "GPTNeoX": shared | {"intermediate_size": 20},
        "OPT": shared | {"ffn_dim": 20, "word_embed_proj_dim": 8},
        "Gemma": gated | {"head_dim": 4},
        "Gemma2": gated | {"head_dim": 4, "final_logit_softcapping": 0.1},
        "Gemma3Text": gated
        | {"head_dim": 4, "sliding_window": 7}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        "Granite": gated | {"logits_scaling": 8.0},
        "Mamba": {"vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": 2}
        | {"state_size": 4},
    }.get(name, gated)
    made = getattr(transformers, f"{name}Config")(**sizes | changes)
    # None, or the padding's embedding is 0 and has no direction.
    made.bos_token_id = made.eos_token_id = made.pad_token_id = None
    return made


def make_model(folder, name, **changes):
    """A small model of random parameters, saved in a folder."""
    import transformers

    transformers.set_seed(0)
    config = make_config(name, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.eval().save_pretrained(folder)
    return model


def make_tokenizer(folder, template):
    """Letters and digits as tokens; a template says what an encoding adds."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def make_text(folder):
    words = np.random.default_rng(2).choice(WORDS[3:], 80)
    path = folder / "text.txt"
    path.write_text(" ".join(words))
    return path, np.array([WORDS.index(word) for word in words])


def log_probs(model, ids):
    """What the model itself predicts, in float64."""
    import torch

    with torch.no_grad():
        logits_SV = model(torch.tensor(ids)[None]).logits[0].double().numpy()
    return special.log_softmax(logits_SV, axis=1)


def test_missing_packages_are_named_with_the_command_that_brings_them(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'softbottle\[hf\]'"):
        hugging_face.from_hf("folder", Reading("text"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ImportError, match=r"pip install 'softbottle\[gguf\]'"):
        hugging_face.from_gguf(tmp_path / "a.gguf", Reading("text"))


@needs_torch
@pytest.mark.parametrize(
    "name", ["GPT2", "GPTNeoX", "OPT", "Llama", "Mistral", "Gemma", "Granite"]
)
def test_hugging_face_models_come_through_one_door(name, tmp_path):
    model = make_model(tmp_path / name, name)
    path = make_ids(tmp_path)
    found = hugging_face.from_hf(tmp_path / name, Reading(path, 32, 16))
    blocks = list(predictions.rows(found))
    expected = log_probs(model, np.load(path)[16:32])
    np.testing.assert_allclose(blocks[0][16:], expected, rtol=1e-4, atol=1e-5)
    assert found.logits_LWHS.shape == (2, 2, 3, 16)
    np.testing.assert_allclose(np.exp(found.logits_LWHS).sum(-1), 1, rtol=1e-5)
    assert found.spans_L.tolist() == [16, 16]
    sections = inspection.sections(
        [found], ("rank", "saturation", "attention", "gradient")
    )
    assert len(sections) == 4
    # A constant factor leaves a softmax, and its bound.
    assert sections[0].numbers[name]["bound"] == found.table_VE.shape[1] + 1
    told = any("a factor of 0.125" in fact for fact in found.facts)
    assert told == (name == "Granite")


@needs_torch
@pytest.mark.parametrize("template", ["<bos> $A", "<bos> $A <eos>", "$A", "$A <eos>"])
def test_windows_start_as_the_tokenizer_s_own_encoding_does(template, tmp_path):
    model = make_model(tmp_path / "tiny", "Llama")
    make_tokenizer(tmp_path / "tiny", template)
    text, ids = make_text(tmp_path)
    front = [1] if template.startswith("<bos>") else []
    found = hugging_face.from_hf(tmp_path / "tiny", Reading(text, 32, 16))
    np.testing.assert_array_equal(found.text.ids, ids)
    second = log_probs(model, [*front, *ids[16:32]])[len(front) :]
    log_p_NV = np.concatenate(list(predictions.rows(found)))
    np.testing.assert_allclose(log_p_NV[16:], second, rtol=1e-4, atol=1e-5)
    first = log_probs(model, [*front, *ids[:16]])[len(front) :]
    loss = -np.concatenate([first, second])[np.arange(32), ids[1:33]].mean()
    (section,) = inspection.of_pretrained(found, ["rank"])
    assert section.numbers["tiny"]["loss"] == pytest.approx(loss, rel=1e-5)
    note = found.facts[-1]
    expected = "adds <bos> (1) before a text" if front else "adds no token before"
    assert note.startswith("Beginning of sequence: ") and expected in note
    # Ids in a file are read behind the same token.
    np.save(tmp_path / "ids.npy", ids)
    by_ids = hugging_face.from_hf(
        tmp_path / "tiny", Reading(tmp_path / "ids.npy", 32, 16)
    )
    np.testing.assert_array_equal(by_ids.states[-1], found.states[-1])


@needs_torch
def test_soft_capped_logits_are_measured_as_such(tmp_path):
    model = make_model(tmp_path / "capped", "Gemma2", final_logit_softcapping=0.5)
    path = make_ids(tmp_path, 200)
    found = hugging_face.from_hf(tmp_path / "capped", Reading(path, 64, 16))
    expected = log_probs(model, np.load(path)[:16])
    for precision, tolerance in (("float32", 1e-5), ("float64", 1e-6)):
        log_p_NV = np.concatenate(list(predictions.rows(found, precision)))
        np.testing.assert_allclose(log_p_NV[:16], expected, atol=tolerance)
        by_word = np.concatenate(list(predictions.columns(found, precision))).T
        np.testing.assert_allclose(by_word, log_p_NV, atol=tolerance)
    names = [*inspection.PRETRAINED, "lowrank"]
    sections = {s.title: s for s in inspection.of_pretrained(found, names)}
    rank = sections["Rank"].numbers["capped"]
    # The cap is no linear map of the states: the rank of a softmax is exceeded.
    assert rank["bound"] == DIM + 1 < rank["ranks"]["ranks"]["float32"]
    assert rank["lifted"] and "which lifts that bound" in sections["Rank"].reading
    assert "skipped: capped: heads of limited rank" in sections["lowrank"].reading
    plain = np.concatenate(list(predictions.rows(found)))
    p_NV, labels_N = np.exp(plain.astype(float)), found.tokens[0].labels_T
    p_NV[np.arange(64), labels_N] -= 1
    z_NV = found.states[-1].astype(float) @ found.table_VE.T.astype(float)
    d_NV = p_NV * (1 - np.tanh(z_NV / 0.5) ** 2)
    basis_VE = np.linalg.svd(found.table_VE.astype(float), full_matrices=False)[0]
    kept = np.linalg.norm(d_NV @ basis_VE) / np.linalg.norm(d_NV)
    measured = sections["Gradient"].numbers["capped"]["kept"]
    assert measured == pytest.approx(kept, rel=1e-3)
    assert any("0.5 tanh(z / 0.5)" in fact for fact in found.facts)


@needs_torch
def test_layers_of_sliding_window_attention_are_judged_by_their_window(tmp_path):
    make_model(tmp_path / "slides", "Gemma3Text")
    reading = Reading(make_ids(tmp_path), 32, 16)
    found = hugging_face.from_hf(tmp_path / "slides", reading)
    assert found.spans_L.tolist() == [7, 16]
    (section,) = inspection.of_pretrained(found, ["attention"])
    # Random parameters spread evenly, over what there is to see.
    assert np.all(section.numbers["slides"]["spread_LH"] > 0.9)


@needs_torch
def test_a_model_without_attention_is_measured_but_for_it(tmp_path):
    make_model(tmp_path / "ssm", "Mamba")
    found = hugging_face.from_hf(tmp_path / "ssm", Reading(make_ids(tmp_path), 32, 16))
    rank, skipped = inspection.of_pretrained(found, ["rank", "attention"])
    assert rank.numbers["ssm"]["ranks"]["ranks"]["float32"] == DIM + 1
    assert skipped.reading == "skipped: ssm: the model has no attention."


@needs_torch
def test_models_that_cannot_be_read_are_refused_in_one_line(tmp_path):
    reading = Reading(make_ids(tmp_path), 16, 16)
    with pytest.raises(ValueError, match="no config.json"):
        hugging_face.from_hf(tmp_path, reading)
    make_model(tmp_path / "short", "GPT2", n_positions=8)
    with pytest.raises(ValueError, match=r"short has 8 positions.*--window=8"):
        hugging_face.from_hf(tmp_path / "short", reading)
    text, _ = make_text(tmp_path)
    with pytest.raises(ValueError, match="short has no tokenizer.*npy") as raised:
        hugging_face.from_hf(tmp_path / "short", Reading(text, 8, 8))
    assert "\n" not in str(raised.value)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "odd"}))
    with pytest.raises(ValueError, match="transformers cannot read odd") as raised:
        hugging_face.from_hf(tmp_path / "odd", reading)
    assert "\n" not in str(raised.value)


@needs_torch
def test_logits_that_are_changed_in_another_way_are_refused(tmp_path, monkeypatch):
    import transformers

    make_model(tmp_path / "bent", "Llama")
    forward = transformers.LlamaForCausalLM.forward

    def bent(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits**3
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", bent)
    reading = Reading(make_ids(tmp_path), 16, 16)
    with pytest.raises(ValueError, match="bent changes its logits after the head"):
        hugging_face.from_hf(tmp_path / "bent", reading)


@needs_torch
@pytest.mark.slow
def test_the_command_says_what_was_read_and_what_was_left_out(tmp_path):
    make_model(tmp_path / "tiny", "Mamba")
    make_tokenizer(tmp_path / "tiny", "<bos> $A")
    text, _ = make_text(tmp_path)
    flags = [f"--hf={tmp_path / 'tiny'}", f"--text={text}", "--positions=32"]
    flags += ["--window=16", "--instruments=rank,attention"]
    printed = commands.run("analyze.py", *flags, f"--out={tmp_path / 'out'}")
    page = (tmp_path / "out" / "report.html").read_text()
    for where in (printed, page):
        assert "Beginning of sequence: the tokenizer adds " in where
        assert "skipped: tiny: the model has no attention." in where
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(numbers) == {"header", "models", "Rank", "attention"}
    assert numbers["models"]["tiny"]["verdict"] == (
        f"uses {DIM + 1} of {DIM + 1} dimensions: at its bottleneck."
    )
    assert any("in 2 windows of 16" in line for line in numbers["header"])


def test_of_a_gguf_file_transformers_is_asked_for_that_file_alone(
    tmp_path, monkeypatch
):
    """Where transformers is not installed, what it is asked for can still be seen."""
    asked = []

    def from_pretrained(**settings):
        asked.append(settings)
        raise KeyError("an\nodd error")

    class Reader:
        tensors = ()

        def __init__(self, path):
            assert pathlib.Path(path).read_bytes() == b"GGUF"

        def get_field(self, key):
            del key

    auto = types.SimpleNamespace(from_pretrained=from_pretrained)
    stand_in = types.SimpleNamespace(AutoModelForCausalLM=auto)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setitem(sys.modules, "gguf", types.SimpleNamespace(GGUFReader=Reader))
    monkeypatch.setitem(sys.modules, "accelerate", types.SimpleNamespace())
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="transformers cannot read a: KeyError"):
        hugging_face.from_gguf(path, Reading(make_ids(tmp_path)))
    (settings,) = asked
    assert settings["pretrained_model_name_or_path"] == str(tmp_path)
    assert settings["gguf_file"] == "a.gguf" and settings["local_files_only"]
    assert settings["trust_remote_code"] is False
    path.write_bytes(b"ZIP")
    with pytest.raises(ValueError, match="is no GGUF file"):
        hugging_face.from_gguf(path, Reading(make_ids(tmp_path)))
    with pytest.raises(ValueError, match="there is no file"):
        hugging_face.from_gguf(tmp_path / "none.gguf", Reading(make_ids(tmp_path)))


@pytest.mark.parametrize("names", [["F32", "F16"], ["Q4_1", "F32", "Q4_1"]])
def test_quantized_weights_are_told(tmp_path, monkeypatch, names):
    tensors = [
        types.SimpleNamespace(name="w", tensor_type=types.SimpleNamespace(name=name))
        for name in names
    ]
    reader = types.SimpleNamespace(tensors=tensors, get_field=lambda key: None)
    stand_in = types.SimpleNamespace(GGUFReader=lambda path: reader)
    monkeypatch.setitem(sys.modules, "gguf", stand_in)
    monkeypatch.setitem(sys.modules, "accelerate", types.SimpleNamespace())
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    facts = gguf.read(tmp_path / "a.gguf").facts
    told = ("Quantized weights: the file's tensors are 2 Q4_1, 1 F32.",)
    assert facts == (told if "Q4_1" in names else ())


@needs_torch
@pytest.mark.slow
def test_two_models_of_one_tokenizer_are_compared_and_others_refused(tmp_path):
    names = ("GPT2", "Llama")
    for name in names:
        make_model(tmp_path / name, name)
        make_tokenizer(tmp_path / name, "$A" if name == "GPT2" else "<bos> $A")
    path, ids = make_text(tmp_path)
    reading = Reading(path, 60, 12)
    a, b = (hugging_face.from_hf(tmp_path / name, reading) for name in names)
    assert list(a.words) == WORDS[:VOCAB]
    (section,) = pair.sections([a, b])
    assert section.numbers["positions"] == 60
    p_SV, q_SV = (
        np.concatenate(list(predictions.rows(model, "float64"))) for model in (a, b)
    )
    kl = np.mean(np.sum(np.exp(p_SV) * (p_SV - q_SV), axis=1))
    assert section.numbers["KL(a||b)"]["value"] == pytest.approx(kl, rel=1e-4)
    losses = -q_SV[np.arange(60), ids[1:61]]
    assert section.numbers["loss of b"]["value"] == pytest.approx(losses.mean())
    moved = dataclasses.replace(b, words=[*WORDS[:5], "other", *WORDS[6:VOCAB]])
    with pytest.raises(ValueError, match="first word 5: 'c' and 'other'"):
        pair.sections([a, moved])
