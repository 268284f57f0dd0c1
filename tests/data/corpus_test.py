import gzip
import hashlib
import json
import lzma
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from softbottle import config
from softbottle.data import corpus, sources, synthetic
from softbottle.data.vocab import Corpus, Vocab
from tests import CORPORA, ROOT

SHARED = CORPORA
TEXT = {
    "train": "the cat sat\n\n the  dog na\u00efve\r\nthe cat\n",
    "valid": "the bird\n",
    "test": "A Cat ",
}
SPLITS = tuple(TEXT)


@pytest.fixture
def settings(tmp_path):
    """The settings of a little text, which is written too."""
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in TEXT.items():
        (folder / f"{name}.txt").write_bytes(text.encode())
    return make_settings("text", folder, tmp_path)


def make_settings(name, folder, tmp_path):
    data = config.Data()
    data.name, data.path, data.cache = name, str(folder), str(tmp_path / "cache")
    return data


def expected_words(text):
    lines = text.removesuffix("\n").split("\n")
    return [word for line in lines for word in [*line.split(), "<eos>"]]


def words_of(made):
    return {name: made.vocab.decode(getattr(made, name)) for name in SPLITS}


def cached(data):
    return sorted(path.name for path in pathlib.Path(data.cache).iterdir())


def write_lm1b(folder, training, heldout):
    for kind, texts in (("training", training), ("heldout", heldout)):
        inner = folder / f"{kind}-monolingual.tokenized.shuffled"
        inner.mkdir(parents=True)
        for name, raw in texts.items():
            (inner / name).write_bytes(raw)
    return folder


def test_ids_are_the_words_with_eos_after_each_line(settings):
    made = corpus.load(settings)
    assert words_of(made) == {n: expected_words(text) for n, text in TEXT.items()}
    every = [word for text in TEXT.values() for word in expected_words(text)]
    assert made.vocab.words == tuple(dict.fromkeys(every))
    assert made.vocab.unk is None


def test_ids_are_mapped_read_only_and_not_in_memory(settings):
    made = corpus.load(settings)
    for ids in made[:3]:
        assert isinstance(ids, np.memmap) and not ids.flags.writeable
        assert ids.dtype == np.int32


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 21])
def test_the_size_of_the_chunks_changes_nothing(settings, monkeypatch, size):
    monkeypatch.setattr(sources, "CHUNK_BYTES", size)
    made = corpus.load(settings)
    assert words_of(made) == {n: expected_words(text) for n, text in TEXT.items()}


@pytest.mark.parametrize("size", [4, 1 << 24])
def test_frequent_words_are_those_of_the_training_text(settings, monkeypatch, size):
    monkeypatch.setattr(sources, "CHUNK_BYTES", size)
    (pathlib.Path(settings.path) / "valid.txt").write_text("bird bird bird bird the\n")
    settings.vocab_size, settings.lowercase = 4, True
    made = corpus.load(settings)
    assert made.vocab.words == ("<unk>", "<eos>", "the", "cat")
    assert words_of(made)["valid"] == ["<unk>"] * 4 + ["the", "<eos>"]
    assert words_of(made)["test"] == ["<unk>", "cat", "<eos>"]
    assert words_of(made)["train"][:4] == ["the", "cat", "<unk>", "<eos>"]


def test_a_given_vocabulary_keeps_its_numbers(settings, tmp_path):
    given = Vocab(("sat", "</S>", "dog", "<UNK>", "the"))
    given.save(tmp_path / "words.txt")
    settings.vocab_file = str(tmp_path / "words.txt")
    made = corpus.load(settings)
    assert made.vocab == given
    assert made.train.tolist() == [4, 3, 0, 1, 1, 4, 2, 3, 1, 4, 3, 1]


def test_a_given_vocabulary_without_unk_must_have_every_word(settings, tmp_path):
    Vocab(("<eos>", "the", "cat")).save(tmp_path / "words.txt")
    settings.vocab_file = str(tmp_path / "words.txt")
    with pytest.raises(ValueError, match="no <unk>.*'sat'"):
        corpus.load(settings)
    assert cached(settings) == []


