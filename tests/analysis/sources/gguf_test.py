"""GGUF files, as transformers reads them, against loops in float64."""

import importlib.util

import numpy as np
import pytest

from softbottle.analysis import inspection
from softbottle.analysis.sources import hugging_face
from softbottle.analysis.sources.reading import Reading

VOCAB, DIM, INNER, LAYERS, HEADS, SHARED, SIZE = 37, 12, 20, 2, 6, 2, 4
EPSILON, BASE = 1e-5, 5000.0
BOS, WINDOW = 2, 9
WORDS = ["a", "b", "<s>", "Ġ", "ab", "Ġab", *(f"w{at}" for at in range(31))]
PARTS = {
    "attn_q": (HEADS * SIZE, DIM),
    "attn_k": (HEADS // SHARED * SIZE, DIM),
    "attn_v": (HEADS // SHARED * SIZE, DIM),
    "attn_output": (DIM, HEADS * SIZE),
    "ffn_gate": (INNER, DIM),
    "ffn_up": (INNER, DIM),
    "ffn_down": (DIM, INNER),
    "attn_norm": (DIM,),
    "ffn_norm": (DIM,),
}
pytestmark = pytest.mark.skipif(
    not all(
        map(importlib.util.find_spec, ("torch", "transformers", "accelerate", "gguf"))
    ),
    reason="needs transformers, accelerate and gguf: pip install 'softbottle[gguf]'",
)


def make_arrays():
    rng = np.random.default_rng(0)
    arrays = {
        "token_embd.weight": rng.normal(size=(VOCAB, DIM)),
        "output_norm.weight": rng.uniform(0.5, 1.5, DIM),
        "output.weight": rng.normal(size=(VOCAB, DIM)),
    }
    for layer in range(LAYERS):
        for part, shape in PARTS.items():
            values = 0.5 * rng.normal(size=shape) + part.endswith("norm")
            arrays[f"blk.{layer}.{part}.weight"] = values
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def make_file(path, add_bos=True, architecture="llama", without="", **more):
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // SHARED)
    writer.add_rope_dimension_count(SIZE)
    writer.add_rope_freq_base(BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(BOS)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for name, array in (make_arrays() | more).items():
        if name != without:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_ids(folder):
    path = folder / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, VOCAB, 40))
    return path


def norm(x_D, scale_D):
    return x_D / np.sqrt(np.mean(x_D**2) + EPSILON) * scale_D


def turned(x_H, position):
    """Pairs as complex numbers, turned by the position times their rate."""
    z = x_H[::2] + 1j * x_H[1::2]
    z = z * np.exp(1j * position * BASE ** (-np.arange(0, SIZE, 2) / SIZE))
    return np.stack([z.real, z.imag], axis=1).ravel()


def reference(ids_S):
    """States by layer and the last position's weights, position by position."""
    p = {name: array.astype(np.float64) for name, array in make_arrays().items()}
    x_SD = p["token_embd.weight"][ids_S]
    states, weights = [x_SD], []
    for layer in range(LAYERS):
        w = {part: p[f"blk.{layer}.{part}.weight"] for part in PARTS}
        y = [norm(x, w["attn_norm"]) for x in x_SD]
        q, k, v = (
            [(w[part] @ row).reshape(-1, SIZE) for row in y]
            for part in ("attn_q", "attn_k", "attn_v")
        )
        mixed, last = [], np.zeros((HEADS, len(y)))
        for s in range(len(y)):
            heads = []
            for n in range(HEADS):
                m = n // SHARED
                z = [turned(q[s][n], s) @ turned(k[t][m], t) for t in range(s + 1)]
                a = np.exp(np.array(z) / np.sqrt(SIZE))
                heads.append(sum(a[t] / a.sum() * v[t][m] for t in range(s + 1)))
                last[n, : s + 1] = a / a.sum()
            mixed.append(w["attn_output"] @ np.concatenate(heads))
        x_SD = x_SD + np.array(mixed)
        y = [norm(x, w["ffn_norm"]) for x in x_SD]
        gate = [w["ffn_gate"] @ row for row in y]
        up = [w["ffn_up"] @ row for row in y]
        change = [g / (1 + np.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
        x_SD = x_SD + np.array([w["ffn_down"] @ row for row in change])
        states.append(x_SD)
        weights.append(last)
    states[-1] = np.array([norm(x, p["output_norm.weight"]) for x in x_SD])
    return states, np.stack(weights)


@pytest.mark.parametrize("add_bos", [True, False])
def test_states_and_attention_are_those_of_the_loops(add_bos, tmp_path):
    path = make_file(tmp_path / "tiny.gguf", add_bos)
    ids = np.load(make_ids(tmp_path))
    found = hugging_face.from_gguf(path, Reading(tmp_path / "ids.npy", 18, WINDOW))
    front = [BOS] if add_bos else []
    states, weights_LHS = reference([*front, *ids[WINDOW : 2 * WINDOW]])
    assert len(found.states) == LAYERS + 1
    for layer_ND, expected_SD in zip(found.states, states, strict=True):
        np.testing.assert_allclose(
            layer_ND[WINDOW:], expected_SD[len(front) :], rtol=2e-4, atol=2e-5
        )
    measured_LHS = np.exp(found.logits_LWHS[:, 1])
    np.testing.assert_allclose(measured_LHS, weights_LHS, rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(found.table_VE, make_arrays()["output.weight"])
    assert found.name == "tiny" and found.bias_V is None
    expected = "adds <s> (2) before" if add_bos else "adds no token before a text"
    assert expected in found.facts[-1]


def test_a_file_s_own_words_and_merges_make_its_tokenizer(tmp_path):
    path = make_file(tmp_path / "tiny.gguf", add_bos=None)
    (tmp_path / "a.txt").write_text("ab ab ba" + " ab" * 20)
    found = hugging_face.from_gguf(path, Reading(tmp_path / "a.txt", 18, WINDOW))
    assert found.text.ids.tolist() == [4, 5, 3, 1, 0, *[5] * 20]
    # The file says nothing of the beginning, so its tokenizer's encoding does.
    assert "adds no token" in found.facts[-1]
    (section,) = inspection.of_pretrained(found, ["rank"])
    assert section.numbers["tiny"]["bound"] == DIM + 1


def test_rotations_that_transformers_passes_over_are_told(tmp_path):
    reading = Reading(make_ids(tmp_path), 18, WINDOW)
    factors = {"rope_freqs.weight": np.full(SIZE // 2, 2.0, np.float32)}
    path = make_file(tmp_path / "turned.gguf", **factors)
    found = hugging_face.from_gguf(path, reading)
    assert any("Not read by transformers: rope_freqs" in f for f in found.facts)
    plain = hugging_face.from_gguf(make_file(tmp_path / "tiny.gguf"), reading)
    assert not any("Not read" in fact for fact in plain.facts)
    # Should transformers come to read them, the sentence above is wrong.
    np.testing.assert_array_equal(found.states[-1], plain.states[-1])


def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path):
    whole = make_file(tmp_path / "tiny.gguf").read_bytes()
    reading = Reading(make_ids(tmp_path), 18, WINDOW)
    for size in (6, len(whole) // 8, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises((ValueError, OSError), match="cut") as raised:
            hugging_face.from_gguf(tmp_path / "cut.gguf", reading)
        assert "\n" not in str(raised.value)
    odd = make_file(tmp_path / "odd.gguf", architecture="unheard_of")
    with pytest.raises(ValueError, match="odd.*unheard_of"):
        hugging_face.from_gguf(odd, reading)
    part = make_file(tmp_path / "part.gguf", without="blk.1.attn_q.weight")
    with pytest.raises(ValueError, match="part lacks 1 of its parameters.*q_proj"):
        hugging_face.from_gguf(part, reading)
