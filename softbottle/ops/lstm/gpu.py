"""The recurrence of LSTM layers as one kernel for all positions, on Hopper GPUs.

A block of threads owns 16 units U of a layer and keeps their weights on chip from the
first position to the last. With q over the gates i, f, g, o it computes

    z_q[U] = W_q[:, U]' h_{t-1} + X_q[:, U]' x_t        64 rows: four gates of 16 units,

the recurrent weights W in registers and X, which read the layer below, in shared
memory. It applies the cell's formulas and hands h_t[U] to the other blocks through
global memory. Layers run at the same time, each as far as what it reads has come. For
the lowest, X x is computed beforehand, and its blocks may own 32 units.

Backward, four blocks form a cluster that owns 64 units V. Each takes one gate of

    dh_{t-1}[V] = sum_q W_q[V, :] dz_q,t                64 rows: 64 units of one gate,

and of what comes down from the layer above, and the cell's formulas for 16 units; the
summands go through the shared memory of the cluster.

The weights stand on the 64-row side of the tensor core's product and the batch on the
other. Each of up to three warpgroups multiplies a share of the columns; one more adds
the parts and applies the formulas.

There is no barrier among blocks in the loop. What travels is bfloat16, and every word
is its own flag: before the first position the arrays are filled with a bit pattern that
no conversion to bfloat16 yields, and a reader asks until it finds another. Sums have a
fixed order, so that equal inputs give equal bits. All blocks must run at once, at most
one on a multiprocessor.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from softbottle.ops.lstm import ptx as lstm_ptx
from softbottle.ops.lstm.ptx import CHUNK, PAD, TILE, TILED, UNITS

MULTIPROCESSORS = 132
CLUSTERS = 30  # of four blocks that surely run at once, whatever processors are off
SHARED_BYTES = 227 * 1024
ROWS = 16  # the batch is padded to a multiple
# Barriers around every store would cost more than the stores; see lstm_ptx.signal.
_LANES = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)
# [B, U]: of every eight rows a warp holds two; a lane holds one unit.
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, UNITS), (2, UNITS), (1,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


class Stack(NamedTuple):
    """Layers padded to the widest; `units` are theirs, multiples of 64.

    `recurrent` and `input` are [L, Q, H, K] forward, the latter without the lowest
    layer, and [L, K, Q, H] backward, where input[l] are the weights of layer l + 1; a
    stack of one layer has any `input`. `mask` is what the layer above reads h with.
    """

    units: tuple[int, ...]
    recurrent: jax.Array
    input: jax.Array
    mask_LBH: jax.Array


class Trace(NamedTuple):
    """What the backward pass needs; Z = S + 1 begins with the carry.

    `fed` is what the layer above reads, h times the mask.
    """

    hidden_LZBH: jax.Array
    fed_LSBH: jax.Array
    cell_LZBH: jax.Array
    gates_LSBQH: jax.Array


def padded(rows: int, units: int) -> tuple[int, int]:
    """The sizes that the kernels take, for a batch and a layer."""
    tiles = -(-units // TILE)
    if tiles > 1 and lstm_ptx.groups_of(tiles * CHUNK) == 1:
        tiles += 1
    return -rows % ROWS + rows, tiles * TILE


def refusals(rows: int, units: int, dtype: jnp.dtype) -> list[str]:
    """Why the kernels do not take this layer here; empty if they do."""
    reasons = []
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        reasons.append(f"needs a Hopper GPU, got {device.device_kind}")
    elif device.core_count < MULTIPROCESSORS:
        reasons.append(
            f"needs {MULTIPROCESSORS} multiprocessors, got {device.core_count}"
        )
    if jax.__version_info__ < (0, 11, 2):
        reasons.append(f"needs jax 0.11.2, got {jax.__version__}")
    if dtype != jnp.bfloat16:
        reasons.append(f"needs compute_dtype bfloat16, got {dtype}")
    rows, units = padded(rows, units)
    if units > MULTIPROCESSORS * UNITS:
        reasons.append(f"holds {MULTIPROCESSORS * UNITS} units, got {units}")
    if (needed := _shared_bytes(rows, units, 1)) > SHARED_BYTES:
        reasons.append(
            f"{units} units and {rows} rows need {needed} bytes of shared memory, "
            f"more than {SHARED_BYTES}"
        )
    return reasons


def forward_runs(rows: int, units: Sequence[int]) -> list[slice]:
    """Which layers run in one kernel: from the lowest, as many as fit."""
    return _runs(units, lambda some: _blocks(rows, some) is not None)


def backward_runs(rows: int, units: Sequence[int]) -> list[slice]:
    """The same for the backward pass."""
    return _runs(units, lambda some: _clusters_fit(rows, some))


def _runs(units, fit):
    runs, start = [], 0
    for stop in range(1, len(units) + 1):
        if stop == len(units) or not fit(units[start : stop + 1]):
            runs.append(slice(start, stop))
            start = stop
    return runs


def forward(
    z_SBQH, bias_LQH, stack: Stack, hidden_LBH, cell_LBH, valid_SB, live
) -> Trace:
    """Run the positions; z is what the inputs give the lowest layer's four gates.

    The first `live` rows of the batch are no padding.
    """
    steps, rows, _, width = z_SBQH.shape
    groups, layers = lstm_ptx.groups_of(width), len(stack.units)
    share = width // groups
    blocks = _blocks(rows, stack.units)
    tiles = stack.units[0] // (blocks[0] * UNITS)

    def lstm_forward(
        z_ref,
        bias_ref,
        recurrent_ref,
        input_ref,
        mask_ref,
        hidden_ref,
        cell_ref,
        valid_ref,
        hiddens_ref,
        fed_ref,
        cells_ref,
        gates_ref,
        weight_s,
        operand_s,
        part_s,
        weight_bar,
        part_bar,
        free_bar,
        held_bar,
    ):
        started = pl.get_global(plgpu.SemaphoreType.REGULAR)
        group, block = lax.axis_index("group"), lax.axis_index("block")

        def load_tile(weight_ref, units):
            @pl.when(group == 0)
            def _():
                for q in range(4):
                    target_s = weight_s.at[pl.ds(q * UNITS, UNITS)]
                    plgpu.copy_gmem_to_smem(
                        weight_ref.at[q, units], target_s, weight_bar
                    )

            plgpu.barrier_wait(weight_bar)

        def multiply(layer, tiles_units, upper):
            load_tile(recurrent_ref.at[layer], tiles_units[0])
            held = lstm_ptx.hold(weight_s, share)
            if upper or len(tiles_units) > 1:
                plgpu.commit_smem()
                plgpu.barrier_arrive(held_bar)

                @pl.when(group == 0)
                def _():
                    plgpu.barrier_wait(held_bar)

                second_ref = (
                    input_ref.at[layer - 1] if upper else recurrent_ref.at[layer]
                )
                load_tile(second_ref, tiles_units[-1])
            lstm_ptx.wait_for_all(started, sum(blocks))
            columns = pl.ds(group * share, share)

            @pl.loop(0, steps)
            def _(step):
                turn = lax.rem(step, 2)
                plgpu.barrier_wait(free_bar.at[turn])
                lstm_ptx.multiply_share(
                    hiddens_ref.at[layer, step, :, columns],
                    fed_ref.at[layer - 1, step, :, columns] if upper else None,
                    held,
                    weight_s,
                    operand_s.at[group],
                    part_s.at[turn, group],
                    live,
                )
                plgpu.barrier_arrive(part_bar.at[turn])

        def cells(layer, tiles_units, upper):
            states, biases, masks = [], [], []
            for units in tiles_units:

                @pl.loop(0, steps)
                def _(index, units=units):
                    _store(hiddens_ref.at[layer, index + 1, :, units], _unwritten(rows))
                    _store(fed_ref.at[layer, index, :, units], _unwritten(rows))

                # Converted here, for a NaN to have the bits that this conversion gives.
                hidden_BU = _load(hidden_ref.at[layer, :, units]).astype(jnp.bfloat16)
                cell_BU = _load(cell_ref.at[layer, :, units])
                _store(hiddens_ref.at[layer, 0, :, units], hidden_BU)
                _store(cells_ref.at[layer, 0, :, units], cell_BU)
                states.append((hidden_BU, cell_BU))
                masks.append(_load(mask_ref.at[layer, :, units]))
                biases.append(
                    [_load(bias_ref.at[layer, q, :, units]) for q in range(4)]
                )
            lstm_ptx.signal(started)
            for turn in range(2):
                plgpu.barrier_arrive(free_bar.at[turn])

            def step(index, states):
                valid_BU = _load(valid_ref.at[index])
                z = biases
                if not upper:
                    z = [
                        [
                            bias[q] + _load(z_ref.at[index, :, q, units])
                            for q in range(4)
                        ]
                        for bias, units in zip(biases, tiles_units, strict=True)
                    ]
                turn = lax.rem(index, 2)
                plgpu.barrier_wait(part_bar.at[turn])
                after, gates = [], []
                for tile, units in enumerate(tiles_units):
                    now_s = part_s.at[turn]
                    parts = [_part_sum(now_s, rows, 4 * tile + q) for q in range(4)]
                    i, f, g, o = map(jnp.add, z[tile], parts)
                    i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
                    hidden_BU, cell_BU = states[tile]
                    next_BU = f * cell_BU + i * g
                    out_BU = (o * _tanh(next_BU)).astype(jnp.bfloat16)
                    hidden_BU = jnp.where(valid_BU > 0, out_BU, hidden_BU)
                    cell_BU = jnp.where(valid_BU > 0, next_BU, cell_BU)
                    # First what other blocks wait for.
                    _store(hiddens_ref.at[layer, index + 1, :, units], hidden_BU)
                    fed_BU = hidden_BU.astype(jnp.float32) * masks[tile]
                    fed_BU = fed_BU.astype(jnp.bfloat16)
                    _store(fed_ref.at[layer, index, :, units], fed_BU)
                    after.append((hidden_BU, cell_BU))
                    gates.append((i, f, g, o))
                plgpu.barrier_arrive(free_bar.at[turn])
                for tile, units in enumerate(tiles_units):
                    _store(cells_ref.at[layer, index + 1, :, units], after[tile][1])
                    for q in range(4):
                        gate_BU = gates[tile][q].astype(jnp.bfloat16)
                        _store(gates_ref.at[layer, index, :, q, units], gate_BU)
                return after

            lax.fori_loop(0, steps, step, states)

        def zero_columns(layer, index):
            """Zeros where the layer has no unit; block `index` of it takes a part."""
            zeros = jnp.zeros((rows, UNITS), jnp.bfloat16)
            zeros = plgpu.layout_cast(zeros, _LAYOUT)
            first = stack.units[layer] // UNITS

            @pl.loop(0, width // UNITS - first)
            def _(column):
                @pl.when(lax.rem(column, blocks[layer]) == index)
                def _():
                    units = pl.ds((first + column) * UNITS, UNITS)
                    _store(hiddens_ref.at[layer, 0, :, units], zeros)

                    @pl.loop(0, steps)
                    def _(step):
                        _store(hiddens_ref.at[layer, step + 1, :, units], zeros)
                        _store(fed_ref.at[layer, step, :, units], zeros)

        def run(layer, first_unit, count, upper):
            starts = [first_unit + tile * UNITS for tile in range(count)]
            tiles_units = [pl.ds(start, UNITS) for start in starts]

            @pl.when(group < groups)
            def _():
                multiply(layer, tiles_units, upper)

            @pl.when(group == groups)
            def _():
                cells(layer, tiles_units, upper)

        layer, index = _place(block, blocks)
        for this in range(layers):
            if stack.units[this] < width:

                @pl.when((layer == this) & (group == groups))
                def _(this=this):
                    zero_columns(this, index)

        @pl.when(layer == 0)
        def _():
            run(0, index * tiles * UNITS, tiles, upper=False)

        if layers > 1:

            @pl.when(layer > 0)
            def _():
                run(layer, index * UNITS, 1, upper=True)

    shape = jax.ShapeDtypeStruct
    call = plgpu.kernel(
        lstm_forward,
        out_type=[
            shape((layers, steps + 1, rows, width), jnp.bfloat16),
            shape((layers, steps, rows, width), jnp.bfloat16),
            shape((layers, steps + 1, rows, width), jnp.float32),
            shape((layers, steps, rows, 4, width), jnp.bfloat16),
        ],
        grid=(sum(blocks),),
        grid_names=("block",),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=[
            *_shared(rows, width, (groups, tiles * TILE)),
            plgpu.Barrier(num_arrivals=4),
            plgpu.Barrier(num_arrivals=groups, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=_LANES,
    )
    return Trace(
        *call(
            z_SBQH,
            jnp.broadcast_to(bias_LQH[:, :, None], (layers, 4, rows, width)),
            stack.recurrent,
            stack.input,
            stack.mask_LBH,
            hidden_LBH.astype(jnp.float32),
            cell_LBH,
            _spread(valid_SB),
        )
    )


def backward(
    stack: Stack,
    trace: Trace,
    output_bar_SBH,
    hidden_bar_LBH,
    cell_bar_LBH,
    valid_SB,
    live,
):
    """Gradients of the pre-activations [L, S, B, Q, H] and of the carries, [L, B, H].

    Layers of equal size; what `forward` left of them may have more columns.
    """
    steps, rows, width = output_bar_SBH.shape
    groups, layers = lstm_ptx.groups_of(width), len(stack.units)
    share = width // groups
    clusters = [units // TILE for units in stack.units]
    kinds = min(layers, 2)  # of summands: from the layer itself, from the one above

    def lstm_backward(
        gates_ref,
        cells_ref,
        output_bar_ref,
        hidden_bar_ref,
        cell_bar_ref,
        mask_ref,
        valid_ref,
        recurrent_ref,
        input_ref,
        z_bars_ref,
        first_hidden_bar_ref,
        first_cell_bar_ref,
        weight_s,
        operand_s,
        part_s,
        arrived_s,
        weight_bar,
        held_bar,
    ):
        started = pl.get_global(plgpu.SemaphoreType.REGULAR)
        group, gate = lax.axis_index("group"), lax.axis_index("gate")

        def inbox(step, kind):
            """Where summands of one kind arrive, and what counts the bytes of both."""
            turn = lax.rem(step, 2)
            return part_s.at[turn, kind], arrived_s.at[pl.ds(2 * turn, 2)]

        def load_tile(weight_ref, cluster):
            @pl.when(group == 0)
            def _():
                of_cluster = pl.ds(cluster * TILE, TILE)
                plgpu.copy_gmem_to_smem(
                    weight_ref.at[of_cluster, gate], weight_s, weight_bar
                )

            plgpu.barrier_wait(weight_bar)

        def multiply(layer, cluster, lower):
            load_tile(recurrent_ref.at[layer], cluster)
            held = lstm_ptx.hold(weight_s, share)
            if lower:
                plgpu.commit_smem()
                plgpu.barrier_arrive(held_bar)

                @pl.when(group == 0)
                def _():
                    plgpu.barrier_wait(held_bar)

                load_tile(input_ref.at[layer], cluster)
            lstm_ptx.wait_for_all(started, 4 * sum(clusters))

            def send(step, kind, source_layer, position, registers):
                columns = pl.ds(group * share, share)
                lstm_ptx.multiply_share(
                    z_bars_ref.at[source_layer, position, :, gate, columns],
                    None,
                    registers,
                    weight_s,
                    operand_s.at[group],
                    inbox(step, kind)[0],
                    live,
                    inbox(step, kind)[1],
                )

            lstm_ptx.send_nothing(*inbox(0, 0), groups, rows)

            @pl.loop(0, steps)
            def _(back):
                if lower:
                    send(back, 1, layer + 1, steps - 1 - back, [])
                send(back + 1, 0, layer, steps - 1 - back, held)

            if lower:
                lstm_ptx.send_nothing(*inbox(steps, 1), groups, rows)

        def cells(layer, units, lower):
            mask_BU = _load(mask_ref.at[layer, :, units])

            @pl.loop(0, steps)
            def _(index):
                for q in range(4):
                    _store(z_bars_ref.at[layer, index, :, q, units], _unwritten(rows))

            lstm_ptx.start_counting(arrived_s)
            lstm_ptx.signal(started)

            def add_parts(step, kept_bar_BU):
                own_s, bytes_s = inbox(step, 0)
                lstm_ptx.await_bytes(
                    bytes_s, (1 + lower) * 4 * 4 * groups * UNITS * rows
                )
                hidden_bar_BU = kept_bar_BU + _part_sum(own_s, rows, 0)
                if lower:
                    hidden_bar_BU += mask_BU * _part_sum(inbox(step, 1)[0], rows, 0)
                return hidden_bar_BU

            def step(back, state):
                kept_bar_BU, cell_bar_BU = state
                index = steps - 1 - back
                valid_BU = _load(valid_ref.at[index])
                if not lower:
                    output_bar_BU = _load(output_bar_ref.at[index, :, units])
                    kept_bar_BU += jnp.where(valid_BU > 0, output_bar_BU, 0)
                before_BU = _load(cells_ref.at[layer, index, :, units])
                tanh_BU = _tanh(_load(cells_ref.at[layer, index + 1, :, units]))
                i, f, g, o = (
                    _load(gates_ref.at[layer, index, :, q, units]).astype(jnp.float32)
                    for q in range(4)
                )
                hidden_bar_BU = add_parts(back, kept_bar_BU)
                into_BU = cell_bar_BU + hidden_bar_BU * o * (1 - tanh_BU * tanh_BU)
                z_bars = (
                    into_BU * g * i * (1 - i),
                    into_BU * before_BU * f * (1 - f),
                    into_BU * i * (1 - g * g),
                    hidden_bar_BU * tanh_BU * o * (1 - o),
                )
                for q in range(4):
                    z_bar_BU = jnp.where(valid_BU > 0, z_bars[q], 0)
                    z_bar_BU = z_bar_BU.astype(jnp.bfloat16)
                    _store(z_bars_ref.at[layer, index, :, q, units], z_bar_BU)
                kept_bar_BU = jnp.where(valid_BU > 0, 0, hidden_bar_BU)
                cell_bar_BU = jnp.where(valid_BU > 0, into_BU * f, cell_bar_BU)
                return kept_bar_BU, cell_bar_BU

            last = [ref.at[layer, :, units] for ref in (hidden_bar_ref, cell_bar_ref)]
            last = tuple(map(_load, last))
            kept_bar_BU, cell_bar_BU = lax.fori_loop(0, steps, step, last)
            hidden_bar_BU = add_parts(steps, kept_bar_BU)
            _store(first_hidden_bar_ref.at[layer, :, units], hidden_bar_BU)
            _store(first_cell_bar_ref.at[layer, :, units], cell_bar_BU)

        def run(layer, cluster, lower):
            @pl.when(group < groups)
            def _():
                multiply(layer, cluster, lower)

            @pl.when(group == groups)
            def _():
                units = pl.ds(cluster * TILE + gate * UNITS, UNITS)
                cells(layer, units, lower)

        layer, cluster = _place(lax.axis_index("cluster"), clusters)

        @pl.when(layer == layers - 1)
        def _():
            run(layers - 1, cluster, lower=False)

        if layers > 1:

            @pl.when(layer < layers - 1)
            def _():
                run(layer, cluster, lower=True)

    carry = jax.ShapeDtypeStruct((layers, rows, width), jnp.float32)
    call = plgpu.kernel(
        lstm_backward,
        out_type=[
            jax.ShapeDtypeStruct((layers, steps, rows, 4, width), jnp.bfloat16),
            carry,
            carry,
        ],
        grid=(sum(clusters),),
        grid_names=("cluster",),
        cluster=(4,),
        cluster_names=("gate",),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=[
            *_shared(rows, width, (kinds, 4 * groups, UNITS)),
            plgpu.SMEM((4,), jnp.int32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=_LANES,
    )
    return call(
        trace.gates_LSBQH,
        trace.cell_LZBH,
        output_bar_SBH,
        hidden_bar_LBH,
        cell_bar_LBH,
        stack.mask_LBH,
        _spread(valid_SB),
        stack.recurrent,
        stack.input,
    )


def _place(index, counts):
    """Layer, and place within it, of the index-th when layers have `counts` each."""
    layer, inside, first = jnp.int32(0), index, 0
    for this, count in enumerate(counts):
        here = (index >= first) & (index < first + count)
        layer = jnp.where(here, this, layer)
        inside = jnp.where(here, index - first, inside)
        first += count
    return layer, inside


def _blocks(rows, units):
    """Blocks of each layer if they all run at once; None if they cannot."""
    for tiles in (1, 2):
        blocks = [units[0] // (tiles * UNITS), *(n // UNITS for n in units[1:])]
        width = max(units)
        alone = len(units) == 1 and tiles == 1
        # Weights of two tiles, or of two layers, fill shared memory and registers.
        fits = alone or width // lstm_ptx.groups_of(width) <= lstm_ptx.HELD
        fits &= sum(blocks) <= MULTIPROCESSORS
        if fits and _shared_bytes(rows, width, tiles) <= SHARED_BYTES:
            return blocks
    return None


def _clusters_fit(rows, units):
    """Whether layers go backward at once: equal ones, if they all run at once."""
    width = max(units)
    return (
        min(units) == width
        and sum(units) <= CLUSTERS * TILE
        and width // lstm_ptx.groups_of(width) <= lstm_ptx.HELD
        and _shared_bytes(rows, width, 2) <= SHARED_BYTES
    )


def _shared(rows, width, parts):
    """Shared memory of a tile of weights, of the operand and of the parts, twice.

    A warpgroup may be a step ahead of the one that adds its parts. Backward it is never
    two ahead: what it reads then needs all units of the step between.
    """
    groups = lstm_ptx.groups_of(width)
    return [
        plgpu.SMEM((TILE, width), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((groups, rows, width // groups), jnp.bfloat16, transforms=TILED),
        plgpu.SMEM((2, *parts, rows + PAD), jnp.float32),
    ]


def _shared_bytes(rows, width, tiles):
    parts = 2 * lstm_ptx.groups_of(width) * tiles * TILE * (rows + PAD) * 4
    return (TILE + rows) * width * 2 + parts + 1024


def _unwritten(rows):
    bits = plgpu.layout_cast(jnp.full((rows, UNITS), -1, jnp.int16), _LAYOUT)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _load(ref):
    return plgpu.load(ref, layout=_LAYOUT, optimized=False)


def _store(ref, value):
    if hasattr(plgpu, "store"):  # from jax 0.12, whose plain stores must be fast ones
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _part_sum(parts_s, rows, tile):
    """Sum [B, U] of rows `tile` of 16 of all parts, in a fixed order."""
    at = pl.ds(tile * UNITS, UNITS)
    return sum(_load(parts_s.at[part, at, :rows].T) for part in range(parts_s.shape[0]))


def _spread(valid_SB):
    """Validity of each row, repeated over the units of a tile."""
    shape = (*valid_SB.shape, UNITS)
    return jnp.broadcast_to(valid_SB[:, :, None], shape).astype(jnp.float32)


def _sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def _tanh(x):
    return 1 - 2 / (1 + jnp.exp(2 * x))
