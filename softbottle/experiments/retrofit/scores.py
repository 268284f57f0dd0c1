"""What a head on a pretrained model comes to on held-out text.

Axes: N deciles of the words.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import heads
from softbottle.analysis.capture import enough
from softbottle.analysis.instruments import rank
from softbottle.data.frequency import DECILES
from softbottle.experiments.retrofit import arms, data
from softbottle.experiments.retrofit.arms import Start
from softbottle.experiments.retrofit.data import Problem, Rows
from softbottle.experiments.retrofit.trial import Training
from softbottle.ops import Options

REGIONS = 32  # of the held-out text, whose losses are kept
_COLUMNS = 2048  # words of log P at a time, for its rank


class Sums(NamedTuple):
    """What held-out text comes to, added up, and by token; N deciles of the words."""

    nll_N: np.ndarray
    tokens_N: np.ndarray
    kl: float
    prior_K: np.ndarray
    prior_entropy: float
    posterior_K: np.ndarray
    posterior_entropy: float
    nll_T: np.ndarray
    kl_T: np.ndarray


class Heldout(NamedTuple):
    """States of held-out text: of regions that choose a rate, and of the others."""

    valid: Rows
    heldout: Rows


def evaluate(
    problem: Problem,
    made: Start,
    rows: Rows,
    batch: int,
    options: Options,
    own_rows: Rows | None = None,
) -> Sums:
    """A head on held-out text, beside the model's own.

    Args:
        problem: the model's own head.
        made: the head.
        rows: what it reads.
        batch: tokens at a time.
        options: of both heads.
        own_rows: what the model's own head reads, if the trunk is no longer its own.
    """
    arrays = made[1:], arms.own(problem)[1:]
    decile_V = jnp.asarray(problem.decile_V)
    shared = {"head": made.head, "options": options}

    def scores():
        for tokens, own_TD in _batches(rows, own_rows, batch):
            yield _score(arrays, decile_V, *tokens, own_TD, **shared), tokens[2] > 0

    total: Any = None
    by_token = []
    for (sums, *each), real_T in _one_late(scores()):
        sums = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sums)
        total = sums if total is None else jax.tree.map(np.add, total, sums)
        by_token.append([values_T[real_T] for values_T in each])
    nll_T, kl_T = map(np.concatenate, zip(*by_token, strict=True))
    return Sums(**total, nll_T=nll_T, kl_T=kl_T)


def _batches(rows, own_rows, batch):
    """What a head reads of a text, and the states that the model's own head reads."""
    walk = data.in_order(rows, batch)
    if own_rows is None or own_rows is rows:
        for tokens in walk:
            yield tokens, tokens[0]
    else:
        both = zip(walk, data.in_order(own_rows, batch), strict=True)
        for tokens, (own_TD, *_) in both:
            yield tokens, own_TD


def _one_late(results):
    """Read each result when the next is on its way: the device never waits."""
    before = None
    for result in results:
        if before is not None:
            yield jax.device_get(before)
        before = result
    if before is not None:
        yield jax.device_get(before)


def outcome(
    problem: Problem, made: Start, training: Training, read: Heldout | None = None
) -> dict[str, Any]:
    """The numbers of a row, on held-out text.

    Args:
        problem: the model's own head and states.
        made: the head.
        training: how it was trained.
        read: what the head reads, if the trunk is no longer the model's own.
    """
    read = read or Heldout(problem.valid, problem.heldout)
    how = training.batch, training.options
    valid = evaluate(problem, made, read.valid, *how, problem.valid)
    sums = evaluate(problem, made, read.heldout, *how, problem.heldout)
    count = sums.tokens_N.sum()
    costs = arms.costs(made)
    words_N = np.bincount(problem.decile_V, minlength=DECILES)
    found = {
        "valid": _lowered(valid, training),
        "loss": float(sums.nll_N.sum() / count),
        "kl": float(sums.kl / count),
        "deciles": [
            {
                "words": int(words_N[decile]),
                "tokens": int(sums.tokens_N[decile]),
                "loss": float(sums.nll_N[decile] / sums.tokens_N[decile])
                if sums.tokens_N[decile]
                else None,
            }
            for decile in range(DECILES)
        ],
        "regions": _regions(sums.nll_T),
        "kl_regions": _regions(sums.kl_T),
        "heldout_tokens": int(count),
        "width": made.table_VE.shape[1],
        "head": repr(made.head),
        **costs._asdict(),
    }
    if len(sums.prior_K) > 1:
        found["prior"] = _sorted(sums.prior_K / count)
        found["prior_entropy"] = float(sums.prior_entropy / count)
    if len(sums.posterior_K) > 1:
        found["responsibilities"] = _sorted(sums.posterior_K / count)
        found["responsibility_entropy"] = float(sums.posterior_entropy / count)
    return found | ranks(made, read.heldout)


