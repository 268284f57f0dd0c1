"""How a pretrained model reads a text, and what is taken of it while it does.

A text is read in windows of S tokens, each from position 0 and behind the P tokens that
the model's tokenizer puts before a text: its beginning-of-sequence token, or none. What
is taken are the states of every layer, and of each attention head the logits of a
window's last position over all P + S.

Axes: L layers, W windows, H heads, N positions, M of the longer text, P tokens before
the text.
"""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np

from softbottle.analysis.capture import Capture, enough
from softbottle.analysis.sources import arrays as arrays_lib
from softbottle.analysis.sources import texts as texts_lib
from softbottle.data import vocab as vocab_lib
from softbottle.ops.mixture.activations import SOFTMAX, Activation

POSITIONS = 2048  # that are read by default, or more for a wide model
# The logarithm of the smallest weight that float32 holds in full precision.
_LEAST = float(np.log(np.finfo(np.float32).tiny))


class Reading(NamedTuple):
    """How a text is read.

    Attributes:
        text: a file: ids if its name ends in .npy, else text for the model's tokenizer,
            plain, .gz or .xz.
        positions: how many tokens the model reads; n-grams are counted in all of them.
            None reads `POSITIONS`, or `enough` of them for the model's width.
        window: S, tokens of the text that are read at a time.
        frozen: how many tokens are read for what the head is given alone, if more.
    """

    text: pathlib.Path | str
    positions: int | None = None
    window: int = 512
    frozen: int = 0


class Front(NamedTuple):
    """What stands before the text of every window.

    Attributes:
        ids: tokens, usually one, for the beginning of a sequence; or none.
        note: a sentence on where they come from.
    """

    ids: tuple[int, ...]
    note: str


class Model(NamedTuple):
    """A model before it reads.

    Attributes:
        name: of the model.
        table_VD: its output table.
        bias_V: its output bias, or None.
        activation: g, where the head is softmax(g(h W' + b)).
        limit: positions that it has; None if any number.
        facts: sentences on what it is.
    """

    name: str
    table_VD: np.ndarray
    bias_V: np.ndarray | None = None
    activation: Activation = SOFTMAX
    limit: int | None = None
    facts: tuple[str, ...] = ()


class Trace(NamedTuple):
    """States [P + S, D] of the embedded words and of each layer, the last normalised.

    `logits_LHS` are the attention logits of the last position, by layer and head, over
    all P + S tokens, and -inf where a layer does not see one. In their place a sentence
    says why there are none.
    """

    states: list[np.ndarray]
    logits_LHS: np.ndarray | str


def capture(
    model: Model,
    ids: np.ndarray,
    front: Front,
    trace: Callable[[np.ndarray], Trace],
    reading: Reading,
) -> Capture:
    """A model's head, joined by what the model holds while it reads a text.

    Args:
        model: the head, and what else is known.
        ids: the whole text in tokens.
        front: what is read before each window.
        trace: one pass over tokens, those in front included.
        reading: how the text is read.

    Raises:
        ValueError: if the text is too short, or a window has more positions than the
            model.
    """
    ids, front = behind(ids, front)
    wanted = reading.positions or enough(model.table_VD.shape[1], POSITIONS)
    reading = reading._replace(positions=wanted)
    windows_WS = _windows(ids, reading, wanted)
    count, window = windows_WS.shape
    first = len(front.ids)
    check_limit(model, window, first)

    def read(ids_S):
        return trace(np.concatenate([np.asarray(front.ids, ids_S.dtype), ids_S]))

    traces = [read(ids_S) for ids_S in windows_WS]
    layers = [
        np.stack(parts) for parts in zip(*(part.states for part in traces), strict=True)
    ]
    states = [_flat(layer_WSD[:, first:]) for layer_WSD in layers]
    frozen_MD = None
    if reading.frozen > wanted:
        beyond = _windows(ids, reading, reading.frozen)[count:]
        more = [read(ids_S).states[-1][first:] for ids_S in beyond]
        frozen_MD = np.concatenate([states[-1], *more])
    windows = "window" if count == 1 else "windows"
    text = (
        f"Text: {pathlib.Path(reading.text).name}, {len(ids):,} tokens. Read: the "
        f"first {count * window:,}, in {count:,} {windows} of {window:,}, each from "
        "position 0."
    )
    made = Capture.from_states(
        states,
        model.table_VD,
        model.bias_V,
        labels=ids[1 : len(states[-1]) + 1],
        name=model.name,
        ids=ids,
        frozen_MD=frozen_MD,
        activation=model.activation,
    )
    made = dataclasses.replace(made, facts=(*model.facts, text, front.note))
    return _with_attention(made, traces, [layer_WSD[:, :first] for layer_WSD in layers])


