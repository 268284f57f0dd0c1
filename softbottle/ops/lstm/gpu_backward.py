"""The backward kernel: a cluster of four blocks owns 64 units, a block one gate.

Of a block's warpgroups, `plan.groups` multiply the gate's dz (`_multiply`) and send the
sums to all four blocks; one more adds what arrives from the four gates for its own 16
units and applies the cell's formulas (`_cells`). The sums of a step go to one of two
inboxes, which the steps use in turn; a counter of arrived bytes says when an inbox is
full. Steps count from the last position to the first. See gpu.py.

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
from softbottle.ops.lstm.gpu_tile import load, store, tanh
from softbottle.ops.lstm.ptx import Ref


class _Inputs(NamedTuple):
    """References to the operands, in global memory; weights as in gpu.Stack."""

    gates_LSBQH: Ref
    cell_LZBH: Ref
    output_bar_SBH: Ref
    hidden_bar_LBH: Ref
    cell_bar_LBH: Ref
    mask_LBH: Ref
    valid_SBU: Ref
    recurrent: Ref
    input: Ref


class _Signals(NamedTuple):
    """What the warpgroups of a block, or of a cluster, wait on."""

    arrived: Ref  # two counters of bytes, one per inbox
    weight: Ref  # a tile of weights has been copied
    held: Ref  # every warpgroup has its weights in registers


class _Block(NamedTuple):
    """What the stages of a block share; `bars` are references to the outputs."""

    plan: gpu.BackwardPlan
    inputs: _Inputs
    bars: gpu.Bars
    shared: gpu_tile.Shared
    signals: _Signals
    started: Ref  # counts the blocks that have filled their part of the gradients
    group: jax.Array  # the warpgroup
    gate: jax.Array  # the block's place in its cluster, and the gate it multiplies


class _Owned(NamedTuple):
    """What the formulas of a block are for: 16 units of a layer."""

    layer: Any  # an int or a traced one
    units: Any  # a slice
    lower: bool  # whether there is a layer above, whose gradient comes down
    mask_BU: jax.Array


class _Inbox(NamedTuple):
    """Where summands of one kind arrive, and what counts the bytes of both kinds."""

    parts: Ref
    count: Ref


def backward(
    stack: gpu.Stack,
    trace: gpu.Trace,
    output_bar_SBH: jax.Array,
    hidden_bar_LBH: jax.Array,
    cell_bar_LBH: jax.Array,
    valid_SB: jax.Array,
    live: int,
) -> gpu.Bars:
    """Gradients of the pre-activations and of the carries.

    Layers of equal size; what `forward` left of them may have more columns. The first
    `live` rows of the batch are no padding.
    """
    steps, rows = valid_SB.shape
    plan = gpu.BackwardPlan(steps, rows, live, stack.units)

    def lstm_backward(*refs):
        kinds = (_Inputs, gpu.Bars, gpu_tile.Shared, _Signals)
        started = pl.get_global(plgpu.SemaphoreType.REGULAR)
        group, gate = lax.axis_index("group"), lax.axis_index("gate")
        _run(_Block(plan, *gpu_tile.grouped(refs, *kinds), started, group, gate))

    call = plgpu.kernel(
        lstm_backward,
        out_type=list(_outputs(plan)),
        grid=(sum(plan.clusters),),
        grid_names=("cluster",),
        cluster=(4,),
        cluster_names=("gate",),
        num_threads=plan.groups + 1,
        thread_name="group",
        scratch_types=[
            *gpu_tile.shared_memory(plan, (plan.kinds, 4 * plan.groups, UNITS)),
            *_signals(plan),
        ],
        compiler_params=gpu_tile.LANES,
    )
    inputs = _Inputs(
        trace.gates_LSBQH,
        trace.cell_LZBH,
        output_bar_SBH,
        hidden_bar_LBH,
        cell_bar_LBH,
        stack.mask_LBH,
        gpu_tile.spread(valid_SB),
        stack.recurrent,
        stack.input,
    )
    return gpu.Bars(*call(*inputs))


def _outputs(plan):
    sizes = (plan.layers, plan.steps, plan.rows, 4, plan.width)
    carry = jax.ShapeDtypeStruct((plan.layers, plan.rows, plan.width), jnp.float32)
    return gpu.Bars(jax.ShapeDtypeStruct(sizes, jnp.bfloat16), carry, carry)


def _signals(plan):
    return _Signals(
        arrived=plgpu.SMEM((4,), jnp.int32),
        weight=plgpu.Barrier(),
        held=plgpu.Barrier(num_arrivals=plan.groups),
    )


def _run(block):
    """Give the block its layer and its cluster, and run them."""
    plan = block.plan
    layer, cluster = gpu_tile.layer_of(lax.axis_index("cluster"), plan.clusters)

    @pl.when(layer == plan.layers - 1)
    def _():
        _run_cluster(block, plan.layers - 1, cluster, lower=False)

    if plan.layers > 1:

        @pl.when(layer < plan.layers - 1)
        def _():
            _run_cluster(block, layer, cluster, lower=True)


def _run_cluster(block, layer, cluster, lower):
    """Divide the block's work among its warpgroups."""

    @pl.when(block.group < block.plan.groups)
    def _():
        _multiply(block, layer, cluster, lower)

    @pl.when(block.group == block.plan.groups)
    def _():
        units = pl.ds(cluster * TILE + block.gate * UNITS, UNITS)
        mask_BU = load(block.inputs.mask_LBH.at[layer, :, units])
        _cells(block, _Owned(layer, units, lower, mask_BU))


