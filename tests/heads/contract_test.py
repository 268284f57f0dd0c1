"""One contract that every head keeps, against the dense float64 oracle.

Compiling is what costs here, so each head is compiled once a precision, with a latent
mask, padding rows in its table and an uneven budget, and the tests read that run.
"""

import functools

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from softbottle import Options
from tests import oracle
from tests.ops.mixture import sampling_test
from tests.oracle import CASES, FEW, NAMES, VOCAB

EVERY_HEAD = pytest.mark.parametrize("name", NAMES)
A_FEW_HEADS = pytest.mark.parametrize("name", FEW)
# What only the operation reads: to it a mixture of contexts is a softmax.
A_HEAD_PER_OPERATION = pytest.mark.parametrize("name", FEW[:3])
PADDING_ROWS = 4
# 41 rows x 3 components x 4 bytes: about 4 tokens a chunk, so 11 leave a remainder.
ODD_BUDGET = 4 * 41 * 3 * 4 + 1
# bfloat16 keeps 8 bits: a product is off by 2**-9 of its size, a gradient goes through
# two of them. Relative to the norm of the array.
BFLOAT16_RTOL = 3e-2


def make_problem(name):
    """Inputs with padding rows, a full latent mask, and a cotangent of either sign."""
    inputs = oracle.make_inputs(name, rows=VOCAB)
    rng = np.random.default_rng(4)
    table_VE = np.concatenate([inputs.table_VE, 5 * rng.normal(size=(PADDING_ROWS, 7))])
    bias_V = np.concatenate([inputs.bias_V, 5 * rng.normal(size=PADDING_ROWS)])
    shape = (len(inputs.labels_T), CASES[name].components, 7)
    mask_TKE = rng.integers(0, 2, shape) / 0.6
    cotangent_T = rng.normal(size=len(inputs.labels_T))
    padded = inputs._replace(table_VE=table_VE, bias_V=bias_V)
    return inputs, padded, mask_TKE, cotangent_T


@functools.cache
def everything(name, **options):
    """Jitted: loss, its gradients, nll, and its gradients under a cotangent."""
    head = CASES[name].head
    options = Options(**({"budget_bytes": ODD_BUDGET, "vocab": VOCAB} | options))

    def run(inputs, mask_TKE, cotangent_T):
        def loss(*args):
            return head.loss(*args, latent_mask=mask_TKE, options=options)

        def nll(*args):
            named = {"latent_mask": mask_TKE, "options": options}
            return head.nll(*args, inputs.labels_T, **named)

        total, loss_bars = jax.value_and_grad(loss, (0, 1, 2, 3, 5))(*inputs)
        nll_T, pull = jax.vjp(nll, *inputs[:4])
        return total, loss_bars, nll_T, pull(cotangent_T)

    return jax.jit(run)


def check_against_oracle(name, dtype, **options):
    inputs, padded, mask_TKE, cotangent_T = make_problem(name)
    nll_T = oracle.nll(name, inputs, mask_TKE)
    weights_T = inputs.weights_T
    point = oracle.cast((padded, mask_TKE, cotangent_T), dtype)
    total, loss_bars, our_nll_T, nll_bars = everything(name, **options)(*point)
    oracle.assert_close(our_nll_T, nll_T, dtype)
    oracle.assert_close(total, np.dot(weights_T, nll_T), dtype)
    oracle.assert_close(loss_bars[4], np.where(weights_T != 0, nll_T, 0), dtype)
    for bars, cotangent in ((loss_bars, weights_T), (nll_bars, cotangent_T)):
        exact = oracle.gradients(name, inputs, cotangent, mask_TKE)
        params, table_VE, bias_V, hidden_TD = bars[:4]
        ours = (params, table_VE[:VOCAB], bias_V[:VOCAB], hidden_TD)
        oracle.assert_close(ours, exact, dtype)
        # A row beyond the vocabulary has no probability, so no gradient either.
        assert not np.any(table_VE[VOCAB:]) and not np.any(bias_V[VOCAB:])


