"""Casts of a product's inputs are rounded for good, and have a cast's gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.mixture import products


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_cast_has_the_values_and_the_gradient_of_astype(dtype, float64):
    del float64
    array = np.random.default_rng(0).normal(size=50).astype(np.float32)
    ours, pull = jax.vjp(lambda array: products.cast(array, jnp.dtype(dtype)), array)
    theirs, their_pull = jax.vjp(lambda array: array.astype(dtype), jnp.asarray(array))
    assert ours.dtype == theirs.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(ours, theirs)
    bar = jnp.asarray(np.random.default_rng(1).normal(size=50), dtype)
    np.testing.assert_array_equal(pull(bar)[0], their_pull(bar)[0])


def test_a_program_keeps_the_rounding_of_what_is_cast_back():
    """On any machine, though only XLA for GPUs would leave out the casts."""

    def there_and_back(array):
        return products.cast(array, jnp.dtype("bfloat16")).astype(array.dtype)

    array = np.random.default_rng(0).normal(size=50).astype(np.float32)
    program = jax.jit(there_and_back).lower(array)
    assert "reduce_precision" in program.as_text()
    exact = array.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(program.compile()(array), exact)
    assert (
        "reduce_precision"
        not in jax.jit(there_and_back).lower(array.astype(jnp.bfloat16)).as_text()
    )
