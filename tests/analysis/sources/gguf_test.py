"""The GGUF reader, against decoders that go number by number."""

import struct

import numpy as np
import pytest

from softbottle.analysis.sources import gguf

NUMBERS = {kind.name: number for number, kind in gguf.KINDS.items()}


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def setting(name, value):
    """A setting as the file has it: texts, whole numbers, fractions, lists of texts."""
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        items = b"".join(map(text, value))
        return text(name) + struct.pack("<IIQ", 9, 8, len(value)) + items
    kind, code = (6, "f") if isinstance(value, float) else (4, "I")
    return text(name) + struct.pack(f"<I{code}", kind, value)


def write(path, settings, tensors, alignment=32):
    """A GGUF file of (kind name, shape, bytes) by tensor name."""
    header, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        header += struct.pack("<IQ", NUMBERS[kind], len(data))
        data += raw
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings))
    start += b"".join(setting(*item) for item in settings.items()) + header
    path.write_bytes(start + b"\0" * (-len(start) % alignment) + data)
    return path


def write_arrays(path, settings, arrays):
    """A GGUF file of float32 arrays."""
    tensors = {
        name: ("F32", array.shape, array.astype("<f4").tobytes())
        for name, array in arrays.items()
    }
    return write(path, settings, tensors)


def half(raw, at):
    return struct.unpack_from("<e", raw, at)[0]


def nibble(raw, at, upper):
    return raw[at] >> 4 if upper else raw[at] & 15


def simple(raw, data, bits, centre):
    """Blocks of 32 with a fifth bit in the four bytes before the data, or without."""
    out = []
    for j in range(32):
        q = nibble(raw, data + j % 16, j >= 16)
        if bits == 5:
            q |= (struct.unpack_from("<I", raw, data - 4)[0] >> j & 1) << 4
        offset = half(raw, 2) if centre is None else -centre * half(raw, 0)
        out.append(half(raw, 0) * q + offset)
    return out


