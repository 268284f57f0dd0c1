"""Two models on one text, against dense float64 sums written out here."""

import dataclasses

import numpy as np
import pytest

from softbottle.analysis import capture, report
from softbottle.analysis.instruments import divergence, divergence_section, predictions
from softbottle.analysis.settings import DEFAULT
from softbottle.data import frequency
from softbottle.ops.mixture.options import Options
from tests import oracle, pictures

# One block of positions and a part of another; rows beyond the vocabulary.
TOKENS, WORDS, ROWS = predictions.BLOCK + 67, 37, 40


def make_mixture(name="mixture", tokens=TOKENS, seed=0):
    """A capture with a head of its own, in blocks of any size, and log P [T, V]."""
    inputs = oracle.make_inputs("mos", tokens=tokens, rows=ROWS, seed=seed, scale=2.0)
    params, table_VE, bias_V, hidden_TD = oracle.cast(inputs[:4], "float32")
    labels_T = np.random.default_rng(9).integers(WORDS, size=tokens)
    dense_TV = oracle.log_probs(
        "mos",
        inputs.params,
        inputs.table_VE[:WORDS],
        inputs.bias_V[:WORDS],
        *inputs[3:4],
    )
    made = capture.Capture(
        name,
        np.asarray(table_VE)[:WORDS],
        np.asarray(bias_V)[:WORDS],
        readout=capture.Readout(
            oracle.CASES["mos"].head, (params, table_VE, bias_V), Options(vocab=WORDS)
        ),
        tokens=[
            capture.Tokens(np.asarray(hidden_TD)[part], labels_T[part])
            for part in (slice(0, 101), slice(101, None))
        ],
    )
    return made, dense_TV


def make_softmax(name="softmax", tokens=TOKENS, seed=1):
    rng = np.random.default_rng(seed)
    table_VD, bias_V = rng.normal(size=(WORDS, 5)), rng.normal(size=WORDS)
    hidden_ND = rng.normal(size=(tokens, 5))
    labels_T = np.random.default_rng(9).integers(WORDS, size=tokens)
    arrays = [array.astype(np.float32) for array in (table_VD, bias_V, hidden_ND)]
    made = capture.Capture.from_states(
        arrays[2], arrays[0], arrays[1], labels_T, name=name
    )
    table_VD, bias_V, hidden_ND = (array.astype(np.float64) for array in arrays)
    logits_NV = hidden_ND @ table_VD.T + bias_V[None]
    return made, logits_NV - np.log(np.exp(logits_NV).sum(axis=1, keepdims=True))


def by_hand(log_p_TV, log_q_TV, labels_T):
    """Every quantity of every position, word by word."""
    rows = []
    for log_p_V, log_q_V, label in zip(log_p_TV, log_q_TV, labels_T, strict=True):
        p_V, q_V = np.exp(log_p_V), np.exp(log_q_V)
        m_V = (p_V + q_V) / 2
        entropy_m, entropy_p, entropy_q = (-(x @ np.log(x)) for x in (m_V, p_V, q_V))
        a, b = np.argsort(-p_V), np.argsort(-q_V)
        rows.append(
            {
                "forward_T": sum(
                    p * np.log(p / q) for p, q in zip(p_V, q_V, strict=True)
                ),
                "backward_T": sum(
                    q * np.log(q / p) for p, q in zip(p_V, q_V, strict=True)
                ),
                "shannon_T": entropy_m - (entropy_p + entropy_q) / 2,
                "variation_T": np.maximum(p_V - q_V, 0).sum(),
                "loss_a_T": -log_p_V[label],
                "loss_b_T": -log_q_V[label],
                "overlap_TJ": [len({*a[:k]} & {*b[:k]}) / k for k in (1, 2, 5, 10, 20)],
                "a_in_b_TJ": [a[0] in b[:k] for k in (1, 2, 5, 10, 20)],
                "b_in_a_TJ": [b[0] in a[:k] for k in (1, 2, 5, 10, 20)],
            }
        )
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture(scope="module")
def pair():
    """(mixture, softmax, what is measured, what it should be)."""
    (a, log_p_TV), (b, log_q_TV) = make_mixture(), make_softmax()
    labels_T = capture.joined(a.tokens).labels_T
    return a, b, divergence.measure(a, b), by_hand(log_p_TV, log_q_TV, labels_T)


