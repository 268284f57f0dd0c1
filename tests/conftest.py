"""What every test stands on: strictness, eight devices, and no GPU test without one."""

import functools
import gc
import importlib.metadata
import importlib.util
import os
import tempfile

# Compiling is what these tests spend their time on. Set before jax is imported, and
# inherited by the other workers and by the commands that tests start.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# Where an operation was called is of use in profiles, and nobody profiles these.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
flags = os.environ.get("XLA_FLAGS", "").split()
# Programs so small are not worth cutting up for several cores.
flags.append("--xla_cpu_parallel_codegen_split_count=1")
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Of its two ways to write a fused loop this compiles in a third of the time, and is
    # not the one that users run; later versions do not know the flag.
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(flags))
if os.environ.get("PYTHONDONTWRITEBYTECODE") and not os.path.exists(
    importlib.util.find_spec("jax").cached
):
    # Without bytecode a command takes three times as long to start. Where that of the
    # packages does not lie beside them, it is kept apart from the sources, for as long
    # as the tests run.
    del os.environ["PYTHONDONTWRITEBYTECODE"]
    _BYTECODE = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["PYTHONPYCACHEPREFIX"] = _BYTECODE.name
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from jax import monitoring

from softbottle.training import evaluate

# Set before any device is touched, or the machine's own single device stays.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


# First the files that take longest, or a worker is left alone with one at the end; the
# one that mostly waits for other processes before all.
LONGEST = ("distributed", "sharding", "loop", "contract", "recipe", "model", "modules")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Three workers for two cores: many tests wait for processes that they start."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist's own way to say it
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores * 3 // 2)


def pytest_collection_modifyitems(items):
    gc.freeze()  # what was imported stays: no collection need look at it again
    gc.set_threshold(20_000, 20, 50)  # tracing makes many objects and few cycles
    order = {f"{name}_test": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if jax.default_backend() == "gpu":
        return
    reason = f"needs a GPU; jax runs on {jax.default_backend()} here"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def strict(request):
    """Strict dtype promotion in tests of ops and heads (elsewhere it breaks optax)."""
    if {"ops", "heads"}.isdisjoint(request.path.parts):
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Every file begins without XLA's passes, whatever the one before it changed."""
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def quick_keys():
    """The generator of random numbers that compiles fastest."""
    generator = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    yield
    jax.config.update("jax_default_prng_impl", generator)


@pytest.fixture
def compiled():
    """The names of the programs that are compiled, one by one."""
    names = []

    def listen(event, *_, fun_name="", **__):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    monitoring.register_event_duration_secs_listener(listen)
    yield names
    monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def shared_evaluators():
    """Runs of equal settings are evaluated by one program, and not each by its own."""
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(evaluate.make_evaluator)
        patch.setattr(evaluate, "make_evaluator", once)
        yield


@pytest.fixture
def optimised():
    """All of XLA's passes; with jax 0.10, like all tests, without fusion emitters."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def mixed_dtypes():
    """Standard promotion, for tests whose subject is the mixing of precisions."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def float64(mixed_dtypes):
    with jax.enable_x64(True):
        yield