def _inbox(block, step, kind):
    turn = lax.rem(step, 2)
    count = block.signals.arrived.at[pl.ds(2 * turn, 2)]
    return _Inbox(block.shared.parts.at[turn, kind], count)


def _multiply(block, layer, cluster, lower):
    """This warpgroup's share of every product, sent to the blocks of the cluster.

    After a position, dz of the layer gives the next step's summands of kind 0, and dz
    of the layer above this step's of kind 1. Where one is missing, zeros are sent.
    """
    plan = block.plan
    held = _hold_weights(block, layer, cluster, lower)
    ptx.wait_for_all(block.started, 4 * sum(plan.clusters))
    ptx.send_nothing(*_inbox(block, 0, 0), plan.groups, plan.rows)

    @pl.loop(0, plan.steps)
    def _(back):
        if lower:
            _send(block, back, 1, layer + 1, plan.steps - 1 - back, [])
        _send(block, back + 1, 0, layer, plan.steps - 1 - back, held)

    if lower:
        ptx.send_nothing(*_inbox(block, plan.steps, 1), plan.groups, plan.rows)


def _hold_weights(block, layer, cluster, lower):
    """Take the recurrent weights into registers.

    Those of the layer above stay in shared memory.
    """
    _load_tile(block, block.inputs.recurrent.at[layer], cluster)
    held = ptx.hold(block.shared.weight, block.plan.share)
    if lower:
        gpu_tile.await_held(block.group, block.signals.held)
        _load_tile(block, block.inputs.input.at[layer], cluster)
    return held


def _load_tile(block, weight_ref, cluster):
    """Copy the gate's weights of the cluster's 64 units to shared memory."""

    @pl.when(block.group == 0)
    def _():
        of_cluster = pl.ds(cluster * TILE, TILE)
        plgpu.copy_gmem_to_smem(
            weight_ref.at[of_cluster, block.gate],
            block.shared.weight,
            block.signals.weight,
        )

    plgpu.barrier_wait(block.signals.weight)


def _send(block, step, kind, source_layer, position, held):
    """Send the product of a layer's dz at a position to the inboxes of a step."""
    columns = pl.ds(block.group * block.plan.share, block.plan.share)
    ptx.multiply_share(
        block.bars.z_bar_LSBQH.at[source_layer, position, :, block.gate, columns],
        None,
        held,
        block.shared.weight,
        block.shared.operand.at[block.group],
        _inbox(block, step, kind).parts,
        block.plan.live,
        _inbox(block, step, kind).count,
    )


