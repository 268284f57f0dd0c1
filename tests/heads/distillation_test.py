"""Divergences of two models against formulas of dense float64 probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import softbottle
from softbottle import Options, Output, distill
from tests import oracle
from tests.heads.objective_test import pulled
from tests.oracle import CASES, VOCAB

TEMPERATURE = 1.6
WEIGHTS = np.random.default_rng(3).uniform(0.2, 2.0, oracle.TOKENS)
PAIRS = [("softmax", "mos"), ("mos", "softmax"), ("mixtape", "partition_mixed")]


def make_pair(student, teacher):
    """Inputs of two models that read states of their own."""
    return oracle.make_inputs(student), oracle.make_inputs(teacher, seed=1)


def tempered(name, inputs, temperature=TEMPERATURE):
    log_p_TV = oracle.log_probs(name, *inputs[:4]) / temperature
    return log_p_TV - np.log(np.exp(log_p_TV).sum(axis=1, keepdims=True))


def dense(log_p_TV, log_q_TV):
    """KL(P || Q), and its derivatives by log P and log Q before the temperature."""
    p_TV, q_TV = np.exp(log_p_TV), np.exp(log_q_TV)
    value_T = (p_TV * (log_p_TV - log_q_TV)).sum(axis=1)
    p_bar_TV = p_TV * (log_p_TV - log_q_TV - value_T[:, None]) / TEMPERATURE
    return value_T, p_bar_TV, (q_TV - p_TV) / TEMPERATURE


def models(student, teacher, ours, theirs):
    return (
        Output(CASES[student].head, *ours[:4]),
        Output(CASES[teacher].head, *theirs[:4]),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("student", "teacher", "reverse"),
    # One softmax before it is normalized and in pieces, log-probabilities either way.
    [(*PAIRS[0], False), (*PAIRS[1], False), (*PAIRS[1], True), (*PAIRS[2], False)],
)
def test_sums_and_gradients_are_those_of_the_formula(
    student, teacher, reverse, float64
):
    ours, theirs = make_pair(student, teacher)
    options = Options(budget_bytes=2**14, implementation="blocked")

    def total(ours, theirs):
        pair = models(student, teacher, ours, theirs)
        return distill(
            *pair,
            jnp.asarray(WEIGHTS),
            reverse=reverse,
            temperature=TEMPERATURE,
            teacher_learns=True,
            options=options,
        )

    inputs = oracle.cast((ours[:4], theirs[:4]), jnp.float64)
    value, bars = jax.jit(jax.value_and_grad(total, (0, 1)))(*inputs)
    log_q_TV, log_p_TV = tempered(student, ours), tempered(teacher, theirs)
    if reverse:
        value_T, q_bar_TV, p_bar_TV = dense(log_q_TV, log_p_TV)
    else:
        value_T, p_bar_TV, q_bar_TV = dense(log_p_TV, log_q_TV)
    oracle.assert_close(value, np.sum(WEIGHTS * value_T), "float64")
    exact = (
        pulled(student, ours, WEIGHTS[:, None] * q_bar_TV),
        pulled(teacher, theirs, WEIGHTS[:, None] * p_bar_TV),
    )
    oracle.assert_close(bars, exact, "float64")


def test_each_token_takes_a_cotangent_and_the_teacher_none(float64):
    ours, theirs = make_pair("mos", "softmax")
    inputs = oracle.cast((ours[:4], theirs[:4]), jnp.float64)

    def total(ours, theirs):
        pair = models("mos", "softmax", ours, theirs)
        each_T = distill(*pair, temperature=TEMPERATURE, reduction="none")
        return jnp.sum(WEIGHTS * each_T), each_T

    (_, each_T), bars = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(
        *inputs
    )
    value_T, _, q_bar_TV = dense(tempered("softmax", theirs), tempered("mos", ours))
    oracle.assert_close(each_T, value_T, "float64")
    exact = pulled("mos", ours, WEIGHTS[:, None] * q_bar_TV)
    oracle.assert_close(bars[0], exact, "float64")
    assert all(not np.any(bar) for bar in jax.tree.leaves(bars[1]))


@pytest.mark.parametrize("student", ["softmax", "mos"])
def test_given_probabilities_of_all_and_of_some_words(student, float64):
    ours, theirs = make_pair(student, "softmax")
    log_p_TV = oracle.log_probs("softmax", *theirs[:4])
    words_TM = np.argsort(-log_p_TV, axis=1)[:, :5]
    log_p_TM = np.take_along_axis(log_p_TV, words_TM, axis=1)
    log_p_TM[1:, 4] = -np.inf  # a server's list that was shorter
    few_TV = np.full(log_p_TV.shape, -np.inf)
    np.put_along_axis(few_TV, words_TM, log_p_TM, axis=1)
    teachers = {
        "all": (softbottle.AllWords(log_p_TV), log_p_TV),
        "some": (softbottle.TopWords(log_p_TM, words_TM), few_TV),
    }
    log_q_TV = tempered(student, ours)
    inputs = oracle.cast(ours[:4], jnp.float64)
    for teacher, given_TV in teachers.values():
        given = jax.tree.map(jnp.asarray, teacher)

        def mean(inputs, given=given):
            own = Output(CASES[student].head, *inputs)
            terms = {"temperature": TEMPERATURE, "reduction": "mean"}
            return distill(own, given, jnp.asarray(WEIGHTS), **terms)

        value, bars = jax.jit(jax.value_and_grad(mean))(inputs)
        p_TV = np.exp(given_TV / TEMPERATURE)
        p_TV /= p_TV.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            terms_TV = np.where(p_TV > 0, p_TV * (np.log(p_TV) - log_q_TV), 0.0)
        share_T = WEIGHTS / WEIGHTS.sum()
        oracle.assert_close(value, np.sum(share_T * terms_TV.sum(axis=1)), "float64")
        bar_TV = share_T[:, None] * (np.exp(log_q_TV) - p_TV) / TEMPERATURE
        oracle.assert_close(bars, pulled(student, ours, bar_TV), "float64")


def test_the_gradient_is_that_of_the_value_even_if_p_does_not_sum_to_1(float64):
    """As rounded log-probabilities do not: of a head that is known, of arrays not."""
    rng = np.random.default_rng(6)
    log_p_TV, table_VD, hidden_TD = (
        rng.normal(size=size) for size in ((3, 5), (5, 4), (3, 4))
    )

    def divergence(hidden_TD):
        own = Output(softbottle.softmax(), {}, table_VD, None, hidden_TD)
        return distill(own, softbottle.AllWords(log_p_TV))

    p_TV = np.exp(log_p_TV)
    z_TV = hidden_TD @ table_VD.T
    q_TV = np.exp(z_TV) / np.exp(z_TV).sum(axis=1, keepdims=True)
    value, bar_TD = jax.jit(jax.value_and_grad(divergence))(hidden_TD)
    np.testing.assert_allclose(value, np.sum(p_TV * (log_p_TV - np.log(q_TV))))
    total_T1 = p_TV.sum(axis=1, keepdims=True)
    assert np.all(abs(total_T1 - 1) > 0.1)
    np.testing.assert_allclose(bar_TD, (q_TV * total_T1 - p_TV) @ table_VD)


@pytest.mark.slow
@pytest.mark.parametrize(("student", "teacher"), PAIRS[1:2])
def test_a_split_vocabulary_gives_the_same(student, teacher, float64):
    """Tokens over one axis of the mesh and words over the other."""
    ours, theirs = (
        inputs._replace(
            table_VE=np.pad(inputs.table_VE, ((0, 3), (0, 0)), constant_values=3.0),
            bias_V=np.pad(inputs.bias_V, (0, 3), constant_values=3.0),
            hidden_TD=inputs.hidden_TD[:10],
        )
        for inputs in make_pair(student, teacher)
    )
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = (P(), P("model"), P("model"), P("data"))

    def total(options, weights_T, ours, theirs):
        pair = models(student, teacher, ours, theirs)
        return distill(*pair, weights_T, teacher_learns=True, options=options)

    def split(weights_T, ours, theirs):
        options = Options(vocab=VOCAB, vocab_axis="model", implementation="blocked")
        return jax.lax.psum(total(options, weights_T, ours, theirs), "data")

    whole = functools.partial(total, Options(vocab=VOCAB))
    apart = jax.shard_map(
        split, mesh=mesh, in_specs=(P("data"), specs, specs), out_specs=P()
    )
    inputs = oracle.cast((WEIGHTS[:10], ours[:4], theirs[:4]), jnp.float64)
    wanted, got = (
        jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*inputs)
        for function in (whole, apart)
    )
    oracle.assert_close(got, wanted, "float64")


def test_padding_may_hold_anything():
    head, table_VE = softbottle.softmax(), np.eye(5, 3, dtype=np.float32)
    hidden_TD = np.array([[1.0] * 3, [np.nan] * 3], np.float32)
    log_p_TM = np.array([[0.0], [np.nan]], np.float32)
    known = softbottle.TopWords(log_p_TM, np.array([[0], [9]], np.int32))
    weights_T = np.array([1.0, 0.0], np.float32)

    def total(table_VE, hidden_TD, teacher, weights_T):
        own = Output(head, {}, table_VE, None, hidden_TD)
        return distill(own, teacher, weights_T)

    # Words and weights that are known when compiling, and such that are not.
    @jax.jit
    def run(table_VE, hidden_TD, *given):
        step = jax.value_and_grad(total, (0, 1))
        return step(table_VE, hidden_TD, *given), total(
            table_VE, hidden_TD, known, weights_T
        )

    (value, bars), of_known = run(table_VE, hidden_TD, known, weights_T)
    for each in (value, of_known):
        np.testing.assert_allclose(each, np.log(3 * np.e + 2) - 1, rtol=1e-6)
    assert all(np.all(np.isfinite(bar)) for bar in bars)


def make_student(tokens=2, words=5):
    return Output(
        softbottle.softmax(), {}, jnp.ones((words, 3)), None, jnp.ones((tokens, 3))
    )


@pytest.mark.parametrize(
    ("teacher", "terms", "message"),
    [
        (make_student(words=6), {}, "the teacher has 6 words and the student 5"),
        (make_student(tokens=3), {}, "the student's 2 tokens"),
        (softbottle.AllWords(jnp.zeros((2, 4))), {}, "the teacher has 4 words"),
        (
            softbottle.TopWords(jnp.zeros((2, 4)), jnp.zeros((2, 3), jnp.int32)),
            {},
            "must have one shape",
        ),
        (
            softbottle.TopWords(jnp.zeros((2, 1)), jnp.asarray([[0], [5]])),
            {},
            r"words_TM\[1, 0\] is 5, which is none of the 5 words",
        ),
        (
            softbottle.TopWords(jnp.zeros((2, 4)), jnp.zeros((2, 4), jnp.int32)),
            {"reverse": True},
            "the reverse needs",
        ),
        (
            softbottle.AllWords(jnp.zeros((2, 5))),
            {"teacher_learns": True},
            "teacher_learns is for",
        ),
        (make_student(), {"temperature": 0}, "temperature must be"),
        (make_student(), {"reduction": "max"}, "reduction must be one of"),
        (make_student(), {"weights_T": jnp.ones(3)}, "a weight for each"),
    ],
)
def test_what_does_not_go_together_is_refused(teacher, terms, message):
    with pytest.raises(ValueError, match=message):
        distill(make_student(), teacher, **terms)


def test_second_derivatives_are_those_of_the_formula():
    """As of gradient penalties: the table is in the states' gradient, too."""
    rng = np.random.default_rng(0)
    table_VE, hidden_TD = (
        jnp.asarray(rng.normal(size=(size, 6)), jnp.float32) for size in (11, 5)
    )
    log_q_TV = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(5, 11)), jnp.float32))

    def ours(table_VE, hidden_TD):
        student = softbottle.Output(softbottle.softmax(), {}, table_VE, None, hidden_TD)
        return softbottle.distill(student, softbottle.AllWords(log_q_TV))

    def dense(table_VE, hidden_TD):
        log_p_TV = jax.nn.log_softmax(hidden_TD @ table_VE.T)
        return jnp.sum(jnp.exp(log_q_TV) * (log_q_TV - log_p_TV))

    def penalty(loss):
        def square(table_VE):
            return jnp.sum(jnp.square(jax.grad(loss, 1)(table_VE, hidden_TD)))

        return jax.jit(jax.grad(square))(table_VE)

    np.testing.assert_allclose(penalty(ours), penalty(dense), rtol=1e-4, atol=1e-5)
