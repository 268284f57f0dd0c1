"""Arrays out of .npz and .npy files that anyone may have written.

A file says how large its arrays are before it holds them, and NumPy makes room for
what it says. So headers are read first, and compared with the bytes that are there;
compressed files may grow to `INFLATED` bytes or `RATIO` times their own length.
Only numbers and texts are read: no Python objects, and no complex numbers, whose
imaginary part every instrument would drop.
"""

import io
import math
import pathlib
import struct
import zipfile
import zlib

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

INFLATED = 2**28
RATIO = 16
_HEADER = 2**14  # bytes that a header has at most; NumPy's own limit is 10,000
_KINDS = "biufUS"
# What zipfile and NumPy raise for a file that is not as it should be.
_DAMAGE = (ValueError, EOFError, OSError, RuntimeError, KeyError, OverflowError)
_DAMAGE += (struct.error, zipfile.BadZipFile, zlib.error)


def load(path: pathlib.Path | str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by their names.

    Raises:
        ValueError: if the file is of another kind, is damaged, says that an array is
            larger than it is, or holds what is neither numbers nor texts.
    """
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
        raise ValueError(f"{path} is no file.")
    try:
        with path.open("rb") as file:
            _check_header("the array", file.read(_HEADER), path.stat().st_size)
        return np.load(path, allow_pickle=False)
    except _DAMAGE as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def real(name: str, values: ArrayLike, dtype: DTypeLike = np.float64) -> np.ndarray:
    """Real numbers in a floating type.

    Raises:
        ValueError: if they are complex: a cast would drop their imaginary part.
    """
    if np.iscomplexobj(values):
        raise ValueError(
            f"{name} must be real, got {np.asarray(values).dtype}; give its real and "
            "imaginary parts as two arrays."
        )
    return np.asarray(values, dtype)


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
