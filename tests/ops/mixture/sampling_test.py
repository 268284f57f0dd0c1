"""Temperature, top-k, top-p and min-p of the mixture's own probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle import ops
from softbottle.ops.mixture import decode, sampling
from softbottle.ops.mixture.activations import SIGSOFTMAX, SOFTMAX
from softbottle.ops.mixture.options import Options
from softbottle.ops.mixture.sampling import Sampling
from tests import oracle
from tests.ops.mixture import decode_test
from tests.ops.mixture.decode_test import MIXTURE, ROWS, UNIT, VOCAB, WIDTH
from tests.ops.mixture.problem import paired

BUDGETS = [1, 2**40]
CHOICES = [
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 90, "top_p": 0.55},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.2, "temperature": 1.7},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.93, "temperature": 1.4},
    {"top_p": 0.998},
    {"min_p": 0.05},
    {"min_p": 1.0, "temperature": 0.5},
    {"min_p": 0.02, "top_p": 0.99, "temperature": 0.8},
    {"min_p": 0.3, "top_p": 0.99, "temperature": 0.8},
]


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    monkeypatch.setattr(decode, "UNIT", UNIT)


def kept(p_V, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The probabilities of what is kept, by adding up words from the best down."""
    sharp_V = p_V ** (1 / temperature)
    order_V = np.argsort(-sharp_V, kind="stable")[:top_k]
    sharp_V = sharp_V / sharp_V[order_V].sum()
    words, mass = [], 0.0
    for word in order_V:
        tied = words and sharp_V[words[-1]] - sharp_V[word] <= 1e-9 * sharp_V[words[-1]]
        if top_p is not None and mass >= top_p and not tied:
            break
        words.append(word)
        mass += sharp_V[word]
    least = sharp_V.max() * (min_p or 0.0)
    words = [word for word in words if sharp_V[word] >= least * (1 - 1e-9)]
    kept_V = np.zeros_like(sharp_V)
    kept_V[words] = sharp_V[words]
    return kept_V / kept_V.sum()


def least_probable(score_CW):
    """In place of a draw: how far a word is behind, -inf for one that is not kept."""
    return jnp.where(jnp.isneginf(score_CW), -jnp.inf, -score_CW)


def last(score_CW):
    """In place of a draw: the words' numbers, -inf for one that is not kept."""
    ids_CW = jax.lax.broadcasted_iota(score_CW.dtype, score_CW.shape, 1)
    return jnp.where(jnp.isneginf(score_CW), -jnp.inf, ids_CW)


def replace_noise(monkeypatch, rule):
    """Have the word win that is first by the rule, wherever a draw is made."""

    def winner(score_CW, key_C, place):
        del key_C
        by_rule_CW = rule(score_CW)
        if rule is last:
            by_rule_CW += jnp.asarray(place.first).astype(score_CW.dtype)
        at_C = jnp.argmax(by_rule_CW, axis=1)
        return jnp.max(by_rule_CW, axis=1), place.first + at_C

    def categorical(key, score_Tk, mode):
        del key, mode
        return jnp.argmax(rule(score_Tk), axis=1)

    monkeypatch.setattr(sampling, "winner", winner)
    monkeypatch.setattr(jax.random, "categorical", categorical)


def all_choices(mixture, budget, activation, choices=CHOICES, vocab=VOCAB):
    """The words of every choice, compiled at once."""

    @jax.jit
    def run(*arrays):
        options = ops.Options(budget_bytes=budget, vocab=vocab)
        inputs = (*paired(*arrays), jax.random.key(0), activation, options)
        return [ops.sample(*inputs, sampling=Sampling(**each)) for each in choices]

    return run(*oracle.cast(mixture, jnp.float32))


def check_sets(p_TV, found, choices=CHOICES):
    """Compare the least probable words that are kept."""
    for choice, words_T in zip(choices, found, strict=True):
        exact_TV = np.array([kept(p_V, **choice) for p_V in p_TV])
        exact_TV[exact_TV == 0] = np.inf
        np.testing.assert_array_equal(words_T, exact_TV.argmin(axis=1), str(choice))


@pytest.mark.slow
@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_kept_of_a_mixture_is_what_the_definitions_keep(budget, monkeypatch):
    replace_noise(monkeypatch, least_probable)
    # Blocks take longer to compile.
    choices = CHOICES if budget > 1 else [CHOICES[4], CHOICES[7]]
    found = all_choices(MIXTURE, budget, SIGSOFTMAX, choices)
    check_sets(decode_test.dense(MIXTURE, VOCAB), found, choices)