def k_scale(packed, j):
    """The 6-bit scale and offset of stretch j, as ggml's get_scale_min_k4."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return (
        packed[j + 4] & 15 | packed[j - 4] >> 6 << 4,
        packed[j + 4] >> 4 | packed[j] >> 6 << 4,
    )


def k_block(raw, data, high):
    out = []
    for i in range(256):
        j, at = divmod(i, 32)
        q = nibble(raw, data + 32 * (j // 2) + at, j % 2)
        if high is not None:
            q += 16 * (raw[high + at] >> j & 1)
        scale, offset = k_scale(raw[4:16], j)
        out.append(half(raw, 0) * scale * q - half(raw, 2) * offset)
    return out


def six_bits(raw):
    out = []
    for i in range(256):
        part, rest = divmod(i, 128)
        row, at = divmod(rest, 32)
        low = nibble(raw, 64 * part + 32 * (row % 2) + at, row >= 2)
        q = low | (raw[128 + 32 * part + at] >> 2 * row & 3) << 4
        scale = struct.unpack_from("b", raw, 192 + i // 16)[0]
        out.append(half(raw, 208) * scale * (q - 32))
    return out


ORACLES = {
    "F32": lambda raw: struct.unpack("<f", raw),
    "F16": lambda raw: struct.unpack("<e", raw),
    "BF16": lambda raw: struct.unpack("<f", b"\0\0" + raw),
    "Q4_0": lambda raw: simple(raw, 2, 4, 8),
    "Q4_1": lambda raw: simple(raw, 4, 4, None),
    "Q5_0": lambda raw: simple(raw, 6, 5, 16),
    "Q5_1": lambda raw: simple(raw, 8, 5, None),
    "Q8_0": lambda raw: [half(raw, 0) * q for q in struct.unpack("32b", raw[2:])],
    "Q4_K": lambda raw: k_block(raw, 16, None),
    "Q5_K": lambda raw: k_block(raw, 48, 16),
    "Q6_K": six_bits,
}


def random_blocks(kind, count):
    """Blocks of random bytes whose scales are ordinary numbers."""
    rng = np.random.default_rng(kind.size)
    raw_NB = rng.integers(0, 256, (count, kind.size), dtype=np.uint8)
    scales = (208,) if kind.name == "Q6_K" else (0, 2)[: 1 + kind.name.endswith("1")]
    scales = (0, 2) if kind.name in ("Q4_K", "Q5_K") else scales
    for at in () if kind.values == 1 else scales:
        raw_NB[:, at : at + 2] = rng.normal(size=(count, 1)).astype("<f2").view("u1")
    if kind.values == 1:
        raw_NB[:, -1] &= 63  # no infinities
    return raw_NB


@pytest.mark.parametrize("kind", gguf.KINDS.values(), ids=lambda kind: kind.name)
def test_every_kind_is_the_numbers_it_means(kind, tmp_path):
    raw_NB = random_blocks(kind, 6)
    shape = (3, 2 * kind.values)
    path = write(tmp_path / "a.gguf", {}, {"w": (kind.name, shape, raw_NB.tobytes())})
    expected = np.array([ORACLES[kind.name](row.tobytes()) for row in raw_NB])
    found = gguf.read(path).array("w")
    assert found.dtype == np.float32 and found.shape == shape
    np.testing.assert_allclose(found, expected.reshape(shape), rtol=1e-6, atol=1e-5)


def test_settings_and_tensors_are_found_at_their_places(tmp_path):
    arrays = {"a": np.arange(5.0), "b": np.arange(6.0).reshape(2, 3)}
    settings = {"name": "x", "count": 7, "rate": 0.5, "words": ["Ġa", "b"]}
    file = gguf.read(write_arrays(tmp_path / "a.gguf", settings, arrays))
    assert file.settings == settings
    for name, array in arrays.items():
        np.testing.assert_array_equal(file.array(name), array)


def test_a_file_that_is_no_gguf_or_is_cut_short_says_so(tmp_path):
    path = tmp_path / "a.gguf"
    write_arrays(path, {"name": "x"}, {"w": np.ones((4, 4))})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="cut short: w"):
        gguf.read(path).array("w")
    for size in range(4, 60, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut short or damaged"):
            gguf.read(path)
    path.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ValueError, match="no GGUF file"):
        gguf.read(path)
    with pytest.raises(ValueError, match="is no file"):
        gguf.read(tmp_path / "none.gguf")


def test_a_missing_tensor_and_an_unknown_kind_are_named(tmp_path, monkeypatch):
    path = write_arrays(tmp_path / "a.gguf", {}, {"w": np.ones(3)})
    with pytest.raises(ValueError, match="no tensor 'v'"):
        gguf.read(path).array("v")
    monkeypatch.delitem(gguf.KINDS, 0)
    with pytest.raises(ValueError, match="kind 0; only F16, Q4_0"):
        gguf.read(path).array("w")


def scalar(name, kind, code, value):
    return text(name) + struct.pack(f"<I{code}", kind, value)


def raw_file(path, settings=(), tensors=(), data=b"", counts=None):
    """A GGUF file of settings and tensors that are bytes already."""
    counts = counts or (len(tensors), len(settings))
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join((*settings, *tensors))
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


def tensor(name, shape, kind=0, start=0):
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + axes + struct.pack("<IQ", kind, start)


LARGE = 2**63 - 1
IMPOSSIBLE = {
    "alignment 0": ([scalar("general.alignment", 4, "I", 0)], [], "power of two"),
    "alignment 24": ([scalar("general.alignment", 4, "I", 24)], [], "power of two"),
    "alignment -32": ([scalar("general.alignment", 5, "i", -32)], [], "power of two"),
    "alignment 1.5": ([scalar("general.alignment", 6, "f", 1.5)], [], "power of two"),
    "alignment true": ([scalar("general.alignment", 7, "?", True)], [], "power of two"),
    "alignment 'x'": ([setting("general.alignment", "x")], [], "power of two"),
    "a type": ([text("a") + struct.pack("<II", 13, 0)], [], "of type 13"),
    "nested arrays": (
        [text("a") + struct.pack("<I", 9) + 500 * struct.pack("<IQ", 9, 1)],
        [],
        "of type 9",
    ),
    "a long list": ([text("a") + struct.pack("<IIQ", 9, 0, LARGE)], [], "cut short"),
    "many texts": ([text("a") + struct.pack("<IIQ", 9, 8, LARGE)], [], "cut short"),
    "a long text": ([text("a") + struct.pack("<IQ", 8, LARGE)], [], "cut short"),
    "no text": ([text("a") + struct.pack("<IQ", 8, 1) + b"\xff"], [], "codec"),
    "a setting twice": (2 * [setting("a", 1)], [], "a is there twice"),
    "a tensor twice": ([], 2 * [tensor("w", (1,))], "w is there twice"),
    "five axes": ([], [tensor("w", 5 * (1,))], "5 axes"),
    "no axes": ([], [tensor("w", ())], "0 axes"),
    "nothing in it": ([], [tensor("w", (3, 0))], "shape"),
    "a large tensor": ([], [tensor("w", (2**31, 1))], "cut short: w"),
    "an overflow": ([], [tensor("w", (2**32, 2**32))], "cut short: w"),
    "a far place": ([], [tensor("w", (1,), start=2**64 - 8)], "cut short: w"),
    "half a block": ([], [tensor("w", (2, 16), kind=2)], "blocks of Q4_0"),
    "one over another": ([], [tensor(n, (9,)) for n in "abcdef"], "over one another"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_file_that_says_what_cannot_be_is_one_error_that_names_it(case, tmp_path):
    settings, tensors, message = IMPOSSIBLE[case]
    path = raw_file(tmp_path / "a.gguf", settings, tensors, bytes(64))
    with pytest.raises(ValueError, match=message) as refusal:
        gguf.read(path)
    assert "a.gguf" in str(refusal.value)


@pytest.mark.parametrize("counts", [(LARGE, 0), (0, LARGE), (0, 3)])
def test_more_settings_or_tensors_than_there_is_room_for_are_an_error(counts, tmp_path):
    path = raw_file(tmp_path / "a.gguf", [setting("a", 1)], counts=counts)
    with pytest.raises(ValueError, match="a.gguf is cut short or damaged"):
        gguf.read(path)
