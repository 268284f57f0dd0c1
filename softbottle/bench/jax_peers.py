"""The same work by tokamax, which runs in jax.

Tasks are those of head.py of the kind "loss", with a "peer" for the implementation: a
name that tokamax has for it. Its loss takes no bias and the table as [E, V]; the
transposed view that it gets is a matter of layout to the compiler. A mixture is made of
the losses of its rows (token, component),

    nll[t] = -logsumexp_k(log_prior[t, k] - nll[t, k]),

so the cotangent of a row is the posterior of its component. One component is computed
in the same way: a mean in tokamax takes as many products, and sums in bfloat16.

Axes: R rows of a GEMM.
"""

from typing import Any

import jax
import jax.numpy as jnp

from softbottle.bench import head, libraries, measure, oracle, problem

Row = dict[str, Any]


def run_task(task: Row) -> Row:
    """Check and time one implementation."""
    variant = libraries.variant(task["peer"])
    case = problem.Case(*task["case"])
    (inputs, labels_T, expected, tokens), _ = head.prepared(
        case, task["check_flop"], variant.bias
    )
    fewer = None
    if tokens < case.tokens:
        some, labels_C = head.cut(inputs, labels_T, tokens)
        fewer = (*some[:3], labels_C)
    row = measure.checked_and_timed(
        gradient_of(task["peer"]),
        (*inputs[:3], labels_T),
        lambda outputs: head.check_gradient(outputs, expected),
        task["seconds"],
        fewer,
        oracle.PEERS,
    )
    row |= {"flop": task["products"] * case.product_flop, "checked_tokens": tokens}
    row |= {"bias": variant.bias}
    if "ms" in row:
        row["tflops"] = row["flop"] / row["ms"] / 1e9
    return row


def gradient_of(implementation: str) -> jax.stages.Wrapped:
    """(log_prior, context, table, labels) -> the mean nll and three gradients."""
    import tokamax

    def mean_nll(log_prior_TK, context_TKE, table_VE, labels_T):
        components, dim = context_TKE.shape[1:]
        nll_R = tokamax.linear_softmax_cross_entropy_loss(
            context_TKE.reshape(-1, dim),
            jnp.repeat(labels_T, components),
            table_VE.T,
            reduction="none",
            implementation=implementation,
        )
        joint_TK = log_prior_TK - nll_R.reshape(log_prior_TK.shape)
        return -jnp.mean(jax.nn.logsumexp(joint_TK, axis=1))

    return jax.jit(jax.value_and_grad(mean_nll, argnums=(0, 1, 2)))
