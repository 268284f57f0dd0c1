"""The recurrence of LSTM layers as one kernel for all positions, on Hopper GPUs.

A block of threads owns 16 units U of a layer and keeps their weights on chip from the
first position to the last. With q over the gates i, f, g, o it computes

    z_q[U] = W_q[:, U]' h_{t-1} + X_q[:, U]' x_t        64 rows: four gates of 16 units,

the recurrent weights W in registers and those of the layer below, X, in shared memory,
applies the cell's formulas and hands h_t[U] to the other blocks through global memory.
Layers run at the same time, each as far as what it reads has come. For the lowest, X x
is computed beforehand, and its blocks may own 32 units, half of W in shared memory.

Backward, a layer at a time, four blocks form a cluster that owns 64 units V. Each takes
one gate of

    dh_{t-1}[V] = sum_q W_q[V, :] dz_q,t                64 rows: 64 units of one gate,

and the cell's formulas for 16 units, for which it reads the other gates' summands from
the shared memory of their blocks.

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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024
TILE = 64  # rows of the tensor core's product
UNITS = 16  # of one tile, each with four gates
ROWS = 16  # the batch is padded to a multiple
CHUNK = 64  # columns of bfloat16 in a row of swizzled shared memory
HELD = 5 * CHUNK  # columns of weights that a warpgroup's registers hold
PAD = 4  # columns between rows of the parts, or 16 units lie in two banks
_TILED = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(128))
_LANES = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
# [B, U]: of every eight rows a warp holds two; a lane holds one unit.
_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, UNITS), (2, UNITS), (1,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


class Stack(NamedTuple):
    """Layers padded to H = K units; M = L - 1 leaves out the lowest."""

    units: tuple[int, ...]  # of each layer, a multiple of 64
    bias_LQH: jax.Array
    recurrent_LQHK: jax.Array
    input_MQHK: jax.Array
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
    return -rows % ROWS + rows, -units % TILE + units


def refusals(rows: int, units: int, dtype: jnp.dtype) -> list[str]:
    """Why the kernels do not take this layer here; empty if they do."""
    reasons = []
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        reasons.append(f"needs a Hopper GPU, got {device.device_kind}")
    if jax.__version_info__ < (0, 11):
        reasons.append(f"needs jax 0.11, got {jax.__version__}")
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


def together(rows: int, units: Sequence[int]) -> list[slice]:
    """Which layers run in one kernel: from the lowest, as many as fit."""
    runs, start = [], 0
    for stop in range(1, len(units) + 1):
        if stop == len(units) or _blocks(rows, units[start : stop + 1]) is None:
            runs.append(slice(start, stop))
            start = stop
    return runs


def forward(z_SBQH, stack: Stack, hidden_LBH, cell_LBH, valid_SB, live) -> Trace:
    """Run the positions; z is what the inputs give the lowest layer's four gates.

    The first `live` rows of the batch are no padding.
    """
    steps, rows, _, width = z_SBQH.shape
    groups, layers = _groups(width), len(stack.units)
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
            held = _hold(weight_s, share)
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
            _wait_for_all(started, sum(blocks))
            columns = pl.ds(group * share, share)

            @pl.loop(0, steps)
            def _(step):
                _multiply_share(
                    hiddens_ref.at[layer, step, :, columns],
                    fed_ref.at[layer - 1, step, :, columns] if upper else None,
                    held,
                    weight_s,
                    operand_s.at[group],
                    part_s.at[lax.rem(step, 2), group],
                    live,
                )
                plgpu.barrier_arrive(part_bar)

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
            _signal(started)

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
                plgpu.barrier_wait(part_bar)
                after, gates = [], []
                for tile, units in enumerate(tiles_units):
                    now_s = part_s.at[lax.rem(index, 2)]
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

        first = 0
        layer, index = jnp.int32(0), block
        for this in range(layers):
            inside = (block >= first) & (block < first + blocks[this])
            layer = jnp.where(inside, this, layer)
            index = jnp.where(inside, block - first, index)
            if stack.units[this] < width:

                @pl.when(inside & (group == groups))
                def _(this=this, first=first):
                    zero_columns(this, block - first)

            first += blocks[this]

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
            *_shared(rows, width, tiles * TILE),
            plgpu.Barrier(num_arrivals=4),
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=_LANES,
    )
    return Trace(
        *call(
            z_SBQH,
            jnp.broadcast_to(stack.bias_LQH[:, :, None], (layers, 4, rows, width)),
            stack.recurrent_LQHK,
            stack.input_MQHK,
            stack.mask_LBH,
            hidden_LBH.astype(jnp.float32),
            cell_LBH,
            _spread(valid_SB),
        )
    )


def backward(
    cell_ZBH,
    gates_SBQH,
    weight_HQK,
    output_bar_SBH,
    hidden_bar_BH,
    cell_bar_BH,
    valid_SB,
    live,
):
    """Gradients of the pre-activations [S, B, Q, H] and of the carry, [B, H] twice.

    Of one layer; `cell` and `gates` may have more columns than the layer has units.
    """
    steps, rows, width = output_bar_SBH.shape
    clusters, groups = width // TILE, _groups(width)
    share = width // groups

    def lstm_backward(
        gates_ref,
        cells_ref,
        output_bar_ref,
        hidden_bar_ref,
        cell_bar_ref,
        valid_ref,
        weight_ref,
        z_bars_ref,
        first_hidden_bar_ref,
        first_cell_bar_ref,
        weight_s,
        operand_s,
        part_s,
        arrived_s,
        weight_bar,
    ):
        started = pl.get_global(plgpu.SemaphoreType.REGULAR)
        group = lax.axis_index("group")
        cluster, gate = lax.axis_index("cluster"), lax.axis_index("gate")
        units = pl.ds(cluster * TILE + gate * UNITS, UNITS)

        def inbox(step):
            """Where the summands of a step arrive, and what counts their bytes."""
            turn = lax.rem(step, 2)
            return part_s.at[turn], arrived_s.at[pl.ds(2 * turn, 2)]

        def add_parts(step, kept_bar_BU):
            summands_s, bytes_s = inbox(step)
            _await_bytes(bytes_s, 4 * summands_s.shape[0] * UNITS * rows)
            return kept_bar_BU + _part_sum(summands_s, rows, 0)

        @pl.when(group < groups)
        def _multiply():
            @pl.when(group == 0)
            def _():
                of_cluster = pl.ds(cluster * TILE, TILE)
                plgpu.copy_gmem_to_smem(
                    weight_ref.at[of_cluster, gate], weight_s, weight_bar
                )

            plgpu.barrier_wait(weight_bar)
            held = _hold(weight_s, share)
            _wait_for_all(started, 4 * clusters)
            columns = pl.ds(group * share, share)

            @pl.loop(0, steps)
            def _(back):
                summands_s, bytes_s = inbox(back)
                _multiply_share(
                    z_bars_ref.at[steps - 1 - back, :, gate, columns],
                    None,
                    held,
                    weight_s,
                    operand_s.at[group],
                    summands_s,
                    live,
                    bytes_s,
                )

        @pl.when(group == groups)
        def _cells():
            @pl.loop(0, steps)
            def _(index):
                for q in range(4):
                    _store(z_bars_ref.at[index, :, q, units], _unwritten(rows))

            _start_counting(arrived_s)
            _signal(started)

            def step(back, state):
                hidden_bar_BU, cell_bar_BU = state
                index = steps - 1 - back
                valid_BU = _load(valid_ref.at[index])
                output_bar_BU = _load(output_bar_ref.at[index, :, units])
                hidden_bar_BU += jnp.where(valid_BU > 0, output_bar_BU, 0)
                before_BU = _load(cells_ref.at[index, :, units])
                tanh_BU = _tanh(_load(cells_ref.at[index + 1, :, units]))
                i, f, g, o = (
                    _load(gates_ref.at[index, :, q, units]).astype(jnp.float32)
                    for q in range(4)
                )
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
                    _store(z_bars_ref.at[index, :, q, units], z_bar_BU)
                kept_bar_BU = jnp.where(valid_BU > 0, 0, hidden_bar_BU)
                cell_bar_BU = jnp.where(valid_BU > 0, into_BU * f, cell_bar_BU)
                return add_parts(back, kept_bar_BU), cell_bar_BU

            last = _load(hidden_bar_ref.at[:, units]), _load(cell_bar_ref.at[:, units])
            hidden_bar_BU, cell_bar_BU = lax.fori_loop(0, steps, step, last)
            _store(first_hidden_bar_ref.at[:, units], hidden_bar_BU)
            _store(first_cell_bar_ref.at[:, units], cell_bar_BU)

    carry = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    call = plgpu.kernel(
        lstm_backward,
        out_type=[
            jax.ShapeDtypeStruct((steps, rows, 4, width), jnp.bfloat16),
            carry,
            carry,
        ],
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(4,),
        cluster_names=("gate",),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types=[
            *_shared(rows, width, 4 * UNITS),
            plgpu.SMEM((4,), jnp.int32),
            plgpu.Barrier(),
        ],
        compiler_params=_LANES,
    )
    return call(
        gates_SBQH,
        cell_ZBH,
        output_bar_SBH,
        hidden_bar_BH,
        cell_bar_BH,
        _spread(valid_SB),
        weight_HQK,
    )


def _groups(width):
    """Warpgroups among which the columns are split evenly."""
    return max(n for n in (1, 2, 3) if width // CHUNK % n == 0)


def _blocks(rows, units):
    """Blocks of each layer if they all run at once; None if they cannot."""
    for tiles in (1, 2):
        blocks = [units[0] // (tiles * UNITS), *(n // UNITS for n in units[1:])]
        width = max(units)
        alone = len(units) == 1 and tiles == 1
        # Weights of two tiles, or of two layers, fill shared memory and registers.
        fits = alone or width // _groups(width) <= HELD
        fits &= sum(blocks) <= MULTIPROCESSORS
        if fits and _shared_bytes(rows, width, tiles) <= SHARED_BYTES:
            return blocks
    return None


def _shared(rows, width, tiles):
    """Shared memory of a tile of weights, of the operand and of the parts."""
    groups = _groups(width)
    return [
        plgpu.SMEM((TILE, width), jnp.bfloat16, transforms=_TILED),
        plgpu.SMEM((groups, rows, width // groups), jnp.bfloat16, transforms=_TILED),
        plgpu.SMEM((groups, tiles * TILE, rows + PAD), jnp.float32),
    ]


def _shared_bytes(rows, width, tiles):
    parts = _groups(width) * tiles * TILE * (rows + PAD) * 4
    return (TILE + rows) * width * 2 + parts + 1024


def _hold(weight_s, share):
    """This warpgroup's share of the weights, as far as its registers hold it."""
    first = lax.axis_index("group") * share
    return [
        plgpu.load(
            weight_s.at[:, pl.ds(first + start, CHUNK)], layout=plgpu.Layout.WGMMA
        )
        for start in range(0, min(share, HELD), CHUNK)
    ]


