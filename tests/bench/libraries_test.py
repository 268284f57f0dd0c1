import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.bench import jax_peers, libraries, oracle, problem, race, worker

CASE = problem.Case("odd", tokens=11, components=3, dim=7, vocab=37)


def row_nll(x_RE, labels_R, weights_EV):
    log_p_RV = jax.nn.log_softmax(x_RE.astype(jnp.float32) @ weights_EV)
    return -jnp.take_along_axis(log_p_RV, labels_R[:, None], axis=1)[:, 0]


@jax.custom_vjp
def forgetful_nll(x_RE, labels_R, weights_EV):
    """A loss per row that takes the sum's cotangent for every row's."""
    return row_nll(x_RE, labels_R, weights_EV)


def forgetful_backward(saved, nll_bar_R):
    _, pull = jax.vjp(row_nll, *saved)
    return pull(jnp.ones_like(nll_bar_R))


forgetful_nll.defvjp(lambda *saved: (row_nll(*saved), saved), forgetful_backward)


@pytest.fixture
def tokamax(brief, monkeypatch):
    """Installs a tokamax with the given loss per row; gives what it was asked for."""

    def install(nll):
        asked = []

        def loss(x, labels, weights, *, reduction, implementation):
            asked.append((x.shape, weights.shape, reduction, implementation))
            return nll(x, labels, weights)

        module = types.SimpleNamespace(linear_softmax_cross_entropy_loss=loss)
        monkeypatch.setitem(sys.modules, "tokamax", module)
        return asked

    return install


def task_for(peer, case=CASE, check_flop=1e12):
    task = race.head_task(case, libraries.variant(peer).name, "loss", 3)
    return task | {"peer": peer, "seconds": 0.01, "check_flop": check_flop}


def run(peer, **changes):
    return worker.in_process(libraries.JAX, task_for(peer, **changes))


@pytest.mark.parametrize("components", [1, 3])
def test_rows_of_tokamax_make_a_mixture_without_a_bias(tokamax, components):
    asked = tokamax(row_nll)
    case = CASE._replace(components=components)
    row = run("chunked_xla", case=case)
    assert row["status"] == "ok", row
    shapes = ((11 * components, 7), (7, 37))
    assert set(asked) == {(*shapes, "none", "chunked_xla")}
    assert row["loss_error"] < 1e-5, "the truth has no bias either"
    errors = {name for name in row if name.startswith("error_")}
    assert errors == {"error_log_prior", "error_context", "error_table"}
    assert max(row[name] for name in errors) < 3e-3
    assert row["flop"] == 6 * 11 * components * 7 * 37 and row["bias"] is False
    assert row["variant"] == "tokamax chunked_xla, no bias" and row["ms"] > 0


@pytest.mark.parametrize(
    "nll, reason",
    [
        (forgetful_nll, "error_context"),
        (lambda *inputs: row_nll(*inputs) + 1.0, "loss_error 1.0e+00"),
        (lambda *inputs: row_nll(*inputs) * jnp.nan, "loss_error nan"),
    ],
)
def test_a_wrong_peer_is_refused_and_not_timed(tokamax, nll, reason):
    tokamax(nll)
    row = run("xla")
    assert row["status"] == "wrong" and reason in row["reason"], row
    assert "ms" not in row and "tflops" not in row


def test_a_peer_beyond_the_check_is_checked_on_its_first_tokens(tokamax):
    tokamax(row_nll)
    row = run("xla", check_flop=5.5 * 3 * CASE.product_flop / CASE.tokens)
    assert row["status"] == "ok" and row["checked_tokens"] == 5
    assert row["flop"] == 3 * CASE.product_flop and row["loss_error"] < 1e-5


def test_a_library_that_is_not_installed_is_a_row_that_says_how(monkeypatch, tokamax):
    tokamax(row_nll)
    task = task_for("xla")
    monkeypatch.setitem(sys.modules, "tokamax", None)
    row = worker.in_process(libraries.JAX, task)
    assert row["status"] == "failed" and row["variant"] == "tokamax xla, no bias"
    assert row["reason"].endswith("tokamax is not installed: pip install tokamax")


def test_a_library_that_misses_a_package_says_which(monkeypatch, tmp_path):
    (tmp_path / "quack.py").write_text("import a_package_that_it_needs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "quack", raising=False)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_it_needs") as error:
        libraries.variant("quack")
    assert "pip install" not in str(error.value)


class Recorder:
    """Canned rows; `asked` has the module and variant of each task."""

    def __init__(self):
        self.asked = []

    def __call__(self, module, task):
        if task["kind"] == "device":
            return {"status": "ok", "platform": "cpu", "device": "a", "jax": "b"}
        if module != race.OURS:
            self.asked.append((module, task["variant"]))
        return task | {"status": "ok", "ms": 1.0, "tflops": 1.0}


