"""What nobody asks the gradient of is not computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle

TOKENS, WIDTH, WORDS, COMPONENTS = 16, 128, 1000, 2
PRODUCT = 2 * TOKENS * COMPONENTS * WIDTH * WORDS


@pytest.fixture(scope="module")
def inputs():
    """Parameters, table, bias and states of a mixture."""
    random = np.random.default_rng(0)
    params = jax.jit(head().init, static_argnums=(1, 2))(
        jax.random.key(0), WIDTH, WIDTH
    )
    arrays = [
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((WORDS, WIDTH), (WORDS,), (TOKENS, WIDTH))
    ]
    return (params, *arrays)


def head():
    return softbottle.mos(COMPONENTS)


def products(function, inputs):
    """The GEMMs with the table in a compiled program, by its flop."""
    compiled = jax.jit(function).lower(*inputs).compile()
    return round(compiled.cost_analysis()["flops"] / PRODUCT)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["loss", "nll"])
def test_a_frozen_table_and_frozen_states_spare_a_product(method, inputs):
    labels_T = jnp.arange(TOKENS)

    def total(params, table_VE, bias_V, hidden_TD):
        call = getattr(head(), method)
        return jnp.sum(call(params, table_VE, bias_V, hidden_TD, labels_T))

    def frozen(params, table_VE, bias_V, hidden_TD):
        table_VE, bias_V = jax.lax.stop_gradient((table_VE, bias_V))
        return total(params, table_VE, bias_V, hidden_TD)

    every = (0, 1, 2, 3)
    learned = products(jax.grad(total, every), inputs)
    assert products(jax.grad(frozen, every), inputs) == learned - 1
    assert products(jax.grad(total, (0, 3)), inputs) == learned - 1
    assert products(jax.grad(total, (1, 2)), inputs) == learned - 1
    assert products(total, inputs) == 1
