"""Causal language models that `transformers` loads: folders, the hub, and GGUF files.

PyTorch is imported here alone, when such a model is asked for.

The head that is measured is softmax(g(c h W' + c b)): a constant factor c of the logits
(Granite, Cohere) is part of the table and the bias, and soft-capped logits (Gemma 2)
are g(z) = cap tanh(z / cap). What else a model does to its logits is refused.

Axes: L layers, H attention heads.
"""

import pathlib
from types import ModuleType
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


class Pretrained(NamedTuple):
    """A model that transformers has loaded, in float32 on the CPU.

    Attributes:
        name: of the model.
        torch: the package.
        module: the model, PyTorch's.
        tokenizer: its tokenizer, or why there is none.
        bos: as of `_Source`.
        version: of what read it.
        facts: sentences on what else its file says.
    """

    name: str
    torch: ModuleType
    module: Any
    tokenizer: Any
    bos: tuple[int, ...] | None
    version: str
    facts: tuple[str, ...]

    @property
    def head(self) -> Any:
        """The layer that has the output table.

        Raises:
            ValueError: if there is none.
        """
        head = self.module.get_output_embeddings()
        if head is None or getattr(head, "weight", None) is None:
            raise ValueError(
                f"{self.name} has no output table [V, D] that could be measured."
            )
        return head

    def token_ids(self, text: pathlib.Path | str) -> np.ndarray:
        """A text in the model's tokens: ids as they are in a .npy file, or encoded.

        Raises:
            ValueError: as `reading.token_ids`, or if there is no tokenizer.
        """

        def encode(text):
            if isinstance(self.tokenizer, str):
                raise ValueError(
                    f"{self.name} has no tokenizer that transformers can build "
                    f"({self.tokenizer}); give the text as ids in a .npy file."
                )
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

        return token_ids(Reading(text), self.head.weight.shape[0], encode)

    def front(self, ids: np.ndarray) -> Front:
        """What stands before every window of a text that begins with these tokens."""
        return _front(self.tokenizer, self.bos, ids)

    def measured(self, ids: np.ndarray) -> Model:
        """The head, and what the model does to its logits, found out on some tokens.

        Raises:
            ValueError: if it changes its logits in a way that is no part of a head.
        """
        change, passed = _probe(self, ids)
        _check_change(self.name, change, passed)
        return _measured(self, change)


def from_hf(name: pathlib.Path | str, reading: Reading) -> Capture:
    """What a causal language model in the format of `transformers` holds.

    Args:
        name: a folder, or else the name of a model on the hub, which is downloaded.
        reading: how a text is read.

    Raises:
        ValueError: if a folder holds no model, transformers cannot read it, its head is
            none that can be measured, or the text is too short or cannot be encoded.
        ImportError: if PyTorch or transformers is missing.
    """
    return _read(load_hf(name, attention=True), reading)


def from_gguf(path: pathlib.Path | str, reading: Reading) -> Capture:
    """What a GGUF file of one of the architectures that `transformers` reads holds.

    Raises:
        ValueError: if the file is no GGUF file, and as `from_hf`.
        ImportError: if PyTorch, transformers, accelerate or gguf is missing.
    """
    return _read(load_gguf(path, attention=True), reading)


def load_hf(name: pathlib.Path | str, attention: bool = False) -> Pretrained:
    """A causal language model in the format of `transformers`.

    Args:
        name: a folder, or else the name of a model on the hub, which is downloaded.
        attention: whether its attention weights will be looked at, which is slower.

    Raises:
        ValueError: if a folder holds no model, or transformers cannot read it.
        ImportError: if PyTorch or transformers is missing.
    """
    folder = pathlib.Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError(f"{name} holds no model: there is no config.json in it.")
    where = {
        "pretrained_model_name_or_path": str(name),
        "local_files_only": folder.is_dir(),
    }
    return _load(_Source(folder.name, where), attention, use_safetensors=True)


def load_gguf(path: pathlib.Path | str, attention: bool = False) -> Pretrained:
    """A GGUF file of one of the architectures that `transformers` reads.

    Args:
        path: the file.
        attention: as of `load_hf`.

    Raises:
        ValueError: if the file is no GGUF file, and as `load_hf`.
        ImportError: if PyTorch, transformers, accelerate or gguf is missing.
    """
    path = pathlib.Path(path)
    said = gguf.read(path)
    where = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "local_files_only": True,
    }
    return _load(_Source(path.stem, where, *said), attention)


def _load(source, attention, **options):
    torch, transformers = imported("torch", "hf"), imported("transformers", "hf")
    # A model that brings code of its own is refused, not asked about.
    where = source.where | {"trust_remote_code": False}
    if attention:
        options["attn_implementation"] = "eager"
    module = _loaded(
        transformers.AutoModelForCausalLM, source.name, {**where, **options}
    )
    return Pretrained(
        source.name,
        torch,
        module.to(torch.float32).eval(),
        _tokenizer(transformers, where),
        source.bos,
        f"transformers {transformers.__version__}",
        source.facts,
    )


def _read(pretrained, reading):
    ids = pretrained.token_ids(reading.text)
    change, _ = _probe(pretrained, ids)
    made = _measured(pretrained, change)

    def trace(ids_S):
        passed = _pass(pretrained, ids_S)
        _check_change(pretrained.name, change, passed)
        return _trace(passed)

    return capture(made, ids, pretrained.front(ids), trace, reading)


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


def _probe(pretrained, ids):
    """What the model does to its logits, by a pass over the first tokens."""
    config = pretrained.module.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or _PROBE
    passed = _pass(pretrained, ids[: min(_PROBE, most)], attention=False)
    return _change(config, passed), passed


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


def _measured(pretrained, change):
    """The head with the change in its table, its bias and its g."""
    head, config = pretrained.head, pretrained.module.config.get_text_config()
    factor, bias = np.float32(change.scale), getattr(head, "bias", None)
    activation = heads.softcap(change.cap).activation({}) if change.cap else SOFTMAX
    made = Model(
        pretrained.name,
        _numpy(head.weight) * factor,
        None if bias is None else _numpy(bias) * factor,
        activation,
        getattr(config, "max_position_embeddings", None),
    )
    facts = _fact(pretrained, config, made), *pretrained.facts, *change.facts
    return made._replace(facts=facts)


def _fact(pretrained, config, made):
    size, width = made.table_VD.shape
    layers = getattr(config, "num_hidden_layers", None)
    depth = f"{layers} layers, " if layers else ""
    kind = f"{type(pretrained.module).__name__} of {pretrained.version}"
    return (
        f"Model: {made.name}, {kind}, {depth}width {width:,}, {size:,} tokens, "
        f"{'no' if made.bias_V is None else 'with an'} output bias."
    )


def _pass(pretrained, ids_S, attention=True):
    """Read tokens; the last state is what the head was given, whatever it is called."""
    name, torch, model, *_ = pretrained
    head, read = pretrained.head, []
    hook = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    try:
        with torch.no_grad():
            output = model(
                torch.as_tensor(ids_S)[None].long(),
                output_hidden_states=True,
                output_attentions=attention,
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
