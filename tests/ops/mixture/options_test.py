import jax
import jax.numpy as jnp
import pytest

from softbottle.ops.device import Device
from softbottle.ops.mixture.options import (
    Options,
    chunk_count,
    product_dtype,
    sum_dtype,
)
from tests.ops import devices


@pytest.mark.parametrize(
    "options", [{"budget_bytes": 0}, {"budget_bytes": -7}, {"vocab": 0}, {"vocab": -3}]
)
def test_a_value_that_is_not_positive_is_refused_by_name(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} .*{value}"):
        Options(**options)


@pytest.mark.parametrize(
    "option, value",
    [
        ("vocab", 3.5),
        ("vocab", "7"),
        ("budget_bytes", "1 GiB"),
        ("budget_bytes", True),
        ("vocab_axis", 0),
        ("compute_dtype", "bf16"),
        ("compute_dtype", 7),
        # All that is multiplied would be rounded to whole numbers.
        ("compute_dtype", jnp.int32),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option} must be "):
        Options(**{option: value})


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(TypeError, match="budget_megabytes"):
        Options(budget_megabytes=3)


def test_an_unknown_implementation_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'triton'.*blocked.*reference"):
        Options(implementation="triton")


def test_the_options_are_those_of_a_device_that_is_passed_in():
    chosen = Options().resolve(devices.H200)
    assert chosen.device == devices.H200 and chosen.on_gpu
    newer = jax.__version_info__ >= (0, 11)
    assert chosen.implementation == ("pallas_gpu" if newer else "blocked")
    assert chosen.resolve() is chosen
    assert chosen.block_bytes == 2**30 < chosen.loss_bytes(2**20) == 2**32
    here = chosen.resolve(jax.devices()[0])
    assert here.device.platform == "cpu" and here.block_bytes == 32 * 2**20
    assert Options().resolve(devices.TPU).implementation == "blocked"
    asked = Options(implementation="pallas_tpu").resolve(devices.TPU)
    assert asked.implementation == "pallas_tpu"


def test_what_depends_on_a_device_is_refused_before_one_is_chosen():
    with pytest.raises(ValueError, match="resolve"):
        _ = Options().block_bytes


@pytest.mark.parametrize(
    ("device", "bits"),
    [
        (devices.CPU, None),
        (devices.H200, 10),
        (Device("gpu", "NVIDIA T4", "7.5"), None),
        (Device("gpu", "AMD Instinct MI300X", "gfx942"), None),
        (devices.TPU, 7),
    ],
)
def test_float32_products_read_as_many_bits_as_the_device_has(device, bits):
    options = Options(device=device)
    assert options.float32_bits == bits
    with jax.default_matmul_precision("highest"):
        assert options.float32_bits is None


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
