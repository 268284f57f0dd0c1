"""LSTM layers whose weight gradients are formed once, after the loop.

A layer follows PyTorch, with four gates and two biases:

    [i, f, g, o]_t = x_t W_x + b_x + h_{t-1} W_h + b_h
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g),    h_t = sigmoid(o) tanh(c_t).

x W_x is one product for all positions, before the loop. The loop of the backward pass
yields only the gradients dz_t of the four pre-activations, stacked, and then

    dW_x = sum_t x_t' dz_t,    dW_h = sum_t h_{t-1}' dz_t,    dx_t = dz_t W_x'

are one product each; ordinary differentiation of a scan would read and write dW_h at
each step.

A stack runs one layer after the other ("scan") or as a wavefront: in step s layer l
stands at position s - l and reads what layer l - 1 left one step earlier, so that one
batched product a step serves all layers, padded to the widest. A layer that has not
begun, has ended or stands on padding keeps its state. On Hopper GPUs and in bfloat16
the loop can be a kernel that keeps the weights on chip ("persistent"; lstm_gpu.py).
All agree to rounding.
"""

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from softbottle.ops.mixture.options import note

IMPLEMENTATIONS = ("scan", "wavefront", "persistent")


class Weights(NamedTuple):
    """Parameters of one layer; G = 4 H holds the gates i, f, g, o in this order."""

    input_IG: jax.Array
    recurrent_HG: jax.Array
    input_bias_G: jax.Array
    recurrent_bias_G: jax.Array


class Carry(NamedTuple):
    """What one layer hands from a position to the next."""

    hidden_BH: jax.Array
    cell_BH: jax.Array


class _Operands(NamedTuple):
    """L layers of one width; J reads the layer below, if any, and then the layer."""

    inputs_SBI: jax.Array
    input_IG: jax.Array
    bias_LG: jax.Array
    weight_LJG: jax.Array
    hidden_LBH: jax.Array
    cell_LBH: jax.Array
    mask_MBH: jax.Array | None
    valid_SB: jax.Array


def lstm(
    inputs_SBI: jax.Array,
    carry: Carry,
    weights: Weights,
    valid_SB: jax.Array | None = None,
    *,
    compute_dtype: jax.typing.DTypeLike | None = None,
    unroll: int = 1,
) -> tuple[jax.Array, Carry]:
    """Run one layer over the positions of every row.

    Args:
        inputs_SBI: the inputs, positions first.
        carry: the state before the first position.
        weights: the parameters; mask `recurrent_HG` before the call for weight drop.
        valid_SB: False on padding, which gives output 0, leaves the state alone and
            takes no gradient; None when there is none.
        compute_dtype: dtype of the products' operands and of h; None takes that of
            the inputs. Sums, gates and cells are float32 or wider, and gradients have
            the dtypes of the arguments.
        unroll: steps of the loop that are compiled as one.

    Returns:
        The outputs h [S, B, H] in the inputs' dtype and the state after each row's
        last valid position.
    """
    options = {"compute_dtype": compute_dtype, "unroll": unroll}
    outputs, finals = stack(inputs_SBI, [carry], [weights], None, valid_SB, **options)
    return outputs, finals[0]


