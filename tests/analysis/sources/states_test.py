"""States kept in a folder: written in pieces, resumed, and read as they were."""

import json

import ml_dtypes
import numpy as np
import pytest

from softbottle.analysis.sources import states
from softbottle.analysis.sources.reading import Front, Model
from softbottle.heads import softcap

VOCAB, DIM, WINDOW = 37, 5, 7
FRONT, NO_FRONT = Front((36,), "Begins with 36."), Front((), "Begins with none.")


def make_model(**changes):
    rng = np.random.default_rng(1)
    table_VD = rng.normal(size=(VOCAB, DIM)).astype(np.float32)
    bias_V = rng.normal(size=VOCAB).astype(np.float32)
    return Model("made", table_VD, bias_V, facts=("A model.",))._replace(**changes)


def make_ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB - 1, count)


def read_windows(ids_BS):
    """States that tell the token, its place, and all tokens before it."""
    place_BS = np.broadcast_to(np.arange(ids_BS.shape[1]), ids_BS.shape)
    columns = [ids_BS, place_BS, np.cumsum(ids_BS, axis=1), ids_BS % 3, place_BS % 2]
    return np.stack(columns, axis=2).astype(np.float32)


def write(folder, texts, front=NO_FRONT, read=read_windows, **changes):
    states.write(folder, make_model(**changes), front, texts, read, batch=2)
    return states.read(folder)


def joined(capture):
    hidden, labels = zip(*capture.tokens, strict=True)
    return np.concatenate(hidden), np.concatenate(labels)


@pytest.mark.parametrize("front", [FRONT, NO_FRONT])
@pytest.mark.parametrize("piece", [10**9, 3 * 2 * WINDOW * DIM])
def test_states_are_those_of_whole_windows_and_the_ends_are_held_out(
    tmp_path, monkeypatch, front, piece
):
    monkeypatch.setattr(states, "PIECE", piece)
    ids = {"a": make_ids(5 * WINDOW + 3), "b": make_ids(12 * WINDOW + 1, 1)}
    found = write(tmp_path, states.Texts(ids, {}, share=0.3, window=WINDOW), front)
    expected = {"train": ([], []), "heldout": ([], [])}
    for text, held in ((ids["a"], 2), (ids["b"], 4)):
        count = (len(text) - 1) // WINDOW
        for window in range(count):
            at = window * WINDOW
            part = expected["heldout" if window >= count - held else "train"]
            before = [*front.ids, *text[at : at + WINDOW]]
            part[0].append(read_windows(np.array([before]))[0, len(front.ids) :])
            part[1].append(text[at + 1 : at + WINDOW + 1])
    for capture, part in ((found.train, "train"), (found.heldout, "heldout")):
        hidden_ND, labels_N = joined(capture)
        assert hidden_ND.dtype == ml_dtypes.bfloat16
        rounded = np.concatenate(expected[part][0]).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(hidden_ND, rounded)
        np.testing.assert_array_equal(labels_N, np.concatenate(expected[part][1]))
        np.testing.assert_array_equal(capture.table_VE, make_model().table_VD)
        np.testing.assert_array_equal(capture.bias_V, make_model().bias_V)
    sizes = [file.stat().st_size for file in tmp_path.glob("*states-*.npy")]
    assert max(sizes) < piece + 200
    assert front.note in found.train.facts and "A model." in found.train.facts


def test_a_held_out_text_leaves_the_others_whole(tmp_path):
    texts = states.Texts({"a": make_ids(22)}, {"b": make_ids(15, 1)}, window=WINDOW)
    found = write(tmp_path, texts)
    assert len(joined(found.train)[1]) == 21 and len(joined(found.heldout)[1]) == 14


