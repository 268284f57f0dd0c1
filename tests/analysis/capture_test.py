"""Instruments on captured arrays, against dense log-probabilities."""

import dataclasses

import numpy as np
import pytest
from scipy import special

from softbottle.analysis import capture as capture_lib
from softbottle.analysis import inspection
from softbottle.analysis.instruments import lowrank
from softbottle.analysis.settings import Settings


def make_capture(positions=41, vocab=97, dim=5, bias=True, **changes):
    rng = np.random.default_rng(0)
    values = {
        "name": "made",
        "table": rng.normal(size=(vocab, dim)).astype(np.float32),
        "bias": rng.normal(size=vocab).astype(np.float32) if bias else None,
        "hidden": [rng.normal(size=(positions, dim)).astype(np.float32)],
        "labels": rng.integers(0, vocab, positions),
        "ids": rng.integers(0, vocab, 300),
    }
    return capture_lib.Capture.from_states(**values | changes)


def log_probs(capture):
    logits_NV = capture.states[-1].astype(float) @ capture.table_VE.T.astype(float)
    return special.log_softmax(logits_NV + capture_lib.bias_or_zeros(capture), axis=1)


@pytest.mark.parametrize("positions, vocab", [(41, 97), (300, 31)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_spectrum_is_that_of_the_dense_matrix(positions, vocab, bias):
    capture = make_capture(positions, vocab, bias=bias)
    (section,) = inspection.sections([capture], ["rank"])
    found = section.numbers["made"]
    assert found["ranks"]["shape"] == (positions, vocab)
    assert found["ranks"]["ranks"]["float32"] == found["bound"] == (7 if bias else 6)
    sigma = np.linalg.svd(log_probs(capture), compute_uv=False)
    np.testing.assert_allclose(found["ranks"]["sigma"][:6], sigma[:6], rtol=1e-4)


@pytest.mark.parametrize(
    "positions, vocab, limit",
    [(7, 97, "positions"), (6, 97, "positions"), (8, 97, None), (41, 7, "words")],
)
def test_a_sample_no_larger_than_the_bound_is_named_as_the_limit(
    positions, vocab, limit
):
    capture = make_capture(positions, vocab, ids=None)
    (section,) = inspection.sections([capture], ["rank"])
    assert section.numbers["made"]["limit"] == limit
    assert ("the sample is the limit" in section.reading) == (limit == "positions")
    assert ("the vocabulary is the limit" in section.reading) == (limit == "words")


@pytest.mark.parametrize("precision, floor", [("float32", 1e-7), ("float64", 1e-13)])
def test_the_spectrum_is_drawn_as_far_as_it_is_resolved(precision, floor):
    settings = Settings(precision=precision)
    (section,) = inspection.sections([make_capture()], ["rank"], settings)
    sigma = section.numbers["made"]["ranks"]["sigma"]
    (axes,) = section.figures[0].figure.axes
    line = max(axes.lines, key=lambda line: len(line.get_xdata()))
    # Seven values of a softmax of width 5, a fall out of sight, and nothing after it.
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 9))
    np.testing.assert_allclose(line.get_ydata()[:7], sigma[:7] / sigma[0])
    assert axes.get_ylim()[0] == line.get_ydata()[7] < floor * 1.01
    assert [7, 7] in [list(line.get_xdata()) for line in axes.lines]


def test_a_head_by_itself_has_one_panel_and_a_caption_of_it():
    bare = make_capture(hidden=(), labels=None, ids=None)
    deep = make_capture(
        hidden=[np.ones((41, 3)) + np.eye(41, 3)] * 2
        + [np.random.default_rng(3).normal(size=(41, 5))]
    )
    for capture, panels in ((bare, 1), (deep, 3)):
        (section,) = inspection.sections([capture], ["saturation"])
        assert len(section.figures) == panels
        assert all(len(drawn.figure.axes) == 1 for drawn in section.figures)
        told = any("By layer" in drawn.reading for drawn in section.figures)
        assert told == (panels == 3)
        spectrum = section.figures[-1].figure.axes[0].lines[0]
        np.testing.assert_array_equal(spectrum.get_xdata(), np.arange(1, 6))


def test_captions_are_of_what_is_drawn():
    capture = make_capture()
    bare = dataclasses.replace(capture, mixed=capture.mixed._replace(ranks=()))
    for made, told in ((capture, True), (bare, False)):
        (section,) = inspection.sections([made], ["gradient"])
        assert ("lines: " in section.figures[0].reading) == told
    few = capture.trials._replace(sizes=[1, 2])
    for trials, told in ((capture.trials, True), (few, False)):
        made = dataclasses.replace(capture, trials=trials)
        (section,) = inspection.sections([made], ["argmax"])
        assert ("half the width" in section.figures[0].reading) == told
    alone = capture_lib.Capture("text", text=capture.text)
    for made, told in ((capture, True), (alone, False)):
        (section,) = inspection.sections([made], ["ngram"])
        assert ("width of a model" in section.figures[0].reading) == told


def test_the_loss_and_the_divergence_are_those_of_the_dense_matrix():
    capture = make_capture()
    (section,) = inspection.sections([capture], ["rank"])
    log_p_NV = log_probs(capture)
    nll = -np.mean(log_p_NV[np.arange(41), capture.tokens[0].labels_T])
    assert section.numbers["made"]["loss"] == pytest.approx(nll, rel=1e-5)
    kl_NN = special.rel_entr(np.exp(log_p_NV)[:, None], np.exp(log_p_NV)[None]).sum(-1)
    assert section.numbers["made"]["kl"] == pytest.approx(kl_NN.mean(), rel=1e-4)


