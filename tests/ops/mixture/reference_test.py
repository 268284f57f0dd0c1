import jax
import jax.numpy as jnp
import numpy as np

from softbottle.ops.mixture import reference
from softbottle.ops.mixture.activations import SIGSOFTMAX
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops.mixture.problem import make_problem, paired, sigsoftmax_scores


def test_the_dense_loss_and_its_gradients_are_the_definition(float64):
    problem = make_problem()
    zero_TK = np.zeros_like(problem.log_prior_TK)
    (score_TK, lse_TK), _ = sigsoftmax_scores(problem, zero_TK, zero_TK)
    joint_TK = np.exp(problem.log_prior_TK + score_TK - lse_TK)
    nll_T = -np.log(joint_TK.sum(axis=1))
    posterior_TK = joint_TK / joint_TK.sum(axis=1, keepdims=True)
    weight_TK = problem.weights_T[:, None] * posterior_TK
    _, bars = sigsoftmax_scores(problem, -weight_TK, weight_TK)

    def loss(*args):
        return reference.IMPLEMENTATION.loss(*paired(*args), SIGSOFTMAX, Options())

    point = oracle.cast(problem, jnp.float64)
    value, ours = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 5)))(*point)
    oracle.assert_close(value, np.dot(problem.weights_T, nll_T), "float64")
    oracle.assert_close(ours, (-weight_TK, *bars, nll_T), "float64")
