"""Attention by layer and head, on weights that are known."""

import functools

import numpy as np
import pytest

from softbottle.analysis import report
from softbottle.analysis.instruments import attention, attention_layers, normalizers
from tests import pictures

LAYERS, STRETCHES, HEADS, LENGTH, DIM = 2, 3, 4, 31, 6


def make_states(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(STRETCHES * LENGTH, DIM)) for _ in range(LAYERS)]


def random_logits(seed=1):
    rng = np.random.default_rng(seed)
    return 2 * rng.normal(size=(LAYERS, STRETCHES, HEADS, LENGTH))


@functools.cache
def measured():
    return attention_layers.measure(random_logits(), make_states())


def test_a_head_on_one_token_and_a_head_on_all_have_their_spread():
    logits_LWHS = np.zeros((LAYERS, STRETCHES, HEADS, LENGTH))
    logits_LWHS[:, :, 0, 7] = 200.0
    found = attention_layers.measure(logits_LWHS, make_states())
    np.testing.assert_allclose(found.spread_LH[:, 0], 1 / LENGTH, rtol=1e-6)
    np.testing.assert_allclose(found.spread_LH[:, 1:], 1.0, rtol=1e-6)
    np.testing.assert_allclose(found.largest_LH[:, 0], 1.0)
    np.testing.assert_allclose(found.largest_LH[:, 1:], 1 / LENGTH)


def test_each_head_is_measured_on_the_states_that_enter_its_layer():
    logits_LWHS, states = random_logits(), make_states()
    found = attention_layers.measure(logits_LWHS, states)
    inside_WH = []
    for stretch in range(STRETCHES):
        values_SD = states[1][stretch * LENGTH : (stretch + 1) * LENGTH]
        values_SD = values_SD / np.linalg.norm(values_SD, axis=1, keepdims=True)
        weights_HS = normalizers.softmax(logits_LWHS[1, stretch])
        one = attention.selection(weights_HS, values_SD, attention_layers.SELECTED)
        inside_WH.append(one.inside_R)
    np.testing.assert_allclose(found.inside_LH[1], np.mean(inside_WH, axis=0))
    assert np.all(found.tightness_LH <= 1) and np.all(found.tightness_LH > 0)


def test_even_weights_look_blind_from_the_first_token_and_sharp_ones_do_not():
    even = 1e-6 * random_logits()
    assert attention_layers.measure(even, make_states()).critical_L.tolist() == [1, 1]
    sharp = 5 * random_logits()
    critical_L = attention_layers.measure(sharp, make_states()).critical_L
    assert np.all((critical_L == 0) | (critical_L > 1))