def test_an_instrument_without_its_arrays_is_named_as_left_out():
    bare = make_capture(hidden=(), labels=None, ids=None)
    sections = inspection.sections([bare], list(inspection.INSTRUMENTS))
    titles = [section.title for section in sections]
    assert titles == ["Saturation", "What can be on top", "Left out"]
    absent = inspection.INSTRUMENTS.keys() - {"saturation", "argmax"}
    assert sections[-1].numbers["skipped"].keys() == absent


def test_heads_of_limited_rank_are_over_the_words_that_occur(monkeypatch):
    asked = []

    def cut(*arguments):
        asked.extend(arguments)
        return lowrank.LowRank(np.ones(1), np.ones(1), np.ones(1), 1)

    monkeypatch.setattr(lowrank, "cut", cut)
    words_N = np.random.default_rng(1).choice([5, 8, 60], 41)
    capture = make_capture(labels=words_N)
    inspection.sections([capture], ["lowrank"])
    hidden_ND, labels_N, ranks, own = asked
    assert ranks == [1, 2, 4, 5]
    np.testing.assert_array_equal(np.array([5, 8, 60])[labels_N], words_N)
    np.testing.assert_array_equal(own.table_VD, capture.table_VE[[5, 8, 60]])
    np.testing.assert_array_equal(own.bias_V, capture.bias_V[[5, 8, 60]])
    np.testing.assert_array_equal(hidden_ND, capture.states[-1])


def test_they_are_trained_on_more_of_the_text_where_there_is_more(monkeypatch):
    asked = []
    monkeypatch.setattr(lowrank, "cut", lambda *given: asked.extend(given))
    frozen_MD = np.random.default_rng(2).normal(size=(120, 5))
    capture = make_capture(frozen_MD=frozen_MD)
    lowrank.of_capture(capture, Settings())
    hidden_ND, labels_N, _, _ = asked
    np.testing.assert_array_equal(hidden_ND, frozen_MD)
    words_U = np.unique(capture.text.ids[1:121])
    np.testing.assert_array_equal(words_U[labels_N], capture.text.ids[1:121])


def test_the_width_of_the_model_is_shown_beside_its_text():
    (section,) = inspection.sections([make_capture()], ["ngram"])
    (found,) = section.numbers.values()
    assert len(found["error_D"]) == 2 * 5 + 1
    assert found["at the width of made"] == found["error_D"][5]
    assert f"at 5, the width of made, {found['error_D'][5]:.3f}" in section.reading


def test_in_float64_both_tolerances_agree_on_a_softmax():
    settings = Settings(precision="float64")
    (section,) = inspection.sections([make_capture()], ["rank"], settings)
    ranks = section.numbers["made"]["ranks"]
    assert ranks["entries"] == "float64"
    assert ranks["ranks"] == {"float32": 7, "float64": 7}


def test_a_large_vocabulary_is_sampled(monkeypatch):
    monkeypatch.setattr(capture_lib, "WORDS", 10)
    (section,) = inspection.sections([make_capture()], ["argmax"])
    assert section.numbers["words"]["made"]["tried"] == 10


def test_bad_arrays_and_unknown_instruments_are_errors():
    with pytest.raises(ValueError, match="telescope"):
        inspection.sections([make_capture()], ["telescope"])
    with pytest.raises(ValueError, match=r"\(41, 4\)"):
        make_capture(hidden=[np.ones((41, 4))])
    with pytest.raises(ValueError, match="not finite"):
        make_capture(table=np.full((97, 5), np.nan))


def test_files_of_arrays_are_mapped_and_stay_as_they_are(tmp_path):
    made = make_capture()
    hidden_ND = made.states[-1].astype(np.float16)
    np.save(tmp_path / "hidden.npy", hidden_ND)
    np.save(tmp_path / "table.npy", made.table_VE)
    found = capture_lib.Capture.from_states(
        tmp_path / "hidden.npy", str(tmp_path / "table.npy"), labels=range(41)
    )
    assert isinstance(found.tokens[0].hidden_TD, np.memmap)
    assert found.tokens[0].hidden_TD.dtype == np.float16
    np.testing.assert_array_equal(found.table_VE, made.table_VE)
    np.testing.assert_array_equal(found.tokens[0].labels_T, np.arange(41))
    np.savez(tmp_path / "all.npz", hidden=hidden_ND, table=made.table_VE)
    with np.load(tmp_path / "all.npz") as stored:
        packed = capture_lib.Capture.from_states(**stored)
    # In memory, what is narrow is widened: sums of it would lose what they add.
    assert packed.states[-1].dtype == np.float32
    np.testing.assert_array_equal(packed.states[-1], hidden_ND)


@pytest.mark.parametrize("entry", [0, 40])
def test_arrays_are_looked_through_in_parts(entry, monkeypatch):
    monkeypatch.setattr(capture_lib, "_READ", 12)
    hidden_ND = make_capture().states[-1].copy()
    make_capture(hidden=hidden_ND)
    hidden_ND[entry, 3] = np.inf
    with pytest.raises(ValueError, match="hidden has entries that are not finite"):
        make_capture(hidden=hidden_ND)


def test_labels_without_states_are_refused():
    with pytest.raises(ValueError, match="labels are of states, and no hidden ones"):
        make_capture(hidden=[])


def test_what_is_no_array_is_refused(tmp_path):
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"hidden: .*text.npy is no .npy file"):
        make_capture(hidden=tmp_path / "text.npy")
    with pytest.raises(ValueError, match="table: .* is no .npy file"):
        make_capture(table=tmp_path / "none.npy")
    with pytest.raises(ValueError, match="table must be numbers"):
        make_capture(table=np.full((97, 5), "x"))
