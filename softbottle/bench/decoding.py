"""Log-probabilities, best words and samples of a mixture, in jax.

A task has a "case" (sizes), a "kind" (sample, top_k or log_probs), "budget_mib" (0: the
default) and "seconds" of timing. Log-probabilities and best words are compared with
float64 ones. A draw has no right answer, so it is asked to be a word, to be the same
word under another budget, and to be as likely on the whole as draws are.

Axes: K best words, in the check of top_k.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.bench import head, measure, oracle, problem
from softbottle.ops.mixture import api
from softbottle.ops.mixture.options import Options

Row = dict[str, Any]
BEST = 40
# Of log-probabilities, in nats.
LIMITS = oracle.Limits(loss=0.0, gradient=1e-4)
# Deviations that the mean log-probability of the draws may lie from its expectation.
DEVIATIONS = 5.0
OTHER_BUDGET_BYTES = 2**20


def run_task(task: Row) -> Row:
    """Check and time one operation."""
    case = problem.Case(*task["case"])
    inputs, _ = head.make_inputs(case)
    arguments: tuple[Any, ...] = inputs.paired
    if task["kind"] == "sample":
        arguments += (jax.random.key(0),)
    row = measure.checked_and_timed(
        operation(task["kind"], head.options_of(task)),
        arguments,
        functools.partial(CHECKS[task["kind"]], arguments, truth(inputs)),
        task["seconds"],
        limits=LIMITS,
    )
    dense_bytes = 4 * case.tokens * case.components * case.vocab
    return row | {"of_dense": row["made_bytes"] / dense_bytes}


def operation(
    kind: Literal["sample", "top_k", "log_probs"], options: Options
) -> jax.stages.Wrapped:
    """The compiled operation of ops/mixture/api.py."""
    count = {"k": BEST} if kind == "top_k" else {}
    return jax.jit(functools.partial(getattr(api, kind), **count, options=options))


def truth(inputs: head.Inputs) -> np.ndarray:
    """log P(v) of every word in float64, [T, V]."""
    with jax.enable_x64(True):
        wide = [array.astype(jnp.float64) for array in inputs]
        return np.asarray(jax.jit(functools.partial(oracle.log_probs, jnp))(*wide))


def _check_log_probs(arguments, wanted_TV, log_p_TV):
    del arguments
    return {"error": float(np.max(np.abs(np.asarray(log_p_TV) - wanted_TV)))}


def _check_top_k(arguments, wanted_TV, outputs):
    """Errors of the values, and of the words: by how much a better one was missed."""
    del arguments
    values_TK, ids_TK = map(np.asarray, outputs)
    best_TK = -np.sort(-wanted_TV, axis=1)[:, : values_TK.shape[1]]
    chosen_TK = np.take_along_axis(wanted_TV, ids_TK, axis=1)
    distinct = all(len(set(ids_K)) == len(ids_K) for ids_K in ids_TK.tolist())
    error = max(np.max(np.abs(array - best_TK)) for array in (values_TK, chosen_TK))
    ids_equal = np.mean(np.argsort(-wanted_TV, axis=1)[:, : ids_TK.shape[1]] == ids_TK)
    return {"error": float(error) if distinct else math.inf, "ids": float(ids_equal)}


def _check_sample(arguments, wanted_TV, ids_T):
    ids_T = np.asarray(ids_T)
    again = operation("sample", Options(budget_bytes=OTHER_BUDGET_BYTES))(*arguments)
    if not np.array_equal(ids_T, again):
        return {"error": math.inf, "reason": "the draw depends on the budget"}
    if ids_T.min() < 0 or ids_T.max() >= wanted_TV.shape[1]:
        return {"error": math.inf, "reason": "a draw is no word"}
    p_TV = np.exp(wanted_TV)
    mean_T = np.sum(p_TV * wanted_TV, axis=1)
    variance_T = np.sum(p_TV * wanted_TV**2, axis=1) - mean_T**2
    drawn_T = np.take_along_axis(wanted_TV, ids_T[:, None], axis=1)[:, 0]
    deviations = abs(np.sum(drawn_T - mean_T)) / math.sqrt(np.sum(variance_T))
    if not deviations < DEVIATIONS:
        return {
            "error": math.inf,
            "reason": f"draws are {deviations:.1f} deviations off",
        }
    return {"deviations": float(deviations)}


CHECKS = {
    "log_probs": _check_log_probs,
    "top_k": _check_top_k,
    "sample": _check_sample,
}
