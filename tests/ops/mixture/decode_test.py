import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from softbottle import ops
from softbottle.ops.mixture import decode, sampling
from softbottle.ops.mixture.activations import SIGSOFTMAX, SOFTMAX
from tests import oracle
from tests.ops.mixture.problem import paired

# A table of three units and a rest, of which a little is padding. Units are small in
# most tests, because noise is drawn for all words of a unit; else they have 1,024.
UNIT = 64
TOKENS, COMPONENTS, WIDTH, ROWS, VOCAB = 11, 3, 7, 3 * UNIT + 31, 3 * UNIT + 17
UNIT_BYTES = 4 * COMPONENTS * UNIT
# A token at a time by blocks of words; a few tokens; the whole at once.
BUDGETS = [1, 4 * UNIT_BYTES, 2**40]
STREAMED = BUDGETS[:-1]


@pytest.fixture
def _small_units(monkeypatch):
    monkeypatch.setattr("softbottle.ops.mixture.decode.UNIT", UNIT)


SMALL_UNITS = pytest.mark.usefixtures("_small_units")


def make_mixture(tokens=TOKENS, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    weight_TK = rng.uniform(0.1, 1.0, size=(tokens, COMPONENTS))
    return (
        np.log(weight_TK / weight_TK.sum(axis=1, keepdims=True)),
        rng.normal(size=(tokens, COMPONENTS, WIDTH)),
        rng.normal(size=(rows, WIDTH)),
        rng.normal(size=rows),
    )


MIXTURE = make_mixture()


def dense(mixture, vocab, activation=SIGSOFTMAX):
    """P(v) of sigsoftmax or softmax components, [T, V], in float64."""
    log_prior_TK, context_TKE, table_VE, bias_V = mixture
    z_TKV = context_TKE @ table_VE[:vocab].T + bias_V[:vocab]
    f_TKV = np.exp(z_TKV)
    if activation is SIGSOFTMAX:
        f_TKV = f_TKV * oracle.sigmoid(z_TKV)
    p_TKV = f_TKV / f_TKV.sum(axis=2, keepdims=True)
    return (np.exp(log_prior_TK)[:, :, None] * p_TKV).sum(axis=1)


def run(function, budget, *extra, mixture=MIXTURE, vocab=VOCAB):
    options = ops.Options(budget_bytes=budget, vocab=vocab)

    @jax.jit
    def call(*args):
        return function(*paired(*args), *extra, SIGSOFTMAX, options)

    return call(*oracle.cast(mixture, jnp.float32))


@SMALL_UNITS
@pytest.mark.parametrize("budget", BUDGETS)
def test_log_probs_equal_the_dense_ones(budget):
    log_p_TV = run(ops.log_probs, budget)
    oracle.assert_close(log_p_TV[:, :VOCAB], np.log(dense(MIXTURE, VOCAB)), "float32")
    assert log_p_TV.shape == (TOKENS, ROWS)
    assert np.all(np.isneginf(log_p_TV[:, VOCAB:]))


@SMALL_UNITS
@pytest.mark.slow
def test_log_probs_have_the_same_gradient_by_blocks():
    bar_TV = np.random.default_rng(1).uniform(size=(TOKENS, VOCAB)).astype(np.float32)

    def total(*mixture, budget):
        options = ops.Options(budget_bytes=budget, vocab=VOCAB)
        log_p_TV = ops.log_probs(*paired(*mixture), SIGSOFTMAX, options)
        return jnp.sum(log_p_TV[:, :VOCAB] * bar_TV)

    point = oracle.cast(MIXTURE, jnp.float32)
    ours, whole = (
        jax.jit(jax.grad(functools.partial(total, budget=b), argnums=(0, 1, 2, 3)))
        for b in BUDGETS[1:]
    )
    oracle.assert_close(ours(*point), whole(*point), "float32")


def make_ties(seed=2):
    """Few small integers: every score is exact and is shared by many words."""
    rng = np.random.default_rng(seed)
    table_VE = rng.integers(0, 2, size=(ROWS, WIDTH)).astype(float)
    context_TKE = rng.integers(0, 2, size=MIXTURE[1].shape).astype(float)
    context_TKE[:, 1:] = context_TKE[:, :1]
    return MIXTURE[0], context_TKE, table_VE, np.zeros(ROWS)


# By 1, 2 and 4 tokens, blocks of one unit, two units and all words, candidates by unit
# and at once; what is left out of the product is blocked like another case.
@SMALL_UNITS
@pytest.mark.parametrize(
    "budget, k",
    [
        *((BUDGETS[0], k) for k in (16, UNIT + 9)),
        *((BUDGETS[1], k) for k in (40, UNIT + 9, VOCAB)),
        *((BUDGETS[2], k) for k in (16, 40, UNIT + 9, VOCAB)),
    ],
)
def test_top_k_are_the_best_of_the_whole_vocabulary_and_of_equals_the_first(budget, k):
    @jax.jit
    def run(*mixture):
        options = ops.Options(budget_bytes=budget, vocab=VOCAB)
        return ops.top_k(*paired(*mixture), k, SOFTMAX, options)

    log_p_TV = np.log(dense(MIXTURE, VOCAB, SOFTMAX))
    values_Tk, ids_Tk = map(np.asarray, run(*oracle.cast(MIXTURE, jnp.float32)))
    best_Tk = np.sort(log_p_TV, axis=1)[:, ::-1][:, :k]
    oracle.assert_close(values_Tk, best_Tk, "float32")
    assert np.all(np.diff(values_Tk, axis=1) <= 0)
    assert all(len(set(row)) == k for row in ids_Tk.tolist())
    read_Tk = np.take_along_axis(log_p_TV, ids_Tk, axis=1)
    oracle.assert_close(values_Tk, read_Tk, "float32")
    ties = make_ties()
    _, ids_Tk = run(*oracle.cast(ties, jnp.float32))
    z_TV = ties[1][:, 0] @ ties[2][:VOCAB].T
    expected_TV = np.argsort(-z_TV, axis=1, kind="stable")
    np.testing.assert_array_equal(ids_Tk, expected_TV[:, :k])


@pytest.mark.parametrize("k", [3, 61])
def test_of_equally_probable_words_of_all_shards_the_first_comes_first(k):
    # Eight shards of eight rows, of which the last has five words.
    rng = np.random.default_rng(2)
    table_VE = rng.integers(0, 2, size=(64, 3)).astype(np.float32)
    context_TKE = rng.integers(0, 2, size=(4, 1, 3)).astype(np.float32)
    arrays = (np.zeros((4, 1), np.float32), context_TKE, table_VE, np.zeros(64))
    options = ops.Options(vocab=61, vocab_axis="model")

    def call(*args):
        return ops.top_k(*paired(*args), k, SOFTMAX, options)

    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    specs = (P(), P(), P("model"), P("model"))
    split = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P())
    _, ids_Tk = jax.jit(split)(*oracle.cast(arrays, jnp.float32))
    z_TV = context_TKE[:, 0] @ table_VE[:61].T
    expected_TV = np.argsort(-z_TV, axis=1, kind="stable")
    np.testing.assert_array_equal(ids_Tk, expected_TV[:, :k])


