"""What causal language models that `transformers` loads hold along a text.

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
from softbottle.analysis.sources.pretrained import Pretrained, load_gguf, load_hf
from softbottle.analysis.sources.reading import Model, Reading, Trace, capture
from softbottle.ops.mixture.activations import SOFTMAX

_ALIKE = 1e-3  # of the largest logit, that the head may miss the model's own by
_PROBE = 32  # tokens on which the head is found out


def from_hf(
    name: pathlib.Path | str, reading: Reading, revision: str | None = None
) -> Capture:
    """What a causal language model in the format of `transformers` holds.

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
    return _read(load_hf(name, attention=True, revision=revision), reading)


def from_gguf(path: pathlib.Path | str, reading: Reading) -> Capture:
    """What a GGUF file of one of the architectures that `transformers` reads holds.

    Raises:
        ValueError: if the file is no GGUF file, and as `from_hf`.
        ImportError: if PyTorch, transformers, accelerate or gguf is missing.
    """
    return _read(load_gguf(path, attention=True), reading)


def measured(pretrained: Pretrained, ids: np.ndarray) -> Model:
    """The head, with what the model does to its logits, found out on some tokens.

    Raises:
        ValueError: if it changes its logits in a way that is no part of a head.
    """
    change, passed = _probe(pretrained, ids)
    _check_change(pretrained.name, change, passed)
    return _measured(pretrained, change)


def _read(pretrained, reading):
    ids = pretrained.token_ids(reading.text)
    change, _ = _probe(pretrained, ids)
    made = _measured(pretrained, change)

    def trace(ids_S):
        passed = _pass(pretrained, ids_S)
        _check_change(pretrained.name, change, passed)
        return _trace(passed)

    found = capture(made, ids, pretrained.front(ids), trace, reading)
    module = pretrained.module
    return dataclasses.replace(
        found,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        family=type(module).__name__,
        words=pretrained.words,
    )


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
    depth = f"{layers} {'layer' if layers == 1 else 'layers'}, " if layers else ""
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
