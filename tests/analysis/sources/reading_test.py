"""How a pretrained model reads a text, with a model that is a few lines of NumPy."""

import lzma

import numpy as np
import pytest

from softbottle.analysis import inspection
from softbottle.analysis.sources import reading
from softbottle.analysis.sources.reading import Front, Model, Reading, Trace

VOCAB, DIM, LAYERS, HEADS = 37, 5, 2, 3
WINDOW, POSITIONS = 16, 40
NO_FRONT = Front((), "Beginning of sequence: none.")
BOS = Front((36,), "Beginning of sequence: 36.")


def make_ids(folder, count=100, vocab=VOCAB - 1):
    path = folder / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, vocab, count))
    return path


def make_model(**changes):
    table_VD = np.random.default_rng(1).normal(size=(VOCAB, DIM)).astype(np.float32)
    return Model("made", table_VD)._replace(**changes)


def trace(ids_S, span=None):
    """States that tell the token, its place, and all tokens before it."""
    place_S = np.arange(len(ids_S), dtype=np.float32)
    before_S = np.cumsum(ids_S).astype(np.float32)
    columns = [ids_S.astype(np.float32) + 1, place_S, before_S, place_S % 3, place_S**2]
    state_SD = np.stack(columns, axis=1)
    logits_LHS = np.sin(np.arange(LAYERS * HEADS * len(ids_S))).astype(np.float32)
    logits_LHS = logits_LHS.reshape(LAYERS, HEADS, -1) + before_S[None, None] / 100
    if span is not None:
        logits_LHS[1, :, :-span] = -np.inf
    return Trace([state_SD, 2 * state_SD, 3 * state_SD], logits_LHS)


def read(folder, front=NO_FRONT, model=None, trace=trace, **settings):
    made = Reading(make_ids(folder), POSITIONS, WINDOW)._replace(**settings)
    ids = reading.token_ids(made, VOCAB, lambda text: [])
    return reading.capture(model or make_model(), ids, front, trace, made)


def test_whole_windows_are_read_each_from_its_start(tmp_path):
    found, count = read(tmp_path), POSITIONS // WINDOW
    ids = np.load(tmp_path / "ids.npy")
    second = trace(ids[WINDOW : 2 * WINDOW])
    for layer_ND, expected_SD in zip(found.states, second.states, strict=True):
        assert len(layer_ND) == count * WINDOW
        np.testing.assert_array_equal(layer_ND[WINDOW : 2 * WINDOW], expected_SD)
    np.testing.assert_array_equal(found.logits_LWHS[:, 1], second.logits_LHS)
    np.testing.assert_array_equal(found.tokens[0].labels_T, ids[1 : count * WINDOW + 1])
    np.testing.assert_array_equal(found.text.ids, ids)
    assert found.bias_V is None and found.name == "made" and found.front is None


def test_more_of_the_text_is_read_for_the_head_s_states_alone(tmp_path):
    found = read(tmp_path, BOS, frozen=70)
    ids = np.load(tmp_path / "ids.npy")
    hidden_MD, labels_M = found.frozen
    assert len(hidden_MD) == 4 * WINDOW and len(found.states[-1]) == 2 * WINDOW
    np.testing.assert_array_equal(hidden_MD[: 2 * WINDOW], found.states[-1])
    last = trace(np.append(36, ids[3 * WINDOW : 4 * WINDOW])).states[-1][1:]
    np.testing.assert_array_equal(hidden_MD[3 * WINDOW :], last)
    np.testing.assert_array_equal(labels_M, ids[1 : 4 * WINDOW + 1])


def test_every_window_starts_with_what_stands_before_a_text(tmp_path):
    plain, found = read(tmp_path), read(tmp_path, BOS)
    ids = np.load(tmp_path / "ids.npy")
    second = trace(np.append(36, ids[WINDOW : 2 * WINDOW]))
    for layer_ND, expected_SD in zip(found.states, second.states, strict=True):
        np.testing.assert_array_equal(layer_ND[WINDOW:], expected_SD[1:])
    for front_WPD, expected_SD in zip(found.front, second.states, strict=True):
        np.testing.assert_array_equal(front_WPD[1], expected_SD[:1])
    # Attention sees it; the positions and labels are those without it.
    np.testing.assert_array_equal(found.logits_LWHS[:, 1], second.logits_LHS)
    assert found.logits_LWHS.shape[-1] == WINDOW + 1
    np.testing.assert_array_equal(found.tokens[0].labels_T, plain.tokens[0].labels_T)
    assert BOS.note in found.facts


