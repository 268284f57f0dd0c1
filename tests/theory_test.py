"""The softmax bottleneck itself: ranks of matrices of log-probabilities.

Rank is the number of singular values above 0.5 sqrt(m + n + 1) sigma_1 eps, with eps
that of the precision in which the log-probabilities were computed.
"""

import functools

import jax
import numpy as np
import pytest

import softbottle
from tests import oracle

pytestmark = pytest.mark.usefixtures("quick_keys")
WIDTH, CONTEXTS, WORDS = 5, 43, 47
HEADS = {
    "softmax": softbottle.softmax(),
    "moc": softbottle.moc(4),
    "lowrank": softbottle.lowrank(WIDTH),
    "mos": softbottle.mos(4),
    "sigsoftmax": softbottle.sigsoftmax(),
    "moss": softbottle.moss(4),
    "gss": softbottle.gss(-1.5, 2.5),
    "mos tanh": softbottle.mos(4, "tanh"),
    "mos active": softbottle.mos(4, active=2),
    "partition": softbottle.partition(3),
    "partition tanh": softbottle.partition(3, context="tanh"),
    "partition linear": softbottle.partition(3, context="linear"),
    "partition mixed": softbottle.partition(3, 2),
    "mixtape": softbottle.mixtape(frequent=12),
    "mixtape tanh": softbottle.mixtape(frequent=12, context="tanh"),
    "doc": softbottle.doc(2, 1),
    "mfs": softbottle.mfs(layers=1, positions=2),
}


def numerical_rank(matrix, precision):
    values = np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)
    m, n = matrix.shape
    tolerance = 0.5 * np.sqrt(m + n + 1) * values[0] * np.finfo(precision).eps
    return int(np.sum(values > tolerance))


@functools.cache
def make_problem(name, seed=0):
    """Params, table, bias and states of a head, in float64."""
    rng, head = np.random.default_rng(seed), HEADS[name]
    width = head.layers * head.positions * WIDTH
    init = functools.partial(head.init, hidden_dim=width, context_dim=WIDTH)
    # Larger than at the start of training, so that each tanh bends.
    params = {
        name: rng.normal(size=leaf.shape)
        for name, leaf in jax.eval_shape(init, jax.random.key(seed)).items()
    }
    shapes = ((WORDS, WIDTH), (WORDS,), (CONTEXTS, width))
    return params, *(rng.normal(size=shape) for shape in shapes)


@functools.partial(jax.jit, static_argnames="name")
def compiled(name, *arrays):
    return HEADS[name].log_probs(*arrays)


def log_probs(name, precision, bias):
    params, table_VE, bias_V, hidden_TD = make_problem(name)
    # No bias is one of zero, for which nothing is compiled anew.
    arrays = (params, table_VE, bias_V if bias else 0 * bias_V, hidden_TD)
    with jax.enable_x64(True):
        return np.asarray(compiled(name, *oracle.cast(arrays, precision)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, precision",
    [
        *((name, "float64") for name in ("softmax", "moc", "lowrank")),
        ("softmax", "float32"),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_one_softmax_has_rank_exactly_d_plus_one_and_one_more_with_a_bias(
    name, bias, precision
):
    log_p_TV = log_probs(name, precision, bias)
    assert log_p_TV.dtype == precision
    assert numerical_rank(log_p_TV, precision) == WIDTH + 1 + bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "name, rank",
    [("partition", 3 * WIDTH + 1), ("partition tanh", 3 * WIDTH + 1)],
)
def test_a_partition_has_rank_exactly_that_of_its_classes_together(name, rank, bias):
    log_p_TV = log_probs(name, "float64", bias)
    assert numerical_rank(log_p_TV, "float64") == rank + bias


@pytest.mark.parametrize("bias", [False, True])
def test_linear_contexts_of_classes_span_the_state_and_its_direction(bias):
    # All classes share these dimensions; their own biases are a bias of the words.
    log_p_TV = log_probs("partition linear", "float64", bias)
    assert numerical_rank(log_p_TV, "float64") == 2 * WIDTH + 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["mixtape", "mixtape tanh"])
def test_mixtape_has_as_many_dimensions_more_as_words_with_gates(name, bias):
    log_p_TV = log_probs(name, "float64", bias)
    assert numerical_rank(log_p_TV, "float64") == 12 + WIDTH + 1 + bias


BEYOND = ["mos", "mos tanh", "mos active", "partition mixed", "doc", "mfs"]


@pytest.mark.parametrize(
    "name, precision",
    [
        *((name, "float64") for name in (*BEYOND, "sigsoftmax", "moss", "gss")),
        *((name, "float32") for name in ("mos", "sigsoftmax")),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_mixtures_and_bent_activations_exceed_the_bound(name, bias, precision):
    log_p_TV = log_probs(name, precision, bias)
    assert numerical_rank(log_p_TV, precision) > 2 * (WIDTH + 2)


def test_the_tolerance_of_a_finer_precision_finds_a_spurious_rank():
    log_p_TV = log_probs("softmax", "float32", bias=False)
    assert numerical_rank(log_p_TV, "float32") == WIDTH + 1
    assert numerical_rank(log_p_TV, "float64") == min(CONTEXTS, WORDS)


@pytest.mark.parametrize("seed", range(5))
def test_a_shift_of_each_row_changes_the_rank_by_one_at_most(seed):
    rng = np.random.default_rng(seed)
    logits_TV = rng.normal(size=(CONTEXTS, WIDTH)) @ rng.normal(size=(WIDTH, WORDS))
    rank = numerical_rank(logits_TV, "float64")
    for _ in range(4):
        shifted_TV = logits_TV + rng.normal(size=(CONTEXTS, 1))
        assert numerical_rank(shifted_TV, "float64") - rank in (-1, 0, 1)
    assert rank == WIDTH


@pytest.mark.parametrize("change", [-1, 0, 1])
def test_members_of_one_family_of_logits_differ_by_each_of_minus_one_zero_and_one(
    change,
):
    rng = np.random.default_rng(0)
    left_TD = rng.normal(size=(CONTEXTS, WIDTH))
    right_DV = rng.normal(size=(WIDTH, WORDS))
    shift_T1 = rng.normal(size=(CONTEXTS, 1))
    if change == 1:
        before, after = left_TD @ right_DV, left_TD @ right_DV + shift_T1
    elif change == -1:
        before, after = left_TD @ right_DV + shift_T1, left_TD @ right_DV
    else:
        # The ones are in the row space already, and the shift in the column space.
        right_DV[0] = 1.0
        before = left_TD @ right_DV
        after = before + left_TD[:, 1:2]
    ranks = numerical_rank(before, "float64"), numerical_rank(after, "float64")
    assert ranks[1] - ranks[0] == change


def test_the_log_softmax_of_any_logits_is_a_member_of_their_family():
    logits_TV = np.random.default_rng(0).normal(size=(CONTEXTS, WORDS))
    shift_TV = np.asarray(jax.nn.log_softmax(logits_TV)) - logits_TV
    np.testing.assert_allclose(np.ptp(shift_TV, axis=1), 0, atol=1e-5)
