"""A head with a cache against loops over positions, entries and words in NumPy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle import Options
from softbottle.heads import cache
from tests import oracle

ROWS, POSITIONS, VOCAB = 2, 9, 13
OPTIONS = Options(vocab=VOCAB, budget_bytes=1500)
PADDED_ROWS = 3
MARGIN = 0.05
STEP = 1e-6
DIFFERENCES = {"rtol": 1e-6, "atol": 1e-8}
# Two texts and padding in the first row, three texts in the second.
SEGMENTS_BS = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [3, 3, 5, 4, 4, 4, 4, 4, 4]])
LABELS_BS = np.array([[2, 0, 2, 2, 1, 2, 1, 3, 3], [4, 4, 4, 3, 7, 3, 3, 8, 7]])


def make_problem(name):
    """((params, table, bias, hidden), weights), in float64."""
    inputs = oracle.make_inputs(name, ROWS * POSITIONS, VOCAB, seed=1)
    hidden_BSD = inputs.hidden_TD.reshape(ROWS, POSITIONS, -1)
    weights_BS = np.where(SEGMENTS_BS > 0, 1.0, 0.0)
    weights_BS[1, 1] = 0.0  # it counts for nothing, and is remembered
    weights_BS[0, 2] = 0.7
    return (inputs.params, inputs.table_VE, inputs.bias_V, hidden_BSD), weights_BS


def entries(row, now):
    """Positions that the history of a position holds."""
    segment = SEGMENTS_BS[row, now]
    return [i for i in range(now) if segment and SEGMENTS_BS[row, i] == segment]


def similarity(hidden_BSD, row, now, then):
    product = hidden_BSD[row, now] @ hidden_BSD[row, then]
    return product / np.sqrt(hidden_BSD.shape[-1])


def brute(name, params, table_VE, bias_V, hidden_BSD):
    """P(v) of every position under the joint normalisers, [B, S, V]."""
    case = oracle.CASES[name]
    p_BSV = np.zeros((ROWS, POSITIONS, VOCAB))
    for row in range(ROWS):
        inputs = (params, table_VE, bias_V, hidden_BSD[row])
        parts, _, z_SKV, _ = oracle.probabilities(name, *inputs)[1]
        prior_SK, f_SKV = parts.prior_TK, case.positive(params, z_SKV)
        for now in range(POSITIONS):
            mass_V = np.zeros(VOCAB)
            for then in entries(row, now):
                mass = np.exp(similarity(hidden_BSD, row, now, then))
                mass_V[LABELS_BS[row, then]] += mass
            for prior, f_V in zip(prior_SK[now], f_SKV[now], strict=True):
                p_BSV[row, now] += prior * (f_V + mass_V) / (f_V + mass_V).sum()
    return p_BSV


def brute_loss(name, weights_BS, *arguments):
    p_BSV = brute(name, *arguments)
    p_BS = np.take_along_axis(p_BSV, LABELS_BS[:, :, None], axis=2)[:, :, 0]
    return -(weights_BS * np.log(p_BS)).sum()


def brute_ranking(weights_BS, table_VE, hidden_BSD):
    """The mean over positions of their mean over pairs, by loops."""
    unit_VE = table_VE / np.linalg.norm(table_VE, axis=1, keepdims=True)
    means = []
    for row, now in zip(*np.nonzero(weights_BS), strict=True):
        words, label = LABELS_BS[row], LABELS_BS[row, now]
        order = sorted(
            entries(row, now),
            key=lambda i: (words[i] != label, -unit_VE[words[i]] @ unit_VE[label]),
        )
        losses = []
        for a, i in enumerate(order):
            for b, j in enumerate(order):
                if a < b and words[i] == label != words[j]:
                    gap = similarity(hidden_BSD, row, now, j)
                    gap -= similarity(hidden_BSD, row, now, i)
                    losses.append(max(0.0, gap + MARGIN * (b - a)))
        if losses:
            means.append(np.mean(losses))
    assert len(means) > 3
    return np.mean(means)


def differences(function, arguments):
    """The gradient of a NumPy function of a tree, entry by entry."""
    leaves, structure = jax.tree.flatten(arguments)
    found = []
    for index, leaf in enumerate(leaves):
        grad = np.zeros_like(leaf)
        for place in np.ndindex(leaf.shape):
            ends = []
            for sign in (1, -1):
                moved = [array.copy() for array in leaves]
                moved[index][place] += sign * STEP
                ends.append(function(*jax.tree.unflatten(structure, moved)))
            grad[place] = (ends[0] - ends[1]) / (2 * STEP)
        found.append(grad)
    return jax.tree.unflatten(structure, found)


def loss(name, weights_BS, labels_BS, params, table_VE, bias_V, hidden_BSD):
    memory = cache.history(hidden_BSD, labels_BS, SEGMENTS_BS)
    joined = cache.cached(oracle.CASES[name].head)
    arguments = (params, table_VE, bias_V, hidden_BSD, labels_BS, weights_BS)
    return joined.loss(*arguments, memory, options=OPTIONS)


compiled_history = jax.jit(cache.history)


def decode(name, memory, *arguments):
    """Jitted: log-probabilities with the cache and of the cache alone, and nll."""

    @jax.jit
    def run(memory, *arguments):
        joined = cache.cached(oracle.CASES[name].head)
        log_p_BSV = joined.log_probs(*arguments, memory, options=OPTIONS)
        alone_BSV = cache.cache_log_probs(arguments[3], memory, len(arguments[1]))
        nll_BS = joined.nll(*arguments, LABELS_BS, memory, options=OPTIONS)
        return log_p_BSV, alone_BSV, nll_BS

    return map(np.asarray, run(memory, *arguments))


def with_padding_rows(arguments):
    """A table with rows that are no words."""
    params, table_VE, bias_V, hidden_BSD = arguments
    table_VE = np.pad(table_VE, ((0, PADDED_ROWS), (0, 0)), constant_values=2.0)
    return params, table_VE, np.pad(bias_V, (0, PADDED_ROWS)), hidden_BSD


@pytest.mark.slow
def test_loss_and_every_gradient_are_those_of_loops(float64, name="mos"):
    arguments, weights_BS = make_problem(name)
    ours = functools.partial(loss, name, weights_BS, LABELS_BS)
    step = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2, 3)))
    value, grads = step(*with_padding_rows(arguments))
    theirs = functools.partial(brute_loss, name, weights_BS)
    np.testing.assert_allclose(value, theirs(*arguments), rtol=1e-11)
    params, table_VE, bias_V, hidden_BSD = grads
    assert not np.any(table_VE[VOCAB:]) and not np.any(bias_V[VOCAB:])
    grads = (params, table_VE[:VOCAB], bias_V[:VOCAB], hidden_BSD)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, **DIFFERENCES),
        grads,
        differences(theirs, arguments),
    )


@pytest.mark.slow
def test_what_has_no_weight_or_no_segment_may_hold_anything(name="mos"):
    arguments, weights_BS = make_problem(name)
    # The last two of a text, of which one sees the other's label.
    weights_BS[1, 7:] = 0.0
    (*rest, hidden_BSD), weights_BS = oracle.cast((arguments, weights_BS), jnp.float32)
    padding_BS = SEGMENTS_BS == 0
    spoilt_BSD = np.where(padding_BS[:, :, None], np.float32(np.nan), hidden_BSD)
    spoilt_BS = np.where(padding_BS, [[-1] * 7 + [10**6] * 2], LABELS_BS)
    spoilt_BS[1, 7:] = -100

    # Compiled once, for both.
    @jax.jit
    def step(labels_BS, hidden_BSD):
        def ranks(hidden_BSD):
            memory = cache.history(hidden_BSD, labels_BS, SEGMENTS_BS)
            return cache.ranking_loss(
                rest[1], hidden_BSD, labels_BS, weights_BS, memory, MARGIN
            )

        ours = functools.partial(loss, name, weights_BS, labels_BS)
        return (
            jax.value_and_grad(ours, argnums=(0, 1, 2, 3))(*rest, hidden_BSD),
            jax.value_and_grad(ranks)(hidden_BSD),
        )

    results = [step(LABELS_BS, hidden_BSD), step(spoilt_BS, spoilt_BSD)]
    clean, dirty = map(jax.tree.leaves, results)
    for left, right in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(left, right)
        assert np.all(np.isfinite(left))


# Not PLIF: beside a cache the level of g counts, and the oracle's is another.
@pytest.mark.parametrize("name", ["softmax", "moss", "partition", "mixtape"])
def test_log_probs_are_those_of_loops_and_sum_to_one(name):
    arguments, _ = make_problem(name)
    padded = oracle.cast(with_padding_rows(arguments), jnp.float32)
    memory = compiled_history(padded[3], LABELS_BS, SEGMENTS_BS)
    log_p_BSV, alone_BSV, nll_BS = decode(name, memory, *padded)
    expected_BSV = brute(name, *arguments)
    label_BS1 = np.take_along_axis(log_p_BSV, LABELS_BS[:, :, None], axis=2)
    oracle.assert_close(-nll_BS, label_BS1[:, :, 0], "float32")
    oracle.assert_close(np.exp(log_p_BSV)[:, :, :VOCAB], expected_BSV, "float32")
    total_BS = np.exp(log_p_BSV).sum(axis=2, dtype=np.float64)
    np.testing.assert_allclose(total_BS, 1, atol=1e-6)
    some_BS = [[bool(entries(b, s)) for s in range(POSITIONS)] for b in range(ROWS)]
    np.testing.assert_allclose(np.exp(alone_BSV).sum(axis=2), some_BS, atol=1e-6)


@pytest.mark.slow
def test_an_empty_cache_changes_nothing(name="mos"):
    exact, _ = make_problem(name)
    arguments = oracle.cast(exact, jnp.float32)
    joined = cache.cached(oracle.CASES[name].head)
    seen_BM = np.zeros((ROWS, 4), bool)
    states_BMD = np.full((ROWS, 4, exact[3].shape[-1]), np.nan, np.float32)
    words_BM = np.zeros((ROWS, 4), np.int32)
    memory = cache.given(states_BMD, words_BM, seen_BM, POSITIONS)

    def total(*arguments):
        return joined.nll(*arguments, LABELS_BS, memory, options=OPTIONS).sum()

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3)))
    value, (*bars, hidden_bar_BSD) = step(*arguments)
    *output, hidden_BSD = exact
    hidden_TD = hidden_BSD.reshape(ROWS * POSITIONS, -1)
    ones_T = np.ones(len(hidden_TD))
    plain = oracle.Inputs(*output, hidden_TD, LABELS_BS.ravel(), ones_T)
    found = (value, (*bars, hidden_bar_BSD.reshape(hidden_TD.shape)))
    expected = (oracle.nll(name, plain).sum(), oracle.gradients(name, plain, ones_T))
    oracle.assert_close(found, expected, "float32")
    log_p_BSV, *_ = decode(name, memory, *arguments)
    plain_TV = oracle.log_probs(name, *plain[:4])
    oracle.assert_close(log_p_BSV.reshape(plain_TV.shape), plain_TV, "float32")


def test_a_given_memory_is_seen_by_every_position(float64):
    (params, table_VE, bias_V, hidden_BSD), _ = make_problem("mos")
    random = np.random.default_rng(5)
    states_BMD = random.normal(size=(ROWS, 4, hidden_BSD.shape[-1]))
    words_BM = random.integers(0, VOCAB, (ROWS, 4))
    seen_BM = np.array([[True, True, False, True], [True, False, False, True]])
    memory = cache.given(states_BMD, words_BM, seen_BM, POSITIONS)
    arguments = (params, table_VE, bias_V, hidden_BSD)
    log_p_BSV, alone_BSV, nll_BS = decode("mos", memory, *arguments)
    alone_BSV = np.exp(alone_BSV)
    for row, now in np.ndindex(ROWS, POSITIONS):
        mass_V = np.zeros(VOCAB)
        for entry in np.flatnonzero(seen_BM[row]):
            product = hidden_BSD[row, now] @ states_BMD[row, entry]
            mass_V[words_BM[row, entry]] += np.exp(
                product / hidden_BSD.shape[-1] ** 0.5
            )
        np.testing.assert_allclose(
            alone_BSV[row, now], mass_V / mass_V.sum(), rtol=1e-10
        )
    label_BS1 = np.take_along_axis(log_p_BSV, LABELS_BS[:, :, None], axis=2)
    np.testing.assert_allclose(-nll_BS, label_BS1[:, :, 0], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mos", "mixtape"])
def test_samples_follow_the_probabilities(name, monkeypatch):
    # Noise is drawn for whole units of words: of 1,024, most would be for nothing.
    monkeypatch.setattr("softbottle.ops.mixture.decode.UNIT", 8)
    draws = 4000
    arguments, _ = make_problem(name)
    params, table_VE, bias_V, hidden_BSD = oracle.cast(arguments, jnp.float32)
    row, now = 1, 8
    memory = compiled_history(hidden_BSD, LABELS_BS, SEGMENTS_BS)
    memory, hidden_BSD = jax.tree.map(np.asarray, (memory, hidden_BSD))
    one = cache.Memory(
        memory.states_BMD[row][None],
        memory.words_BM[row][None],
        np.repeat(memory.visible_BSM[row, now][None, None], draws, axis=1),
    )
    hidden_1SD = np.repeat(hidden_BSD[row, now][None, None], draws, axis=1)
    sample = jax.jit(cache.cached(oracle.CASES[name].head).sample)
    words = sample(params, table_VE, bias_V, hidden_1SD, one, jax.random.key(2))[0]
    expected_V = draws * brute(name, *arguments)[row, now]
    observed_V = np.bincount(words, minlength=VOCAB)
    chi_square = np.sum((observed_V - expected_V) ** 2 / expected_V)
    # Five standard deviations above the mean of the chi-square law.
    assert chi_square < VOCAB - 1 + 5 * np.sqrt(2 * (VOCAB - 1))


def test_the_ranking_loss_and_its_gradient_are_those_of_loops(float64):
    (_, table_VE, _, hidden_BSD), weights_BS = make_problem("softmax")

    def ours(table_VE, hidden_BSD):
        memory = cache.history(hidden_BSD, LABELS_BS, SEGMENTS_BS)
        return cache.ranking_loss(
            table_VE, hidden_BSD, LABELS_BS, weights_BS, memory, MARGIN
        )

    value, grads = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(
        table_VE, hidden_BSD
    )
    theirs = functools.partial(brute_ranking, weights_BS, table_VE)
    np.testing.assert_allclose(value, theirs(hidden_BSD), rtol=1e-10)
    assert not np.any(grads[0])
    (expected_BSD,) = differences(theirs, (hidden_BSD,))
    np.testing.assert_allclose(grads[1], expected_BSD, **DIFFERENCES)


@functools.cache
def make_step(rows, positions, vocab):
    """(a training step with a cache, its arguments): value and gradients of all."""
    width, random, head = 8, np.random.default_rng(0), softbottle.mos(4)
    params = head.init(jax.random.key(0), width, width)
    table_VE = random.normal(size=(vocab, width)).astype(np.float32)
    hidden_BSD = random.normal(size=(rows, positions, width)).astype(np.float32)
    labels_BS = random.integers(0, vocab, (rows, positions))
    ones_BS = np.ones((rows, positions), np.float32)

    def loss(params, table_VE, hidden_BSD):
        memory = cache.history(hidden_BSD, labels_BS, ones_BS.astype(np.int32))
        tokens = (hidden_BSD, labels_BS, ones_BS, memory)
        total = cache.cached(head).loss(
            params, table_VE, None, *tokens, options=Options(budget_bytes=2**18)
        )
        return total + cache.ranking_loss(table_VE, *tokens, MARGIN)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return step, (params, table_VE, hidden_BSD)


@pytest.mark.slow
def test_loss_and_gradient_never_hold_all_logits():
    rows, positions, vocab = 2, 32, 4096
    step, arguments = make_step(rows, positions, vocab)
    compiled = step.lower(*arguments).compile()
    held = compiled.memory_analysis().temp_size_in_bytes
    all_logits = 4 * rows * positions * 4 * vocab
    assert held < all_logits / 2


def test_nothing_is_scattered_over_tokens_and_vocabulary():
    vocab = 4096
    step, arguments = make_step(2, 32, vocab)
    scattered = re.findall(
        r":\w+\[([\d,]+)\] = scatter", str(step.trace(*arguments).jaxpr)
    )
    shapes = {tuple(map(int, shape.split(","))) for shape in scattered}
    # Rows of the table may take their labels' gradients; no token has a row of words.
    assert all(vocab not in shape or shape[0] == vocab for shape in shapes), shapes
