"""What lies at the edge of every call of a head: no tokens, odd labels, float16."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle import Options
from softbottle.heads import cache
from tests import oracle
from tests.oracle import CASES

METHODS = ("loss", "nll", "log_probs", "top_k", "sample")
CACHED_METHODS = ("loss", "nll", "log_probs", "sample")
KEY = jax.random.key(0)
SEGMENTS_BS = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [3, 3, 5, 4, 4, 4, 4, 4, 4]])
VOCAB = 13


def call(name, method, point, **options):
    """A head's method on the inputs of the oracle."""
    extra = {"top_k": (5,), "sample": (KEY,)}.get(method, ())
    used = {"loss": 6, "nll": 5}.get(method, 4)
    return getattr(CASES[name].head, method)(
        *point[:used], *extra, options=Options(**options)
    )


def make_cached(name="mos", rows=2):
    """Inputs of a cached head in float32, [B, S]."""
    inputs = oracle.make_inputs(name, rows * 9, VOCAB, seed=1)
    inputs = inputs._replace(
        hidden_TD=inputs.hidden_TD.reshape(rows, 9, -1),
        labels_T=inputs.labels_T.reshape(rows, 9),
        weights_T=np.ones((rows, 9)),
    )
    return oracle.cast(inputs, jnp.float32)


def make_padded():
    """The same with rows of the table that are no words."""
    point = make_cached()
    table_VE = np.pad(point.table_VE, ((0, 3), (0, 0)))
    return point._replace(table_VE=table_VE, bias_V=np.pad(point.bias_V, (0, 3)))


def call_cached(method, point, memory, name="mos", **options):
    *output, hidden_BSD, labels_BS, weights_BS = point
    extra = {
        "loss": (labels_BS, weights_BS, memory),
        "nll": (labels_BS, memory),
        "log_probs": (memory,),
        "sample": (memory, KEY),
    }[method]
    function = compiled_cached(name, method, Options(**options))
    return function(*output, hidden_BSD, *extra)


@functools.cache
def compiled_cached(name, method, options):
    joined = cache.cached(CASES[name].head)
    return jax.jit(functools.partial(getattr(joined, method), options=options))


compiled_history = jax.jit(cache.history)


def history(point, segments_BS=SEGMENTS_BS):
    return compiled_history(point.hidden_TD, point.labels_T, segments_BS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, budget", [("softmax", 2**30), ("moss", 1), ("plif_mixed", 1)]
)
def test_no_tokens_have_no_loss_and_no_words(name, budget):
    point = oracle.cast(oracle.make_inputs(name, tokens=0, rows=2053), jnp.float32)
    options = {"budget_bytes": budget, "vocab": 2050}
    head, chosen = CASES[name].head, Options(**options)

    @jax.jit
    def run(*args):
        point = oracle.Inputs(*args)
        step = functools.partial(head.loss, options=chosen)
        step = jax.value_and_grad(step, argnums=(0, 1, 2, 3))(*args)
        nll_T = call(name, "nll", point, **options)
        if name == "plif_mixed":  # its words are found by what finds MoSS's
            return step, nll_T, ()
        words = [call(name, each, point, **options) for each in ("log_probs", "sample")]
        # Beyond 16 words are sorted by unit.
        words += [head.top_k(*args[:4], k, options=chosen) for k in (5, 40)]
        return step, nll_T, words

    (value, bars), nll_T, words = run(*point)
    assert value == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(bars))
    assert nll_T.shape == (0,)
    if name != "plif_mixed":
        shapes = [each.shape for each in jax.tree.leaves(words)]
        assert shapes == [(0, 2053), (0,), *[(0, 5)] * 2, *[(0, 40)] * 2]


@pytest.mark.slow
def test_an_ignored_label_is_no_word_in_labels_that_cannot_hold_it():
    """Modulo 256, -100 is the word 156."""
    table_VE, hidden_TD = jnp.arange(400.0).reshape(200, 2) / 400, jnp.ones((3, 2))
    head, named = CASES["softmax"].head, {"ignore_label": -100}

    @jax.jit
    def run(labels_T):
        tokens = ({}, table_VE, None, hidden_TD, labels_T)
        return head.loss(*tokens, reduction="mean", **named), head.nll(*tokens, **named)

    labels_T = np.array([65, 156, 120])
    wanted = run(labels_T.astype(np.int32))
    assert np.all(wanted[1] > 0)
    for found in (run(labels_T.astype(np.uint8)), run(labels_T.astype(np.uint16))):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
