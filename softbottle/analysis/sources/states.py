"""States in a folder: what a model's head reads along a text, computed once and kept.

    states.json               what they are and where they come from
    table-000.npy, ...        rows of the output table, one file after the other, [V, D]
    bias.npy                  the output bias [V], if there is one
    states-000.npy, ...       states [rows, D]; bfloat16 is stored by its bits, uint16
    labels-000.npy, ...       the tokens that follow them, integers [rows]
    heldout-states-000.npy, heldout-labels-000.npy, ...     the same of held-out text

No file is larger than `PIECE` bytes, so that a folder can be carried in parts. A piece
is whole windows of text, and is complete when its labels are there: a computation that
was interrupted goes on with the first piece that is not. Other frameworks write such a
folder without states.json, in any floating type, or with as few files as they like.

Axes: W windows of S tokens, N rows of a piece.
"""

import hashlib
import io
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from softbottle import files
from softbottle.analysis.capture import Capture, Tokens
from softbottle.analysis.sources import arrays as arrays_lib
from softbottle.analysis.sources.reading import Front, Model, behind, check_limit
from softbottle.data import vocab as vocab_lib
from softbottle.ops.mixture.activations import SOFTMAX

PIECE = 48 * 2**20
_ABOUT = "states.json"
_FORMAT = 1
_PARTS = {"train": "", "heldout": "heldout-"}


class Texts(NamedTuple):
    """What is read.

    Attributes:
        train: tokens of each text, by its name.
        heldout: texts that are held out; empty holds out the end of every other.
        share: how much of its end.
        window: S.
    """

    train: dict[str, np.ndarray]
    heldout: dict[str, np.ndarray]
    share: float = 0.05
    window: int = 512


class Stored(NamedTuple):
    """States of a model along two texts; the head is the same.

    Attributes:
        train: on which heads are trained.
        heldout: on which they are judged; None if there is no such text apart.
        digest: a hash of what the states are of.
    """

    train: Capture
    heldout: Capture | None
    digest: str


Reader = Callable[[np.ndarray], np.ndarray]


