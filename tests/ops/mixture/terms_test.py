"""Squared log-normalizers and scores beside the loss, in one pass and one gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import softbottle
from softbottle.ops.mixture import api
from softbottle.ops.mixture.activations import SIGSOFTMAX, Activation, generalized
from softbottle.ops.mixture.arrays import Mixture, Targets, Vocabulary
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops.mixture.problem import make_problem

LEARNED = Activation(generalized, params=(jnp.asarray(0.5), jnp.asarray(1.75)))
BY = (0, 1, 2, 3, 5, 6, 7)  # the labels, 4, have no gradient
pytestmark = pytest.mark.usefixtures("quick_keys")


def make_point():
    """A problem, one of whose tokens has no weight, and weights of the terms."""
    problem = make_problem(tokens=13, components=3, width=8, vocab=90)
    problem.weights_T[4] = 0
    z_weights_T = np.where(problem.weights_T == 0, 0, np.linspace(0.1, 0.7, 13))
    score_weights_T = np.where(problem.weights_T == 0, 0, np.linspace(-0.6, 0.4, 13))
    return *problem, z_weights_T, score_weights_T


def loss(options, activation, log_prior_TK, context_TKE, table_VE, bias_V, *targets):
    mixture = Mixture(log_prior_TK, context_TKE)
    words = Vocabulary(table_VE, bias_V)
    return api.loss(mixture, words, Targets(*targets), activation, options)


def dense(center, slope, log_prior_TK, context_TKE, table_VE, bias_V, labels_T, *rest):
    """The formula itself, on [T, K, V]."""
    weights_T, z_weights_T, score_weights_T = rest
    z_TKV = jnp.einsum("tke,ve->tkv", context_TKE, table_VE) + bias_V[None, None]
    shifted = z_TKV - center
    g_TKV = slope * shifted - (slope - 1) * jnp.logaddexp(0.0, shifted)
    lse_TK = jax.nn.logsumexp(g_TKV + center, axis=2)
    log_p_TKV = jax.nn.log_softmax(g_TKV, axis=2) + log_prior_TK[:, :, None]
    log_p_TV = jax.nn.logsumexp(log_p_TKV, axis=1)
    nll_T = -jnp.take_along_axis(log_p_TV, labels_T[:, None], axis=1)[:, 0]
    score_TKV = jnp.sum(g_TKV + center, axis=1)
    score_T = jnp.take_along_axis(score_TKV, labels_T[:, None], axis=1)[:, 0]
    square_T = jnp.mean(lse_TK**2, axis=1)
    terms = (weights_T * nll_T, z_weights_T * square_T, score_weights_T * score_T)
    return sum(map(jnp.sum, terms))


@functools.cache
def wanted(center, slope):
    with jax.enable_x64(True):
        by = jax.jit(jax.value_and_grad(functools.partial(dense, center, slope), BY))
        return jax.tree.map(np.asarray, by(*make_point()))


def without_padding(result):
    """The gradient by a weight of 0 is 0 here, and something in the formula."""
    value, bars = result
    kept_T = np.arange(13) != 4
    return value, (*bars[:4], *(bar_T[kept_T] for bar_T in bars[4:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "center", "slope", "budget"),
    [(SIGSOFTMAX, 0.0, 2.0, 2**12), (LEARNED, 0.5, 1.75, 2**40)],
    ids=["sigsoftmax", "learned"],
)
def test_value_and_gradient_equal_the_formula(
    activation, center, slope, budget, float64
):
    options = Options(implementation="blocked", budget_bytes=budget)
    ours = jax.jit(
        jax.value_and_grad(functools.partial(loss, options, activation), BY)
    )(*oracle.cast(make_point(), jnp.float64))
    exact = without_padding(wanted(center, slope))
    oracle.assert_close(without_padding(ours), exact, "float64")


def test_a_split_vocabulary_gives_the_same():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    options = Options(implementation="blocked", vocab_axis="model")
    split = jax.shard_map(
        functools.partial(loss, options, SIGSOFTMAX),
        mesh=mesh,
        in_specs=(P(), P(), P("model"), P("model"), P(), P(), P(), P()),
        out_specs=P(),
    )
    ours = jax.jit(jax.value_and_grad(split, BY))(
        *oracle.cast(make_point(), jnp.float32)
    )
    exact = without_padding(wanted(0.0, 2.0))
    oracle.assert_close(without_padding(ours), exact, "float32")


HEADS = (
    softbottle.mos(2),
    softbottle.partition(2, components=2),
    softbottle.mixtape(2, frequent=7),
    softbottle.plif(knots=4),
)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.name)
def test_a_head_adds_it_to_the_sum_and_to_each_token(head):
    """Two routes: the gradient in forward, and that of the normalizers."""
    random = np.random.default_rng(0)
    params = jax.jit(head.init, static_argnums=(1, 2))(jax.random.key(0), 6, 6)
    table_VE, bias_V, hidden_TD = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((20, 6), (20,), (5, 6))
    )
    labels_T = np.array([3, 0, 19, -100, 8], np.int32)

    def total(reduction, *inputs):
        terms = head.loss(
            *inputs, labels_T, reduction=reduction, ignore_label=-100, z_loss=0.3
        )
        return jnp.sum(terms)

    @jax.jit
    def run(*inputs):
        steps = [
            jax.value_and_grad(functools.partial(total, name), (0, 1, 2, 3))(*inputs)
            for name in ("sum", "none")
        ]
        plain = head.loss(*inputs, labels_T, ignore_label=-100)
        *_, lse_TK = head.scores(*inputs, labels_T)
        return *steps, plain, lse_TK

    inputs = (params, table_VE, bias_V, hidden_TD)
    fused, apart, plain, lse_TK = run(*inputs)
    for ours, theirs in zip(
        jax.tree.leaves(fused), jax.tree.leaves(apart), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    square_T = np.mean(np.square(np.asarray(lse_TK)), axis=1)
    added = 0.3 * np.sum(square_T[[0, 1, 2, 4]])
    np.testing.assert_allclose(fused[0] - plain, added, rtol=1e-4)


@pytest.mark.parametrize("factor", [-0.1, float("nan"), float("inf")])
def test_a_factor_that_is_none_is_refused(factor):
    hidden_TD, table_VE = jnp.ones((2, 3)), jnp.ones((4, 3))
    with pytest.raises(ValueError, match="z_loss must be a finite number >= 0"):
        softbottle.softmax().nll(
            {}, table_VE, None, hidden_TD, jnp.arange(2), z_loss=factor
        )
