"""A corpus in ids on disk: three arrays, the vocabulary, and their hashes.

    {train,valid,test}.int32, vocab.txt    what is read
    manifest.json                          their sizes and sha256, written last
    checked.json                           when the files were last found to be sound

Opening hashes a file only if its size, time or inode is not the one in checked.json:
what a program or a copy changed is found, and 3 GB of ids are not read at each start.
Nothing is repaired here: a cache that changed by itself is a disk or a program that
the user has to know of.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np

from softbottle import files
from softbottle.data.vocab import Corpus, Vocab

SPLITS = ("train", "valid", "test")
_VOCAB = "vocab.txt"
_HASHED = (*(f"{name}.int32" for name in SPLITS), _VOCAB)


def seal(folder: pathlib.Path, facts: Mapping[str, Any]) -> None:
    """Write the manifest of a folder whose arrays and vocabulary are complete.

    Args:
        folder: with the files that `opened` reads.
        facts: what else the manifest tells, by name.
    """
    for name in _HASHED:
        with (folder / name).open("rb") as file:
            # On the disk before they are called sound: else a machine that loses
            # power may keep their sizes and times, and not their content.
            os.fsync(file.fileno())
    stamps, sums = _stamps(folder), _sums(folder)
    files.replace(folder / "checked.json", _checked(stamps, sums))
    manifest = json.dumps({**facts, "sha256": sums}, indent=1)
    files.replace(folder / "manifest.json", manifest)


def opened(folder: pathlib.Path, lowercase: bool) -> Corpus | None:
    """The corpus in a folder, its arrays memory-mapped, or None if there is none.

    Raises:
        ValueError: if a file is missing, or is not the one that was written.
    """
    try:
        raw = (folder / "manifest.json").read_bytes()
    except FileNotFoundError:
        return None
    try:
        sums = json.loads(raw)["sha256"]
        expected = {name: str(sums[name]) for name in _HASHED}
    except (ValueError, KeyError, TypeError) as error:
        raise _damage(folder, "manifest.json") from error
    _check(folder, expected)
    vocab = Vocab.load(folder / _VOCAB, lowercase)
    arrays = [np.memmap(folder / f"{name}.int32", "<i4", "r") for name in SPLITS]
    for name, ids in zip(SPLITS, arrays, strict=True):
        # For `digest`; NumPy does not hand it on to a slice, which has another hash.
        ids.sha256 = expected[f"{name}.int32"]
    return Corpus(*arrays, vocab)


def digest(corpus: Corpus) -> dict[str, str]:
    """The sha256 of each split's ids, as little-endian int32, and of the vocabulary.

    Those of a corpus from `opened` are known; others are computed from the arrays.
    """
    named = zip(SPLITS, corpus, strict=False)
    return {name: _digest(ids) for name, ids in named} | {"vocab": corpus.vocab.digest}


def _digest(ids):
    known = getattr(ids, "sha256", None)
    return known or hashlib.sha256(np.ascontiguousarray(ids, "<i4")).hexdigest()


def _check(folder, expected):
    """Raise unless every file is the one that was written."""
    try:
        stamps = _stamps(folder)
        checked = _checked(stamps, expected)
        if _content(folder / "checked.json") == checked:
            return
        sums = _sums(folder)
    except FileNotFoundError as error:
        raise _damage(folder, pathlib.Path(error.filename).name) from error
    for name, sha in sums.items():
        if sha != expected[name]:
            raise _damage(folder, name)
    # Others may do the same now, or the folder be read-only: then it is done again.
    with contextlib.suppress(OSError):
        files.replace(folder / "checked.json", checked)


def _stamps(folder):
    """Of each file, what changes when it is written to or another takes its place."""
    stats = {name: (folder / name).stat() for name in _HASHED}
    return {name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats.items()}


def _sums(folder):
    with futures.ThreadPoolExecutor(len(_HASHED)) as pool:
        sums = pool.map(files.sha256, (folder / name for name in _HASHED))
        return dict(zip(_HASHED, sums, strict=True))


def _checked(stamps, sums):
    return json.dumps({"stamps": stamps, "sha256": sums}).encode()


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
