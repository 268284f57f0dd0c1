"""The recurrence through the kernels of gpu.py, differentiable.

The kernels take layers and batches padded to their sizes (`gpu.padded`), weights in
bfloat16, and as many layers at once as fit: a run of layers. A batch whose states do
not fit is run in pieces (`gpu.piece`), one after the other. Forward, a run is a
function with its own derivative, `_persistent`; backward it may be several runs again.
The backward kernel gives the gradients of the pre-activations. Those of the weights
and of the inputs follow in one product each, as in xla.py.

Axes: I inputs, H units, G = 4 H gates, Q the gates apart, Z = S + 1.
"""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from softbottle.ops.lstm import gpu, gpu_backward, gpu_forward
from softbottle.ops.lstm import layer as layer_lib
from softbottle.ops.lstm.layer import Carry, Weights, pad_last, product, widen


class _Saved(NamedTuple):
    """The arguments of `_persistent`, and what the forward kernel left."""

    inputs_SBI: jax.Array
    carries: tuple[Carry, ...]
    layers: tuple[Weights, ...]
    masks: tuple[jax.Array, ...] | None
    valid_SB: jax.Array
    trace: gpu.Trace


def run(
    inputs_SBI: jax.Array,
    carries: Sequence[Carry],
    layers: Sequence[Weights],
    masks: Sequence[jax.Array] | None,
    valid_SB: jax.Array,
) -> tuple[jax.Array, tuple[Carry, ...]]:
    """Hand the kernels as many rows at a time as they take; as of api.stack."""
    rows = inputs_SBI.shape[1]
    step = gpu.piece(rows, layer_lib.sizes_of(layers))
    done = [
        _run(
            inputs_SBI[:, rows_of],
            [Carry(*(state_BH[rows_of] for state_BH in carry)) for carry in carries],
            layers,
            masks and [mask_BH[rows_of] for mask_BH in masks],
            valid_SB[:, rows_of],
        )
        for rows_of in (slice(start, start + step) for start in range(0, rows, step))
    ]
    if len(done) == 1:
        return done[0]
    outputs, finals = zip(*done, strict=True)
    joined = jax.tree.map(lambda *states: jnp.concatenate(states), *finals)
    return jnp.concatenate(outputs, axis=1), joined


def _run(inputs_SBI, carries, layers, masks, valid_SB):
    """Hand the kernels as many layers at a time as they take."""
    rows = inputs_SBI.shape[1]
    finals: list[Carry] = []
    for run in gpu.forward_runs(_padded_rows(rows), _units(layers, rows)):
        if run.start and masks is not None:
            inputs_SBI = layer_lib.masked(inputs_SBI, masks[run.start - 1])
        inputs_SBI, states = _persistent(
            inputs_SBI,
            tuple(carries[run]),
            tuple(layers[run]),
            masks and tuple(masks[run.start : run.stop - 1]),
            valid_SB,
        )
        finals.extend(states)
    return inputs_SBI, tuple(finals)


@jax.custom_vjp
def _persistent(inputs_SBI, carries, layers, masks, valid_SB):
    """Layers whose positions are one kernel forward, and one per run backward."""
    return _persistent_forward(inputs_SBI, carries, layers, masks, valid_SB)[0]


def _persistent_forward(inputs_SBI, carries, layers, masks, valid_SB):
    rows = inputs_SBI.shape[1]
    trace = _forward_kernel(inputs_SBI, carries, layers, masks, valid_SB)
    sizes = layer_lib.sizes_of(layers)
    top_SBH = trace.hidden_LZBH[-1, 1:, :rows, : sizes[-1]]
    top_SBH = jnp.where(valid_SB[:, :, None], top_SBH, 0).astype(inputs_SBI.dtype)
    finals = [
        Carry(
            trace.hidden_LZBH[index, -1, :rows, :size].astype(carry.hidden_BH.dtype),
            trace.cell_LZBH[index, -1, :rows, :size].astype(carry.cell_BH.dtype),
        )
        for index, (carry, size) in enumerate(zip(carries, sizes, strict=True))
    ]
    saved = _Saved(inputs_SBI, carries, layers, masks, valid_SB, trace)
    return (top_SBH, tuple(finals)), saved


def _forward_kernel(inputs_SBI, carries, layers, masks, valid_SB):
    """Pad and lay out the arguments as the kernel reads them, and run it."""
    rows = inputs_SBI.shape[1]
    stack = _gpu_stack(layers, masks, rows)
    stack = stack._replace(
        recurrent=stack.recurrent.transpose(0, 2, 3, 1),
        input=stack.input.transpose(0, 2, 3, 1),
    )
    width = max(stack.units)
    biases = [
        widen(bias_G[None].astype(jnp.float32), 1, width)
        for bias_G in layer_lib.biases_of(layers)
    ]
    input_IG = widen(layers[0].input_IG, inputs_SBI.shape[-1], width)
    z_SBG = product("sbi,ig->sbg", jnp.bfloat16, _pad_rows(inputs_SBI), input_IG)
    hidden_LBH = layer_lib.stack_wide([carry.hidden_BH for carry in carries], width)
    cell_LBH = layer_lib.stack_wide([carry.cell_BH for carry in carries], width)
    return gpu_forward.forward(
        z_SBG.reshape(*z_SBG.shape[:2], 4, width),
        jnp.stack(biases).reshape(-1, 4, width),
        stack,
        _pad_rows(hidden_LBH).astype(jnp.bfloat16),
        _pad_rows(cell_LBH).astype(jnp.float32),
        _pad_rows(valid_SB[:, :, None])[:, :, 0],
        rows,
    )


