"""The forward kernel: every block runs all positions for one tile of units, or two.

Of a block's warpgroups, `plan.groups` multiply (`_multiply`) and one applies the cell's
formulas (`_cells`). At each position they meet twice:

    multiply:  wait for free[turn], read h and what the layer below fed, store the
               parts, arrive at part[turn];
    cells:     wait for part[turn], add the parts, hand h on, arrive at free[turn],

where `turn` alternates between the two halves of the parts. See gpu.py.

Axes: H units of a layer, U those of a block, Q the four gates, Z = S + 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from softbottle.ops.lstm import gpu, gpu_tile, ptx
from softbottle.ops.lstm.gpu import TILE, UNITS
from softbottle.ops.lstm.gpu_tile import load, sigmoid, store, tanh
from softbottle.ops.lstm.ptx import Ref


class _Inputs(NamedTuple):
    """References to the operands, in global memory; weights as in gpu.Stack."""

    z_SBQH: Ref
    bias_LQBH: Ref
    recurrent: Ref
    input: Ref
    mask_LBH: Ref
    hidden_LBH: Ref
    cell_LBH: Ref
    valid_SBU: Ref


class _Barriers(NamedTuple):
    """Barriers of a block; `part` and `free` are two, one per turn."""

    weight: Ref  # a tile of weights has been copied, gate by gate
    part: Ref  # every warpgroup has stored its part
    free: Ref  # the parts have been read
    held: Ref  # every warpgroup has its weights in registers


class _Block(NamedTuple):
    """What the stages of a block share; `trace` are references to the outputs."""

    plan: gpu.ForwardPlan
    inputs: _Inputs
    trace: gpu.Trace
    shared: gpu_tile.Shared
    barriers: _Barriers
    started: Ref  # counts the blocks that have filled their part of the trace
    group: jax.Array  # the warpgroup


class _Owned(NamedTuple):
    """What a block owns: of a layer, 16 units per tile."""

    layer: Any  # an int or a traced one
    tiles: list[Any]  # slices
    upper: bool  # whether there is a layer below, which it reads


class _Tile(NamedTuple):
    """What the warpgroup of the formulas keeps of a tile, and its state at first."""

    bias: list[jax.Array]  # [B, U] for each gate
    mask_BU: jax.Array
    state: tuple[jax.Array, jax.Array]  # h and c


def forward(
    z_SBQH: jax.Array,
    bias_LQH: jax.Array,
    stack: gpu.Stack,
    hidden_LBH: jax.Array,
    cell_LBH: jax.Array,
    valid_SB: jax.Array,
    live: int,
) -> gpu.Trace:
    """Run the positions; z is what the inputs give the lowest layer's four gates.

    The first `live` rows of the batch are no padding.
    """
    steps, rows = valid_SB.shape
    plan = gpu.ForwardPlan(steps, rows, live, stack.units)

    def lstm_forward(*refs):
        kinds = (_Inputs, gpu.Trace, gpu_tile.Shared, _Barriers)
        started = pl.get_global(plgpu.SemaphoreType.REGULAR)
        group = lax.axis_index("group")
        _run(_Block(plan, *gpu_tile.grouped(refs, *kinds), started, group))

    call = plgpu.kernel(
        lstm_forward,
        out_type=list(_outputs(plan)),
        grid=(sum(plan.blocks),),
        grid_names=("block",),
        num_threads=plan.groups + 1,
        thread_name="group",
        scratch_types=[
            *gpu_tile.shared_memory(plan, (plan.groups, plan.tiles * TILE)),
            *_barriers(plan),
        ],
        compiler_params=gpu_tile.LANES,
    )
    inputs = _Inputs(
        z_SBQH,
        jnp.broadcast_to(bias_LQH[:, :, None], (plan.layers, 4, rows, plan.width)),
        stack.recurrent,
        stack.input,
        stack.mask_LBH,
        hidden_LBH.astype(jnp.float32),
        cell_LBH,
        gpu_tile.spread(valid_SB),
    )
    return gpu.Trace(*call(*inputs))


def _outputs(plan):
    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct((plan.layers, *sizes, plan.width), dtype)

    return gpu.Trace(
        hidden_LZBH=shape(jnp.bfloat16, plan.steps + 1, plan.rows),
        fed_LSBH=shape(jnp.bfloat16, plan.steps, plan.rows),
        cell_LZBH=shape(jnp.float32, plan.steps + 1, plan.rows),
        gates_LSBQH=shape(jnp.bfloat16, plan.steps, plan.rows, 4),
    )


def _barriers(plan):
    return _Barriers(
        weight=plgpu.Barrier(num_arrivals=4),
        part=plgpu.Barrier(num_arrivals=plan.groups, num_barriers=2),
        free=plgpu.Barrier(num_barriers=2),
        held=plgpu.Barrier(num_arrivals=plan.groups),
    )


def _run(block):
    """Give the block its layer and its units, and run them."""
    plan = block.plan
    layer, index = gpu_tile.layer_of(lax.axis_index("block"), plan.blocks)
    for this in range(plan.layers):
        if plan.units[this] < plan.width:

            @pl.when((layer == this) & (block.group == plan.groups))
            def _(this=this):
                _zero_columns(block, this, index)

    @pl.when(layer == 0)
    def _():
        _run_tiles(block, 0, index * plan.tiles * UNITS, plan.tiles, upper=False)

    if plan.layers > 1:

        @pl.when(layer > 0)
        def _():
            _run_tiles(block, layer, index * UNITS, 1, upper=True)


def _zero_columns(block, layer, index):
    """Zeros where the layer has no unit; block `index` of it takes a part."""
    plan, trace = block.plan, block.trace
    zeros_BU = gpu_tile.zeros(plan.rows)
    first = plan.units[layer] // UNITS

    @pl.loop(0, plan.width // UNITS - first)
    def _(column):
        @pl.when(lax.rem(column, plan.blocks[layer]) == index)
        def _():
            units = pl.ds((first + column) * UNITS, UNITS)
            store(trace.hidden_LZBH.at[layer, 0, :, units], zeros_BU)

            @pl.loop(0, plan.steps)
            def _(step):
                store(trace.hidden_LZBH.at[layer, step + 1, :, units], zeros_BU)
                store(trace.fed_LSBH.at[layer, step, :, units], zeros_BU)


def _run_tiles(block, layer, first_unit, count, upper):
    """Divide the work on `count` tiles among the warpgroups."""
    starts = [first_unit + tile * UNITS for tile in range(count)]
    owned = _Owned(layer, [pl.ds(start, UNITS) for start in starts], upper)

    @pl.when(block.group < block.plan.groups)
    def _():
        _multiply(block, owned)

    @pl.when(block.group == block.plan.groups)
    def _():
        _cells(block, owned)


def _multiply(block, owned):
    """This warpgroup's share of every product, position by position."""
    plan, trace, layer = block.plan, block.trace, owned.layer
    held = _hold_weights(block, owned)
    ptx.wait_for_all(block.started, sum(plan.blocks))
    columns = pl.ds(block.group * plan.share, plan.share)

    @pl.loop(0, plan.steps)
    def _(step):
        turn = lax.rem(step, 2)
        plgpu.barrier_wait(block.barriers.free.at[turn])
        ptx.multiply_share(
            trace.hidden_LZBH.at[layer, step, :, columns],
            trace.fed_LSBH.at[layer - 1, step, :, columns] if owned.upper else None,
            held,
            block.shared.weight,
            block.shared.operand.at[block.group],
            block.shared.parts.at[turn, block.group],
            plan.live,
        )
        plgpu.barrier_arrive(block.barriers.part.at[turn])


