"""The words of any text, for the instrument that needs no model.

A corpus is a file, or all the files below a folder, plain, .gz or .xz. The most
frequent words are kept, all others are one word. W-errors are compared over as many
words of each text as the shortest has: a longer text has more contexts.
"""

import codecs
import gzip
import lzma
import pathlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from softbottle.analysis.capture import Capture, Text
from softbottle.data import vocab as vocab_lib

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_WORKERS = 2
_DIMENSIONS = 512  # of a next-word matrix, at most


def files(path: pathlib.Path | str) -> list[pathlib.Path]:
    """A file, or all the files below a folder, sorted.

    Raises:
        ValueError: if there is none.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise ValueError(f"the text {path} is neither a file nor a folder.")
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def words(path: pathlib.Path | str) -> np.ndarray:
    """Numbers of a text's words, in the order of their first appearance.

    Raises:
        ValueError: if there are no words, or a file is no text.
    """
    chunks = (vocab_lib.Chunk(content(file), str(file), 1) for file in files(path))
    numbering = vocab_lib.Numbering()
    parts = [
        numbering.number(part) for part in vocab_lib.numbered(chunks, False, _WORKERS)
    ]
    if not sum(map(len, parts)):
        raise ValueError(f"there are no words in {path}.")
    return np.concatenate(parts)


def frequent(ids: np.ndarray, vocab: int) -> np.ndarray:
    """Ids below `vocab`, the most frequent word first; the last stands for the rest."""
    counts_V = np.bincount(ids)
    place_V = np.empty(len(counts_V), np.int64)
    place_V[np.argsort(-counts_V, kind="stable")] = np.arange(len(counts_V))
    return np.minimum(place_V, vocab - 1)[ids]


def captures(paths: Sequence[pathlib.Path | str], vocab: int = 10_000) -> list[Capture]:
    """Texts of one length, each named by its file or folder.

    Raises:
        ValueError: if two share a name, or one is no text.
    """
    names = [pathlib.Path(path).resolve().name for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"the texts need different names, got {names}.")
    texts = {name: words(path) for name, path in zip(names, paths, strict=True)}
    length = min(map(len, texts.values()))
    return [
        Capture(
            name,
            text=Text(frequent(ids[:length], vocab), vocab, _DIMENSIONS),
            facts=(f"Words: {len(ids):,}, of which the first {length:,} are read.",),
        )
        for name, ids in texts.items()
    ]


def content(path: pathlib.Path) -> bytes:
    """The bytes of a text, unpacked, without a byte order mark.

    Raises:
        ValueError: if a packed file is damaged or cut short.
    """
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            return file.read().removeprefix(codecs.BOM_UTF8)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from error