def test_an_interrupted_computation_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "PIECE", 2 * 2 * WINDOW * DIM)
    texts = states.Texts({"a": make_ids(20 * WINDOW + 1)}, {}, window=WINDOW)
    whole = write(tmp_path / "whole", texts)
    calls = []

    def stops(ids_BS):
        calls.append(len(ids_BS))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read_windows(ids_BS)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cut", texts, read=stops)
    with pytest.raises(ValueError, match="has 42 of 133 states .* interrupted"):
        states.read(tmp_path / "cut")
    rest = write(tmp_path / "cut", texts, read=stops)
    # Three pieces of two windows were there; 14 windows of the 20 are left.
    assert sum(calls[4:]) == 14
    assert rest.digest == whole.digest
    for one, other in ((rest.train, whole.train), (rest.heldout, whole.heldout)):
        for mine, theirs in zip(joined(one), joined(other), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("change", ["text", "window", "table", "front"])
def test_states_of_something_else_are_not_mixed_in(tmp_path, change):
    ids = make_ids(50)
    write(tmp_path, states.Texts({"a": ids}, {}, window=WINDOW))
    texts = states.Texts(
        {"a": make_ids(50, 3) if change == "text" else ids},
        {},
        window=WINDOW + (change == "window"),
    )
    changes = {"table_VD": make_model().table_VD + 1} if change == "table" else {}
    with pytest.raises(ValueError, match="has states of something else"):
        write(tmp_path, texts, FRONT if change == "front" else NO_FRONT, **changes)


def test_other_frameworks_write_plain_arrays(tmp_path):
    rng = np.random.default_rng(0)
    hidden_ND = rng.normal(size=(40, DIM)).astype(np.float16)
    table_VD = rng.normal(size=(VOCAB, DIM))
    labels_N = make_ids(40)
    np.save(tmp_path / "states.npy", hidden_ND)
    np.save(tmp_path / "labels.npy", labels_N)
    np.save(tmp_path / "table.npy", table_VD)
    found = states.read(tmp_path)
    assert found.heldout is None and found.train.bias_V is None
    np.testing.assert_array_equal(found.train.tokens[0].hidden_TD, hidden_ND)
    assert isinstance(found.train.tokens[0].hidden_TD, np.memmap)
    np.testing.assert_array_equal(found.train.table_VE, table_VD.astype(np.float32))
    np.savez(tmp_path / "all.npz", hidden=hidden_ND, table=table_VD, labels=labels_N)
    packed = states.read(tmp_path / "all.npz")
    np.testing.assert_array_equal(packed.train.tokens[0].labels_T, labels_N)
    np.save(tmp_path / "labels.npy", labels_N.astype(np.uint16))
    again = states.read(tmp_path)
    np.testing.assert_array_equal(again.train.tokens[0].labels_T, labels_N)
    np.save(tmp_path / "table.npy", 2 * table_VD)
    assert states.read(tmp_path).digest != again.digest
    np.save(tmp_path / "heldout-states.npy", hidden_ND)
    with pytest.raises(ValueError, match=r"heldout-labels\.npy is missing beside"):
        states.read(tmp_path)
    (tmp_path / "heldout-states.npy").unlink()
    texts = states.Texts({"a": make_ids(50)}, {}, window=WINDOW)
    with pytest.raises(ValueError, match=r"arrays and no states\.json that says"):
        write(tmp_path, texts)
    np.save(tmp_path / "labels.npy", labels_N[:-1])
    with pytest.raises(
        ValueError, match=r"states.npy \(40, 5\) and labels.npy \(39,\)"
    ):
        states.read(tmp_path)
    np.save(tmp_path / "labels.npy", labels_N + VOCAB)
    with pytest.raises(ValueError, match=r"labels.npy must be in \[0, 37\)"):
        states.read(tmp_path)


def test_what_cannot_be_kept_is_refused(tmp_path):
    texts = states.Texts({"a": make_ids(50)}, {}, window=WINDOW)
    capped = softcap(3.0).activation({})
    with pytest.raises(ValueError, match="changes its logits after the table"):
        write(tmp_path, texts, activation=capped)
    with pytest.raises(ValueError, match="made has 7 positions"):
        write(tmp_path, texts, FRONT, limit=7)
    with pytest.raises(ValueError, match="one is to be held out"):
        write(tmp_path, states.Texts({"a": make_ids(9)}, {}, window=WINDOW))
    with pytest.raises(ValueError, match="fewer than a window of 7"):
        write(tmp_path, states.Texts({"a": make_ids(7)}, {}, window=WINDOW))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="no files table-000.npy"):
        states.read(tmp_path)


def test_a_folder_says_what_it_is(tmp_path):
    write(tmp_path, states.Texts({"a": make_ids(50)}, {}, window=WINDOW), FRONT)
    about = json.loads((tmp_path / "states.json").read_text())
    assert about["model"] == "made" and about["width"] == DIM and about["bos"] == [36]
    assert about["texts"][0]["tokens"] == 50 and len(about["texts"][0]["sha256"]) == 64
    assert about["train"] == 6 * WINDOW and about["heldout"] == WINDOW
