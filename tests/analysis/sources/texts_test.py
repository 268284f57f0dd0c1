"""Texts of any kind as numbers, and side by side."""

import gzip
import lzma

import numpy as np
import pytest

from softbottle.analysis import inspection
from softbottle.analysis.instruments import ngram
from softbottle.analysis.sources import texts


def make_folder(path, lines):
    path.mkdir()
    (path / "1.txt").write_text(lines[0])
    with gzip.open(path / "2.gz", "wt") as file:
        file.write(lines[1])
    (path / "deeper").mkdir()
    with lzma.open(path / "deeper" / "3.xz", "wt") as file:
        file.write(lines[2])
    return path


def test_the_files_below_a_folder_are_one_text(tmp_path):
    folder = make_folder(tmp_path / "a", ["b a a", " ç a", "b a d\n"])
    ids = texts.frequent(texts.words(folder), 100)
    assert ids.tolist() == [1, 0, 0, 2, 0, 1, 0, 3, 4]


def test_words_beyond_the_most_frequent_are_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x y x y x z w")
    assert texts.frequent(texts.words(path), 3).tolist() == [0, 1, 0, 1, 0, 2, 2]


def test_texts_are_compared_over_as_many_words_each(tmp_path):
    rng = np.random.default_rng(0)
    lengths = {"short": 500, "long": 900}
    for name, length in lengths.items():
        words = " ".join(map(str, rng.integers(0, 20, length)))
        (tmp_path / name).write_text(words)
    paths = [tmp_path / name for name in lengths]
    (section,) = inspection.of_texts(paths, vocab=50)
    assert section.numbers["words"] == 500
    ids = texts.frequent(texts.words(tmp_path / "long")[:500], 50)
    table = ngram.next_word(ids, 50, 2)
    expected = np.linalg.svd(table.matrix_CV.toarray(), compute_uv=False)
    found = section.numbers["long"]
    assert found["frobenius"] == pytest.approx(np.linalg.norm(expected))
    assert found["sigma"][0] == pytest.approx(expected[0])


def test_bad_texts_are_errors(tmp_path):
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        texts.words(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no words"):
        texts.words(tmp_path / "empty")
    (tmp_path / "a").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        texts.words(tmp_path / "a")
    with pytest.raises(ValueError, match="different names"):
        texts.captures([tmp_path / "a", tmp_path / "a"])


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path):
    (tmp_path / "1").write_bytes(b"\xef\xbb\xbfa b a")
    with gzip.open(tmp_path / "2.gz", "wb") as file:
        file.write(b"\xef\xbb\xbfa b a")
    assert texts.words(tmp_path).tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    "name, pack", [("a.gz", gzip.compress), ("a.xz", lzma.compress)]
)
@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"no" + raw])
def test_a_damaged_file_is_named(tmp_path, name, pack, damage):
    (tmp_path / name).write_bytes(damage(pack(b"some words\n" * 100)))
    with pytest.raises(ValueError, match=f"{name} is damaged or cut short"):
        texts.words(tmp_path)
