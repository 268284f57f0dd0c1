"""The same work as others do it, in torch: the only file that imports torch.

Tasks of the kind "loss" are those of head.py, with a "peer" for the implementation:

    naive      softmax of every component in full, mixed, then the logarithm: what the
               MoS authors' own code does
    compile    log-sum-exp in log space, the label's logit gathered, torch.compile
    cce        Cut Cross-Entropy on all rows, mixed afterwards

Those of the kind "lstm" are those of recurrence.py; torch has one implementation, by
cuDNN where there is a GPU.

Axes: X entries of a flat array, R rows of a GEMM; of an LSTM layer H units, I inputs,
G = 4 H gates.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from softbottle.bench import oracle, problem, timing

Row = dict[str, Any]
Tensors = tuple[torch.Tensor, ...]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_task(task: Row) -> Row:
    """Check and time one peer."""
    row = {"loss": _run_loss, "lstm": _run_lstm}[task["kind"]](task)
    if "ms" in row:
        row["tflops"] = row["flop"] / row["ms"] / 1e9
    return row | {"torch": torch.__version__}


def _run_loss(task):
    case = problem.Case(*task["case"])
    inputs, labels_T, expected, tokens = _prepared(case, task["check_flop"])
    loss = make_loss(task["peer"])
    checked = inputs
    if tokens < case.tokens:
        cut = (array[:tokens].detach().requires_grad_() for array in inputs[:2])
        checked = (*cut, *inputs[2:])
    errors = check(gradients(loss, checked, labels_T[:tokens]), expected)
    row = oracle.verdict(errors, oracle.PEERS)
    row |= {"flop": task["products"] * case.product_flop, "checked_tokens": tokens}
    if row["status"] != "ok":
        return row
    return row | _timed(
        lambda: gradients(loss, inputs, labels_T), (*inputs, labels_T), task["seconds"]
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


def make_inputs(case: problem.Case) -> tuple[Tensors, torch.Tensor]:
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
        torch.from_numpy(small.bias_V).to(DEVICE).bfloat16(),
    )
    leaves = tuple(array.requires_grad_() for array in inputs)
    return leaves, torch.from_numpy(small.labels_T).to(DEVICE).long()


def make_loss(peer: Literal["naive", "compile", "cce"]) -> Callable[..., torch.Tensor]:
    """(log_prior, context, table, bias, labels) -> mean nll, the peer's way."""
    if peer == "compile":
        torch._dynamo.reset()
        return torch.compile(_log_space, dynamic=False)
    return {"naive": _naive, "cce": _cut_cross_entropy}[peer]


def gradients(
    loss: Callable[..., torch.Tensor], inputs: Tensors, labels_T: torch.Tensor
) -> tuple[torch.Tensor, Tensors]:
    """The mean loss and its gradients by all four inputs."""
    value = loss(*inputs, labels_T)
    return value, torch.autograd.grad(value, inputs)


def check(outputs: tuple[torch.Tensor, Tensors], expected: oracle.Expected) -> Row:
    """Errors of a mean loss and its four gradients."""
    loss, bars = outputs
    row = {"loss": loss.item()}
    row["loss_error"] = abs(loss.item() - expected.nll_T.mean().item())
    for name, bar, wanted in zip(oracle.INPUTS, bars, expected.bars, strict=True):
        row[f"error_{name}"] = relative_error(bar, wanted)
    return row


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was wanted, in float64."""
    difference = torch.linalg.vector_norm(actual.double() - wanted)
    return (difference / torch.linalg.vector_norm(wanted)).item()


def _naive(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    logit_TKV = F.linear(context_TKE, table_VE, bias_V)
    prior_TK = log_prior_TK.exp().to(logit_TKV.dtype)
    p_TV = (F.softmax(logit_TKV, -1) * prior_TK[:, :, None]).sum(1)
    # The authors' guard against log 0; it flattens words less likely than 1e-8.
    return F.nll_loss(torch.log(p_TV + 1e-8).float(), labels_T)


def _log_space(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    logit_TKV = F.linear(context_TKE, table_VE, bias_V)
    lse_TK = torch.logsumexp(logit_TKV.float(), -1)
    index_TK1 = labels_T[:, None, None].expand(*log_prior_TK.shape, 1)
    score_TK = logit_TKV.gather(2, index_TK1).squeeze(2).float()
    return -torch.logsumexp(log_prior_TK + score_TK - lse_TK, -1).mean()


def _cut_cross_entropy(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    from cut_cross_entropy import linear_cross_entropy

    tokens, components = log_prior_TK.shape
    context_RE = context_TKE.reshape(tokens * components, -1)
    options = {}
    if "bias" in inspect.signature(linear_cross_entropy).parameters:
        options["bias"] = bias_V
    else:
        # Releases before the bias: it is one more column, in a block of zeros.
        table_VE = F.pad(torch.cat([table_VE, bias_V[:, None]], 1), (0, 15))
        context_RE = F.pad(F.pad(context_RE, (0, 1), value=1.0), (0, 15))
    nll_R = linear_cross_entropy(
        context_RE,
        table_VE,
        labels_T.repeat_interleave(components),
        reduction="none",
        **options,
    )
    nll_TK = nll_R.reshape(tokens, components).float()
    return -torch.logsumexp(log_prior_TK - nll_TK, -1).mean()


@problem.keep_last
def _prepared(case, check_flop):
    """The case's arrays and labels, and the truth about its first tokens."""
    inputs, labels_T = make_inputs(case)
    tokens = case.tokens_within(check_flop)
    expected = truth(inputs, labels_T, tokens)
    # The truth leaves blocks that would split the memory that peers ask for.
    torch.cuda.empty_cache()
    return inputs, labels_T, expected, tokens


@torch.no_grad()
def truth(inputs: Tensors, labels_T: torch.Tensor, tokens: int) -> oracle.Expected:
    """The oracle's losses and gradients of the first tokens, on this device."""
    log_prior_TK, context_TKE, table_VE, bias_V = inputs
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


def _wait(_):
    if DEVICE == "cuda":
        torch.cuda.synchronize()
