"""LSTM layers whose weight gradients are formed once, after the loop.

A layer follows PyTorch, with four gates and two biases:

    [i, f, g, o]_t = x_t W_x + b_x + h_{t-1} W_h + b_h
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g),    h_t = sigmoid(o) tanh(c_t).

x W_x is one product for all positions, before the loop. The loop of the backward pass
yields only the gradients dz_t of the four pre-activations, stacked, and then

    dW_x = sum_t x_t' dz_t,    dW_h = sum_t h_{t-1}' dz_t,    dx_t = dz_t W_x'

are one product each; ordinary differentiation of a scan would read and write dW_h at
each step.

A stack runs one layer after the other ("scan") or, with one loop for all layers, as a
wavefront ("wavefront"); both are in xla.py. On Hopper GPUs and in bfloat16 the loop can
be a kernel that keeps the weights on chip ("persistent"; persistent.py, gpu.py). All
agree to rounding.

Axes: I width of a layer's inputs, H its units, G = 4 H gates.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from softbottle.ops import device as device_lib
from softbottle.ops.device import Device
from softbottle.ops.lstm import gpu, xla
from softbottle.ops.lstm.layer import Carry, Weights, masked, sizes_of
from softbottle.ops.mixture.options import note

__all__ = ["IMPLEMENTATIONS", "Carry", "Weights", "choose", "lstm", "stack"]

IMPLEMENTATIONS = ("scan", "wavefront", "persistent")


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
    outputs_SBH, (final,) = stack(
        inputs_SBI,
        [carry],
        [weights],
        None,
        valid_SB,
        compute_dtype=compute_dtype,
        unroll=unroll,
    )
    return outputs_SBH, final


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
    device: Device | None = None,
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
            runs, on one device, and else "wavefront"; see `choose`.
        compute_dtype, unroll: as in `lstm`; "persistent" has no use for `unroll`.
        device: as in `choose`; None takes jax's first. "scan" and "wavefront" do not
            read it.

    Returns:
        The last layer's outputs [S, B, H] and the state of each layer.

    Raises:
        ValueError: on an unknown implementation, one that cannot run there, or a wrong
            number of states or masks.
    """
    _check_name(implementation)
    _check_counts(len(layers), carries, masks)
    if valid_SB is None:
        valid_SB = jnp.ones(inputs_SBI.shape[:2], bool)
    dtype = jnp.dtype(inputs_SBI.dtype if compute_dtype is None else compute_dtype)
    if implementation in ("auto", "persistent"):
        device = device_lib.at_hand() if device is None else device
        rows, sizes = inputs_SBI.shape[1], sizes_of(layers)
        implementation = choose(implementation, sizes, rows, dtype, device)
    if implementation == "persistent":
        from softbottle.ops.lstm import persistent  # Pallas is slow to import

        return persistent.run(inputs_SBI, carries, layers, masks, valid_SB)
    run = _layer_by_layer if implementation == "scan" else xla.wavefront
    return run(inputs_SBI, carries, layers, masks, valid_SB, dtype, unroll)


def choose(
    implementation: str,
    sizes: Sequence[int],
    rows: int,
    dtype: jax.typing.DTypeLike,
    device: Device,
) -> str:
    """Decide how a stack runs on a device, which need not be at hand.

    Args:
        implementation: one of IMPLEMENTATIONS, or "auto": "persistent" if the device is
            the only one and the kernels take all layers there, else "wavefront". The
            log says which, and why, once.
        sizes: units of each layer.
        rows: of the batch.
        dtype: of the products' operands.
        device: where the stack will run. If the program has several, "auto" does not
            look at the kernels, which no compiler splits; "persistent" takes the
            caller's word.

    Returns:
        One of IMPLEMENTATIONS.

    Raises:
        ValueError: on an unknown implementation, or on "persistent" where the kernels
            refuse a layer.
    """
    _check_name(implementation)
    if implementation not in ("auto", "persistent"):
        return implementation
    explicit = implementation == "persistent"
    if explicit or (device.platform == "gpu" and device.count == 1):
        reasons = [gpu.refusals(rows, size, jnp.dtype(dtype), device) for size in sizes]
        refusals = list(dict.fromkeys(sum(reasons, [])))
    else:
        refusals = [f"needs one GPU, got {device.count} x {device.platform}"]
    if explicit and refusals:
        raise ValueError(f"'persistent' {'; '.join(refusals)}.")
    chosen = "wavefront" if refusals else "persistent"
    if not explicit:
        note(f"LSTM: {chosen} (persistent: {'; '.join(refusals) or 'runs here'}).")
    return chosen


def _layer_by_layer(inputs_SBI, carries, layers, masks, valid_SB, dtype, unroll):
    """A layer over all positions before the next one begins."""
    finals = []
    for index, (carry, weights) in enumerate(zip(carries, layers, strict=True)):
        if index and masks is not None:
            inputs_SBI = masked(inputs_SBI, masks[index - 1])
        inputs_SBI, final = xla.wavefront(
            inputs_SBI, (carry,), (weights,), None, valid_SB, dtype, unroll
        )
        finals.extend(final)
    return inputs_SBI, tuple(finals)


def _check_name(implementation):
    if implementation not in (names := ("auto", *IMPLEMENTATIONS)):
        raise ValueError(
            f"implementation must be one of {names}, got {implementation!r}."
        )


def _check_counts(depth, carries, masks):
    if len(carries) != depth:
        raise ValueError(f"{depth} layers take {depth} states, got {len(carries)}.")
    if masks is not None and len(masks) != depth - 1:
        raise ValueError(f"{depth} layers take {depth - 1} masks, got {len(masks)}.")
