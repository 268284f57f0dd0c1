import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from softbottle import config, files
from softbottle.data import corpus, encoded
from softbottle.data.vocab import Corpus, Vocab

TEXT = {"train": "the cat sat\nthe dog\n", "valid": "the cat\n", "test": "a cat\n"}
FILES = ("train.int32", "valid.int32", "test.int32", "vocab.txt")


@pytest.fixture
def settings(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in TEXT.items():
        (folder / f"{name}.txt").write_text(text)
    data = config.Data()
    data.name, data.path = "text", str(folder)
    data.cache = str(tmp_path / "cache")
    return data


@pytest.fixture
def folder(settings):
    corpus.load(settings)
    (folder,) = pathlib.Path(settings.cache).iterdir()
    return folder


@pytest.fixture
def settled(monkeypatch):
    """Files count as old enough for their times to tell of every change."""
    monkeypatch.setattr(encoded, "SETTLED_NS", -(10**12))


@pytest.fixture
def hashed(monkeypatch):
    """The names of the files that are hashed from now on."""
    names, sha256 = [], files.sha256

    def counted(path):
        names.append(path.name)
        return sha256(path)

    monkeypatch.setattr(files, "sha256", counted)
    return names


def flip(path, bit=9):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def touch(path):
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("name", FILES)
def test_a_changed_bit_is_an_error_that_names_the_file(settings, folder, name):
    flip(folder / name)
    with pytest.raises(ValueError, match=f"{name} is not what was.*delete it"):
        corpus.load(settings)
    shutil.rmtree(folder)
    assert corpus.load(settings).vocab.words[0] == "the"


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("left", [0, 1, 4])
def test_a_file_cut_short_is_an_error_that_names_it(settings, folder, name, left):
    (folder / name).write_bytes((folder / name).read_bytes()[:left])
    with pytest.raises(ValueError, match=f"{name} is not what was.*delete it"):
        corpus.load(settings)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_missing_file_is_named(settings, folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is not what was.*delete it"):
        corpus.load(settings)


def test_a_sound_cache_is_hashed_once_per_change(settings, folder, settled, hashed):
    corpus.load(settings)
    hashed.clear()
    corpus.load(settings)
    assert hashed == []
    touch(folder / "train.int32")
    corpus.load(settings)
    assert sorted(hashed) == sorted(FILES)
    corpus.load(settings)
    assert len(hashed) == len(FILES)


def test_a_file_put_in_the_place_of_another_is_hashed(settings, folder, settled):
    corpus.load(settings)
    path = folder / "valid.int32"
    stat, other = path.stat(), folder / "other"
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)
    with pytest.raises(ValueError, match="valid.int32 is not"):
        corpus.load(settings)


def test_a_file_with_the_times_of_the_sound_one_is_hashed(settings, folder, settled):
    corpus.load(settings)
    path = folder / "valid.int32"
    stat = path.stat()
    flip(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ValueError, match="valid.int32 is not"):
        corpus.load(settings)


def test_a_file_that_changed_just_now_is_hashed_again(settings, folder, hashed):
    for times in (1, 2):
        corpus.load(settings)
        assert len(hashed) == times * len(FILES)
    assert not (folder / "checked.json").exists()


@pytest.mark.parametrize("left", [b"", b"{}", b"\xff", b'{"stamps": 3}'])
def test_what_was_checked_is_checked_again_if_no_one_knows(
    settings, folder, hashed, left
):
    (folder / "checked.json").write_bytes(left)
    assert corpus.load(settings).train.tolist() == [0, 1, 2, 3, 0, 4, 3]
    assert sorted(hashed) == sorted(FILES)


def test_a_cache_that_cannot_be_written_to_is_checked_each_time(
    settings, folder, settled, hashed, monkeypatch
):
    def refused(path, content):
        raise PermissionError(13, "read-only", str(path))

    monkeypatch.setattr(files, "replace", refused)
    for times in (1, 2):
        assert corpus.load(settings).train.tolist() == [0, 1, 2, 3, 0, 4, 3]
        assert len(hashed) == times * len(FILES)
    flip(folder / "train.int32")
    with pytest.raises(ValueError, match="train.int32 is not"):
        corpus.load(settings)


def test_a_cache_of_the_format_before_hashes_is_left_and_not_read(
    settings, folder, monkeypatch
):
    shutil.rmtree(folder)
    monkeypatch.setattr(corpus, "_FORMAT", 1)
    corpus.load(settings)
    (old,) = pathlib.Path(settings.cache).iterdir()
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["sha256"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.undo()
    assert corpus.load(settings).train.tolist() == [0, 1, 2, 3, 0, 4, 3]
    assert len(list(pathlib.Path(settings.cache).iterdir())) == 2


def test_equal_corpora_have_one_digest_however_they_were_made(settings, hashed):
    loaded = corpus.load(settings)
    made = Corpus(*(np.array(ids, np.int64) for ids in loaded[:3]), loaded.vocab)
    hashed.clear()
    digests = corpus.digest(loaded)
    assert hashed == [] and corpus.digest(made) == digests
    assert set(digests) == {"train", "valid", "test", "vocab"}
    for name, ids in zip(("train", "valid", "test"), loaded, strict=False):
        assert digests[name] == files.sha256(pathlib.Path(ids.filename))
    assert digests["vocab"] == loaded.vocab.digest


def test_another_text_has_another_digest(settings):
    loaded = corpus.load(settings)
    digests = corpus.digest(loaded)
    for other in (
        loaded._replace(valid=loaded.valid[:-1]),
        loaded._replace(valid=loaded.valid[::-1]),
        loaded._replace(vocab=Vocab(loaded.vocab.words[::-1])),
    ):
        found = corpus.digest(other)
        assert sum(found[name] != digests[name] for name in digests) == 1


def test_a_digest_is_of_numbers_and_not_of_how_they_lie_in_memory():
    vocab = Vocab(("<eos>", "a", "b"))
    ids = np.array([0, 9, 1, 9, 2, 9])[::2]
    digests = [
        corpus.digest(Corpus(*3 * [ids.astype(kind)], vocab))["train"]
        for kind in ("<i4", ">i4", np.int64, np.uint8)
    ]
    assert len(set(digests)) == 1


def test_the_files_of_a_corpus_are_named(settings):
    named = corpus.files(settings)
    folder = pathlib.Path(settings.path)
    assert named == {name: [folder / f"{name}.txt"] for name in TEXT}
    assert corpus.files(config.Data()) == {}


def test_an_open_corpus_outlives_its_folder(settings, folder):
    loaded = corpus.load(settings)
    shutil.rmtree(folder)
    assert loaded.train.tolist() == [0, 1, 2, 3, 0, 4, 3]
    assert (
        corpus.digest(loaded)["train"]
        == corpus.digest(loaded._replace(train=np.array(loaded.train)))["train"]
    )
    assert encoded.opened(folder, False) is None
