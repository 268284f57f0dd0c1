import collections

import numpy as np
import pytest

from softbottle.data import vocab
from softbottle.data.vocab import Chunk, Vocab

WORDS = ("<unk>", "<eos>", "the", "Cat", "sat")


def number(texts, lowercase=False, workers=2):
    """The numbering of some texts, and the number of each of their words."""
    chunks = [Chunk(text.encode(), "made up", 1) for text in texts]
    numbering = vocab.Numbering()
    ids = [numbering.number(n) for n in vocab.numbered(chunks, lowercase, workers)]
    return numbering, np.concatenate(ids)


def test_words_are_split_as_python_splits_them():
    text = "  a\u00a0b\u3000c\td \x85e\x1cf\u200bg\r\n\n na\u00efve\x0b\x0c H \ud55c  "
    lines = [*text.split("\n")]
    expected = [word for line in lines for word in [*line.split(), "<eos>"]][:-1]
    numbering, ids = number([text])
    words = list(numbering.lookup)
    assert [words[i] for i in ids] == expected


@pytest.mark.parametrize("text", ["", " ", "\n", " \n ", "a", " a", "a ", "\na\n"])
def test_white_space_at_the_edges_makes_no_words(text):
    expected = " ".join(text.replace("\n", " <eos> ").split()).split()
    numbering, ids = number([text])
    words = list(numbering.lookup)
    assert [words[i] for i in ids] == expected


@pytest.mark.parametrize("workers", [1, 3])
def test_numbering_follows_first_appearance_whatever_the_cut(workers):
    rng = np.random.default_rng(0)
    words = [f"w{n}" for n in rng.zipf(1.5, 3000) % 97]
    whole, ids = number([" ".join(words)], workers=workers)
    cut, cut_ids = number([" ".join(words[i : i + 7]) for i in range(0, 3000, 7)])
    first = list(dict.fromkeys(words))
    assert list(whole.lookup) == list(cut.lookup) == first
    np.testing.assert_array_equal(ids, [first.index(word) for word in words])
    np.testing.assert_array_equal(ids, cut_ids)
    counts = collections.Counter(words)
    assert cut.counts.tolist() == [counts[word] for word in first]


def test_chunks_are_read_ahead_only_as_far_as_there_are_workers():
    read = []

    def chunks():
        for index in range(100):
            read.append(index)
            yield Chunk(b"a b\n", "made up", 1)

    numbered = iter(vocab.numbered(chunks(), False, workers=3))
    next(numbered)
    assert len(read) <= 4


def test_closed_vocabulary_has_every_word_in_order():
    numbering, _ = number(["the cat\nthe dog\n"])
    assert vocab.closed(numbering, False).words == ("the", "cat", "<eos>", "dog")


def test_most_frequent_words_come_first_and_ties_go_to_the_earlier():
    numbering, _ = number(["d b a c a b <unk> a e\n"])
    made = vocab.most_frequent(numbering, 5, False)
    assert made.words == ("<unk>", "<eos>", "a", "b", "d")


def test_many_ties_go_to_the_earlier():
    words = [f"w{number * 37 % 101}" for number in range(101)]
    numbering, _ = number([" ".join(words)])
    made = vocab.most_frequent(numbering, 52, False)
    assert list(made.words[2:]) == words[:50]


def test_a_small_text_gives_a_small_vocabulary():
    numbering, _ = number(["b a\n"])
    assert len(vocab.most_frequent(numbering, 100, False)) == 4


def test_vocabulary_without_room_for_a_word_is_refused():
    numbering, _ = number(["b a\n"])
    with pytest.raises(ValueError, match="got 2"):
        vocab.most_frequent(numbering, 2, False)


def test_lower_casing_reaches_beyond_ascii():
    numbering, _ = number(["The \u00c9t\u00e9 THE\n"], lowercase=True)
    assert list(numbering.lookup) == ["the", "\u00e9t\u00e9", "<eos>"]


def test_encode_and_decode_are_inverse_for_known_words():
    made = Vocab(WORDS)
    ids = made.encode("the Cat sat\nthe")
    assert ids.dtype == np.int32
    assert ids.tolist() == [2, 3, 4, 1, 2]
    assert made.decode(ids) == ["the", "Cat", "sat", "<eos>", "the"]
    assert made.encode("").tolist() == []


def test_unknown_words_become_unk():
    assert Vocab(WORDS).encode("the dog").tolist() == [2, 0]


