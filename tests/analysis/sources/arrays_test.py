"""Files of arrays: what they say is compared with what they hold."""

import io
import zipfile

import numpy as np
import pytest

from softbottle.analysis import capture, inspection
from softbottle.analysis.instruments import (
    argmax,
    gradient,
    lowrank,
    mixture,
    ngram,
    normalizers,
    rank,
    saturation,
    scaling,
    turns,
)
from softbottle.analysis.sources import arrays

COMPLEX = np.ones((30, 4)) + 1j


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(text, version=1, length=None):
    raw = text.encode("latin1")
    size = len(raw) if length is None else length
    prefix = b"\x93NUMPY" + bytes([version, 0])
    return prefix + size.to_bytes(2 if version == 1 else 4, "little") + raw


def described(shape, descr="'<f4'"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"


def write(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, raw in members:
            file.writestr(name, raw)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_wrote_is_what_is_read(tmp_path, save):
    random = np.random.default_rng(0)
    made = {
        "f4": random.normal(size=(3, 5)).astype(np.float32),
        "transposed": random.normal(size=(3, 5)).T,
        "i8": random.integers(-9, 9, 7),
        "big": np.arange(6, dtype=">u2").reshape(1, 2, 3),
        "bools": np.array([True, False]),
        "scalar": np.float64(3.5),
        "names": np.array(["a", "na\u00efve"]),
        "half": np.arange(3, dtype=np.float16),
    }
    save(tmp_path / "a.npz", **made)
    found = arrays.load(tmp_path / "a.npz")
    assert found.keys() == made.keys()
    for name, array in made.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == np.asarray(array).dtype
        np.save(tmp_path / "a.npy", array)
        np.testing.assert_array_equal(arrays.load_one(tmp_path / "a.npy"), array)


LYING = {
    "a large shape": header(described((2**31, 2**20))) + bytes(64),
    "an overflow": header(described((2**32, 2**32, 2**32))) + bytes(64),
    "one row too many": header(described((17, 1))) + bytes(64),
    "one row too few": header(described((15, 1))) + bytes(64),
    "nothing in it": header(described((0, 2**62))),
    "texts of nothing": header(described((2**40,), "'<U0'")),
    "negative": header(described((-4, -4))) + bytes(64),
    "many axes": header(described(tuple(70 * [1]))) + bytes(4),
    "a huge entry": header(described((4,), "'<U2000000000'")) + bytes(64),
    "a long header": header(described((16,)), 2, 2**32 - 1) + bytes(64),
    "a deep header": header("(" * 9000) + bytes(64),
    "minus signs": header("-" * 9000 + "1") + bytes(64),
    "no shape": header("{'descr': '<f4', 'fortran_order': False}") + bytes(64),
    "a text for a shape": header(described("'x'")) + bytes(64),
    "a list for a type": header(described((16,), "[1, 2]")) + bytes(64),
    "another version": b"\x93NUMPY\x09\x00" + header(described((16,)))[8:],
    "no header": b"hidden",
    "empty": b"",
    "objects": npy(np.array([{}, 1], object)),
    "records": npy(np.zeros(3, [("a", "f4")])),
    "complex": npy(np.ones(3, np.complex64)),
    "dates": npy(np.zeros(3, "M8[s]")),
    "void": npy(np.zeros(3, "V8")),
}


@pytest.mark.parametrize("case", LYING)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_lie_is_one_error_that_names_the_file(case, method, tmp_path):
    path = write(tmp_path / "a.npz", [("hidden.npy", LYING[case])], method)
    with pytest.raises(ValueError, match="a.npz cannot be read"):
        arrays.load(path)
    (tmp_path / "a.npy").write_bytes(LYING[case])
    with pytest.raises(ValueError, match="a.npy cannot be read"):
        arrays.load_one(tmp_path / "a.npy")


def test_a_file_that_would_grow_beyond_the_limit_is_refused_unread(
    tmp_path, monkeypatch
):
    zeros = npy(np.zeros(50_000))
    path = write(tmp_path / "a.npz", [("a.npy", zeros)], zipfile.ZIP_DEFLATED)
    assert arrays.load(path)["a"].shape == (50_000,)
    monkeypatch.setattr(arrays, "INFLATED", 100_000)
    with pytest.raises(ValueError, match=r"would grow .* to 400,128; .*np.savez"):
        arrays.load(path)
    noise = np.random.default_rng(0).normal(size=50_000)
    np.savez_compressed(path, a=noise)
    np.testing.assert_array_equal(arrays.load(path)["a"], noise)


@pytest.mark.parametrize("said", [2**40, 2**28])
def test_a_member_whose_size_is_a_lie_is_refused(tmp_path, said):
    lying = header(described(((said - 128) // 4,)).rstrip("\n").ljust(117) + "\n")
    path = write(tmp_path / "a.npz", [("hidden.npy", lying)], zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(path, "a") as file:
        file.infolist()[0].file_size = said
        file._didModify = True
    with pytest.raises(ValueError, match="a.npz cannot be read"):
        arrays.load(path)


def test_strange_members_are_refused(tmp_path):
    good = npy(np.ones(3))
    path = tmp_path / "a.npz"
    for members in ([("a.txt", good)], [("a", good)]):
        with pytest.raises(ValueError, match="files .npy of different names"):
            arrays.load(write(path, members))
    with pytest.warns(UserWarning, match="Duplicate"):
        write(path, 2 * [("a.npy", good)])
    with pytest.raises(ValueError, match="files .npy of different names"):
        arrays.load(path)
    # Its decoder takes the size of its window, up to 4 GiB, from the file.
    with pytest.raises(ValueError, match="compressed in a way"):
        arrays.load(write(path, [("a.npy", good)], zipfile.ZIP_LZMA))


def test_a_changed_bit_of_the_content_is_found(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.arange(100.0))
    raw = bytearray((tmp_path / "a.npz").read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "a.npz").write_bytes(raw)
    with pytest.raises(ValueError, match="a.npz cannot be read: .*CRC"):
        arrays.load(tmp_path / "a.npz")


DOORS = {
    "spectrum": lambda: rank.spectrum(COMPLEX, np.float64),
    "anisotropy": lambda: saturation.anisotropy(COMPLEX),
    "head": lambda: saturation.head(COMPLEX),
    "layers": lambda: saturation.layers([COMPLEX]),
    "turn": lambda: turns.turn(np.arange(9), COMPLEX[:9, 0]),
    "reach": lambda: argmax.reach(COMPLEX, None),
    "reach, bias": lambda: argmax.reach(COMPLEX.real, COMPLEX[:, 0]),
    "softmax": lambda: normalizers.softmax(COMPLEX),
    "sparsemax": lambda: normalizers.sparsemax(COMPLEX),
    "mixing": lambda: mixture.mixing(COMPLEX, COMPLEX),
    "fit": lambda: scaling.fit(*COMPLEX.T[:3]),
    "gap": lambda: scaling.PYTHIA.gap(1e8, 1e9, COMPLEX),
    "w_error": lambda: ngram.w_error(COMPLEX, 2),
    "lowrank": lambda: lowrank.train(COMPLEX, np.zeros(30, int), 3, [1]),
    "gradient": lambda: gradient.measure(
        np.zeros((30, 1)),
        COMPLEX[:, None],
        COMPLEX.real,
        np.zeros(30),
        np.zeros(30, int),
    ),
    "captured": lambda: capture.Capture.from_states([COMPLEX.real], COMPLEX),
}


@pytest.mark.parametrize("door", DOORS)
def test_complex_numbers_are_refused_and_not_cut(door):
    with pytest.raises(ValueError, match="must be real|complex"):
        DOORS[door]()


def make_head(**changes):
    random = np.random.default_rng(0)
    made = {"hidden": random.normal(size=(30, 4)), "table": random.normal(size=(9, 4))}
    return made | changes


BAD_HEADS = {
    "bias of another length": make_head(bias=np.zeros(8)),
    "bias not finite": make_head(bias=np.full(9, np.nan)),
    "labels of another length": make_head(labels=np.zeros(29, int)),
    "labels that are no words": make_head(labels=np.full(30, 9)),
    "labels with a fraction": make_head(labels=np.zeros(30)),
    "texts": make_head(hidden=np.full((30, 4), "x")),
    "complex": make_head(hidden=COMPLEX),
    "logits on one axis": {"logits": np.ones(3), "values": np.ones((3, 2))},
    "logits of another length": {"logits": np.ones((2, 4)), "values": np.ones((3, 2))},
    "losses of other models": {
        "parameters": np.array([1e7, 1e9]),
        "tokens": np.array([1e9]),
        "loss": np.array([3.0, 2.0]),
    },
    "losses on two axes": {
        name: np.ones((2, 2)) for name in ("parameters", "tokens", "loss")
    },
}


@pytest.mark.parametrize("case", BAD_HEADS)
def test_arrays_that_cannot_be_are_one_error_that_names_the_file(case, tmp_path):
    np.savez(tmp_path / "a.npz", **BAD_HEADS[case])
    with pytest.raises(ValueError, match="a.npz"):
        inspection.of_arrays(tmp_path / "a.npz")