@SMALL_UNITS
@pytest.mark.slow
@pytest.mark.parametrize(
    "generator, streamed",
    [("threefry2x32", STREAMED[0]), ("unsafe_rbg", STREAMED[1])],
)
def test_what_is_drawn_depends_on_the_key_and_not_on_blocks(generator, streamed):
    @functools.partial(jax.jit, static_argnames="budget")
    def draw(seed, budget):
        key = jax.random.key(seed, impl=generator)
        options = ops.Options(budget_bytes=budget, vocab=VOCAB)
        return ops.sample(*paired(*mixture), key, SIGSOFTMAX, options)

    mixture = oracle.cast(MIXTURE, jnp.float32)
    whole_T = draw(7, BUDGETS[-1])
    np.testing.assert_array_equal(draw(7, streamed), whole_T)
    assert np.any(draw(8, BUDGETS[-1]) != whole_T)


@pytest.mark.slow
def test_words_far_behind_win_as_often_as_they_are_due(optimised):
    """Float32 noise must reach the 17 nats that a word of 3e-8 is behind.

    The noise of `jax.random.gumbel` ends at 15.94 unless it is asked for more.
    """
    tokens, words, calls, far = 64, 2**16, 6, 16.0

    # All of LLVM's passes take longer than the draws.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
    def largest(first):
        key_C = sampling.token_keys(jax.random.key(1))(first + jnp.arange(tokens))
        scores_CW = jnp.zeros((tokens, words), jnp.float32)
        return sampling.winner(scores_CW, key_C, decode.FIRST)[0]

    noise_T = np.concatenate([largest(call * tokens) for call in range(calls)])
    due = calls * tokens * -np.expm1(-words * np.exp(-far))
    found = np.sum(noise_T > far)
    assert found > 0 and abs(found - due) < 2.5 * np.sqrt(due)


