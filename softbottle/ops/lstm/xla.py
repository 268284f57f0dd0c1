"""The recurrence in plain XLA: layer by layer, or as a wavefront.

In a wavefront of L layers, layer l stands at position s - l in step s and reads what
layer l - 1 left one step earlier; so a batched product per step serves all layers,
padded to the widest. A layer that has not begun, has ended or stands on padding keeps
its state. One layer alone is a wavefront, too. In backward passes the loop yields the
gradients of the pre-activations; those of the weights follow in one product each.

Axes: I inputs, H units, G = 4 H gates, J what a layer reads in the loop.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from softbottle.ops.lstm import layer as layer_lib
from softbottle.ops.lstm.layer import Carry, Weights, product, widen


class _Operands(NamedTuple):
    """L layers of one width; J reads the layer below, if any, and then the layer."""

    inputs_SBI: jax.Array
    input_IG: jax.Array
    bias_LG: jax.Array
    weight_LJG: jax.Array
    hidden_LBH: jax.Array
    cell_LBH: jax.Array
    mask_MBH: jax.Array | None
    valid_SB: jax.Array | None


def wavefront(
    inputs_SBI: jax.Array,
    carries: Sequence[Carry],
    layers: Sequence[Weights],
    masks: Sequence[jax.Array] | None,
    valid_SB: jax.Array,
    dtype: jnp.dtype,
    unroll: int,
) -> tuple[jax.Array, tuple[Carry, ...]]:
    """Run all layers in one loop; arguments as of api.stack."""
    sizes = layer_lib.sizes_of(layers)
    width = max(sizes)
    weight_LJG = _loop_weights(layers, width)
    biases = layer_lib.biases_of(layers)
    operands = _Operands(
        inputs_SBI,
        widen(layers[0].input_IG, inputs_SBI.shape[-1], width),
        jnp.stack([widen(bias_G[None], 1, width)[0] for bias_G in biases]),
        weight_LJG,
        layer_lib.stack_wide([carry.hidden_BH for carry in carries], width),
        layer_lib.stack_wide([carry.cell_BH for carry in carries], width),
        layer_lib.stack_wide(masks, width) if masks else None,
        valid_SB,
    )
    outputs_SBH, hidden_LBH, cell_LBH = _wave(dtype, unroll, operands)
    finals = [
        Carry(hidden_LBH[index, :, :size], cell_LBH[index, :, :size])
        for index, size in enumerate(sizes)
    ]
    return outputs_SBH[:, :, : sizes[-1]], tuple(finals)


def _loop_weights(layers, width):
    weight_LJG = jnp.stack([widen(w.recurrent_HG, width, width) for w in layers])
    if len(layers) == 1:
        return weight_LJG
    # The lowest layer reads its inputs through the product before the loop.
    below = [widen(w.input_IG, width, width) for w in layers[1:]]
    below_LHG = jnp.stack([jnp.zeros_like(weight_LJG[0]), *below])
    return jnp.concatenate([below_LHG, weight_LJG], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wave(dtype, unroll, operands):
    """Run the layers, layer l at position s - l in step s."""
    return _forward(dtype, unroll, operands)[0]


def _forward(dtype, unroll, operands):
    layers = operands.bias_LG.shape[0]
    drain = ((0, layers - 1), (0, 0), (0, 0))
    low_SBG = product("sbi,ig->sbg", dtype, operands.inputs_SBI, operands.input_IG)
    bias_L1G = operands.bias_LG[:, None].astype(low_SBG.dtype)
    weight_LJG = operands.weight_LJG.astype(dtype)

    def step(state, at_step):
        hidden_LBH, cell_LBH = state
        low_BG, active_LB1 = at_step
        operand_LBJ = _operand(hidden_LBH, operands.mask_MBH)
        z_LBG = product("lbj,ljg->lbg", dtype, operand_LBJ, weight_LJG)
        z_LBG += jnp.pad(low_BG[None], drain) + bias_L1G
        gates_LBG, next_hidden_LBH, next_cell_LBH = _cell(z_LBG, cell_LBH)
        hidden_LBH = jnp.where(active_LB1, next_hidden_LBH.astype(dtype), hidden_LBH)
        cell_LBH = jnp.where(active_LB1, next_cell_LBH, cell_LBH)
        trace = (hidden_LBH, cell_LBH, gates_LBG.astype(dtype))
        return (hidden_LBH, cell_LBH), trace

    first_cell_LBH = operands.cell_LBH.astype(low_SBG.dtype)
    start = (operands.hidden_LBH.astype(dtype), first_cell_LBH)
    at_steps = (jnp.pad(low_SBG, drain), _active(operands.valid_SB, layers))
    (hidden_LBH, cell_LBH), trace = lax.scan(step, start, at_steps, unroll=unroll)
    top_SBH = trace[0][layers - 1 :, -1].astype(operands.inputs_SBI.dtype)
    outputs = (
        jnp.where(operands.valid_SB[:, :, None], top_SBH, 0),
        hidden_LBH.astype(operands.hidden_LBH.dtype),
        cell_LBH.astype(operands.cell_LBH.dtype),
    )
    return outputs, (operands, trace)


def _backward(dtype, unroll, saved, bars):
    operands, (hidden_SLBH, cell_SLBH, gates_SLBG) = saved
    output_bar_SBH, hidden_bar_LBH, cell_bar_LBH = bars
    layers, wide = operands.bias_LG.shape[0], cell_SLBH.dtype
    above = ((layers - 1, 0), (0, 0), (0, 0))
    weight_LJG = operands.weight_LJG.astype(dtype)

    def step(state, at_step):
        hidden_bar_LBH, cell_bar_LBH = state
        output_bar_BH, active_LB1, *values = at_step
        top_bar_LBH = jnp.pad(output_bar_BH[None].astype(wide), above)
        # A frozen layer hands its gradient on; padding's output is 0 and gives none.
        hidden_bar_LBH += jnp.where(active_LB1, top_bar_LBH, 0)
        z_bar_LBG, before_bar_LBH = _cell_bars(hidden_bar_LBH, cell_bar_LBH, *values)
        z_bar_LBG = jnp.where(active_LB1, z_bar_LBG, 0).astype(dtype)
        operand_bar_LBJ = product("lbg,ljg->lbj", dtype, z_bar_LBG, weight_LJG)
        hidden_bar_LBH = jnp.where(active_LB1, 0, hidden_bar_LBH)
        hidden_bar_LBH += _operand_bar(operand_bar_LBJ, operands.mask_MBH)
        cell_bar_LBH = jnp.where(active_LB1, before_bar_LBH, cell_bar_LBH)
        return (hidden_bar_LBH, cell_bar_LBH), z_bar_LBG

    at_steps = (
        jnp.pad(output_bar_SBH, above),
        _active(operands.valid_SB, layers),
        _before(operands.cell_LBH, cell_SLBH),
        cell_SLBH,
        gates_SLBG,
    )
    start = (hidden_bar_LBH.astype(wide), cell_bar_LBH.astype(wide))
    state_bars, z_bar_SLBG = lax.scan(
        step, start, at_steps, reverse=True, unroll=unroll
    )
    before_SLBH = _before(operands.hidden_LBH, hidden_SLBH)
    return (_bars_after_loop(dtype, operands, before_SLBH, state_bars, z_bar_SLBG),)


def _bars_after_loop(dtype, operands, before_SLBH, state_bars, z_bar_SLBG):
    """All the gradients, given those of the pre-activations; one product each."""
    low_bar_SBG = z_bar_SLBG[: operands.inputs_SBI.shape[0], 0]
    # Kept apart, or XLA makes one product of two and then copies the halves.
    low_bar_SBG = lax.optimization_barrier(low_bar_SBG)
    operand_SLBJ = jax.vmap(_operand, (0, None))(before_SLBH, operands.mask_MBH)
    bars = _Operands(
        product("sbg,ig->sbi", dtype, low_bar_SBG, operands.input_IG),
        product("sbi,sbg->ig", dtype, operands.inputs_SBI, low_bar_SBG),
        jnp.sum(z_bar_SLBG.astype(state_bars[1].dtype), axis=(0, 2)),
        product("slbj,slbg->ljg", dtype, operand_SLBJ, z_bar_SLBG),
        *state_bars,
        mask_MBH=None,
        valid_SB=None,
    )
    constant = operands._replace(mask_MBH=None, valid_SB=None)
    return jax.tree.map(lambda bar, value: bar.astype(value.dtype), bars, constant)


_wave.defvjp(_forward, _backward)


def _cell(z_LBG, cell_LBH):
    i, f, g, o = jnp.split(z_LBG, 4, axis=-1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    cell_LBH = f * cell_LBH + i * g
    gates_LBG = jnp.concatenate([i, f, g, o], axis=-1)
    return gates_LBG, o * jnp.tanh(cell_LBH), cell_LBH


def _cell_bars(hidden_bar_LBH, cell_bar_LBH, before_LBH, cell_LBH, gates_LBG):
    """Gradients of the pre-activations and of the cell before the step."""
    i, f, g, o = jnp.split(gates_LBG.astype(cell_LBH.dtype), 4, axis=-1)
    tanh_LBH = jnp.tanh(cell_LBH)
    cell_bar_LBH += hidden_bar_LBH * o * (1 - tanh_LBH**2)
    bars = [
        cell_bar_LBH * g * i * (1 - i),
        cell_bar_LBH * before_LBH * f * (1 - f),
        cell_bar_LBH * i * (1 - g**2),
        hidden_bar_LBH * tanh_LBH * o * (1 - o),
    ]
    return jnp.concatenate(bars, axis=-1), cell_bar_LBH * f


def _operand(hidden_LBH, mask_MBH):
    """What each layer multiplies: the layer below, masked, and its own state."""
    if hidden_LBH.shape[0] == 1:
        return hidden_LBH
    below_MBH = hidden_LBH[:-1]
    if mask_MBH is not None:
        below_MBH = below_MBH.astype(mask_MBH.dtype) * mask_MBH
    below_LBH = jnp.pad(below_MBH.astype(hidden_LBH.dtype), ((1, 0), (0, 0), (0, 0)))
    return jnp.concatenate([below_LBH, hidden_LBH], axis=-1)


def _operand_bar(operand_bar_LBJ, mask_MBH):
    """The transpose of `_operand`."""
    if operand_bar_LBJ.shape[0] == 1:
        return operand_bar_LBJ
    below_bar_LBH, own_bar_LBH = jnp.split(operand_bar_LBJ, 2, axis=-1)
    below_bar_MBH = below_bar_LBH[1:]
    if mask_MBH is not None:
        below_bar_MBH *= mask_MBH.astype(below_bar_MBH.dtype)
    return own_bar_LBH + jnp.pad(below_bar_MBH, ((0, 1), (0, 0), (0, 0)))


def _active(valid_SB, layers):
    """Whether each layer reads a valid position, at each of the S + L - 1 steps."""
    shifts = [((layer, layers - 1 - layer), (0, 0)) for layer in range(layers)]
    return jnp.stack([jnp.pad(valid_SB, s) for s in shifts], axis=1)[:, :, :, None]


def _before(first_LBH, values_SLBH):
    """The values before each step, given those after it."""
    first_LBH = first_LBH.astype(values_SLBH.dtype)
    return jnp.concatenate([first_LBH[None], values_SLBH[:-1]])
