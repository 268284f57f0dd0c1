"""The frequent words' logits and their gradients as one kernel for Hopper GPUs.

    logit[s, t] = tree(gates[s, t], (table[s] . context[t, k])_k) + bias[s]
    E[s, t]     = exp(logit[s, t] - ref[t]),  S[t] = sum_s E[s, t]

(gated_tree.py has the tree.) For training leave, in bfloat16, E times the derivatives
of the logit by the K products and by the K - 1 levels of the gates, and E itself, with
float32 sums of the unrounded E; without references only a maximum and a sum of each
tile.

As in hopper_kernel.py a block is three warpgroups, of which one copies and two
multiply, and the grid is persistent. The products are transposed: the matrix unit's
rows are words and its columns the contexts of a few tokens, so that what the tree takes
of one word and one token lies in one thread's registers. Columns are in the order of
`by_group`: groups of 64 / K tokens, in a group the components, of these the tokens.

The levels are one short product per group: what a gate adds for a token or a word alone
is a column of it (`gated_gpu.py`).

Needs jax 0.11 or newer.

Axes: P words, padded; R columns, K for each token; Q width of the contexts and X of
what gates read, padded; C tokens, padded; I tiles of tokens; J half tiles of words, W
words of one; G tokens of a group.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from softbottle.ops.mixture import gated_tree, hopper_kernel
from softbottle.ops.mixture.activations import LOG2_E
from softbottle.ops.mixture.hopper_kernel import Which
from softbottle.ops.mixture.options import Options

# The pipeline's pieces: words of a block, of each warpgroup a half, and columns.
BLOCK_WORDS = hopper_kernel.BLOCK_ROWS
HALF_WORDS = hopper_kernel.WARPGROUP_ROWS
BLOCK_COLUMNS = hopper_kernel.BLOCK_WORDS
BLOCK_WIDTH = hopper_kernel.BLOCK_WIDTH
# The columns that are mixed and sent out at a time.
GROUP_COLUMNS = 64
# What gates read, of every column: twice as much would not fit beside the ring.
GATE_WIDTH = 32
# Where a warpgroup's warps meet for a sum: two numbers of each thread at a time.
MEETING = 512
# Others would leave registers or shared memory short.
COMPONENTS = (2, 4)


class _How(NamedTuple):
    """The number of components, and whether the kernel is interpreted."""

    components: int
    interpreted: bool

    @property
    def group_tokens(self) -> int:
        return GROUP_COLUMNS // self.components

    @property
    def tile_tokens(self) -> int:
        return BLOCK_COLUMNS // self.components


class Inputs(NamedTuple):
    """What the kernel is given.

    Without references (`ref_C`) it is for evaluation. With `which` it computes these
    tiles of tokens and leaves the others of `stored` as they are.
    """

    table_PQ: jax.Array
    context_RQ: jax.Array
    word_PX: jax.Array
    read_RX: jax.Array
    bias_P: jax.Array
    ref_C: jax.Array | None = None
    which: Which | None = None
    stored: Any = None


class _Scratch(NamedTuple):
    """What a block holds in shared memory; the leading axis is the warpgroup's."""

    word: Any
    read: Any
    bias: Any
    stats: Any
    arrived: Any
    meeting: Any
    ref: Any = None
    out: Any = None


def call(options: Options, components: int, inputs: Inputs) -> Any:
    """Run the kernel; under `vmap`, once for each element.

    Returns:
        With references ((E by the products, E by the levels and E), [P, R] each,
        sum_JC); without (top_JC, sum_JC), of exponents in base 2.
    """
    inputs = inputs._replace(
        bias_P=_base2(inputs.bias_P),
        ref_C=None if inputs.ref_C is None else _base2(inputs.ref_C),
    )
    # A device that is described by hand may not say how many: as many as an H200.
    processors = (options.device and options.device.multiprocessors) or 132
    interpret = hopper_kernel.interpreter()
    run = functools.partial(_kernel_call, components, processors, interpret)
    return jax.custom_batching.sequential_vmap(run)(inputs)


def _base2(vector):
    return vector.astype(jnp.float32) * LOG2_E


