"""Settings and tensors of a GGUF file, the quantised ones as the numbers they mean.

A file is a header, named settings, named tensors' shapes and places, and their bytes.
A quantised tensor is cut into blocks along its rows. With d and m a block's scale and
offset in float16, q an integer of 4 to 8 bits,

    Q4_0, Q5_0   x = d (q - 8), d (q - 16)        Q8_0   x = d q
    Q4_1, Q5_1   x = d q + m                      Q6_K   x = d s (q - 32)
    Q4_K, Q5_K   x = d s q - m t

s and t are integers that 16 or 32 neighbours share in a block of 256. Low halves of
bytes are one stretch of neighbours and high halves the next.

Every count and size is compared with the length of the file before anything of that
size is allocated, whatever the file says.

Axes: N blocks, B bytes of a block, Q values of one.
"""

import math
import mmap
import pathlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from softbottle.data import vocab

_MAGIC = b"GGUF"
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_AXES = 4  # of a tensor, at most, as in ggml


class Tensor(NamedTuple):
    """Where a tensor lies: `shape` in NumPy's order, `kind` a number in `KINDS`."""

    shape: tuple[int, ...]
    kind: int
    start: int


class File(NamedTuple):
    """An open file: its settings by name, its tensors by name, and its bytes."""

    path: pathlib.Path
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    content: mmap.mmap

    def tensor(self, name: str) -> Tensor:
        """Where a tensor lies.

        Raises:
            ValueError: if there is none of this name.
        """
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name!r}.")
        return self.tensors[name]

    def array(self, name: str) -> np.ndarray:
        """A tensor in float32.

        Raises:
            ValueError: if there is none of this name, or its kind is not among `KINDS`.
        """
        tensor = self.tensor(name)
        if tensor.kind not in KINDS:
            raise ValueError(
                f"{name} of {self.path} is of kind {tensor.kind}; only "
                f"{', '.join(kind.name for kind in KINDS.values())} can be read."
            )
        kind = KINDS[tensor.kind]
        raw = np.frombuffer(self.content, np.uint8, _size(tensor), tensor.start)
        values_NQ = kind.decode(raw.reshape(-1, kind.size))
        return values_NQ.astype(np.float32, copy=False).reshape(tensor.shape)


class Kind(NamedTuple):
    """Blocks of `values` numbers in `size` bytes, and bytes [N, size] -> numbers."""

    name: str
    values: int
    size: int
    decode: Callable[[np.ndarray], np.ndarray]


def read(path: pathlib.Path | str) -> File:
    """Open a GGUF file; tensors stay on disk until they are asked for.

    Raises:
        ValueError: if it is no GGUF file of version 2 or 3, is cut short, or says of
            itself what cannot be.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file.")
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError(f"{path} is no GGUF file: it does not start with GGUF.")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(content)
    try:
        settings, tensors = _header(cursor)
    except (ValueError, struct.error) as error:
        raise ValueError(f"{path} is cut short or damaged: {error}") from error
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(
            f"general.alignment of {path} must be a power of two, got "
            f"{str(alignment)[:40]!r}."
        )
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: tensor._replace(start=start + tensor.start)
        for name, tensor in tensors.items()
    }
    _check_room(path, tensors, start, len(content))
    return File(path, settings, tensors, content)


class _Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, content):
        self._content, self.at = content, 4

    def take(self, code):
        values = struct.unpack_from("<" + code, self._content, self.at)
        self.at += struct.calcsize("<" + code)
        return values

    def many(self, count, code):
        # A count beyond the file is no format that `struct` takes.
        return self.take(f"{min(count, len(self._content) + 1)}{code}")

    def text(self):
        (raw,) = self.many(*self.take("Q"), "s")
        return raw.decode()

    def value(self, kind):
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(_code(kind))[0]
        inner, count = self.take("IQ")
        if inner == _STRING:
            return [self.text() for _ in range(count)]
        return list(self.many(count, _code(inner)))


def _code(kind):
    """Of a scalar; an array in an array, which ggml refuses too, is none."""
    if kind not in _SCALARS:
        raise ValueError(f"a setting of type {kind} cannot be read.")
    return _SCALARS[kind]


def _header(cursor):
    version, tensor_count, setting_count = cursor.take("IQQ")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not among 2 and 3.")
    settings, tensors = {}, {}
    for _ in range(setting_count):
        name = _new(cursor.text(), settings)
        settings[name] = cursor.value(*cursor.take("I"))
    for _ in range(tensor_count):
        name = _new(cursor.text(), tensors)
        (axes,) = cursor.take("I")
        shape = cursor.many(min(axes, _AXES + 1), "Q")[::-1]
        if not 1 <= axes <= _AXES or 0 in shape:
            raise ValueError(f"a tensor of {axes} axes has the shape {shape}.")
        tensors[name] = Tensor(shape, *cursor.take("IQ"))
    return settings, tensors


def _new(name, named):
    if name in named:
        raise ValueError(f"{vocab.printable(name[:40])} is there twice.")
    return name


def _size(tensor):
    """Bytes of a tensor, 0 if its kind is unknown; None if rows are no whole blocks."""
    kind = KINDS.get(tensor.kind)
    if kind is None:
        return 0
    if math.prod(tensor.shape[-1:]) % kind.values:
        return None
    return math.prod(tensor.shape) // kind.values * kind.size


def _check_room(path, tensors, start, length):
    """Raise unless the tensors lie side by side in the file's bytes from `start`."""
    total = 0
    for name, tensor in tensors.items():
        shown, size = vocab.printable(name[:40]), _size(tensor)
        if size is None:
            raise ValueError(
                f"{shown} of {path} has the shape {tensor.shape}, which is no whole "
                f"number of blocks of {KINDS[tensor.kind].name}."
            )
        if tensor.start + size > length:
            raise ValueError(f"{path} is cut short: {shown} is not all there.")
        total += size
    if total > max(length - start, 0):
        raise ValueError(f"{path} is damaged: its tensors lie over one another.")


