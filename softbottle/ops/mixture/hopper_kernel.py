"""The first product of the mixture loss as one kernel for Hopper GPUs.

    z = context @ table' + bias,  E = exp(g(z) - ref) g'(z),  S = sum_v exp(g(z) - ref)

A tile of z lives in registers from the last multiply-add to the exponential: for
training E leaves in bfloat16 with float32 row sums of the unrounded values, for
evaluation only a maximum and a sum of each tile leave, and for entropies the sum of
exp(g(z) - ref) (g(z) - ref) as well. For reductions over all words (word_scores.py) z
itself leaves in float32, beside the maxima and sums of evaluation.

Where the most probable words are asked for, the largest exponential of each tile leaves
too, its 8 lowest bits replaced by its place among the tile's 256 words: one instruction
per element finds both. Words whose probabilities differ by less than 2^-15 of
themselves may thus change places.

One block of threads is three warpgroups: one copies tiles into a ring in shared memory,
two multiply, each half of the tile's rows. The grid is persistent, one block a
multiprocessor, rows fastest, so that a tile of the table stays in the cache. All
exponents are in base 2, which is what the hardware computes.

Needs jax 0.11 or newer.

Axes: P words and Q width, both padded to whole tiles; I tiles of rows; J tiles of
words.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from softbottle.ops.mixture import activations
from softbottle.ops.mixture.activations import LOG2_E, Activation
from softbottle.ops.mixture.options import Options

# One size of tile was the fastest at every width that was tried on an H200. Times of
# the first product against its own (docs/results/head.md), at widths
# 320 | 576 | 1,024 | 4,096:
#
#   192 words, 4 stages                          1.06 | 1.03 | 1.03 | 1.11
#   128 words, 6 stages                          1.09 | does not fit
#   256 words, 4 stages, 32 words out at a time  1.04 | 1.05 | 1.05 | 1.08
#   256 words, two blocks that share a tile      1.06 | 1.04 | 1.02 | 1.05
#
# The ring of 3 x 48 KiB and what is on its way out fit the 227 KiB there are.
WARPGROUP_ROWS = 64
BLOCK_ROWS = 2 * WARPGROUP_ROWS
BLOCK_WORDS = 256
BLOCK_WIDTH = 64
STAGES = 3
OUT_WORDS = 64
# The bits of a key that are a place among the words of a tile, the first the largest.
PLACE = BLOCK_WORDS - 1

# Activations that spilled registers with the hardware's approximate functions.
_SPILLING = (activations.add_log_sigmoid, activations.generalized)

_INTERPRET = contextvars.ContextVar("interpret", default=None)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run the kernels in jax's interpreter inside this context, on any machine."""
    token = _INTERPRET.set(plgpu.InterpretGPUParams())
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def interpreter() -> Any:
    """What `plgpu.kernel` takes to be interpreted; None where it is compiled."""
    return _INTERPRET.get()


class Which(NamedTuple):
    """Some tiles of rows: how many there are up to each tile, and the numbers of all.

    `tile_I` has as many that mean something as the last of `count_I` says.
    """

    count_I: jax.Array
    tile_I: jax.Array


class Inputs(NamedTuple):
    """What the kernel is given.

    Without references (`ref_R`) it is for evaluation. E has the factor tilt_0R +
    tilt_1R (g(z) - ref) if there is a tilt. With `which` it computes these tiles of
    rows and leaves the others of `e_RP` as they are.
    """

    context_RQ: jax.Array
    table_PQ: jax.Array
    bias_P: jax.Array
    ref_R: jax.Array | None = None
    tilt_2R: jax.Array | None = None
    which: Which | None = None
    e_RP: Any = None


class _Refs(NamedTuple):
    """What the kernel reads and writes in global memory.

    `first_out` is E [R, P] or, for evaluation, [J, R] maxima of tiles; `moment_JR`,
    `key_JR` and `z_RP` are None unless moments, peaks or logits are asked for.
    """

    context_RQ: Any
    table_PQ: Any
    bias_P: Any
    ref_R: Any
    tilt_2R: Any
    which: Any
    first_out: Any
    sum_JR: Any
    moment_JR: Any
    key_JR: Any
    z_RP: Any


class _Scratch(NamedTuple):
    """What a block holds in shared memory; the leading axis is the warpgroup's."""

    bias: Any
    stats: Any
    arrived: Any
    out: Any = None
    tilt: Any = None
    key: Any = None


class _Beside(NamedTuple):
    """What leaves beside the sums, in this order."""

    moments: bool = False
    peaks: bool = False
    logits: bool = False


