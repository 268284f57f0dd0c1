"""Causal language models that `transformers` loads: folders, the hub, and GGUF files.

PyTorch is imported here alone, when such a model is asked for.

The head that is measured is softmax(g(c h W' + c b)): a constant factor c of the logits
(Granite, Cohere) is part of the table and the bias, and soft-capped logits (Gemma 2)
are g(z) = cap tanh(z / cap). What else a model does to its logits is refused.

Axes: L layers, H attention heads.
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import numpy as np

from softbottle import heads
from softbottle.analysis.capture import Capture
from softbottle.analysis.sources import gguf
from softbottle.analysis.sources.reading import (
    Front,
    Model,
    Reading,
    Trace,
    capture,
    first_line,
    imported,
    token_ids,
)
from softbottle.data import vocab
from softbottle.ops.mixture.activations import SOFTMAX

_ALIKE = 1e-3  # of the largest logit, that the head may miss the model's own by
_PROBE = 32  # tokens on which the head, and what stands before a text, are found out


class _Source(NamedTuple):
    """Where a model is, as transformers and as people say it.

    `bos` is what a GGUF file says of its beginning-of-sequence token: its id, () for
    none, None if it says nothing. `facts` are sentences on what else it says.
    """

    name: str
    where: dict[str, Any]
    bos: tuple[int, ...] | None = None
    facts: tuple[str, ...] = ()


def from_hf(
    name: pathlib.Path | str, reading: Reading, revision: str | None = None
) -> Capture:
    """A causal language model in the format of `transformers`.

    Args:
        name: a folder, or else the name of a model on the hub, which is downloaded.
        reading: how a text is read.
        revision: of a model on the hub, a branch, tag or commit; of a folder, the
            subfolder that holds the checkpoint. None for the model itself.

    Raises:
        ValueError: if a folder holds no model, transformers cannot read it, its head is
            none that can be measured, or the text is too short or cannot be encoded.
        ImportError: if PyTorch or transformers is missing.
    """
    folder = pathlib.Path(name)
    where: dict[str, Any] = {}
    shown = folder.name if revision is None else f"{folder.name}@{revision}"
    if folder.is_dir():
        folder = folder / (revision or "")
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} holds no model: there is no config.json in it.")
    elif revision is not None:
        where["revision"] = revision
    where |= {
        "pretrained_model_name_or_path": str(folder),
        "local_files_only": folder.is_dir(),
    }
    return _read(_Source(shown, where), reading, use_safetensors=True)


def from_gguf(path: pathlib.Path | str, reading: Reading) -> Capture:
    """A GGUF file of one of the architectures that `transformers` reads.

    Raises:
        ValueError: if the file is no GGUF file, and as `from_hf`.
        ImportError: if PyTorch, transformers, accelerate or gguf is missing.
    """
    path = pathlib.Path(path)
    said = gguf.read(path)
    where = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "local_files_only": True,
    }
    return _read(_Source(path.stem, where, *said), reading)


def _read(source, reading, **options):
    torch, transformers = imported("torch", "hf"), imported("transformers", "hf")
    # A model that brings code of its own is refused, not asked about.
    where = source.where | {"trust_remote_code": False}
    model = _loaded(
        transformers.AutoModelForCausalLM,
        source.name,
        {**where, **options, "attn_implementation": "eager"},
    )
    model = model.to(torch.float32).eval()
    rows = _head(model, source.name).weight.shape[0]
    tokenizer = _tokenizer(transformers, where)

    def encode(text):
        if isinstance(tokenizer, str):
            raise ValueError(
                f"{source.name} has no tokenizer that transformers can build "
                f"({tokenizer}); give the text as ids in a .npy file."
            )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = token_ids(reading, rows, encode)

    def read(ids_S):
        return _pass(torch, model, source.name, ids_S)

    config = model.config.get_text_config()
    probe = min(_PROBE, getattr(config, "max_position_embeddings", None) or _PROBE)
    change = _change(config, read(ids[:probe]))
    made = _measured(model, source.name, change)
    version = f"transformers {transformers.__version__}"
    facts = _fact(model, made, version), *source.facts, *made.facts
    made = made._replace(facts=facts)

    def trace(ids_S):
        passed = read(ids_S)
        _check_change(source.name, change, passed)
        return _trace(passed)

    found = capture(made, ids, _front(tokenizer, source.bos, ids), trace, reading)
    count = sum(parameter.numel() for parameter in model.parameters())
    return dataclasses.replace(
        found,
        parameters=count,
        family=type(model).__name__,
        words=_words(tokenizer, rows),
    )


def _loaded(auto, name, settings):
    """The model; whatever transformers stumbles over is one error that names it."""
    try:
        model, told = auto.from_pretrained(**settings, output_loading_info=True)
    except (OSError, ImportError):
        raise  # a file or a package that is missing, which the message names
    except Exception as error:
        raise ValueError(
            f"transformers cannot read {name}: {first_line(error)}"
        ) from error
    missing = sorted(told["missing_keys"])
    if missing:
        # It would go on with random numbers in their place.
        raise ValueError(
            f"{name} lacks {len(missing)} of its parameters, such as "
            f"{vocab.printable(missing[0])}."
        )
    return model


def _tokenizer(transformers, where):
    """The tokenizer, or why there is none: a text in ids needs none."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except Exception as error:
        return first_line(error)
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else "no words"


def _words(tokenizer, rows):
    """What each row of the table stands for, "" if no token; None if nobody says."""
    if isinstance(tokenizer, str):
        return None
    words = [""] * rows
    for word, row in tokenizer.get_vocab().items():
        if row < rows:
            words[row] = word
    return words


