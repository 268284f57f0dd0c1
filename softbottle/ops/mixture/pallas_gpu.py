"""The first product of the mixture loss as one kernel for Hopper GPUs.

    z = context @ table' + bias,  E = exp(g(z) - ref) g'(z),  S = sum_v exp(g(z) - ref)

A tile of z lives in registers from the last multiply-add to the exponential: for
training E leaves in bfloat16 with float32 row sums of the unrounded values, for
evaluation only a maximum and a sum of each tile leave. XLA adds up the tiles, in order,
and computes the other two products, at which its library is near the machine's peak.

One block of threads is three warpgroups: one copies tiles into a ring in shared memory,
two multiply, each half of the tile's rows. The grid is persistent, one block a
multiprocessor, rows fastest, so that a tile of the table stays in the cache. All
exponents are in base 2, which is what the hardware computes.

Needs jax 0.11 or newer. Activations with learned segments take the XLA path.
"""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from softbottle.ops.mixture import activations, blocked, exponential, parts
from softbottle.ops.mixture.activations import DEAD, LOG2_E, Activation
from softbottle.ops.mixture.options import Options, product_dtype

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

_INTERPRET = contextvars.ContextVar("interpret", default=None)


def lse(context_TKE, table_VE, bias_V, activation: Activation, options: Options):
    """Log-normaliser of every token and component, [T, K], over the local rows."""
    if not _takes(context_TKE, table_VE, activation, options):
        return blocked.lse(context_TKE, table_VE, bias_V, activation, options)
    inputs = parts.varying_together(context_TKE, table_VE, bias_V)
    return _lse(activation, options, *inputs)


def loss(
    log_prior_TK,
    context_TKE,
    table_VE,
    bias_V,
    labels_T,
    weights_T,
    activation: Activation,
    options: Options,
):
    """Weighted sum of the tokens' negative log-likelihoods, gradient in forward."""
    inputs = (log_prior_TK, context_TKE, table_VE, bias_V, labels_T, weights_T)
    if not _takes(context_TKE, table_VE, activation, options):
        return blocked.loss(*inputs, activation, options)
    multiples = (BLOCK_ROWS, BLOCK_WORDS, BLOCK_WIDTH)
    route = exponential.Route(first_product, lse, multiples, 32)
    return exponential.loss(route, *inputs, activation, options)


@contextlib.contextmanager
def interpreted():
    """Run the kernels in jax's interpreter inside this context, on any machine."""
    token = _INTERPRET.set(plgpu.InterpretGPUParams())
    try:
        yield
    finally:
        _INTERPRET.reset(token)


