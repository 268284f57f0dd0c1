"""The same work as others do it, in torch.

Tasks of the kind "loss" are those of head.py, with a "peer" for the implementation: one
of losses_torch.py. This file and that one are the only ones that import torch.

Those of the kind "lstm" are those of recurrence.py; torch has one implementation, by
cuDNN where there is a GPU.

Axes: X entries of a flat array, R rows of a GEMM; of an LSTM layer H units, I inputs,
G = 4 H gates.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from softbottle.bench import libraries, losses_torch, oracle, problem, timing

Row = dict[str, Any]
Tensors = tuple[torch.Tensor, ...]
# In the order of oracle.INPUTS; the bias is None for a peer that takes none.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_task(task: Row) -> Row:
    """Check and time one peer."""
    row = {"loss": _run_loss, "lstm": _run_lstm}[task["kind"]](task)
    if "ms" in row:
        row["tflops"] = row["flop"] / row["ms"] / 1e9
    return row | {"torch": torch.__version__}


def _run_loss(task):
    case = problem.Case(*task["case"])
    bias = libraries.variant(task["peer"]).bias
    inputs, labels_T, expected, tokens = _prepared(case, task["check_flop"], bias)
    loss = losses_torch.make_loss(task["peer"])
    checked = inputs
    if tokens < case.tokens:
        cut = (array[:tokens].detach().requires_grad_() for array in inputs[:2])
        checked = (*cut, *inputs[2:])
    errors = check(gradients(loss, checked, labels_T[:tokens]), expected)
    row = oracle.verdict(errors, oracle.PEERS)
    row |= {"flop": task["products"] * case.product_flop, "checked_tokens": tokens}
    row |= {"bias": bias}
    if row["status"] != "ok":
        return row
    return row | _timed(
        lambda: gradients(loss, inputs, labels_T),
        (*_leaves(inputs), labels_T),
        task["seconds"],
    )


def _timed(function, arguments, seconds):
    """Milliseconds, and on a GPU the bytes at the peak, arguments included."""
    on_gpu = DEVICE == "cuda"
    if not on_gpu:
        return {"ms": timing.milliseconds(function, _wait, seconds)}
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ms = timing.milliseconds(function, _wait, seconds)
    # The truth lies on the device as well, and is no part of the peer.
    argument_bytes = sum(array.nbytes for array in arguments)
    return {
        "ms": ms,
        "peak_bytes": torch.cuda.max_memory_allocated() - held + argument_bytes,
    }


def _run_lstm(task):
    stack = problem.STACKS[task["stack"]]
    arrays = problem.stack_arrays(stack, uniform)
    wanted = lstm_truth(arrays)
    arguments = _lstm_arguments(arrays, getattr(torch, task["dtype"]))
    inputs_SBI, layers, _ = arguments
    row = oracle.verdict(_lstm_errors(_lstm_gradient(*arguments), wanted), oracle.PEERS)
    row["flop"] = 3 * stack.product_flop
    if row["status"] != "ok":
        return row
    tensors = (inputs_SBI, *(part for layer in layers for part in layer.parameters()))
    return row | _timed(lambda: _lstm_gradient(*arguments), tensors, task["seconds"])


def lstm_truth(arrays: problem.StackArrays) -> Tensors:
    """Outputs, and gradients by inputs and parameters, in float64."""
    return _lstm_gradient(*_lstm_arguments(arrays, torch.float64))


def _lstm_arguments(arrays, dtype):
    layers = []
    for input_IG, recurrent_HG, *biases in arrays.layers:
        layer = torch.nn.LSTM(*input_IG.shape[:1], *recurrent_HG.shape[:1])
        values = (input_IG.T, recurrent_HG.T, *biases)
        with torch.no_grad():
            for parameter, value in zip(layer.parameters(), values, strict=True):
                parameter.copy_(value)
        layers.append(layer.to(DEVICE, dtype))
    inputs_SBI = arrays.inputs_SBI.to(dtype).requires_grad_()
    return inputs_SBI, layers, arrays.probe_SBH.to(dtype)


def _lstm_gradient(inputs_SBI, layers, probe_SBH):
    """Outputs, and gradients of their product with the probe."""
    outputs_SBH = inputs_SBI
    for layer in layers:
        outputs_SBH, _ = layer(outputs_SBH)
    parameters = [part for layer in layers for part in layer.parameters()]
    value = (outputs_SBH * probe_SBH).sum()
    return outputs_SBH.detach(), *torch.autograd.grad(value, [inputs_SBI, *parameters])


def _lstm_errors(actual, wanted):
    outputs, inputs, *parameters = map(relative_error, actual, wanted)
    return {
        "error_outputs": outputs,
        "error_inputs": inputs,
        "error_parameters": max(parameters),
    }


def make_inputs(case: problem.Case, bias: bool = True) -> tuple[Inputs, torch.Tensor]:
    """The case's numbers, all of them in bfloat16 but the prior, and its labels."""
    small = problem.small(case)
    rows = case.tokens * case.components
    width = problem.half_width(case.dim)
    context_X = uniform(rows * case.dim, problem.CONTEXT, 1.0)
    table_X = uniform(case.vocab * case.dim, problem.TABLE, width)
    inputs = (
        torch.from_numpy(small.log_prior_TK).to(DEVICE),
        context_X.reshape(case.tokens, case.components, case.dim),
        table_X.reshape(case.vocab, case.dim),
        torch.from_numpy(small.bias_V).to(DEVICE).bfloat16() if bias else None,
    )
    for array in _leaves(inputs):
        array.requires_grad_()
    return inputs, torch.from_numpy(small.labels_T).to(DEVICE).long()


