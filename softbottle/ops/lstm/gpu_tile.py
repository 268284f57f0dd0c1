"""Tiles of the LSTM kernels: [B, U] values in registers, and what blocks share.

U are the 16 units of a tile. A value [B, U] is spread over the threads of the warpgroup
that applies the cell's formulas; every load from and store to global memory is of one.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from softbottle.ops.lstm import gpu, ptx
from softbottle.ops.lstm.gpu import PAD, TILE, UNITS
from softbottle.ops.lstm.ptx import Ref

# Barriers around every store would cost more than the stores; see ptx.signal.
LANES = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
# [B, U]: of every eight rows a warp holds two; a lane holds one unit.
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, UNITS), (2, UNITS), (1,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


class Shared(NamedTuple):
    """Shared memory of a block: a tile of weights, the operand, and the parts, twice.

    A warpgroup may be a step ahead of the one that adds its parts. Backward it is never
    two ahead: what it reads then needs all units of the step between.
    """

    weight: Ref
    operand: Ref
    parts: Ref


def shared_memory(plan: gpu.Plan, parts: tuple[int, ...]) -> Shared:
    """The types of it; `parts` are the sizes of a step's parts, but for the rows."""
    operand = (plan.groups, plan.rows, plan.share)
    return Shared(
        plgpu.SMEM((TILE, plan.width), jnp.bfloat16, transforms=ptx.TILED),
        plgpu.SMEM(operand, jnp.bfloat16, transforms=ptx.TILED),
        plgpu.SMEM((2, *parts, plan.rows + PAD), jnp.float32),
    )


def grouped(refs: Iterable[Ref], *kinds: Any) -> list[Any]:
    """A kernel's references, in their order, as named tuples of these kinds."""
    refs = iter(refs)
    return [kind(*itertools.islice(refs, len(kind._fields))) for kind in kinds]


def layer_of(index: jax.Array, counts: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Layer, and place within it, of the index-th when layers have `counts` each."""
    layer, inside, first = jnp.int32(0), index, 0
    for this, count in enumerate(counts):
        here = (index >= first) & (index < first + count)
        layer = jnp.where(here, this, layer)
        inside = jnp.where(here, index - first, inside)
        first += count
    return layer, inside


def await_held(group: jax.Array, held: Ref) -> None:
    """Wait until every warpgroup holds its weights, for others to take their place.

    Only the first warpgroup waits, which is the one that copies.
    """
    plgpu.commit_smem()
    plgpu.barrier_arrive(held)

    @pl.when(group == 0)
    def _():
        plgpu.barrier_wait(held)


def load(ref: Ref) -> jax.Array:
    """The tile [B, U] that `ref` stands for."""
    return ptx.load(ref, layout=_LAYOUT, optimized=False)


def store(ref: Ref, value_BU: jax.Array) -> None:
    """Write a tile."""
    if hasattr(plgpu, "store"):  # from jax 0.12, whose plain stores must be fast ones
        plgpu.store(ref, value_BU, optimized=False)
    else:
        ref[...] = value_BU


def unwritten(rows: int) -> jax.Array:
    """A tile of the bits that stand for "not written yet"."""
    bits_BU = plgpu.layout_cast(jnp.full((rows, UNITS), -1, jnp.int16), _LAYOUT)
    return lax.bitcast_convert_type(bits_BU, jnp.bfloat16)


def zeros(rows: int) -> jax.Array:
    """A tile of zeros, as they travel."""
    return plgpu.layout_cast(jnp.zeros((rows, UNITS), jnp.bfloat16), _LAYOUT)


def part_sum(parts: Ref, rows: int, tile: int) -> jax.Array:
    """Sum [B, U] of rows `tile` of 16 of all parts, in a fixed order."""
    at = pl.ds(tile * UNITS, UNITS)
    total_BU: Any = 0
    for part in range(parts.shape[0]):
        total_BU += load(parts.at[part, at, :rows].T)
    return total_BU


def spread(valid_SB: jax.Array) -> jax.Array:
    """Validity of each row, repeated over the units of a tile."""
    shape = (*valid_SB.shape, UNITS)
    return jnp.broadcast_to(valid_SB[:, :, None], shape).astype(jnp.float32)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + jnp.exp(-x))


def tanh(x: jax.Array) -> jax.Array:
    """The hyperbolic tangent, by one exponential."""
    return 1 - 2 / (1 + jnp.exp(2 * x))
