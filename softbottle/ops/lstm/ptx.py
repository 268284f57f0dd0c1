"""What the LSTM kernels of gpu.py say in PTX: products, and handing results over.

A warpgroup's share of a product is gathered from global memory as soon as it is written
and multiplied with weights in registers or shared memory; its sums go to shared memory,
of the block or of the blocks of a cluster. The layouts are those of the instructions
wgmma and st.async.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from softbottle.ops.lstm.gpu import CHUNK, HELD, PAD, TILE, UNITS, groups_of

Ref = Any  # Pallas has no public type for a reference
load: Any = plgpu.load  # takes other arguments before jax 0.11
TILED = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(128))


class _Product(NamedTuple):
    """Sizes of a warpgroup's part of a product: 64 rows of weights, `rows` of batch."""

    rows: int
    share: int  # columns of the warpgroup
    width: int  # of all warpgroups


def hold(weight_s: Ref, share: int) -> list[jax.Array]:
    """This warpgroup's share of the weights, as far as its registers hold it."""
    first = lax.axis_index("group") * share
    return [
        load(weight_s.at[:, pl.ds(first + start, CHUNK)], layout=plgpu.Layout.WGMMA)
        for start in range(0, min(share, HELD), CHUNK)
    ]


def multiply_share(
    own_ref: Ref,
    below_ref: Ref | None,
    held: list[jax.Array],
    weight_s: Ref,
    operand_s: Ref,
    part_s: Ref,
    live: int,
    bytes_s: Ref | None = None,
) -> None:
    """This warpgroup's part of the product, once what it reads is written.

    With R the held weights and W those of shared memory, the parts are R own' + W
    below'; or, without a layer below, R own' and, if there is a second tile, W own'.
    Columns that the registers do not hold come from shared memory. With `bytes_s` the
    parts go to the blocks of the cluster, 16 rows to each.
    """
    rows, share = operand_s.shape
    sizes = _Product(rows, share, weight_s.shape[1])
    second_tile = part_s.shape[0] == 2 * TILE and below_ref is None
    sources = [own_ref] if below_ref is None else [own_ref, below_ref]
    parts = [part_s] if bytes_s is None else [part_s, bytes_s]

    @plgpu.inline_mgpu(
        arg_types=(
            [plgpu.RefType()] * len(sources),
            [plgpu.Layout.WGMMA] * len(held),
            plgpu.RefType(TILED),
            plgpu.RefType(TILED),
            [plgpu.RefType()] * len(parts),
        )
    )
    def product(_, sources, held, weight, operand, parts):
        registers = _registers(held)
        first = arith.muli(mgpu.utils.warpgroup_idx(), _const(16 * sizes.share))
        weight = arith.addi(_address(weight), first)
        sums = None
        if below_ref is not None:
            _gather(sources[1], operand, live)
            sums = _multiply(sizes, weight, operand, [], None)
        _gather(sources[0], operand, live)
        sums = _multiply(sizes, weight, operand, registers, sums)
        if bytes_s is not None:
            _send_sums(sums, *parts, groups_of(sizes.width), sizes.rows)
            return
        _store_sums(sums, parts[0], sizes.rows, 0)
        if second_tile:
            sums = _multiply(sizes, weight, operand, [], None)
            _store_sums(sums, parts[0], sizes.rows, TILE)

    product(sources, held, weight_s, operand_s, parts)


def _registers(held):
    """The held weights, 32 bits each, in the order in which they are multiplied."""
    return [
        mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32))
        for chunk in held
        for start in range(0, CHUNK, 16)
        for register in chunk[:, start : start + 16].registers.flat
    ]


