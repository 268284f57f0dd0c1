"""A vocabulary in two pieces: the one says what it adds, the other has the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from softbottle.ops.mixture import api
from softbottle.ops.mixture.activations import SIGSOFTMAX, SOFTMAX, Activation
from softbottle.ops.mixture.arrays import Elsewhere, Targets
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops.mixture.problem import (
    TOKENS,
    VOCAB,
    loss_and_gradient,
    make_problem,
    paired,
)

FIRST = 13
BY = (0, 1, 2, 3, 5)
LEARNED = Activation(
    lambda theta, z: z + theta[0] * jax.nn.log_sigmoid(z), params=(jnp.asarray(1.0),)
)


def problem_with_padding():
    problem = make_problem()
    weights_T = problem.weights_T.copy()
    weights_T[2::3] = 0
    labels_T = problem.labels_T.copy()
    labels_T[1::2] %= FIRST
    labels_T[0], labels_T[1] = FIRST - 1, FIRST
    return problem._replace(labels_T=labels_T, weights_T=weights_T)


def in_pieces(options, activation, *arrays):
    """The first words' part by dense logits, the rest by the operation."""
    mixture, vocabulary, targets = paired(*arrays)
    table_VE, bias_V = vocabulary
    z_TKS = jnp.einsum("tke,se->tks", mixture.context_TKE, table_VE[:FIRST])
    z_TKS = z_TKS + bias_V[None, None, :FIRST]
    g_TKS = activation.apply(activation.theta, z_TKS)
    labels_T, weights_T, *_ = targets
    owned_T = labels_T < FIRST
    place_T = jnp.where(owned_T, labels_T, 0)
    score_TK = g_TKS[jnp.arange(TOKENS), :, place_T]
    elsewhere = Elsewhere(score_TK, jax.nn.logsumexp(g_TKS, axis=2), owned_T)
    rest = jax.tree.map(lambda array: array[FIRST:], vocabulary)
    local_T = jnp.where(owned_T, 0, labels_T - FIRST)
    return mixture, rest, Targets(local_T, weights_T), activation, options, elsewhere


def loss_in_pieces(*args):
    return api.loss(*in_pieces(*args))


def whole_step(problem, slope=1.0):
    """The loss of the whole vocabulary and its gradient, that by the weights too."""
    value, bars = loss_and_gradient(problem, slope=slope)
    each = (problem._replace(weights_T=one_T) for one_T in np.eye(TOKENS))
    nll_T = [loss_and_gradient(token, slope=slope)[0] for token in each]
    return value, (*bars, np.where(problem.weights_T != 0, nll_T, 0.0))


# An activation that is learned goes by its normalizers. The reference makes no blocks.
@pytest.mark.parametrize(
    "implementation, budget, activation, slope",
    [
        ("blocked", 800, SIGSOFTMAX, 2.0),
        ("blocked", 2**30, SOFTMAX, 1.0),
        ("blocked", 800, LEARNED, 2.0),
        ("reference", None, SIGSOFTMAX, 2.0),
    ],
)
def test_a_loss_in_pieces_is_the_loss_of_the_whole(
    implementation, budget, activation, slope, float64
):
    problem = problem_with_padding()
    options = Options(implementation=implementation, budget_bytes=budget)
    ours = functools.partial(loss_in_pieces, options, activation)
    step = jax.jit(jax.value_and_grad(ours, BY))(*oracle.cast(problem, jnp.float64))
    oracle.assert_close(step, whole_step(problem, slope), "float64")


one_sided_step = jax.jit(
    jax.value_and_grad(
        functools.partial(loss_in_pieces, Options(implementation="blocked"), SOFTMAX),
        BY,
    )
)


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_a_piece_that_has_nearly_all_the_mass(shift, float64):
    problem = problem_with_padding()
    bias_V = problem.bias_V + np.where(np.arange(VOCAB) < FIRST, shift, 0)
    problem = problem._replace(bias_V=bias_V)
    step = one_sided_step(*oracle.cast(problem, jnp.float64))
    oracle.assert_close(step, whole_step(problem), "float64")


def test_scores_in_pieces_are_those_of_the_whole(float64):
    problem = problem_with_padding()
    z_TKV = problem.context_TKE @ problem.table_VE.T + problem.bias_V
    score_TK = z_TKV[np.arange(TOKENS), :, problem.labels_T]

    @jax.jit
    def run(*arrays):
        pieces = in_pieces(Options(), SOFTMAX, *arrays)
        mixture, rest, targets, activation, options, elsewhere = pieces
        inputs = mixture.context_TKE, rest, targets.labels_T, activation, options
        return api.scores(*inputs, elsewhere)

    exact = (score_TK, np.log(np.exp(z_TKV).sum(axis=2)))
    oracle.assert_close(run(*oracle.cast(problem, jnp.float64)), exact, "float64")


@pytest.mark.parametrize("shards, check", [(2, False), (4, True)])
def test_a_piece_beside_a_split_vocabulary(shards, check):
    problem = problem_with_padding()
    mesh = jax.make_mesh((shards,), ("model",), axis_types=(AxisType.Auto,))
    options = Options(vocab_axis="model", implementation="blocked")

    def ours(*arrays):
        mixture, rest, targets, activation, _, elsewhere = in_pieces(
            options, SOFTMAX, *arrays
        )

        def split(*args):
            return api.loss(*args[:3], activation, options, args[3])

        specs = (P(), P("model"), P(), P())
        over = jax.shard_map(
            split, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check
        )
        return over(mixture, rest, targets, elsewhere)

    step = jax.jit(jax.value_and_grad(ours, BY))(*oracle.cast(problem, jnp.float32))
    oracle.assert_close(step, whole_step(problem), "float32")


def test_given_normalizers_are_those_of_more_words(float64):
    @jax.jit
    def run(*arrays):
        mixture, vocabulary, targets = paired(*arrays)
        lse_TK = api.scores(mixture.context_TKE, vocabulary, targets.labels_T)[1]
        rest = jax.tree.map(lambda array: array[FIRST:], vocabulary)
        return (
            api.log_probs(mixture, vocabulary)[:, FIRST:],
            api.log_probs(mixture, rest, lse_TK=lse_TK),
            api.top_k(mixture, rest, 2, lse_TK=lse_TK),
        )

    results = run(*oracle.cast(problem_with_padding(), jnp.float64))
    whole_TV, ours_TV, (values_Tk, ids_Tk) = jax.tree.map(np.asarray, results)
    np.testing.assert_allclose(ours_TV, whole_TV, atol=1e-12)
    at_Tk = np.argsort(-whole_TV, axis=1)[:, :2]
    best_Tk = np.take_along_axis(whole_TV, at_Tk, axis=1)
    np.testing.assert_allclose(values_Tk, best_Tk, atol=1e-12)
    np.testing.assert_array_equal(ids_Tk, at_Tk)
