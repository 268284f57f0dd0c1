"""The label's score, normalizer and entropy of each component, and one gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from softbottle.ops.mixture import api, hopper_kernel
from softbottle.ops.mixture.activations import SIGSOFTMAX, SOFTMAX
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops.mixture.problem import make_problem

VOCAB = 300


def make_point(scale=1.0):
    """Contexts, table and bias, one word of which is impossible, and cotangents."""
    problem = make_problem(tokens=13, components=2, width=8, vocab=VOCAB)
    problem.bias_V[5] = -1e5
    bars = np.random.default_rng(2).normal(size=(3, 13, 2))
    bars[:, 3, 1] = 0  # asks for nothing
    return scale * problem.context_TKE, problem.table_VE, problem.bias_V, bars


def labels_of(tokens, words):
    return np.random.default_rng(3).integers(words, size=tokens)


def dense(context_TKE, table_VE, bias_V, bars, slope):
    """Values and gradients by hand; g = z, or with a slope of 2 sigsoftmax's."""
    z_TKV = context_TKE @ table_VE.T + bias_V
    g_TKV = slope * z_TKV - (slope - 1) * np.logaddexp(0, z_TKV)
    g_slope_TKV = slope - (slope - 1) * oracle.sigmoid(z_TKV)
    top_TK1 = g_TKV.max(axis=2, keepdims=True)
    total_TK1 = np.exp(g_TKV - top_TK1).sum(axis=2, keepdims=True)
    log_p_TKV = g_TKV - top_TK1 - np.log(total_TK1)
    p_TKV = np.exp(log_p_TKV)
    entropy_TK = -(p_TKV * log_p_TKV).sum(axis=2)
    own_bar_TK1, lse_bar_TK1, entropy_bar_TK1 = bars[:, :, :, None]
    away_TKV = log_p_TKV + entropy_TK[:, :, None]
    labels_T = labels_of(len(z_TKV), len(table_VE))
    hit_T1V = np.eye(len(table_VE))[labels_T][:, None]
    z_bar_TKV = p_TKV * (lse_bar_TK1 - entropy_bar_TK1 * away_TKV)
    z_bar_TKV = (z_bar_TKV + own_bar_TK1 * hit_T1V) * g_slope_TKV
    lse_TK = (top_TK1 + np.log(total_TK1))[:, :, 0]
    own_TK = (hit_T1V * g_TKV).sum(axis=2)
    return (own_TK, lse_TK, entropy_TK), (
        z_bar_TKV @ table_VE,
        np.einsum("tkv,tke->ve", z_bar_TKV, context_TKE),
        z_bar_TKV.sum(axis=(0, 1)),
    )


def run(options, activation, context_TKE, table_VE, bias_V, bars):
    def scalar(context_TKE, table_VE, bias_V):
        words = Vocabulary(table_VE, bias_V)
        labels_T = labels_of(len(context_TKE), len(table_VE))
        found = api.scores_and_entropies(
            context_TKE, words, jnp.asarray(labels_T), activation, options
        )
        return sum(
            jnp.sum(bar * each) for bar, each in zip(bars, found, strict=True)
        ), (found)

    gradient = jax.grad(scalar, (0, 1, 2), has_aux=True)
    bars, found = gradient(context_TKE, table_VE, bias_V)
    return found, bars


@pytest.mark.parametrize(
    ("implementation", "activation", "slope"),
    [("blocked", SIGSOFTMAX, 2), ("reference", SOFTMAX, 1)],
    ids=["blocked-sigsoftmax", "reference-z"],
)
def test_values_and_gradients(implementation, activation, slope, float64):
    options = Options(implementation=implementation, budget_bytes=2**14)
    inputs = oracle.cast(make_point(), jnp.float64)
    ours = jax.jit(functools.partial(run, options, activation))(*inputs)
    oracle.assert_close(ours, dense(*make_point(), slope), "float64")


def test_large_logits_lose_nothing():
    """Scores of 1e4 apart: the entropy is a small number, not a difference of two."""
    point = make_point(scale=1e3)
    inputs = oracle.cast(point, jnp.float32)
    options = Options(implementation="blocked")
    ours = jax.jit(functools.partial(run, options, SOFTMAX))(*inputs)
    (*_, entropy_TK), bars = ours
    rounded = [np.asarray(array, np.float64) for array in inputs]
    (*_, exact_TK), exact_bars = dense(*rounded, slope=1)
    np.testing.assert_allclose(entropy_TK, exact_TK, atol=3e-3)
    for bar, exact in zip(bars, exact_bars, strict=True):
        assert np.all(np.isfinite(bar))
        np.testing.assert_allclose(bar, exact, atol=3e-3 * np.abs(exact).max())