def _multiply(sizes, weight, operand, registers, sums):
    """The sums of a product, added to `sums` if there are any."""
    return mgpu.utils.inline_ptx(
        _product_ptx(sizes, len(registers), sums is not None),
        _address(operand),
        weight,
        *registers,
        *(sums or []),
        result_types=[ir.F32Type.get()] * (sizes.rows // 2),
        has_side_effects=True,
        convergent=True,
    )


def _product_ptx(sizes, registers, added):
    """All multiply-adds of a share of the columns, 16 at a time.

    Operands: the sums, the addresses of operand and weights, the weights in registers
    and, if `added`, the sums before.
    """
    count = sizes.rows // 2
    sums = [f"d{n}" for n in range(count)]
    start = [
        f"${count + 2 + registers + n}" if added else "0f00000000" for n in range(count)
    ]
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{sizes.rows}k16.f32.bf16.bf16 "
        f"{{{', '.join(sums)}}}"
    )
    lines = [
        "{ .reg .pred add; .reg .b32 low; .reg .b64 a, b;",
        f".reg .f32 {', '.join(sums)}; setp.eq.b32 add, 0, 0;",
        *(f"mov.f32 {d}, {value};" for d, value in zip(sums, start, strict=True)),
        "wgmma.fence.sync.aligned;",
    ]
    for k in range(sizes.share // 16):
        lines.append(_descriptor_ptx("b", f"${count}", k, sizes.share))
        if 4 * k < registers:
            a = ", ".join(f"${count + 2 + 4 * k + n}" for n in range(4))
            lines.append(f"{instruction}, {{{a}}}, b, add, 1, 1, 0;")
        else:
            lines.append(_descriptor_ptx("a", f"${count + 1}", k, sizes.width))
            lines.append(f"{instruction}, a, b, add, 1, 1, 0, 0;")
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    lines += [f"mov.f32 ${n}, {d};" for n, d in enumerate(sums)]
    return "\n".join([*lines, "}"])


def _descriptor_ptx(name, address, k, columns):
    """Describe the k-th 16 columns of a matrix to the instruction.

    Its swizzled rows have 128 bytes; the next eight rows are 16 * columns further.
    """
    chunk, part = divmod(k, 4)
    return (
        f"add.u32 low, {address}, {1024 * chunk + 32 * part}; shr.u32 low, low, 4; "
        f"and.b32 low, low, 0x3FFF; or.b32 low, low, 0x10000; "
        f"mov.b64 {name}, {{low, {columns | 1 << 30}}};"
    )


def _store_sums(sums, part, rows, first_row):
    """Sums as the tensor core leaves them, to rows of shared memory."""
    warp, start = _place_of_sums(rows)
    first = _scaled_sum((warp, 16), (_const(first_row), 1))
    address = arith.addi(_address(part), _scaled_sum((start, 1), (first, _line(rows))))
    lines = [
        f"st.shared.v2.f32 [$0+{offset}], {{${1 + n}, ${2 + n}}};"
        for n, offset in _offsets_of_sums(rows)
    ]
    mgpu.utils.inline_ptx("\n".join(lines), address, *sums, has_side_effects=True)


def _send_sums(sums, parts, count, groups, rows):
    """To each block of the cluster its 16 rows, those of one warp, with their bytes."""
    i32 = ir.IntegerType.get_signless(32)
    rank = mgpu.utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32)
    warp, start = _place_of_sums(rows)
    sender = _scaled_sum((rank, groups), (mgpu.utils.warpgroup_idx(), 1))
    start = _scaled_sum((start, 1), (sender, UNITS * _line(rows)))
    lines = [
        "{ .reg .b32 part, count;",
        "mapa.shared::cluster.u32 part, $0, $2;",
        "mapa.shared::cluster.u32 count, $1, $2;",
        *(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
            f"[part+{offset}], {{${3 + n}, ${4 + n}}}, [count];"
            for n, offset in _offsets_of_sums(rows)
        ),
        "}",
    ]
    mgpu.utils.inline_ptx(
        "\n".join(lines),
        arith.addi(_address(parts), start),
        _address(count),
        warp,
        *sums,
        has_side_effects=True,
    )


def send_nothing(parts_s: Ref, bytes_s: Ref, groups: int, rows: int) -> None:
    """Send sums of zero, where a step has no product."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def send(_, parts, count):
        zero = arith.constant(ir.F32Type.get(), 0.0)
        _send_sums([zero] * (rows // 2), parts, count, groups, rows)

    send(parts_s, bytes_s)


def _place_of_sums(rows):
    """This thread's warp, and the bytes from the warp's first row to its first sum."""
    thread = _thread()
    warp, lane = arith.divui(thread, _const(32)), arith.remui(thread, _const(32))
    row, pair = arith.divui(lane, _const(4)), arith.remui(lane, _const(4))
    return warp, _scaled_sum((row, _line(rows)), (pair, 8))


def _offsets_of_sums(rows):
    """Every second sum of a thread, and its bytes from the first: it has pairs."""
    return [
        (n + 2 * half, 8 * half * _line(rows) + 8 * n)
        for n in range(0, rows // 2, 4)
        for half in range(2)
    ]


def _line(rows):
    return 4 * (rows + PAD)


def start_counting(arrived_s: Ref) -> None:
    """Two counters of bytes, on each of which the 128 threads of a group wait."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def start(_, counters):
        lines = [
            "{ .reg .pred one; setp.eq.u32 one, $1, 0;",
            "@one mbarrier.init.shared::cta.b64 [$0], 128;",
            "@one mbarrier.init.shared::cta.b64 [$0+8], 128;",
            "@one fence.mbarrier_init.release.cluster; }",
        ]
        mgpu.utils.inline_ptx(
            "\n".join(lines), _address(counters), _thread(), has_side_effects=True
        )

    start(arrived_s)


