import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle import ops
from softbottle.ops.activations import SIGSOFTMAX
from tests import oracle
from tests.ops.problem import COMPONENTS, VOCAB, make_problem

PROBLEM = oracle.cast(make_problem(), jnp.float32)
BUDGETS = [1, 4 * COMPONENTS * VOCAB * 4 + 1, 2**40]


def run(function, budget, *extra):
    options = {"budget_bytes": budget, "vocab": 31}

    def call(*args):
        return function(*args, *extra, SIGSOFTMAX, **options)

    return jax.jit(call)(*PROBLEM[:4])


def test_sampling_does_not_depend_on_chunking():
    whole = run(ops.sample, BUDGETS[-1], jax.random.key(7))
    for budget in BUDGETS[:-1]:
        chunked = run(ops.sample, budget, jax.random.key(7))
        np.testing.assert_array_equal(chunked, whole)
    assert np.any(run(ops.sample, BUDGETS[-1], jax.random.key(8)) != whole)


@pytest.mark.parametrize("budget", BUDGETS[:-1])
def test_log_probs_do_not_depend_on_chunking(budget):
    whole, chunked = run(ops.log_probs, BUDGETS[-1]), run(ops.log_probs, budget)
    np.testing.assert_allclose(chunked[:, :31], whole[:, :31], rtol=0, atol=1e-5)
    assert np.all(np.isneginf(chunked[:, 31:]))


@pytest.mark.parametrize("budget", BUDGETS)
def test_top_k_is_sorted_and_leaves_padding_rows_out(budget):
    log_p_TV = np.asarray(run(ops.log_probs, BUDGETS[-1]))
    values_Tk, ids_Tk = run(ops.top_k, budget, 31)
    assert np.all(np.diff(values_Tk, axis=1) <= 0)
    np.testing.assert_array_equal(np.sort(ids_Tk, axis=1), np.tile(range(31), (11, 1)))
    read_Tk = np.take_along_axis(log_p_TV, np.asarray(ids_Tk), axis=1)
    np.testing.assert_allclose(values_Tk, read_Tk, rtol=0, atol=1e-5)
