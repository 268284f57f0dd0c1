"""Models that others trained: every door leads to the same arrays."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from softbottle.analysis import inspection
from softbottle.analysis.instruments import predictions
from softbottle.analysis.sources import gguf, hugging_face, llama
from softbottle.analysis.sources.reading import Reading
from tests import commands
from tests.analysis.sources import gguf_test, llama_test

WINDOW, POSITIONS = 16, 40
HAS_TORCH = all(map(importlib.util.find_spec, ("torch", "transformers")))
needs_torch = pytest.mark.skipif(
    not HAS_TORCH,
    reason="needs torch and transformers: pip install 'softbottle[hf]'",
)


def make_ids(folder, count=100, vocab=llama_test.VOCAB):
    path = folder / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, vocab, count))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    llama_test.make_file(folder / "tiny.gguf")
    make_ids(folder)
    return folder


@pytest.fixture(scope="module")
def capture(folder):
    reading = Reading(folder / "ids.npy", POSITIONS, WINDOW)
    return llama.from_gguf(folder / "tiny.gguf", reading)


def test_whole_stretches_are_read_each_from_its_start(folder, capture):
    ids = np.load(folder / "ids.npy")
    count = POSITIONS // WINDOW
    model = llama.load(gguf.read(folder / "tiny.gguf"))
    second = llama.trace(model, ids[WINDOW : 2 * WINDOW])
    for found, expected in zip(capture.states, second.states, strict=True):
        assert len(found) == count * WINDOW
        np.testing.assert_array_equal(found[WINDOW : 2 * WINDOW], expected)
    np.testing.assert_array_equal(capture.logits_LWHS[:, 1], second.logits_LHS)
    np.testing.assert_array_equal(
        capture.tokens[0].labels_T, ids[1 : count * WINDOW + 1]
    )
    np.testing.assert_array_equal(capture.text.ids, ids)
    assert capture.bias_V is None and capture.name == "tiny"


def test_more_of_the_text_is_read_for_the_head_s_states_alone(folder, capture):
    reading = Reading(folder / "ids.npy", POSITIONS, WINDOW, frozen=70)
    found = llama.from_gguf(folder / "tiny.gguf", reading)
    np.testing.assert_array_equal(found.states[-1], capture.states[-1])
    assert (
        len(found.frozen.hidden_TD) == 4 * WINDOW
        and len(found.states[-1]) == 2 * WINDOW
    )
    np.testing.assert_array_equal(
        found.frozen.hidden_TD[: 2 * WINDOW], found.states[-1]
    )
    model = llama.load(gguf.read(folder / "tiny.gguf"))
    last = llama.trace(model, found.text.ids[3 * WINDOW : 4 * WINDOW]).states[-1]
    np.testing.assert_array_equal(found.frozen.hidden_TD[3 * WINDOW :], last)


def test_every_instrument_reads_a_pretrained_model(capture):
    sections = inspection.of_pretrained(capture)
    assert len(sections) == len(inspection.PRETRAINED)
    numbers = {section.title: section.numbers for section in sections}
    found = numbers["Rank"]["tiny"]
    assert found["bound"] == llama_test.DIM + 1
    assert found["ranks"]["ranks"]["float32"] == llama_test.DIM + 1
    layers = numbers["Saturation"]["tiny"]["anisotropy_L"]
    assert len(layers) == llama_test.LAYERS + 1


def test_an_output_table_of_its_own_is_the_one_that_is_used(tmp_path):
    table_VD = np.random.default_rng(5).normal(size=(llama_test.VOCAB, llama_test.DIM))
    path = llama_test.make_file(tmp_path / "a.gguf", **{"output.weight": table_VD})
    reading = Reading(make_ids(tmp_path), 8, 8)
    found = llama.from_gguf(path, reading)
    np.testing.assert_allclose(found.table_VE, table_VD, rtol=1e-6)


def test_of_another_architecture_the_head_alone_is_read(tmp_path):
    settings = llama_test.make_settings() | {"general.architecture": "gemma"}
    path = llama_test.make_file(tmp_path / "a.gguf", settings)
    found = llama.from_gguf(path, Reading("no such text"))
    assert found.states is None and len(found.table_VE) == llama_test.VOCAB
    sections = inspection.of_pretrained(found)
    titles = [section.title for section in sections]
    assert titles == ["Saturation", "What can be on top"]


def test_texts_that_cannot_be_read_are_errors(folder, tmp_path):
    path = folder / "tiny.gguf"
    with pytest.raises(ValueError, match="is no file"):
        llama.from_gguf(path, Reading(tmp_path / "none.txt"))
    with pytest.raises(ValueError, match="three or more"):
        llama.from_gguf(path, Reading(make_ids(tmp_path, 2)))
    with pytest.raises(ValueError, match=r"lie in \[0, 37\)"):
        llama.from_gguf(path, Reading(make_ids(tmp_path, 90, 50)))
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises((ValueError, ImportError), match="npy|pip install"):
        llama.from_gguf(path, Reading(tmp_path / "a.txt"))


@pytest.mark.skipif(
    not importlib.util.find_spec("tokenizers"),
    reason="needs tokenizers: pip install 'softbottle[gguf]'",
)
def test_a_file_s_own_words_and_merges_make_its_tokenizer(tmp_path):
    words = [
        "a",
        "b",
        "1",
        "2",
        "Ġ",
        "ab",
        "Ġab",
        "12",
        *(f"w{at}" for at in range(29)),
    ]
    settings = llama_test.make_settings() | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2"],
    }
    (tmp_path / "a.txt").write_text("ab ab 12 ba")
    for kind, digits in (("gpt-2", [4, 7]), ("smollm", [4, 2, 3])):
        path = llama_test.make_file(
            tmp_path / "a.gguf", settings | {"tokenizer.ggml.pre": kind}
        )
        found = llama.from_gguf(path, Reading(tmp_path / "a.txt"))
        assert found.text.ids.tolist() == [5, 6, *digits, 4, 1, 0]


@pytest.mark.skipif(
    not importlib.util.find_spec("tokenizers"),
    reason="needs tokenizers: pip install 'softbottle[gguf]'",
)
@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"merges": None},
        {"tokens": 3},
        {"merges": "a b"},
        {"merges": ["a b c"]},
        {"merges": ["a"]},
        {"merges": ["a 2"]},
    ],
)
def test_a_tokenizer_that_cannot_be_is_one_error(changes, tmp_path):
    made = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"]}
    made = made | {"merges": ["a b"]} | changes
    settings = llama_test.make_settings() | {
        f"tokenizer.ggml.{name}": value
        for name, value in made.items()
        if value is not None
    }
    path = llama_test.make_file(tmp_path / "a.gguf", settings)
    (tmp_path / "a.txt").write_text("ab ab")
    with pytest.raises(ValueError, match="a.gguf"):
        llama.from_gguf(path, Reading(tmp_path / "a.txt"))


def test_a_head_that_is_no_table_is_named(folder, tmp_path):
    settings = llama_test.make_settings()
    for architecture in ("llama", "gemma"):
        path = llama_test.make_file(
            tmp_path / "a.gguf",
            settings | {"general.architecture": architecture},
            **{"output.weight": np.ones(5)},
        )
        with pytest.raises(ValueError, match="output.weight of .*a.gguf"):
            llama.from_gguf(path, Reading(folder / "ids.npy"))


def test_ids_in_a_file_that_lies_and_text_that_is_none_are_errors(folder, tmp_path):
    path = folder / "tiny.gguf"
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (%d,), }" % 2**40
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "a.npy").write_bytes(raw + bytes(64))
    with pytest.raises(ValueError, match="a.npy .* there are 64"):
        llama.from_gguf(path, Reading(tmp_path / "a.npy"))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="a.txt is no text in UTF-8"):
        llama.from_gguf(path, Reading(tmp_path / "a.txt"))


def test_missing_packages_are_named_with_the_command_that_brings_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install 'softbottle\[hf\]'"):
        hugging_face.from_hf("folder", Reading("text"))


def tiny_hf(name):
    import transformers

    shared = {"vocab_size": 37, "hidden_size": 12, "num_hidden_layers": 2}
    shared |= {"num_attention_heads": 3, "max_position_embeddings": 64}
    gated = shared | {"num_key_value_heads": 1, "intermediate_size": 20}
    made = {
        "GPT2": lambda: transformers.GPT2Config(
            vocab_size=37, n_embd=12, n_layer=2, n_head=3, n_positions=64
        ),
        "GPTNeoX": lambda: transformers.GPTNeoXConfig(**shared, intermediate_size=20),
        "OPT": lambda: transformers.OPTConfig(
            **shared, ffn_dim=20, word_embed_proj_dim=8
        ),
        "Llama": lambda: transformers.LlamaConfig(**gated),
        "Mistral": lambda: transformers.MistralConfig(**gated),
        "Gemma": lambda: transformers.GemmaConfig(**gated, head_dim=4),
        "Gemma2": lambda: transformers.Gemma2Config(
            **gated, head_dim=4, final_logit_softcapping=0.1
        ),
    }[name]()
    # None, or the padding's embedding is 0 and has no direction.
    made.bos_token_id = made.eos_token_id = made.pad_token_id = None
    transformers.set_seed(0)
    return transformers.AutoModelForCausalLM.from_config(made)


@needs_torch
@pytest.mark.parametrize(
    "name", ["GPT2", "GPTNeoX", "OPT", "Llama", "Mistral", "Gemma"]
)
def test_hugging_face_models_come_through_one_door(name, tmp_path):
    import torch

    model = tiny_hf(name).eval()
    model.save_pretrained(tmp_path / name)
    path = make_ids(tmp_path)
    found = hugging_face.from_hf(tmp_path / name, Reading(path, 32, 16))
    ids = torch.tensor(np.load(path)[16:32])[None]
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1).numpy()
    blocks = list(predictions.rows(found))
    np.testing.assert_allclose(blocks[0][16:], expected, rtol=1e-4, atol=1e-5)
    assert found.logits_LWHS.shape == (2, 2, 3, 16)
    np.testing.assert_allclose(np.exp(found.logits_LWHS).sum(-1), 1, rtol=1e-5)
    sections = inspection.sections(
        [found], ("rank", "saturation", "attention", "gradient")
    )
    assert len(sections) == 4


@needs_torch
def test_a_head_that_is_no_softmax_and_a_folder_without_a_model_are_errors(tmp_path):
    reading = Reading(make_ids(tmp_path), 16, 16)
    with pytest.raises(ValueError, match="no config.json"):
        hugging_face.from_hf(tmp_path, reading)
    tiny_hf("Gemma2").save_pretrained(tmp_path / "capped")
    with pytest.raises(ValueError, match="changes its logits after the head"):
        hugging_face.from_hf(tmp_path / "capped", reading)


@pytest.mark.slow
def test_the_command_reads_a_gguf_file(folder, tmp_path):
    flags = [f"--gguf={folder / 'tiny.gguf'}", f"--text={folder / 'ids.npy'}"]
    flags += ["--positions=32", "--window=16", "--instruments=rank,attention"]
    commands.run("analyze.py", *flags, f"--out={tmp_path / 'out'}")
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(numbers) == {"Rank", "Attention by layer"}


def test_a_file_cut_short_is_an_error(folder, tmp_path):
    path = tmp_path / "a.gguf"
    whole = (folder / "tiny.gguf").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        llama.from_gguf(path, Reading(folder / "ids.npy"))
    gguf_test.write_arrays(path, {}, {"other": np.ones(3)})
    with pytest.raises(ValueError, match="token_embd.weight"):
        llama.from_gguf(path, Reading(folder / "ids.npy"))