def test_a_given_vocabulary_larger_than_asked_for_is_refused(settings, tmp_path):
    Vocab(("<eos>", "<unk>", "the", "cat")).save(tmp_path / "words.txt")
    settings.vocab_file = str(tmp_path / "words.txt")
    settings.vocab_size = 3
    with pytest.raises(ValueError, match="has 4 words, more than data.vocab_size=3"):
        corpus.load(settings)
    assert cached(settings) == []
    settings.vocab_size = 4
    assert len(corpus.load(settings).vocab) == 4


def test_text_is_encoded_once(settings, monkeypatch):
    first = words_of(corpus.load(settings))
    monkeypatch.setattr(corpus, "_encode", None)
    assert words_of(corpus.load(settings)) == first


def test_other_text_or_other_settings_are_encoded_anew(settings, tmp_path):
    corpus.load(settings)
    settings.lowercase = True
    assert "A" not in corpus.load(settings).vocab.words
    (pathlib.Path(settings.path) / "test.txt").write_text("another\n")
    assert words_of(corpus.load(settings))["test"] == ["another", "<eos>"]
    Vocab(("<eos>", "<unk>")).save(tmp_path / "words.txt")
    settings.vocab_file = str(tmp_path / "words.txt")
    corpus.load(settings)
    Vocab(("<unk>", "<eos>")).save(tmp_path / "words.txt")
    assert corpus.load(settings).vocab.eos == 1
    assert len(cached(settings)) == 5


def test_an_error_half_way_leaves_nothing(settings, monkeypatch):
    write = corpus._write_split
    monkeypatch.setattr(
        corpus,
        "_write_split",
        lambda c, source, path, *rest: (
            write(c, source, path, *rest) if "test" not in path.name else 1 / 0
        ),
    )
    with pytest.raises(ZeroDivisionError):
        corpus.load(settings)
    assert cached(settings) == []
    monkeypatch.undo()
    assert words_of(corpus.load(settings))["test"] == ["A", "Cat", "<eos>"]


def test_a_process_killed_half_way_leaves_no_cache(settings):
    script = f"""
import os, signal
from softbottle import config
from softbottle.data import corpus, vocab
data = config.Data()
data.name, data.path, data.cache = "text", {settings.path!r}, {settings.cache!r}
corpus.check = lambda made: os.kill(os.getpid(), signal.SIGKILL)
corpus.load(data)
"""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    killed = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = cached(settings)
    assert left.startswith("partial-")
    assert words_of(corpus.load(settings))["test"] == ["A", "Cat", "<eos>"]
    # Another process might still write there; a day later nobody does.
    assert left in cached(settings)
    folder = pathlib.Path(settings.cache) / left
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - 2 * 24 * 3600,) * 2)
    settings.lowercase = not settings.lowercase
    corpus.load(settings)
    assert left not in cached(settings)


def test_the_first_of_two_encodings_is_kept(settings):
    made = corpus.load(settings)
    (name,) = cached(settings)
    folder = pathlib.Path(settings.cache) / name
    before = os.stat(folder / "train.int32")
    corpus._encode(settings, sources.of_corpus(settings), folder)
    assert cached(settings) == [name]
    after = os.stat(folder / "train.int32")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert words_of(corpus.load(settings)) == words_of(made)


def test_a_cache_cut_short_is_refused(settings):
    made = corpus.load(settings)
    path = pathlib.Path(made.train.filename)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="damaged; delete it"):
        corpus.load(settings)


def test_the_manifest_tells_what_was_encoded(settings):
    made = corpus.load(settings)
    folder = pathlib.Path(made.train.filename).parent
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["tokens"] == {"train": 12, "valid": 3, "test": 3}
    assert manifest["vocab"] == made.vocab.digest


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_shards_may_be_compressed(tmp_path, suffix):
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    folder = write_lm1b(
        tmp_path / "lm1b",
        {f"news.en-0000{i}{suffix}": pack(f"train {i}\n".encode()) for i in (2, 0, 1)},
        {f"heldout-0000{i}{suffix}": pack(f"held {i}\n".encode()) for i in range(3)},
    )
    made = words_of(corpus.load(make_settings("lm1b", folder, tmp_path)))
    assert made["train"] == expected_words("train 0\ntrain 1\ntrain 2\n")
    assert made["valid"] == expected_words("held 0\n")
    assert made["test"] == expected_words("held 1\nheld 2\n")


