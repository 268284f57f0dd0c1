"""The gradient of table and bias, summed over chunks of tokens: exponential.py's third.

    d table = E' @ (scale context), and the labels' rows put right

Axes: N classes of words; P words of one, padded; M the width, padded; R rows of a
chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, rows, shards
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options, sum_dtype
from softbottle.ops.mixture.products import pad_width, product, round_up, seen


class Sums(NamedTuple):
    """The gradients of table and bias so far, by class.

    The bias's is a column of the table's where the padded width has room for it or is
    so large that a column is nothing. Else (1,024 would become 1,056, a sixth slower)
    it is an array and a product of its own.
    """

    table_NPM: jax.Array
    bias_NP: jax.Array | None


def zeros(
    multiple: int, context_TKE: jax.Array, bias_NP: jax.Array, table_VE: jax.Array
) -> Sums:
    """No gradient yet.

    Args:
        multiple: of the padded width.
        context_TKE: whose chunks will be added.
        bias_NP: the padded bias, for its shape.
        table_VE: the table.
    """
    width = table_VE.shape[1]
    wide = sum_dtype(context_TKE, table_VE)
    rides = multiple == 1 or width % 128 != 0 or width >= 4096
    columns = round_up(width + rides, multiple)
    nothing = Sums(
        jnp.zeros((*bias_NP.shape, columns), wide),
        None if rides else jnp.zeros(bias_NP.shape, wide),
    )
    axes = jax.typeof(context_TKE).manual_axis_type.varying
    return shards.vary_over(axes, nothing)[0]


def add_products(
    sums: Sums,
    e_NRP: jax.Array,
    cast_NCKE: jax.Array,
    scale_NCK: jax.Array,
    options: Options,
) -> Sums:
    """The sums with E' @ scaled contexts."""
    wide, width = sums.table_NPM.dtype, cast_NCKE.shape[3]
    # A column more, which gives the bias its gradient.
    ones_NCK1 = jnp.ones_like(cast_NCKE[..., :1])
    context_NCKM = jnp.concatenate([cast_NCKE, ones_NCK1], axis=-1)
    context_NCKM = pad_width(context_NCKM, max(sums.table_NPM.shape[2], width + 1))
    scaled_NCKM = scale_NCK[..., None] * context_NCKM.astype(wide)
    flat_NRM = scaled_NCKM.reshape(len(e_NRP), -1, scaled_NCKM.shape[3])
    more = e_NRP.shape[1] - flat_NRM.shape[1]
    scaled_NRM = jnp.pad(flat_NRM, ((0, 0), (0, more), (0, 0)))
    scaled_NRM = seen(scaled_NRM, e_NRP.dtype, options)
    if sums.bias_NP is None:
        return Sums(sums.table_NPM + product(e_NRP, scaled_NRM, (1, 1), wide), None)
    bias_NP1 = product(e_NRP, scaled_NRM[:, :, width:], (1, 1), wide)
    return Sums(
        sums.table_NPM + product(e_NRP, scaled_NRM[:, :, :width], (1, 1), wide),
        sums.bias_NP + bias_NP1[:, :, 0],
    )


def add_labels(
    sums: Sums,
    own_CKE: jax.Array,
    factors: tuple[jax.Array, jax.Array, jax.Array],
    label_C: jax.Array,
    owned_C: jax.Array,
    options: Options,
) -> Sums:
    """The labels' part of the third product put right."""
    wide, dtype = sums.table_NPM.dtype, own_CKE.dtype
    scale_CK1, stored_CK1, delta_CK1 = (factor[:, :, None] for factor in factors)

    def update(context_CKX):
        seen_CKX = seen(scale_CK1 * context_CKX, dtype, options).astype(wide)
        return jnp.sum(delta_CK1 * context_CKX - stored_CK1 * seen_CKX, axis=1)

    update_CE = update(own_CKE.astype(wide))
    update_C1 = update(jnp.ones_like(scale_CK1))
    if sums.bias_NP is None:
        update_CM = jnp.concatenate([update_CE, update_C1], axis=1)
        updates = [pad_width(update_CM, sums.table_NPM.shape[2])]
    else:
        updates = [update_CE, update_C1[:, 0]]
    # The rows of all classes below one another.
    count, words, _ = sums.table_NPM.shape
    row_C = label_C % count * words + label_C // count
    given = [array for array in sums if array is not None]
    flat = [array.reshape(count * words, *array.shape[2:]) for array in given]
    added = rows.add(flat, row_C, owned_C, updates, dtype)
    shaped = [new.reshape(old.shape) for new, old in zip(added, given, strict=True)]
    return Sums(shaped[0], None if sums.bias_NP is None else shaped[1])


def gradient(sums: Sums, vocabulary: Vocabulary) -> Vocabulary:
    """The gradients of table and bias, without padding and in their dtypes."""
    table_VE, bias_V = vocabulary
    words, width = table_VE.shape
    table_NPM, bias_NP = sums
    if len(table_NPM) > 1 or table_VE.dtype != table_NPM.dtype:
        # Or XLA would copy the sums to cut them, and once more to order or round them.
        table_NPM, bias_NP = jax.lax.optimization_barrier(sums)
    if bias_NP is None:
        bias_NP = table_NPM[:, :, width]
    return Vocabulary(
        classes.unsplit(table_NPM[:, :, :width], words).astype(table_VE.dtype),
        classes.unsplit(bias_NP, words).astype(bias_V.dtype),
    )