def test_a_mixture_beside_a_softmax_is_what_dense_sums_give(pair):
    _, _, found, expected = pair
    assert found.counts_J.tolist() == [1, 2, 5, 10, 20]
    for name, value in expected.items():
        np.testing.assert_allclose(
            getattr(found, name), value, rtol=2e-5, atol=2e-6, err_msg=name
        )


def test_divergences_keep_within_their_bounds(pair):
    *_, found, _ = pair
    assert found.shannon_T.max() < np.log(2) and found.variation_T.max() < 1
    for kl_T in (found.forward_T, found.backward_T):
        assert np.all(found.variation_T**2 <= kl_T / 2)
    assert found.variation_T.max() > 0.5  # or the bounds were out of reach


def test_pieces_of_a_block_change_nothing(pair, monkeypatch):
    a, b, whole, _ = pair
    monkeypatch.setattr(divergence, "_PIECE", 10 * WORDS)
    for found, expected in zip(divergence.measure(a, b), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_no_more_than_a_block_of_either_model_is_held(pair, monkeypatch):
    a, b, *_ = pair
    log, real = [], predictions.blocks

    def blocks(model, precision):
        for block_CV in real(model, precision):
            log.append((model.name, len(block_CV)))
            yield block_CV

    monkeypatch.setattr(predictions, "blocks", blocks)
    divergence.measure(a, b)
    sizes = (predictions.BLOCK, TOKENS - predictions.BLOCK)
    assert log == [(name, n) for n in sizes for name in ("mixture", "softmax")]


def test_float64_brings_both_within_its_rounding():
    (a, _), (b, log_q_TV) = make_softmax("one", seed=2), make_softmax("two", seed=3)
    found = divergence.measure(a, b, "float64")
    labels_T = capture.joined(b.tokens).labels_T
    expected_T = -log_q_TV[np.arange(TOKENS), labels_T]
    np.testing.assert_allclose(found.loss_b_T, expected_T, rtol=1e-12)


def test_a_model_and_itself_differ_by_nothing(pair):
    a = pair[0]
    found = divergence.measure(a, dataclasses.replace(a, name="again"))
    for name in ("forward_T", "backward_T", "shannon_T", "variation_T"):
        np.testing.assert_allclose(getattr(found, name), 0, atol=1e-12, err_msg=name)
    assert found.overlap_TJ.min() == 1 and found.a_in_b_TJ.all()
    compared = divergence.compare(found, np.zeros(WORDS, int))
    assert compared.whole(divergence.CORRELATION).value == pytest.approx(1)
    assert compared.whole(divergence.AHEAD) == (0, 0, 0)


def test_no_divergence_is_negative_where_rounding_is_all_there_is():
    a, _ = make_softmax()
    nudged = dataclasses.replace(a, bias_V=a.bias_V + np.float32(3e-7))
    found = divergence.measure(a, nudged)
    assert min(found.forward_T.min(), found.backward_T.min()) > -1e-15
    assert 0 <= found.shannon_T.max() < 1e-10


def test_means_are_those_of_the_words_of_each_decile(pair):
    *_, positions, expected = pair
    labels_T = positions.labels_T
    decile_V = frequency.deciles(labels_T, WORDS)
    found = divergence.compare(positions, decile_V)
    decile_T = decile_V[labels_T]
    assert found.tokens_N.tolist() == [*np.bincount(decile_T, minlength=10), TOKENS]
    for decile in (*range(10), None):
        inside_T = np.ones(TOKENS, bool) if decile is None else decile_T == decile
        at = -1 if decile is None else decile
        means = dict(zip(found.quantities, found.value_NM[at], strict=True))
        assert means[divergence.FORWARD] == pytest.approx(
            expected["forward_T"][inside_T].mean(), rel=1e-5
        )
        assert means["5 first words in common"] == pytest.approx(
            expected["overlap_TJ"][inside_T, 2].mean(), rel=1e-12
        )
        losses = expected["loss_a_T"][inside_T], expected["loss_b_T"][inside_T]
        assert means[divergence.AHEAD] == pytest.approx(
            np.mean(losses[0] - losses[1]), abs=1e-5
        )
        assert means[divergence.CORRELATION] == pytest.approx(
            np.corrcoef(*losses)[0, 1], abs=1e-5
        )
    assert np.all(found.low_NM <= found.value_NM)
    assert np.all(found.value_NM <= found.high_NM)


def test_a_decile_without_tokens_has_no_number(pair):
    *_, positions, _ = pair
    decile_V = np.where(np.arange(WORDS) < 9, 0, 7)
    found = divergence.compare(positions, decile_V)
    empty = np.isnan(found.value_NM).all(axis=1)
    assert empty.tolist() == [n not in (0, 7, 10) for n in range(11)]


def test_correlations_of_two_tokens_are_not_beyond_one():
    for seed in range(8):
        (a, _), (b, _) = make_softmax("a", 20, seed), make_softmax("b", 20, seed + 8)
        positions = divergence.measure(a, b)
        decile_V = frequency.deciles(positions.labels_T, WORDS)
        found = divergence.compare(positions, decile_V)
        known_NM = np.isfinite(found.value_NM)
        assert np.all(abs(found.value_NM[known_NM[:, -1], -1]) <= 1)
        known_NM &= np.isfinite(found.low_NM)
        assert np.all((found.low_NM <= found.value_NM)[known_NM])
        assert np.all((found.value_NM <= found.high_NM)[known_NM])


def test_the_longer_of_two_texts_is_cut_to_the_shorter():
    (a, _), (b, _) = make_softmax("long", 45), make_softmax("short", 31)
    # The same labels come first.
    labels_T = capture.joined(b.tokens).labels_T
    a = dataclasses.replace(
        a,
        tokens=[
            capture.Tokens(a.tokens[0].hidden_TD, np.append(labels_T, labels_T[:14]))
        ],
    )
    assert len(divergence.measure(a, b).forward_T) == 31


@pytest.mark.parametrize(
    "change, message",
    [
        ({"table_VE": np.ones((38, 5))}, "vocabulary of 37 and other one of 38"),
        ({"words": [*"x" * 12, "y", *"x" * 24]}, "first word 12: 'x' and 'y'; only"),
        ({"tokens": "moved"}, r"different tokens, first at position 3: 'x' and 'x'"),
        ({"tokens": None}, "has no tokens"),
    ],
)
def test_models_that_cannot_be_compared_are_refused_in_a_line(change, message):
    a, _ = make_softmax()
    a = dataclasses.replace(a, words=["x"] * WORDS)
    if change.get("tokens") == "moved":
        hidden_TD, labels_T = a.tokens[0]
        labels_T = labels_T.copy()
        labels_T[3] = (labels_T[3] + 1) % WORDS
        change = {"tokens": [capture.Tokens(hidden_TD, labels_T)]}
    other = dataclasses.replace(a, name="other", **change)
    with pytest.raises(ValueError, match=message) as refused:
        divergence.measure(a, other)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_the_section_says_which_model_is_better_and_how_sure(
    pair, tmp_path, monkeypatch
):
    a, b, positions, expected = pair
    section = divergence_section.inspect([a, b], DEFAULT)
    assert f"KL(a||b) is {expected['forward_T'].mean():.3f} (" in section.reading
    gap = expected["loss_a_T"].mean() - expected["loss_b_T"].mean()
    better = "softmax" if gap > 0 else "mixture"
    told = section.numbers[divergence.AHEAD]
    sure = told["low"] > 0 or told["high"] < 0
    assert (f"so that {better} is better" in section.reading) == sure
    assert ("told from chance" in section.reading) != sure
    verdict = section.verdicts["mixture and softmax"]
    assert (f"{better} predicts better, by {abs(gap):.3f} (" in verdict) == sure
    assert ("told from chance" in verdict) != sure
    rows = {row[0]: row[1:] for row in section.tables[0].rows}
    shown = rows["loss of a less loss of b (nats per token)"]
    assert shown == (f"{gap:+.3f}", f"{told['low']:+.3f} to {told['high']:+.3f}")
    assert "bootstrap over 16 windows of 20 positions" in section.reading
    assert "words of mixture and softmax are not known" in section.reading
    known = dataclasses.replace(a, words=["x"] * WORDS)
    assert "words of softmax are not known" in (
        divergence_section.inspect([known, b], DEFAULT).reading
    )
    names = [figure.name for figure in section.figures]
    assert len(names) == 6 and all(name.startswith("compare-") for name in names)
    pictures.lay_out_only(monkeypatch)
    report.write(tmp_path, "Two models", [section])
    with pytest.raises(ValueError, match="two models are compared, not 1"):
        divergence_section.inspect([a], DEFAULT)
    assert len(positions.labels_T) == section.numbers["positions"] == TOKENS