def token_ids(
    reading: Reading, vocab: int, encode: Callable[[str], list[int] | np.ndarray]
) -> np.ndarray:
    """The text in tokens: ids as they are in a .npy file, or what `encode` makes.

    Raises:
        ValueError: if the file is neither ids below `vocab` nor text in UTF-8, or has
            fewer than three tokens.
    """
    path = pathlib.Path(reading.text)
    if not path.is_file():
        raise ValueError(f"there is no text {path}.")
    if path.suffix == ".npy":
        ids = arrays_lib.load_one(path)
    else:
        try:
            text = texts_lib.content(path).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}") from error
        ids = np.asarray(encode(text), np.int64)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{path} must be a run of ids, got {ids.dtype} {ids.shape}.")
    _check_length(ids)
    if not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(
            f"the ids must lie in [0, {vocab}), got {ids.min()} to {ids.max()}."
        )
    return ids


def behind(ids: np.ndarray, front: Front) -> tuple[np.ndarray, Front]:
    """The text without the tokens in front, where it starts with them already."""
    count = len(front.ids)
    if not count or tuple(ids[:count].tolist()) != front.ids:
        return ids, front
    return ids[count:], front._replace(
        note=f"{front.note} The text's own was taken off."
    )


def check_limit(model: Model, window: int, front: int) -> None:
    """Raise ValueError if a window behind so many tokens is more than a model reads."""
    if model.limit is not None and window + front > model.limit:
        before = f" behind {front} before it" if front else ""
        raise ValueError(
            f"{model.name} has {model.limit:,} positions, fewer than a window of "
            f"{window:,} tokens{before}; give --window={model.limit - front}."
        )


def imported(name: str, extra: str) -> ModuleType:
    """A package that only some sources need.

    Raises:
        ImportError: naming the extra to install, if it is missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this needs {name}, which is not installed: "
            f"pip install 'softbottle[{extra}]'"
        ) from error


def first_line(error: Exception) -> str:
    """What others' code raised, in one line that a terminal may show."""
    lines = str(error).strip().splitlines() or [""]
    return vocab_lib.printable(f"{type(error).__name__}: {lines[0][:200]}")


def _windows(ids, reading, positions):
    """As many whole windows as there are positions, with a label for the last."""
    _check_length(ids)
    window = min(reading.window, reading.positions, len(ids) - 1)
    count = min(positions, len(ids) - 1) // window
    return ids[: count * window].reshape(count, window)


def _check_length(ids):
    if len(ids) < 3:
        raise ValueError(f"the text has {len(ids)} tokens; three or more are needed.")


def _with_attention(made, traces, front):
    """The capture with its attention logits, or with the reason why it has none."""
    logits = [part.logits_LHS for part in traces]
    reasons = [reason for reason in logits if isinstance(reason, str)]
    if reasons:
        return dataclasses.replace(made, absent={"logits_LWHS": reasons[0]})
    logits_LWHS = np.stack(logits, axis=1)
    seen_LS = np.isfinite(logits_LWHS).any(axis=(1, 2))
    return dataclasses.replace(
        made,
        logits_LWHS=np.maximum(logits_LWHS, _LEAST),
        spans_L=seen_LS.shape[1] - seen_LS.argmax(axis=1),
        front=front if front[0].shape[1] else None,
    )


def _flat(layer_WSD):
    return layer_WSD.reshape(-1, layer_WSD.shape[-1])