def _multiply_share(own_ref, below_ref, held, weight_s, operand_s, part_s):
    """This warpgroup's part of the product, once what it reads is written.

    With R the held weights and W those of shared memory, the parts are R own' + W
    below'; or, without a layer below, R own' and, if there is a second tile, W own'.
    Columns that the registers do not hold come from shared memory.
    """
    rows, share = operand_s.shape
    width = weight_s.shape[1]
    second_tile = part_s.shape[0] > TILE and below_ref is None
    refs = [own_ref] if below_ref is None else [own_ref, below_ref]

    @plgpu.inline_mgpu(
        arg_types=(
            [plgpu.RefType()] * len(refs),
            [plgpu.Layout.WGMMA] * len(held),
            plgpu.RefType(_TILED),
            plgpu.RefType(_TILED),
            plgpu.RefType(),
        )
    )
    def product(_, refs, held, weight, operand, part):
        registers = [
            mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32))
            for chunk in held
            for start in range(0, CHUNK, 16)
            for register in chunk[:, start : start + 16].registers.flat
        ]
        first = arith.muli(mgpu.utils.warpgroup_idx(), _const(16 * share))
        weight = arith.addi(_address(weight), first)

        def multiply(registers, sums):
            return mgpu.utils.inline_ptx(
                _product_ptx(rows, share, width, len(registers), sums is not None),
                _address(operand),
                weight,
                *registers,
                *(sums or []),
                result_types=[ir.F32Type.get()] * (rows // 2),
                has_side_effects=True,
                convergent=True,
            )

        sums = None
        if below_ref is not None:
            _gather(refs[1], operand)
            sums = multiply([], None)
        _gather(refs[0], operand)
        _store_sums(multiply(registers, sums), rows, part, 0)
        if second_tile:
            _store_sums(multiply([], None), rows, part, TILE)

    product(refs, held, weight_s, operand_s, part_s)


def _product_ptx(rows, share, width, registers, added):
    """All multiply-adds of a share of the columns, 16 at a time.

    Operands: the sums, the addresses of operand and weights, the weights in registers
    and, if `added`, the sums before.
    """
    count = rows // 2
    sums = [f"d{n}" for n in range(count)]
    start = [
        f"${count + 2 + registers + n}" if added else "0f00000000" for n in range(count)
    ]
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 "
        f"{{{', '.join(sums)}}}"
    )

    def describe(name, address, k, columns):
        """Swizzled rows of 128 bytes; the next eight rows are 16 * columns further."""
        chunk, part = divmod(k, 4)
        return (
            f"add.u32 low, {address}, {1024 * chunk + 32 * part}; shr.u32 low, low, 4; "
            f"and.b32 low, low, 0x3FFF; or.b32 low, low, 0x10000; "
            f"mov.b64 {name}, {{low, {columns | 1 << 30}}};"
        )

    lines = [
        "{ .reg .pred add; .reg .b32 low; .reg .b64 a, b;",
        f".reg .f32 {', '.join(sums)}; setp.eq.b32 add, 0, 0;",
        *(f"mov.f32 {d}, {value};" for d, value in zip(sums, start, strict=True)),
        "wgmma.fence.sync.aligned;",
    ]
    for k in range(share // 16):
        lines.append(describe("b", f"${count}", k, share))
        if 4 * k < registers:
            a = ", ".join(f"${count + 2 + 4 * k + n}" for n in range(4))
            lines.append(f"{instruction}, {{{a}}}, b, add, 1, 1, 0;")
        else:
            lines.append(describe("a", f"${count + 1}", k, width))
            lines.append(f"{instruction}, a, b, add, 1, 1, 0, 0;")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    lines += [f"mov.f32 ${n}, {d};" for n, d in enumerate(sums)]
    return "\n".join([*lines, "}"])


def _store_sums(sums, rows, part, first_row):
    """Sums as the tensor core leaves them, to rows of shared memory."""
    thread = _thread()
    warp, lane = arith.divui(thread, _const(32)), arith.remui(thread, _const(32))
    line = 4 * (rows + PAD)
    start = _scaled_sum(
        (warp, 16 * line),
        (arith.divui(lane, _const(4)), line),
        (arith.remui(lane, _const(4)), 8),
    )
    start = arith.addi(start, _const(first_row * line))
    stores = [
        f"st.shared.v2.f32 [$0+{8 * half * line + 8 * n}], "
        f"{{${1 + n + 2 * half}, ${2 + n + 2 * half}}};"
        for n in range(0, len(sums), 4)
        for half in range(2)
    ]
    address = arith.addi(_address(part), start)
    mgpu.utils.inline_ptx("\n".join(stores), address, *sums, has_side_effects=True)


def _gather(source, target):
    """Copy rows of global memory to swizzled shared memory, each word once written.

    A thread takes 16 of every 128 bytes of every sixteenth row.
    """
    i64 = ir.IntegerType.get_signless(64)
    source_type = ir.MemRefType(source.type)
    rows, columns = source_type.shape
    (stride, _), _ = source_type.get_strides_and_offset()
    thread = _thread()
    row, place = arith.divui(thread, _const(8)), arith.remui(thread, _const(8))
    line = arith.remui(row, _const(8))
    start = arith.extui(i64, _scaled_sum((row, 2 * stride), (place, 16)))
    source = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(source)), start)
    start = _scaled_sum(
        (arith.divui(row, _const(8)), 16 * columns),
        (line, 128),
        (arith.xori(place, line), 16),
    )
    target = arith.addi(_address(target), start)
    offsets = [
        (2 * stride * first + 2 * column, 2 * columns * first + 16 * column)
        for first in range(0, rows, 16)
        for column in range(0, columns, CHUNK)
    ]
    for first in range(0, len(offsets), 6):
        ptx = _poll_ptx(offsets[first : first + 6])
        mgpu.utils.inline_ptx(ptx, source, target, has_side_effects=True)
    mgpu.commit_shared()