@SMALL_UNITS
def test_the_range_of_the_noise_is_not_left_to_a_setting_of_jax():
    options = ops.Options(budget_bytes=BUDGETS[-1], vocab=VOCAB)

    def program():
        def draw(key, *mixture):
            return ops.sample(*paired(*mixture), key, SIGSOFTMAX, options)

        return str(jax.make_jaxpr(draw)(jax.random.key(2), *mixture))

    mixture = oracle.cast(MIXTURE, jnp.float32)
    as_it_is = program()
    jax.config.update("jax_high_dynamic_range_gumbel", True)
    try:
        assert program() == as_it_is
    finally:
        jax.config.update("jax_high_dynamic_range_gumbel", False)


@pytest.mark.slow
def test_components_are_drawn_in_float32_whatever_the_prior_is(mixed_dtypes):
    # One of 2,001 components has half of the prior. Noise in bfloat16 ends at 4.9 nats:
    # the others, 7.6 nats behind, would hardly be drawn.
    components, draws = 2_001, 400
    prior_K = np.full(components, 0.5 / (components - 1))
    prior_K[-1] = 0.5
    log_prior_TK = np.repeat(np.log(prior_K)[None], draws, axis=0)
    context_TKE = np.zeros((draws, components, 1))
    context_TKE[:, -1] = 50.0
    table_VE, bias_V = np.array([[0.0], [1.0]]), np.array([5.0, 0.0])
    mixture = oracle.cast((log_prior_TK, context_TKE, table_VE, bias_V), jnp.bfloat16)
    words_T = jax.jit(ops.sample)(*paired(*mixture), jax.random.key(1))
    p_K = np.exp(np.asarray(mixture[0][0], np.float64))
    # Component 2,000 gives word 1, the others word 0 but for exp(-5).
    p = p_K[-1] / p_K.sum() + (1 - p_K[-1] / p_K.sum()) * oracle.sigmoid(-5.0)
    deviation = np.sqrt(draws * p * (1 - p))
    assert abs(np.sum(words_T) - draws * p) < 4 * deviation


@SMALL_UNITS
def test_no_word_beyond_the_vocabulary_is_drawn():
    log_prior_TK, context_TKE, table_VE, bias_V = MIXTURE
    bias_V = np.where(np.arange(ROWS) < UNIT + 2, bias_V, 50.0)
    mixture = (log_prior_TK, context_TKE, table_VE, bias_V)
    key = jax.random.key(0)
    words_T = run(ops.sample, BUDGETS[-1], key, mixture=mixture, vocab=UNIT + 2)
    assert np.all(words_T < UNIT + 2)


SIZES = {"tokens": 64, "components": 15, "rows": 50_000, "width": 256}


def traced(name, budget):
    """One of the operations on 64 tokens of a large vocabulary."""
    tokens, components, rows, width = SIZES.values()
    shapes = (tokens, components), (tokens, components, width), (rows, width), (rows,)
    extra = {"log_probs": (), "top_k": (40,), "sample": (jax.random.key(0),)}[name]

    def call(*mixture):
        options = ops.Options(budget_bytes=budget)
        return getattr(ops, name)(*paired(*mixture), *extra, options=options)

    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(call).trace(*inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log_probs", "top_k", "sample"])
def test_neither_all_logits_nor_a_second_table_are_held(name, optimised):
    # Memory is assigned before LLVM, whose passes over the noise take seconds.
    quick = {"xla_backend_optimization_level": 0}
    compiled = traced(name, 2**22).lower().compile(compiler_options=quick)
    memory = compiled.memory_analysis()
    tokens, components, rows, width = SIZES.values()
    assert memory.temp_size_in_bytes < 4 * tokens * components * rows / 8
    assert memory.temp_size_in_bytes < 4 * rows * width / 2


@pytest.mark.parametrize("name", ["log_probs", "top_k", "sample"])
def test_what_fits_the_budget_is_one_block_without_a_loop(name):
    assert " scan[" in str(traced(name, 2**20).jaxpr)
    assert " scan[" not in str(traced(name, 2**30).jaxpr)
    assert " while[" not in str(traced(name, 2**30).jaxpr)
