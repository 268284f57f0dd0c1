"""A LLaMA-like decoder read from a GGUF file, with all that its layers hold.

    x <- x + Attention(norm(x)) W_o,     x <- x + (SiLU(y W_gate) * (y W_up)) W_down,

y = norm(x), norm(x) = x / sqrt(mean(x^2) + epsilon) * scale. Queries and keys are
turned by position * base^(-2i / H) in the pairs (x_2i, x_2i+1), as files of the
architecture "llama" store them; several query heads share a key and a value (grouped-
query attention). Mistral, SmolLM and TinyLlama are stored as "llama" too.

Axes: N attention heads, H width of one or its half, T positions that are attended to,
F width of the gated unit.
"""

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.analysis.capture import Capture, of_softmax
from softbottle.analysis.sources import gguf
from softbottle.analysis.sources.reading import (
    Reading,
    Trace,
    capture,
    imported,
    token_ids,
)

ARCHITECTURE = "llama"
_PARTS = (
    *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)
_OUTSIDE = {"token_embd.weight", "output.weight", "output_norm.weight"}
_OUTSIDE |= {"rope_freqs.weight"}


class Model(NamedTuple):
    """Parameters by their names in the file, and the settings a pass needs.

    Attributes:
        blocks: of each layer, the matrices [out, in] and scales of `_PARTS`.
        table_VD: of the words that are read.
        scale_D: of the last normalisation.
        heads: query heads.
        rate_H: how fast each pair of a head turns.
        epsilon: of the normalisations.
    """

    blocks: list[dict[str, np.ndarray]]
    table_VD: np.ndarray
    scale_D: np.ndarray
    heads: int
    rate_H: np.ndarray
    epsilon: float


def from_gguf(path: pathlib.Path | str, reading: Reading) -> Capture:
    """The capture of a GGUF file; of other architectures than "llama" the head alone.

    Raises:
        ValueError: if the file is no GGUF file, is cut short, or has parts that cannot
            be read; or the text is too short or needs another tokenizer.
        ImportError: if the tokenizer's package is missing.
    """
    file = gguf.read(path)
    name = file.path.stem
    output = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    if len(file.tensor(output).shape) != 2:
        raise ValueError(f"{output} of {path} is no table [V, D] of words.")
    table_VD = file.array(output)
    if file.settings.get("general.architecture") != ARCHITECTURE:
        return of_softmax(name, table_VD)
    ids = token_ids(
        reading, len(table_VD), lambda text: _tokenizer(file).encode(text).ids
    )
    model = load(file)
    return capture(
        name, table_VD, None, ids, lambda ids_S: trace(model, ids_S), reading
    )