def stack(
    inputs_SBI: jax.Array,
    carries: Sequence[Carry],
    layers: Sequence[Weights],
    masks: Sequence[jax.Array] | None = None,
    valid_SB: jax.Array | None = None,
    *,
    implementation: str = "scan",
    compute_dtype: jax.typing.DTypeLike | None = None,
    unroll: int = 1,
) -> tuple[jax.Array, tuple[Carry, ...]]:
    """Run layers on top of each other.

    Args:
        inputs_SBI: the inputs of the lowest layer, positions first.
        carries: the state of each layer before the first position.
        layers: the parameters of each layer, the lowest first.
        masks: for each layer but the last, factors [B, H] on what the next layer
            reads, the same at every position and absent from the layer's own
            recurrence. They are constants: no gradient flows to them.
        valid_SB: False on padding, as in `lstm`.
        implementation: one of IMPLEMENTATIONS, or "auto" for "persistent" where it
            runs, on one device, and else "wavefront".
        compute_dtype, unroll: as in `lstm`; "persistent" has no use for `unroll`.

    Returns:
        The last layer's outputs [S, B, H] and the state of each layer.

    Raises:
        ValueError: on an unknown implementation, one that cannot run here, or a wrong
            number of states or masks.
    """
    _check(implementation, len(layers), carries, masks)
    if valid_SB is None:
        valid_SB = jnp.ones(inputs_SBI.shape[:2], bool)
    dtype = jnp.dtype(inputs_SBI.dtype if compute_dtype is None else compute_dtype)
    rows = inputs_SBI.shape[1]
    if implementation == "auto":
        implementation = _choose(layers, rows, dtype)
    if implementation == "persistent":
        if refusals := _refusals(layers, rows, dtype):
            raise ValueError(f"'persistent' {'; '.join(refusals)}.")
        return _run_persistent(inputs_SBI, carries, layers, masks, valid_SB)
    run = _one_by_one if implementation == "scan" else _wavefront
    wave = functools.partial(_wave, dtype, unroll)
    return run(wave, inputs_SBI, carries, layers, masks, valid_SB)


def _check(implementation, depth, carries, masks):
    if implementation not in (names := ("auto", *IMPLEMENTATIONS)):
        raise ValueError(
            f"implementation must be one of {names}, got {implementation!r}."
        )
    if len(carries) != depth:
        raise ValueError(f"{depth} layers take {depth} states, got {len(carries)}.")
    if masks is not None and len(masks) != depth - 1:
        raise ValueError(f"{depth} layers take {depth - 1} masks, got {len(masks)}.")


def _kernels():
    """The module of the kernels; Pallas is slow to import."""
    from softbottle.ops.lstm import gpu as lstm_gpu

    return lstm_gpu


def _gpu_forward():
    from softbottle.ops.lstm import gpu_forward

    return gpu_forward


def _gpu_backward():
    from softbottle.ops.lstm import gpu_backward

    return gpu_backward


def _refusals(layers, rows, dtype):
    """Why the layers cannot be kernels; each reason once."""
    lstm_gpu = _kernels()
    sizes = [weights.recurrent_HG.shape[0] for weights in layers]
    reasons = [lstm_gpu.refusals(rows, size, dtype) for size in sizes]
    return list(dict.fromkeys(sum(reasons, [])))


def _choose(layers, rows, dtype):
    devices, platform = jax.device_count(), jax.default_backend()
    refusals = [f"needs one GPU, got {devices} x {platform}"]
    if platform == "gpu" and devices == 1:
        refusals = _refusals(layers, rows, dtype)
    chosen = "wavefront" if refusals else "persistent"
    note(f"LSTM: {chosen} (persistent: {'; '.join(refusals) or 'runs here'}).")
    return chosen


def _run_persistent(inputs_SBI, carries, layers, masks, valid_SB):
    """Hand the kernels as many layers at a time as they take."""
    lstm_gpu = _kernels()
    rows = inputs_SBI.shape[1]
    sizes = [weights.recurrent_HG.shape[0] for weights in layers]
    units = [lstm_gpu.padded(rows, size)[1] for size in sizes]
    finals = []
    for run in lstm_gpu.forward_runs(lstm_gpu.padded(rows, 0)[0], units):
        if run.start and masks is not None:
            mask_BH = lax.stop_gradient(masks[run.start - 1]).astype(inputs_SBI.dtype)
            inputs_SBI *= mask_BH[None]
        inputs_SBI, states = _persistent(
            inputs_SBI,
            tuple(carries[run]),
            tuple(layers[run]),
            masks and tuple(masks[run.start : run.stop - 1]),
            valid_SB,
        )
        finals.extend(states)
    return inputs_SBI, tuple(finals)