def test_a_split_vocabulary_gives_the_same(float64):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    options = Options(implementation="blocked", vocab_axis="model")

    def scalar(context_TKE, table_VE, bias_V, bars):
        words = Vocabulary(table_VE, bias_V)
        labels_T = jnp.asarray(labels_of(len(context_TKE), VOCAB))
        found = api.scores_and_entropies(context_TKE, words, labels_T, SOFTMAX, options)
        pairs = zip(bars, found, strict=True)
        return sum(jnp.sum(bar * each) for bar, each in pairs), found

    split = jax.shard_map(
        scalar,
        mesh=mesh,
        in_specs=(P(), P("model"), P("model"), P()),
        out_specs=P(),
    )
    inputs = oracle.cast(make_point(), jnp.float64)
    bars, found = jax.jit(jax.grad(split, (0, 1, 2), has_aux=True))(*inputs)
    oracle.assert_close((found, bars), dense(*make_point(), 1), "float64")


def check(ours, rounded, atol):
    """Values to `atol`, and gradients by bfloat16 products to their norms."""
    found, exact_bars = dense(*rounded, slope=1)
    for each, exact in zip(ours[0], found, strict=True):
        np.testing.assert_allclose(each, exact, atol=atol)
    for bar, exact in zip(ours[1], exact_bars, strict=True):
        error = np.linalg.norm(np.asarray(bar, np.float64) - exact)
        assert error < 5e-3 * np.linalg.norm(exact)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="needs the interpreter of jax 0.11"
)
@pytest.mark.parametrize("words", [VOCAB, 257])
def test_the_hopper_kernel_in_the_interpreter(words, mixed_dtypes):
    context_TKE, table_VE, bias_V, bars = make_point()
    point = (context_TKE, table_VE[:words], bias_V[:words], bars)
    *inputs, bars = oracle.cast(point, jnp.bfloat16)
    inputs[2] = jnp.asarray(point[2], jnp.float32)
    rounded = [np.asarray(array, np.float64) for array in (*inputs, bars)]
    options = Options(implementation="pallas_gpu")
    with hopper_kernel.interpreted():
        ours = jax.jit(functools.partial(run, options, SOFTMAX))(
            *inputs, bars.astype(jnp.float32)
        )
    check(ours, rounded, atol=2e-5)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="needs the interpreter of jax 0.11"
)
@pytest.mark.parametrize("asks", ["entropies", "scores"])
def test_rows_that_ask_for_nothing_add_nothing_beside_large_biases(asks, mixed_dtypes):
    """exp(100) is no float32: in padding and beside zeros it must not be formed."""
    context_TKE, table_VE, bias_V, bars = make_point()
    bias_V[7], bars[:, 4:] = 100, 0
    inputs = oracle.cast((context_TKE, table_VE), jnp.bfloat16)
    options = Options(implementation="pallas_gpu")
    labels_T = jnp.asarray(labels_of(len(context_TKE), VOCAB))

    @jax.jit
    def gradient(context_TKE, table_VE, bias_V):
        def found(*arrays):
            words = Vocabulary(*arrays[1:])
            call = api.scores_and_entropies if asks == "entropies" else api.scores
            return call(arrays[0], words, labels_T, SOFTMAX, options)

        each, pull = jax.vjp(found, context_TKE, table_VE, bias_V)
        return pull(tuple(jnp.asarray(bars[: len(each)], jnp.float32)))

    with hopper_kernel.interpreted():
        ours = gradient(*inputs, jnp.asarray(bias_V, jnp.float32))
    assert all(np.all(np.isfinite(np.asarray(bar, np.float32))) for bar in ours)
    assert not np.any(np.asarray(ours[0], np.float32)[4:])


@pytest.mark.gpu
def test_the_hopper_kernel_on_a_gpu(mixed_dtypes):
    random = np.random.default_rng(0)
    shapes = ((301, 1, 200), (5003, 200), (5003,), (3, 301, 1))
    point = [random.normal(size=shape) for shape in shapes]
    point[1] *= 0.2
    *inputs, bars = oracle.cast(point, jnp.bfloat16)
    rounded = [np.asarray(array, np.float64) for array in (*inputs, bars)]
    function = jax.jit(functools.partial(run, Options(), SOFTMAX))
    once, again = (function(*inputs, bars.astype(jnp.float32)) for _ in range(2))
    check(once, rounded, atol=1e-4)
    for left, right in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("implementation", ["blocked", "reference"])
def test_labels_alone_may_be_batched(implementation):
    """Several words for each state, as one samples them: a gradient for each."""
    context_TKE, table_VE, bias_V, _ = oracle.cast(make_point(), jnp.float32)
    labels_BT = jnp.asarray(np.random.default_rng(4).integers(VOCAB, size=(3, 13)))
    options = Options(implementation=implementation)

    def entropy(context_TKE, labels_T):
        words = Vocabulary(table_VE, bias_V)
        inputs = (context_TKE, words, labels_T, SOFTMAX, options)
        return jnp.sum(api.scores_and_entropies(*inputs)[2])

    def batched(context_TKE):
        return jnp.sum(jax.vmap(entropy, (None, 0))(context_TKE, labels_BT))

    one_by_one = jax.jit(jax.grad(entropy))
    expected = sum(one_by_one(context_TKE, labels_T) for labels_T in labels_BT)
    found = jax.jit(jax.grad(batched))(context_TKE)
    np.testing.assert_allclose(found, expected, atol=1e-5)
