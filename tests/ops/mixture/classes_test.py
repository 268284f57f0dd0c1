"""Words in classes: the operations against a dense loop over words, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from softbottle.ops.mixture import api, classes
from softbottle.ops.mixture.activations import SIGSOFTMAX, SOFTMAX, Activation
from softbottle.ops.mixture.arrays import Mixture, Targets, Vocabulary
from softbottle.ops.mixture.options import Options
from tests import oracle

TOKENS, CLASSES, COMPONENTS, WIDTH, ROWS, WORDS = 11, 3, 2, 7, 48, 43


def make_problem(scale=1.0):
    rng = np.random.default_rng(5)
    score_TK = rng.normal(size=(TOKENS, COMPONENTS))
    log_prior_TK = score_TK - np.log(np.exp(score_TK).sum(axis=1, keepdims=True))
    context = scale * rng.normal(size=(TOKENS, CLASSES, COMPONENTS, WIDTH))
    weights_T = rng.uniform(0.5, 1.5, TOKENS)
    weights_T[2::3] = 0
    return (
        log_prior_TK,
        context,
        rng.normal(size=(ROWS, WIDTH)),
        rng.normal(size=ROWS),
        rng.integers(0, WORDS, TOKENS).astype(np.int32),
        weights_T,
    )


@jax.jit
def exact_step(*arrays):
    return jax.value_and_grad(exact_loss, argnums=(0, 1, 2, 3))(*arrays)


def exact_loss(log_prior_TK, context, table_VE, bias_V, labels_T, weights_T):
    """Sigsoftmax's loss as a sum over words, for jax to differentiate in float64."""
    class_V = np.arange(WORDS) % CLASSES
    z_TKV = jnp.einsum("tvke,ve->tkv", context[:, class_V], table_VE[:WORDS])
    z_TKV = z_TKV + bias_V[None, None, :WORDS]
    g_TKV = z_TKV + jax.nn.log_sigmoid(z_TKV)
    log_p_TKV = jax.nn.log_softmax(g_TKV) + log_prior_TK[:, :, None]
    log_p_TV = jax.nn.logsumexp(log_p_TKV, axis=1)
    return -jnp.sum(weights_T * log_p_TV[np.arange(TOKENS), labels_T])


def our_loss(options, activation, *arrays):
    mixture, vocabulary = Mixture(*arrays[:2]), Vocabulary(*arrays[2:4])
    targets = Targets(*arrays[4:])
    return api.loss(mixture, vocabulary, targets, activation, options)


def learned(theta, z):
    return z + theta[0] * jax.nn.log_sigmoid(z)


def check(options, activation, scales=(1.0,)):
    loss = functools.partial(our_loss, options, activation)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    for scale in scales:
        arrays = oracle.cast(make_problem(scale), jnp.float64)
        oracle.assert_close(step(*arrays), exact_step(*arrays), "float64")


# The reference makes no blocks. With contexts of 60 a word is far above the label.
@pytest.mark.parametrize(
    "implementation, budget, scales",
    [
        ("blocked", 1800, [1.0]),
        ("blocked", 2**30, [1.0, 60.0]),
        ("reference", None, [1.0]),
    ],
)
def test_loss_and_gradient_equal_a_loop_over_words(
    implementation, budget, scales, float64
):
    options = Options(vocab=WORDS, budget_bytes=budget, implementation=implementation)
    check(options, SIGSOFTMAX, scales)


def test_an_activation_with_parameters_goes_by_its_normalizers(float64):
    activation = Activation(learned, params=(jnp.asarray(1.0),))
    check(Options(vocab=WORDS, implementation="blocked"), activation)


def test_a_split_vocabulary_gives_the_same_loss_and_gradient(float64):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    split = Options(vocab=WORDS, vocab_axis="model", implementation="blocked")
    specs = (P(), P(), P("model"), P("model"), P(), P())
    ours = jax.shard_map(
        functools.partial(our_loss, split, SIGSOFTMAX),
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
    )
    step = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2, 3)))
    arrays = oracle.cast(make_problem(), jnp.float64)
    oracle.assert_close(step(*arrays), exact_step(*arrays), "float64")


def test_decoding_in_blocks_that_no_class_divides(float64):
    log_prior_TK, context, *vocabulary = make_problem()[:4]
    rows = 1024 * 2 + 5
    many = Vocabulary(*(np.resize(a, (rows, *a.shape[1:])) for a in vocabulary))
    options = Options(budget_bytes=1, implementation="reference")

    @jax.jit
    def run(*inputs):
        best = api.top_k(*inputs, 3, options=options)
        return api.log_probs(*inputs, options=options), best

    inputs = oracle.cast((Mixture(log_prior_TK, context), many), jnp.float64)
    log_p_TV, (values_Tk, ids_Tk) = run(*inputs)
    class_V = np.arange(rows) % CLASSES
    z_TKV = np.einsum("tvke,ve->tkv", context[:, class_V], many.table_VE)
    f_TKV = np.exp(z_TKV + many.bias_V)
    p_TKV = f_TKV / f_TKV.sum(axis=2, keepdims=True)
    exact_TV = np.log((np.exp(log_prior_TK)[:, :, None] * p_TKV).sum(axis=1))
    np.testing.assert_allclose(log_p_TV, exact_TV, atol=1e-9)
    np.testing.assert_allclose(
        values_Tk, np.sort(exact_TV, axis=1)[:, :-4:-1], atol=1e-9
    )
    found_Tk = np.take_along_axis(exact_TV, np.asarray(ids_Tk), axis=1)
    np.testing.assert_allclose(found_Tk, values_Tk, atol=1e-9)


def test_more_classes_than_words_are_refused():
    arrays = oracle.cast(make_problem(), jnp.float32)
    options = Options(vocab=CLASSES - 1)
    with pytest.raises(ValueError, match="3 classes are more than the 2 words"):
        our_loss(options, SOFTMAX, *arrays)


def test_a_shard_whose_rows_the_classes_do_not_divide_is_refused():
    arrays = oracle.cast(make_problem(), jnp.float32)
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    cut = [a[: ROWS - 8] if len(a) == ROWS else a for a in arrays]
    options = Options(vocab_axis="model")
    ours = jax.shard_map(
        functools.partial(our_loss, options, SOFTMAX),
        mesh=mesh,
        in_specs=(P(), P(), P("model"), P("model"), P(), P()),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"3 classes .* 5 rows of a shard; .*multiple"):
        ours(*cut)


@pytest.mark.parametrize("rows", [9, 10, 11])
def test_rows_by_class_join_to_the_table(rows):
    table_VE = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
    by_class = [table_VE[n::CLASSES] for n in range(CLASSES)]
    np.testing.assert_array_equal(jax.jit(classes.joined)(by_class), table_VE)


def test_nothing_by_class_is_nothing_by_word():
    by_class = jnp.zeros((CLASSES, 4, 0))
    assert classes.unsplit(by_class, 11).shape == (11, 0)