def _cells(block, owned):
    """The cell's formulas, from the last position to the first."""
    plan, inputs, bars = block.plan, block.inputs, block.bars
    layer, units = owned.layer, owned.units

    @pl.loop(0, plan.steps)
    def _(index):
        for q in range(4):
            z_bar = bars.z_bar_LSBQH.at[layer, index, :, q, units]
            store(z_bar, gpu_tile.unwritten(plan.rows))

    ptx.start_counting(block.signals.arrived)
    ptx.signal(block.started)
    last = (
        load(inputs.hidden_bar_LBH.at[layer, :, units]),
        load(inputs.cell_bar_LBH.at[layer, :, units]),
    )

    def step(back, state):
        return _step(block, owned, back, *state)

    kept_bar_BU, cell_bar_BU = lax.fori_loop(0, plan.steps, step, last)
    hidden_bar_BU = _add_parts(block, owned, plan.steps, kept_bar_BU)
    store(bars.hidden_bar_LBH.at[layer, :, units], hidden_bar_BU)
    store(bars.cell_bar_LBH.at[layer, :, units], cell_bar_BU)


def _step(block, owned, back, kept_bar_BU, cell_bar_BU):
    """One position: (what padding keeps of h's gradient, the cell's) before it."""
    inputs, layer, units = block.inputs, owned.layer, owned.units
    index = block.plan.steps - 1 - back
    valid_BU = load(inputs.valid_SBU.at[index])
    if not owned.lower:
        output_bar_BU = load(inputs.output_bar_SBH.at[index, :, units])
        kept_bar_BU += jnp.where(valid_BU > 0, output_bar_BU, 0)
    before_BU = load(inputs.cell_LZBH.at[layer, index, :, units])
    tanh_BU = tanh(load(inputs.cell_LZBH.at[layer, index + 1, :, units]))
    gates = [
        load(inputs.gates_LSBQH.at[layer, index, :, q, units]).astype(jnp.float32)
        for q in range(4)
    ]
    hidden_bar_BU = _add_parts(block, owned, back, kept_bar_BU)
    into_BU, z_bars = _cell_bars(hidden_bar_BU, cell_bar_BU, before_BU, tanh_BU, gates)
    for q in range(4):
        z_bar_BU = jnp.where(valid_BU > 0, z_bars[q], 0).astype(jnp.bfloat16)
        store(block.bars.z_bar_LSBQH.at[layer, index, :, q, units], z_bar_BU)
    kept_bar_BU = jnp.where(valid_BU > 0, 0, hidden_bar_BU)
    cell_bar_BU = jnp.where(valid_BU > 0, into_BU * gates[1], cell_bar_BU)
    return kept_bar_BU, cell_bar_BU


def _cell_bars(hidden_bar_BU, cell_bar_BU, before_BU, tanh_BU, gates):
    """Gradients of the cell after the position and of the four pre-activations."""
    i, f, g, o = gates
    into_BU = cell_bar_BU + hidden_bar_BU * o * (1 - tanh_BU * tanh_BU)
    return into_BU, (
        into_BU * g * i * (1 - i),
        into_BU * before_BU * f * (1 - f),
        into_BU * i * (1 - g * g),
        hidden_bar_BU * tanh_BU * o * (1 - o),
    )


def _add_parts(block, owned, step, kept_bar_BU):
    """The gradient of h, once all summands of a step have arrived."""
    plan = block.plan
    own, count = _inbox(block, step, 0)
    kinds = 1 + owned.lower
    ptx.await_bytes(count, kinds * 4 * 4 * plan.groups * UNITS * plan.rows)
    hidden_bar_BU = kept_bar_BU + gpu_tile.part_sum(own, plan.rows, 0)
    if owned.lower:
        above = _inbox(block, step, 1).parts
        hidden_bar_BU += owned.mask_BU * gpu_tile.part_sum(above, plan.rows, 0)
    return hidden_bar_BU
