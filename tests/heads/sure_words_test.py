"""log P of several words, one of which is nearly sure: its gradient is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle


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
