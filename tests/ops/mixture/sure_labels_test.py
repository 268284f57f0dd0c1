"""Labels of probability near 1: their gradient is a small difference, and is right.

What a label adds to the normalizer and its own score nearly cancel. Where the two are
rounded to bfloat16 one by one, an error of 0.4% of each is one of 100% of what is left
at a probability of 0.996.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from softbottle.ops.mixture import (
    api,
    exponential,
    hopper_kernel,
    products,
    table_sums,
)
from softbottle.ops.mixture.activations import SOFTMAX
from softbottle.ops.mixture.options import Options
from tests.ops import devices
from tests.ops.mixture.problem import Problem, loss_and_gradient, paired

pytestmark = pytest.mark.usefixtures("mixed_dtypes")
TOKENS, WIDTH, VOCAB = 40, 64, 300


def make_problem(components, scale, dtype=jnp.bfloat16):
    """Contexts along the labels' rows, and what there is of them in a dtype."""
    random = np.random.default_rng(0)
    table_VE = random.normal(size=(VOCAB, WIDTH))
    labels_T = random.integers(0, VOCAB, TOKENS).astype(np.int32)
    scales_TK1 = scale * random.uniform(0.9, 1.1, (TOKENS, components, 1))
    context_TKE = scales_TK1 * table_VE[labels_T][:, None]
    log_prior_TK = np.log(random.dirichlet(np.ones(components), TOKENS))
    weights_T = random.uniform(0.5, 1.5, TOKENS) / TOKENS
    problem = Problem(
        log_prior_TK.astype(np.float32),
        jnp.asarray(context_TKE, dtype),
        jnp.asarray(table_VE, dtype),
        np.zeros(VOCAB, np.float32),
        labels_T,
        weights_T.astype(np.float32),
    )
    exact = Problem(
        *(
            np.asarray(array, np.float64) if name != "labels_T" else array
            for name, array in problem._asdict().items()
        )
    )
    return exact, problem


def loss(problem, options):
    return api.loss(*paired(*problem), SOFTMAX, options)


def nll(problem, options):
    mixture, vocabulary, targets = paired(*problem)
    nll_T = api.nll(mixture, vocabulary, targets.labels_T, SOFTMAX, options)
    return jnp.sum(targets.weights_T * nll_T)


def with_entropy(problem, options):
    """The nll of one component, whose entropy is asked for and then not used."""
    (_, context_TKE), vocabulary, targets = paired(*problem)
    score_T1, lse_T1, _ = api.scores_and_entropies(
        context_TKE, vocabulary, targets.labels_T, SOFTMAX, options
    )
    return jnp.sum(targets.weights_T * (lse_T1 - score_T1)[:, 0])


def make_step(what, options):
    def scalar(*arrays):
        return what(Problem(*arrays), options)

    return jax.jit(jax.value_and_grad(scalar, argnums=(1, 2, 3)))


def run(what, problem, options):
    return make_step(what, options)(*problem)


def check(implementation, what, components, scales):
    step = make_step(what, Options(implementation=implementation))
    for scale, least in scales:
        exact, problem = make_problem(components, scale)
        result = step(*problem)
        assert np.exp(-loss_and_gradient(exact)[0] / exact.weights_T.sum()) > least
        compare(result, exact, (8e-3, 8e-3, 4e-3))


def compare(result, exact, limits):
    """The loss, and the gradients."""
    np.testing.assert_allclose(result[0], loss_and_gradient(exact)[0], rtol=3e-3)
    compare_gradients(result, exact, limits)


def compare_gradients(result, exact, limits):
    """By shares of their largest entries."""
    _, bars = result
    _, (_, *exact_bars) = loss_and_gradient(exact)
    for bar, exact_bar, limit in zip(bars, exact_bars, limits, strict=True):
        error = np.max(np.abs(np.asarray(bar, np.float64) - exact_bar))
        assert error < limit * np.max(np.abs(exact_bar))


INTERPRETERS = {
    "blocked": contextlib.nullcontext,
    "pallas_gpu": hopper_kernel.interpreted,
    "pallas_tpu": pltpu.force_tpu_interpret_mode,
}


@pytest.mark.parametrize(
    ("what", "components"), [(loss, 1), (nll, 3), (with_entropy, 1)]
)
@pytest.mark.parametrize("implementation", INTERPRETERS)
def test_the_gradient_of_sure_labels(implementation, what, components):
    if implementation == "pallas_gpu" and jax.__version_info__ < (0, 11):
        pytest.skip(f"the kernel needs jax 0.11, this is {jax.__version__}")
    with INTERPRETERS[implementation]():
        check(implementation, what, components, [(0.16, 0.9), (0.25, 0.998)])


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "components"), [(loss, 1), (nll, 3)])
@pytest.mark.parametrize("implementation", ["blocked", "auto"])
def test_the_same_compiled_for_a_gpu(implementation, what, components):
    """XLA for GPUs leaves out casts that are cast back, which others keep."""
    check(implementation, what, components, [(0.16, 0.9)])


def tf32(array):
    return jax.lax.reduce_precision(array, 8, 10)


TF32 = Options(implementation="blocked", device=devices.H200)


@pytest.mark.parametrize("what", [loss, nll])
def test_float32_products_of_ten_bits(what):
    """As GPUs take them: what is beside a product has the product's inputs."""
    _, problem = make_problem(1, 0.25, jnp.float32)
    seen = [np.asarray(tf32(array), np.float64) for array in problem[1:3]]
    exact = Problem(problem[0], *seen, *problem[3:])
    compare(run(what, problem, TF32), exact, (2e-3, 2e-3, 2e-3))


def test_products_read_all_bits_of_what_the_loss_gives_them(monkeypatch):
    """Rounding these again, as the matrix unit does, changes no bit of the result."""
    _, problem = make_problem(1, 0.25, jnp.float32)
    result, product, called = run(loss, problem, TF32), products.product, []

    def of_ten_bits(left, right, *how):
        called.append(how)
        return product(tf32(left), tf32(right), *how)

    monkeypatch.setattr(products, "product", of_ten_bits)
    for module in (exponential, table_sums):
        monkeypatch.setattr(module, "product", of_ten_bits)
    for ours, again in zip(
        jax.tree.leaves(result),
        jax.tree.leaves(run(loss, problem, TF32)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, again)
    assert len(called) >= 3


def of_a_gpu(what):
    """What the device makes of float32 inputs, and the problem that it sees."""
    exact, problem = make_problem(1, 0.25, jnp.float32)
    bits = Options().resolve().float32_bits
    if bits is not None:
        seen = [np.asarray(tf32(array), np.float64) for array in problem[1:3]]
        exact = exact._replace(context_TKE=seen[0], table_VE=seen[1])
    return run(what, problem, Options(implementation="blocked")), exact


@pytest.mark.gpu
@pytest.mark.parametrize("what", [loss, nll])
def test_float32_gradients_of_a_gpu(what):
    compare_gradients(*of_a_gpu(what), (5e-3,) * 3)


@pytest.mark.gpu
@pytest.mark.xfail(reason="TF32 sums are cut off: the loss of 1e-3 is 5e-6 too low")
@pytest.mark.parametrize("what", [loss, nll])
def test_float32_losses_of_a_gpu(what):
    result, exact = of_a_gpu(what)
    compare(result, exact, (5e-3,) * 3)