def _one_by_one(wave, inputs_SBI, carries, layers, masks, valid_SB):
    finals = []
    for index, (carry, weights) in enumerate(zip(carries, layers, strict=True)):
        if index and masks is not None:
            mask_BH = lax.stop_gradient(masks[index - 1]).astype(inputs_SBI.dtype)
            inputs_SBI *= mask_BH[None]
        inputs_SBI, (final,) = _wavefront(
            wave, inputs_SBI, (carry,), (weights,), None, valid_SB
        )
        finals.append(final)
    return inputs_SBI, tuple(finals)


def _wavefront(wave, inputs_SBI, carries, layers, masks, valid_SB):
    sizes = [weights.recurrent_HG.shape[0] for weights in layers]
    width = max(sizes)
    weight_LJG = jnp.stack([_widen(w.recurrent_HG, width, width) for w in layers])
    if len(layers) > 1:
        # The lowest layer reads its inputs through the product before the loop.
        below = [_widen(w.input_IG, width, width) for w in layers[1:]]
        below_LHG = jnp.stack([jnp.zeros_like(weight_LJG[0]), *below])
        weight_LJG = jnp.concatenate([below_LHG, weight_LJG], axis=1)
    biases = [w.input_bias_G + w.recurrent_bias_G for w in layers]
    operands = _Operands(
        inputs_SBI,
        _widen(layers[0].input_IG, inputs_SBI.shape[-1], width),
        jnp.stack([_widen(bias_G[None], 1, width)[0] for bias_G in biases]),
        weight_LJG,
        jnp.stack([_pad_last(carry.hidden_BH, width) for carry in carries]),
        jnp.stack([_pad_last(carry.cell_BH, width) for carry in carries]),
        jnp.stack([_pad_last(mask_BH, width) for mask_BH in masks]) if masks else None,
        valid_SB,
    )
    outputs_SBH, hidden_LBH, cell_LBH = wave(operands)
    finals = [
        Carry(hidden_LBH[index, :, :size], cell_LBH[index, :, :size])
        for index, size in enumerate(sizes)
    ]
    return outputs_SBH[:, :, : sizes[-1]], tuple(finals)


def _pad_last(values, width):
    padding = [(0, 0)] * (values.ndim - 1)
    return jnp.pad(values, (*padding, (0, width - values.shape[-1])))


def _widen(weight_IG, inputs, width):
    """Pad rows and gates with zeros: a padded unit has c = h = 0 for ever."""
    size = weight_IG.shape[1] // 4
    padding = ((0, inputs - weight_IG.shape[0]), (0, 0), (0, width - size))
    return jnp.pad(weight_IG.reshape(-1, 4, size), padding).reshape(inputs, 4 * width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _wave(dtype, unroll, operands):
    """Run the layers, layer l at position s - l in step s."""
    return _forward(dtype, unroll, operands)[0]


def _forward(dtype, unroll, operands):
    layers = operands.bias_LG.shape[0]
    drain = ((0, layers - 1), (0, 0), (0, 0))
    low_SBG = _product("sbi,ig->sbg", dtype, operands.inputs_SBI, operands.input_IG)
    bias_L1G = operands.bias_LG[:, None].astype(low_SBG.dtype)
    weight_LJG = operands.weight_LJG.astype(dtype)

    def step(state, at_step):
        hidden_LBH, cell_LBH = state
        low_BG, active_LB1 = at_step
        operand_LBJ = _operand(hidden_LBH, operands.mask_MBH)
        z_LBG = _product("lbj,ljg->lbg", dtype, operand_LBJ, weight_LJG)
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
        operand_bar_LBJ = _product("lbg,ljg->lbj", dtype, z_bar_LBG, weight_LJG)
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
        _product("sbg,ig->sbi", dtype, low_bar_SBG, operands.input_IG),
        _product("sbi,sbg->ig", dtype, operands.inputs_SBI, low_bar_SBG),
        jnp.sum(z_bar_SLBG.astype(state_bars[1].dtype), axis=(0, 2)),
        _product("slbj,slbg->ljg", dtype, operand_SLBJ, z_bar_SLBG),
        *state_bars,
        mask_MBH=None,
        valid_SB=None,
    )
    constant = operands._replace(mask_MBH=None, valid_SB=None)
    return jax.tree.map(lambda bar, value: bar.astype(value.dtype), bars, constant)