def call(
    activation: Activation,
    options: Options,
    inputs: Inputs,
    classes: int = 1,
    **beside: bool,
) -> Any:
    """Run the kernel: E or maxima, and sums; under `vmap`, once for each element.

    Rows and words are those of so many classes, one below the other. What else is
    asked for, by the names in `_Beside`, follows.
    """
    inputs = inputs._replace(
        bias_P=_base2(inputs.bias_P) * activation.unit,
        ref_R=None if inputs.ref_R is None else _base2(inputs.ref_R),
    )
    if inputs.tilt_2R is not None:
        per_nat = jnp.asarray([1, 1 / LOG2_E], jnp.float32)
        tilt_2R = inputs.tilt_2R.astype(jnp.float32) * per_nat[:, None]
        inputs = inputs._replace(tilt_2R=tilt_2R)
    # A device that is described by hand may not say how many: as many as an H200.
    processors = (options.device and options.device.multiprocessors) or 132
    run = functools.partial(
        _kernel_call,
        activation,
        classes,
        _Beside(**beside),
        processors,
        interpreter(),
    )
    return jax.custom_batching.sequential_vmap(run)(inputs)


def _base2(vector):
    return vector.astype(jnp.float32) * LOG2_E


def _kernel_call(activation, classes, beside, processors, interpret, inputs):
    rows, words = len(inputs.context_RQ), len(inputs.table_PQ) // classes
    tiles = words // BLOCK_WORDS
    axes = jax.typeof(inputs.context_RQ).manual_axis_type

    def shape(sizes, dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, manual_axis_type=axes)

    stats = shape((tiles, rows), jnp.float32)
    others = _Beside(
        stats,
        shape((tiles, rows), jnp.int32),
        shape((rows, words), jnp.float32),
    )
    others = [each for each, asked in zip(others, beside, strict=True) if asked]
    outputs = [stats if inputs.ref_R is None else shape((rows, words), jnp.bfloat16)]
    if inputs.e_RP is not None:
        # A reference is written in place, as an output that it already has.
        inputs, outputs = inputs._replace(e_RP=jax.new_ref(inputs.e_RP)), []
    given, structure = jax.tree.flatten(inputs)

    def body(*refs):
        named = jax.tree.unflatten(structure, refs[: len(given)])
        written = list(refs[len(given) :])
        asked = [written.pop() if each else None for each in reversed(beside)]
        first_out, sum_JR = (named.e_RP, *written)[-2:]
        refs = _Refs(*named[:-1], first_out, sum_JR, *reversed(asked))
        _kernel(activation, classes, refs)

    jobs = tiles * (rows // BLOCK_ROWS)
    results = plgpu.kernel(
        body,
        out_type=[*outputs, stats, *others],
        grid=(min(jobs, 2 if interpret else processors),),
        grid_names=("blocks",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Powers of two and roots without a care for denormal results.
            approx_math=activation.apply not in _SPILLING,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(*given)
    if inputs.e_RP is None:
        return results
    return jax.freeze(inputs.e_RP), *results


def _kernel(activation, classes, refs):
    """One persistent block: tiles of 128 rows by 256 words, one by one."""
    row_tiles = refs.context_RQ.shape[0] // BLOCK_ROWS
    rows_of_class = row_tiles // classes
    if refs.which is not None:
        row_tiles = refs.which.count_I[row_tiles - 1]
    word_tiles = refs.sum_JR.shape[0]

    @functools.partial(
        pl.run_scoped,
        ring=ring(refs.context_RQ, refs.table_PQ),
        collective_axes="warpgroup",
        **_scratch(refs),
    )
    def block(ring, **scratch):
        me = lax.axis_index("warpgroup")

        @plgpu.nd_loop((row_tiles * word_tiles,), collective_axes="blocks")
        def job(loop):
            word_tile = lax.div(loop.index[0], row_tiles)
            row_tile = lax.rem(loop.index[0], row_tiles)
            if refs.which is not None:
                row_tile = refs.which.tile_I[row_tile]
            table_tile = word_tile
            if classes > 1:
                table_tile += lax.div(row_tile, rows_of_class) * word_tiles
            place = (me, row_tile, word_tile, table_tile)
            _tile(activation, refs, _Scratch(**scratch), ring, place)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def layout(words: int, dtype: jnp.dtype) -> Sequence[plgpu.Transform]:
    """Rows of `words` elements as the matrix unit wants them in shared memory."""
    swizzle = plgpu.find_swizzle(words * dtype.itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))
    return (tiling, plgpu.SwizzleTransform(swizzle))


def pipeline(array_RQ: Any, body: Callable, context: Callable) -> Callable:
    """The ring: one warpgroup copies pieces of the width, two call `body` on them.

    Pieces are of 128 rows of an array and of 256 of another.

    Args:
        array_RQ: one of them, for its width and dtype.
        body: (step, piece, other piece, sums) -> sums.
        context: what runs the pipeline, and then does the rest of a tile.
    """

    def spec(rows):
        return plgpu.BlockSpec(
            (rows, BLOCK_WIDTH),
            lambda step: (0, step),
            transforms=layout(BLOCK_WIDTH, array_RQ.dtype),
            memory_space=plgpu.SMEM,
        )

    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(array_RQ.shape[1] // BLOCK_WIDTH,),
        # Which leaves 232 to a thread that multiplies. With 32 these would get 240,
        # more together than a block is given at its start: it would wait for ever.
        memory_registers=40,
        wg_axis="warpgroup",
        num_compute_wgs=2,
        max_concurrent_steps=STAGES,
        compute_context=context,
        in_specs=[spec(BLOCK_ROWS), spec(BLOCK_WORDS)],
    )


def ring(array_RQ: Any, other_PQ: Any) -> Any:
    """What the pipeline of two arrays holds in shared memory."""

    def nothing(*_, **__):
        """The body of a pipeline of which only the ring's size is asked."""

    return pipeline(array_RQ, nothing, nothing).get_allocations(array_RQ, other_PQ)


def _scratch(refs):
    """Shared memory and barriers of a block, by the names in `_Scratch`."""
    store, tilts = refs.ref_R is not None, refs.tilt_2R is not None
    stats = 2 + (refs.moment_JR is not None)
    arrivals = 1 + store + 2 * tilts
    scratch = {
        "bias": plgpu.SMEM((2, BLOCK_WORDS), jnp.float32),
        "stats": plgpu.SMEM((2, stats, WARPGROUP_ROWS), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=arrivals, num_barriers=2),
    }
    if tilts:
        scratch["tilt"] = plgpu.SMEM((2, 2, WARPGROUP_ROWS), jnp.float32)
    if refs.key_JR is not None:
        scratch["key"] = plgpu.SMEM((2, WARPGROUP_ROWS), jnp.int32)
    if store or refs.z_RP is not None:
        dtype = (refs.first_out if store else refs.z_RP).dtype
        scratch["out"] = plgpu.SMEM(
            (2, 2, WARPGROUP_ROWS, OUT_WORDS),
            dtype,
            transforms=layout(OUT_WORDS, dtype),
        )
    return scratch


def _tile(activation, refs, scratch, ring, place):
    """One tile of z, from its products to what leaves of it."""
    me, row_tile, word_tile, table_tile = place
    words = pl.ds(table_tile * BLOCK_WORDS, BLOCK_WORDS)
    rows = pl.ds(row_tile * BLOCK_ROWS + me * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def multiply(_, context_smem, table_smem, sum_ref):
        half = pl.ds(me * WARPGROUP_ROWS, WARPGROUP_ROWS)
        plgpu.wgmma(sum_ref, context_smem.at[half], table_smem.T)
        plgpu.wgmma_wait(0)
        return sum_ref

    def finish(run_pipeline):
        mine = _Scratch(*(ref if ref is None else ref.at[me] for ref in scratch))
        plgpu.copy_gmem_to_smem(refs.bias_P.at[words], mine.bias, mine.arrived)
        if refs.ref_R is not None:
            plgpu.copy_gmem_to_smem(refs.ref_R.at[rows], mine.stats.at[0], mine.arrived)
        if refs.tilt_2R is not None:
            for part in range(2):
                tilt = (refs.tilt_2R.at[part, rows], mine.tilt.at[part])
                plgpu.copy_gmem_to_smem(*tilt, mine.arrived)
        sums = plgpu.ACC((WARPGROUP_ROWS, BLOCK_WORDS), jnp.float32)

        @functools.partial(pl.run_scoped, sum_ref=sums)
        def epilogue(sum_ref):
            run_pipeline(sum_ref)
            plgpu.barrier_wait(mine.arrived)
            gain = functools.partial(activation.base2, activation.theta)
            unit = activation.unit * LOG2_E
            _leave(gain, unit, sum_ref, mine, refs, word_tile, rows)

    pipeline(refs.context_RQ, multiply, finish)(
        refs.context_RQ.at[pl.ds(row_tile * BLOCK_ROWS, BLOCK_ROWS), :],
        refs.table_PQ.at[words, :],
        allocations=ring,
    )


def _leave(gain, unit, sum_ref, scratch, refs, word_tile, rows):
    """Exponentiate a warpgroup's tile, part by part, and send out what is asked for."""
    by_row = plgpu.Layout.WGMMA.reduce(1)
    shape = (WARPGROUP_ROWS, OUT_WORDS)
    logits = functools.partial(_logits, sum_ref[...], unit, scratch.bias)
    store = refs.ref_R is not None
    parts_of_tile = range(BLOCK_WORDS // OUT_WORDS)
    if store:
        ref_R = plgpu.load(scratch.stats.at[0], layout=by_row)
    else:
        tops = (jnp.max(logits(part), axis=1) for part in parts_of_tile)
        # g increases, so its maximum is at that of z.
        ref_R = gain(functools.reduce(jnp.maximum, tops), 0.0)[0]
    ref_RW = lax.broadcast_in_dim(ref_R, shape, [0])
    if refs.tilt_2R is not None:
        level_RW, tilt_RW = (
            lax.broadcast_in_dim(
                plgpu.load(scratch.tilt.at[part], layout=by_row), shape, [0]
            )
            for part in range(2)
        )
    total_R = moment_R = key_R = None
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part in parts_of_tile:
        z_RW = logits(part)
        ahead_RW, gain_RW = gain(z_RW, ref_RW)
        exp_RW = jnp.exp2(ahead_RW)
        total_R = _plus(total_R, jnp.sum(exp_RW, axis=1))
        if refs.moment_JR is not None:
            moment_R = _plus(moment_R, jnp.sum(exp_RW * ahead_RW, axis=1))
        if refs.key_JR is not None:
            part_R = jnp.max(_keys(exp_RW, part), axis=1)
            key_R = part_R if key_R is None else jnp.maximum(key_R, part_R)
        if store:
            e_RW = exp_RW if gain_RW is None else exp_RW * gain_RW
            if refs.tilt_2R is not None:
                e_RW = e_RW * (level_RW + tilt_RW * ahead_RW)
            _send(e_RW, scratch, refs.first_out, rows, word_tile, part)
        if refs.z_RP is not None:
            _send(z_RW * (1 / LOG2_E), scratch, refs.z_RP, rows, word_tile, part)
    scratch.stats[1] = total_R
    if not store:
        scratch.stats[0] = ref_R
    if refs.moment_JR is not None:
        scratch.stats[2] = moment_R
    if refs.key_JR is not None:
        scratch.key[...] = key_R
    plgpu.commit_smem()
    if not store:
        plgpu.copy_smem_to_gmem(scratch.stats.at[0], refs.first_out.at[word_tile, rows])
    plgpu.copy_smem_to_gmem(scratch.stats.at[1], refs.sum_JR.at[word_tile, rows])
    if refs.moment_JR is not None:
        out = refs.moment_JR.at[word_tile, rows]
        plgpu.copy_smem_to_gmem(scratch.stats.at[2], out)
    if refs.key_JR is not None:
        plgpu.copy_smem_to_gmem(scratch.key, refs.key_JR.at[word_tile, rows])


def _send(array_RW, scratch, array_RP, rows, word_tile, part):
    """A part of a tile, on its way to global memory while the next is computed."""
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    scratch.out[part % 2] = array_RW.astype(array_RP.dtype)
    plgpu.commit_smem()
    words = pl.ds(word_tile * BLOCK_WORDS + part * OUT_WORDS, OUT_WORDS)
    plgpu.copy_smem_to_gmem(scratch.out.at[part % 2], array_RP.at[rows, words])


def _keys(exp_RW, part):
    """Exponentials as integers, which are in the same order, with their places."""
    place_RW = lax.broadcasted_iota(jnp.int32, exp_RW.shape, 1)
    place_RW = PLACE - part * OUT_WORDS - place_RW
    return (lax.bitcast_convert_type(exp_RW, jnp.int32) & ~PLACE) | place_RW


def _plus(total, part):
    return part if total is None else total + part


def _logits(sum_RW, unit, bias_smem, part):
    """A part of a tile, in base 2 and `unit`: few enough for registers."""
    here = slice(part * OUT_WORDS, (part + 1) * OUT_WORDS)
    bias_smem_W = bias_smem.at[pl.ds(here.start, OUT_WORDS)]
    bias_W = plgpu.load(bias_smem_W, layout=plgpu.Layout.WGMMA.reduce(0))
    shape = (WARPGROUP_ROWS, OUT_WORDS)
    return sum_RW[:, here] * unit + lax.broadcast_in_dim(bias_W, shape, [1])
