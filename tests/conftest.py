"""What every test stands on: strictness, eight devices, and no GPU test without one."""

import jax
import pytest

# Set before any device is touched, or the machine's own single device stays.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    reason = f"needs a GPU; jax runs on {jax.default_backend()} here"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def strict_and_quick(request):
    """Strict dtype promotion in tests of ops and heads (elsewhere it breaks optax).

    They compile hundreds of small programs, so XLA's costly passes are off there; a
    test marked by the fixture `optimised` has them on.
    """
    if request.path.parent.name not in ("ops", "heads"):
        yield
        return
    quick = "optimised" not in request.fixturenames
    jax.config.update("jax_disable_most_optimizations", quick)
    with jax.numpy_dtype_promotion("strict"):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimised():
    """The program that users run; read by `strict_and_quick`."""


@pytest.fixture
def mixed_dtypes():
    """Standard promotion, for tests whose subject is the mixing of precisions."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def float64(mixed_dtypes):
    with jax.enable_x64(True):
        yield
