"""The decoder of GGUF files, against loops in float64 and against transformers."""

import importlib.util

import numpy as np
import pytest

from softbottle.analysis.sources import gguf, llama
from tests.analysis.sources import gguf_test

VOCAB, DIM, INNER, LAYERS, HEADS, SHARED, SIZE = 37, 12, 20, 3, 6, 2, 4
EPSILON, BASE = 1e-5, 5000.0
IDS_S = np.array([3, 36, 3, 0, 17, 5, 5])


def make_settings():
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS // SHARED,
        "llama.attention.key_length": SIZE,
        "llama.attention.layer_norm_rms_epsilon": EPSILON,
        "llama.rope.freq_base": BASE,
    }


def make_arrays(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
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
    arrays = {
        "token_embd.weight": rng.normal(size=(VOCAB, DIM)),
        "output_norm.weight": rng.uniform(0.5, 1.5, DIM),
    }
    for layer in range(LAYERS):
        for part, shape in shapes.items():
            values = 0.5 * rng.normal(size=shape) + part.endswith("norm")
            arrays[f"blk.{layer}.{part}.weight"] = values
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def make_file(path, settings=None, **changes):
    settings = make_settings() if settings is None else settings
    return gguf_test.write_arrays(path, settings, make_arrays() | changes)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_file(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def trace(path):
    return llama.trace(llama.load(gguf.read(path)), IDS_S)


def norm(x_D, scale_D):
    return x_D / np.sqrt(np.mean(x_D**2) + EPSILON) * scale_D


def turned(x_H, position):
    """Pairs as complex numbers, turned by the position times their rate."""
    z = x_H[::2] + 1j * x_H[1::2]
    z = z * np.exp(1j * position * BASE ** (-np.arange(0, SIZE, 2) / SIZE))
    return np.stack([z.real, z.imag], axis=1).ravel()


def reference():
    """States by layer and the last position's logits, position by position."""
    p = {name: array.astype(np.float64) for name, array in make_arrays().items()}
    x_SD = p["token_embd.weight"][IDS_S]
    states, logits = [x_SD], []
    for layer in range(LAYERS):
        w = {part: p[f"blk.{layer}.{part}.weight"] for part in llama._PARTS}
        y = [norm(x, w["attn_norm"]) for x in x_SD]
        q, k, v = (
            [(w[part] @ one).reshape(-1, SIZE) for one in y]
            for part in ("attn_q", "attn_k", "attn_v")
        )
        mixed, last = [], np.zeros((HEADS, len(y)))
        for s in range(len(y)):
            heads = []
            for n in range(HEADS):
                m = n // SHARED
                z = [turned(q[s][n], s) @ turned(k[t][m], t) for t in range(s + 1)]
                z = np.array(z) / np.sqrt(SIZE)
                a = np.exp(z - z.max())
                heads.append(sum(a[t] / a.sum() * v[t][m] for t in range(s + 1)))
                last[n, : s + 1] = z
            mixed.append(w["attn_output"] @ np.concatenate(heads))
        x_SD = x_SD + np.array(mixed)
        y = [norm(x, w["ffn_norm"]) for x in x_SD]
        gate = [w["ffn_gate"] @ one for one in y]
        up = [w["ffn_up"] @ one for one in y]
        x_SD = x_SD + np.array(
            [
                w["ffn_down"] @ (g / (1 + np.exp(-g)) * u)
                for g, u in zip(gate, up, strict=True)
            ]
        )
        states.append(x_SD)
        logits.append(last)
    states[-1] = np.array([norm(x, p["output_norm.weight"]) for x in x_SD])
    return states, np.stack(logits)


def test_states_and_attention_are_those_of_the_loops(trace):
    states, logits_LHS = reference()
    assert len(trace.states) == LAYERS + 1
    for found, expected in zip(trace.states, states, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(trace.logits_LHS, logits_LHS, rtol=2e-4, atol=2e-5)


def test_a_later_word_changes_no_earlier_state(path, trace):
    other_S = np.append(IDS_S[:-1], 30)
    other = llama.trace(llama.load(gguf.read(path)), other_S)
    np.testing.assert_allclose(
        other.states[-1][:-1], trace.states[-1][:-1], rtol=1e-6, atol=1e-6
    )
    assert not np.allclose(other.states[-1][-1], trace.states[-1][-1])


@pytest.mark.skipif(
    not importlib.util.find_spec("torch")
    or not importlib.util.find_spec("transformers"),
    reason="needs torch and transformers: pip install 'softbottle[hf]'",
)
def test_states_and_attention_are_those_of_transformers(trace):
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // SHARED,
        head_dim=SIZE,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        rope_theta=BASE,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    arrays = make_arrays()
    weights = {
        "model.embed_tokens.weight": arrays["token_embd.weight"],
        "model.norm.weight": arrays["output_norm.weight"],
    }
    for layer in range(LAYERS):
        for part, name in names.items():
            array = arrays[f"blk.{layer}.{part}.weight"]
            if part in ("attn_q", "attn_k"):
                # There the pairs are (x_i, x_i+H/2).
                heads = array.reshape(-1, SIZE // 2, 2, DIM)
                array = heads.transpose(0, 2, 1, 3).reshape(array.shape)
            weights[f"model.layers.{layer}.{name}.weight"] = array
    tensors = {name: torch.tensor(array) for name, array in weights.items()}
    missing = model.load_state_dict(tensors, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"])
    assert not missing.unexpected_keys
    with torch.no_grad():
        found = model(
            torch.tensor(IDS_S)[None], output_hidden_states=True, output_attentions=True
        )
    for ours, theirs in zip(trace.states, found.hidden_states, strict=True):
        np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=2e-4, atol=2e-5)
    weights_LHS = np.stack([one[0, :, -1].numpy() for one in found.attentions])
    ours_LHS = np.exp(trace.logits_LHS)
    ours_LHS /= ours_LHS.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(ours_LHS, weights_LHS, rtol=2e-4, atol=2e-5)


def test_what_the_pass_would_leave_out_is_refused(tmp_path):
    bias = {"blk.0.attn_q.bias": np.ones(HEADS * SIZE)}
    with pytest.raises(ValueError, match=r"blk.0.attn_q.bias"):
        llama.load(gguf.read(make_file(tmp_path / "a.gguf", **bias)))
    settings = make_settings() | {"llama.rope.scaling.type": "yarn"}
    with pytest.raises(ValueError, match="yarn"):
        llama.load(gguf.read(make_file(tmp_path / "b.gguf", settings)))
    settings = make_settings() | {"general.architecture": "qwen2"}
    with pytest.raises(ValueError, match="qwen2"):
        llama.load(gguf.read(make_file(tmp_path / "c.gguf", settings)))


@pytest.mark.parametrize(
    "name, value",
    [
        ("block_count", None),
        ("block_count", 0),
        ("block_count", "three"),
        ("block_count", 1.5),
        ("block_count", 2**32 - 1),
        ("block_count", LAYERS - 1),
        ("block_count", LAYERS + 1),
        ("attention.head_count", None),
        ("attention.head_count", 0),
        ("attention.head_count", 7),
        ("attention.head_count", ["6", "6"]),
        ("attention.key_length", 0),
        ("attention.key_length", 3),
        # Its rotation alone would be 8 GiB.
        ("attention.key_length", 2**31),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", -1e-5),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", float("inf")),
    ],
)
def test_settings_that_the_tensors_contradict_are_one_error(name, value, tmp_path):
    settings = make_settings() | {f"llama.{name}": value}
    settings = {key: one for key, one in settings.items() if one is not None}
    file = gguf.read(make_file(tmp_path / "a.gguf", settings))
    with pytest.raises(ValueError, match="a.gguf"):
        llama.load(file)


@pytest.mark.parametrize(
    "name", [name for name in make_arrays() if not name.startswith(("blk.1", "blk.2"))]
)
@pytest.mark.parametrize("wrong", ["deeper", "flat", "missing", "longer"])
def test_a_tensor_of_another_shape_is_named(name, wrong, tmp_path):
    array = make_arrays()[name]
    changed = {
        "deeper": array[None] if array.ndim > 1 else array[:, None],
        "flat": array.ravel() if array.ndim > 1 else array[None],
        "longer": np.concatenate([array, array]),
        "missing": None,
    }[wrong]
    arrays = make_arrays() | {name: changed}
    arrays = {key: one for key, one in arrays.items() if one is not None}
    path = gguf_test.write_arrays(tmp_path / "a.gguf", make_settings(), arrays)
    if name == "token_embd.weight" and wrong == "longer":
        assert len(llama.load(gguf.read(path)).table_VD) == 2 * VOCAB
        return
    with pytest.raises(ValueError, match="a.gguf"):
        llama.load(gguf.read(path))