def test_a_text_that_starts_with_it_already_has_it_once(tmp_path):
    ids = np.append(36, np.load(make_ids(tmp_path)))
    made = Reading("ids.npy", POSITIONS, WINDOW)
    found = reading.capture(make_model(), ids, BOS, trace, made)
    np.testing.assert_array_equal(found.states[-1], read(tmp_path, BOS).states[-1])
    assert any("taken off" in fact for fact in found.facts)


def test_attention_is_measured_over_the_tokens_that_a_layer_sees(tmp_path):
    def near(ids_S):
        return trace(ids_S, span=7)

    found = read(tmp_path, BOS, trace=near)
    assert found.spans_L.tolist() == [WINDOW + 1, 7]
    assert np.isfinite(found.logits_LWHS).all()
    (section,) = inspection.sections([found], ["attention"])
    numbers = section.numbers["made"]
    weights_WHS = np.exp(found.logits_LWHS[1][..., -7:].astype(float))
    weights_WHS /= weights_WHS.sum(axis=-1, keepdims=True)
    entropy_WH = -(weights_WHS * np.log(weights_WHS)).sum(axis=-1)
    np.testing.assert_allclose(
        numbers["spread_LH"][1], np.exp(entropy_WH).mean(axis=0) / 7, rtol=1e-5
    )
    assert "over 17 tokens (the last 7 of them in 1 of 2 layers" in section.reading


def test_a_model_without_attention_says_so_and_the_rest_is_measured(tmp_path):
    def bare(ids_S):
        return trace(ids_S)._replace(logits_LHS="the model has no attention")

    found = read(tmp_path, trace=bare)
    *measured, left_out = inspection.of_pretrained(found)
    assert len(measured) == len(inspection.PRETRAINED) - 1
    assert left_out.reading == "attention (made: the model has no attention)."
    (asked,) = inspection.of_pretrained(found, ["attention"])
    assert asked.reading == "skipped: made: the model has no attention."


def test_by_default_a_wide_model_reads_twice_its_width(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "POSITIONS", 12)
    found = read(tmp_path, positions=None, window=7)
    assert len(found.states[-1]) == 2 * (DIM + 2)
    monkeypatch.setattr(reading, "POSITIONS", 24)
    assert len(read(tmp_path, positions=None, window=8).states[-1]) == 24


def test_what_was_read_is_told(tmp_path):
    found = read(tmp_path, model=make_model(facts=("Model: made.",)))
    text = (
        "Text: ids.npy, 100 tokens. Read: the first 32, in 2 windows of 16, each from "
        "position 0."
    )
    assert found.facts == ("Model: made.", text, NO_FRONT.note)


def test_a_model_of_fewer_positions_than_a_window_is_refused_in_one_line(tmp_path):
    read(tmp_path, model=make_model(limit=WINDOW))
    read(tmp_path, BOS, model=make_model(limit=WINDOW + 1))
    for front, limit in ((NO_FRONT, WINDOW - 1), (BOS, WINDOW)):
        with pytest.raises(ValueError, match=f"{limit} positions.*--window=15"):
            read(tmp_path, front, model=make_model(limit=limit))


def test_texts_that_cannot_be_read_are_errors(tmp_path):
    def ids_of(path):
        return reading.token_ids(Reading(path), VOCAB, lambda text: [])

    with pytest.raises(ValueError, match="there is no text"):
        ids_of(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"lie in \[0, 37\)"):
        ids_of(make_ids(tmp_path, 90, 50))
    with pytest.raises(ValueError, match="three or more"):
        two = Reading(make_ids(tmp_path, 2))
        reading.capture(make_model(), ids_of(two.text), NO_FRONT, trace, two)


def test_ids_in_a_file_that_lies_and_text_that_is_none_are_errors(tmp_path):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (%d,), }" % 2**40
    raw = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "a.npy").write_bytes(raw + bytes(64))
    with pytest.raises(ValueError, match="a.npy .* there are 64"):
        reading.token_ids(Reading(tmp_path / "a.npy"), VOCAB, list)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="a.txt is no text in UTF-8"):
        reading.token_ids(Reading(tmp_path / "a.txt"), VOCAB, list)


def test_a_packed_text_is_the_text(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress("\ufeffcafé".encode()))
    ids = reading.token_ids(
        Reading(tmp_path / "a.txt.xz"),
        256,
        lambda text: [ord(letter) for letter in text],
    )
    assert ids.tolist() == [ord(letter) for letter in "café"]
