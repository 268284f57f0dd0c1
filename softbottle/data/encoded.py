"""A corpus in ids on disk: three arrays, the vocabulary, and their hashes.

    {train,valid,test}.int32, vocab.txt    what is read
    manifest.json                          their sizes and sha256, written last
    checked.json                           which files were found to be sound

Opening hashes the files unless their sizes, times and inodes are those in checked.json:
what a program or a copy changed is found, and 3 GB of ids are not read at each start.
Bits that a disk changes by itself, with no trace in a file's times, are found when the
cache is copied or checked.json is deleted. Nothing is repaired here: what changed a
cache is a disk or a program that the user has to know of.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np

from softbottle import files
from softbottle.data.vocab import Corpus, Split, Vocab

SPLITS: tuple[Split, ...] = ("train", "valid", "test")
_VOCAB = "vocab.txt"
_HASHED = (*(f"{name}.int32" for name in SPLITS), _VOCAB)
# A file may change twice within what a file system's clock can tell (2 s on some), so
# one that changed so recently is hashed again next time.
SETTLED_NS = 2 * 10**9


def seal(folder: pathlib.Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of a folder whose arrays and vocabulary are complete.

    Args:
        folder: with the files that `opened` reads.
        facts: what else the manifest tells, by name.
    """
    for name in _HASHED:
        with (folder / name).open("rb") as file:
            # On the disk before the manifest is: a machine may lose power.
            os.fsync(file.fileno())
    manifest = json.dumps({**facts, "sha256": _sums(folder)}, indent=1)
    files.replace(folder / "manifest.json", manifest)


def opened(
    folder: pathlib.Path, lowercase: bool, subwords: bool = False
) -> Corpus | None:
    """The corpus in a folder once it is checked, or None if there is none.

    Raises:
        ValueError: if a file is missing, or is not the one that was written.
    """
    if (expected := _expected(folder)) is None:
        return None
    _check(folder, expected)
    corpus = mapped(folder, lowercase, subwords)
    for name, ids in corpus.splits.items():
        # For `digest`; NumPy does not hand it on to a slice, which has another hash.
        # A memory-mapped array takes attributes of its own; mypy knows plain ones.
        ids.sha256 = expected[f"{name}.int32"]  # type: ignore[attr-defined]
    return corpus


def mapped(folder: pathlib.Path, lowercase: bool, subwords: bool = False) -> Corpus:
    """The corpus in a folder as it is, its arrays memory-mapped."""
    train, valid, test = (
        np.memmap(folder / f"{name}.int32", "<i4", "r") for name in SPLITS
    )
    vocab = Vocab.load(folder / _VOCAB, lowercase, subwords)
    return Corpus(train, valid, test, vocab)


def digest(corpus: Corpus) -> dict[str, str]:
    """The sha256 of each split's ids, as little-endian int32, and of the vocabulary.

    Those of a corpus from `opened` are known; others are computed from the arrays.
    """
    sums: dict[str, str] = {n: _digest(ids) for n, ids in corpus.splits.items()}
    return sums | {"vocab": corpus.vocab.digest}


def _digest(ids):
    known = getattr(ids, "sha256", None)
    return known or hashlib.sha256(np.ascontiguousarray(ids, "<i4")).hexdigest()


def _expected(folder):
    """The hash of each file by the manifest, or None if there is no folder."""
    if not folder.exists():
        return None
    try:
        sums = json.loads((folder / "manifest.json").read_bytes())["sha256"]
        return {name: str(sums[name]) for name in _HASHED}
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        # A folder appears with all that is in it, by a rename.
        raise _damage(folder, "manifest.json") from error


def _check(folder, expected):
    """Raise unless every file is the one that was written."""
    now = time.time_ns()
    try:
        stamps = _stamps(folder)
        checked = json.dumps({"stamps": stamps, "sha256": expected}).encode()
        if _content(folder / "checked.json") == checked:
            return
        sums = _sums(folder)
    except FileNotFoundError as error:
        raise _damage(folder, pathlib.Path(error.filename).name) from error
    for name, sha in sums.items():
        if sha != expected[name]:
            raise _damage(folder, name)
    newest = max(when for _, _, *times in stamps.values() for when in times)
    if now - newest > SETTLED_NS:
        # Others may do the same now, or the folder be read-only: it is done again then.
        with contextlib.suppress(OSError):
            files.replace(folder / "checked.json", checked)


def _stamps(folder):
    """Of each file, what changes when it is written to or another takes its place."""
    stats = {name: (folder / name).stat() for name in _HASHED}
    return {
        name: (stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        for name, stat in stats.items()
    }


def _sums(folder):
    with futures.ThreadPoolExecutor(len(_HASHED)) as pool:
        sums = pool.map(files.sha256, (folder / name for name in _HASHED))
        return dict(zip(_HASHED, sums, strict=True))


def _content(path):
    try:
        return path.read_bytes()
    except OSError:
        return None


def _damage(folder, name):
    return ValueError(
        f"{folder / name} is not what was written: the cache {folder} was damaged; "
        "delete it and try again, and the text is encoded anew."
    )
