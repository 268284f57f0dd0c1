"""The log-normalizer as one TPU kernel: logits never leave the core's own memory.

    lse[t, k] = logsumexp_v g(context[t, k] . table[v] + bias[v])

A block of rows (t, k) meets the table's blocks one after the other and keeps, for each
of the 128 lanes l of a register, the running maximum and sum over its own words

    top[r, l] = max_v g[r, v],    total[r, l] = sum_v exp(g[r, v] - top[r, l]),
                                  over the words v = l mod 128 seen so far,

so that nothing crosses lanes until the last block. HBM holds [R] results and no
[R, V] array. The gradient is blocked.py's, in plain XLA, which is the faster split on
TPU. It equals reference.py to rounding; float32 products have the precision of XLA's
own (`jax.default_matmul_precision`).

The kernel runs on TPU. Elsewhere jax refuses to compile it, except inside
`pltpu.force_tpu_interpret_mode()`, which is for tests.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from softbottle.ops.mixture import blocked, likelihood, shards
from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.implementation import Choice, Implementation
from softbottle.ops.mixture.options import note, product_dtype
from softbottle.ops.mixture.products import seen

LANES = 128
LOWEST = float(jnp.finfo(jnp.float32).min)

# Context rows and words of a block, by the bytes of a row. The table is read once for
# every block of rows: that many rows, at two bytes a number, make as many operations a
# byte read, and v5e needs 240 and v6e 560 to be kept busy. A kernel gets 16 MiB unless
# it asks for more (v5e and v6e have 128, others less). Blocks that travel exist twice;
# the logits and the two states are float32:
#
#   to 2 KiB    2 x 1024 x 2 KiB + 2 x  512 x 2 KiB + 2 MiB + 1.0 MiB  =  9.0 MiB
#   to 4 KiB    2 x  512 x 4 KiB + 2 x  512 x 4 KiB + 1 MiB + 0.5 MiB  =  9.5 MiB
#   cut         2 x 1024 x 1 KiB + 2 x 1024 x 1 KiB + 4 MiB + 1.0 MiB  =  9.0 MiB
#
# to which the compiler adds up to 1.5 MiB of its own. Longer rows are cut into pieces.
# (longest row in bytes, rows, words)
WHOLE_ROWS = ((2048, 1024, 512), (4096, 512, 512))
# (rows, words, bytes of a piece)
SPLIT_ROWS = (1024, 1024, 1024)


def _lse(context_TKE, vocabulary, activation, options):
    return _scores(context_TKE, vocabulary, None, activation, options).lse_TK


def _scores(context_TKE, vocabulary, labels_T, activation, options):
    # Scalars are handed to the kernel; an index into an array that is looked up for
    # every logit, as PLIF's, does not vectorize.
    if any(jnp.ndim(number) for number in activation.theta):
        name = activation.apply.__name__
        note(f"The TPU kernel has no activation {name!r}: plain XLA computes it.")
        inputs = (context_TKE, vocabulary, labels_T, activation, options)
        return blocked.IMPLEMENTATION.scores(*inputs)
    dtype = product_dtype(options, context_TKE, vocabulary.table_VE)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the TPU kernel takes bfloat16 or float32, got {dtype}.")
    theta = jax.tree.map(jnp.asarray, activation.theta)
    inputs = shards.varying_together(theta, context_TKE, vocabulary, labels_T)
    return _fused_scores(activation.apply, options, *inputs)


def _choice(context_TKE, table_VE, activation, options):
    del activation
    chunks = blocked.chunks(context_TKE, table_VE, options)
    return Choice("pallas_tpu", -(-context_TKE.shape[0] // chunks))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused_scores(apply, options, theta, context_TKE, vocabulary, labels_T):
    table_VE, bias_V = vocabulary
    dtype = product_dtype(options, context_TKE, table_VE)
    tokens, components, width = context_TKE.shape
    lse_1R = _rows_lse(
        apply,
        seen(context_TKE.reshape(tokens * components, width), dtype, options),
        seen(table_VE, dtype, options),
        bias_V.astype(jnp.float32)[None],
        jnp.sum(shards.live_rows(table_VE.shape[0], options), dtype=jnp.int32),
        theta,
    )
    lse_TK = lse_1R.reshape(tokens, components)
    activation = Activation(apply, params=theta)
    words = (context_TKE, vocabulary, labels_T, activation, options)
    return likelihood.with_own(lse_TK, *words)


def _scores_forward(apply, options, *inputs):
    found = _fused_scores(apply, options, *inputs)
    return found, (*inputs, found.lse_TK)


_fused_scores.defvjp(_scores_forward, blocked.scores_backward)


def _rows_lse(apply, *inputs):
    """`_call`, such that a batch of contexts is more rows and shares the table."""

    @jax.custom_batching.custom_vmap
    def one(*inputs):
        return _call(apply, *inputs)

    @one.def_vmap
    def _(batch, batched, context_BRE, *others):
        if batched[0] and not any(jax.tree.leaves(batched[1:])):
            lse_1N = one(context_BRE.reshape(-1, context_BRE.shape[-1]), *others)
            return lse_1N.reshape(batch, 1, -1), True
        leaves, structure = jax.tree.flatten((context_BRE, *others))
        flags = jax.tree.leaves(batched)

        def element(index):
            at_index = [
                leaf[index] if flag else leaf
                for leaf, flag in zip(leaves, flags, strict=True)
            ]
            return one(*structure.unflatten(at_index))

        return jax.lax.map(element, jnp.arange(batch)), True

    return one(*inputs)


def _call(apply, context_RE, table_VE, bias_1V, live, theta):
    """The kernel on rows of contexts: log-normalizers over the first `live` words."""
    (rows, width), vocab = context_RE.shape, table_VE.shape[0]
    size, words, piece = _blocks(rows, vocab, width, context_RE.dtype.itemsize)
    pieces = -(-width // piece)
    # Zeros are needed only where a row is cut. What lies beyond the last row or word of
    # an array may be anything: it reaches no result.
    beyond = ((0, 0), (0, pieces * piece - width))
    context_RE, table_VE = jnp.pad(context_RE, beyond), jnp.pad(table_VE, beyond)
    leaves, structure = jax.tree.flatten(theta)
    scalars = [live[None], *(leaf.astype(jnp.float32)[None] for leaf in leaves)]
    mesh_axes = jax.typeof(context_RE).manual_axis_type
    return pl.pallas_call(
        functools.partial(_kernel, apply, structure, pieces),
        out_shape=jax.ShapeDtypeStruct(
            (1, rows), jnp.float32, manual_axis_type=mesh_axes
        ),
        grid=(-(-rows // size), -(-vocab // words), pieces),
        in_specs=[
            pl.BlockSpec((size, piece), lambda row, word, piece: (row, piece)),
            pl.BlockSpec((words, piece), lambda row, word, piece: (word, piece)),
            pl.BlockSpec((1, words), lambda row, word, piece: (0, word)),
            *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in scalars),
        ],
        out_specs=pl.BlockSpec((1, size), lambda row, word, piece: (0, row)),
        scratch_shapes=[
            pltpu.VMEM((size, words), jnp.float32),
            pltpu.VMEM((size, LANES), jnp.float32),
            pltpu.VMEM((size, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        name="softbottle_lse",
    )(context_RE, table_VE, bias_1V, *shards.vary_over(mesh_axes.varying, *scalars))


def _blocks(rows, vocab, width, itemsize):
    """Rows, words and width of a block; in whole lanes, no larger than the arrays."""
    size, words, piece_bytes = SPLIT_ROWS
    piece = piece_bytes // itemsize
    for longest, whole_size, whole_words in reversed(WHOLE_ROWS):
        if width * itemsize <= longest:
            size, words, piece = whole_size, whole_words, width
    return min(size, _lanes(rows)), min(words, _lanes(vocab)), piece


def _lanes(count):
    return -(-count // LANES) * LANES


def _kernel(apply, structure, pieces, context_CE, table_WE, bias_1W, live_1, *others):
    """One block of rows, of words and of width; arrays are references."""
    *theta, lse_1C, g_CW, top_CL, total_CL = others
    word, piece = pl.program_id(1), pl.program_id(2)
    words = table_WE.shape[0]
    left = live_1[0] - word * words
    last = piece == pieces - 1

    @pl.when((word == 0) & (piece == 0))
    def _():
        top_CL[...] = jnp.full(top_CL.shape, LOWEST, top_CL.dtype)
        total_CL[...] = jnp.zeros(total_CL.shape, total_CL.dtype)

    @pl.when(left > 0)
    def _():
        z_CW = jax.lax.dot_general(
            context_CE[...],
            table_WE[...],
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        before_CW = 0.0 if pieces == 1 else jnp.where(piece == 0, 0.0, g_CW[...])
        g_CW[...] = before_CW + z_CW

    def add(live):
        def score(z):
            return apply(structure.unflatten(scalar[0] for scalar in theta), z)

        _add_block(score, live, bias_1W, g_CW, top_CL, total_CL)

    # Nearly every block is full and needs no mask.
    pl.when(last & (left >= words))(lambda: add(None))
    pl.when(last & (left > 0) & (left < words))(lambda: add(left))

    @pl.when(last & (word == pl.num_programs(1) - 1))
    def _():
        # With rows along the lanes, as the result lies, this sum crosses none either.
        top_LC, total_LC = top_CL[...].T, total_CL[...].T
        best_1C = jnp.max(top_LC, axis=0, keepdims=True)
        total_1C = jnp.sum(total_LC * jnp.exp(top_LC - best_1C), axis=0, keepdims=True)
        lse_1C[...] = best_1C + jnp.log(total_1C)


def _add_block(score, live, bias_1W, g_CW, top_CL, total_CL):
    """Take a block's products, in `g_CW`, into the running maxima and sums."""
    tiles = [pl.ds(at, LANES) for at in range(0, g_CW.shape[1], LANES)]
    before_CL = after_CL = top_CL[...]
    for tile in tiles:
        g_CL = score(g_CW[:, tile] + bias_1W[:, tile])
        if live is not None:
            lane_CL = jax.lax.broadcasted_iota(jnp.int32, g_CL.shape, 1)
            g_CL = jnp.where(lane_CL < live - tile.start, g_CL, -jnp.inf)
        g_CW[:, tile] = g_CL
        after_CL = jnp.maximum(after_CL, g_CL)
    sum_CL = total_CL[...] * jnp.exp(before_CL - after_CL)
    for tile in tiles:
        sum_CL += jnp.exp(g_CW[:, tile] - after_CL)
    top_CL[...], total_CL[...] = after_CL, sum_CL


IMPLEMENTATION = Implementation(
    _lse,
    functools.partial(likelihood.loss_from, _scores),
    lambda *_: None,
    _choice,
    _scores,
    blocked.IMPLEMENTATION.entropies,
)