def test_all_fifty_heldout_shards_are_split_as_in_the_paper(tmp_path):
    heldout = {f"news.en.heldout-{i:05}-of-00050": b"h%d\n" % i for i in range(50)}
    folder = write_lm1b(tmp_path / "lm1b", {"news.en-00001-of-00100": b"a\n"}, heldout)
    made = words_of(corpus.load(make_settings("lm1b", folder, tmp_path)))
    assert made["valid"] == expected_words("h0\nh10\n")
    assert made["test"] == expected_words("h20\nh30\nh40\n")


def test_a_shard_that_is_there_twice_is_refused(tmp_path):
    training = {"news.en-1": b"a\n", "news.en-1.gz": gzip.compress(b"a\n")}
    folder = write_lm1b(tmp_path / "lm1b", training, {"h0": b"a\n", "h1": b"a\n"})
    with pytest.raises(ValueError, match="news.en-1 both plain and compressed"):
        corpus.load(make_settings("lm1b", folder, tmp_path))


@pytest.mark.parametrize(
    "suffix, pack", [(".gz", gzip.compress), (".xz", lzma.compress)]
)
@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: b"no" + raw])
def test_a_damaged_shard_is_named(tmp_path, suffix, pack, damage):
    training = {f"news.en-1{suffix}": damage(pack(b"some words\n" * 100))}
    folder = write_lm1b(tmp_path / "lm1b", training, {"h0": b"a\n", "h1": b"a\n"})
    with pytest.raises(ValueError, match="news.en-1.* damaged or cut short"):
        corpus.load(make_settings("lm1b", folder, tmp_path))


