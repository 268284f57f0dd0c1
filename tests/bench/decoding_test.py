import jax.numpy as jnp
import pytest

from softbottle.bench import decoding, problem, race, worker
from softbottle.ops.mixture import api


@pytest.fixture(autouse=True)
def small(brief, monkeypatch):
    case = problem.Case("tiny", tokens=7, components=3, dim=5, vocab=101)
    monkeypatch.setitem(problem.DECODING, "tiny", case)
    monkeypatch.setattr(decoding, "OTHER_BUDGET_BYTES", 2 * 4 * 101)


def decode():
    result = race.decode(worker.in_process, [], ["auto"], seconds=0.01)
    return {row["variant"]: row for row in result["rows"]}


@pytest.mark.slow
def test_each_operation_is_checked_and_set_against_a_softmax():
    rows = decode()
    for kind in ("sample", "top_k", "log_probs"):
        mixture, softmax = rows[f"{kind}, auto"], rows[f"{kind}, auto, softmax"]
        assert mixture["status"] == softmax["status"] == "ok"
        ratio = mixture["ms"] / softmax["ms"]
        assert mixture["over"] == {"softmax": pytest.approx(ratio)}
        assert mixture["same_bits"] and mixture["of_dense"] > 0
    assert rows["log_probs, auto"]["error"] < 1e-4
    assert rows["top_k, auto"]["error"] < 1e-4 and rows["top_k, auto"]["ids"] == 1


@pytest.mark.slow
def test_wrong_words_and_wrong_probabilities_are_refused(monkeypatch):
    best, log_probs = api.top_k, api.log_probs

    def second_best(*inputs, k, **options):
        values_TK, ids_TK = best(*inputs, k=k + 1, **options)
        return values_TK[:, 1:], ids_TK[:, 1:]

    def first_words(*inputs, **options):
        return jnp.argmax(log_probs(*inputs[:2], **options), axis=-1)

    monkeypatch.setattr(api, "top_k", second_best)
    monkeypatch.setattr(api, "log_probs", lambda *a, **o: log_probs(*a, **o) + 1e-3)
    monkeypatch.setattr(api, "sample", lambda *a, **o: first_words(*a, **o) + 101)
    rows = decode()
    assert all(row["status"] == "wrong" and "ms" not in row for row in rows.values())
    assert "a draw is no word" in rows["sample, auto"]["reason"]


def test_draws_from_another_distribution_are_refused(monkeypatch):
    def least_likely(*inputs, **options):
        return jnp.argmin(api.log_probs(*inputs[:2], **options), axis=-1)

    monkeypatch.setattr(api, "sample", least_likely)
    monkeypatch.setattr(race, "DECODINGS", ("sample",))
    assert "deviations off" in decode()["sample, auto"]["reason"]
