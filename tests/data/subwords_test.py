import importlib.util
import json
import pathlib

import numpy as np
import pytest

from softbottle import config
from softbottle.data import corpus, subwords
from softbottle.data.vocab import EOS, Vocab

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("tokenizers"),
    reason="needs tokenizers: pip install 'softbottle[subwords]'",
)
COUNTS = {"lower": 9, "lowest": 7, "newer,": 6, "wider": 3, "don't": 2, "日本": 1}
SIZE = 280


@pytest.fixture(scope="module")
def vocab():
    return Vocab(subwords.learn(COUNTS | {EOS: 50}, SIZE, EOS), subwords=True)


@pytest.fixture
def settings(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name, lines in (("train", 40), ("valid", 3), ("test", 2)):
        (folder / f"{name}.txt").write_text("the lower,  lowest\n\nnewer\n" * lines)
    data = config.Data()
    data.name, data.path, data.cache = "text", str(folder), str(tmp_path / "cache")
    data.subwords, data.vocab_size = True, SIZE
    return data


def test_a_vocabulary_is_the_end_of_a_line_the_bytes_and_what_was_learned(vocab):
    assert len(vocab) == SIZE and vocab.words[0] == EOS
    assert sorted(map(subwords.spelled, vocab.words[1:257])) == [
        bytes([byte]) for byte in range(256)
    ]
    assert "Ġlower" in vocab.words[257:]


def test_the_same_words_give_the_same_pieces():
    first, again = (subwords.learn(COUNTS, SIZE, EOS) for _ in range(2))
    assert first == again


def test_a_piece_tells_by_which_pair_it_was_made():
    """Against the merges that the library itself remembers."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = subwords._splitter()
    text = pathlib.Path(subwords.__file__).read_text()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=list(subwords.BYTES), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    learned = [piece for piece in model["vocab"] if piece not in subwords.BYTES]
    pieces = (EOS, *subwords.BYTES, *sorted(learned, key=model["vocab"].get))
    found = subwords._merges({piece: index for index, piece in enumerate(pieces)})
    assert [list(pair) for pair in model["merges"]] == [list(pair) for pair in found]
    expected = [tokenizer.encode(word).tokens for word in text.split()]
    parts = subwords.encode(pieces, text.split())
    assert [[pieces[index] for index in part] for part in parts] == expected


@pytest.mark.parametrize("text", ["lower newer,\nwider", "naïve 日本 \x00!", "\n", ""])
def test_any_text_is_spelled_as_it_was_but_for_its_white_space(vocab, text):
    ids = vocab.encode(text)
    lines = "".join(vocab.spell(ids.tolist())).split("\n")
    assert [line.split() for line in lines] == [
        line.split() for line in text.split("\n")
    ]
    assert vocab.decode(ids) == vocab.split(text)


def test_a_character_is_spelled_once_it_is_complete(vocab):
    *start, end = vocab.encode("日").tolist()
    *shown, last = vocab.spell([*start, end])
    assert "".join(shown) == " " and last == "日"
    half = [*start, vocab.eos]
    assert "".join(vocab.spell(half)) == " \ufffd\n"


def test_words_are_put_together_in_the_order_of_a_text():
    expand = subwords.expander([[7], [8, 9, 10], [], [11, 12]])
    expected = [11, 12, 7, 8, 9, 10, 7]
    np.testing.assert_array_equal(expand(np.array([3, 0, 1, 2, 0])), expected)
    assert expand(np.array([], np.int32)).size == 0


def test_a_corpus_is_encoded_in_pieces_and_kept(settings):
    made = corpus.load(settings)
    for name, ids in made.splits.items():
        text = (pathlib.Path(settings.path) / f"{name}.txt").read_text()
        np.testing.assert_array_equal(ids, made.vocab.encode(text))
    again = corpus.load(settings)
    assert again.vocab == made.vocab and again.vocab.subwords
    assert corpus.digest(again) == corpus.digest(made)
    read = corpus.read([f"{settings.path}/test.txt"], made.vocab)
    np.testing.assert_array_equal(read, [made.vocab.eos, *made.test])


def test_words_and_pieces_of_a_text_are_kept_apart(settings):
    pieces = corpus.load(settings)
    settings.subwords = False
    words = corpus.load(settings)
    assert not words.vocab.subwords and len(words.vocab) < 10
    settings.subwords = True
    assert corpus.load(settings).vocab == pieces.vocab


def test_a_vocabulary_without_room_for_the_bytes_is_refused(settings):
    settings.vocab_size = 256
    with pytest.raises(ValueError, match="more than the 256 bytes .*got 256"):
        corpus.load(settings)