_wave.defvjp(_forward, _backward)


@jax.custom_vjp
def _persistent(inputs_SBI, carries, layers, masks, valid_SB):
    """Layers whose positions are one kernel forward and one a layer backward."""
    return _persistent_forward(inputs_SBI, carries, layers, masks, valid_SB)[0]


def _persistent_forward(inputs_SBI, carries, layers, masks, valid_SB):
    lstm_gpu = _kernels()
    rows = inputs_SBI.shape[1]
    sizes = [weights.recurrent_HG.shape[0] for weights in layers]
    width = max(lstm_gpu.padded(rows, size)[1] for size in sizes)
    pad_rows = functools.partial(_pad_rows, lstm_gpu.padded(rows, 0)[0])
    stack = _gpu_stack(layers, masks, rows)
    stack = stack._replace(
        recurrent=stack.recurrent.transpose(0, 2, 3, 1),
        input=stack.input.transpose(0, 2, 3, 1),
    )
    biases = [w.input_bias_G + w.recurrent_bias_G for w in layers]
    biases = [_widen(bias_G[None].astype(jnp.float32), 1, width) for bias_G in biases]
    input_IG = _widen(layers[0].input_IG, inputs_SBI.shape[-1], width)
    z_SBG = _product("sbi,ig->sbg", jnp.bfloat16, pad_rows(inputs_SBI), input_IG)
    hidden_LBH = _stack_wide([carry.hidden_BH for carry in carries], width)
    cell_LBH = _stack_wide([carry.cell_BH for carry in carries], width)
    trace = _gpu_forward().forward(
        z_SBG.reshape(*z_SBG.shape[:2], 4, width),
        jnp.stack(biases).reshape(-1, 4, width),
        stack,
        pad_rows(hidden_LBH).astype(jnp.bfloat16),
        pad_rows(cell_LBH).astype(jnp.float32),
        pad_rows(valid_SB[:, :, None])[:, :, 0],
        rows,
    )
    top_SBH = trace.hidden_LZBH[-1, 1:, :rows, : sizes[-1]]
    top_SBH = jnp.where(valid_SB[:, :, None], top_SBH, 0).astype(inputs_SBI.dtype)
    finals = [
        Carry(
            trace.hidden_LZBH[index, -1, :rows, :size].astype(carry.hidden_BH.dtype),
            trace.cell_LZBH[index, -1, :rows, :size].astype(carry.cell_BH.dtype),
        )
        for index, (carry, size) in enumerate(zip(carries, sizes, strict=True))
    ]
    saved = (inputs_SBI, carries, layers, masks, valid_SB, trace)
    return (top_SBH, tuple(finals)), saved


def _gpu_stack(layers, masks, rows):
    """The layers as the kernels' backward pass reads them, weights [L, K, Q, H]."""
    lstm_gpu = _kernels()
    sizes = [weights.recurrent_HG.shape[0] for weights in layers]
    units = tuple(lstm_gpu.padded(rows, size)[1] for size in sizes)
    width = max(units)

    def wide(weight_IG):
        wide_IG = _widen(weight_IG.astype(jnp.bfloat16), width, width)
        return wide_IG.reshape(width, 4, width)

    recurrent = [wide(weights.recurrent_HG) for weights in layers]
    below = [wide(weights.input_IG) for weights in layers[1:]] or recurrent
    factors = [jnp.ones((rows, size), jnp.float32) for size in sizes]
    factors[: len(masks or ())] = [mask.astype(jnp.float32) for mask in masks or ()]
    mask_LBH = _pad_rows(lstm_gpu.padded(rows, 0)[0], _stack_wide(factors, width))
    return lstm_gpu.Stack(units, jnp.stack(recurrent), jnp.stack(below), mask_LBH)


