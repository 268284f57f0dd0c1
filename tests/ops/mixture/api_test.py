import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from softbottle import ops
from softbottle.ops.mixture import api
from softbottle.ops.mixture.activations import SIGSOFTMAX
from tests import oracle
from tests.ops import devices
from tests.ops.mixture.problem import Problem, make_problem, paired, sigsoftmax_scores

PROBLEM = oracle.cast(make_problem(), jnp.float32)
EVERY_OP = ["scores", "nll", "loss", "log_probs", "top_k", "sample"]


def call(name, changes=None, k=2, **options):
    p: Problem = PROBLEM._replace(**(changes or {}))
    mixture, vocabulary, targets = paired(*p)
    arguments = {
        "scores": (p.context_TKE, vocabulary, p.labels_T),
        "nll": (mixture, vocabulary, p.labels_T),
        "loss": (mixture, vocabulary, targets),
        "log_probs": (mixture, vocabulary),
        "top_k": (mixture, vocabulary, k),
        "sample": (mixture, vocabulary, jax.random.key(0)),
    }
    return getattr(ops, name)(*arguments[name], options=ops.Options(**options))


@pytest.mark.parametrize("implementation", ["auto", "blocked", "reference"])
def test_scores_take_any_cotangent_for_both_outputs(implementation):
    problem = make_problem()
    rng = np.random.default_rng(3)
    cotangents = tuple(rng.normal(size=(2, *problem.log_prior_TK.shape)))
    values, bars = sigsoftmax_scores(problem, *cotangents)

    @jax.jit
    def run(context_TKE, table_VE, bias_V, cotangents):
        def function(context_TKE, *vocabulary):
            vocabulary = ops.Vocabulary(*vocabulary)
            options = ops.Options(implementation=implementation)
            return ops.scores(
                context_TKE, vocabulary, problem.labels_T, SIGSOFTMAX, options
            )

        ours, pull = jax.vjp(function, context_TKE, table_VE, bias_V)
        return ours, pull(cotangents)

    ours = run(*PROBLEM[1:4], oracle.cast(cotangents, jnp.float32))
    oracle.assert_close(ours, (values, bars), "float32")


@pytest.mark.parametrize("name", EVERY_OP)
@pytest.mark.parametrize(
    "array, shape",
    [("context_TKE", (11, 7)), ("table_VE", (37,)), ("bias_V", (37, 1))],
)
def test_a_wrong_rank_is_refused_with_name_and_shape(name, array, shape):
    with pytest.raises(ValueError, match=rf"{array} .*{shape[0]}"):
        call(name, {array: np.zeros(shape, np.float32)})


@pytest.mark.parametrize("name", EVERY_OP)
def test_mismatched_widths_are_refused_with_both(name):
    with pytest.raises(ValueError, match="7 wide and the table 6"):
        call(name, {"table_VE": np.zeros((37, 6), np.float32)})


@pytest.mark.parametrize("name", EVERY_OP)
def test_a_bias_of_another_length_is_refused(name):
    with pytest.raises(ValueError, match="36 entries for 37 rows"):
        call(name, {"bias_V": np.zeros(36, np.float32)})


@pytest.mark.parametrize(
    "name, array, shape",
    [
        ("nll", "log_prior_TK", (11, 2)),
        ("log_probs", "log_prior_TK", (10, 3)),
        ("nll", "labels_T", (11, 1)),
        ("loss", "labels_T", (10,)),
        ("loss", "weights_T", (12,)),
    ],
)
def test_a_token_array_of_another_shape_is_refused(name, array, shape):
    value = np.zeros(shape, getattr(PROBLEM, array).dtype)
    with pytest.raises(ValueError, match=f"{array} .*{shape[0]}"):
        call(name, {array: value})


@pytest.mark.parametrize("name", ["scores", "nll", "loss"])
def test_labels_must_be_integers(name):
    with pytest.raises(ValueError, match="labels_T must be integers, got float32"):
        call(name, {"labels_T": np.zeros(11, np.float32)})


@functools.cache
def compiled_step(implementation):
    """The loss and its gradient by all but the labels."""

    def total(*arrays):
        options = ops.Options(implementation=implementation)
        return ops.loss(*paired(*arrays), SIGSOFTMAX, options)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 5)))


@pytest.mark.parametrize("implementation", ["blocked", "reference", "pallas_tpu"])
@pytest.mark.parametrize("spoiled", ["labels_T", "log_prior_TK", "context_TKE"])
def test_a_token_of_weight_zero_may_hold_anything(implementation, spoiled):
    weights_T, array = np.array(PROBLEM.weights_T), np.array(getattr(PROBLEM, spoiled))
    weights_T[3] = 0.0
    array[3] = -1 if spoiled == "labels_T" else np.nan
    problem = PROBLEM._replace(weights_T=weights_T)
    step = compiled_step(implementation)
    with pltpu.force_tpu_interpret_mode():
        ours, clean = step(*problem._replace(**{spoiled: array})), step(*problem)
    chex.assert_trees_all_equal(ours, clean)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(ours))
    assert not np.any(ours[1][1][3]) and ours[1][4][3] == 0


def test_what_computes_a_loss_is_told_before_it_runs():
    vocab = 793_471
    options = ops.Options(compute_dtype="bfloat16", device=devices.H200)
    sizes = [(9_600, 1, 1_024), (vocab, 1_024)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes]
    # 4,096 rows of bfloat16 words at a time, as equal chunks: three of 3,200.
    hopper = dataclasses.replace(options, implementation="pallas_gpu")
    assert api.choice(*arrays, SIGSOFTMAX, hopper) == ("pallas_gpu", 3_200)
    small = dataclasses.replace(hopper, budget_bytes=2 * 1_000 * (vocab + 1_000))
    assert api.choice(*arrays, SIGSOFTMAX, small) == ("pallas_gpu", 960)
    # What the kernel leaves to XLA is told as such: float32 products.
    wide = dataclasses.replace(hopper, compute_dtype=None)
    assert api.choice(*arrays, SIGSOFTMAX, wide).implementation == "blocked"
    dense = dataclasses.replace(options, implementation="reference")
    assert api.choice(*arrays, SIGSOFTMAX, dense) == ("reference", 9_600)


@pytest.mark.parametrize("name", EVERY_OP)
def test_a_vocabulary_beyond_the_table_is_refused(name):
    with pytest.raises(ValueError, match="vocab=38 .*37"):
        call(name, vocab=38)


@pytest.mark.parametrize("k", [0, -1, 38])
def test_k_must_be_within_the_vocabulary(k):
    with pytest.raises(ValueError, match=f"37, got {k}"):
        call("top_k", k=k)


def test_k_counts_live_words_only():
    with pytest.raises(ValueError, match="31, got 32"):
        call("top_k", k=32, vocab=31)


@pytest.mark.parametrize("name", ["nll", "loss"])
def test_a_label_out_of_range_is_nan_and_caught_by_debug_nans(name):
    @jax.jit
    def run(labels_T):
        return call(name, {"labels_T": labels_T}, vocab=31)

    labels_T = np.asarray(PROBLEM.labels_T) % 31
    for label in (-1, 31, 36, 37, 2**31 - 1, -(2**31)):
        bad_T = labels_T.copy()
        bad_T[4] = label
        wanted = [True] if name == "loss" else np.arange(11) == 4
        np.testing.assert_array_equal(np.isnan(np.atleast_1d(run(bad_T))), wanted)
    with jax.debug_nans(True):
        run(labels_T)
        with pytest.raises(FloatingPointError):
            run(bad_T)