@pytest.mark.slow
@EVERY_HEAD
def test_value_and_every_gradient_equal_the_oracle_in_float64(name, float64):
    check_against_oracle(name, "float64")


@pytest.mark.slow
@EVERY_HEAD
def test_value_and_every_gradient_equal_the_oracle_in_float32(name):
    check_against_oracle(name, "float32")


@pytest.mark.slow
@A_HEAD_PER_OPERATION
def test_the_optimised_program_equals_the_oracle_in_one_block(name, optimised):
    check_against_oracle(name, "float32", budget_bytes=2**40)


@pytest.mark.slow
@A_HEAD_PER_OPERATION
def test_one_token_a_block_equals_the_oracle(name):
    check_against_oracle(name, "float32", budget_bytes=1)


@EVERY_HEAD
def test_gradients_of_the_oracle_are_its_central_differences(name):
    inputs, _, mask_TKE, cotangent_T = make_problem(name)
    bars = oracle.gradients(name, inputs, cotangent_T, mask_TKE)
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), inputs[:4])
    step = 1e-6

    def value_at(distance):
        moved = jax.tree.map(lambda x, d: x + distance * d, inputs[:4], direction)
        point = oracle.Inputs(*moved, *inputs[4:])
        return np.dot(cotangent_T, oracle.nll(name, point, mask_TKE))

    slope = (value_at(step) - value_at(-step)) / (2 * step)
    parts = jax.tree.map(lambda bar, d: np.sum(bar * d), bars, direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(parts)), slope, rtol=1e-6)


@EVERY_HEAD
def test_padding_may_hold_anything_and_changes_nothing(name):
    inputs, padded, mask_TKE, cotangent_T = make_problem(name)
    padding_T = inputs.weights_T == 0
    labels_T, hidden_TD = inputs.labels_T.copy(), inputs.hidden_TD.copy()
    labels_T[padding_T] = [-1, 2**31 - 1, -(2**31)]
    hidden_TD[padding_T] = np.array([[np.nan], [np.inf], [1e30]])
    spoilt = padded._replace(labels_T=labels_T, hidden_TD=hidden_TD)
    point = oracle.cast((spoilt, mask_TKE, cotangent_T), jnp.float32)
    total, bars, *_ = everything(name)(*point)
    clean = oracle.cast((padded, mask_TKE, cotangent_T), jnp.float32)
    clean_total, clean_bars, *_ = everything(name)(*clean)
    chex.assert_tree_all_finite((total, bars))
    chex.assert_trees_all_equal((total, bars), (clean_total, clean_bars))
    assert padding_T.sum() == 3 and not np.any(bars[3][padding_T])


@EVERY_HEAD
def test_the_same_call_gives_the_same_bits(name):
    _, *problem = make_problem(name)
    point = oracle.cast(tuple(problem), jnp.float32)
    chex.assert_trees_all_equal(everything(name)(*point), everything(name)(*point))


@EVERY_HEAD
def test_logits_of_magnitude_ten_thousand_stay_finite_in_float32(name):
    check_large_logits(name, jnp.float32)


@pytest.mark.slow
@A_FEW_HEADS
def test_logits_of_magnitude_ten_thousand_stay_finite_in_bfloat16(name, mixed_dtypes):
    check_large_logits(name, jnp.bfloat16)


def check_large_logits(name, dtype):
    _, padded, mask_TKE, _ = make_problem(name)
    # Contexts behind a tanh are at most 1, so the table carries the magnitude.
    large = padded._replace(table_VE=padded.table_VE * 1e4, bias_V=padded.bias_V * 1e4)
    large, mask_TKE = oracle.cast((large, mask_TKE), dtype)
    weights_T = padded.weights_T.astype(np.float32)
    results = everything(name)(large._replace(weights_T=weights_T), mask_TKE, weights_T)
    chex.assert_tree_all_finite(results)
    # A capped logit makes no word less probable than its cap does.
    with np.errstate(all="ignore"):
        least = -np.log(CASES[name].positive(padded.params, np.full((), -1e4)))
    assert results[2].dtype == jnp.float32 and np.max(results[2]) > min(1e3, least)