def test_one_component_needs_no_normalizer(monkeypatch):
    replace_noise(monkeypatch, least_probable)
    monkeypatch.setattr(ops.mixture.api, "lse", None)
    log_prior_TK, context_TKE, *vocabulary = MIXTURE
    one = (log_prior_TK[:, :1], context_TKE[:, :1], *vocabulary)
    few = CHOICES[::3]  # of temperature, top_k, top_p, min_p, and all together
    found = all_choices(one, BUDGETS[-1], SIGSOFTMAX, few)
    p_TV = decode_test.dense(one, VOCAB)
    check_sets(p_TV / p_TV.sum(axis=1, keepdims=True), found, few)


def test_classes_of_words_are_kept_by_the_same_rules(monkeypatch):
    replace_noise(monkeypatch, least_probable)
    rng = np.random.default_rng(7)
    log_prior_TK, context_TKE, table_VE, bias_V = MIXTURE
    context_TNKE = rng.normal(size=(len(context_TKE), 3, 3, WIDTH))
    mixture, few = (log_prior_TK, context_TNKE, table_VE, bias_V), [{"min_p": 0.05}]
    found = all_choices(mixture, 1, SOFTMAX, few)
    class_V = np.arange(VOCAB) % 3
    z_TKV = np.einsum("tvke,ve->tkv", context_TNKE[:, class_V], table_VE[:VOCAB])
    f_TKV = np.exp(z_TKV + bias_V[:VOCAB])
    p_TKV = f_TKV / f_TKV.sum(axis=2, keepdims=True)
    check_sets((np.exp(log_prior_TK)[:, :, None] * p_TKV).sum(axis=1), found, few)


@pytest.mark.parametrize("budget", BUDGETS)
def test_words_as_probable_as_the_last_one_kept_are_kept_with_it(budget, monkeypatch):
    replace_noise(monkeypatch, last)
    # Small integers: every score is exact and is shared by many words.
    rng = np.random.default_rng(2)
    table_VE = rng.integers(0, 2, size=(ROWS, WIDTH)).astype(float)
    context_TKE = rng.integers(0, 2, size=(11, 1, WIDTH)).astype(float)
    mixture = (np.zeros((11, 1)), context_TKE, table_VE, np.zeros(ROWS))
    choices = [{"top_p": 0.8}]
    if budget > 1:  # blocks take longer to compile
        choices += [{"top_p": 0.01}, {"min_p": np.exp(-2.0) * (1 - 1e-6)}]
        choices += [{"top_k": 50, "top_p": 0.5}]
        choices += [{"top_k": 50}]  # of equals the first ones
    found = all_choices(mixture, budget, SOFTMAX, choices)
    p_TV = np.exp(context_TKE[:, 0] @ table_VE[:VOCAB].T)
    p_TV /= p_TV.sum(axis=1, keepdims=True)
    for choice, words_T in zip(choices, found, strict=True):
        if "top_k" in choice:
            # The rule takes the last candidate, which is the last by probability.
            expected_T = [candidates(p_V, **choice)[-1] for p_V in p_TV]
        else:
            expected_T = [np.flatnonzero(kept(p_V, **choice))[-1] for p_V in p_TV]
        np.testing.assert_array_equal(words_T, expected_T, str(choice))


def candidates(p_V, **choice):
    """What is kept, the most probable word first."""
    order_V = np.argsort(-p_V, kind="stable")
    kept_V = kept(p_V, **choice)
    return [word for word in order_V if kept_V[word] > 0]


def deviations(words_T, p_V):
    """By how many standard deviations chi squared exceeds its mean."""
    draws, counts_V = len(words_T), np.bincount(words_T, minlength=len(p_V))
    assert np.all(counts_V[p_V == 0] == 0)
    # Rare words are counted together, or chi squared is not chi squared.
    common_V = draws * p_V >= 5
    counts = np.append(counts_V[common_V], counts_V[~common_V].sum())
    expected = draws * np.append(p_V[common_V], p_V[~common_V].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    free = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free)


@pytest.mark.slow
def test_words_are_drawn_as_often_as_is_due_to_what_is_kept():
    draws, choices = 3000, [CHOICES[0], CHOICES[4], CHOICES[11], {}]
    one = decode_test.make_mixture(tokens=1)
    many = tuple(np.repeat(array, draws, axis=0) for array in one[:2]) + one[2:]
    found = all_choices(many, BUDGETS[-1], SIGSOFTMAX, choices)
    p_V = decode_test.dense(one, VOCAB)[0]
    for choice, words_T in zip(choices, found, strict=True):
        assert abs(deviations(words_T, kept(p_V, **choice))) < 4, choice
    # A temperature of each component is another distribution, which this tells apart.
    log_prior_TK, context_TKE, *vocabulary = one
    each = [
        (np.zeros((1, 1)), context_TKE[:, k : k + 1], *vocabulary) for k in range(3)
    ]
    parts = [decode_test.dense(part, VOCAB)[0] ** (1 / 0.6) for part in each]
    by_part = zip(np.exp(log_prior_TK[0]), parts, strict=True)
    wrong_V = sum(weight * part_V / part_V.sum() for weight, part_V in by_part)
    assert deviations(found[0], wrong_V) > 10