def _poll_ptx(offsets):
    """Load 16 bytes at each $0 + source until all are written; store at $1 + target.

    A word w holds two bfloat16. With v = ~w, one of them is 0xFFFF exactly if
    (v - 0x00010001) & ~v has bit 15 or 31, and v - 0x00010001 is 0xFFFEFFFE - w.
    """
    words = [f"w{n}" for n in range(4 * len(offsets))]
    loads, stores = [], []
    for n, (source, target) in enumerate(offsets):
        quad = ", ".join(words[4 * n : 4 * n + 4])
        loads.append(f"ld.relaxed.gpu.global.v4.b32 {{{quad}}}, [$0+{source}];")
        stores.append(f"st.shared.v4.b32 [$1+{target}], {{{quad}}};")
    checks = [
        f"sub.u32 one, 0xFFFEFFFE, {w}; and.b32 one, one, {w}; or.b32 all, all, one;"
        for w in words
    ]
    return "\n".join(
        [
            f"{{ .reg .pred again; .reg .b32 one, all, {', '.join(words)};",
            "poll: mov.b32 all, 0;",
            *loads,
            *checks,
            "and.b32 all, all, 0x80008000; setp.ne.b32 again, all, 0;",
            "@again bra poll;",
            *stores,
            "}",
        ]
    )