def _hold_weights(block, owned):
    """Take the first tile's weights into registers.

    Those of the second tile, or those that read the layer below, stay in shared memory.
    """
    inputs, layer = block.inputs, owned.layer
    _load_tile(block, inputs.recurrent.at[layer], owned.tiles[0])
    held = ptx.hold(block.shared.weight, block.plan.share)
    if owned.upper or len(owned.tiles) > 1:
        gpu_tile.await_held(block.group, block.barriers.held)
        second = (
            inputs.input.at[layer - 1] if owned.upper else inputs.recurrent.at[layer]
        )
        _load_tile(block, second, owned.tiles[-1])
    return held


def _load_tile(block, weight_ref, units):
    """Copy 16 units' weights of every gate to shared memory."""

    @pl.when(block.group == 0)
    def _():
        for q in range(4):
            target = block.shared.weight.at[pl.ds(q * UNITS, UNITS)]
            plgpu.copy_gmem_to_smem(
                weight_ref.at[q, units], target, block.barriers.weight
            )

    plgpu.barrier_wait(block.barriers.weight)


def _cells(block, owned):
    """The cell's formulas, position by position."""
    tiles = [_start_tile(block, owned.layer, units) for units in owned.tiles]
    ptx.signal(block.started)
    for turn in range(2):
        plgpu.barrier_arrive(block.barriers.free.at[turn])

    def step(index, states):
        return _step(block, owned, tiles, index, states)

    lax.fori_loop(0, block.plan.steps, step, [tile.state for tile in tiles])


