"""Atomic writes: a file is complete or not there, whenever its writer dies."""

import hashlib
import os
import pathlib


def replace(path: pathlib.Path, content: str | bytes) -> None:
    """Put new content into a file at once, unless it has it already.

    The content is written beside the file, flushed to the disk, and renamed over it. A
    process that is killed leaves the old file or the new one, and at most a file of
    the same name with `.tmp` behind it, which the next call overwrites.
    """
    raw = content.encode() if isinstance(content, str) else content
    if path.is_file() and path.read_bytes() == raw:
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sha256(path: pathlib.Path) -> str:
    """The hash of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