@EVERY_HEAD
def test_a_latent_mask_broadcasts_to_the_contexts(name):
    case, inputs = CASES[name], oracle.make_inputs(name)
    rng, states = np.random.default_rng(4), (inputs.params, inputs.hidden_TD)
    # Of each token and component, of all tokens, of all components of a token.
    sizes = ((11, case.components), (1, case.components), (11, 1))
    masks = [rng.integers(0, 2, (*size, 7)) / 0.6 for size in sizes]

    @jax.jit
    def run(states, masks):
        return [case.head.mix(*states, mask) for mask in masks]

    mixtures = run(*oracle.cast((states, masks), jnp.float32))
    for mask, (log_prior_TK, context) in zip(masks, mixtures, strict=True):
        prior_TK, exact_TNKE, *_ = oracle.mixture(name, *states, mask)
        oracle.assert_close(context, exact_TNKE.reshape(context.shape), "float32")
        oracle.assert_close(np.exp(log_prior_TK), prior_TK, "float32")


@functools.cache
def decoded(name):
    """Log-probabilities, the five best words and a greedy draw, in uneven chunks."""
    head, inputs = CASES[name].head, oracle.make_inputs(name)

    def run(*args):
        options = Options(budget_bytes=ODD_BUDGET)
        log_p_TV = head.log_probs(*args, options=options)
        key = jax.random.key(0)
        greedy_T = head.sample(*args, key, temperature=0, options=options)
        return log_p_TV, head.top_k(*args, 5, options=options), greedy_T

    point = oracle.cast(inputs[:4], jnp.float32)
    return oracle.log_probs(name, *inputs[:4]), jax.jit(run)(*point)


@pytest.mark.slow
@EVERY_HEAD
def test_log_probs_equal_the_oracle_and_sum_to_one(name):
    exact_TV, (log_p_TV, *_) = decoded(name)
    oracle.assert_close(log_p_TV, exact_TV, "float32")
    total_T = np.exp(np.asarray(log_p_TV, np.float64)).sum(axis=1)
    np.testing.assert_allclose(total_T, 1.0, rtol=0, atol=1e-6)


@EVERY_HEAD
def test_top_k_is_the_head_of_the_sorted_log_probs(name):
    exact_TV, (_, (values_Tk, ids_Tk), _) = decoded(name)
    order_Tk = np.argsort(-exact_TV, axis=1)[:, :5]
    np.testing.assert_array_equal(ids_Tk, order_Tk)
    best_Tk = np.take_along_axis(exact_TV, order_Tk, axis=1)
    oracle.assert_close(values_Tk, best_Tk, "float32")


@EVERY_HEAD
def test_a_sample_of_temperature_zero_is_the_most_probable_word(name):
    exact_TV, (*_, greedy_T) = decoded(name)
    np.testing.assert_array_equal(greedy_T, exact_TV.argmax(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW, "partition_mixed", "mixtape"])
def test_samples_follow_the_probabilities(name, monkeypatch):
    # Noise is drawn for whole units of words: of 1,024, most would be for nothing.
    monkeypatch.setattr("softbottle.ops.mixture.decode.UNIT", 32)
    draws = 3_000
    inputs = oracle.make_inputs(name, scale=0.5)
    point = oracle.cast(inputs, jnp.float32)
    hidden_TD = np.repeat(point.hidden_TD[:1], draws, axis=0)
    ids_T = jax.jit(CASES[name].head.sample)(*point[:3], hidden_TD, jax.random.key(3))
    p_V = oracle.probabilities(name, *inputs[:3], inputs.hidden_TD[:1])[0][0]
    counts_V = np.bincount(ids_T, minlength=VOCAB)
    common_V = draws * p_V >= 5
    observed = np.append(counts_V[common_V], counts_V[~common_V].sum())
    wanted = draws * np.append(p_V[common_V], p_V[~common_V].sum())
    chi_square = np.sum((observed - wanted) ** 2 / np.maximum(wanted, 1e-9))
    freedom = common_V.sum()
    # Five standard deviations above the mean of the chi-square law.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moss", "partition_mixed", "mixtape"])
