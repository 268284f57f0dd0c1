import functools
import itertools
import json

import numpy as np
import pytest

from softbottle.data import batches


def law_oracle(draws, length, max_delta, seed):
    """The reference's lengths, each as its training loop draws it."""
    random = np.random.RandomState(seed)
    bptt_N = np.where(random.random_sample(draws) < 0.95, length, length / 2.0)
    seq_len_N = np.maximum(5, random.normal(bptt_N, 5).astype(int))
    return np.minimum(seq_len_N, length + max_delta)


def true_lengths(stream, count):
    return np.array([batch_length(stream.next()) for _ in range(count)])


def batch_length(batch):
    return int((batch.weights_BS > 0).any(axis=0).sum())


def assert_same(batch, other):
    for ours, theirs in zip(batch, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("tokens, rows, length", [(1009, 7, 13), (701, 1, 70)])
def test_an_epoch_reads_the_trimmed_rows_once_and_in_order(
    tokens, rows, length, variable
):
    ids = np.random.default_rng(0).integers(0, 37, tokens)
    columns = tokens // rows
    rows_BS = ids[: rows * columns].reshape(rows, columns)
    stream = batches.Stream(ids, rows, length, variable=variable, max_delta=4)
    for _ in range(2):
        epoch, read, labels = stream.epoch, [], []
        while stream.epoch == epoch:
            batch = stream.next()
            live = batch_length(batch)
            read.append(batch.ids_BS[:, :live])
            labels.append(batch.labels_BS[:, :live])
        np.testing.assert_array_equal(np.concatenate(read, 1), rows_BS[:, :-1])
        np.testing.assert_array_equal(np.concatenate(labels, 1), rows_BS[:, 1:])


def test_padding_has_no_weight_and_no_segment():
    stream = batches.Stream(np.arange(1, 1000), 3, 20, variable=True)
    for _ in range(60):
        batch = stream.next()
        live = batch_length(batch)
        assert batch.ids_BS.dtype == batch.labels_BS.dtype == np.int32
        assert batch.weights_BS.dtype == np.float32
        assert batch.segments_BS.dtype == np.int32
        for array in (batch.ids_BS, batch.labels_BS):
            assert (array[:, :live] > 0).all() and not array[:, live:].any()
        np.testing.assert_array_equal(batch.weights_BS, batch.segments_BS)
        assert (batch.weights_BS[:, :live] == 1).all()


@pytest.mark.parametrize("tokens", [140, 141, 142, 143, 144, 211])
def test_steps_per_epoch_is_exact_for_fixed_lengths(tokens):
    stream = batches.Stream(np.arange(tokens), 2, 7)
    count = 0
    while stream.epoch == 0:
        stream.next()
        count += 1
    assert count == stream.steps_per_epoch


def test_steps_per_epoch_is_what_the_law_gives_on_average():
    stream = batches.Stream(np.zeros(30_000, np.int32), 1, 70, variable=True)
    count = 0
    while stream.epoch < 10:
        stream.next()
        count += 1
    assert abs(count / 10 / stream.steps_per_epoch - 1) < 0.02


@pytest.mark.parametrize("length, max_delta", [(70, 40), (71, 3), (12, 2)])
def test_lengths_follow_the_law_of_the_paper(length, max_delta):
    draws = 6000
    stream = batches.Stream(
        np.zeros(draws * (length + max_delta), np.int8),
        rows=1,
        length=length,
        variable=True,
        max_delta=max_delta,
        seed=3,
    )
    ours = true_lengths(stream, draws)
    theirs = law_oracle(20 * draws, length, max_delta, seed=1)
    longest = length + max_delta
    p_ours, p_theirs = (
        np.bincount(lengths, minlength=longest + 1) / len(lengths)
        for lengths in (ours, theirs)
    )
    gap = np.cumsum(p_ours - p_theirs)
    # Kolmogorov and Smirnov's bound for a chance of one in a thousand.
    assert np.abs(gap).max() < 1.95 * np.sqrt(1.05 / draws)
    assert ours.min() >= 5 and ours.max() <= longest


def test_lengths_depend_on_the_seed_and_the_epoch():
    ids = np.zeros(5000, np.int32)
    first, second = (
        batches.Stream(ids, 1, 70, variable=True, seed=seed) for seed in (0, 1)
    )
    epochs = [[], []]
    while first.epoch < 2:
        epoch = first.epoch
        epochs[epoch].append(batch_length(first.next()))
    assert epochs[0] != epochs[1]
    assert true_lengths(second, 20).tolist() != epochs[0][:20]


@pytest.mark.parametrize("length, max_delta", [(10, 4), (9, 1), (3, 0)])
def test_widths_waste_no_more_than_the_best_of_all_choices(length, max_delta):
    lengths = law_oracle(100_000, length, max_delta, seed=2)
    longest = length + max_delta

    def mean_width(widths):
        widths = np.array(sorted(widths))
        return widths[np.searchsorted(widths, lengths)].mean()

    choices = itertools.combinations(range(1, longest), min(3, longest - 1))
    best = min(mean_width((*choice, longest)) for choice in choices)
    ours = batches.widths(length, max_delta)
    assert len(ours) <= 4 and max(ours) == longest
    assert mean_width(ours) < best * 1.003


def test_variable_lengths_need_few_shapes_and_little_padding():
    stream = batches.Stream(np.zeros(200_000, np.int8), 1, 70, variable=True)
    seen = [stream.next() for _ in range(2500)]
    assert len({batch.ids_BS.shape for batch in seen}) <= batches.WIDTHS
    padded = sum(batch.weights_BS.size for batch in seen)
    assert padded / sum(batch.weights_BS.sum() for batch in seen) < 1.08


@pytest.mark.parametrize("variable", [False, True])
def test_a_stream_resumes_from_any_position(variable):
    ids = np.random.default_rng(1).integers(0, 1000, 1601)
    options = {"variable": variable, "max_delta": 9, "seed": 5}
    make = functools.partial(batches.Stream, ids, 4, 17, **options)
    stream, seen = make(), []
    while stream.epoch < 3:
        position = json.dumps(stream.position)
        batch = stream.next()
        seen.append((position, batch, stream.fresh, stream.epoch))
    assert sum(starts for _, _, starts, _ in seen) == 3
    for index in range(0, len(seen), 5):
        resumed = make()
        resumed.seek(json.loads(seen[index][0]))
        for _, batch, starts, epoch in seen[index : index + 40]:
            assert_same(resumed.next(), batch)
            assert (resumed.fresh, resumed.epoch) == (starts, epoch)


@pytest.mark.parametrize(
    "position",
    [
        {},
        {"epoch": 0, "offset": 0},
        {"epoch": 0, "offset": 99, "batches": 3},
        {"epoch": -1, "offset": 0, "batches": 0},
        {"epoch": 0, "offset": 5, "batches": 0},
        {"epoch": 0, "offset": 5.0, "batches": 1},
    ],
)
def test_impossible_positions_are_refused(position):
    stream = batches.Stream(np.arange(100), 1, 5)
    with pytest.raises(ValueError, match="position"):
        stream.seek(position)


def test_processes_share_the_rows_and_the_position():
    ids = np.random.default_rng(2).integers(0, 99, 997)
    whole = batches.Stream(ids, 6, 11, variable=True)
    parts = [
        batches.Stream(ids, 6, 11, variable=True, process_index=i, process_count=3)
        for i in range(3)
    ]
    for _ in range(40):
        shares = [part.next() for part in parts]
        joined = [np.concatenate(arrays) for arrays in zip(*shares, strict=True)]
        assert_same(whole.next(), joined)
        assert all(part.position == whole.position for part in parts)


@pytest.mark.parametrize(
    "tokens, rows, length", [(101, 1, 7), (101, 10, 7), (97, 13, 4), (18, 16, 3)]
)
def test_evaluation_predicts_every_token_once(tokens, rows, length):
    ids = np.random.default_rng(3).integers(0, 37, tokens)
    parts = list(batches.evaluation(ids, rows, length))
    assert {part.ids_BS.shape for part in parts} == {(rows, length)}
    whole = [np.concatenate(arrays, 1) for arrays in zip(*parts, strict=True)]
    ids_BS, labels_BS, weights_BS, segments_BS = whole
    live = weights_BS > 0
    np.testing.assert_array_equal(ids_BS[live], ids[:-1])
    np.testing.assert_array_equal(labels_BS[live], ids[1:])
    np.testing.assert_array_equal(weights_BS, segments_BS)
    assert weights_BS.sum() == tokens - 1
    # Padding only ends a row: a carry never passes through it.
    assert (np.diff(weights_BS, axis=1) <= 0).all()


@pytest.mark.parametrize(
    "ids, rows, options, message",
    [
        (np.arange(5), 5, {}, "5 ids are too few for 5 rows"),
        (np.arange(9), 5, {}, "nothing to predict"),
        (np.arange(50), 0, {}, "rows=0"),
        (np.arange(50.0), 2, {}, "float64"),
        (np.arange(50).reshape(5, 10), 2, {}, r"shape \(5, 10\)"),
        (np.arange(50), 5, {"process_count": 2}, "no equal share of 5 rows"),
        (np.arange(50), 4, {"process_index": 2, "process_count": 2}, "process 2 of 2"),
    ],
)
def test_bad_streams_are_refused(ids, rows, options, message):
    with pytest.raises(ValueError, match=message):
        batches.Stream(ids, rows, 7, **options)


def test_evaluation_refuses_a_short_text_at_the_call():
    with pytest.raises(ValueError, match="3 ids are too few for 10 rows"):
        batches.evaluation(np.arange(3), 10, 7)


def test_ptb_has_the_batches_of_the_reference():
    stream = batches.Stream(np.zeros(929_589, np.int32), 12, 70, variable=True)
    assert stream.columns == 77_465
    assert stream.columns // 70 == 1_106
    assert batches.widths(70, 40) == (67, 73, 80, 110)
    assert stream.steps_per_epoch == 1_144
