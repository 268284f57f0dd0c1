"""The mixture loss, its evaluation and the bare GEMMs, in jax.

A task has a "case" (sizes), a "kind", an "implementation" of ops/mixture/api.py,
"budget_mib" (0: the default), "seconds" of timing and "check_flop", beyond which the
check takes fewer tokens. With "bias" False words have none, as for the peers that take
none (libraries.py). Kinds:

    loss         the mean nll and its gradient by prior, context, table and bias
    evaluation   nll per token, forward only
    per token    nll per token and, by a cotangent of each, its gradient
    products     the three bfloat16 GEMMs alone: nothing between them, all padded
    ceiling      a square bfloat16 GEMM: the speed that others are a fraction of

Axes: X entries of a flat array, N chunks of R rows.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.bench import measure, oracle, problem
from softbottle.ops.mixture import api
from softbottle.ops.mixture.arrays import Mixture, Targets, Vocabulary
from softbottle.ops.mixture.options import Options

Row = dict[str, Any]
MULTIPLE = 128
PRODUCT_BLOCK_BYTES = 8 * 2**30
# The dense implementation holds logits, probabilities and their gradients.
DENSE_ARRAYS = 4
HOST_BYTES = 4 * 2**30


class Inputs(NamedTuple):
    """What the operations are called with, labels and weights apart."""

    log_prior_TK: jax.Array
    context_TKE: jax.Array
    table_VE: jax.Array
    bias_V: jax.Array

    @property
    def paired(self) -> tuple[Mixture, Vocabulary]:
        """As the operations take them."""
        return Mixture(*self[:2]), Vocabulary(*self[2:])


class Prepared(NamedTuple):
    """A case on the device, and the truth about its first `tokens` tokens."""

    inputs: Inputs
    labels_T: jax.Array
    expected: oracle.Expected
    tokens: int


def run_task(task: Row) -> Row:
    """Check and time one variant."""
    case = problem.Case(*task["case"])
    row = KINDS[task["kind"]](task, case)
    if "ms" in row:
        row["tflops"] = row["flop"] / row["ms"] / 1e9
    return row


def make_inputs(case: problem.Case) -> tuple[Inputs, jax.Array]:
    """The case's numbers on the device, context and table in bfloat16, and labels."""
    small = problem.small(case)
    rows = case.tokens * case.components
    width = problem.half_width(case.dim)
    context_X = measure.uniform(rows * case.dim, problem.CONTEXT, 1.0)
    table_X = measure.uniform(case.vocab * case.dim, problem.TABLE, width)
    inputs = Inputs(
        jnp.asarray(small.log_prior_TK),
        context_X.reshape(case.tokens, case.components, case.dim),
        table_X.reshape(case.vocab, case.dim),
        jnp.asarray(small.bias_V),
    )
    return inputs, jnp.asarray(small.labels_T)


def truth(inputs: Inputs, labels_T: jax.Array) -> oracle.Expected:
    """The oracle's losses and gradients, computed on this device."""
    with jax.enable_x64(True):
        return oracle.expected(
            jnp,
            inputs,
            labels_T,
            jnp.arange(inputs.table_VE.shape[0], dtype=jnp.int32),
            lambda array: array.astype(jnp.float64),
            jax.jit(functools.partial(oracle.block, jnp)),
        )


def gradient_of(options: Options, bias: bool = True) -> jax.stages.Wrapped:
    """(inputs, labels_T) -> the mean loss and its gradients, compiled."""

    def mean_nll(inputs, labels_T):
        tokens = labels_T.shape[0]
        weights_T = jnp.full(tokens, 1 / tokens, jnp.float32)
        targets = Targets(labels_T, weights_T)
        return api.loss(*inputs.paired, targets, options=options)

    return _compiled(mean_nll, bias)


def _compiled(mean, bias):
    """The value and gradients of a mean; without a bias that of three inputs."""
    if bias:
        return jax.jit(jax.value_and_grad(mean))

    def without(inputs, labels_T):
        words = len(inputs[2])
        return mean(Inputs(*inputs, jnp.zeros(words, jnp.float32)), labels_T)

    three = jax.value_and_grad(without)
    return jax.jit(lambda inputs, labels_T: three(inputs[:3], labels_T))


def check_gradient(
    outputs: tuple[jax.Array, Sequence[jax.Array]], expected: oracle.Expected
) -> Row:
    """Errors of a mean loss and its gradients, in the order of oracle.INPUTS."""
    loss, bars = outputs
    wanted = float(np.mean(np.asarray(expected.nll_T)))
    row = {"loss": float(loss), "loss_error": abs(float(loss) - wanted)}
    for name, bar, wanted_bar in oracle.pairs(bars, expected):
        row[f"error_{name}"] = measure.relative_error(bar, wanted_bar)
    return row


def check_nll(nll_T: jax.Array, expected: oracle.Expected) -> Row:
    """Mean and worst error of the tokens' losses."""
    wide_T = np.asarray(nll_T, np.float64)
    error_T = np.abs(wide_T - np.asarray(expected.nll_T))
    return {
        "loss": float(np.mean(wide_T)),
        "loss_error": float(np.mean(error_T)),
        "worst_token_error": float(np.max(error_T)),
    }


def _loss(task, case):
    function = gradient_of(options_of(task), task.get("bias", True))
    return _against_truth(task, case, function, check_gradient)