def await_bytes(bytes_s: Ref, count: int) -> None:
    """Wait until `count` bytes more have arrived; all threads of a warpgroup call."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_, counter):
        lines = [
            "{ .reg .pred done; .reg .b64 state;",
            f"mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], {count // 128};",
            "wait: mbarrier.try_wait.shared::cta.b64 done, [$0], state;",
            "@!done bra wait; }",
        ]
        mgpu.utils.inline_ptx(
            "\n".join(lines), _address(counter), has_side_effects=True
        )

    wait(bytes_s)


def _gather(source, target, live):
    """Copy rows of global memory to swizzled shared memory, each word once written.

    A thread takes 16 of every 128 bytes of every sixteenth row. Only the first `live`
    rows are read; the others are set to zero.
    """
    i64 = ir.IntegerType.get_signless(64)
    source_type = ir.MemRefType(source.type)
    rows, columns = source_type.shape
    (stride, _), _ = source_type.get_strides_and_offset()
    thread = _thread()
    row, place = arith.divui(thread, _const(8)), arith.remui(thread, _const(8))
    line = arith.remui(row, _const(8))
    start = arith.extui(i64, _scaled_sum((row, 2 * stride), (place, 16)))
    pointer = mgpu.utils.memref_ptr(source)
    source = mgpu.utils.inline_ptx("mov.b64 $0, $1;", pointer, result_types=i64)
    source = arith.addi(source, start)
    start = _scaled_sum(
        (arith.divui(row, _const(8)), 16 * columns),
        (line, 128),
        (arith.xori(place, line), 16),
    )
    target = arith.addi(_address(target), start)
    mgpu.warpgroup_barrier()  # all warps have multiplied what is overwritten
    for first in range(0, rows, 16):
        offsets = [
            (2 * stride * first + 2 * column, 2 * columns * first + 16 * column)
            for column in range(0, columns, CHUNK)
        ]
        ptx = _poll_ptx(offsets, live - first)
        mgpu.utils.inline_ptx(ptx, source, target, row, has_side_effects=True)
    mgpu.commit_shared()


def _poll_ptx(offsets, live):
    """Load 16 bytes at each $0 + source until all are written; store at $1 + target.

    A thread whose row $2 is not below `live` loads nothing and stores zeros.

    A word w holds two bfloat16. With v = ~w, one of them is 0xFFFF exactly if
    (v - 0x00010001) & ~v has bit 15 or 31, and v - 0x00010001 is 0xFFFEFFFE - w.
    """
    words = [f"w{n}" for n in range(4 * len(offsets))]
    loads, stores = [], []
    for n, (source, target) in enumerate(offsets):
        quad = ", ".join(words[4 * n : 4 * n + 4])
        load = f"ld.relaxed.gpu.global.v4.b32 {{{quad}}}, [$0+{source}];"
        loads.append(f"@live {load}")
        stores.append(f"st.shared.v4.b32 [$1+{target}], {{{quad}}};")
    checks = [
        f"sub.u32 one, 0xFFFEFFFE, {w}; and.b32 one, one, {w}; or.b32 all, all, one;"
        for w in words
    ]
    return "\n".join(
        [
            f"{{ .reg .pred live, again; .reg .b32 one, all, {', '.join(words)};",
            *(f"mov.b32 {w}, 0;" for w in words),
            f"setp.lt.s32 live, $2, {live};",
            "poll: mov.b32 all, 0;",
            *loads,
            *checks,
            "and.b32 all, all, 0x80008000; setp.ne.b32 again, all, 0;",
            "@again bra poll;",
            *stores,
            "}",
        ]
    )


def wait_for_all(started: Ref, blocks: int) -> None:
    """Wait until every block has called `signal`."""
    plgpu.semaphore_wait(started, blocks, decrement=False, memory_scope="gpu")


def signal(started: Ref) -> None:
    """Count this block, once all threads of the warpgroup have stored."""

    @plgpu.inline_mgpu()
    def together(_):
        mgpu.warpgroup_barrier()

    together()
    plgpu.semaphore_signal(started, memory_scope="gpu")


def _address(shared):
    i32 = ir.IntegerType.get_signless(32)
    pointer = mgpu.utils.memref_ptr(shared)
    return mgpu.utils.inline_ptx("mov.b32 $0, $1;", pointer, result_types=i32)


def _thread():
    return arith.remui(mgpu.utils.thread_idx(), _const(128))


def _const(value):
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _scaled_sum(*terms):
    total = _const(0)
    for value, scale in terms:
        total = arith.addi(total, arith.muli(value, _const(scale)))
    return total
