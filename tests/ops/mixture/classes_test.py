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


def exact_loss(bend, log_prior_TK, context, table_VE, bias_V, labels_T, weights_T):
    """The loss as a sum over words, for jax to differentiate in float64."""
    class_V = np.arange(WORDS) % CLASSES
    z_TKV = jnp.einsum("tvke,ve->tkv", context[:, class_V], table_VE[:WORDS])
    g_TKV = bend(z_TKV + bias_V[None, None, :WORDS])
    log_p_TKV = jax.nn.log_softmax(g_TKV) + log_prior_TK[:, :, None]
    log_p_TV = jax.nn.logsumexp(log_p_TKV, axis=1)
    return -jnp.sum(weights_T * log_p_TV[np.arange(TOKENS), labels_T])


def our_loss(options, activation, *arrays):
    mixture, vocabulary = Mixture(*arrays[:2]), Vocabulary(*arrays[2:4])
    targets = Targets(*arrays[4:])
    return api.loss(mixture, vocabulary, targets, activation, options)


def bend(z):
    return z + jax.nn.log_sigmoid(z)


def learned(theta, z):
    return z + theta[0] * jax.nn.log_sigmoid(z)


def check(options, activation, exact_bend, scale=1.0):
    arrays = make_problem(scale)
    by = (0, 1, 2, 3)
    exact = jax.value_and_grad(functools.partial(exact_loss, exact_bend), by)(*arrays)
    step = jax.value_and_grad(functools.partial(our_loss, options, activation), by)
    ours = jax.jit(step)(*oracle.cast(arrays, jnp.float64))
    oracle.assert_close(ours, exact, "float64")


@pytest.mark.parametrize("implementation", ["blocked", "reference"])
@pytest.mark.parametrize("budget", [1800, 2**30])
def test_loss_and_gradient_equal_a_loop_over_words(implementation, budget, float64):
    options = Options(vocab=WORDS, budget_bytes=budget, implementation=implementation)
    check(options, SIGSOFTMAX, bend)


def test_a_word_far_above_the_label_is_no_harm(float64):
    options = Options(vocab=WORDS, implementation="blocked")
    check(options, SOFTMAX, lambda z: z, scale=60.0)


def test_an_activation_with_parameters_goes_by_its_normalizers(float64):
    activation = Activation(learned, params=(jnp.asarray(1.0),))
    check(Options(vocab=WORDS, implementation="blocked"), activation, bend)


@pytest.mark.parametrize("shards", [2, 4])
def test_a_split_vocabulary_gives_the_same_loss_and_gradient(shards):
    arrays = oracle.cast(make_problem(), jnp.float32)
    mesh = jax.make_mesh((shards,), ("model",), axis_types=(AxisType.Auto,))
    split = Options(vocab=WORDS, vocab_axis="model", implementation="blocked")
    specs = (P(), P(), P("model"), P("model"), P(), P())
    ours = jax.shard_map(
        functools.partial(our_loss, split, SOFTMAX),
        mesh=mesh,
        in_specs=specs,
        out_specs=P(),
    )
    by = (0, 1, 2, 3)
    exact = jax.value_and_grad(functools.partial(exact_loss, lambda z: z), by)(*arrays)
    oracle.assert_close(
        jax.jit(jax.value_and_grad(ours, by))(*arrays), exact, "float32"
    )


def test_decoding_in_blocks_that_no_class_divides(float64):
    arrays = oracle.cast(make_problem(), jnp.float64)
    mixture, vocabulary = Mixture(*arrays[:2]), Vocabulary(*arrays[2:4])
    rows = 1024 * 2 + 5
    many = Vocabulary(*(jnp.resize(a, (rows, *a.shape[1:])) for a in vocabulary))
    options = Options(budget_bytes=1, implementation="reference")
    log_p_TV = jax.jit(functools.partial(api.log_probs, options=options))(mixture, many)
    class_V = np.arange(rows) % CLASSES
    z_TKV = jnp.einsum("tvke,ve->tkv", arrays[1][:, class_V], many.table_VE)
    log_p_TKV = (
        jax.nn.log_softmax(z_TKV + many.bias_V[None, None]) + arrays[0][:, :, None]
    )
    exact_TV = jax.nn.logsumexp(log_p_TKV, axis=1)
    np.testing.assert_allclose(log_p_TV, exact_TV, atol=1e-9)
    values_Tk, ids_Tk = api.top_k(mixture, many, 3, options=options)
    np.testing.assert_allclose(
        values_Tk, np.sort(exact_TV, axis=1)[:, :-4:-1], atol=1e-9
    )
    found_Tk = np.take_along_axis(np.asarray(exact_TV), np.asarray(ids_Tk), axis=1)
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
    table_VE = jnp.arange(2.0 * rows).reshape(rows, 2)
    by_class = [table_VE[n::CLASSES] for n in range(CLASSES)]
    np.testing.assert_array_equal(classes.joined(by_class), table_VE)