def load(file: gguf.File) -> Model:
    """The parameters of a file, dequantised.

    Raises:
        ValueError: if the file holds another architecture, or one of its tensors or
            settings has no place in this one.
    """
    settings = {
        name.removeprefix(ARCHITECTURE + "."): value
        for name, value in file.settings.items()
    }
    layers = _check(file, settings)
    heads = _positive(file, settings, "attention.head_count", int)
    dim = file.tensor("token_embd.weight").shape[-1]
    settings = {"attention.key_length": dim // heads, **settings}
    settings = {"rope.freq_base": 10_000.0, **settings}
    size = _positive(file, settings, "attention.key_length", int)
    base = _positive(file, settings, "rope.freq_base", float)
    epsilon = _positive(file, settings, "attention.layer_norm_rms_epsilon", float)
    _check_shapes(file, layers, heads, size)
    rate_H = base ** (-np.arange(0, size, 2) / size)
    if "rope_freqs.weight" in file.tensors:
        rate_H = rate_H / file.array("rope_freqs.weight")
    return Model(
        [
            {part: file.array(f"blk.{layer}.{part}.weight") for part in _PARTS}
            for layer in range(layers)
        ],
        file.array("token_embd.weight"),
        file.array("output_norm.weight"),
        heads,
        rate_H.astype(np.float32),
        epsilon,
    )


def trace(model: Model, ids_S: np.ndarray) -> Trace:
    """Read one stretch of text, from position 0."""
    hidden_SD = jnp.asarray(model.table_VD[ids_S])
    states, logits = [np.asarray(hidden_SD)], []
    for params in model.blocks:
        hidden_SD, logits_HS = _block(
            hidden_SD, params, model.rate_H, heads=model.heads, epsilon=model.epsilon
        )
        states.append(np.asarray(hidden_SD))
        logits.append(np.asarray(logits_HS))
    last_SD = _rms_norm(hidden_SD, model.scale_D, model.epsilon)
    return Trace([*states[:-1], np.asarray(last_SD)], np.stack(logits))


@functools.partial(jax.jit, static_argnames=("heads", "epsilon"))
def _block(hidden_SD, params, rate_H, *, heads, epsilon):
    inputs_SD = _rms_norm(hidden_SD, params["attn_norm"], epsilon)
    mixed_SD, logits_HS = _attend(inputs_SD, params, rate_H, heads)
    hidden_SD += mixed_SD
    inputs_SD = _rms_norm(hidden_SD, params["ffn_norm"], epsilon)
    gate_SF = jax.nn.silu(inputs_SD @ params["ffn_gate"].T)
    up_SF = inputs_SD @ params["ffn_up"].T
    return hidden_SD + (gate_SF * up_SF) @ params["ffn_down"].T, logits_HS


def _attend(inputs_SD, params, rate_H, heads):
    """Attention's change of the states, and the last position's logits."""
    length, size = len(inputs_SD), 2 * len(rate_H)
    query_SNH, key_SNH, value_SNH = (
        (inputs_SD @ params[part].T).reshape(length, -1, size)
        for part in ("attn_q", "attn_k", "attn_v")
    )
    shared = heads // key_SNH.shape[1]
    key_SNH = jnp.repeat(_rotate(key_SNH, rate_H), shared, axis=1)
    value_SNH = jnp.repeat(value_SNH, shared, axis=1)
    logits_NST = jnp.einsum("snh,tnh->nst", _rotate(query_SNH, rate_H), key_SNH)
    logits_NST *= size**-0.5
    causal_ST = jnp.tril(jnp.ones((length, length), bool))
    weights_NST = jax.nn.softmax(jnp.where(causal_ST[None], logits_NST, -jnp.inf))
    mixed_SNH = jnp.einsum("nst,tnh->snh", weights_NST, value_SNH)
    mixed_SD = mixed_SNH.reshape(length, -1) @ params["attn_output"].T
    return mixed_SD, logits_NST[:, -1]


def _rotate(values_SNH, rate_H):
    """Turn each pair (x_2i, x_2i+1) by position * rate_i."""
    angle_S1H = (jnp.arange(len(values_SNH))[:, None] * rate_H[None])[:, None]
    even_SNH, odd_SNH = values_SNH[..., ::2], values_SNH[..., 1::2]
    cos, sin = jnp.cos(angle_S1H), jnp.sin(angle_S1H)
    turned = [even_SNH * cos - odd_SNH * sin, even_SNH * sin + odd_SNH * cos]
    return jnp.stack(turned, axis=-1).reshape(values_SNH.shape)


def _rms_norm(hidden_SD, scale_D, epsilon):
    mean_S1 = jnp.mean(jnp.square(hidden_SD), axis=-1, keepdims=True)
    return hidden_SD * jax.lax.rsqrt(mean_S1 + epsilon) * scale_D[None]


def _check(file, settings):
    """The number of layers; what a pass over them would leave out is an error."""
    name = settings.get("general.architecture")
    if name != ARCHITECTURE:
        raise ValueError(f"{file.path} is of architecture {name!r}, not 'llama'.")
    layers = _positive(file, settings, "block_count", int)
    if layers > len(file.tensors):
        raise ValueError(
            f"{file.path} has too few tensors for llama.block_count {layers}."
        )
    known = {f"blk.{i}.{part}.weight" for i in range(layers) for part in _PARTS}
    strange = file.tensors.keys() - known - _OUTSIDE
    scaling = settings.get("rope.scaling.type", "none")
    if strange or scaling != "none":
        raise ValueError(
            f"{file.path} has tensors {sorted(strange)[:3]} and rotary scaling "
            f"{scaling!r}, which this reader cannot use."
        )
    return layers


def _positive(file, settings, name, kind):
    """A setting that is a positive whole number, or fraction."""
    value = settings.get(name)
    if type(value) not in (kind, int) or not 0 < value < float("inf"):
        raise ValueError(
            f"llama.{name} of {file.path} must be a positive {kind.__name__}, got "
            f"{str(value)[:40]!r}."
        )
    return value


def _check_shapes(file, layers, heads, size):
    """Raise unless every tensor has the shape that the settings ask for."""
    vocab, dim = (*file.tensor("token_embd.weight").shape, 0)[:2]
    for layer in range(layers):
        block = f"blk.{layer}."
        inner = file.tensor(f"{block}ffn_gate.weight").shape[0]
        keys = file.tensor(f"{block}attn_k.weight").shape[0]
        if size % 2 or keys % size or heads % (keys // size or heads + 1):
            raise ValueError(
                f"{block}attn_k of {file.path} has {keys} rows, which are no keys of "
                f"{size} numbers that {heads} heads can share."
            )
        shapes = {
            "attn_norm": (dim,),
            "attn_q": (heads * size, dim),
            "attn_k": (keys, dim),
            "attn_v": (keys, dim),
            "attn_output": (dim, heads * size),
            "ffn_norm": (dim,),
            "ffn_gate": (inner, dim),
            "ffn_up": (inner, dim),
            "ffn_down": (dim, inner),
        }
        for part, shape in shapes.items():
            _check_shape(file, f"{block}{part}.weight", shape)
    _check_shape(file, "output_norm.weight", (dim,))
    for name in {"token_embd.weight", "output.weight"} & file.tensors.keys():
        _check_shape(file, name, (vocab, dim))
    if "rope_freqs.weight" in file.tensors:
        _check_shape(file, "rope_freqs.weight", (size // 2,))


def _check_shape(file, name, expected):
    shape = file.tensor(name).shape
    if shape != expected:
        raise ValueError(
            f"{name} of {file.path} has the shape {shape}; the settings and the other "
            f"tensors ask for {expected}."
        )


def _tokenizer(file: gguf.File) -> Any:
    """Byte-level BPE from the file's own words and merges."""
    tokenizers = imported("tokenizers", "gguf")
    model = file.settings.get("tokenizer.ggml.model")
    split = file.settings.get("tokenizer.ggml.pre")
    # A digit is a word by itself in SmolLM; both split as GPT-2 does otherwise.
    if model != "gpt2" or split not in ("gpt-2", "smollm"):
        raise ValueError(
            f"the tokenizer {str((model, split))[:80]} of {file.path} cannot be built; "
            "give the text as ids in a .npy file."
        )
    words = {word: at for at, word in enumerate(_texts(file, "tokens"))}
    merges = [tuple(pair.split(" ")) for pair in _texts(file, "merges")]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= words.keys():
            raise ValueError(f"{str(pair)[:80]} is no merge of words of {file.path}.")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))
    steps = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if split == "smollm":
        steps.insert(0, tokenizers.pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    return tokenizer


def _texts(file, name):
    texts = file.settings.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"tokenizer.ggml.{name} of {file.path} is no list of texts.")
    return texts
