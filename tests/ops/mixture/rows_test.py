"""Rows by label: their gradient adds up equal labels exactly and in one order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.mixture import rows
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options

OPTIONS = Options().resolve()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_many_equal_labels_is_their_sum(dtype, monkeypatch):
    """Added one by one in bfloat16, 700 tokens of one word would lose half of them."""
    monkeypatch.setattr(rows, "SCATTER_TOKENS", 128)
    random = np.random.default_rng(0)
    words, width, tokens = 9, 4, 700
    rows_T = np.where(
        random.random(tokens) < 0.9, 3, random.integers(words, size=tokens)
    )
    bars = (random.uniform(0.5, 1, (tokens, width)), random.uniform(0.5, 1, tokens))
    vocabulary = Vocabulary(
        jax.device_put(random.normal(size=(words, width)).astype(dtype)),
        jax.device_put(random.normal(size=words).astype(np.float32)),
    )
    wide, narrow = jnp.dtype("float32"), jnp.dtype(dtype)

    @jax.jit
    def gradient(vocabulary, rows_T, bars):
        taken, pull = jax.vjp(
            lambda words: rows.take(words, rows_T, narrow, wide, OPTIONS), vocabulary
        )
        return taken, pull(bars)[0]

    narrow_bars = [bar.astype(np.float32) for bar in bars]
    taken, ours = gradient(vocabulary, rows_T, tuple(narrow_bars))
    np.testing.assert_array_equal(
        taken[0], np.asarray(vocabulary.table_VE, np.float32)[rows_T]
    )
    np.testing.assert_array_equal(taken[1], np.asarray(vocabulary.bias_V)[rows_T])
    assert ours.table_VE.dtype == narrow and ours.bias_V.dtype == wide
    for bar, ours_V in zip(bars, ours, strict=True):
        exact_V = np.zeros((words, *bar.shape[1:]))
        np.add.at(exact_V, rows_T, bar)
        # The result is rounded to the table's dtype once.
        limit = 2**-8 if ours_V.dtype == jnp.bfloat16 else 2**-15
        np.testing.assert_allclose(np.asarray(ours_V, np.float64), exact_V, rtol=limit)


def make_lookup():
    random = np.random.default_rng(1)
    rows_T = random.integers(5, size=60).astype(np.int32)
    arrays = (random.normal(size=(9, 4)), rows_T, random.normal(size=(60, 4)))
    return arrays


def test_rows_that_are_looked_up_have_the_gradient_of_an_index(monkeypatch, float64):
    """In the order that GPUs take, and in that of all others."""
    monkeypatch.setattr(rows, "SCATTER_TOKENS", 32)
    table_VE, rows_T, bar_TE = make_lookup()
    exact_VE = np.zeros((9, 4))
    np.add.at(exact_VE, rows_T, bar_TE)

    @jax.jit
    def run(table_VE, rows_T, bar_TE):
        taken_TE, pull = jax.vjp(lambda table: rows.lookup(table, rows_T), table_VE)
        ordered_VE = rows._ordered(jnp.zeros_like(table_VE), rows_T, bar_TE)
        return taken_TE, pull(bar_TE)[0], ordered_VE

    taken_TE, bar_VE, ordered_VE = run(table_VE, rows_T, bar_TE)
    np.testing.assert_array_equal(taken_TE, table_VE[rows_T])
    np.testing.assert_allclose(bar_VE, exact_VE, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ordered_VE, exact_VE, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_looked_up_rows_repeat_their_bits():
    random = np.random.default_rng(0)
    table_VE = jnp.zeros((50, 64))
    rows_T = jnp.asarray(random.integers(50, size=5000))
    bar_TE = jnp.asarray(random.normal(size=(5000, 64)), jnp.float32)

    @jax.jit
    def gradient(bar_TE):
        return jax.vjp(lambda table: rows.lookup(table, rows_T), table_VE)[1](bar_TE)[0]

    first_VE = gradient(bar_TE)
    for _ in range(20):
        np.testing.assert_array_equal(gradient(bar_TE), first_VE)
