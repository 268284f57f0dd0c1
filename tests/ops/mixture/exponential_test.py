"""The loss from stored exponentials: its references, padding and equal labels."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from softbottle.ops.mixture import blocked, exponential, reference, rows
from softbottle.ops.mixture.activations import (
    SIGSOFTMAX,
    SOFTMAX,
    Activation,
    generalized,
)
from softbottle.ops.mixture.arrays import Scores, Vocabulary
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops import devices
from tests.ops.mixture.problem import loss_and_gradient, make_problem, paired

PLAIN = blocked.route(Options(device=devices.CPU))
# What GPUs like: rows, words and width padded, the bias beside the table or alone.
PADDED = blocked.route(Options(device=devices.H200))
GSS = Activation(generalized, (0.5, 1.7))
ACTIVATIONS = {
    "softmax": (SOFTMAX, 0.0, 1.0),
    "sigsoftmax": (SIGSOFTMAX, 0.0, 2.0),
    "gss": (GSS, 0.5, 1.7),
}
WIDE = {"tokens": 13, "components": 2, "width": 8, "vocab": 900}


def make_step(route=PLAIN, activation=SOFTMAX, **options):
    chosen = Options(**options).resolve()

    def loss(*inputs):
        return exponential.loss(route, *paired(*inputs), activation, chosen)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))


def run(problem, route=PLAIN, activation=SOFTMAX, **options):
    step = make_step(route, activation, **options)
    return step(*oracle.cast(problem, jnp.float32))


def far_problem():
    """One word is hundreds of nats above the labels."""
    problem = make_problem(**WIDE)
    problem.table_VE[7] *= 60
    return problem


@pytest.mark.slow
@pytest.mark.parametrize("route", [PLAIN, PADDED], ids=["plain", "padded"])
def test_any_padding_gives_the_same_gradient(route):
    problem = make_problem(tokens=19, components=3, width=11, vocab=300)
    exact = loss_and_gradient(problem, 0.5, 1.7)
    oracle.assert_close(run(problem, route, GSS), exact, "float32")


@pytest.mark.slow
def test_a_width_that_needs_no_padding_gets_none():
    problem = make_problem(tokens=6, components=2, width=128, vocab=50)
    exact = loss_and_gradient(problem)
    oracle.assert_close(run(problem, PADDED), exact, "float32")


def test_a_word_far_above_the_label_is_no_harm_by_chunks():
    problem = far_problem()
    result = run(problem, PLAIN, budget_bytes=2**15)
    oracle.assert_close(result, loss_and_gradient(problem), "float32")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float64_is_kept_and_logits_of_ten_thousand_are_no_harm(name, float64):
    activation, center, slope = ACTIVATIONS[name]
    step, problem = make_step(PADDED, activation), make_problem(**WIDE)
    far_VE = problem.table_VE * (10_000 / np.max(np.abs(problem.table_VE)))
    for each in (problem, problem._replace(table_VE=far_VE)):
        exact = loss_and_gradient(each, center, slope)
        oracle.assert_close(step(*oracle.cast(each, jnp.float64)), exact, "float64")


@pytest.mark.parametrize(("budget", "loops"), [(2**40, 0), (2**15, 1)])
def test_nothing_waits_for_a_value_of_the_device(budget, loops):
    """One loop over chunks, whose number is known, and no branch."""
    options = Options(budget_bytes=budget).resolve()

    def loss(*inputs):
        return exponential.loss(PADDED, *paired(*inputs), SOFTMAX, options)

    point = oracle.cast(make_problem(**WIDE), jnp.float32)
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    text = compiled.lower(*point).as_text()
    assert len(re.findall(r"stablehlo\.while", text)) == loops
    assert not re.search(r"stablehlo\.(if|case)", text)


def test_a_batch_of_problems_under_vmap():
    problems = [make_problem(**WIDE), far_problem()]
    stacked = [np.stack(pair) for pair in zip(*problems, strict=True)]
    stacked = oracle.cast(tuple(stacked), jnp.float32)

    def loss(*inputs):
        options = Options().resolve()
        return exponential.loss(PLAIN, *paired(*inputs), SOFTMAX, options)

    losses_N = jax.jit(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))))
    values_N, bars_N = jax.tree.map(np.asarray, losses_N(*stacked))
    for index, problem in enumerate(problems):
        ours = (values_N[index], tuple(bar[index] for bar in bars_N))
        oracle.assert_close(ours, loss_and_gradient(problem), "float32")


@pytest.mark.parametrize("name", ["softmax", "gss"])
def test_any_cotangent_of_the_normalizers(name, float64):
    """Tokens without one are not read, whatever is in them."""
    activation, *_ = ACTIVATIONS[name]
    problem = far_problem()
    vocabulary = Vocabulary(problem.table_VE, problem.bias_V)
    options = Options(implementation="reference", budget_bytes=2**16).resolve()

    def dense(context_TKE, vocabulary):
        return reference.IMPLEMENTATION.lse(
            context_TKE, vocabulary, activation, options
        )

    bar_TK = np.random.default_rng(0).normal(size=problem.log_prior_TK.shape)
    bar_TK[3] = 0

    @jax.jit
    def run(context_TKE, vocabulary, bar_TK):
        lse_TK, pull = jax.vjp(dense, context_TKE, vocabulary)
        unread = (context_TKE.at[3].set(jnp.nan), lse_TK.at[3].set(jnp.nan))
        saved = (unread[0], vocabulary, None, Scores(None, unread[1]))
        bars = Scores(None, bar_TK)
        ours = exponential.scores_backward(PADDED, activation, options, saved, bars)
        return ours, pull(bar_TK)

    ours, wanted = run(problem.context_TKE, vocabulary, bar_TK)
    chex.assert_trees_all_close(ours, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_every_shard_of_a_vocabulary_has_its_own_references():
    mesh = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    rows = (*(P("data"),) * 2, P("model"), P("model"), P("data"), P("data"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=P())
    def loss(*inputs):
        options = Options(vocab_axis="model").resolve()
        total = exponential.loss(PLAIN, *paired(*inputs), SOFTMAX, options)
        return jax.lax.psum(total, "data")

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    for problem in (far_problem(), make_problem(**WIDE)):
        problem = type(problem)(
            *(
                array if name in ("table_VE", "bias_V") else array[:12]
                for name, array in problem._asdict().items()
            )
        )
        result = step(*oracle.cast(problem, jnp.float32))
        oracle.assert_close(result, loss_and_gradient(problem), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_labels_are_all_counted_and_bits_repeat(dtype, mixed_dtypes, monkeypatch):
    monkeypatch.setattr(rows, "SCATTER_TOKENS", 8)
    problem = make_problem(tokens=30, components=2, width=12, vocab=40)
    problem = problem._replace(labels_T=(problem.labels_T % 3).astype(np.int32))
    step = make_step(compute_dtype=dtype)
    once, again = (step(*oracle.cast(problem, jnp.float32)) for _ in range(2))
    exact = loss_and_gradient(problem)
    for ours, repeated, wanted in zip(once[1], again[1], exact[1], strict=True):
        np.testing.assert_array_equal(ours, repeated)
        distance = np.linalg.norm(ours - wanted) / np.linalg.norm(wanted)
        assert distance < (1e-5 if dtype == "float32" else 1e-2)


def test_only_fixed_activations_are_taken():
    assert exponential.takes(SOFTMAX) and exponential.takes(GSS)
    assert exponential.takes(Activation(generalized, (np.float32(0.5), 1.7)))
    learned = Activation(generalized, params=(jnp.asarray(0.5), jnp.asarray(1.7)))
    assert not exponential.takes(learned)


def test_a_nan_stays_with_its_token():
    problem = make_problem(tokens=5, components=2, width=4, vocab=20)
    problem.context_TKE[2] = np.nan
    _, bars = run(problem)
    spoiled_T = np.isnan(np.asarray(bars[1])).any(axis=(1, 2))
    np.testing.assert_array_equal(spoiled_T, [False, False, True, False, False])
