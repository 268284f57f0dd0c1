"""A mixture for the tests of ops, and its dense float64 gradient by hand."""

from typing import NamedTuple

import numpy as np

from softbottle.ops.mixture.arrays import Mixture, Targets, Vocabulary
from tests import oracle

TOKENS, COMPONENTS, WIDTH, VOCAB = 11, 3, 7, 37


class Problem(NamedTuple):
    log_prior_TK: np.ndarray
    context_TKE: np.ndarray
    table_VE: np.ndarray
    bias_V: np.ndarray
    labels_T: np.ndarray
    weights_T: np.ndarray


def paired(log_prior_TK, context_TKE, table_VE, bias_V, *targets):
    """The arrays as the operations take them: in pairs, labels alone by themselves."""
    targets = (Targets(*targets),) if len(targets) == 2 else targets
    return Mixture(log_prior_TK, context_TKE), Vocabulary(table_VE, bias_V), *targets


def make_problem(
    tokens=TOKENS, components=COMPONENTS, width=WIDTH, vocab=VOCAB, seed=0
):
    rng = np.random.default_rng(seed)
    score_TK = rng.normal(size=(tokens, components))
    log_prior_TK = score_TK - np.log(np.exp(score_TK).sum(axis=1, keepdims=True))
    return Problem(
        log_prior_TK,
        rng.normal(size=(tokens, components, width)),
        rng.normal(size=(vocab, width)),
        rng.normal(size=vocab),
        rng.integers(0, vocab, tokens).astype(np.int32),
        rng.uniform(-0.5, 1.5, tokens),
    )


def loss_and_gradient(problem, center=0.0, slope=1.0, cap=None, live=None):
    """Loss and its gradient for prior, context, table and bias, under GSS.

    A slope of 1 is softmax and (0, 2) sigsoftmax; with `cap` logits are soft-capped
    instead. `live` words count, the rest is padding.
    """
    live = problem.table_VE.shape[0] if live is None else live
    z_TKV = problem.context_TKE @ problem.table_VE[:live].T + problem.bias_V[:live]
    shifted_TKV = z_TKV - center
    g_TKV = slope * shifted_TKV + center - (slope - 1) * np.logaddexp(0, shifted_TKV)
    g_slope_TKV = slope - (slope - 1) * oracle.sigmoid(shifted_TKV)
    if cap is not None:
        g_TKV = cap * np.tanh(z_TKV / cap)
        g_slope_TKV = 1 / np.cosh(z_TKV / cap) ** 2
    top_TK1 = g_TKV.max(axis=2, keepdims=True)
    exp_TKV = np.exp(g_TKV - top_TK1)
    p_TKV = exp_TKV / exp_TKV.sum(axis=2, keepdims=True)
    lse_TK = (top_TK1 + np.log(exp_TKV.sum(axis=2, keepdims=True)))[:, :, 0]
    tokens = np.arange(len(problem.labels_T))
    score_TK = g_TKV[tokens, :, problem.labels_T]
    joint_TK = problem.log_prior_TK + score_TK - lse_TK
    top_T1 = joint_TK.max(axis=1, keepdims=True)
    nll_T = -(top_T1[:, 0] + np.log(np.exp(joint_TK - top_T1).sum(axis=1)))
    weight_TK = problem.weights_T[:, None] * np.exp(joint_TK + nll_T[:, None])
    p_TKV[tokens, :, problem.labels_T] -= 1
    z_bar_TKV = weight_TK[:, :, None] * p_TKV * g_slope_TKV
    table_bar_VE = np.zeros_like(problem.table_VE)
    table_bar_VE[:live] = np.einsum("tkv,tke->ve", z_bar_TKV, problem.context_TKE)
    bias_bar_V = np.zeros_like(problem.bias_V)
    bias_bar_V[:live] = z_bar_TKV.sum(axis=(0, 1))
    context_bar_TKE = z_bar_TKV @ problem.table_VE[:live]
    bars = (-weight_TK, context_bar_TKE, table_bar_VE, bias_bar_V)
    return (problem.weights_T * nll_T).sum(), bars


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
