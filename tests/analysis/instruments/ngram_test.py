"""The next-word matrix of a corpus, and how fast its spectrum falls."""

import collections
import types

import numpy as np
import pytest
from scipy import sparse

from softbottle.analysis import report
from softbottle.analysis.instruments import ngram

VOCAB = 23


def make_ids(length=900, seed=0):
    rng = np.random.default_rng(seed)
    return rng.zipf(1.5, size=length).clip(1, VOCAB).astype(np.int32) - 1


def dense_w_error(matrix_CV):
    sigma = np.linalg.svd(matrix_CV, compute_uv=False)
    tails = np.sqrt(np.cumsum(sigma[::-1] ** 2)[::-1])
    return np.append(tails, 0.0) / np.linalg.norm(matrix_CV)


@pytest.mark.parametrize("order", [2, 3, 5])
def test_the_matrix_holds_the_next_word_shares_of_a_plain_count(order):
    ids = make_ids()
    counted = collections.defaultdict(collections.Counter)
    for start in range(len(ids) - order + 1):
        *context, word = ids[start : start + order].tolist()
        counted[tuple(context)][word] += 1
    found = ngram.next_word(ids, VOCAB, order)
    assert found.matrix_CV.shape == (len(counted), VOCAB)
    rows = zip(
        found.contexts_CN.tolist(),
        found.counts_C,
        found.matrix_CV.toarray(),
        strict=True,
    )
    for context, count, share_V in rows:
        words = counted.pop(tuple(context))
        assert count == words.total()
        expected_V = [words[word] / count for word in range(VOCAB)]
        np.testing.assert_allclose(share_V, expected_V, rtol=1e-14)
    assert not counted


@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("dimensions", [3, 11, VOCAB])
def test_w_error_equals_that_of_a_dense_svd(order, dimensions):
    matrix_CV = ngram.next_word(make_ids(), VOCAB, order).matrix_CV
    truth_D = dense_w_error(matrix_CV.toarray())[: dimensions + 1]
    found = ngram.w_error(matrix_CV, dimensions)
    np.testing.assert_allclose(found.error_D, truth_D, atol=2e-7)
    assert found.error_D[0] == 1.0
    assert np.all(found.lower_D <= truth_D + 1e-7)
    np.testing.assert_allclose(found.frobenius, np.linalg.norm(matrix_CV.toarray()))


@pytest.mark.parametrize("passes", [1, 6])
def test_the_bounds_hold_where_the_spectrum_is_flat_and_the_basis_poor(
    monkeypatch, passes
):
    monkeypatch.setattr(ngram, "_PASSES", passes)
    matrix_CV = np.random.default_rng(1).normal(size=(311, 211))
    truth_D = dense_w_error(matrix_CV)[:41]
    found = ngram.w_error(matrix_CV, 40)
    assert np.all(found.lower_D <= truth_D + 1e-7)
    assert np.all(found.error_D >= truth_D - 1e-7)
    if passes == 6:
        # A flat spectrum is the worst there is, and still known to a fifth.
        assert np.max(found.error_D - found.lower_D) < 0.2


def test_the_bounds_meet_where_the_spectrum_falls():
    rng = np.random.default_rng(2)
    left, right = (np.linalg.qr(rng.normal(size=(n, 90))).Q for n in (130, 101))
    matrix_CV = left * 0.8 ** np.arange(90) @ right.T
    found = ngram.w_error(matrix_CV, 20)
    truth_D = dense_w_error(matrix_CV)[:21]
    np.testing.assert_allclose(found.error_D, truth_D, rtol=1e-6)
    np.testing.assert_allclose(found.lower_D, truth_D, rtol=1e-3)


def test_a_matrix_of_known_rank_has_no_error_from_there_on():
    word_V = np.random.default_rng(0).dirichlet(np.ones(VOCAB), size=4)
    matrix_CV = np.repeat(word_V, 30, axis=0)
    error_D = ngram.w_error(matrix_CV, 6).error_D
    assert error_D[3] > 1e-2 and np.all(error_D[4:] < 1e-6)


def test_a_block_of_one_column_gives_the_same_numbers(monkeypatch):
    matrix_CV = ngram.next_word(make_ids(), VOCAB, 3).matrix_CV
    whole = ngram.w_error(matrix_CV, 5).error_D
    monkeypatch.setattr(ngram, "_BLOCK_BYTES", 1)
    np.testing.assert_allclose(ngram.w_error(matrix_CV, 5).error_D, whole, atol=1e-9)


def test_bad_corpora_and_matrices_are_named():
    ids = make_ids()
    with pytest.raises(ValueError, match="4 ids is shorter than n = 5"):
        ngram.next_word(ids[:4], VOCAB, 5)
    with pytest.raises(ValueError, match="order must be >= 2, got 1"):
        ngram.next_word(ids, VOCAB, 1)
    with pytest.raises(ValueError, match=r"\[0, 7\)"):
        ngram.next_word(ids, 7, 2)
    with pytest.raises(ValueError, match=r"shape \(30, 30\)"):
        ngram.next_word(ids.reshape(30, 30), VOCAB, 2)
    with pytest.raises(ValueError, match="1 entries not finite"):
        ngram.w_error(np.array([[1.0, np.nan], [0.5, 0.5]]), 1)
    with pytest.raises(ValueError, match="not zero"):
        ngram.w_error(sparse.csr_array((3, 4)), 1)
    with pytest.raises(ValueError, match=r"\[1, 2\], got 3"):
        ngram.w_error(np.eye(2), 3)


def test_corpora_stand_side_by_side_in_the_report(tmp_path):
    errors = {
        name: ngram.w_error(ngram.next_word(make_ids(seed=n), VOCAB, 2).matrix_CV, 20)
        for n, name in enumerate(["one", "two"])
    }
    section = ngram.section(errors)
    assert "one: at" in section.reading and "two: at" in section.reading
    half = section.numbers["one"]["half_at"]
    error_D = errors["one"].error_D
    assert error_D[half] <= 0.5 < error_D[half - 1]
    report.write(tmp_path, "Corpora", [section])
    assert (tmp_path / "ngram-w-error.png").exists()


def test_texts_of_many_models_each_have_a_line(monkeypatch):
    readers = {
        f"c{text}m{model}": types.SimpleNamespace(
            width=8,
            settings=None,
            text=types.SimpleNamespace(
                ids=np.full(3, text), dimensions=8, title="text of {}"
            ),
        )
        for text in range(2)
        for model in range(4)
    }
    monkeypatch.setattr(ngram, "_of_text", lambda text, settings: text)
    monkeypatch.setattr(ngram, "section", lambda errors, widths: (errors, widths))
    errors, widths = ngram.compare(readers)
    titles = [f"text of c{n}m0, c{n}m1, c{n}m2 and 1 more" for n in range(2)]
    assert [*errors] == titles
    assert [len(named) for named in widths.values()] == [4, 4]