def _lowered(sums, training):
    """What the training lowers, on some text."""
    count = sums.tokens_N.sum()
    words, kl = float(sums.nll_N.sum() / count), float(sums.kl / count)
    return {"words": words, "distill": kl, "both": words + kl}[training.objective]


def ranks(made: Start, rows: Rows) -> dict[str, Any]:
    """Numerical and effective rank of log P on some of a text.

    Twice as many positions as the rank that a softmax of the states' width can have,
    or all; products in full float32, or rounding would be counted.
    """
    width = rows.between(0, 1)[0].shape[1]
    count = min(enough(width, 0), len(rows))
    hidden_TD, _ = rows.between(0, count)
    with jax.default_matmul_precision("highest"):
        blocks = _log_probs(made[1:], hidden_TD, head=made.head)
    found = rank.streamed(blocks)
    return {
        "rank": found.ranks["float32"],
        "effective_rank": found.effective[1e-4],
        "rank_positions": count,
    }


@functools.partial(jax.jit, static_argnames=("head", "options"))
def _score(arrays, decile_V, hidden_TD, labels_T, weights_T, own_TD, *, head, options):
    """Sums over tokens; loss and divergence of each."""
    made, own = Start(head, *arrays[0]), Start(heads.softmax(), *arrays[1])
    found = head.measure(
        *(made.params, made.table_VE, made.bias_V, hidden_TD, labels_T),
        ("nll", "responsibilities"),
        options=options,
    )
    pair = made.output(hidden_TD), own.output(own_TD)
    kl_T = heads.distill(*pair, weights_T, reduction="none", options=options)
    nll_T = found["nll"] * weights_T
    prior_TK = jnp.exp(head.log_prior(made.params, hidden_TD))
    group_T = decile_V[labels_T]

    def by_decile(values_T):
        return jax.ops.segment_sum(values_T, group_T, DECILES)

    def by_component(values_TK):
        return jnp.sum(values_TK * weights_T[:, None], axis=0)

    def entropy(p_TK):
        return jnp.sum(by_component(jax.scipy.special.entr(p_TK)))

    sums = {
        "nll_N": by_decile(nll_T),
        "tokens_N": by_decile(weights_T),
        "kl": jnp.sum(kl_T),
        "prior_K": by_component(prior_TK),
        "prior_entropy": entropy(prior_TK),
        "posterior_K": by_component(found["responsibilities"]),
        "posterior_entropy": entropy(found["responsibilities"]),
    }
    return sums, nll_T, kl_T


@functools.partial(jax.jit, static_argnames="head")
def _log_probs(arrays, hidden_TD, *, head):
    """Blocks of rows of log P, or of its transpose where that has more rows.

    Singular values are the same, and a Gram matrix is then one of the shorter side.
    """
    log_p_TV = head.log_probs(*arrays, hidden_TD)
    positions, words = log_p_TV.shape
    if positions >= words:
        return [log_p_TV]
    return [log_p_TV[:, at : at + _COLUMNS].T for at in range(0, words, _COLUMNS)]


def _regions(values_T):
    """Means of stretches of the text."""
    parts = np.array_split(values_T, min(REGIONS, len(values_T)))
    return [float(part.mean()) for part in parts]


def _sorted(shares_K):
    return sorted(map(float, shares_K), reverse=True)