def raced(monkeypatch, peers, components):
    monkeypatch.setitem(problem.CASES, "tiny", CASE._replace(components=components))
    ask = Recorder()
    result = race.head(ask, [], ["blocked"], peers, heads=[])
    named = [row["variant"] for row in result["rows"] if row["family"] == "peer"]
    assert sorted(named) == sorted(variant for _, variant in ask.asked)
    return ask.asked


def test_a_mean_of_all_rows_is_raced_with_one_component_alone(monkeypatch):
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: name)
    peers = ["liger", "tokamax", "quack"]
    of_rows = [
        (libraries.JAX, "tokamax xla, no bias"),
        (libraries.JAX, "tokamax chunked_xla, no bias"),
        (libraries.TORCH, "liger"),
        (libraries.TORCH, "liger, per token, no bias"),
        (libraries.TORCH, "quack, per token"),
    ]
    assert raced(monkeypatch, peers, 3) == of_rows
    of_means = {
        (libraries.TORCH, "liger CuTe, no bias"),
        (libraries.TORCH, "quack, no bias"),
    }
    single = raced(monkeypatch, peers, 1)
    assert set(single) == of_means | set(of_rows) and len(single) == 7


def test_tokamax_is_raced_without_torch(monkeypatch):
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: None)
    assert len(raced(monkeypatch, ["tokamax"], 3)) == 2
    with pytest.raises(ValueError, match="torch is not installed"):
        raced(monkeypatch, ["tokamax", "liger"], 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "peers, without",
    [(["tokamax"], ["blocked, no bias", "blocked, per token, no bias"]), (["cce"], [])],
)
@pytest.mark.usefixtures("brief")
def test_beside_a_peer_without_a_bias_ours_has_none_either(monkeypatch, peers, without):
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: name)
    result = race.head(Recorder(), [], ["blocked"], peers, heads=[])
    found = [row for row in result["rows"] if row.get("bias") is False]
    assert [row["variant"] for row in found] == without
    for row in found:
        task = {"seconds": 0.01, "check_flop": 1e12, "budget_mib": 0}
        told = [name for name in row if name not in ("status", "ms", "tflops", "over")]
        done = worker.in_process(race.OURS, task | {name: row[name] for name in told})
        assert done["status"] == "ok" and done["loss_error"] < 1e-4
        errors = {name for name in done if name.startswith("error_")}
        assert errors == {"error_log_prior", "error_context", "error_table"}


@pytest.mark.parametrize("count", [2, 5])
def test_no_gradient_but_the_bias_may_be_missing(count):
    wanted = oracle.Expected(None, ("a", "b", "c", "d"))
    named = [name for name, *_ in oracle.pairs("abc", wanted)]
    assert named == ["log_prior", "context", "table"]
    assert len(oracle.pairs("abcd", wanted)) == 4
    with pytest.raises(ValueError):
        oracle.pairs("abcde"[:count], wanted)


def test_every_variant_has_a_name_of_its_own():
    variants = [v for library in libraries.PEERS.values() for v in library.variants]
    assert len(set(variants)) == len(variants)


def test_an_lstm_of_torch_is_raced_in_three_formats(monkeypatch):
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: name)
    ask = Recorder()
    race.lstm(ask, ["tiny"], ["scan"], ["torch"])
    formats = ["torch float32", "torch bfloat16", "torch float16"]
    assert ask.asked == [(race.THEIRS, name) for name in formats]


def test_the_cotangent_of_a_row_is_its_posterior(tokamax):
    seen = []

    @jax.custom_vjp
    def watched_nll(x_RE, labels_R, weights_EV):
        return row_nll(x_RE, labels_R, weights_EV)

    def backward(saved, nll_bar_R):
        jax.debug.callback(lambda bar_R: seen.append(bar_R), nll_bar_R)
        return jax.vjp(row_nll, *saved)[1](nll_bar_R)

    watched_nll.defvjp(lambda *saved: (row_nll(*saved), saved), backward)
    tokamax(watched_nll)
    log_prior_TK = jnp.log(jnp.array([[0.25, 0.75], [0.5, 0.5]]))
    # Two words; the components give the label 1/2 and 4/5, then 1/5 and 1/2.
    table_VE = jnp.array([[1.0], [0.0]])
    four = jnp.log(4.0)
    context_TKE = jnp.array([[0.0, four], [four, 0.0]])[:, :, None]
    labels_T = jnp.array([0, 1])
    loss, bars = jax_peers.gradient_of("xla")(
        log_prior_TK, context_TKE, table_VE, labels_T
    )
    jax.effects_barrier()
    joint_TK = np.array([[0.25 * 0.5, 0.75 * 0.8], [0.5 * 0.2, 0.5 * 0.5]])
    p_T = joint_TK.sum(axis=1)
    wanted_TK = joint_TK / p_T[:, None] / 2
    np.testing.assert_allclose(loss, -np.log(p_T).mean(), rtol=1e-5)
    (bar_R,) = seen
    np.testing.assert_allclose(bar_R, wanted_TK.reshape(-1), rtol=1e-5)
    np.testing.assert_allclose(bars[0], -wanted_TK, rtol=1e-5)
