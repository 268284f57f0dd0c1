"""Checking and timing of compiled jax programs.

Axes: X entries of a flat array.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from softbottle.bench import kernels, oracle, problem, timing

Row = dict[str, Any]


def checked_and_timed(
    function: jax.stages.Wrapped,
    arguments: tuple[Any, ...],
    check: Callable[[Any], Row],
    seconds: float,
    checked: tuple[Any, ...] | None = None,
    limits: oracle.Limits = oracle.OURS,
    beside: Callable[[], Any] | None = None,
) -> Row:
    """Compile, check and time a jitted function.

    Args:
        arguments: what it is timed with.
        check: gives the errors from the outputs; a wrong result is not timed.
        seconds: about how long the timing takes.
        checked: what it is checked with, if that is not `arguments`.
        limits: beyond which it is wrong.
        beside: what it is compared with, timed in turn with it: `beside_ms`.
    """
    start = time.perf_counter()
    compiled = function.lower(*arguments).compile()
    row = {"compile_seconds": time.perf_counter() - start, **memory(compiled)}
    first = jax.block_until_ready(compiled(*arguments))
    outputs = first if checked is None else function(*checked)
    row = oracle.verdict(row | check(outputs), limits)
    row["same_bits"] = same_bits(first, compiled(*arguments))
    del first, outputs
    if row["status"] != "ok":
        return row
    return row | timed(compiled, arguments, seconds, beside)


def timed(
    compiled: jax.stages.Compiled,
    arguments: tuple[Any, ...],
    seconds: float,
    beside: Callable[[], Any] | None = None,
) -> Row:
    """Milliseconds of a compiled program, and the device's own peak where it tells."""
    functions: list[Callable[[], Any]] = [lambda: compiled(*arguments)]
    functions += [beside] if beside else []
    ms = timing.alternately(functions, jax.block_until_ready, seconds)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    row = {"ms": ms[0], "device_peak_bytes": peak, **kernels.of(functions[0])}
    return row | {"beside_ms": ms[1]} if beside else row


def memory(compiled: jax.stages.Compiled) -> Row:
    """Bytes of a compiled program: all of them, and those that are not arguments."""
    sizes = compiled.memory_analysis()
    if sizes is None:
        raise RuntimeError("the compiler does not tell how much memory a program takes")
    made = sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    made -= sizes.alias_size_in_bytes
    total = sizes.argument_size_in_bytes + made
    return {"peak_bytes": int(total), "made_bytes": int(made)}


def relative_error(actual: jax.Array, wanted: jax.Array) -> float:
    """Norm of the difference over the norm of what was wanted, in float64."""
    with jax.enable_x64(True):
        return float(_relative_error(actual, wanted))


def same_bits(ours: Any, theirs: Any) -> bool:
    """Whether two results agree in every bit."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(bool(_same_bits(*pair)) for pair in pairs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def uniform(count: int, stream: int, width: float) -> jax.Array:
    """Entries of a stream of problem.py between plus and minus width, bfloat16."""
    counter_X = jax.lax.iota(jnp.int32, count)
    value_X = problem.uniform(counter_X, stream, lambda x: x.astype(jnp.float32))
    return (value_X * width).astype(jnp.bfloat16)


@jax.jit
def _relative_error(actual, wanted):
    difference = actual.astype(wanted.dtype) - wanted
    return jnp.sqrt(jnp.sum(difference**2) / jnp.sum(wanted**2))


@jax.jit
def _same_bits(ours, theirs):
    integer = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[ours.dtype.itemsize]
    bits = [jax.lax.bitcast_convert_type(x, integer) for x in (ours, theirs)]
    return jnp.all(bits[0] == bits[1])
