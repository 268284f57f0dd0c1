"""Rows of the table by label, and sums by label in a fixed order.

A gradient by the rows that labels chose adds up tokens with equal labels. XLA's scatter
of equal indices is atomic on GPUs, and not the same twice; beside a bfloat16 table it
would also add in bfloat16. Here equal labels are added up first, in float32 or better,
and each row is written once.

Axes: R places of rows; B tokens of a block.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import shards
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options
from softbottle.ops.mixture.products import seen, two_terms

SCATTER_TOKENS = 1024


def take(
    vocabulary: Vocabulary,
    rows_T: jax.Array,
    dtype: jnp.dtype,
    wide: jnp.dtype,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """The rows' entries of table and bias, [T, E] and [T].

    Args:
        vocabulary: table and bias.
        rows_T: which of their rows.
        dtype: of the products whose view of the table's entries is given.
        wide: of the result, and of the sums in its gradient.
        options: of the products.
    """
    vocabulary, rows_T = shards.varying_together(vocabulary, rows_T)
    return _take(dtype, wide, options, vocabulary, rows_T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _take(dtype, wide, options, vocabulary, rows_T):
    # A constant of a jitted function comes as NumPy's, which no tracer indexes.
    table_VE, bias_V = map(jnp.asarray, vocabulary)
    row_TE = seen(table_VE[rows_T], dtype, options)
    return row_TE.astype(wide), bias_V[rows_T].astype(wide)


def _take_forward(dtype, wide, options, vocabulary, rows_T):
    return _take(dtype, wide, options, vocabulary, rows_T), (vocabulary, rows_T)


def _take_backward(dtype, wide, options, saved, bars):
    del options
    vocabulary, rows_T = saved
    nothing = [jnp.zeros_like(array, wide) for array in vocabulary]
    everywhere_T = rows_T >= 0
    sums = add(nothing, rows_T, everywhere_T, bars, dtype)
    return Vocabulary(
        *(
            total.astype(array.dtype)
            for total, array in zip(sums, vocabulary, strict=True)
        )
    ), None


_take.defvjp(_take_forward, _take_backward)


def lookup(table_VE: jax.Array, rows_T: jax.Array) -> jax.Array:
    """Rows of a table, [T, E], whose gradient is the same bits twice on a GPU, too.

    Args:
        table_VE: as wide as the sums in its gradient shall be.
        rows_T: which of its rows.
    """
    return _lookup(*shards.varying_together(table_VE, rows_T))


@jax.custom_vjp
def _lookup(table_VE, rows_T):
    return jnp.asarray(table_VE)[rows_T]


def _lookup_forward(table_VE, rows_T):
    return _lookup(table_VE, rows_T), (table_VE, rows_T)


def _lookup_backward(saved, bar_TE):
    table_VE, rows_T = saved
    inputs = (jnp.zeros_like(table_VE), rows_T, bar_TE)
    return jax.lax.platform_dependent(*inputs, cuda=_ordered, default=_scattered), None


def _ordered(nothing_VE, rows_T, bar_TE):
    return add([nothing_VE], rows_T, rows_T >= 0, [bar_TE], bar_TE.dtype)[0]


def _scattered(nothing_VE, rows_T, bar_TE):
    """As XLA does it, which but on GPUs has an order."""
    return nothing_VE.at[rows_T].add(bar_TE)


_lookup.defvjp(_lookup_forward, _lookup_backward)


def add(
    totals: Sequence[jax.Array],
    row_C: jax.Array,
    owned_C: jax.Array,
    updates: Sequence[jax.Array],
    dtype: jnp.dtype,
) -> list[jax.Array]:
    """total[row[c]] += update[c] for each pair, equal rows added up in a fixed order.

    Within a block of tokens those with equal rows are summed by a product with the
    matrix of their equality, and the first of them writes; so no two writes meet.

    Args:
        totals: arrays of R rows.
        row_C: where a token's update goes.
        owned_C: whether it does.
        updates: for each total, an entry per token.
        dtype: the products' own; beside bfloat16 an update is two terms of it.
    """
    totals = list(totals)
    for start in range(0, row_C.size, SCATTER_TOKENS):
        block = slice(start, start + SCATTER_TOKENS)
        row_B, owned_B = row_C[block], owned_C[block]
        place_B = jnp.arange(row_B.size)
        equal_BB = (row_B[:, None] == row_B[None]) & owned_B[None]
        earlier_BB = equal_BB & (place_B[None] < place_B[:, None])
        writes_B = owned_B & ~jnp.any(earlier_BB, axis=1)
        beyond_B = len(totals[0]) + place_B
        # Or XLA would compute it again for every element that is written.
        target_B = jax.lax.optimization_barrier(jnp.where(writes_B, row_B, beyond_B))
        totals = [
            total.at[target_B].add(
                _sum_equal(equal_BB, update[block], dtype),
                mode="drop",
                unique_indices=True,
            )
            for total, update in zip(totals, updates, strict=True)
        ]
    return totals


def _sum_equal(equal_BB, update_B, dtype):
    """equal @ update; beside bfloat16 products as two terms of it, 16 bits in all."""
    if dtype != jnp.bfloat16:
        equal_BB = equal_BB.astype(update_B.dtype)
        return jnp.matmul(equal_BB, update_B, precision=jax.lax.Precision.HIGHEST)
    equal_BB = equal_BB.astype(dtype)
    return sum(
        jnp.matmul(equal_BB, term_B, preferred_element_type=update_B.dtype)
        for term_B in two_terms(update_B, dtype)
    )