def test_no_rows_beside_a_cache_have_no_loss_and_no_words():
    point = make_cached(rows=2)
    shapes = {"hidden_TD": (0, 9, 5), "labels_T": (0, 9), "weights_T": (0, 9)}
    kinds = {name: getattr(point, name).dtype for name in shapes}
    none = {name: np.zeros(shape, kinds[name]) for name, shape in shapes.items()}
    point = point._replace(**none)
    memory = history(point, SEGMENTS_BS[:0])
    assert call_cached("loss", point, memory) == 0
    assert call_cached("nll", point, memory).shape == (0, 9)
    assert call_cached("log_probs", point, memory).shape == (0, 9, VOCAB)
    assert call_cached("sample", point, memory).shape == (0, 9)


@jax.jit
def found_beside(memory):
    """Words drawn beside a memory, and its best ones."""
    table_VE, hidden_BSD = jnp.arange(8.0).reshape(4, 2) / 8, jnp.ones((2, 3, 2))
    head = cache.cached(CASES["softmax"].head)
    word_BS = head.sample({}, table_VE, None, hidden_BSD, memory, KEY)
    return word_BS, cache.best_words(hidden_BSD, memory)


def test_a_memory_without_entries_is_one_of_which_none_is_seen():
    unseen, nothing = (
        cache.given(
            jnp.ones((2, size, 2)),
            jnp.ones((2, size), int),
            jnp.zeros((2, size), bool),
            positions=3,
        )
        for size in (1, 0)
    )
    chex.assert_trees_all_equal(found_beside(nothing), found_beside(unseen))


LABEL_KINDS = ["int8", "uint8", "int16", "uint16", "uint32", "int32"]


@pytest.mark.slow
def test_the_kind_of_the_labels_changes_nothing():
    # More words than 8 bits count: the labels fit, the vocabulary does not.
    inputs = oracle.make_inputs("mos", rows=300)
    inputs = inputs._replace(labels_T=inputs.labels_T % 128)
    *args, labels_T, weights_T = oracle.cast(inputs, jnp.float32)
    head = CASES["mos"].head

    @jax.jit
    def run(kinds, *args):
        def step(labels_T):
            return jax.value_and_grad(head.loss, argnums=1)(*args, labels_T, weights_T)

        nll = [head.nll(*args, labels_T) for labels_T in kinds.values()]
        return nll, [step(kinds[kind]) for kind in ("int8", "uint32")]

    kinds = {kind: np.asarray(labels_T, kind) for kind in LABEL_KINDS}
    nll, steps = run(kinds, *args)
    exact_T = oracle.nll("mos", inputs)
    exact_VE = oracle.gradients("mos", inputs, inputs.weights_T)[1]
    for nll_T in nll:
        oracle.assert_close(nll_T, exact_T, "float32")
    for found in steps:
        exact = (np.dot(inputs.weights_T, exact_T), exact_VE)
        oracle.assert_close(found, exact, "float32")


compiled_best_words = jax.jit(cache.best_words)