def _evaluation(task, case):
    options = options_of(task)

    @jax.jit
    def function(inputs, labels_T):
        return api.nll(*inputs.paired, labels_T, options=options)

    return _against_truth(task, case, function, check_nll)


def _per_token(task, case):
    options = options_of(task)

    def mean(inputs, labels_T):
        return jnp.mean(api.nll(*inputs.paired, labels_T, options=options))

    function = _compiled(mean, task.get("bias", True))
    return _against_truth(task, case, function, check_gradient)


def _against_truth(task, case, function, check):
    dense = DENSE_ARRAYS * 4 * case.tokens * case.components * case.vocab
    if task["implementation"] == "reference" and dense > _capacity():
        reason = f"skipped: the dense logits take {dense / 2**30:.0f} GiB"
        return {"status": "skipped", "reason": reason}
    bias = task.get("bias", True)
    ready, programs = prepared(case, task["check_flop"], bias)
    arguments = (ready.inputs, ready.labels_T)
    checked = None
    if ready.tokens < case.tokens:
        checked = cut(*arguments, ready.tokens)
    program = hash(function.lower(*arguments).as_text())
    # "auto" is most often the same program as the implementation that it chooses.
    if program in programs:
        twin, row = programs[program]
        return row | {"same_program_as": twin}
    row = measure.checked_and_timed(
        function,
        arguments,
        lambda outputs: check(outputs, ready.expected),
        task["seconds"],
        checked,
    )
    row |= {"flop": task["products"] * case.product_flop}
    row |= {"checked_tokens": ready.tokens}
    programs[program] = (task["variant"], row)
    return row


def _products(task, case):
    """H W', E W and E' H on padded shapes, E the first product's own result."""
    rows, dim, vocab = (
        -(-size // MULTIPLE) * MULTIPLE
        for size in (case.tokens * case.components, case.dim, case.vocab)
    )
    chunks = -(-2 * rows * vocab // PRODUCT_BLOCK_BYTES)
    size = -(-rows // (chunks * MULTIPLE)) * MULTIPLE
    context_NRE = measure.uniform(chunks * size * dim, problem.CONTEXT, 1.0)
    context_NRE = context_NRE.reshape(chunks, size, dim)
    table_VE = measure.uniform(vocab * dim, problem.TABLE, problem.half_width(dim))
    arguments = (context_NRE, table_VE.reshape(vocab, dim))
    compiled = jax.jit(_three_products).lower(*arguments).compile()
    row = measure.memory(compiled) | measure.timed(compiled, arguments, task["seconds"])
    return row | {"flop": task["products"] * case.product_flop}


def _three_products(context_NRE, table_VE):
    def products(context_RE):
        z_RV = context_RE @ table_VE.T
        table_bar_VE = jnp.matmul(
            z_RV.T, context_RE, preferred_element_type=jnp.float32
        )
        return table_bar_VE, z_RV @ table_VE

    def add(sum_VE, context_RE):
        table_bar_VE, context_bar_RE = products(context_RE)
        return sum_VE + table_bar_VE, context_bar_RE

    if context_NRE.shape[0] == 1:
        return products(context_NRE[0])
    return jax.lax.scan(add, jnp.zeros(table_VE.shape, jnp.float32), context_NRE)


def _ceiling(task, case):
    """Eight square products, one after the other; `case.dim` is their size."""
    size, count = case.dim, 8
    left = measure.uniform(size * size, problem.CONTEXT, 1.0).reshape(size, size)
    # The factor keeps the product's entries as large as those of `left`.
    right = measure.uniform(size * size, problem.TABLE, (3 / size) ** 0.5)
    right = right.reshape(size, size)

    def chain(left, right):
        return jax.lax.fori_loop(0, count, lambda _, value: value @ right, left)

    compiled = jax.jit(chain).lower(left, right).compile()
    row = measure.timed(compiled, (left, right), task["seconds"])
    return row | {"flop": count * 2 * size**3}


KINDS = {
    "loss": _loss,
    "evaluation": _evaluation,
    "per token": _per_token,
    "products": _products,
    "ceiling": _ceiling,
}


@problem.keep_last
def prepared(
    case: problem.Case, check_flop: float, bias: bool
) -> tuple[Prepared, dict[int, Any]]:
    """The case's arrays and truth; and by program, the variant and row it gave."""
    inputs, labels_T = make_inputs(case)
    if not bias:
        inputs = inputs._replace(bias_V=jnp.zeros_like(inputs.bias_V))
    tokens = case.tokens_within(check_flop)
    expected = truth(*cut(inputs, labels_T, tokens))
    return Prepared(inputs, labels_T, expected, tokens), {}


def cut(inputs: Inputs, labels_T: jax.Array, tokens: int) -> tuple[Inputs, jax.Array]:
    """The first tokens."""
    return inputs._replace(
        log_prior_TK=inputs.log_prior_TK[:tokens],
        context_TKE=inputs.context_TKE[:tokens],
    ), labels_T[:tokens]


def options_of(task: Row) -> Options:
    """The implementation and the budget that a task names."""
    budget_bytes = task["budget_mib"] * 2**20 if task["budget_mib"] else None
    return Options(implementation=task["implementation"], budget_bytes=budget_bytes)


def _capacity():
    """Bytes that the device has, or that are asked of a host."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", HOST_BYTES)