def test_a_constant_added_to_a_row_changes_nothing():
    logits_LWHS, states = random_logits(), make_states()
    moved = attention_layers.measure(logits_LWHS - 50, states)
    for one, other in zip(
        attention_layers.measure(logits_LWHS, states)[:-2], moved[:-2], strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_every_normaliser_is_measured_on_the_same_logits():
    logits_LWHS, states = random_logits(), make_states()
    found = attention_layers.measure(logits_LWHS, states)
    assert set(found.normalised) == set(normalizers.ALL)
    softmax, sparsemax = (found.normalised[n] for n in ("softmax", "sparsemax"))
    assert softmax["spread"] == pytest.approx(found.spread_LH.mean())
    assert softmax["inside"] == pytest.approx(found.inside_LH.mean())
    weights_LWHS = normalizers.sparsemax(logits_LWHS)
    largest = np.mean(
        [[row.max() for row in w.reshape(-1, LENGTH)] for w in weights_LWHS]
    )
    assert sparsemax["largest"] == pytest.approx(largest)
    # Sharper weights: fewer tokens are read, and the largest weighs more.
    assert sparsemax["spread"] < softmax["spread"]
    assert sparsemax["largest"] > softmax["largest"]


def test_the_middle_layer_s_heads_are_measured_in_full():
    logits_LWHS, states = random_logits(), make_states()
    found = attention_layers.measure(logits_LWHS, states).limits
    values_SD = states[1][:LENGTH]
    values_SD = values_SD / np.linalg.norm(values_SD, axis=1, keepdims=True)
    alone = attention.survey(logits_LWHS[1, 0], values_SD)
    assert set(found.selections) == set(normalizers.ALL)
    assert found.critical == alone.critical and list(found.counts_N) == [
        1,
        2,
        5,
        10,
        20,
    ]
    np.testing.assert_allclose(found.sensitivity_N, alone.sensitivity_N)
    assert np.all(found.sensitivity_N <= 1 / (2 * found.temperatures_N))


def test_intervals_are_over_stretches_and_close_where_they_are_alike():
    logits_LWHS, states = random_logits(), make_states()
    found = attention_layers.measure(logits_LWHS, states)
    medians = [
        np.median(map_LH)
        for map_LH in (found.spread_LH, found.inside_LH, found.largest_LH)
    ]
    assert np.all(found.interval_M2[:, 0] <= medians)
    assert np.all(medians <= found.interval_M2[:, 1])
    low, high = found.normalised["softmax"]["largest_interval"]
    # The mean over three stretches: Student's t of two degrees is 4.303.
    weights_LWHS = normalizers.softmax(logits_LWHS)
    mean_W = weights_LWHS.max(axis=-1).mean(axis=(0, 2))
    reach = 4.303 * mean_W.std(ddof=1) / np.sqrt(3)
    assert high - low == pytest.approx(2 * reach, rel=0.1)
    alike = np.repeat(logits_LWHS[:, :1], STRETCHES, axis=1)
    same = [np.tile(layer[:LENGTH], (STRETCHES, 1)) for layer in states]
    closed = attention_layers.measure(alike, same)
    np.testing.assert_allclose(closed.interval_M2[:, 0], closed.interval_M2[:, 1])
    single = attention_layers.measure(logits_LWHS[:, :1], [x[:LENGTH] for x in states])
    assert np.isnan(single.interval_M2).all()
    assert "ntervals hold" not in attention_layers.section({"one": single}).reading


@pytest.mark.slow
def test_the_section_names_each_model(tmp_path, monkeypatch):
    found = measured()
    section = attention_layers.section({"one": found, "two": found})
    assert "one: over 31 tokens" in section.reading and "two:" in section.reading
    assert "bootstrap over 3 stretches of text" in section.reading
    assert "bootstrap over 3 stretches of text" in section.remarks
    low, high = found.interval_M2[0]
    shown = f"{np.median(found.spread_LH):.1%} ({low:.1%} to {high:.1%})"
    assert section.tables[0].rows[0][2] == shown
    assert len({one.name for one in section.figures}) == len(section.figures)
    pictures.lay_out_only(monkeypatch)
    # The second model's own are the first's once more.
    figures = [one for one in section.figures if not one.name.endswith("-1")]
    report.write(tmp_path, "Heads", [section._replace(figures=figures)])


def test_a_layer_is_measured_over_the_tokens_that_it_sees():
    logits_LWHS, states = random_logits(), make_states()
    found = attention_layers.measure(logits_LWHS, states, spans_L=[11, LENGTH])
    cut = [layer.reshape(STRETCHES, LENGTH, DIM)[:, -11:] for layer in states]
    short = attention_layers.measure(
        logits_LWHS[..., -11:], [layer.reshape(-1, DIM) for layer in cut]
    )
    whole = attention_layers.measure(logits_LWHS, states)
    for name in ("inside_LH", "tightness_LH", "largest_LH", "spread_LH", "critical_L"):
        one = getattr(found, name)
        np.testing.assert_allclose(one[0], getattr(short, name)[0], err_msg=name)
        np.testing.assert_allclose(one[1], getattr(whole, name)[1], err_msg=name)
    # What lies outside is of no account.
    moved_LWHS = logits_LWHS.copy()
    moved_LWHS[0, ..., :-11] = 50
    moved = attention_layers.measure(moved_LWHS, states, spans_L=[11, LENGTH])
    np.testing.assert_array_equal(moved.spread_LH, found.spread_LH)
    for spans_L in ([5, LENGTH], [11, LENGTH + 1], [11]):
        with pytest.raises(ValueError, match="layers must see more than 5"):
            attention_layers.measure(logits_LWHS, states, spans_L=spans_L)


@pytest.mark.parametrize(
    "critical, words",
    [
        ([0, 0], "in no layer, up to 20 tokens"),
        ([1, 0], "from 1 token on in 1 layer of 2"),
        ([2, 4], "from 3 tokens on (median) in 2 layers of 2"),
    ],
)
def test_numbers_of_layers_and_tokens_are_grammar_too(critical, words):
    found = measured()._replace(critical_L=np.array(critical))
    assert words in attention_layers.section({"one": found}).reading


def test_shapes_that_disagree_are_errors():
    with pytest.raises(ValueError, match="as many layers of states"):
        attention_layers.measure(random_logits(), make_states()[:1])
    with pytest.raises(ValueError, match="as many layers of states"):
        attention_layers.measure(random_logits()[..., :5], make_states())
