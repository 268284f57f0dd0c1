import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.bench import head, measure, oracle, problem, race, table, worker
from softbottle.ops.mixture import options, reference

CASE = problem.Case("odd", tokens=11, components=3, dim=7, vocab=37)


@pytest.fixture(autouse=True)
def small(brief, monkeypatch):
    monkeypatch.setitem(problem.CASES, "tiny", CASE)


def dense_mean_nll(inputs, labels_T):
    """Written from the definition: a mixture of K softmaxes, then the logarithm."""
    log_prior_TK, context_TKE, table_VE, bias_V = inputs
    z_TKV = jnp.einsum("tke,ve->tkv", context_TKE, table_VE) + bias_V[None, None]
    component_TKV = jax.nn.softmax(z_TKV, axis=-1)
    p_TV = jnp.sum(jnp.exp(log_prior_TK)[:, :, None] * component_TKV, axis=1)
    nll_T = -jnp.log(jnp.take_along_axis(p_TV, labels_T[:, None], axis=1)[:, 0])
    return jnp.mean(nll_T), nll_T


dense_gradient = jax.jit(jax.grad(dense_mean_nll, has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [1, 8 * 3 * 37 * 5, 2**31])
def test_the_oracle_is_the_definition_in_float64(monkeypatch, block_bytes):
    monkeypatch.setattr(oracle, "BLOCK_BYTES", block_bytes)
    case = CASE._replace(tokens=10)
    inputs, labels_T = head.make_inputs(case)
    found = head.truth(inputs, labels_T)
    with jax.enable_x64(True):
        wide = [np.asarray(array, np.float64) for array in inputs]
        bars, nll_T = jax.device_get(dense_gradient(wide, labels_T))
    log_p_TV = oracle.log_probs(np, *wide)
    assert found.nll_T.dtype == np.float64
    np.testing.assert_allclose(found.nll_T, nll_T, rtol=1e-12)
    np.testing.assert_allclose(log_p_TV[np.arange(10), labels_T], -nll_T, rtol=1e-12)
    for ours, theirs in zip(found.bars, bars, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def rows_of(result):
    return {row["variant"]: row for row in result["rows"]}


@pytest.mark.slow
def test_a_race_has_a_row_for_each_variant_with_what_it_was_checked_by():
    names = ["blocked", "auto", "reference"]
    result = race.head(worker.in_process, [], names, [], seconds=0.01)
    rows = rows_of(result)
    beside = {"blocked, evaluation", "blocked, per token", "bare products", "softmax"}
    assert set(rows) == {*names, *beside}
    assert all(row["status"] == "ok" for row in rows.values())
    work = 2 * 11 * 3 * 7 * 37
    for name in [*names, "blocked, per token"]:
        row = rows[name]
        assert row["flop"] == 3 * work and row["checked_tokens"] == 11
        assert row["tflops"] == pytest.approx(row["flop"] / row["ms"] / 1e9)
        share = row["tflops"] / result["ceiling_tflops"]
        assert row["of_ceiling"] == pytest.approx(share)
        assert row["loss_error"] < 1e-4 and 0 < row["gradient_error"] < 3e-3
        assert row["same_bits"] is True and row["peak_bytes"] > 4 * 37 * 7
        ratio = row["ms"] / rows["softmax"]["ms"]
        assert row["over"] == {"softmax": pytest.approx(ratio)}
    assert rows["auto"]["same_program_as"] == "blocked"
    assert "same_program_as" not in rows["reference"]
    evaluation = rows["blocked, evaluation"]
    assert evaluation["flop"] == work and evaluation["worst_token_error"] < 1e-4
    assert "over" not in evaluation
    assert rows["softmax"]["flop"] == work
    text = table.render(result)
    assert all(name in text for name in [*rows, "TF/s", "of ceiling", "/ softmax"])
    assert "N=11 K=3 d=7 V=37" in text and "jax" in text.splitlines()[0]


def scaled_gradient(factor):
    """The identity whose gradient is off by a factor."""

    @jax.custom_vjp
    def identity(array):
        return array

    identity.defvjp(lambda array: (array, None), lambda _, bar: (bar * factor,))
    return identity


def task_for(implementation, case=CASE):
    task = race.head_task(case, implementation, "loss", 3)
    return task | {
        "implementation": implementation,
        "budget_mib": 0,
        "seconds": 0.01,
        "check_flop": 1e12,
    }


def add_implementation(monkeypatch, loss):
    """Let the operation have one more implementation, called "bent"."""
    bent = reference.IMPLEMENTATION._replace(loss=loss)
    module = types.SimpleNamespace(IMPLEMENTATION=bent)
    monkeypatch.setitem(sys.modules, "softbottle.ops.mixture.bent", module)
    names = (*options.IMPLEMENTATIONS, "bent")
    monkeypatch.setattr(options, "IMPLEMENTATIONS", names)


def test_a_variant_with_a_gradient_off_by_a_hundredth_is_refused(monkeypatch):
    def loss(mixture, vocabulary, *rest):
        table_VE = scaled_gradient(1.01)(vocabulary.table_VE)
        vocabulary = vocabulary._replace(table_VE=table_VE)
        return reference.IMPLEMENTATION.loss(mixture, vocabulary, *rest)

    add_implementation(monkeypatch, loss)
    row = worker.in_process("softbottle.bench.ours", task_for("bent"))
    assert row["status"] == "wrong" and "ms" not in row and "tflops" not in row
    assert "error_table" in row["reason"] and "error_context" not in row["reason"]
    assert row["error_table"] == pytest.approx(1e-2, rel=0.3)
    result = {"suite": "head", "device": "cpu", "jax": "", "torch": None, "rows": [row]}
    *_, last = table.render(result).splitlines()
    assert last.split()[:3] == ["bent", "wrong:", "error_table"]


@pytest.mark.parametrize("offset", [1e-3, np.nan])
def test_a_variant_with_a_wrong_loss_is_refused(monkeypatch, offset):
    def loss(*arguments):
        return reference.IMPLEMENTATION.loss(*arguments) + offset

    add_implementation(monkeypatch, loss)
    row = worker.in_process("softbottle.bench.ours", task_for("bent"))
    assert row["status"] == "wrong" and "loss_error" in row["reason"]
    assert "ms" not in row


@pytest.mark.slow
def test_a_case_beyond_the_check_is_checked_on_its_first_tokens():
    case = CASE._replace(tokens=13)
    per_token = 3 * case.product_flop / case.tokens
    task = task_for("blocked", case) | {"check_flop": 5.5 * per_token}
    row = worker.in_process("softbottle.bench.ours", task)
    assert row["status"] == "ok" and row["checked_tokens"] == 5
    assert row["flop"] == 3 * case.product_flop


def test_dense_logits_that_do_not_fit_are_not_tried(monkeypatch):
    monkeypatch.setattr(head, "HOST_BYTES", 1000)
    row = worker.in_process("softbottle.bench.ours", task_for("reference"))
    assert row["status"] == "skipped" and "GiB" in row["reason"]


def test_bits_are_compared_not_values():
    ours = [jnp.array([0.0, jnp.nan]), jnp.array([1.0], jnp.bfloat16)]
    assert measure.same_bits(ours, list(ours))
    assert not measure.same_bits(ours, [jnp.array([-0.0, jnp.nan]), ours[1]])


def test_names_that_do_not_exist_are_answered_with_those_that_do(monkeypatch):
    def refusal(*arguments, **options):
        with pytest.raises(ValueError) as error:
            race.head(worker.in_process, *arguments, **options)
        return str(error.value)

    assert "no shape is called 'ptc'; there are ['ptb'" in refusal(["ptc"], [], [])
    assert "'auto', 'blocked'" in refusal([], ["fast"], [])
    assert "no peer is called 'jax'" in refusal([], [], ["jax"])
    assert "no sweep is called 'd'" in refusal([], [], [], sweep="d")
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: None)
    assert refusal([], [], ["torch"]) == "torch is not installed: pip install torch"
    with pytest.raises(ValueError, match="no stack is called 'big'"):
        race.lstm(worker.in_process, ["big"], [], [])
    with pytest.raises(ValueError, match=r"'cce'; there are \['torch'\]"):
        race.lstm(worker.in_process, ["tiny"], [], ["cce"])
    with pytest.raises(ValueError, match="no case is called 'big'"):
        race.decode(worker.in_process, ["big"], [])


@pytest.mark.parametrize(
    "peers, options, reason",
    [
        ([], {"shapes": ["ptb"], "heads": ["moc-7"]}, "at tiny and lm1b-100k, got"),
        ([], {"sweep": "vocab", "heads": ["moc-7"]}, "a sweep has its own sizes"),
        ([], {"sweep": "vocab", "asked": ["all"]}, "a sweep has its own sizes"),
        (["torch"], {"asked": ["all"]}, r"got implementations \['auto'\] and peers"),
    ],
)
def test_what_would_be_left_out_is_refused(peers, options, reason):
    with pytest.raises(ValueError, match=reason):
        how = {"shapes": [], "implementations": ["auto"], "peers": peers} | options
        race.head(worker.in_process, **how)
