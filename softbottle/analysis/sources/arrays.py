"""Arrays out of .npz and .npy files that anyone may have written.

A file says how large its arrays are before it holds them, and NumPy makes room for
what it says. So headers are read first, and compared with the bytes that are there;
compressed files may grow to `INFLATED` bytes or `RATIO` times their own length.
Only numbers and texts are read: no Python objects, and no complex numbers, whose
imaginary part every instrument would drop.

Axes: N positions.
"""

import dataclasses
import io
import math
import pathlib
import struct
import zipfile
import zlib

import numpy as np

from softbottle.analysis.capture import AttentionRows, Capture, Models

INFLATED = 2**28
RATIO = 16
_HEADER = 2**14  # bytes that a header has at most; NumPy's own limit is 10,000
_KINDS = "biufUS"
_OF_HEAD = ("hidden", "table", "bias", "labels")
_SIZES = ("parameters", "tokens", "loss")
# What zipfile and NumPy raise for a file that is not as it should be.
_DAMAGE = (
    *(ValueError, EOFError, OSError, RuntimeError, KeyError, OverflowError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)


def capture(path: pathlib.Path | str) -> Capture:
    """A head's, an attention layer's or several models' arrays from anywhere.

    Args:
        path: an .npz file with `hidden` [N, D] and `table` [V, D], and if there are
            any `bias` [V] and `labels` [N]; or with attention `logits` [R, L] and
            `values` [L, D]; or with `parameters`, `tokens` and `loss` [M] of trained
            models, and if there are any their `names` [M] and which are to be `fitted`
            [M]; or with all of these.

    Raises:
        ValueError: if the file is of another kind or larger than it says, or an array
            is missing, has another shape, is complex or is not finite.
    """
    arrays = load(path)
    try:
        return _capture(pathlib.Path(path).stem, arrays)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load(path: pathlib.Path | str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by their names.

    Raises:
        ValueError: if the file is of another kind, is damaged, says that an array is
            larger than it is, or holds what is neither numbers nor texts.
    """
    if not pathlib.Path(path).is_file():
        raise ValueError(f"there is no file {path}.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no .npz file.")
    try:
        with zipfile.ZipFile(path) as file:
            _check_members(file, pathlib.Path(path).stat().st_size)
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored)
    except _DAMAGE as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def load_one(path: pathlib.Path | str) -> np.ndarray:
    """The array of an .npy file.

    Raises:
        ValueError: as `load`.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    try:
        with path.open("rb") as file:
            _check_header("the array", file.read(_HEADER), path.stat().st_size)
        return np.load(path, allow_pickle=False)
    except _DAMAGE as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _capture(name, arrays):
    texts = [key for key, array in arrays.items() if array.dtype.kind in "US"]
    if set(texts) - {"names"}:
        raise ValueError(f"{texts} hold texts; only names may.")
    names, bare, rows, models = set(arrays), Capture(name), None, None
    if names >= {"hidden", "table"}:
        own = {key: arrays[key] for key in _OF_HEAD if key in arrays}
        bare = Capture.from_states(**own, name=name)
    if names >= {"logits", "values"}:
        rows = AttentionRows(arrays["logits"], arrays["values"])
    if names.issuperset(_SIZES):
        sizes = (arrays[key] for key in _SIZES)
        models = Models(*sizes, arrays.get("names"), arrays.get("fitted"))
    if bare.table_VE is None and rows is None and models is None:
        raise ValueError(
            "it needs hidden and table, or logits and values, or parameters, tokens "
            f"and loss; it has {sorted(arrays)}."
        )
    shapes = ", ".join(
        f"{key} {list(array.shape)}" for key, array in sorted(arrays.items())
    )
    return dataclasses.replace(
        bare, attention_rows=rows, models=models, facts=(f"Arrays: {shapes}.",)
    )


def _check_members(file, length):
    members = file.infolist()
    names = [member.filename for member in members]
    strange = [name for name in names if not name.endswith(".npy")]
    if strange or len(set(names)) < len(names):
        raise ValueError(f"arrays are files .npy of different names, not {names[:5]}.")
    methods = {member.compress_type for member in members}
    if not methods <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError("it is compressed in a way that NumPy does not use.")
    size = sum(member.file_size for member in members)
    if size > max(INFLATED, RATIO * length):
        raise ValueError(
            f"it would grow from {length:,} bytes to {size:,}; save the arrays with "
            "np.savez, not np.savez_compressed."
        )
    for member in members:
        with file.open(member) as stream:
            start = stream.read(_HEADER)
        _check_header(repr(member.filename[:40]), start, member.file_size)


def _check_header(name, start, size):
    """Raise unless the header of an array fits the bytes that are there."""
    stream = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(stream)
        if version[0] == 1:
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    except Exception as error:
        # NumPy evaluates the header as Python, which can fail in many ways.
        reason = f"{type(error).__name__} {str(error)[:80]!r}"
        raise ValueError(f"{name} has no header of an array: {reason}.") from error
    if dtype.kind not in _KINDS:
        raise ValueError(f"{name} is {str(dtype)[:40]}; give real numbers or texts.")
    needed, there = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if min(shape, default=1) < 1 or needed < 1 or needed != there:
        raise ValueError(
            f"{name} says it is {dtype} of shape {str(shape)[:80]}, which are "
            f"{str(needed)[:20]} bytes; there are {there:,}."
        )