def _unwritten(rows):
    bits = plgpu.layout_cast(jnp.full((rows, UNITS), -1, jnp.int16), _LAYOUT)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _wait_for_all(started, blocks):
    plgpu.semaphore_wait(started, blocks, decrement=False, memory_scope="gpu")


def _fence_cluster():
    """Order a block's parts before its neighbours' reads; both sides call it."""

    @plgpu.inline_mgpu()
    def fence(_):
        mgpu.utils.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)

    fence()


def _load(ref):
    return plgpu.load(ref, layout=_LAYOUT, optimized=False)


def _store(ref, value):
    if hasattr(plgpu, "store"):  # from jax 0.12, whose plain stores must be fast ones
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def _part_sum(parts, rows, tile):
    """Sum [B, U] of rows `tile` of 16 of every warpgroup's part, in a fixed order."""
    at = pl.ds(tile * UNITS, UNITS)
    return sum(
        _load(part_s.at[group, at, :rows].T)
        for part_s in parts
        for group in range(part_s.shape[0])
    )


def _spread(valid_SB):
    """Validity of each row, repeated over the units of a tile."""
    shape = (*valid_SB.shape, UNITS)
    return jnp.broadcast_to(valid_SB[:, :, None], shape).astype(jnp.float32)


def _address(shared):
    i32 = ir.IntegerType.get_signless(32)
    return llvm.ptrtoint(i32, mgpu.utils.memref_ptr(shared))


def _const(value):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _thread():
    return arith.remui(mgpu.utils.thread_idx(), _const(128))


def _scaled_sum(*terms):
    total = _const(0)
    for value, scale in terms:
        total = arith.addi(total, arith.muli(value, _const(scale)))
    return total


def _sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def _tanh(x):
    return 1 - 2 / (1 + jnp.exp(2 * x))