def test_what_is_kept_is_of_the_probabilities_of_the_head(name, monkeypatch):
    monkeypatch.setattr("softbottle.ops.mixture.decode.UNIT", 16)
    sampling_test.replace_noise(monkeypatch, sampling_test.least_probable)
    choices = [
        {"temperature": 0.7, "top_k": 21, "top_p": 0.9},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.01},
    ]
    head, inputs = CASES[name].head, oracle.make_inputs(name, scale=0.5)

    def run(*args):
        options, key = Options(budget_bytes=ODD_BUDGET), jax.random.key(0)
        return [head.sample(*args, key, options=options, **each) for each in choices]

    found = jax.jit(run)(*oracle.cast(inputs[:4], jnp.float32))
    p_TV = np.exp(oracle.log_probs(name, *inputs[:4]))
    sampling_test.check_sets(p_TV, found, choices)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW, "mos_active", "partition_mixed", "mixtape"])
def test_the_log_probabilities_of_given_words_are_those_of_each(name, float64):
    inputs = oracle.make_inputs(name)
    rng = np.random.default_rng(5)
    words_TM = rng.integers(0, VOCAB, (len(inputs.labels_T), 4))
    cotangent_TM = rng.normal(size=words_TM.shape)
    head, point = CASES[name].head, oracle.cast(inputs, jnp.float64)

    @jax.jit
    def run(args, cotangent_TM):
        options = Options(budget_bytes=ODD_BUDGET)
        found_TM, pull = jax.vjp(
            lambda *args: head.log_probs_of(*args, words_TM, options=options), *args
        )
        return found_TM, pull(cotangent_TM)

    found_TM, bars = run(point[:4], cotangent_TM)
    log_p_TV = oracle.log_probs(name, *inputs[:4])
    oracle.assert_close(
        found_TM, np.take_along_axis(log_p_TV, words_TM, axis=1), "float64"
    )
    each = [
        oracle.gradients(
            name, inputs._replace(labels_T=words_TM[:, m]), -cotangent_TM[:, m]
        )
        for m in range(words_TM.shape[1])
    ]
    exact = jax.tree.map(lambda *leaves: sum(leaves), *each)
    oracle.assert_close(bars, exact, "float64")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "moss", "partition_mixed", "mixtape"])
