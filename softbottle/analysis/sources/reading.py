"""How a pretrained model reads a text, and what is taken of it while it does.

A text is read in stretches of S tokens, each from position 0. What is taken are the
states of every layer, and of each attention head the logits of a stretch's last
position.

Axes: L layers, W stretches, H heads, N positions, M of the longer text.
"""

import importlib
import pathlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np

from softbottle.analysis.capture import Capture, of_softmax
from softbottle.analysis.sources import arrays as arrays_lib


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


class Trace(NamedTuple):
    """States [S, D] of the embedded words and of each layer, the last normalised.

    `logits_LHS` are the attention logits of the last position, by layer and head.
    """

    states: list[np.ndarray]
    logits_LHS: np.ndarray


def capture(
    name: str,
    table_VD: np.ndarray,
    bias_V: np.ndarray | None,
    ids: np.ndarray,
    trace: Callable[[np.ndarray], Trace],
    reading: Reading,
) -> Capture:
    """A model's head, joined by what the model holds while it reads a text.

    Args:
        name: of the model.
        table_VD: its output table.
        bias_V: its output bias, or None.
        ids: the whole text in tokens.
        trace: one pass over a stretch of it.
        reading: how it is read.

    Raises:
        ValueError: if the text is too short.
    """
    first = _stretches(ids, reading, reading.positions)
    traces = [trace(ids_S) for ids_S in first]
    states = [
        np.concatenate(parts)
        for parts in zip(*(part.states for part in traces), strict=True)
    ]
    frozen_MD = None
    if reading.frozen > reading.positions:
        beyond = _stretches(ids, reading, reading.frozen)[len(first) :]
        more = [trace(ids_S).states[-1] for ids_S in beyond]
        frozen_MD = np.concatenate([states[-1], *more])
    return of_softmax(
        name,
        table_VD,
        bias_V,
        states,
        labels_N=ids[1 : len(states[-1]) + 1],
        logits_LWHS=np.stack([part.logits_LHS for part in traces], axis=1),
        ids=ids,
        frozen_MD=frozen_MD,
    )


def token_ids(
    reading: Reading, vocab: int, encode: Callable[[str], list[int]]
) -> np.ndarray:
    """The text in tokens: ids as they are in a .npy file, or what `encode` makes.

    Raises:
        ValueError: if the file is neither ids below `vocab` nor text in UTF-8.
    """
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
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(
            f"the ids must lie in [0, {vocab}), got {ids.min()} to {ids.max()}."
        )
    return ids


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


def _stretches(ids, reading, positions):
    """As many whole stretches as there are positions, with a label for the last."""
    window = min(reading.window, reading.positions, len(ids) - 1)
    count = min(positions, len(ids) - 1) // max(window, 1)
    if window < 2:
        raise ValueError(f"the text has {len(ids)} tokens; three or more are needed.")
    return ids[: count * window].reshape(count, window)
