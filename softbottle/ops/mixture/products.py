"""Matrix products as calls of the library, and the inputs that these like."""

import functools

import jax
import jax.numpy as jnp

from softbottle.ops.mixture.options import Options


def product(
    left: jax.Array, right: jax.Array, contract: tuple[int, int], dtype: jnp.dtype
) -> jax.Array:
    """A product for each class, without what makes its inputs: a call of the library.

    Args:
        left: a stack of matrices.
        right: as many.
        contract: the axis of each that is summed over.
        dtype: of the sums.
    """
    left, right = jax.lax.optimization_barrier((left, right))
    dims = ((contract[:1], contract[1:]), ((0,), (0,)))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=dtype)


def cast(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The array in a dtype, rounded for good.

    `astype` does not say that: where its result is cast back, XLA for GPUs leaves out
    both casts, and what was to be as a product sees it is not.
    """
    kept = jnp.finfo(dtype)
    if kept.nmant < jnp.finfo(array.dtype).nmant:
        array = _rounded(kept.nexp, kept.nmant, array)
    return array.astype(dtype)


def two_terms(array: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """The array as a sum of two in a narrower dtype: of bfloat16, 16 bits in all."""
    high = cast(array, dtype)
    return high, cast(array - high.astype(array.dtype), dtype)


def seen(array: jax.Array, dtype: jnp.dtype, options: Options) -> jax.Array:
    """The array as a product in that dtype reads it.

    What has to agree with the product, or cancel with it, takes its inputs from here.
    """
    array = cast(array, dtype)
    bits = options.float32_bits if dtype == jnp.float32 else None
    return array if bits is None else _rounded(jnp.finfo(dtype).nexp, bits, array)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rounded(exponent, mantissa, array):
    return jax.lax.reduce_precision(array, exponent, mantissa)


@_rounded.defjvp
def _rounded_jvp(exponent, mantissa, primals, tangents):
    """That of a cast, whose derivatives need no rounding."""
    return _rounded(exponent, mantissa, *primals), *tangents


def round_up(size: int, multiple: int) -> int:
    """The least multiple that is not below a size."""
    return -(-size // multiple) * multiple


def pad_width(array: jax.Array, multiple: int) -> jax.Array:
    """The array with zeros behind its last axis, up to a multiple."""
    more = round_up(array.shape[-1], multiple) - array.shape[-1]
    return jnp.pad(array, ((0, 0),) * (array.ndim - 1) + ((0, more),))