def write(
    folder: pathlib.Path | str,
    model: Model,
    front: Front,
    texts: Texts,
    read: Reader,
    made_by: str = "",
    batch: int = 8,
) -> None:
    """Compute the states that a folder does not have yet.

    Args:
        folder: where they go; it is made.
        model: the head, whose table is stored beside the states.
        front: tokens before every window; their states are left out.
        texts: what is read.
        read: the states [B, P + S, D] of windows [B, P + S], in any floating type.
        made_by: how: the trunk's precision, for example.
        batch: windows per call of `read`.

    Raises:
        ValueError: if the folder has states of something else, a text has no whole
            window, a window has more positions than the model, or the model's logits
            are not those of a softmax.
    """
    folder = pathlib.Path(folder)
    check_limit(model, texts.window, len(front.ids))
    if model.activation.apply is not SOFTMAX.apply:
        raise ValueError(
            f"{model.name} changes its logits after the table; only the states of a "
            "softmax's model are kept."
        )
    parts = split(texts, front)
    about = _about(model, front, texts, parts, made_by)
    _begin(folder, about, model)
    rows = max(1, PIECE // (2 * texts.window * model.table_VD.shape[1]))
    for part, (windows_WS, labels_WS) in parts.items():
        for number, at in enumerate(range(0, len(windows_WS), rows)):
            names = [_name(part, kind, number) for kind in ("states", "labels")]
            if (folder / names[1]).exists():
                continue
            piece_WSD = _states(windows_WS[at : at + rows], front, read, batch)
            _save(folder / names[0], _flat(piece_WSD).view(np.uint16))
            _save(folder / names[1], labels_WS[at : at + rows].reshape(-1))


def read(path: pathlib.Path | str) -> Stored:
    """The states of a folder, memory-mapped, or of an .npz file (see `arrays.capture`).

    Raises:
        ValueError: if a file is missing, is no array, or does not fit the others.
    """
    path = pathlib.Path(path)
    if path.is_file():
        made = arrays_lib.capture(path)
        if made.tokens is None or made.tokens[0].labels_T is None:
            raise ValueError(f"{path} needs hidden, table and labels.")
        return Stored(made, None, files.sha256(path))
    about: dict[str, Any] = {}
    if (path / _ABOUT).exists():
        about = json.loads((path / _ABOUT).read_text())
    table_VD = np.concatenate([_array(file) for file in _files(path, "table", True)])
    bias_V = _array(path / "bias.npy") if (path / "bias.npy").exists() else None
    table_VD = np.asarray(table_VD, np.float32)
    captures = {}
    for part in _PARTS:
        blocks = [*_blocks(path, part, about.get(part), len(table_VD))]
        captures[part] = Capture(
            about.get("model", path.resolve().name),
            table_VD,
            bias_V,
            tokens=blocks or None,
            facts=tuple(about.get("facts", ())),
        )
    _check(path, captures)
    heldout = captures["heldout"] if captures["heldout"].tokens else None
    return Stored(captures["train"], heldout, _digest(about, captures))


def split(texts: Texts, front: Front) -> dict[str, list[np.ndarray]]:
    """Windows [W, S] and labels of both parts, "train" and "heldout".

    Texts stay in their order and no window is in two parts.

    Raises:
        ValueError: if a text has no whole window, or no window to hold out.
    """
    train = [_windows(name, ids, texts, front) for name, ids in texts.train.items()]
    if texts.heldout:
        held = [
            _windows(name, ids, texts, front) for name, ids in texts.heldout.items()
        ]
    else:
        cuts = [max(1, math.ceil(len(pair[0]) * texts.share)) for pair in train]
        named = zip(texts.train, train, cuts, strict=True)
        short = [name for name, pair, cut in named if cut >= len(pair[0])]
        if short:
            raise ValueError(
                f"{short[0]} has one window of {texts.window} tokens, and one is to be "
                "held out: give a longer text, a smaller --window or a held-out text."
            )
        pairs = list(zip(train, cuts, strict=True))
        held = [[array[-cut:] for array in pair] for pair, cut in pairs]
        train = [[array[:-cut] for array in pair] for pair, cut in pairs]
    return {
        part: [np.concatenate(arrays) for arrays in zip(*pairs, strict=True)]
        for part, pairs in (("train", train), ("heldout", held))
    }


def _windows(name, ids, texts, front):
    """Whole windows of a text, and the tokens that follow each."""
    ids, _ = behind(np.asarray(ids, np.int32), front)
    size = texts.window
    count = (len(ids) - 1) // size
    if count < 1:
        raise ValueError(
            f"{name} has {len(ids):,} tokens, fewer than a window of {size:,} and one."
        )
    end = count * size
    return [ids[:end].reshape(count, size), ids[1 : end + 1].reshape(count, size)]


def _about(model, front, texts, parts, made_by):
    """What states.json says; the states are of nothing else."""

    def listed(named):
        return [
            {"name": name, "tokens": len(ids), "sha256": _sha256(np.asarray(ids))}
            for name, ids in named.items()
        ]

    table_VD = model.table_VD
    names = ", ".join(texts.train)
    apart = f"the last {texts.share:.0%} of each held out"
    if texts.heldout:
        apart = f"held out: {', '.join(texts.heldout)}"
    counts = {part: windows.size for part, (windows, _) in parts.items()}
    text = (
        f"Text: {names}; {apart}. {counts['train']:,} tokens to train on and "
        f"{counts['heldout']:,} held out, in windows of {texts.window:,}, each from "
        "position 0. States are kept in bfloat16."
    )
    return {
        "format": _FORMAT,
        "model": model.name,
        "states": "bfloat16, stored by its bits as uint16",
        "made_by": made_by,
        "width": table_VD.shape[1],
        "vocab": len(table_VD),
        "table": _sha256(table_VD),
        "bos": list(front.ids),
        "window": texts.window,
        "train": counts["train"],
        "heldout": counts["heldout"],
        "texts": listed(texts.train),
        "heldout_texts": listed(texts.heldout),
        "facts": [*model.facts, text, front.note],
    }


def _begin(folder, about, model):
    """Write what the states are of, and the head; or see that it is the same."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _ABOUT
    kinds = ("table", "bias", "states", "labels", "heldout-")
    found = (file for kind in kinds for file in folder.glob(f"{kind}*.npy"))
    if not path.exists() and any(found):
        raise ValueError(
            f"{folder} has arrays and no {_ABOUT} that says what they are of; use "
            "another folder."
        )
    if path.exists():
        stored = json.loads(path.read_text())
        changed = [key for key in about if stored.get(key) != about[key]]
        if changed:
            raise ValueError(
                f"{folder} has states of something else: {', '.join(changed)} differ; "
                "use another folder."
            )
    # First, so that arrays of a computation that was killed are known to be its own.
    files.replace(path, json.dumps(about, indent=1))
    table_VD = np.asarray(model.table_VD, np.float32)
    rows = max(1, PIECE // (4 * table_VD.shape[1]))
    for number, at in enumerate(range(0, len(table_VD), rows)):
        name = f"table-{number:03d}.npy"
        if not (folder / name).exists():
            _save(folder / name, table_VD[at : at + rows])
    if model.bias_V is not None and not (folder / "bias.npy").exists():
        _save(folder / "bias.npy", np.asarray(model.bias_V, np.float32))


def _states(windows_WS, front, read, batch):
    """States of some windows, without those of the tokens in front."""
    before = np.tile(np.asarray(front.ids, windows_WS.dtype), (len(windows_WS), 1))
    ids_WS = np.concatenate([before, windows_WS], axis=1)
    parts = [
        _rounded(read(ids_WS[at : at + batch]))[:, len(front.ids) :]
        for at in range(0, len(ids_WS), batch)
    ]
    return np.concatenate(parts)


def _rounded(array):
    return np.ascontiguousarray(array).astype(ml_dtypes.bfloat16)


def _blocks(folder, part, count, vocab):
    """Pieces of one part; as many rows as states.json says, if it says so."""
    found = 0
    for file in _files(folder, f"{_PARTS[part]}states", count is not None):
        labels = file.with_name(file.name.replace("states", "labels"))
        if not labels.exists():
            if count is None:
                raise ValueError(f"{labels} is missing beside {file.name}.")
            break
        hidden_ND, labels_N = _array(file, mapped=True), arrays_lib.load_one(labels)
        if hidden_ND.ndim != 2 or labels_N.shape != hidden_ND.shape[:1]:
            raise ValueError(
                f"{file.name} {hidden_ND.shape} and {labels.name} {labels_N.shape} "
                "must be [rows, D] and [rows]."
            )
        vocab_lib.check_ids(labels.name, labels_N, vocab)
        found += len(labels_N)
        yield Tokens(hidden_ND, labels_N)
    if count not in (None, found):
        raise ValueError(
            f"{folder} has {found:,} of {count:,} states of its {part} text: the "
            "computation was interrupted; start it again."
        )


def _files(folder, stem, needed):
    """Files STEM-NUMBER.npy or STEM.npy, by number."""
    named = {
        int(match[1] or 0): file
        for file in folder.glob(f"{stem}*.npy")
        if (match := re.fullmatch(rf"{stem}(?:-(\d+))?\.npy", file.name))
    }
    if needed and not named:
        raise ValueError(f"there are no files {stem}-000.npy, ... in {folder}.")
    return [named[number] for number in sorted(named)]


def _array(path, mapped=False):
    """An array, read or mapped; bits of bfloat16 as bfloat16."""
    if mapped:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{path} is no array: {error}") from error
    else:
        array = arrays_lib.load_one(path)
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array


def _check(path, captures):
    """Raise ValueError unless states and table are of one width."""
    train = captures["train"]
    if not train.tokens:
        raise ValueError(f"there are no states-000.npy and labels-000.npy in {path}.")
    width = train.table_VE.shape[1:]
    for capture in captures.values():
        for hidden_ND, _ in capture.tokens or ():
            if hidden_ND.shape[1:] != width:
                raise ValueError(
                    f"{path}: states {hidden_ND.shape} and table "
                    f"{train.table_VE.shape} differ in width."
                )
    bias_V = train.bias_V
    if bias_V is not None and bias_V.shape != train.table_VE.shape[:1]:
        raise ValueError(f"{path}: bias {bias_V.shape} does not fit the table.")


def _digest(about, captures):
    """Of states.json, or else of the head, the states' shapes and the labels."""
    if about:
        return _hash(json.dumps(about, sort_keys=True).encode())
    head = [captures["train"].table_VE, captures["train"].bias_V]
    blocks = [block for each in captures.values() for block in each.tokens or ()]
    arrays = [array for array in head if array is not None]
    arrays += [labels_N for _, labels_N in blocks]
    shapes = [(hidden_ND.shape, str(hidden_ND.dtype)) for hidden_ND, _ in blocks]
    return _hash(repr(shapes).encode(), *(_sha256(array).encode() for array in arrays))


def _sha256(array):
    return _hash(np.ascontiguousarray(array).tobytes())


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _name(part, kind, number):
    return f"{_PARTS[part]}{kind}-{number:03d}.npy"


def _flat(array_WSD):
    return np.ascontiguousarray(array_WSD).reshape(-1, array_WSD.shape[-1])


def _save(path, array):
    stream = io.BytesIO()
    np.save(stream, array)
    files.replace(path, stream.getvalue())
