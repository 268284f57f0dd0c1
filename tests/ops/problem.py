"""A mixture for the tests of ops, and its dense float64 gradient by hand."""

from typing import NamedTuple

import numpy as np

from tests import oracle

TOKENS, COMPONENTS, WIDTH, VOCAB = 11, 3, 7, 37


class Problem(NamedTuple):
    log_prior_TK: np.ndarray
    context_TKE: np.ndarray
    table_VE: np.ndarray
    bias_V: np.ndarray
    labels_T: np.ndarray
    weights_T: np.ndarray


def make_problem(tokens=TOKENS, seed=0):
    rng = np.random.default_rng(seed)
    score_TK = rng.normal(size=(tokens, COMPONENTS))
    log_prior_TK = score_TK - np.log(np.exp(score_TK).sum(axis=1, keepdims=True))
    return Problem(
        log_prior_TK,
        rng.normal(size=(tokens, COMPONENTS, WIDTH)),
        rng.normal(size=(VOCAB, WIDTH)),
        rng.normal(size=VOCAB),
        rng.integers(0, VOCAB, tokens).astype(np.int32),
        rng.uniform(-0.5, 1.5, tokens),
    )


def sigsoftmax_scores(problem, score_bar_TK, lse_bar_TK):
    """(score, lse) of z + log sigmoid(z) and gradients for given cotangents."""
    z_TKV = problem.context_TKE @ problem.table_VE.T + problem.bias_V
    g_TKV = z_TKV - np.log1p(np.exp(-z_TKV))
    lse_TK = np.log(np.exp(g_TKV).sum(axis=2))
    hit_T1V = np.eye(VOCAB)[problem.labels_T][:, None]
    score_TK = (g_TKV * hit_T1V).sum(axis=2)
    p_TKV = np.exp(g_TKV - lse_TK[:, :, None])
    g_bar = score_bar_TK[:, :, None] * hit_T1V + lse_bar_TK[:, :, None] * p_TKV
    z_bar = g_bar * (2 - oracle.sigmoid(z_TKV))
    bars = (
        z_bar @ problem.table_VE,
        np.einsum("tkv,tke->ve", z_bar, problem.context_TKE),
        z_bar.sum(axis=(0, 1)),
    )
    return (score_TK, lse_TK), bars
