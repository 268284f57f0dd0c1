"""What can be asked of a loss, each beside the plain loss of the same head.

A task has a "case" (sizes, of which `components` is not read), a "head" of HEADS, an
"option" of OPTIONS and the rest as head.py has it. Values and gradients are checked
against formulas of dense float64 log-probabilities, of a few tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import heads
from softbottle.bench import head as operation
from softbottle.bench import layer, measure, problem

Row = dict[str, Any]
HEADS: dict[str, heads.Head] = {"softmax": heads.softmax(), "mos-4": heads.mos(4)}
CAP = heads.softcap(30.0)
SMOOTHING, Z, TEMPERATURE, BONUS = 0.1, 0.01, 0.8, 0.05
Ours = Callable[..., jax.Array]


def run_task(task: Row) -> Row:
    """Check and time a loss with one option, and its gradient."""
    case = problem.Case(*task["case"])
    head, name = HEADS[task["head"]], task["option"]
    inputs, labels_T = layer.inputs(case, head)
    ours, dense = OPTIONS[name]
    options = operation.options_of(task)
    function, beside = _gradient(functools.partial(ours, head, options)), None
    if name != "plain":
        plain = _gradient(functools.partial(OPTIONS["plain"][0], head, options))
        beside = functools.partial(plain, inputs, labels_T)
    few = layer.cut(inputs), labels_T[: layer.CHECKED]
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), few[0]
        )
        exact = _gradient(functools.partial(dense, head))
        wanted = exact(wide, jnp.asarray(np.asarray(few[1])))
    row = measure.checked_and_timed(
        function,
        (inputs, labels_T),
        lambda outputs: layer.errors(outputs, wanted),
        task["seconds"],
        few,
        layer.LIMITS,
        beside,
    )
    flop = 3 * head.products * case._replace(components=1).product_flop
    row |= {"flop": flop, "checked_tokens": layer.CHECKED}
    if "ms" in row:
        row["tflops"] = flop / row["ms"] / 1e9
    return row


def _gradient(function):
    return jax.jit(jax.value_and_grad(function))


def _loss(head, options, inputs, labels_T, **terms):
    return head.loss(*inputs, labels_T, reduction="mean", options=options, **terms)


def _capped(head, options, inputs, labels_T):
    del head
    return _loss(CAP, options, inputs, labels_T)


def _accuracy(head, options, inputs, labels_T):
    """The loss, and how many labels are the most probable word: a term of it."""
    how = {"reduction": "mean", "options": options}
    loss, argmax_T = head.loss_and_argmax(*inputs, labels_T, **how)
    return loss + jnp.mean((argmax_T == labels_T).astype(jnp.float32))


def _bonus(head, options, inputs, labels_T):
    found = head.measure(*inputs, labels_T, ("nll", "entropy"), options=options)
    return jnp.mean(found["nll"] - BONUS * found["entropy"])


def _distilled(head, options, inputs, labels_T):
    """From a teacher that has the words of the table in another order."""
    del labels_T
    student, teacher = (
        heads.Output(head, *inputs),
        heads.Output(head, *_teacher(inputs)),
    )
    return heads.distill(student, teacher, reduction="mean", options=options)


def _teacher(inputs):
    params, table_VE, bias_V, hidden_TD = jax.lax.stop_gradient(inputs)
    return params, table_VE[::-1], bias_V[::-1], hidden_TD


def _log_probs(head, inputs, cap=None):
    """Log P [T, V] and the log-normalizers [T, K] in dense float64."""
    params, table_VE, bias_V, hidden_TD = inputs
    log_prior_TK, context_TKE = head.mix(params, hidden_TD)
    z_TKV = jnp.einsum("tke,ve->tkv", context_TKE, table_VE) + bias_V[None, None]
    if cap is not None:
        z_TKV = cap * jnp.tanh(z_TKV / cap)
    lse_TK = jax.nn.logsumexp(z_TKV, axis=2)
    log_p_TKV = log_prior_TK[:, :, None] + z_TKV - lse_TK[:, :, None]
    return jax.nn.logsumexp(log_p_TKV, axis=1), lse_TK


def _own(log_p_TV, labels_T):
    return jnp.take_along_axis(log_p_TV, labels_T[:, None], axis=1)[:, 0]


def _dense_loss(head, inputs, labels_T):
    return -jnp.mean(_own(_log_probs(head, inputs)[0], labels_T))


def _dense_z(head, inputs, labels_T):
    log_p_TV, lse_TK = _log_probs(head, inputs)
    return jnp.mean(Z * jnp.mean(lse_TK**2, axis=1) - _own(log_p_TV, labels_T))


def _dense_smoothing(head, inputs, labels_T):
    log_p_TV, _ = _log_probs(head, inputs)
    own_T, mean_T = _own(log_p_TV, labels_T), jnp.mean(log_p_TV, axis=1)
    return -jnp.mean((1 - SMOOTHING) * own_T + SMOOTHING * mean_T)


def _dense_temperature(head, inputs, labels_T):
    log_p_TV = jax.nn.log_softmax(_log_probs(head, inputs)[0] / TEMPERATURE)
    return -jnp.mean(_own(log_p_TV, labels_T))


def _dense_cap(head, inputs, labels_T):
    return -jnp.mean(_own(_log_probs(head, inputs, CAP.cap)[0], labels_T))


def _dense_accuracy(head, inputs, labels_T):
    log_p_TV, _ = _log_probs(head, inputs)
    hits = jnp.mean((jnp.argmax(log_p_TV, axis=1) == labels_T).astype(jnp.float64))
    return hits - jnp.mean(_own(log_p_TV, labels_T))


def _dense_bonus(head, inputs, labels_T):
    log_p_TV, _ = _log_probs(head, inputs)
    entropy_T = -jnp.sum(jnp.exp(log_p_TV) * log_p_TV, axis=1)
    return -jnp.mean(_own(log_p_TV, labels_T) + BONUS * entropy_T)


def _dense_distilled(head, inputs, labels_T):
    del labels_T
    log_q_TV, log_p_TV = (
        _log_probs(head, each)[0] for each in (inputs, _teacher(inputs))
    )
    return jnp.mean(jnp.sum(jnp.exp(log_p_TV) * (log_p_TV - log_q_TV), axis=1))


# Ours, and the formula.
OPTIONS: dict[str, tuple[Ours, Ours]] = {
    "plain": (_loss, _dense_loss),
    "z-loss": (functools.partial(_loss, z_loss=Z), _dense_z),
    "smoothing": (
        functools.partial(_loss, label_smoothing=SMOOTHING),
        _dense_smoothing,
    ),
    "temperature": (
        functools.partial(_loss, temperature=TEMPERATURE),
        _dense_temperature,
    ),
    "soft-cap": (_capped, _dense_cap),
    "argmax": (_accuracy, _dense_accuracy),
    "entropy": (_bonus, _dense_bonus),
    "distillation": (_distilled, _dense_distilled),
}