def _kernel_call(components, processors, interpret, inputs):
    words, columns = len(inputs.table_PQ), len(inputs.context_RQ)
    tokens = columns // components
    axes = jax.typeof(inputs.context_RQ).manual_axis_type

    def shape(sizes, dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, manual_axis_type=axes)

    stats = shape((words // HALF_WORDS, tokens), jnp.float32)
    large = shape((words, columns), jnp.bfloat16)
    outputs = [large, large, stats] if inputs.ref_C is not None else [stats, stats]
    if inputs.stored is not None:
        # A reference is written in place, as an output that it already has.
        inputs = inputs._replace(stored=jax.tree.map(jax.new_ref, inputs.stored))
        outputs = [stats]
    given, structure = jax.tree.flatten(inputs)

    def body(*refs):
        named = jax.tree.unflatten(structure, refs[: len(given)])
        written = [*(named.stored or ()), *refs[len(given) :]]
        _kernel(_How(components, bool(interpret)), named, written)

    jobs = (words // BLOCK_WORDS) * (columns // BLOCK_COLUMNS)
    results = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(min(jobs, 2 if interpret else processors),),
        grid_names=("blocks",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Powers of two and roots without a care for denormal results.
            approx_math=True,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(*given)
    if inputs.ref_C is None:
        return tuple(results)
    *stored, sum_JC = results
    if inputs.stored is not None:
        stored = map(jax.freeze, inputs.stored)
    return tuple(stored), sum_JC


def _kernel(how, refs, written):
    """One persistent block: tiles of 128 words by 256 columns, one by one."""
    token_tiles = refs.context_RQ.shape[0] // BLOCK_COLUMNS
    if refs.which is not None:
        token_tiles = refs.which.count_I[token_tiles - 1]
    word_tiles = refs.table_PQ.shape[0] // BLOCK_WORDS

    @functools.partial(
        pl.run_scoped,
        ring=hopper_kernel.ring(refs.table_PQ, refs.context_RQ),
        collective_axes="warpgroup",
        **_scratch(how, refs),
    )
    def block(ring, **scratch):
        me = lax.axis_index("warpgroup")

        @plgpu.nd_loop((token_tiles * word_tiles,), collective_axes="blocks")
        def job(loop):
            word_tile = lax.div(loop.index[0], jnp.int32(token_tiles))
            token_tile = lax.rem(loop.index[0], jnp.int32(token_tiles))
            if refs.which is not None:
                token_tile = refs.which.tile_I[token_tile]
            place = (me, word_tile, token_tile)
            _tile(how, refs, written, _Scratch(**scratch), ring, place)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scratch(how, refs):
    """Shared memory and barriers of a block, by the names in `_Scratch`."""
    store, dtype = refs.ref_C is not None, refs.table_PQ.dtype
    rows = hopper_kernel.layout(GATE_WIDTH, dtype)
    scratch = {
        "word": plgpu.SMEM((2, HALF_WORDS, GATE_WIDTH), dtype, transforms=rows),
        "read": plgpu.SMEM((2, BLOCK_COLUMNS, GATE_WIDTH), dtype, transforms=rows),
        "bias": plgpu.SMEM((2, HALF_WORDS), jnp.float32),
        "stats": plgpu.SMEM((2, 2 - store, how.tile_tokens), jnp.float32),
        "meeting": plgpu.SMEM((2, MEETING), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=3 + store, num_barriers=2),
    }
    if store:
        scratch["ref"] = plgpu.SMEM((2, how.tile_tokens), jnp.float32)
        scratch["out"] = plgpu.SMEM(
            (2, 2, HALF_WORDS, GROUP_COLUMNS),
            dtype,
            # In pieces that each component has of its own.
            transforms=hopper_kernel.layout(how.group_tokens, dtype),
        )
    return scratch


def _tile(how, refs, written, scratch, ring, place):
    """One tile, from its products to what leaves of it."""
    me, word_tile, token_tile = place
    words = pl.ds(word_tile * BLOCK_WORDS, BLOCK_WORDS)
    half = pl.ds(word_tile * BLOCK_WORDS + me * HALF_WORDS, HALF_WORDS)
    columns = pl.ds(token_tile * BLOCK_COLUMNS, BLOCK_COLUMNS)
    tokens = pl.ds(token_tile * how.tile_tokens, how.tile_tokens)

    def multiply(_, table_smem, context_smem, sum_ref):
        mine = pl.ds(me * HALF_WORDS, HALF_WORDS)
        plgpu.wgmma(sum_ref, table_smem.at[mine], context_smem.T)
        plgpu.wgmma_wait(0)
        return sum_ref

    def finish(run_pipeline):
        mine = _Scratch(*(ref if ref is None else ref.at[me] for ref in scratch))
        copies = [
            (refs.word_PX.at[half], mine.word),
            (refs.read_RX.at[columns], mine.read),
            (refs.bias_P.at[half], mine.bias),
        ]
        if refs.ref_C is not None:
            copies.append((refs.ref_C.at[tokens], mine.ref))
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target, mine.arrived)
        sums = plgpu.ACC((HALF_WORDS, BLOCK_COLUMNS), jnp.float32)

        @functools.partial(pl.run_scoped, sum_ref=sums)
        def epilogue(sum_ref):
            run_pipeline(sum_ref)
            plgpu.barrier_wait(mine.arrived)
            targets = (half, 2 * word_tile + me, token_tile)
            _leave(how, sum_ref[...], mine, written, targets)

    hopper_kernel.pipeline(refs.table_PQ, multiply, finish)(
        refs.table_PQ.at[words, :],
        refs.context_RQ.at[columns, :],
        allocations=ring,
    )


def _leave(how, sum_WR, scratch, written, targets):
    """The epilogue of a warpgroup's tile, group by group."""
    half, half_tile, token_tile = targets
    tokens = how.group_tokens
    store = scratch.ref is not None
    shape = (HALF_WORDS, tokens)
    by_word, by_token = (plgpu.Layout.WGMMA.reduce(axis) for axis in (1, 0))
    over_words = functools.partial(_over_words, how, scratch.meeting)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for group in range(BLOCK_COLUMNS // GROUP_COLUMNS):
        here = pl.ds(group * tokens, tokens)
        columns = slice(group * GROUP_COLUMNS, (group + 1) * GROUP_COLUMNS)
        z = _pieces(sum_WR[:, columns], how.components, tokens)
        gates = _gates(how, scratch, group)
        nodes = gated_tree.nodes(gates, z)
        bias_W = plgpu.load(scratch.bias, layout=by_word)
        logit_WG = nodes[0] * LOG2_E + lax.broadcast_in_dim(bias_W, shape, [0])
        if store:
            ref_G = plgpu.load(scratch.ref.at[here], layout=by_token)
        else:
            ref_G = over_words("max", logit_WG)
            scratch.stats[1, here] = ref_G
        e_WG = jnp.exp2(logit_WG - lax.broadcast_in_dim(ref_G, shape, [1]))
        scratch.stats[0, here] = over_words("add", e_WG)
        if store:
            levels, products = gated_tree.pull(gates, nodes, e_WG)
            base = token_tile * BLOCK_COLUMNS + columns.start
            place = (half, pl.ds(base, GROUP_COLUMNS))
            _send(scratch.out.at[0], products, written[0], place)
            _send(scratch.out.at[1], [*levels, e_WG], written[1], place)
    plgpu.commit_smem()
    here = pl.ds(token_tile * how.tile_tokens, how.tile_tokens)
    stats = written[-1:] if store else [written[1], written[0]]
    for number, target in enumerate(stats):
        plgpu.copy_smem_to_gmem(scratch.stats.at[number], target.at[half_tile, here])


def _over_words(how, meeting, operation, array_WG):
    """The sum or maximum over a warpgroup's words, per token."""
    if how.interpreted:
        # It has no layouts, and no code that is written for them.
        return {"add": jnp.sum, "max": jnp.max}[operation](array_WG, axis=0)
    tokens = array_WG.shape[1]
    result = plgpu.ShapeDtypeStruct(
        (tokens,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(0)
    )

    # What jnp.sum becomes has all warpgroups' warps meet at one place, at once.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=result
    )
    def reduced(_, array, meeting):
        return array.reduce(operation, 0, meeting)

    return reduced(array_WG, meeting)


def _pieces(array_WR, count, size):
    return [array_WR[:, k * size : (k + 1) * size] for k in range(count)]


def _gates(how, scratch, group):
    """The gates of a group's tokens, by one product for all of them."""
    count, tokens = how.components - 1, how.group_tokens

    @functools.partial(
        pl.run_scoped, level_ref=plgpu.ACC((HALF_WORDS, count * tokens), jnp.float32)
    )
    def gates(level_ref):
        rows = pl.ds(group * GROUP_COLUMNS, count * tokens)
        plgpu.wgmma(level_ref, scratch.word, scratch.read.at[rows].T)
        plgpu.wgmma_wait(0)
        # A root and a square: the hardware has no division.
        level_WR = level_ref[...]
        root_WR = lax.rsqrt(1 + jnp.exp2(level_WR * -LOG2_E))
        return root_WR * root_WR

    return _pieces(gates, count, tokens)


def _send(out, pieces, array_PR, place):
    """A group's pieces side by side, on their way while the next are computed."""
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    size = GROUP_COLUMNS // len(pieces)
    for k, piece_WG in enumerate(pieces):
        out[:, k * size : (k + 1) * size] = piece_WG.astype(array_PR.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out, array_PR.at[place])