def _front(tokenizer, bos, ids):
    """What stands before a text by the tokenizer's own setting."""
    start = "Beginning of sequence: "
    if bos is not None:
        said = "the file's tokenizer"
        tokens = bos
    elif isinstance(tokenizer, str):
        return Front((), f"{start}no token, since no tokenizer was found.")
    else:
        said = "the tokenizer"
        tokens = _added(tokenizer, tokenizer.decode(ids[:_PROBE].tolist()))
    if not tokens:
        return Front(
            (), f"{start}{said} adds no token before a text; no window has one."
        )
    shown = ", ".join(map(str, tokens))
    if not isinstance(tokenizer, str):
        names = " ".join(map(str, tokenizer.convert_ids_to_tokens(list(tokens))))
        shown = f"{vocab.printable(names)} ({shown})"
    return Front(
        tokens,
        f"{start}{said} adds {shown} before a text, and so every window starts with "
        "it. It is seen by attention; no state, label or loss of it is counted.",
    )


def _added(tokenizer, text):
    """The tokens that an encoding has before those of the text itself."""
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text)["input_ids"]
    for count in range(len(whole) - len(plain) + 1):
        if plain and whole[count : count + len(plain)] == plain:
            return tuple(whole[:count])
    return ()


def _head(model, name):
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(f"{name} has no output table [V, D] that could be measured.")
    return head


class _Change(NamedTuple):
    """What a model does to the logits h W' + b of its head."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, plain_SV):
        scaled_SV = self.scale * plain_SV
        return self.cap * np.tanh(scaled_SV / self.cap) if self.cap else scaled_SV

    @property
    def facts(self):
        if self.cap:
            return (f"Its logits are capped, {self.cap:g} tanh(z / {self.cap:g}).",)
        if self.scale != 1:
            return (
                f"Its logits have a factor of {self.scale:.6g}, as the table here.",
            )
        return ()


class _Pass(NamedTuple):
    """One pass: states and attention by layer; of its end, logits before and after."""

    states: list[Any]
    attentions: Any
    plain_SV: np.ndarray
    logits_SV: np.ndarray


def _change(config, passed):
    """The cap of the model's settings, or else the factor that fits best."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        return _Change(cap=float(cap))
    plain_SV = passed.plain_SV.astype(np.float64)
    scale = float((passed.logits_SV * plain_SV).sum() / np.square(plain_SV).sum())
    return _Change(scale if abs(scale - 1) > _ALIKE else 1.0)


def _check_change(name, change, passed):
    """Raise unless the logits are what the change makes of the head's."""
    expected_SV = change.apply(passed.plain_SV)
    worst = float(abs(passed.logits_SV - expected_SV).max() / abs(expected_SV).max())
    if worst > _ALIKE:
        raise ValueError(
            f"{name} changes its logits after the head by more than a factor or a "
            f"soft-cap ({worst:.1%} of the largest is left): no softmax of g(h W' + b)."
        )


def _measured(model, name, change):
    """The head with the change in its table, its bias and its g."""
    head, config = _head(model, name), model.config.get_text_config()
    factor, bias = np.float32(change.scale), getattr(head, "bias", None)
    activation = heads.softcap(change.cap).activation({}) if change.cap else SOFTMAX
    return Model(
        name,
        _numpy(head.weight) * factor,
        None if bias is None else _numpy(bias) * factor,
        activation,
        getattr(config, "max_position_embeddings", None),
        change.facts,
    )


def _fact(model, made, version):
    size, width = made.table_VD.shape
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    depth = f"{layers} {'layer' if layers == 1 else 'layers'}, " if layers else ""
    return (
        f"Model: {made.name}, {type(model).__name__} of {version}, {depth}width "
        f"{width:,}, {size:,} tokens, {'no' if made.bias_V is None else 'with an'} "
        "output bias."
    )


def _pass(torch, model, name, ids_S):
    """Read tokens; the last state is what the head was given, whatever it is called."""
    head, read = _head(model, name), []
    hook = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        with torch.no_grad():
            output = model(
                torch.as_tensor(ids_S)[None].long(),
                output_hidden_states=True,
                output_attentions=True,
                use_cache=False,
            )
            if not read:
                raise ValueError(f"{name} does not call its output table as a layer.")
            # The last of them are enough: all logits of a window may be gigabytes.
            plain_SV = head(read[0][0, -_PROBE:])
    finally:
        hook.remove()
    states = [*output.hidden_states[:-1], read[0]]
    attentions = getattr(output, "attentions", None)
    logits_SV = output.logits[0, -_PROBE:]
    return _Pass(states, attentions, _numpy(plain_SV), _numpy(logits_SV))


def _trace(passed):
    states = [_numpy(layer[0]) for layer in passed.states]
    layers = [layer for layer in passed.attentions or () if layer is not None]
    if not layers:
        return Trace(states, "the model has no attention")
    rows = [_numpy(layer[0, :, -1]) for layer in layers]
    if len(rows) != len(states) - 1 or len({row.shape for row in rows}) > 1:
        return Trace(
            states,
            f"{len(rows)} of its {len(states) - 1} layers have attention, or not all "
            "have as many heads",
        )
    # The logits up to one constant per row, which changes no normaliser's weights.
    with np.errstate(divide="ignore"):
        return Trace(states, np.log(np.stack(rows)))


def _numpy(tensor):
    return tensor.detach().float().numpy()
