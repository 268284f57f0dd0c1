"""The loss from stored exponentials: its guard, its padding, its equal labels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from softbottle.ops.mixture import blocked, exponential, table_sums
from softbottle.ops.mixture.activations import (
    SIGSOFTMAX,
    SOFTMAX,
    Activation,
    generalized,
)
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


def run(problem, route=PLAIN, activation=SOFTMAX, dtype="float32", **options):
    chosen = Options(**options).resolve()

    def loss(*inputs):
        return exponential.loss(route, *paired(*inputs), activation, chosen)

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    return function(*oracle.cast(problem, jnp.dtype(dtype)))


def far_problem():
    """One word that the sample leaves out wins by hundreds of nats."""
    problem = make_problem(**WIDE)
    problem.table_VE[7] *= 60
    assert 7 % -(-WIDE["vocab"] // exponential.SAMPLE)
    return problem


def counted(route):
    """The route, and a list that grows with every first product that is run."""
    calls = []

    def first(context_RQ, *rest):
        jax.debug.callback(lambda: calls.append(None))
        return route.first(context_RQ, *rest)

    return route._replace(first=first), calls


@pytest.mark.slow
@pytest.mark.parametrize("route", [PLAIN, PADDED], ids=["plain", "padded"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_any_padding_gives_the_same_gradient(name, route):
    activation, center, slope = ACTIVATIONS[name]
    problem = make_problem(tokens=19, components=3, width=11, vocab=300)
    exact = loss_and_gradient(problem, center, slope)
    oracle.assert_close(run(problem, route, activation), exact, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("width", [128, 33])
def test_the_bias_has_a_product_of_its_own_or_a_column(width):
    problem = make_problem(tokens=6, components=2, width=width, vocab=50)
    exact = loss_and_gradient(problem)
    oracle.assert_close(run(problem, PADDED), exact, "float32")


def test_float64_is_kept(float64):
    problem = make_problem(**WIDE)
    result = run(problem, PADDED, SIGSOFTMAX, "float64")
    oracle.assert_close(result, loss_and_gradient(problem, 0.0, 2.0), "float64")


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 2**15, 2**40])
def test_the_guard_sees_a_reference_that_is_too_low(budget):
    problem = far_problem()
    route, calls = counted(PLAIN)
    result = run(problem, route, budget_bytes=budget)
    oracle.assert_close(result, loss_and_gradient(problem), "float32")
    jax.effects_barrier()
    redone = len(calls)
    calls.clear()
    run(make_problem(**WIDE), route, budget_bytes=budget)
    jax.effects_barrier()
    assert redone > len(calls) >= 1


@pytest.mark.slow
def test_under_vmap_only_the_element_that_needs_it_is_redone():
    problems = [make_problem(**WIDE), far_problem()]
    stacked = [jnp.stack(pair) for pair in zip(*problems, strict=True)]
    stacked = oracle.cast(tuple(stacked), jnp.float32)
    route, calls = counted(PLAIN)

    def loss(*inputs):
        options = Options().resolve()
        return exponential.loss(route, *paired(*inputs), SOFTMAX, options)

    losses_N = jax.jit(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))))
    values_N, bars_N = losses_N(*stacked)
    jax.effects_barrier()
    assert len(calls) == 3
    for index, problem in enumerate(problems):
        ours = (values_N[index], tuple(bar[index] for bar in bars_N))
        oracle.assert_close(ours, loss_and_gradient(problem), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("make", [far_problem, lambda: make_problem(**WIDE)])
def test_a_split_vocabulary_guards_all_its_shards(make):
    problem = make()
    mesh = jax.make_mesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    rows = (*(P("data"),) * 2, P("model"), P("model"), P("data"), P("data"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=P())
    def loss(*inputs):
        options = Options(vocab_axis="model").resolve()
        total = exponential.loss(PLAIN, *paired(*inputs), SOFTMAX, options)
        return jax.lax.psum(total, "data")

    problem = type(problem)(
        *(
            array if name in ("table_VE", "bias_V") else array[:12]
            for name, array in problem._asdict().items()
        )
    )
    point = oracle.cast(problem, jnp.float32)
    result = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*point)
    oracle.assert_close(result, loss_and_gradient(problem), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_labels_are_all_counted_and_bits_repeat(dtype, mixed_dtypes, monkeypatch):
    monkeypatch.setattr(table_sums, "SCATTER_TOKENS", 8)
    problem = make_problem(tokens=30, components=2, width=12, vocab=40)
    problem = problem._replace(labels_T=(problem.labels_T % 3).astype(np.int32))
    once = run(problem, compute_dtype=dtype)
    again = run(problem, compute_dtype=dtype)
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