def _half(raw_NB, at):
    """The float16 that starts at a byte of each block, as a column."""
    return raw_NB[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(raw_NB):
    """Low halves of some bytes, then their high halves."""
    return np.concatenate([raw_NB & 15, raw_NB >> 4], axis=-1)


def _fifth_bits(raw_NB):
    """Bit j of a block's four bytes belongs to its number j; here times 16."""
    bits_NQ = np.unpackbits(raw_NB.copy(), axis=-1, bitorder="little")
    return bits_NQ << 4


def _q4_0(raw_NB):
    return _half(raw_NB, 0) * (_nibbles(raw_NB[:, 2:]).astype(np.float32) - 8)


def _q4_1(raw_NB):
    return _half(raw_NB, 0) * _nibbles(raw_NB[:, 4:]) + _half(raw_NB, 2)


def _q5_0(raw_NB):
    q_NQ = _nibbles(raw_NB[:, 6:]) | _fifth_bits(raw_NB[:, 2:6])
    return _half(raw_NB, 0) * (q_NQ.astype(np.float32) - 16)


def _q5_1(raw_NB):
    q_NQ = _nibbles(raw_NB[:, 8:]) | _fifth_bits(raw_NB[:, 4:8])
    return _half(raw_NB, 0) * q_NQ + _half(raw_NB, 2)


def _q8_0(raw_NB):
    return _half(raw_NB, 0) * raw_NB[:, 2:].copy().view(np.int8)


def _scales(raw_NB):
    """Eight scales and eight offsets of 6 bits from 12 bytes, as [N, 8, 1] each.

    The first four of each are the low 6 bits of bytes 0-3 and 4-7; the last four have
    their low 4 bits in the halves of bytes 8-11 and the rest on top of the first four.
    """
    low_N4, high_N4, rest_N4 = raw_NB[:, :4], raw_NB[:, 4:8], raw_NB[:, 8:]
    s_N8 = [low_N4 & 63, (rest_N4 & 15) | (low_N4 >> 6 << 4)]
    t_N8 = [high_N4 & 63, (rest_N4 >> 4) | (high_N4 >> 6 << 4)]
    return (np.concatenate(pair, axis=1)[:, :, None] for pair in (s_N8, t_N8))


def _scaled(raw_NB, q_N8Q):
    """d s q - m t for eight stretches of 32 numbers."""
    s_N81, t_N81 = _scales(raw_NB[:, 4:16])
    d_N11, m_N11 = _half(raw_NB, 0)[:, :, None], _half(raw_NB, 2)[:, :, None]
    return ((d_N11 * s_N81) * q_N8Q - m_N11 * t_N81).reshape(len(raw_NB), -1)


def _q4_k(raw_NB):
    return _scaled(
        raw_NB, _nibbles(raw_NB[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    )


def _q5_k(raw_NB):
    low_N8Q = _nibbles(raw_NB[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high_N8Q = raw_NB[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]
    return _scaled(raw_NB, low_N8Q | (high_N8Q & 1) << 4)


def _q6_k(raw_NB):
    low_N24Q = _nibbles(raw_NB[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shift_4 = np.arange(0, 8, 2, dtype=np.uint8)
    high_N24Q = raw_NB[:, 128:192].reshape(-1, 2, 1, 32) >> shift_4[:, None]
    q_NQ = (low_N24Q | (high_N24Q & 3) << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    s_N161 = raw_NB[:, 192:208].copy().view(np.int8)[:, :, None]
    return (_half(raw_NB, 208)[:, :, None] * s_N161 * q_NQ).reshape(len(raw_NB), -1)


def _bf16(raw_NB):
    wide_N1 = raw_NB.copy().view(np.uint16).astype(np.uint32) << 16
    return wide_N1.view(np.float32)


KINDS = {
    0: Kind("F32", 1, 4, lambda raw_NB: raw_NB.copy().view(np.float32)),
    1: Kind("F16", 1, 2, lambda raw_NB: _half(raw_NB, 0)),
    2: Kind("Q4_0", 32, 18, _q4_0),
    3: Kind("Q4_1", 32, 20, _q4_1),
    6: Kind("Q5_0", 32, 22, _q5_0),
    7: Kind("Q5_1", 32, 24, _q5_1),
    8: Kind("Q8_0", 32, 34, _q8_0),
    12: Kind("Q4_K", 256, 144, _q4_k),
    13: Kind("Q5_K", 256, 176, _q5_k),
    14: Kind("Q6_K", 256, 210, _q6_k),
    30: Kind("BF16", 1, 2, _bf16),
}
