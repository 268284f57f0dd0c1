"""The gradient of table and bias, summed over chunks of tokens: exponential.py's third.

    d table = E' @ (scale context), and the labels' rows put right

Axes: P words, padded; M the width, padded; R rows of a chunk; B tokens of a block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, shards
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import sum_dtype
from softbottle.ops.mixture.products import pad_width, product, round_up

SCATTER_TOKENS = 1024


class Sums(NamedTuple):
    """The gradients of table and bias so far.

    The bias's is a column of the table's where the padded width has room for it or is
    so large that a column is nothing. Else (1,024 would become 1,056, a sixth slower)
    it is an array and a product of its own.
    """

    table_PM: jax.Array
    bias_P: jax.Array | None


def zeros(
    multiple: int, context_TKE: jax.Array, words: int, table_VE: jax.Array
) -> Sums:
    """No gradient yet, of so many padded words.

    Args:
        multiple: of the padded width.
        context_TKE: whose chunks will be added.
        words: P.
        table_VE: the table.
    """
    width = table_VE.shape[1]
    wide = sum_dtype(context_TKE, table_VE)
    rides = multiple == 1 or width % 128 != 0 or width >= 4096
    columns = round_up(width + rides, multiple)
    nothing = Sums(
        jnp.zeros((words, columns), wide), None if rides else jnp.zeros(words, wide)
    )
    axes = jax.typeof(context_TKE).manual_axis_type.varying
    return shards.vary_over(axes, nothing)[0]


def add_products(
    sums: Sequence[Sums],
    es: Sequence[jax.Array],
    by_class: Sequence[jax.Array],
    scales: Sequence[jax.Array],
) -> tuple[Sums, ...]:
    """The third product of each class."""
    return tuple(
        _add_product(own, e_RP, _scaled(own, cast_CKE, scale_CK)[1], cast_CKE.shape[2])
        for own, e_RP, cast_CKE, scale_CK in zip(
            sums, es, by_class, scales, strict=True
        )
    )


def add_labels(
    sums: Sequence[Sums],
    own_CKE: jax.Array,
    factors: tuple[jax.Array, jax.Array, jax.Array],
    label_C: jax.Array,
    owned_C: jax.Array,
) -> tuple[Sums, ...]:
    """The labels' part of the third product put right."""
    scale_CK, stored_CK, delta_CK = factors
    context_CKM, scaled_CKM = _scaled(sums[0], own_CKE, scale_CK)
    update_CKM = delta_CK[:, :, None] * context_CKM
    update_CKM -= stored_CK[:, :, None] * scaled_CKM.astype(update_CKM.dtype)
    update_CM = jnp.sum(update_CKM, axis=1)
    width, dtype = own_CKE.shape[2], own_CKE.dtype
    return _add_rows(sums, label_C, owned_C, update_CM, width, dtype)


def _scaled(sums, cast_CKE, scale_CK):
    """The contexts with what gives the bias its gradient, plain and scaled."""
    wide = scale_CK.dtype
    columns = max(sums.table_PM.shape[1], cast_CKE.shape[2] + 1)
    ones_CK1 = jnp.ones((*cast_CKE.shape[:2], 1), wide)
    context_CKM = jnp.concatenate([cast_CKE.astype(wide), ones_CK1], axis=-1)
    context_CKM = pad_width(context_CKM, columns)
    return context_CKM, (scale_CK[:, :, None] * context_CKM).astype(cast_CKE.dtype)


def _add_product(sums, e_RP, scaled_CKM, width):
    """The sums with E' @ scaled."""
    wide = sums.table_PM.dtype
    rows, columns = e_RP.shape[0], scaled_CKM.shape[2]
    flat_RM = scaled_CKM.reshape(-1, columns)
    scaled_RM = jnp.pad(flat_RM, ((0, rows - len(flat_RM)), (0, 0)))
    if sums.bias_P is None:
        return Sums(sums.table_PM + product(e_RP, scaled_RM, (0, 0), wide), None)
    return Sums(
        sums.table_PM + product(e_RP, scaled_RM[:, :width], (0, 0), wide),
        sums.bias_P + product(e_RP, scaled_RM[:, width:], (0, 0), wide)[:, 0],
    )


def _add_rows(sums, label_C, owned_C, update_CM, width, dtype):
    """sum[label[c]] += update[c], equal labels added up in a fixed order.

    Within a block of tokens those with equal labels are summed by a product with the
    matrix of their equality, and the first of them writes; so no two writes meet.
    """
    rides = sums[0].bias_P is None
    updates = (update_CM,) if rides else (update_CM[:, :width], update_CM[:, width])
    for start in range(0, label_C.size, SCATTER_TOKENS):
        block = slice(start, start + SCATTER_TOKENS)
        label_B, owned_B = label_C[block], owned_C[block]
        place_B = jnp.arange(label_B.size)
        equal_BB = (label_B[:, None] == label_B[None]) & owned_B[None]
        earlier_BB = equal_BB & (place_B[None] < place_B[:, None])
        writes_B = owned_B & ~jnp.any(earlier_BB, axis=1)
        each = [_sum_equal(equal_BB, update[block], dtype) for update in updates]
        members = classes.memberships(label_B, len(sums))
        sums = [
            _write(own, each, writes_B & in_class_B1[:, 0], label_B // len(sums))
            for own, in_class_B1 in zip(sums, members, strict=True)
        ]
    return tuple(sums)


def _write(sums, updates, writes_B, row_B):
    """The sums with rows added to where `writes_B` says so."""
    beyond_B = len(sums.table_PM) + jnp.arange(row_B.size)
    # Or XLA would compute it again for every element that is written.
    target_B = jax.lax.optimization_barrier(jnp.where(writes_B, row_B, beyond_B))
    totals = [array for array in sums if array is not None]
    added = [
        total.at[target_B].add(update, mode="drop", unique_indices=True)
        for total, update in zip(totals, updates, strict=True)
    ]
    return Sums(added[0], added[1] if len(added) > 1 else None)


def _sum_equal(equal_BB, update_B, dtype):
    """equal @ update; beside bfloat16 products as two terms of it, 16 bits in all."""
    if dtype != jnp.bfloat16:
        equal_BB = equal_BB.astype(update_B.dtype)
        return jnp.matmul(equal_BB, update_B, precision=jax.lax.Precision.HIGHEST)
    equal_BB = equal_BB.astype(dtype)
    high_B = update_B.astype(dtype)
    low_B = (update_B - high_B.astype(update_B.dtype)).astype(dtype)
    return sum(
        jnp.matmul(equal_BB, term_B, preferred_element_type=update_B.dtype)
        for term_B in (high_B, low_B)
    )


def gradient(
    sums: Sequence[Sums], rows: Sequence[int], vocabulary: Vocabulary
) -> Vocabulary:
    """The gradients of table and bias, without padding and in their dtypes."""
    table_VE, bias_V = vocabulary
    width = table_VE.shape[1]
    tables, biases = [], []
    if len(sums) > 1 or table_VE.dtype != sums[0].table_PM.dtype:
        # Or XLA would copy each sum to cut it, and once more to join or to round them.
        sums = jax.lax.optimization_barrier(sums)
    for own, count in zip(sums, rows, strict=True):
        bias_P = own.table_PM[:, width] if own.bias_P is None else own.bias_P
        tables.append(own.table_PM[:count, :width].astype(table_VE.dtype))
        biases.append(bias_P[:count].astype(bias_V.dtype))
    return Vocabulary(classes.joined(tables), classes.joined(biases))
