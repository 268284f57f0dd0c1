"""Words with gates of their own: the operations against loops over words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.mixture import decode, gated
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops import devices
from tests.ops.mixture.gated_problem import (
    FREQUENT,
    TOKENS,
    WIDTH,
    dense,
    exact_step,
    make_problem,
    make_step,
    paired,
)

BUDGETS = [1, 5_000, 2**30]


@pytest.mark.slow
@pytest.mark.parametrize(
    "components, budget, device",
    [
        (2, BUDGETS[0], devices.CPU),
        (2, BUDGETS[1], devices.H200),
        (8, BUDGETS[2], devices.CPU),
    ],
)
def test_scores_and_gradients_are_those_of_the_dense_logits(
    components, budget, device, float64
):
    arrays = oracle.cast(make_problem(components), jnp.float64)
    step = make_step(Options(budget_bytes=budget, device=device))
    oracle.assert_close(step(*arrays), exact_step(*arrays), "float64")


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [300_000, 2**30])
def test_scores_and_gradients_on_a_gpu(budget, float64):
    context, *rest = make_problem(4, 300, 192, 1201)
    rounded = oracle.cast((context / 14, *rest), jnp.bfloat16)
    exact = exact_step(*oracle.cast(rounded, jnp.float64))
    options = Options(budget_bytes=budget, compute_dtype=jnp.bfloat16)
    value, bars = make_step(options)(*rounded)
    assert abs(value - exact[0]) < 1e-3 * 2 * 300
    for ours, exact_bar in zip(bars, exact[1], strict=True):
        error = np.abs(np.asarray(ours, np.float64) - exact_bar)
        assert error.max() < 2e-2 * np.abs(exact_bar).max()


@pytest.mark.parametrize("budget", BUDGETS)
def test_logits_and_the_best_words(budget):
    arrays = make_problem()
    exact_TS = np.asarray(dense(*arrays))
    options = Options(budget_bytes=budget)

    @jax.jit
    def run(tokens, words):
        best = decode.top_k(gated.blocks(tokens, words, options), 3, options)
        return gated.logits(tokens, words, options), best

    inputs = paired(oracle.cast(arrays, jnp.float32))
    logit_TS, (values_Tk, ids_Tk) = run(*inputs)
    oracle.assert_close(logit_TS, exact_TS, "float32")
    np.testing.assert_array_equal(ids_Tk, np.argsort(-exact_TS, axis=1)[:, :3])
    oracle.assert_close(values_Tk, np.sort(exact_TS)[:, :-4:-1], "float32")


def test_no_choice_of_chunks_changes_what_is_drawn():
    inputs = paired(oracle.cast(make_problem(), jnp.float32))

    @jax.jit
    def run(tokens, words, key):
        return [
            gated.sample(tokens, words, key, Options(budget_bytes=budget))
            for budget in BUDGETS[1:]
        ]

    draws = run(*inputs, jax.random.key(0))
    np.testing.assert_array_equal(*draws)
    assert len(set(np.asarray(draws[0]))) > 2


def test_no_array_over_tokens_components_and_words_is_stored():
    tokens, words = paired(oracle.cast(make_problem(), jnp.float32))

    def loss(tokens, words):
        labels_T = jnp.zeros(TOKENS, jnp.int32)
        options = Options(budget_bytes=1)
        return sum(map(jnp.sum, gated.scores(tokens, words, labels_T, options)))

    shapes = {
        variable.aval.shape
        for equation in every_equation(jax.make_jaxpr(jax.grad(loss))(tokens, words))
        for variable in equation.outvars
    }
    largest = max(int(np.prod(shape)) for shape in shapes)
    assert largest < TOKENS * 4 * FREQUENT
    assert (TOKENS, 1) in shapes


@pytest.mark.parametrize("device, unaligned", [(devices.CPU, 3 * 4), (devices.H200, 0)])
def test_products_on_a_gpu_read_rows_of_whole_16_bytes(device, unaligned):
    tokens, words = paired(oracle.cast(make_problem(), jnp.float32))

    def loss(tokens, words):
        labels_T, options = jnp.zeros(TOKENS, jnp.int32), Options(device=device)
        return sum(map(jnp.sum, gated.scores(tokens, words, labels_T, options)))

    widths = [
        {variable.aval.shape[-1] for variable in (*equation.invars, *equation.outvars)}
        for equation in every_equation(jax.make_jaxpr(jax.grad(loss))(tokens, words))
        if equation.primitive.name == "dot_general"
    ]
    # A context with the table, and the gradients of both, for each component.
    assert sum(WIDTH in each for each in widths) == unaligned


def every_equation(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            if hasattr(value, "eqns"):
                yield from every_equation(value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_have_the_dtypes_of_their_inputs(dtype, mixed_dtypes):
    inputs = paired(oracle.cast(make_problem(), dtype))
    options = Options(compute_dtype=jnp.bfloat16)
    loss = functools.partial(gated.scores, options=options)

    def total(tokens, words):
        return sum(map(jnp.sum, loss(tokens, words, jnp.zeros(TOKENS, jnp.int32))))

    value, bars = jax.jit(jax.value_and_grad(total, (0, 1)))(*inputs)
    assert value.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(bars)} == {jnp.dtype(dtype)}