def test_words_alike_are_drawn_alike_at_a_low_temperature():
    # In float32 the numbers near 1e4 / 1e-3 are all whole.
    draws, log_p_V = 3000, np.array([1e4, 1e4, 0, 1e4], np.float32)

    @jax.jit
    def run(log_p_TV):
        fold, cold = decode.whole(log_p_TV), Sampling(temperature=1e-3)
        return sampling.draw(fold, draws, jax.random.key(0), cold, Options())

    words_T = run(np.tile(log_p_V, (draws, 1)))
    assert abs(deviations(words_T, (log_p_V > 0) / 3)) < 4


@pytest.mark.slow
def test_no_choice_of_blocks_changes_what_is_drawn():
    # Among candidates nothing is drawn by blocks.
    draws = (
        all_choices(MIXTURE, budget, SIGSOFTMAX, [{"min_p": 0.05}])
        for budget in (decode_test.BUDGETS[1], 2**40)
    )
    for one_T, other_T in zip(*draws, strict=True):
        np.testing.assert_array_equal(one_T, other_T)


def test_a_block_may_begin_inside_a_unit():
    key_C = sampling.token_keys(jax.random.key(1))(jnp.arange(9))
    rng = np.random.default_rng(3)
    g_CW = rng.normal(size=(9, 3 * UNIT)).astype(np.float32)

    @jax.jit
    def run(inside):
        at_1W = jnp.arange(3 * UNIT)[None] - inside
        inside_CW = jnp.where((at_1W >= 0) & (at_1W < 2 * UNIT), g_CW, -jnp.inf)
        whole = sampling.winner(inside_CW, key_C, decode.Place(2, 0))
        part_CW = jax.lax.dynamic_slice_in_dim(g_CW, inside, 2 * UNIT, axis=1)
        return whole, sampling.winner(part_CW, key_C, decode.Place(2, inside))

    for shift in (0, 5, UNIT - 1):
        whole, part = run(shift)
        np.testing.assert_array_equal(whole[0], part[0])
        np.testing.assert_array_equal(whole[1], part[1])


def test_without_temperature_it_is_the_most_probable_word():
    choices = [{"temperature": each} for each in (1e-300, 1e-38, 1e-6)]
    choices += [{"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.0, "top_k": 9}]
    found = all_choices(MIXTURE, BUDGETS[-1], SIGSOFTMAX, choices)
    found += all_choices(MIXTURE, 1, SIGSOFTMAX, [{"temperature": 0}])
    best_T = decode_test.dense(MIXTURE, VOCAB).argmax(axis=1)
    for words_T in found:
        np.testing.assert_array_equal(words_T, best_T)


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        ({"temperature": float("inf")}, "temperature must be at least 0, got inf"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 2.5}, "top_k must be an integer .*, got 2.5"),
        ({"top_k": VOCAB + 1}, f"the vocabulary's {VOCAB}, got {VOCAB + 1}"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"min_p": -0.5}, r"min_p must be in \[0, 1\], got -0.5"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\], got 2"),
    ],
)
def test_a_choice_out_of_its_range_is_refused_in_a_line(choice, message):
    with pytest.raises(ValueError, match=message) as caught:
        all_choices(MIXTURE, 1, SOFTMAX, [choice])
    assert "\n" not in str(caught.value)


def test_a_temperature_that_is_traced_is_refused():
    with pytest.raises(ValueError, match="temperature must be a number that is known"):
        jax.jit(Sampling)(0.5)


@pytest.mark.slow
def test_a_nucleus_of_many_words_holds_no_array_of_edges(optimised, monkeypatch):
    monkeypatch.undo()
    tokens, _, rows, width = decode_test.SIZES.values()
    shapes = (tokens, 1), (tokens, 1, width), (rows, width), (rows,)
    nucleus = functools.partial(ops.sample, sampling=Sampling(top_p=0.9))

    def call(*arrays):
        options = ops.Options(budget_bytes=2**22)
        return nucleus(*paired(*arrays), jax.random.key(0), options=options)

    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    quick = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(call).lower(*inputs).compile(compiler_options=quick)
    memory = compiled.memory_analysis()
    # What is drawn without a nucleus takes 16 MiB, for each edge by itself 48.
    assert memory.temp_size_in_bytes < 20 * 2**20
