import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle import ops
from softbottle.ops.mixture.activations import SIGSOFTMAX
from tests import oracle
from tests.ops.mixture.problem import Problem, make_problem, sigsoftmax_scores

PROBLEM = oracle.cast(make_problem(), jnp.float32)
EVERY_OP = ["scores", "nll", "loss", "log_probs", "top_k", "sample"]


def call(name, changes=None, k=2, **options):
    p: Problem = PROBLEM._replace(**(changes or {}))
    shared = (p.context_TKE, p.table_VE, p.bias_V)
    arguments = {
        "scores": (*shared, p.labels_T),
        "nll": (p.log_prior_TK, *shared, p.labels_T),
        "loss": (p.log_prior_TK, *shared, p.labels_T, p.weights_T),
        "log_probs": (p.log_prior_TK, *shared),
        "top_k": (p.log_prior_TK, *shared, k),
        "sample": (p.log_prior_TK, *shared, jax.random.key(0)),
    }
    return getattr(ops, name)(*arguments[name], **options)


@pytest.mark.parametrize("implementation", ["auto", "blocked", "reference"])
def test_scores_take_any_cotangent_for_both_outputs(implementation):
    problem = make_problem()
    rng = np.random.default_rng(3)
    cotangents = tuple(rng.normal(size=(2, *problem.log_prior_TK.shape)))
    values, bars = sigsoftmax_scores(problem, *cotangents)

    @jax.jit
    def run(context_TKE, table_VE, bias_V, cotangents):
        def function(*args):
            return ops.scores(
                *args, problem.labels_T, SIGSOFTMAX, implementation=implementation
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
        call(name, {array: jnp.zeros(shape)})


@pytest.mark.parametrize("name", EVERY_OP)
def test_mismatched_widths_are_refused_with_both(name):
    with pytest.raises(ValueError, match="7 wide and the table 6"):
        call(name, {"table_VE": jnp.zeros((37, 6))})


@pytest.mark.parametrize("name", EVERY_OP)
def test_a_bias_of_another_length_is_refused(name):
    with pytest.raises(ValueError, match="36 entries for 37 rows"):
        call(name, {"bias_V": jnp.zeros(36)})


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
    value = jnp.zeros(shape, getattr(PROBLEM, array).dtype)
    with pytest.raises(ValueError, match=f"{array} .*{shape[0]}"):
        call(name, {array: value})


@pytest.mark.parametrize("name", ["scores", "nll", "loss"])
def test_labels_must_be_integers(name):
    with pytest.raises(ValueError, match="labels_T must be integers, got float32"):
        call(name, {"labels_T": jnp.zeros(11)})


@pytest.mark.parametrize("name", EVERY_OP)
def test_an_unknown_option_is_refused_by_name(name):
    with pytest.raises(TypeError, match="blocksize"):
        call(name, blocksize=3)


@pytest.mark.parametrize("name", EVERY_OP)
def test_an_unknown_implementation_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match="'triton'.*blocked.*reference"):
        call(name, implementation="triton")


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


@pytest.mark.parametrize("name", ["top_k", "sample"])
def test_what_reads_the_whole_table_refuses_a_split_one(name):
    with pytest.raises(ValueError, match=f"{name} .*'model'"):
        call(name, vocab_axis="model")


@pytest.mark.parametrize("label", [-1, 31, 36, 37, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", ["nll", "loss"])
def test_a_label_out_of_range_is_nan_and_caught_by_debug_nans(name, label):
    labels_T = PROBLEM.labels_T % 31
    bad = {"labels_T": labels_T.at[4].set(label)}
    result = np.atleast_1d(call(name, bad, vocab=31))
    np.testing.assert_array_equal(
        np.isnan(result), [True] if name == "loss" else np.arange(11) == 4
    )
    with jax.debug_nans(True):
        call(name, {"labels_T": labels_T}, vocab=31)
        with pytest.raises(FloatingPointError):
            call(name, bad, vocab=31)