def gradients(
    loss: Callable[..., torch.Tensor], inputs: Inputs, labels_T: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """The mean loss and its gradients by all inputs that there are."""
    value = loss(*inputs, labels_T)
    return value, torch.autograd.grad(value, _leaves(inputs))


def check(outputs: tuple[torch.Tensor, Tensors], expected: oracle.Expected) -> Row:
    """Errors of a mean loss and its gradients."""
    loss, bars = outputs
    row = {"loss": loss.item()}
    row["loss_error"] = abs(loss.item() - expected.nll_T.mean().item())
    for name, bar, wanted in oracle.pairs(bars, expected):
        row[f"error_{name}"] = relative_error(bar, wanted)
    return row


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was wanted, in float64."""
    difference = torch.linalg.vector_norm(actual.double() - wanted)
    return (difference / torch.linalg.vector_norm(wanted)).item()


@problem.keep_last
def _prepared(case, check_flop, bias):
    """The case's arrays and labels, and the truth about its first tokens."""
    inputs, labels_T = make_inputs(case, bias)
    tokens = case.tokens_within(check_flop)
    expected = truth(inputs, labels_T, tokens)
    # The truth leaves blocks that would split the memory that peers ask for.
    torch.cuda.empty_cache()
    return inputs, labels_T, expected, tokens


@torch.no_grad()
def truth(inputs: Inputs, labels_T: torch.Tensor, tokens: int) -> oracle.Expected:
    """The oracle's losses and gradients of the first tokens, on this device."""
    log_prior_TK, context_TKE, table_VE, bias_V = inputs
    if bias_V is None:
        bias_V = table_VE.new_zeros(table_VE.shape[0])
    return oracle.expected(
        torch,
        (log_prior_TK[:tokens], context_TKE[:tokens], table_VE, bias_V),
        labels_T[:tokens],
        torch.arange(table_VE.shape[0], device=DEVICE),
        lambda array: array.double(),
        functools.partial(oracle.block, torch),
    )


@torch.no_grad()
def uniform(count: int, stream: int, width: float) -> torch.Tensor:
    """Entries of a stream of problem.py between plus and minus width, bfloat16."""
    counter_X = torch.arange(count, dtype=torch.int32, device=DEVICE)
    return (problem.uniform(counter_X, stream, torch.Tensor.float) * width).bfloat16()


def _leaves(inputs):
    return tuple(array for array in inputs if array is not None)


def _wait(_):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