def _start_tile(block, layer, units):
    """Mark the tile's outputs as unwritten, and load what does not change."""
    plan, inputs, trace = block.plan, block.inputs, block.trace

    @pl.loop(0, plan.steps)
    def _(index):
        later = trace.hidden_LZBH.at[layer, index + 1, :, units]
        store(later, gpu_tile.unwritten(plan.rows))
        fed = trace.fed_LSBH.at[layer, index, :, units]
        store(fed, gpu_tile.unwritten(plan.rows))

    # Converted here, for a NaN to have the bits that this conversion gives.
    hidden_BU = load(inputs.hidden_LBH.at[layer, :, units]).astype(jnp.bfloat16)
    cell_BU = load(inputs.cell_LBH.at[layer, :, units])
    store(trace.hidden_LZBH.at[layer, 0, :, units], hidden_BU)
    store(trace.cell_LZBH.at[layer, 0, :, units], cell_BU)
    mask_BU = load(inputs.mask_LBH.at[layer, :, units])
    bias = [load(inputs.bias_LQBH.at[layer, q, :, units]) for q in range(4)]
    return _Tile(bias, mask_BU, (hidden_BU, cell_BU))


def _step(block, owned, tiles, index, states):
    """One position: the states of the tiles after it."""
    barriers = block.barriers
    valid_BU = load(block.inputs.valid_SBU.at[index])
    z = _known_summands(block, owned, tiles, index)
    turn = lax.rem(index, 2)
    plgpu.barrier_wait(barriers.part.at[turn])
    after, gates = [], []
    for number, units in enumerate(owned.tiles):
        parts = [
            gpu_tile.part_sum(
                block.shared.parts.at[turn], block.plan.rows, 4 * number + q
            )
            for q in range(4)
        ]
        state, gate = _cell(map(jnp.add, z[number], parts), states[number], valid_BU)
        # First what other blocks wait for.
        _publish(block, owned.layer, index, units, state[0], tiles[number].mask_BU)
        after.append(state)
        gates.append(gate)
    plgpu.barrier_arrive(barriers.free.at[turn])
    for units, (_, cell_BU), gate in zip(owned.tiles, after, gates, strict=True):
        _save_gates(block, owned.layer, index, units, cell_BU, gate)
    return after


def _known_summands(block, owned, tiles, index):
    """The pre-activations, for each tile and gate, without the products of this step.

    Bias and, in the lowest layer, what the inputs give.
    """
    biases = [tile.bias for tile in tiles]
    if owned.upper:
        return biases
    return [
        [bias[q] + load(block.inputs.z_SBQH.at[index, :, q, units]) for q in range(4)]
        for bias, units in zip(biases, owned.tiles, strict=True)
    ]


def _cell(z, state, valid_BU):
    """(h, c) and the gates after a position; padding leaves h and c alone."""
    hidden_BU, cell_BU = state
    i, f, g, o = z
    i, f, g, o = sigmoid(i), sigmoid(f), tanh(g), sigmoid(o)
    next_BU = f * cell_BU + i * g
    out_BU = (o * tanh(next_BU)).astype(jnp.bfloat16)
    hidden_BU = jnp.where(valid_BU > 0, out_BU, hidden_BU)
    cell_BU = jnp.where(valid_BU > 0, next_BU, cell_BU)
    return (hidden_BU, cell_BU), (i, f, g, o)


def _publish(block, layer, index, units, hidden_BU, mask_BU):
    """Store h for the layer itself and, masked, for the one above."""
    store(block.trace.hidden_LZBH.at[layer, index + 1, :, units], hidden_BU)
    fed_BU = (hidden_BU.astype(jnp.float32) * mask_BU).astype(jnp.bfloat16)
    store(block.trace.fed_LSBH.at[layer, index, :, units], fed_BU)


def _save_gates(block, layer, index, units, cell_BU, gates):
    """Store what the backward pass reads besides h."""
    store(block.trace.cell_LZBH.at[layer, index + 1, :, units], cell_BU)
    for q in range(4):
        gate_BU = gates[q].astype(jnp.bfloat16)
        store(block.trace.gates_LSBQH.at[layer, index, :, q, units], gate_BU)