def run_cached(point):
    memory = history(point)
    methods = (
        call_cached(method, point, memory, vocab=VOCAB) for method in CACHED_METHODS
    )
    return *methods, compiled_best_words(point.hidden_TD, memory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uint8", "uint32"])
def test_the_kind_of_the_words_beside_a_cache_changes_nothing(kind):
    point = make_padded()
    labels_BS = np.asarray(point.labels_T, kind)
    results = run_cached(point._replace(labels_T=labels_BS))
    for ours, theirs in zip(results, run_cached(point), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@jax.jit
def compiled_nll(point):
    return call("mos", "nll", point)


@pytest.mark.parametrize("where", ["numpy", "jax"])
def test_a_label_that_int32_cannot_hold_is_no_word(where, float64):
    point = oracle.cast(oracle.make_inputs("mos"), jnp.float32)
    labels_T = np.asarray(point.labels_T, np.int64)
    labels_T[4:8] = [2**32 + 5, -(2**32) + 5, 2**63 - 1, -(2**63)]
    if where == "jax":
        nll_T = compiled_nll(point._replace(labels_T=labels_T))
    else:
        point = point._replace(labels_T=labels_T)
        nll_T = jax.jit(lambda: call("mos", "nll", point))()
    strange_T = np.isin(np.arange(oracle.TOKENS), [4, 5, 6, 7])
    np.testing.assert_array_equal(np.isnan(nll_T), strange_T)


@pytest.mark.parametrize("array", ["params", "table_VE", "bias_V", "hidden_TD"])
@pytest.mark.parametrize("method", METHODS)
def test_float16_is_refused_by_every_call(method, array):
    point = oracle.cast(oracle.make_inputs("mos"), jnp.float32)
    half = oracle.cast(getattr(point, array), jnp.float16)
    with pytest.raises(ValueError, match=rf"{array} .* got float16.*astype"):
        call("mos", method, point._replace(**{array: half}))


@pytest.mark.parametrize("method", METHODS)
def test_float16_products_are_refused_by_every_call(method):
    point = oracle.cast(oracle.make_inputs("softmax"), jnp.float32)
    with pytest.raises(ValueError, match="compute_dtype .* got float16"):
        call("softmax", method, point, compute_dtype=jnp.float16)


@pytest.mark.parametrize("array", ["params", "table_VE", "hidden_BSD", "states_BMD"])
@pytest.mark.parametrize("method", CACHED_METHODS)
def test_float16_is_refused_beside_a_cache(method, array):
    point = make_cached()
    memory = history(point)
    if array == "states_BMD":
        memory = memory._replace(states_BMD=memory.states_BMD.astype(jnp.float16))
    else:
        field = "hidden_TD" if array == "hidden_BSD" else array
        half = oracle.cast(getattr(point, field), jnp.float16)
        point = point._replace(**{field: half})
    with pytest.raises(ValueError, match=rf"{array} .* got float16.*astype"):
        call_cached(method, point, memory)


@pytest.mark.slow
@pytest.mark.parametrize("word", [-1, VOCAB, VOCAB + 2, -VOCAB, 10**6])
def test_who_sees_a_word_that_is_none_gets_nan_in_nll_and_log_probs(word):
    point = make_padded()
    memory = history(point)
    clean = {
        method: call_cached(method, point, memory, vocab=VOCAB)
        for method in CACHED_METHODS
    }
    words_BM = np.array(memory.words_BM)
    words_BM[0, 1] = word
    memory = memory._replace(words_BM=words_BM)
    # Position 1 of the first text is seen by the two after it.
    strange_BS = np.zeros((2, 9), bool)
    strange_BS[0, 2:4] = True
    nll_BS = call_cached("nll", point, memory, vocab=VOCAB)
    log_p_BSV = call_cached("log_probs", point, memory, vocab=VOCAB)
    word_BS = call_cached("sample", point, memory, vocab=VOCAB)
    np.testing.assert_array_equal(np.isnan(nll_BS), strange_BS)
    np.testing.assert_array_equal(np.isnan(log_p_BSV).all(axis=2), strange_BS)
    np.testing.assert_array_equal(np.isnan(log_p_BSV).any(axis=2), strange_BS)
    np.testing.assert_array_equal(np.asarray(word_BS) == -1, strange_BS)
    for found, expected in (
        (nll_BS, clean["nll"]),
        (log_p_BSV, clean["log_probs"]),
        (word_BS, clean["sample"]),
    ):
        np.testing.assert_array_equal(found[~strange_BS], expected[~strange_BS])
    assert np.isnan(call_cached("loss", point, memory, vocab=VOCAB))


@pytest.mark.slow
def test_who_sees_a_word_that_is_none_draws_none_by_any_choice():
    point = make_cached()
    words_BM = np.array(history(point).words_BM)
    words_BM[0, 1] = VOCAB
    memory = history(point)._replace(words_BM=words_BM)
    sample = cache.cached(CASES["mos"].head).sample

    @jax.jit
    def draw(*arguments):
        return sample(*arguments, temperature=2.0), sample(*arguments, top_p=0.9)

    strange_BS = np.zeros((2, 9), bool)
    strange_BS[0, 2:4] = True
    for found_BS in map(np.asarray, draw(*point[:4], memory, KEY)):
        np.testing.assert_array_equal(found_BS == -1, strange_BS)
        assert np.all(found_BS < VOCAB) and np.all(found_BS >= -1)


@pytest.mark.slow
def test_a_word_that_is_none_and_is_not_seen_changes_nothing():
    point = make_padded()
    memory = history(point)
    # The last position of a text is seen by none.
    words_BM = np.array(memory.words_BM)
    words_BM[:, 8] = -1
    strange = memory._replace(words_BM=words_BM)
    for method in CACHED_METHODS:
        found, expected = (
            call_cached(method, point, chosen, vocab=VOCAB)
            for chosen in (strange, memory)
        )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_state_without_weight_that_is_not_finite_is_not_remembered():
    point = make_cached()
    row, place = 1, 4  # in the middle of a text
    weights_BS = np.array(point.weights_T)
    weights_BS[row, place] = 0.0

    def loss(params, table_VE, hidden_BSD, segments_BS):
        changed = point._replace(
            params=params,
            table_VE=table_VE,
            hidden_TD=hidden_BSD,
            weights_T=weights_BS,
        )
        memory = history(changed, segments_BS)
        total = call_cached("loss", changed, memory)
        arguments = (hidden_BSD, point.labels_T, weights_BS, memory)
        return total + cache.ranking_loss(table_VE, *arguments, 0.05)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    # The same text without that position is what should be left.
    apart_BS = SEGMENTS_BS.copy()
    apart_BS[row, place] = 0
    arguments = (point.params, point.table_VE)
    expected = step(*arguments, point.hidden_TD, apart_BS)
    for value in (np.nan, np.inf):
        spoilt_BSD = np.array(point.hidden_TD)
        spoilt_BSD[row, place] = value
        found = step(*arguments, spoilt_BSD, SEGMENTS_BS)
        for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert np.all(np.isfinite(ours))
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_entries_are_drawn_with_noise_of_a_high_range():
    point = make_padded()
    sampled = ("sample", point, history(point))
    words_BS = call_cached(*sampled, vocab=VOCAB)
    # jax would run what it compiled before.
    options = Options(vocab=VOCAB)
    again = compiled_cached.__wrapped__("mos", "sample", options)
    jax.config.update("jax_high_dynamic_range_gumbel", True)
    try:
        high_BS = again(*point[:4], history(point), KEY)
        np.testing.assert_array_equal(high_BS, words_BS)
    finally:
        jax.config.update("jax_high_dynamic_range_gumbel", False)


def test_log_probs_beside_a_cache_refuse_a_split_table():
    point = make_cached()
    with pytest.raises(ValueError, match="log_probs .*'model'"):
        call_cached("log_probs", point, history(point), vocab_axis="model")


@pytest.mark.parametrize("method", ["loss", "nll"])
@pytest.mark.parametrize("name", ["softmax", "mos", "partition", "plif"])
def test_padding_beside_a_ruled_out_first_word_adds_nothing(name, method):
    """A label of no weight is read as word 0, whose bias masks it here."""
    head = CASES[name].head
    point = oracle.cast(oracle.make_inputs(name, 5, VOCAB), jnp.float32)
    bias_V = jnp.asarray(point.bias_V).at[0].set(-jnp.inf)
    labels_T = jnp.array([1, 2, 3, 4, -100])
    # The last of three chunks has a token that is none.
    options = Options(budget_bytes=2 * 4 * VOCAB * head.contexts)

    def total(read, labels_T, **terms):
        params, table_VE, hidden_TD = read
        output = (params, table_VE, bias_V)
        found = getattr(head, method)(*output, hidden_TD, labels_T, **terms)
        return found.sum()

    def padded(read):
        return total(read, labels_T, ignore_label=-100, options=options)

    def kept(read):
        params, table_VE, hidden_TD = read
        return total((params, table_VE, hidden_TD[:4]), labels_T[:4])

    read = (point.params, point.table_VE, point.hidden_TD)
    found, expected = (jax.jit(jax.value_and_grad(f))(read) for f in (padded, kept))
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_label_that_is_ruled_out_has_no_probability():
    point = oracle.cast(oracle.make_inputs("mos", 3, VOCAB), jnp.float32)
    bias_V = jnp.asarray(point.bias_V).at[0].set(-jnp.inf)
    labels_T = jnp.array([0, 1, 2])
    output = (point.params, point.table_VE, bias_V)
    nll_T = jax.jit(CASES["mos"].head.nll)(*output, point.hidden_TD, labels_T)
    assert np.isposinf(nll_T[0]) and np.isfinite(nll_T[1:]).all()


def test_padding_beside_a_cache_and_a_ruled_out_first_word_adds_nothing():
    head, point = cache.cached(CASES["mos"].head), make_cached()
    bias_V = point.bias_V.at[0].set(-jnp.inf)
    labels_BS = jnp.clip(point.labels_T, 1).at[:, -1].set(-100)
    weights_BS = point.weights_T.at[:, -1].set(0)
    segments_BS = jnp.ones_like(labels_BS).at[:, -1].set(0)

    def total(table_VE, size):
        hidden_BSD, *by_token = (
            array[:, :size]
            for array in (point.hidden_TD, labels_BS, weights_BS, segments_BS)
        )
        labels, weights, segments = by_token
        memory = cache.history(hidden_BSD, labels, segments)
        output = (point.params, table_VE, bias_V)
        return head.loss(*output, hidden_BSD, labels, weights, memory)

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(total, size=size)))(point.table_VE)
        for size in (9, 8)
    )
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