def test_unknown_words_without_unk_are_named():
    with pytest.raises(ValueError, match="no <unk>.*dog"):
        Vocab(WORDS[1:]).encode("the dog")


def test_lower_case_vocabulary_lowers_what_it_reads():
    made = Vocab(("<eos>", "the"), lowercase=True)
    assert made.encode("THE The").tolist() == [1, 1]


def test_foreign_spellings_of_the_special_words_are_understood():
    made = Vocab(("</S>", "<S>", "<UNK>", "the"))
    assert (made.eos, made.unk) == (0, 2)
    assert made.encode("the dog <unk>\n").tolist() == [3, 2, 2, 0]
    assert made.split("the\n") == ["the", "</S>"]


@pytest.mark.parametrize(
    "words, message",
    [
        (("<eos>", "a", "b", "a"), "'a' is in the vocabulary twice.* 1 and 3"),
        (("<eos>", ""), "'' at position 1 is empty"),
        (("<eos>", "a b"), "white space"),
        (("a", "b"), "none of"),
    ],
)
def test_bad_word_lists_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        Vocab(words)


@pytest.mark.parametrize("ids", [[0, 5], [-1]])
def test_ids_beyond_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match=r"\[0, 5\)"):
        Vocab(WORDS).decode(ids)


def test_save_and_load_are_inverse(tmp_path):
    made = Vocab((*WORDS, "na\u00efve", "\ud55c"))
    made.save(tmp_path / "vocab.txt")
    loaded = Vocab.load(tmp_path / "vocab.txt")
    assert loaded == made and loaded.digest == made.digest


def test_digest_depends_on_the_words_and_their_order():
    digests = {Vocab(words).digest for words in (WORDS, WORDS[::-1], WORDS[:4])}
    assert len(digests) == 3


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"<eos>\na\nb\xff\n", "words.txt, line 3: byte 0xff"),
        (b"<eos>\na\n\0\n", "words.txt, line 3: a NUL"),
        (b"<eos>\na\n\nb\n", "words.txt: word '' at position 2"),
    ],
)
def test_bad_vocabulary_file_is_named(tmp_path, raw, message):
    (tmp_path / "words.txt").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        Vocab.load(tmp_path / "words.txt")


def test_vocabulary_file_may_end_its_lines_as_windows_does(tmp_path):
    (tmp_path / "words.txt").write_bytes(b"<eos>\r\na\r\n")
    assert Vocab.load(tmp_path / "words.txt").words == ("<eos>", "a")


def test_a_vocabulary_is_written_whole_and_only_when_it_differs(tmp_path):
    path = tmp_path / "vocab.txt"
    Vocab(WORDS).save(path)
    before = path.stat()
    Vocab(WORDS).save(path)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )
    Vocab(WORDS[::-1]).save(path)
    assert path.stat().st_ino != before.st_ino, "written in place"
    assert Vocab.load(path).words == WORDS[::-1]


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"\xef\xbb\xbfthe\r\n<eos>\r\n")
    assert Vocab.load(path).words == ("the", "<eos>")


def test_a_word_that_begins_like_a_byte_order_mark_is_kept(tmp_path):
    strange = Vocab(("\ufeffthe", "the", "<eos>"))
    strange.save(tmp_path / "vocab.txt")
    assert Vocab.load(tmp_path / "vocab.txt") == strange


def test_control_characters_of_a_word_are_shown_and_not_obeyed():
    hostile = "\x1b[2Jred\x07\x7f\x9b31m\u200b"
    assert vocab.printable(hostile) == r"\x1b[2Jred\x07\x7f\x9b31m" + "\u200b"
    for word in ("na\u00efve", "\ud55c", "a\\b", "<eos>", "\U0001f600"):
        assert vocab.printable(word) == word
    for code in (*range(32), *range(127, 160)):
        assert vocab.printable(chr(code)) == f"\\x{code:02x}"


def test_errors_show_words_without_control_characters(tmp_path):
    hostile = "\x1b[2J"
    for words in ((hostile, hostile, "<eos>"), ("\x1b[2J a", "<eos>")):
        with pytest.raises(ValueError) as refusal:
            Vocab(words)
        assert "\x1b" not in str(refusal.value)
    with pytest.raises(ValueError) as refusal:
        Vocab(("<eos>", "a")).encode(f"a {hostile}")
    assert "\x1b" not in str(refusal.value) and "x1b" in str(refusal.value)
