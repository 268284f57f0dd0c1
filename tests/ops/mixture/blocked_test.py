import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle import ops
from softbottle.ops.mixture import blocked
from softbottle.ops.mixture.activations import SIGSOFTMAX
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops.mixture.problem import make_problem, paired, sigsoftmax_scores

ROW_BYTES = 3 * 37 * 4
lse = blocked.IMPLEMENTATION.lse


@pytest.mark.parametrize("budget", [1, 4 * ROW_BYTES + 1, 2**40])
def test_normalisers_take_any_cotangent(budget):
    problem = make_problem()
    cotangent_TK = np.random.default_rng(1).normal(size=problem.log_prior_TK.shape)
    zero_TK = np.zeros_like(cotangent_TK)
    (_, lse_TK), bars = sigsoftmax_scores(problem, zero_TK, cotangent_TK)
    options = Options(budget_bytes=budget).resolve()

    @jax.jit
    def run(context_TKE, table_VE, bias_V, cotangent_TK):
        def function(context_TKE, *vocabulary):
            return lse(context_TKE, Vocabulary(*vocabulary), SIGSOFTMAX, options)

        ours_TK, pull = jax.vjp(function, context_TKE, table_VE, bias_V)
        return ours_TK, pull(cotangent_TK)

    point = oracle.cast((*problem[1:4], cotangent_TK), jnp.float32)
    oracle.assert_close(run(*point), (lse_TK, bars), "float32")


@pytest.mark.slow
def test_the_scalar_loss_scales_with_its_cotangent():
    problem = oracle.cast(make_problem(), jnp.float32)
    options = Options(budget_bytes=4 * ROW_BYTES + 1)

    def loss(*args):
        return ops.loss(*paired(*args), SIGSOFTMAX, options)

    @jax.jit
    def run(*problem):
        _, pull = jax.vjp(lambda *args: loss(*args, *problem[4:]), *problem[:4])
        return pull(jnp.float32(1)), pull(jnp.float32(-3))

    once, thrice = run(*problem)
    oracle.assert_close(thrice, jax.tree.map(lambda bar: -3.0 * bar, once), "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, what", [("mos", "nll"), ("moss", "loss"), ("plif", "nll"), ("plif", "loss")]
)
def test_loss_and_gradient_hold_an_eighth_of_the_dense_logits(name, what, optimised):
    tokens, components, vocab, width = 2048, 8, 32_000, 64
    head = {
        "mos": softbottle.mos(components),
        "moss": softbottle.moss(components),
        "plif": softbottle.plif(1000, components=components),
    }[name]

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = jax.eval_shape(
        functools.partial(head.init, hidden_dim=width, context_dim=width),
        jax.random.key(0),
    )
    inputs = (params, shape(vocab, width), shape(vocab), shape(tokens, width))

    def total(*args):
        *differentiable, labels_T, weights_T = args
        if what == "loss":
            return head.loss(*args)
        return jnp.sum(head.nll(*differentiable, labels_T) * weights_T)

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3)))
    labels_T = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    # Memory is assigned before LLVM, whose passes take most of the time.
    quick = {"xla_backend_optimization_level": 0}
    lowered = step.lower(*inputs, labels_T, shape(tokens))
    compiled = lowered.compile(compiler_options=quick)
    contexts = 4 * tokens * components * width
    gradients = contexts + sum(4 * leaf.size for leaf in jax.tree.leaves(inputs))
    beyond = compiled.memory_analysis().temp_size_in_bytes - gradients
    assert beyond <= 4 * tokens * components * vocab / 8
