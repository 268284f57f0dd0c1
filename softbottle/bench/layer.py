"""Whole heads, from the state to the loss and back, beside a softmax of the same width.

A task has a "case" (sizes, of which `components` is not read), a "head" as
`config.head` sets it, but `frequent` as a share of the words, and the rest as head.py
has it. The states are as wide as the
table, so that a softmax reads them as they are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import config as config_lib
from softbottle import heads
from softbottle.bench import head as operation
from softbottle.bench import measure, oracle, problem
from softbottle.ops.mixture.options import Options

Row = dict[str, Any]
# By the name of their rows; `config.head` of each, `frequent` as a share.
LAYERS: dict[str, Row] = {
    "mos-1": {"name": "mos", "components": 1},
    "partition-4": {"name": "partition", "classes": 4},
    "mixtape-4": {"name": "mixtape", "components": 4, "frequent": 0.1},
    "mos-7-active-2": {"name": "mos", "components": 7, "active": 2},
    "partition-8": {"name": "partition", "classes": 8},
    "moc-7": {"name": "moc", "components": 7},
    "mfs-3": {"name": "mfs", "components": 3},
}
# The sizes they are timed at: large enough that time is not that of launches.
CASES = ("tiny", "lm1b-100k")
# Tokens that the dense head is computed for in float64, [T, K, V] of it.
CHECKED = 16
# Contexts are made in the state's bfloat16, and rounded as such.
LIMITS = oracle.Limits(loss=2e-2, gradient=2e-2)
NAMES = ("params", "table", "bias", "hidden")


def run_task(task: Row) -> Row:
    """Check and time the loss and gradient of a task's head."""
    case = problem.Case(*task["case"])
    section = config_lib.Head()
    for name, value in task["head"].items():
        setattr(section, name, int(value * case.vocab) if name == "frequent" else value)
    chosen = heads.from_config(section)
    arguments = inputs(case, chosen)
    function = gradient_of(chosen, operation.options_of(task))
    few = (cut(arguments[0]), arguments[1][:CHECKED])
    wanted = _truth(chosen, *few)
    softmax = gradient_of(heads.softmax(), operation.options_of(task))
    beside = functools.partial(softmax, *inputs(case, heads.softmax()))
    row = measure.checked_and_timed(
        function,
        arguments,
        lambda outputs: errors(outputs, wanted),
        task["seconds"],
        few,
        LIMITS,
        beside,
    )
    flop = 3 * chosen.products * case._replace(components=1).product_flop
    row |= {"flop": flop, "checked_tokens": CHECKED}
    if "ms" in row:
        row["tflops"] = flop / row["ms"] / 1e9
    return row


def gradient_of(head: heads.Head, options: Options) -> jax.stages.Wrapped:
    """(inputs, labels_T) -> the mean loss and its gradients, compiled."""

    def mean_nll(inputs, labels_T):
        tokens = labels_T.shape[0]
        weights_T = jnp.full(tokens, 1 / tokens, jnp.float32)
        return head.loss(*inputs, labels_T, weights_T, options=options)

    return jax.jit(jax.value_and_grad(mean_nll))


def errors(outputs: tuple[jax.Array, Any], wanted: tuple[jax.Array, Any]) -> Row:
    """Those of a loss and of its gradients by NAMES."""
    row = {"loss": float(outputs[0])}
    row["loss_error"] = abs(float(outputs[0]) - float(wanted[0]))
    for name, bars, exact in zip(NAMES, outputs[1], wanted[1], strict=True):
        each = jax.tree.map(measure.relative_error, bars, exact)
        row[f"error_{name}"] = max(jax.tree.leaves(each), default=0.0)
    return row


def inputs(case: problem.Case, chosen: heads.Head) -> tuple[Any, jax.Array]:
    """(params, table_VE, bias_V, hidden_TD), and labels.

    All but the parameters are as head.py has them.
    """
    # A head that reads several states gets as many contexts of the operation's inputs.
    states = chosen.layers * chosen.positions
    given, labels_T = operation.make_inputs(case._replace(components=states))
    params = chosen.init(jax.random.key(0), states * case.dim, case.dim)
    # A start of zero would hide mistakes, and contexts that differ by less than
    # bfloat16 resolves would show its rounding alone.
    for number, (name, leaf) in enumerate(params.items()):
        if not np.any(leaf):
            noise = jax.random.normal(jax.random.key(number), leaf.shape)
            params[name] = 2 * noise
    hidden_TD = given.context_TKE.reshape(case.tokens, -1)
    return (params, given.table_VE, given.bias_V, hidden_TD), labels_T


def cut(given: Any) -> Any:
    """What `inputs` gives, of the tokens that are checked."""
    *output, hidden_TD = given
    return (*output, hidden_TD[:CHECKED])


def _truth(chosen, given, labels_T):
    """The dense head on the same numbers, in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), given
        )
        dense = Options(implementation="reference")
        return gradient_of(chosen, dense)(wide, jnp.asarray(np.asarray(labels_T)))