def test_dense_log_probs_have_the_gradient_of_the_oracle_beside_padding_rows(name):
    inputs, padded, mask_TKE, cotangent_T = make_problem(name)
    options = Options(budget_bytes=ODD_BUDGET, vocab=VOCAB)
    labels_T = inputs.labels_T % VOCAB
    inputs = inputs._replace(labels_T=labels_T)

    @jax.jit
    def run(args, mask_TKE, cotangent_T):
        def log_p(*args):
            named = {"latent_mask": mask_TKE, "options": options}
            log_p_TV = CASES[name].head.log_probs(*args, **named)
            return jnp.take_along_axis(log_p_TV, labels_T[:, None], axis=1)[:, 0]

        return jax.vjp(log_p, *args)[1](-cotangent_T)

    point = oracle.cast((padded[:4], mask_TKE, cotangent_T), jnp.float32)
    params, table_VE, bias_V, hidden_TD = run(*point)
    exact = oracle.gradients(name, inputs, cotangent_T, mask_TKE)
    ours = (params, table_VE[:VOCAB], bias_V[:VOCAB], hidden_TD)
    oracle.assert_close(ours, exact, "float32")
    assert not np.any(table_VE[VOCAB:]) and not np.any(bias_V[VOCAB:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moss", "mixtape"])
def test_an_ignored_label_is_padding_and_a_mean_is_over_the_rest(name):
    inputs = oracle.make_inputs(name)
    ignored_T = np.arange(len(inputs.labels_T)) % 4 == 1
    marked_T = np.where(ignored_T, -100, inputs.labels_T)
    broken_TD = np.where(ignored_T[:, None], np.nan, inputs.hidden_TD)
    kept_T = np.where(ignored_T, 0.0, inputs.weights_T)
    arrays = oracle.cast((inputs, broken_TD, marked_T, kept_T), jnp.float32)
    (*args, hidden_TD, labels_T, weights_T), broken_TD, marked_T, kept_T = arrays
    head = CASES[name].head

    def loss(hidden_TD, labels_T, weights_T, **keywords):
        return head.loss(*args, hidden_TD, labels_T, weights_T, **keywords)

    @jax.jit
    def run():
        step = jax.value_and_grad(loss)
        expected = step(hidden_TD, labels_T, kept_T)
        found = step(broken_TD, marked_T, weights_T, ignore_label=-100)
        marked = (broken_TD, marked_T, weights_T)
        mean = loss(*marked, ignore_label=-100, reduction="mean")
        terms_T = loss(*marked, ignore_label=-100, reduction="none")
        nll_T = head.nll(*args, broken_TD, marked_T, ignore_label=-100)
        plain_T = head.nll(*args, hidden_TD, labels_T)
        return expected, found, mean, terms_T, nll_T, plain_T

    expected, found, mean, terms_T, nll_T, plain_T = run()
    oracle.assert_close(found, expected, "float32")
    kept_T, plain_T = np.asarray(kept_T), np.asarray(plain_T)
    np.testing.assert_allclose(mean, expected[0] / kept_T.sum(), rtol=1e-5)
    np.testing.assert_allclose(terms_T, kept_T * plain_T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(nll_T, np.where(ignored_T, 0, plain_T), rtol=1e-4)


def test_a_mean_over_nothing_is_0_and_bad_input_is_named():
    point = oracle.cast(oracle.make_inputs("softmax"), jnp.float32)
    head, zeros_T = CASES["softmax"].head, np.zeros_like(point.weights_T)
    mean = jax.jit(functools.partial(head.loss, reduction="mean"))
    assert mean(*point[:5], zeros_T) == 0
    with pytest.raises(ValueError, match=r"reduction must be one of \('sum', 'mean'"):
        head.loss(*point, reduction="average")
    with pytest.raises(
        ValueError, match=r"words_TM must be \[tokens, words\].*\(11,\)"
    ):
        head.log_probs_of(*point[:4], point.labels_T)
    words_TM = np.zeros((11, 2), np.int32)
    words_TM[3, 1] = 37
    of_words = functools.partial(head.log_probs_of, *point[:4])
    for given_TM in (words_TM, jnp.asarray(words_TM)):
        with pytest.raises(
            ValueError,
            match=r"words_TM\[3, 1\] is 37, .* of the 37 words, 0 to 36",
        ):
            of_words(given_TM)
    np.testing.assert_array_equal(np.isnan(jax.jit(of_words)(words_TM)), words_TM == 37)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moss", "plif_mixed"])
def test_no_bias_is_a_bias_of_zero(name):
    point = oracle.cast(oracle.make_inputs(name), jnp.float32)
    without = point._replace(bias_V=None)
    zero = point._replace(bias_V=np.zeros_like(point.bias_V))
    step = jax.jit(jax.value_and_grad(CASES[name].head.loss, argnums=(0, 1, 3)))
    oracle.assert_close(step(*without), step(*zero), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moss", "plif_mixed"])
def test_gradients_pass_a_numerical_check_in_reverse_mode(name, float64):
    point = oracle.cast(oracle.make_inputs(name, tokens=3), jnp.float64)
    head = CASES[name].head
    leaves, structure = jax.tree.flatten(point[:4])

    @jax.jit
    def both(*leaves):
        differentiable = jax.tree.unflatten(structure, leaves)
        nll_T = head.nll(*differentiable, point.labels_T)
        return nll_T, head.loss(*differentiable, *point[4:])

    chex.assert_numerical_grads(both, leaves, order=1, modes=("rev",), atol=1e-4)


@pytest.mark.slow
@A_HEAD_PER_OPERATION
def test_bfloat16_products_give_float32_gradients_near_the_exact_ones(
    name, mixed_dtypes
):
    inputs, padded, mask_TKE, cotangent_T = make_problem(name)
    point = oracle.cast((padded, mask_TKE, cotangent_T), jnp.float32)
    step = everything(name, compute_dtype=jnp.bfloat16)
    total, bars, nll_T, _ = step(*point)
    assert nll_T.dtype == total.dtype == jnp.float32
    exact_T = oracle.nll(name, inputs, mask_TKE)
    assert 0 < distance(nll_T, exact_T) < BFLOAT16_RTOL
    exact = oracle.gradients(name, inputs, inputs.weights_T, mask_TKE)
    ours = (bars[0], bars[1][:VOCAB], bars[2][:VOCAB], bars[3])
    for leaf, exact_leaf in zip(
        jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True
    ):
        assert leaf.dtype == jnp.float32
        assert 0 < distance(leaf, exact_leaf) < BFLOAT16_RTOL


@A_FEW_HEADS
def test_bfloat16_inputs_give_float32_losses_and_bfloat16_gradients(name, mixed_dtypes):
    inputs, padded, mask_TKE, cotangent_T = make_problem(name)
    half = oracle.cast((padded, mask_TKE), jnp.bfloat16)
    # The oracle reads the very numbers that bfloat16 holds.
    held, mask = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), half)
    held = held._replace(labels_T=inputs.labels_T, table_VE=held.table_VE[:VOCAB])
    exact_T = oracle.nll(name, held._replace(bias_V=held.bias_V[:VOCAB]), mask)
    point = half[0]._replace(weights_T=inputs.weights_T.astype(np.float32))
    cotangent_T = cotangent_T.astype(np.float32)
    total, bars, nll_T, _ = everything(name)(point, half[1], cotangent_T)
    assert nll_T.dtype == total.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(bars[:4])} == {jnp.dtype("bfloat16")}
    assert distance(nll_T, exact_T) < BFLOAT16_RTOL


def distance(ours, exact):
    return np.linalg.norm(np.asarray(ours, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=4, derandomize=True, database=None)
@hypothesis.given(data=strategies.data())
@pytest.mark.parametrize("name", ["softmax", "moss", "plif_mixed"])
def test_any_shape_and_scale_equals_the_oracle(name, data):
    tokens = data.draw(strategies.integers(1, 9), "tokens")
    rows = data.draw(strategies.integers(2, 41), "rows")
    scale = data.draw(strategies.floats(0.0, 2.0), "scale")
    budget = data.draw(strategies.integers(1, 5_000), "budget")
    inputs = oracle.make_inputs(name, tokens, rows, seed=tokens + rows, scale=scale)
    point = oracle.cast(inputs, jnp.float32)
    options = Options(budget_bytes=budget)
    loss = functools.partial(CASES[name].head.loss, options=options)
    total, bars = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*point)
    value = np.dot(inputs.weights_T, oracle.nll(name, inputs))
    oracle.assert_close(total, value, "float32")
    exact = oracle.gradients(name, inputs, inputs.weights_T)
    oracle.assert_close(bars, exact, "float32")


@pytest.mark.parametrize("name", ["softmax", "moss", "plif_mixed"])
def test_a_vocabulary_of_one_word_has_no_loss_and_no_gradient(name):
    inputs = oracle.make_inputs(name, 3, 1, seed=4, scale=1.0)
    point = oracle.cast(inputs, jnp.float32)
    step = jax.jit(jax.value_and_grad(CASES[name].head.loss, (0, 1, 2, 3)))
    total, bars = step(*point)
    # Zero as a difference of equal numbers, so to the rounding of numbers near 1.
    for leaf in jax.tree.leaves((total, bars)):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-6)
