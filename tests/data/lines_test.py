import jax
import numpy as np
import pytest

from softbottle import config as configs
from softbottle import model
from softbottle.data import batches, lines
from softbottle.data.vocab import Vocab
from tests import tiny

EOS = 0
TEXT = np.array([3, 1, 2, 0, 0, 4, 0, 2, 2, 0, 1, 5, 4, 3, 0, 5, 1], np.int32)
LINES = [[3, 1, 2], [4], [2, 2], [1, 5, 4, 3], [5, 1]]
VOCAB = Vocab(("<eos>", *"abcde"))


def read_back(batch, answers):
    """The lines of a batch, after checking how they are laid out."""
    found = []
    for ids, labels, weights, segments in zip(*batch, strict=True):
        size = int((segments > 0).sum())
        assert not np.any(segments[size:]) and set(segments[:size]) <= {1}
        if not size:
            assert not np.any(weights)
            continue
        assert ids[0] == EOS
        np.testing.assert_array_equal(ids[1:size], labels[: size - 1])
        expected = np.ones(size)
        if answers:
            expected[:-1] = 0
        else:
            assert labels[size - 1] == EOS
        np.testing.assert_array_equal(weights[:size], expected)
        assert not np.any(weights[size:])
        found.append(labels[: size if answers else size - 1].tolist())
    return found


@pytest.mark.parametrize("answers, length", [(True, 4), (False, 5), (False, 7)])
def test_an_epoch_has_no_line_twice_and_an_order_of_its_own(answers, length):
    stream = lines.Lines(TEXT, EOS, 2, length, answers=answers, seed=3)
    # Five lines fill two batches of two.
    assert stream.steps_per_epoch == 2 and stream.fresh
    epochs = []
    for epoch in range(9):
        assert stream.epoch == epoch
        found = []
        for _ in range(2):
            batch = stream.next()
            assert batch.ids_BS.shape == (2, length) and np.all(batch.segments_BS[:, 0])
            found += read_back(batch, answers)
        assert len(found) == len(set(map(tuple, found))) == 4
        assert all(line in LINES for line in found)
        epochs.append(found)
    assert {tuple(line) for found in epochs for line in found} == set(map(tuple, LINES))


def test_a_stream_goes_on_from_a_position():
    stream, other = (lines.Lines(TEXT, EOS, 2, 5, answers=False) for _ in range(2))
    for _ in range(3):
        stream.next()
    other.seek(stream.position)
    assert other.epoch == stream.epoch == 1
    for _ in range(4):
        for ours, theirs in zip(stream.next(), other.next(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="'batches': 2"):
        stream.seek({"epoch": 0, "batches": 2})


def test_evaluation_reads_every_line_once_in_order():
    data = configs.Data(unit="answers")
    found = []
    for batch in lines.cut(data, VOCAB)(TEXT, 3, 6):
        assert batch.ids_BS.shape == (3, 6)
        found += read_back(batch, True)
    assert found == LINES


def test_a_config_says_what_a_row_holds():
    ids = np.tile(np.append(TEXT, EOS), 9)
    data = configs.Data(rows=3, length=5)
    assert isinstance(lines.stream(data, VOCAB, ids, 0), batches.Stream)
    assert lines.cut(data, VOCAB) is None
    data.unit = "lines"
    batch = lines.stream(data, VOCAB, ids, 0).next()
    assert all(line in LINES for line in read_back(batch, False))


def test_a_line_that_does_not_fit_and_a_text_without_any_are_refused():
    with pytest.raises(ValueError, match="needs 5 positions; a row has 4"):
        lines.Lines(TEXT, EOS, 2, 4, answers=False)
    with pytest.raises(ValueError, match="5 lines are too few for 6 rows"):
        lines.Lines(TEXT, EOS, 6, 5, answers=False)
    with pytest.raises(ValueError, match="no lines"):
        lines.split(np.zeros(3, np.int32), EOS, 4, True)


def test_a_text_that_was_cut_anywhere_ends_with_its_last_whole_line():
    text = np.array([5, 6, EOS, 7, EOS, 8, 9])
    np.testing.assert_array_equal(lines.whole(text, EOS), text[:5])
    np.testing.assert_array_equal(lines.whole(text[:5], EOS), text[:5])
    for without in (text[:2], text[2:3]):
        with pytest.raises(ValueError, match="end before the first line does"):
            lines.whole(without, EOS)


def packed_lines(batch):
    """Every segment of a batch as (words read, words predicted)."""
    found = []
    for ids, labels, weights, segments in zip(*batch, strict=True):
        np.testing.assert_array_equal(weights, segments > 0)
        for segment in np.unique(segments[segments > 0]):
            (places,) = np.nonzero(segments == segment)
            assert np.all(np.diff(places) == 1)
            found.append((ids[places].tolist(), labels[places].tolist()))
    return found


def test_packed_lines_are_segments_that_begin_where_one_ends():
    stream = lines.Packed(TEXT, EOS, 1, len(TEXT) - 1)
    batch = stream.next()
    assert stream.epoch == 1
    np.testing.assert_array_equal(batch.ids_BS[0], TEXT[:-1])
    np.testing.assert_array_equal(batch.labels_BS[0], TEXT[1:])
    assert packed_lines(batch) == [
        ([3, 1, 2], [1, 2, 0]),
        ([0], [0]),
        ([0, 4], [4, 0]),
        ([0, 2, 2], [2, 2, 0]),
        ([0, 1, 5, 4, 3], [1, 5, 4, 3, 0]),
        ([0, 5], [5, 1]),
    ]


@pytest.mark.slow
def test_a_line_is_not_trained_with_one_of_the_batch_before():
    """Of which the last line of a row may have the same number as the next row's."""
    config = tiny.make_config(
        head__name="softmax",
        head__components=None,
        data__unit="packed",
        data__rows=1,
        data__length=4,
        model__last_dim=3,
        model__order=3,
    )
    functions = model.make(config, 11)
    params = tiny.draw(jax.eval_shape(functions.init, jax.random.key(0)))
    ids = np.array([5, EOS, 6, 7, EOS, 8, 9, EOS, 3, 4], np.int32)
    stream = lines.stream(config.data, tiny.make_words(11), ids, 0)
    empty = functions.initial_carry(1)
    _, carry = functions.hidden(params, stream.next(), empty)
    batch = stream.next()
    assert batch.ids_BS[0, 0] == EOS
    trained, evaluated = (
        functions.hidden(params, batch, each)[0]
        for each in (empty if stream.fresh else carry, empty)
    )
    np.testing.assert_array_equal(trained, evaluated)


def test_a_packed_text_is_evaluated_line_by_line_and_padding_stays_padding():
    config = configs.Data(unit="packed", rows=2, length=5)
    assert isinstance(lines.stream(config, VOCAB, TEXT, 0), lines.Packed)
    found = list(lines.cut(config, VOCAB)(TEXT, 3, 4))
    assert sum(batch.weights_BS.sum() for batch in found) == len(TEXT) - 1
    read = [pair for batch in found for pair in packed_lines(batch)]
    assert all(EOS not in words[1:] for words, _ in read)