def first_product(context_RQ, table_PQ, bias_P, ref_R, activation: Activation):
    """E [R, P] and the row sums S [R]; sizes are multiples of the tiles'."""
    e_RP, sum_NR = _call(True, activation, context_RQ, table_PQ, bias_P, ref_R)
    return e_RP, jnp.sum(sum_NR, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lse(activation, options, context_TKE, table_VE, bias_V):
    tokens, components, width = context_TKE.shape
    dtype = product_dtype(options, context_TKE, table_VE)
    live_V = parts.live_rows(table_VE.shape[0], options)
    bias_V = jnp.where(live_V, bias_V.astype(jnp.float32), DEAD)
    context_RE = context_TKE.reshape(tokens * components, width).astype(dtype)
    context_RQ = _pad(context_RE, BLOCK_ROWS, BLOCK_WIDTH)
    table_PQ = _pad(table_VE.astype(dtype), BLOCK_WORDS, BLOCK_WIDTH)
    more = table_PQ.shape[0] - bias_V.size
    bias_P = jnp.pad(bias_V, (0, more), constant_values=DEAD)
    # Kernel code is one for both uses; here the references are the tiles' own maxima.
    top_NR, sum_NR = _call(False, activation, context_RQ, table_PQ, bias_P, None)
    top_R = jnp.max(top_NR, axis=0)
    total_R = jnp.sum(sum_NR * jnp.exp2(top_NR - top_R[None]), axis=0)
    lse_R = (top_R + jnp.log2(total_R)) / LOG2_E
    return lse_R[: tokens * components].reshape(tokens, components)


def _lse_forward(activation, options, context_TKE, table_VE, bias_V):
    lse_TK = _lse(activation, options, context_TKE, table_VE, bias_V)
    return lse_TK, (context_TKE, table_VE, bias_V, lse_TK)


def _lse_backward(activation, options, saved, lse_bar_TK):
    theta = jax.tree.map(jnp.asarray, activation.theta)
    saved = (theta, *saved)
    return blocked.lse_backward(activation.apply, options, saved, lse_bar_TK)[1:]


_lse.defvjp(_lse_forward, _lse_backward)


def _takes(context_TKE, table_VE, activation, options):
    """Whether the kernel can do this; if not, why not goes to the log, once."""
    dtype = product_dtype(options, context_TKE, table_VE)
    reason = None
    name = activation.apply.__name__
    if activation.params:
        reason = f"the activation {name!r} has parameters to learn"
    elif activation.base2 is None:
        reason = f"the activation {name!r} has no form in base 2"
    elif dtype != jnp.bfloat16:
        reason = f"products are in {dtype}, not bfloat16"
    if reason:
        parts.note(f"The head takes the XLA path: {reason}.")
    return reason is None


def _pad(array_RE, rows, width):
    more = (-array_RE.shape[0] % rows, -array_RE.shape[1] % width)
    return jnp.pad(array_RE, ((0, more[0]), (0, more[1])))


def _call(store, activation, context_RQ, table_PQ, bias_P, ref_R):
    """Run the kernel; under `vmap`, once for each element."""
    bias_P = bias_P.astype(jnp.float32) * LOG2_E
    inputs = [context_RQ, table_PQ, bias_P]
    if store:
        inputs.append(ref_R.astype(jnp.float32) * LOG2_E)
    run = functools.partial(_kernel_call, store, activation, _INTERPRET.get())
    return jax.custom_batching.sequential_vmap(run)(*inputs)


def _kernel_call(store, activation, interpret, *inputs):
    (rows, _), (words, _) = inputs[0].shape, inputs[1].shape
    tiles = words // BLOCK_WORDS
    axes = jax.typeof(inputs[0]).manual_axis_type

    def shape(sizes, dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, manual_axis_type=axes)

    stats = shape((tiles, rows), jnp.float32)
    first = shape((rows, words), inputs[0].dtype) if store else stats
    body = functools.partial(_kernel, store, activation)
    jobs = tiles * (rows // BLOCK_ROWS)
    return plgpu.kernel(
        body,
        out_type=[first, stats],
        grid=(min(jobs, 2 if interpret else _multiprocessors()),),
        grid_names=("blocks",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            # Powers of two without a care for denormal results. GSS, which takes more
            # of them, spilled registers with it.
            approx_math=activation.apply is activations.identity,
        ),
        **({"interpret": interpret} if interpret else {}),
    )(*inputs)


def _multiprocessors():
    """Of the GPU at hand, or of an H200 where one compiles for what is elsewhere."""
    return getattr(jax.devices()[0], "core_count", 132)


def _kernel(store, activation, *refs):
    """One persistent block: tiles of 128 rows by 256 words, one by one."""
    *inputs, first_out, sum_NR = refs
    context_RQ, table_PQ, bias_P = inputs[:3]
    row_tiles = context_RQ.shape[0] // BLOCK_ROWS
    word_tiles = table_PQ.shape[0] // BLOCK_WORDS
    steps = context_RQ.shape[1] // BLOCK_WIDTH
    dtype = context_RQ.dtype

    def layout(words):
        """Rows of `words` elements as the matrix unit wants them in shared memory."""
        swizzle = plgpu.find_swizzle(words * dtype.itemsize * 8)
        tiling = plgpu.TilingTransform((8, swizzle // dtype.itemsize))
        return (tiling, plgpu.SwizzleTransform(swizzle))

    def pipeline(body, context):
        def spec(rows):
            return plgpu.BlockSpec(
                (rows, BLOCK_WIDTH),
                lambda step: (0, step),
                transforms=layout(BLOCK_WIDTH),
                memory_space=plgpu.SMEM,
            )

        return plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(steps,),
            memory_registers=40,
            wg_axis="warpgroup",
            num_compute_wgs=2,
            max_concurrent_steps=STAGES,
            compute_context=context,
            in_specs=[spec(BLOCK_ROWS), spec(BLOCK_WORDS)],
        )

    def nothing(*_, **__):
        pass

    scratch = {
        "bias_smem": plgpu.SMEM((2, BLOCK_WORDS), jnp.float32),
        "stats_smem": plgpu.SMEM((2, 2, WARPGROUP_ROWS), jnp.float32),
        "arrived": plgpu.Barrier(num_arrivals=1 + store, num_barriers=2),
    }
    if store:
        out = (2, 2, WARPGROUP_ROWS, OUT_WORDS)
        scratch["out_smem"] = plgpu.SMEM(out, dtype, transforms=layout(OUT_WORDS))

    @functools.partial(
        pl.run_scoped,
        ring=pipeline(nothing, nothing).get_allocations(context_RQ, table_PQ),
        collective_axes="warpgroup",
        **scratch,
    )
    def block(ring, bias_smem, stats_smem, arrived, out_smem=None):
        me = lax.axis_index("warpgroup")

        @plgpu.nd_loop((row_tiles * word_tiles,), collective_axes="blocks")
        def job(loop):
            word_tile = lax.div(loop.index[0], row_tiles)
            row_tile = lax.rem(loop.index[0], row_tiles)
            words = pl.ds(word_tile * BLOCK_WORDS, BLOCK_WORDS)
            rows = pl.ds(row_tile * BLOCK_ROWS + me * WARPGROUP_ROWS, WARPGROUP_ROWS)

            def multiply(_, context_smem, table_smem, sum_ref):
                half = pl.ds(me * WARPGROUP_ROWS, WARPGROUP_ROWS)
                plgpu.wgmma(sum_ref, context_smem.at[half], table_smem.T)
                plgpu.wgmma_wait(0)
                return sum_ref

            def finish(run_pipeline):
                plgpu.copy_gmem_to_smem(
                    bias_P.at[words], bias_smem.at[me], arrived.at[me]
                )
                if store:
                    plgpu.copy_gmem_to_smem(
                        inputs[3].at[rows], stats_smem.at[me, 0], arrived.at[me]
                    )
                sums = plgpu.ACC((WARPGROUP_ROWS, BLOCK_WORDS), jnp.float32)

                @functools.partial(pl.run_scoped, sum_ref=sums)
                def epilogue(sum_ref):
                    run_pipeline(sum_ref)
                    plgpu.barrier_wait(arrived.at[me])
                    mine = (bias_smem.at[me], stats_smem.at[me])
                    if store:
                        mine += (out_smem.at[me],)
                    gain = functools.partial(activation.base2, activation.theta)
                    _leave(gain, sum_ref, *mine, first_out, sum_NR, word_tile, rows)

            pipeline(multiply, finish)(
                context_RQ.at[pl.ds(row_tile * BLOCK_ROWS, BLOCK_ROWS), :],
                table_PQ.at[words, :],
                allocations=ring,
            )

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _leave(gain, sum_ref, bias_smem, stats_smem, *rest):
    """Exponentiate a warpgroup's tile, part by part, and send out what is asked for."""
    *out_smem, first_out, sum_NR, word_tile, rows = rest
    by_word = plgpu.Layout.WGMMA.reduce(0)
    by_row = plgpu.Layout.WGMMA.reduce(1)
    shape = (WARPGROUP_ROWS, OUT_WORDS)
    sum_RW = sum_ref[...]

    def logits(part):
        """A part of the tile, in base 2: few enough for registers."""
        here = slice(part * OUT_WORDS, (part + 1) * OUT_WORDS)
        bias_smem_W = bias_smem.at[pl.ds(here.start, OUT_WORDS)]
        bias_W = plgpu.load(bias_smem_W, layout=by_word)
        return sum_RW[:, here] * LOG2_E + lax.broadcast_in_dim(bias_W, shape, [1])

    parts_of_tile = range(BLOCK_WORDS // OUT_WORDS)
    if out_smem:
        ref_R = plgpu.load(stats_smem.at[0], layout=by_row)
    else:
        tops = (jnp.max(logits(part), axis=1) for part in parts_of_tile)
        # g increases, so its maximum is at that of z.
        ref_R = gain(functools.reduce(jnp.maximum, tops))[0]
    ref_RW = lax.broadcast_in_dim(ref_R, shape, [0])
    total_R = None
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part in parts_of_tile:
        g_RW, gain_RW = gain(logits(part))
        exp_RW = jnp.exp2(g_RW - ref_RW)
        part_R = jnp.sum(exp_RW, axis=1)
        total_R = part_R if total_R is None else total_R + part_R
        if out_smem:
            e_RW = exp_RW if gain_RW is None else exp_RW * gain_RW
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            out_smem[0][part % 2] = e_RW.astype(first_out.dtype)
            plgpu.commit_smem()
            words = pl.ds(word_tile * BLOCK_WORDS + part * OUT_WORDS, OUT_WORDS)
            plgpu.copy_smem_to_gmem(out_smem[0].at[part % 2], first_out.at[rows, words])
    stats_smem[1] = total_R
    if not out_smem:
        stats_smem[0] = ref_R
    plgpu.commit_smem()
    if not out_smem:
        plgpu.copy_smem_to_gmem(stats_smem.at[0], first_out.at[word_tile, rows])
    plgpu.copy_smem_to_gmem(stats_smem.at[1], sum_NR.at[word_tile, rows])
