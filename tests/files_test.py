import hashlib

import pytest

from softbottle import files


def test_content_is_replaced_whole(tmp_path):
    path = tmp_path / "words.txt"
    files.replace(path, "one\n")
    files.replace(path, b"two\n")
    assert path.read_text() == "two\n"
    assert [child.name for child in tmp_path.iterdir()] == ["words.txt"]


def test_equal_content_is_not_written_again(tmp_path):
    path = tmp_path / "words.txt"
    files.replace(path, "one\n")
    before = path.stat()
    files.replace(path, "one\n")
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "words.txt"
    files.replace(path, "one\n")

    def full_disk(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        files.replace(path, "two\n")
    assert path.read_text() == "one\n"


def test_what_a_killed_write_left_behind_is_overwritten(tmp_path):
    path = tmp_path / "words.txt"
    (tmp_path / "words.txt.tmp").write_text("hal")
    files.replace(path, "whole\n")
    assert [child.name for child in tmp_path.iterdir()] == ["words.txt"]


def test_sha256_is_that_of_the_bytes(tmp_path):
    path = tmp_path / "raw"
    path.write_bytes(bytes(range(256)))
    assert files.sha256(path) == hashlib.sha256(bytes(range(256))).hexdigest()
