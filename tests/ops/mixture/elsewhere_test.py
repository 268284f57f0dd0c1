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
from tests.ops.mixture.problem import TOKENS, VOCAB, make_problem, paired

FIRST = 13
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
    labels_T, weights_T, _ = targets
    owned_T = labels_T < FIRST
    place_T = jnp.where(owned_T, labels_T, 0)
    score_TK = g_TKS[jnp.arange(TOKENS), :, place_T]
    elsewhere = Elsewhere(score_TK, jax.nn.logsumexp(g_TKS, axis=2), owned_T)
    rest = jax.tree.map(lambda array: array[FIRST:], vocabulary)
    local_T = jnp.where(owned_T, 0, labels_T - FIRST)
    return mixture, rest, Targets(local_T, weights_T), activation, options, elsewhere


def loss_in_pieces(*args):
    return api.loss(*in_pieces(*args))


def whole_loss(activation, *arrays):
    options = Options(implementation="reference")
    return api.loss(*paired(*arrays), activation, options)


@pytest.mark.parametrize("implementation", ["blocked", "reference"])
@pytest.mark.parametrize("budget", [800, 2**30])
@pytest.mark.parametrize("activation", [SOFTMAX, SIGSOFTMAX, LEARNED])
def test_a_loss_in_pieces_is_the_loss_of_the_whole(
    implementation, budget, activation, float64
):
    arrays = oracle.cast(problem_with_padding(), jnp.float64)
    options = Options(implementation=implementation, budget_bytes=budget)
    by = (0, 1, 2, 3, 5)
    exact = jax.value_and_grad(functools.partial(whole_loss, activation), by)(*arrays)
    ours = functools.partial(loss_in_pieces, options, activation)
    oracle.assert_close(
        jax.jit(jax.value_and_grad(ours, by))(*arrays), exact, "float64"
    )


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_a_piece_that_has_nearly_all_the_mass(shift, float64):
    problem = problem_with_padding()
    bias_V = problem.bias_V + np.where(np.arange(VOCAB) < FIRST, shift, 0)
    arrays = oracle.cast(problem._replace(bias_V=bias_V), jnp.float64)
    by = (0, 1, 2, 3, 5)
    exact = jax.value_and_grad(functools.partial(whole_loss, SOFTMAX), by)(*arrays)
    options = Options(implementation="blocked")
    ours = functools.partial(loss_in_pieces, options, SOFTMAX)
    oracle.assert_close(
        jax.jit(jax.value_and_grad(ours, by))(*arrays), exact, "float64"
    )


def test_scores_in_pieces_are_those_of_the_whole(float64):
    arrays = oracle.cast(problem_with_padding(), jnp.float64)
    mixture, vocabulary, targets = paired(*arrays)
    exact = api.scores(mixture.context_TKE, vocabulary, targets.labels_T)
    pieces = in_pieces(Options(), SOFTMAX, *arrays)
    mixture, rest, targets, activation, options, elsewhere = pieces
    inputs = mixture.context_TKE, rest, targets.labels_T, activation, options
    oracle.assert_close(api.scores(*inputs, elsewhere), exact, "float64")


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("check", [True, False])
def test_a_piece_beside_a_split_vocabulary(shards, check):
    arrays = oracle.cast(problem_with_padding(), jnp.float32)
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

    by = (0, 1, 2, 3, 5)
    exact = jax.value_and_grad(functools.partial(whole_loss, SOFTMAX), by)(*arrays)
    oracle.assert_close(
        jax.jit(jax.value_and_grad(ours, by))(*arrays), exact, "float32"
    )


def test_given_normalizers_are_those_of_more_words(float64):
    arrays = oracle.cast(problem_with_padding(), jnp.float64)
    mixture, vocabulary, targets = paired(*arrays)
    log_p_TV = api.log_probs(mixture, vocabulary)
    lse_TK = api.scores(mixture.context_TKE, vocabulary, targets.labels_T)[1]
    rest = jax.tree.map(lambda array: array[FIRST:], vocabulary)
    ours_TV = api.log_probs(mixture, rest, lse_TK=lse_TK)
    np.testing.assert_allclose(ours_TV, log_p_TV[:, FIRST:], atol=1e-12)
    values_Tk, ids_Tk = api.top_k(mixture, rest, 2, lse_TK=lse_TK)
    best_Tk, at_Tk = jax.lax.top_k(log_p_TV[:, FIRST:], 2)
    np.testing.assert_allclose(values_Tk, best_Tk, atol=1e-12)
    np.testing.assert_array_equal(ids_Tk, at_Tk)
