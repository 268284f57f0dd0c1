"""Models that others trained, from a Hugging Face folder or a GGUF file.

A text is read in stretches of S tokens, each from position 0, and what the model holds
is kept: the states of every layer, the table and the bias of the head, and of each
attention head the logits of a stretch's last position. PyTorch is imported here alone,
when a Hugging Face model is asked for.
"""

import importlib
import pathlib
from typing import Any, NamedTuple

import numpy as np

from softbottle.analysis.captured import Capture
from softbottle.analysis.sources import arrays as arrays_lib
from softbottle.analysis.sources import gguf, llama

_ALIKE = 1e-3  # of the largest logit, that a linear head may miss the model's own by


class Reading(NamedTuple):
    """How a text is read.

    Attributes:
        text: a file: ids if its name ends in .npy, else text for the model's tokenizer.
        positions: how many tokens the model reads; n-grams are counted in all of them.
        window: S, tokens of a stretch.
        frozen: how many tokens are read for what the head is given alone, if more.
    """

    text: pathlib.Path | str
    positions: int = 2048
    window: int = 512
    frozen: int = 0


def from_gguf(path: pathlib.Path | str, reading: Reading) -> Capture:
    """A GGUF file; of an architecture other than "llama" the head alone.

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
    if file.settings.get("general.architecture") != llama.ARCHITECTURE:
        return Capture(name, table_VD)
    ids = _ids(reading, lambda text: _gguf_tokenizer(file).encode(text).ids)
    _check_ids(ids, len(table_VD))
    model = llama.load(file)
    return _capture(
        Capture(name, table_VD, ids=ids),
        lambda ids_S: llama.trace(model, ids_S),
        reading,
    )


def from_hf(name: pathlib.Path | str, reading: Reading) -> Capture:
    """A causal language model that `transformers` loads.

    Args:
        name: a folder, or else the name of a model on the hub, which is downloaded.
        reading: how a text is read.

    Raises:
        ValueError: if a folder holds no model, the head is not softmax(h W' + b), or
            the text is too short.
        ImportError: if PyTorch or transformers is missing.
    """
    torch, transformers = (_imported(one, "hf") for one in ("torch", "transformers"))
    folder = pathlib.Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f"{name} holds no model: there is no config.json in it.")
    # A model that brings code of its own is refused, not asked about.
    where = {"pretrained_model_name_or_path": str(name), "trust_remote_code": False}
    where["local_files_only"] = folder.is_dir()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **where, attn_implementation="eager", use_safetensors=True
    )
    model = model.to(torch.float32).eval()

    def encode(text):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = _ids(reading, encode)
    head = model.get_output_embeddings()
    table_VD = head.weight.detach().numpy()
    bias_V = None if head.bias is None else head.bias.detach().numpy()
    _check_ids(ids, len(table_VD))
    return _capture(
        Capture(folder.name, table_VD, bias_V, ids=ids),
        lambda ids_S: _trace(torch, model, ids_S),
        reading,
    )


def _trace(torch, model, ids_S):
    """One pass; the last state is what the head was given, whatever it was called."""
    head, read = model.get_output_embeddings(), []
    hook = head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    try:
        with torch.no_grad():
            found = model(
                torch.as_tensor(ids_S)[None].long(),
                output_hidden_states=True,
                output_attentions=True,
                use_cache=False,
            )
            plain = head(read[0])
    finally:
        hook.remove()
    worst = float((found.logits - plain).abs().max() / plain.abs().max())
    if worst > _ALIKE:
        raise ValueError(
            f"the model changes its logits after the head (by {worst:.1%} of the "
            "largest): it is no softmax of h W' + b, and the instruments need one."
        )
    states = [*found.hidden_states[:-1], read[0]]
    # The logits up to a constant a row, which no normaliser here can tell.
    weights_LHS = torch.stack([one[0, :, -1] for one in found.attentions])
    logits_LHS = weights_LHS.clamp(min=torch.finfo(torch.float32).tiny).log()
    return llama.Trace([one[0].numpy() for one in states], logits_LHS.numpy())


def _capture(bare, trace, reading):
    """A model's head and text, joined by what it holds while it reads."""
    looked_at = _stretches(bare.ids, reading, reading.positions)
    traces = [trace(ids_S) for ids_S in looked_at]
    states = [
        np.concatenate(parts)
        for parts in zip(*(one.states for one in traces), strict=True)
    ]
    last = [states[-1]]
    if reading.frozen > reading.positions:
        beyond = _stretches(bare.ids, reading, reading.frozen)[len(looked_at) :]
        last += [trace(ids_S).states[-1] for ids_S in beyond]
    return bare._replace(
        states=states,
        labels_N=bare.ids[1 : len(states[-1]) + 1],
        logits_LWHS=np.stack([one.logits_LHS for one in traces], axis=1),
        frozen_MD=np.concatenate(last),
    )


def _stretches(ids, reading, positions):
    """As many whole stretches as there are positions, with a label for the last."""
    window = min(reading.window, reading.positions, len(ids) - 1)
    count = min(positions, len(ids) - 1) // max(window, 1)
    if window < 2:
        raise ValueError(f"the text has {len(ids)} tokens; three or more are needed.")
    return ids[: count * window].reshape(count, window)


def _ids(reading, encode):
    path = pathlib.Path(reading.text)
    if not path.is_file():
        raise ValueError(f"the text {path} is no file.")
    if path.suffix == ".npy":
        ids = arrays_lib.load_one(path)
    else:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}") from error
        ids = np.asarray(encode(text), np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{path} must be a run of ids, got {ids.dtype} {ids.shape}.")
    return ids


def _check_ids(ids, vocab):
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(
            f"the ids must lie in [0, {vocab}), got {ids.min()} to {ids.max()}."
        )


def _gguf_tokenizer(file: gguf.File) -> Any:
    """Byte-level BPE from the file's own words and merges."""
    tokenizers = _imported("tokenizers", "gguf")
    kind = (
        file.settings.get("tokenizer.ggml.model"),
        file.settings.get("tokenizer.ggml.pre"),
    )
    # A digit is a word by itself in SmolLM; both split as GPT-2 does otherwise.
    if kind not in (("gpt2", "gpt-2"), ("gpt2", "smollm")):
        raise ValueError(
            f"the tokenizer {str(kind)[:80]} of {file.path} cannot be built; give the "
            "text as ids in a .npy file."
        )
    words = {word: at for at, word in enumerate(_texts(file, "tokens"))}
    merges = [tuple(one.split(" ")) for one in _texts(file, "merges")]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= words.keys():
            raise ValueError(f"{str(pair)[:80]} is no merge of words of {file.path}.")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))
    steps = [tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if kind[1] == "smollm":
        steps.insert(0, tokenizers.pre_tokenizers.Digits(individual_digits=True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    return made


def _texts(file, name):
    texts = file.settings.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise ValueError(f"tokenizer.ggml.{name} of {file.path} is no list of texts.")
    return texts


def _imported(name, extra):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this needs {name}, which is not installed: "
            f"pip install 'softbottle[{extra}]'"
        ) from error