def test_missing_files_are_named(settings):
    (pathlib.Path(settings.path) / "valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match="valid.txt"):
        corpus.load(settings)


@pytest.mark.parametrize("name", ["ptb", "lm1b"])
def test_a_folder_of_something_else_is_refused(settings, name):
    settings.name = name
    with pytest.raises(FileNotFoundError, match="needs"):
        corpus.load(settings)


def test_folders_in_a_folder_of_text_are_told(settings, tmp_path):
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("a b c d e\n" * 20)
    settings.path = str(folder)
    with pytest.warns(UserWarning, match="books has folders in it.*not read: more"):
        made = corpus.load(settings)
    assert sum(map(len, made[:3])) == 120


def test_a_missing_folder_is_refused(settings):
    settings.path += "-not"
    with pytest.raises(FileNotFoundError, match="text-not"):
        corpus.load(settings)
    settings.path = ""
    with pytest.raises(ValueError, match="data.path must name a text file"):
        corpus.load(settings)


@pytest.mark.parametrize("size", [4, 1 << 24])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("unit, atol", [("stream", 1.5), ("lines", 10.5)])
def test_any_text_is_cut_into_train_valid_and_test(
    settings, tmp_path, monkeypatch, size, parts, unit, atol
):
    monkeypatch.setattr(sources, "CHUNK_BYTES", size)
    settings.unit = unit
    words = [f"{number:03}" for number in range(399)]
    text = " ".join(words).replace("9 ", "9\n")
    folder = tmp_path / "books"
    folder.mkdir()
    for part in range(parts):
        share = text.splitlines(keepends=True)[part::parts]
        (folder / f"{part}.txt").write_text("".join(share))
    settings.path = str(folder if parts > 1 else folder / "0.txt")
    made = corpus.load(settings)
    splits = [made.vocab.decode(ids) for ids in made[:3]]
    read = [
        word
        for file in sorted(folder.iterdir())
        for line in file.read_text().splitlines()
        for word in (*line.split(), "<eos>")
    ]
    assert sum(splits, []) == read
    kept = [sum(word != "<eos>" for word in split) for split in splits]
    assert np.allclose(np.cumsum(kept), [0.9 * 399, 0.95 * 399, 399], atol=atol)
    if unit == "lines":
        assert all(split[-1] == "<eos>" for split in splits)


@pytest.mark.parametrize(
    "suffix, pack", [(".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_compressed_splits_are_taken_as_they_are_split(settings, suffix, pack):
    expected = words_of(corpus.load(settings))
    folder = pathlib.Path(settings.path)
    for name in SPLITS:
        plain = folder / f"{name}.txt"
        (folder / f"{name}.txt{suffix}").write_bytes(pack(plain.read_bytes()))
        plain.unlink()
    assert words_of(corpus.load(settings)) == expected
    plain.write_text("a")
    with pytest.raises(ValueError, match=f"has test.txt and test.txt{suffix}: which"):
        corpus.load(settings)


def test_splits_that_are_links_to_nowhere_are_missing(settings):
    folder = pathlib.Path(settings.path)
    (folder / "notes.txt").write_text("not the text\n" * 9)
    for name in SPLITS:
        (folder / f"{name}.txt").unlink()
        (folder / f"{name}.txt").symlink_to("gone.txt")
    with pytest.raises(FileNotFoundError, match="needs .*train.txt, .*test.txt"):
        corpus.load(settings)


def test_a_text_that_is_too_short_to_be_cut_says_for_what(settings, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("one two")
    settings.path = str(path)
    with pytest.raises(ValueError, match="the valid text has no words in .*short.txt"):
        corpus.load(settings)


def test_what_is_not_text_is_named_with_its_line_in_any_part(settings, tmp_path):
    path = tmp_path / "broken.txt"
    path.write_bytes(b"word\n" * 99 + b"\xff\n")
    settings.path = str(path)
    with pytest.raises(ValueError, match="broken.txt, line 100: byte 0xff"):
        corpus.load(settings)


@pytest.mark.parametrize("raw", [b"", b"\n\n \n"])
def test_a_split_without_words_is_refused(settings, raw):
    (pathlib.Path(settings.path) / "valid.txt").write_bytes(raw)
    with pytest.raises(ValueError, match="no words in .*valid.txt"):
        corpus.load(settings)


@pytest.mark.parametrize("size", [8, 1 << 24])
@pytest.mark.parametrize(
    "raw, message",
    [
        (b"one\ntwo\nthr\xe9e\nfour\n", "test.txt, line 3: byte 0xe9"),
        (b"one\ntwo\nthree \0\n", "test.txt, line 3: a NUL byte"),
    ],
)
def test_what_is_not_text_is_refused_with_its_line(
    settings, monkeypatch, raw, message, size
):
    monkeypatch.setattr(sources, "CHUNK_BYTES", size)
    (pathlib.Path(settings.path) / "test.txt").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        corpus.load(settings)
    assert cached(settings) == []


def test_a_changed_ptb_is_used_with_a_warning(tmp_path):
    for name in SPLITS:
        (tmp_path / f"ptb.{name}.txt").write_text("a b\n")
    data = make_settings("ptb", tmp_path, tmp_path)
    ours = hashlib.md5(b"a b\n").hexdigest()
    with pytest.warns(UserWarning) as caught:
        corpus.load(data)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 3 and all(ours in message for message in messages)
    assert "f26c4b92c5fdc7b3f8c7cdcb991d8420" in messages[0]


def test_a_corpus_made_by_hand_is_checked():
    vocab, good, bad = Vocab(("<eos>", "a")), np.arange(2), np.arange(3)
    assert corpus.check(Corpus(good, good, good, vocab)).train is good
    with pytest.raises(ValueError, match=r"ids of valid must be in \[0, 2\)"):
        corpus.check(Corpus(good, bad, good, vocab))
    with pytest.raises(ValueError, match="test must be a run"):
        corpus.check(Corpus(good, good, good[:0], vocab))


def test_the_synthetic_language_is_made_and_not_read(monkeypatch):
    data = config.Data()
    monkeypatch.setattr(synthetic, "corpus", lambda settings: settings)
    assert corpus.load(data) is data.synthetic


@pytest.mark.parametrize(
    "name, folder, tokens, words",
    [
        ("ptb", "ptb", (929_589, 73_760, 82_430), 10_000),
        ("wt2", "wikitext-2", (2_088_628, 217_646, 245_569), 33_278),
    ],
)
def test_published_corpora_have_their_published_sizes(
    tmp_path, recwarn, name, folder, tokens, words
):
    if not (SHARED / folder).is_dir():
        pytest.skip(f"{folder} is not in ../shared/data")
    made = corpus.load(make_settings(name, SHARED / folder, tmp_path))
    assert tuple(len(ids) for ids in made[:3]) == tokens
    assert len(made.vocab) == words
    assert made.vocab.words[made.vocab.unk] == "<unk>"
    assert not recwarn.list
    file = next((SHARED / folder).glob("*test*"))
    assert made.vocab.decode(made.test) == expected_words(file.read_text("utf-8"))


def test_any_text_is_read_in_a_vocabulary_after_the_end_of_a_line(tmp_path):
    vocab = Vocab(("<unk>", "<eos>", "the", "cat"), lowercase=True)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "b.gz").write_bytes(gzip.compress(b"Cat dog\n"))
    (tmp_path / "shards" / "a").write_bytes(b"the CAT")
    (tmp_path / "last.txt").write_bytes(b"the\n")
    paths = [str(tmp_path / "shards"), str(tmp_path / "last.txt")]
    ids = corpus.read(paths, vocab)
    assert ids.dtype == np.int32
    assert " ".join(vocab.decode(ids)) == (
        "<eos> the cat <eos> cat <unk> <eos> the <eos>"
    )


def test_text_that_cannot_be_read_is_an_error(tmp_path):
    vocab = Vocab(("<eos>", "the"))
    with pytest.raises(FileNotFoundError, match="no file or folder .*absent"):
        corpus.read([str(tmp_path / "absent")], vocab)
    for raw, message in ((b"\n \n", "no words"), (b"the cat\n", "cat"), (b"\0", "NUL")):
        (tmp_path / "text").write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            corpus.read([str(tmp_path / "text")], vocab)


@pytest.mark.parametrize("size", [1, 2, 5, 1 << 24])
@pytest.mark.parametrize("suffix, pack", [("", bytes), (".gz", gzip.compress)])
def test_the_byte_order_mark_of_each_file_is_no_word(
    tmp_path, monkeypatch, size, suffix, pack
):
    monkeypatch.setattr(sources, "CHUNK_BYTES", size)
    mark = b"\xef\xbb\xbf"
    folder = write_lm1b(
        tmp_path / "lm1b",
        {f"news.en-{i}{suffix}": pack(mark + b"a %d\n" % i) for i in (1, 2)},
        {f"heldout-{i}{suffix}": pack(mark + b"h%d" % i) for i in (1, 2)},
    )
    made = words_of(corpus.load(make_settings("lm1b", folder, tmp_path)))
    assert made["train"] == expected_words("a 1\na 2\n")
    assert made["valid"] == expected_words("h1\n")
    vocab = Vocab(("<eos>", "a", "1", "2"))
    shards = folder / "training-monolingual.tokenized.shuffled"
    ids = corpus.read([str(shards)], vocab)
    assert vocab.decode(ids) == ["<eos>", *expected_words("a 1\na 2\n")]


@pytest.mark.parametrize("raw", [b"\xef\xbb", b"a\xef\xbb\xbfb", b"\xef\xbb\xbf"])
def test_what_is_no_byte_order_mark_stays(tmp_path, raw):
    (tmp_path / "text").write_bytes(raw)
    vocab = Vocab(("<eos>", "a\ufeffb"))
    if b"a" in raw:
        assert corpus.read([str(tmp_path / "text")], vocab).tolist() == [0, 1, 0]
    else:
        with pytest.raises(ValueError, match="not UTF-8|no words"):
            corpus.read([str(tmp_path / "text")], vocab)


def test_the_byte_order_mark_of_a_given_vocabulary_is_no_word(settings, tmp_path):
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbfthe\n<eos>\n<unk>\n")
    settings.vocab_file = str(tmp_path / "words.txt")
    assert corpus.load(settings).train[0] == 0