def _persistent_backward(saved, bars):
    output_bar_SBH, final_bars = bars
    layers, rows = saved.layers, saved.inputs_SBI.shape[1]
    below_bar_SBI = _pad_rows(output_bar_SBH)
    layer_bars, carry_bars = [], []
    for run in reversed(gpu.backward_runs(_padded_rows(rows), _units(layers, rows))):
        bars = _backward_kernel(saved, run, below_bar_SBI, final_bars[run])
        for index in reversed(range(run.start, run.stop)):
            z_bar_SBG = _z_bar(saved, index, run, bars)
            weights_bar = _weights_bar(saved, index, z_bar_SBG)
            carry_bar = _carry_bar(saved, index, run, bars)
            layer_bars.append(_like(weights_bar, layers[index]))
            carry_bars.append(_like(carry_bar, saved.carries[index]))
        below_bar_SBI = product(
            "sbg,ig->sbi", jnp.bfloat16, z_bar_SBG, layers[run.start].input_IG
        )
    input_bar_SBI = below_bar_SBI[:, :rows].astype(saved.inputs_SBI.dtype)
    return input_bar_SBI, tuple(carry_bars[::-1]), tuple(layer_bars[::-1]), None, None


_persistent.defvjp(_persistent_forward, _persistent_backward)


def _backward_kernel(saved, run, below_bar_SBI, final_bars):
    """Run some layers backward, given the gradient of what the next one reads."""
    rows, masks = saved.inputs_SBI.shape[1], saved.masks
    layers = saved.layers[run]
    width = max(_units(layers, rows))
    if run.stop < len(saved.layers) and masks is not None:
        below_bar_SBI *= _pad_rows(masks[run.stop - 1][None]).astype(jnp.float32)
    hidden_bar_LBH, cell_bar_LBH = (
        _pad_rows(layer_lib.stack_wide(bars, width)).astype(jnp.float32)
        for bars in zip(*final_bars, strict=True)
    )
    return gpu_backward.backward(
        _gpu_stack(layers, masks and masks[run.start : run.stop - 1], rows),
        jax.tree.map(operator.itemgetter(run), saved.trace),
        pad_last(below_bar_SBI, width).astype(jnp.float32),
        hidden_bar_LBH,
        cell_bar_LBH,
        _pad_rows(saved.valid_SB[:, :, None])[:, :, 0],
        rows,
    )


def _z_bar(saved, index, run, bars):
    """The gradient of a layer's pre-activations, without padded units."""
    size = saved.layers[index].recurrent_HG.shape[0]
    z_bar_SBQH = bars.z_bar_LSBQH[index - run.start, ..., :size]
    return z_bar_SBQH.reshape(*z_bar_SBQH.shape[:2], 4 * size)


def _weights_bar(saved, index, z_bar_SBG):
    """The gradients of a layer's parameters."""
    sizes = layer_lib.sizes_of(saved.layers)
    below_SBI = _pad_rows(saved.inputs_SBI)
    if index:
        below_SBI = saved.trace.fed_LSBH[index - 1, :, :, : sizes[index - 1]]
    before_SBH = saved.trace.hidden_LZBH[index, :-1, :, : sizes[index]]
    bias_bar_G = jnp.sum(z_bar_SBG.astype(jnp.float32), axis=(0, 1))
    # Kept apart, or XLA makes one product of two and then copies the halves.
    apart_SBG = lax.optimization_barrier(z_bar_SBG)
    return Weights(
        product("sbi,sbg->ig", jnp.bfloat16, below_SBI, z_bar_SBG),
        product("sbh,sbg->hg", jnp.bfloat16, before_SBH, apart_SBG),
        bias_bar_G,
        bias_bar_G,
    )


def _carry_bar(saved, index, run, bars):
    """The gradient of a layer's state before the first position."""
    rows, place = saved.inputs_SBI.shape[1], index - run.start
    size = saved.layers[index].recurrent_HG.shape[0]
    return Carry(
        bars.hidden_bar_LBH[place, :rows, :size], bars.cell_bar_LBH[place, :rows, :size]
    )


def _gpu_stack(layers, masks, rows):
    """The layers as the kernels' backward pass reads them, weights [L, K, Q, H]."""
    units = _units(layers, rows)
    width = max(units)

    def wide(weight_IG):
        wide_IG = widen(weight_IG.astype(jnp.bfloat16), width, width)
        return wide_IG.reshape(width, 4, width)

    recurrent = [wide(weights.recurrent_HG) for weights in layers]
    below = [wide(weights.input_IG) for weights in layers[1:]] or recurrent
    sizes = layer_lib.sizes_of(layers)
    factors = [jnp.ones((rows, size), jnp.float32) for size in sizes]
    factors[: len(masks or ())] = [mask.astype(jnp.float32) for mask in masks or ()]
    mask_LBH = _pad_rows(layer_lib.stack_wide(factors, width))
    return gpu.Stack(units, jnp.stack(recurrent), jnp.stack(below), mask_LBH)


def _units(layers, rows):
    """Units of each layer after padding."""
    return tuple(gpu.padded(rows, size)[1] for size in layer_lib.sizes_of(layers))


def _padded_rows(rows):
    return gpu.padded(rows, 0)[0]


def _pad_rows(values_SBH):
    rows = values_SBH.shape[1]
    return jnp.pad(values_SBH, ((0, 0), (0, _padded_rows(rows) - rows), (0, 0)))


def _like(bars, values):
    return jax.tree.map(lambda bar, value: bar.astype(value.dtype), bars, values)