def _persistent_backward(saved, bars):
    lstm_gpu = _kernels()
    inputs_SBI, carries, layers, masks, valid_SB, trace = saved
    output_bar_SBH, final_bars = bars
    rows, padded_rows = inputs_SBI.shape[1], trace.hidden_LZBH.shape[2]
    pad_rows = functools.partial(_pad_rows, padded_rows)
    sizes = [weights.recurrent_HG.shape[0] for weights in layers]
    units = [lstm_gpu.padded(rows, size)[1] for size in sizes]
    below_bar_SBI = pad_rows(output_bar_SBH)
    layer_bars, carry_bars = [], []
    for run in reversed(lstm_gpu.backward_runs(padded_rows, units)):
        width = max(units[run])
        if run.stop < len(layers) and masks is not None:
            mask_1BH = pad_rows(masks[run.stop - 1][None]).astype(jnp.float32)
            below_bar_SBI *= mask_1BH
        inner = masks and masks[run.start : run.stop - 1]
        lasts = [
            pad_rows(_stack_wide(bars, width)).astype(jnp.float32)
            for bars in zip(*final_bars[run], strict=True)
        ]
        z_bar_LSBQH, *firsts = _gpu_backward().backward(
            _gpu_stack(layers[run], inner, rows),
            jax.tree.map(operator.itemgetter(run), trace),
            _pad_last(below_bar_SBI, width).astype(jnp.float32),
            *lasts,
            pad_rows(valid_SB[:, :, None])[:, :, 0],
            rows,
        )
        for index in reversed(range(run.start, run.stop)):
            weights, size, place = layers[index], sizes[index], index - run.start
            z_bar_SBQH = z_bar_LSBQH[place, ..., :size]
            z_bar_SBG = z_bar_SBQH.reshape(*z_bar_SBQH.shape[:2], 4 * size)
            below_SBI = pad_rows(inputs_SBI)
            if index:
                below_SBI = trace.fed_LSBH[index - 1, :, :, : sizes[index - 1]]
            before_SBH = trace.hidden_LZBH[index, :-1, :, :size]
            bias_bar_G = jnp.sum(z_bar_SBG.astype(jnp.float32), axis=(0, 1))
            # Kept apart, or XLA makes one product of two and then copies the halves.
            apart_SBG = lax.optimization_barrier(z_bar_SBG)
            bar = Weights(
                _product("sbi,sbg->ig", jnp.bfloat16, below_SBI, z_bar_SBG),
                _product("sbh,sbg->hg", jnp.bfloat16, before_SBH, apart_SBG),
                bias_bar_G,
                bias_bar_G,
            )
            first = Carry(*(first_LBH[place, :rows, :size] for first_LBH in firsts))
            layer_bars.append(_like(bar, weights))
            carry_bars.append(_like(first, carries[index]))
        below_bar_SBI = _product(
            "sbg,ig->sbi", jnp.bfloat16, z_bar_SBG, layers[run.start].input_IG
        )
    input_bar_SBI = below_bar_SBI[:, :rows].astype(inputs_SBI.dtype)
    return input_bar_SBI, tuple(carry_bars[::-1]), tuple(layer_bars[::-1]), None, None


_persistent.defvjp(_persistent_forward, _persistent_backward)


def _pad_rows(rows, values_SBH):
    return jnp.pad(values_SBH, ((0, 0), (0, rows - values_SBH.shape[1]), (0, 0)))


def _stack_wide(values, width):
    return jnp.stack([_pad_last(values_BH, width) for values_BH in values])


def _like(bars, values):
    return jax.tree.map(lambda bar, value: bar.astype(value.dtype), bars, values)


def _product(axes, dtype, left, right):
    """An einsum of `dtype` operands, summed in float32 or wider."""
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.einsum(
        axes, left.astype(dtype), right.astype(dtype), preferred_element_type=wide
    )


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
