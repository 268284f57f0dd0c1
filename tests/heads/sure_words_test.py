"""log P of several words, one of which is nearly sure: its gradient is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle.heads.pieces import Pieces
from softbottle.ops.mixture import gated
from softbottle.ops.mixture.arrays import Mixture, Vocabulary
from softbottle.ops.mixture.options import DEFAULTS
from tests import oracle


@pytest.mark.parametrize("scale", [0.16, 0.25])
def test_the_gradient_of_a_sure_word_beside_others(scale, mixed_dtypes):
    """At a probability of 0.999 it was off by 119% of its largest entry."""
    random = np.random.default_rng(0)
    tokens, width, vocab = 40, 64, 300
    table_VE = jnp.asarray(random.normal(size=(vocab, width)), jnp.bfloat16)
    sure_T = random.integers(0, vocab, tokens)
    other_T = random.integers(0, vocab, tokens)
    # Twice, so that both are the same word.
    words_TM = jnp.asarray(np.stack([other_T, sure_T, sure_T], axis=1))
    hidden_TD = jnp.asarray(table_VE[sure_T].astype(jnp.float32) * scale, jnp.bfloat16)
    bar_TM = np.zeros((tokens, 3), np.float32)
    bar_TM[:, 1] = random.uniform(0.5, 1.5, tokens)
    head = softbottle.softmax()

    @jax.jit
    def gradient(hidden_TD, table_VE):
        def total(hidden_TD, table_VE):
            log_p_TM = head.log_probs_of({}, table_VE, None, hidden_TD, words_TM)
            return jnp.sum(bar_TM * log_p_TM)

        return jax.grad(total, (0, 1))(hidden_TD, table_VE)

    ours = gradient(hidden_TD, table_VE)
    hidden_TD, table_VE = (
        np.asarray(array, np.float64) for array in (hidden_TD, table_VE)
    )
    z_TV = hidden_TD @ table_VE.T
    p_TV = np.exp(z_TV - z_TV.max(axis=1, keepdims=True))
    p_TV /= p_TV.sum(axis=1, keepdims=True)
    z_bar_TV = np.eye(vocab)[sure_T] - p_TV
    z_bar_TV *= bar_TM[:, 1:2]
    exact = (z_bar_TV @ table_VE, z_bar_TV.T @ hidden_TD)
    for bar, exact_bar in zip(ours, exact, strict=True):
        error = np.max(np.abs(np.asarray(bar, np.float64) - exact_bar))
        assert error < 8e-3 * np.max(np.abs(exact_bar))


@pytest.mark.slow
def test_a_sure_word_of_a_mixtape_beside_others(float64):
    """Frequent and rare ones; the oracle is the derivative of a float64 log P."""
    random = np.random.default_rng(1)
    tokens, components, width, gate, frequent, vocab = 40, 4, 64, 3, 50, 300
    table_VE = random.normal(size=(vocab, width))
    sure_T = random.integers(0, vocab, tokens)
    sure_T[: tokens // 2] = random.integers(0, frequent, tokens // 2)
    other_T = random.integers(0, vocab, tokens)
    words_TM = jnp.asarray(np.stack([other_T, sure_T, sure_T], axis=1))
    bar_TM = jnp.asarray(np.array([0.0, 1.0, 0.0])[None])
    noise_TKE = 0.1 * random.normal(size=(tokens, components, width))
    gates = (
        random.normal(size=(tokens, components - 1, gate)),
        random.normal(size=(tokens, components - 1)),
    )
    frequent_words = gated.Words(
        Vocabulary(table_VE[:frequent], random.normal(size=frequent) * 0.1),
        random.normal(size=(frequent, gate)) * 0.1,
        random.normal(size=(frequent, components - 1)) * 0.1,
    )
    rare = Vocabulary(table_VE[frequent:], random.normal(size=vocab - frequent))

    def pieces(tokens, frequent, context_T1E, rare):
        mixture = Mixture(jnp.zeros(context_T1E.shape[:2]), context_T1E)
        start = len(frequent.vector_SG)
        return Pieces(tokens, frequent, mixture, rare, start, DEFAULTS)

    def ours(arrays):
        return jnp.sum(bar_TM * pieces(*arrays).log_probs_of(words_TM))

    def exact(arrays):
        log_p_TV = pieces(*arrays).log_probs(None)
        return jnp.sum(bar_TM * jnp.take_along_axis(log_p_TV, words_TM, axis=1))

    ours, exact = (jax.jit(jax.grad(function)) for function in (ours, exact))
    for scale in (0.16, 0.25):
        context_TKE = table_VE[sure_T][:, None] * scale + noise_TKE
        words = (frequent_words, context_TKE[:, :1], rare)
        arrays = oracle.cast((gated.Tokens(context_TKE, *gates), *words), jnp.bfloat16)
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), arrays)
        bars, exact_bars = map(jax.tree.leaves, (ours(arrays), exact(wide)))
        for bar, exact_bar in zip(bars, exact_bars, strict=True):
            error = np.max(np.abs(np.asarray(bar, np.float64) - exact_bar))
            assert error < 8e-3 * np.max(np.abs(exact_bar)), (scale, bar.shape)
