"""Forward and backward of stacked LSTM layers, in jax.

A task has a "stack" (a name of problem.STACKS), an "implementation" of
ops/lstm/api.py, an "unroll", a "dtype" and "seconds" of timing. What is differentiated
is the inner product of the outputs with fixed numbers, by inputs and parameters. The
truth is a float64 loop that jax differentiates, written here from the layer's
equations.

Axes of a layer: H units, I inputs, G = 4 H gates.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from softbottle.bench import measure, oracle, problem
from softbottle.ops.lstm import api as lstm

Row = dict[str, Any]
# ((objective, outputs_SBH), (gradients by inputs_SBI, by the layers' parameters))
Differentiated = tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, Any]]
# Relative norms. A state is rounded at every position, and errors add up over them; a
# GPU's float32 products have TF32's ten bits.
LIMITS = {
    "float32": oracle.Limits(loss=0.0, gradient=1e-2),
    "bfloat16": oracle.Limits(loss=0.0, gradient=3e-2),
}


def run_task(task: Row) -> Row:
    """Check and time one variant."""
    stack = problem.STACKS[task["stack"]]
    arrays = problem.stack_arrays(stack, measure.uniform)
    dtype = jnp.dtype(task["dtype"])
    options = {name: task[name] for name in ("implementation", "unroll")}
    gradient = jax.jit(
        jax.value_and_grad(
            functools.partial(_objective, options, dtype), argnums=(0, 1), has_aux=True
        )
    )
    layers = jax.tree.map(lambda array: array.astype(jnp.float32), arrays.layers)
    wanted = _truth_of(stack)
    row = measure.checked_and_timed(
        gradient,
        (arrays.inputs_SBI.astype(dtype), layers, arrays.probe_SBH),
        lambda outputs: errors(outputs, wanted),
        task["seconds"],
        limits=LIMITS[task["dtype"]],
    )
    row["flop"] = 3 * stack.product_flop
    if "ms" in row:
        row["tflops"] = row["flop"] / row["ms"] / 1e9
    return row


def truth(arrays: problem.StackArrays) -> Differentiated:
    """Objective, outputs and gradients in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda array: array.astype(jnp.float64), arrays)
        gradient = jax.value_and_grad(_plain, argnums=(0, 1), has_aux=True)
        return jax.jit(gradient)(*wide)


@functools.lru_cache(maxsize=1)
def _truth_of(stack):
    return truth(problem.stack_arrays(stack, measure.uniform))


def errors(actual: Differentiated, wanted: Differentiated) -> Row:
    """Relative errors of outputs and gradients; the worst of the parameters'."""
    (_, outputs_SBH), (inputs_bar_SBI, layers_bar) = actual
    (_, wanted_SBH), (wanted_bar_SBI, wanted_layers_bar) = wanted
    pairs = zip(
        jax.tree.leaves(layers_bar), jax.tree.leaves(wanted_layers_bar), strict=True
    )
    return {
        "error_outputs": measure.relative_error(outputs_SBH, wanted_SBH),
        "error_inputs": measure.relative_error(inputs_bar_SBI, wanted_bar_SBI),
        "error_parameters": max(measure.relative_error(*pair) for pair in pairs),
    }


def _objective(options, dtype, inputs_SBI, layers, probe_SBH):
    rows = inputs_SBI.shape[1]
    weights = [lstm.Weights(*layer) for layer in layers]
    zeros = [jnp.zeros((rows, len(w.recurrent_HG)), jnp.float32) for w in weights]
    carries = [lstm.Carry(zeros_BH, zeros_BH) for zeros_BH in zeros]
    outputs_SBH, _ = lstm.stack(
        inputs_SBI, carries, weights, compute_dtype=dtype, **options
    )
    product_SBH = outputs_SBH.astype(jnp.float32) * probe_SBH.astype(jnp.float32)
    return jnp.sum(product_SBH), outputs_SBH


def _plain(inputs_SBI, layers, probe_SBH):
    for input_IG, recurrent_HG, input_bias_G, recurrent_bias_G in layers:
        bias_1G = (input_bias_G + recurrent_bias_G)[None]

        def step(state, input_BI, weights=(input_IG, recurrent_HG, bias_1G)):
            hidden_BH, cell_BH = state
            z_BG = input_BI @ weights[0] + hidden_BH @ weights[1] + weights[2]
            i_BH, f_BH, g_BH, o_BH = jnp.split(z_BG, 4, axis=1)
            cell_BH = jax.nn.sigmoid(f_BH) * cell_BH
            cell_BH += jax.nn.sigmoid(i_BH) * jnp.tanh(g_BH)
            hidden_BH = jax.nn.sigmoid(o_BH) * jnp.tanh(cell_BH)
            return (hidden_BH, cell_BH), hidden_BH

        shape = (inputs_SBI.shape[1], len(recurrent_HG))
        zeros_BH = jnp.zeros(shape, inputs_SBI.dtype)
        _, inputs_SBI = jax.lax.scan(step, (zeros_BH, zeros_BH), inputs_SBI)
    return jnp.sum(inputs_SBI * probe_SBH), inputs_SBI
