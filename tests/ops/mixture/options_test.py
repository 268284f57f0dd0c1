import jax.numpy as jnp
import pytest

from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    product_dtype,
    sum_dtype,
)


@pytest.mark.parametrize(
    "options", [{"budget_bytes": 0}, {"budget_bytes": -7}, {"vocab": 0}, {"vocab": -3}]
)
def test_a_value_that_is_not_positive_is_refused_by_name(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        Options(**options)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(TypeError, match="budget_megabytes"):
        Options(budget_megabytes=3)


def test_options_are_hashable_and_equal_by_value():
    assert Options(compute_dtype="bfloat16") == Options(compute_dtype=jnp.bfloat16)
    assert len({Options(vocab=3), Options(vocab=3), Options(vocab=4)}) == 2


@pytest.mark.parametrize("tokens", [1, 2, 11, 97])
@pytest.mark.parametrize("budget", [1, 99, 100, 350, 10**9])
def test_chunks_fit_the_budget_and_are_the_fewest(tokens, budget):
    bytes_per_token = 100
    chunks = chunk_count(tokens, bytes_per_token, budget)
    largest = max(1, budget // bytes_per_token)
    assert 1 <= chunks <= tokens
    assert -(-tokens // chunks) <= largest
    assert chunks == 1 or -(-tokens // (chunks - 1)) > largest


def test_no_tokens_make_one_chunk():
    assert chunk_count(0, 100, 10) == 1


def test_sums_are_float32_or_better(float64):
    half, single, double = (jnp.ones(1, d) for d in ("bfloat16", "float32", "float64"))
    assert sum_dtype(half, half) == sum_dtype(half, single) == jnp.float32
    assert sum_dtype(single, double) == jnp.float64


def test_products_are_in_the_dtype_that_was_asked_for():
    single = jnp.ones(1, jnp.float32)
    assert product_dtype(Options(), single, single) == jnp.float32
    assert product_dtype(Options(compute_dtype="bfloat16"), single) == jnp.bfloat16
