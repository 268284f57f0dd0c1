"""A trained model against text, without dropout."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import metrics
from softbottle.data import batches
from softbottle.model import Model
from softbottle.ops import cache


class Evaluation(NamedTuple):
    """Sum of the negative log-likelihoods, and how many tokens it is over."""

    total: float
    count: int

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood, in nats."""
        return self.total / self.count

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return metrics.perplexity(self.loss)


def make_evaluator(model: Model) -> Callable[..., Evaluation]:
    """A compiled `evaluate(params, ids, rows, length) -> Evaluation`.

    Every token but the first is predicted once, and the mean divides by their number.
    """

    @jax.jit
    def add(params, batch, carry, total):
        nll_BS, carry = model.nll(params, batch, carry)
        return total + jnp.sum(nll_BS), carry

    def evaluate(params, ids, rows, length):
        rows = min(rows, len(ids) - 1)
        carry, count, sums = model.initial_carry(rows), 0, []
        total = jnp.zeros(())
        for index, batch in enumerate(batches.evaluation(ids, rows, length), 1):
            total, carry = add(params, batch, carry, total)
            count += int(batch.weights_BS.sum())
            # float32 loses digits over millions of tokens: bank it now and then.
            if index % 64 == 0:
                sums.append(total)
                total = jnp.zeros(())
        return Evaluation(sum(float(part) for part in [*sums, total]), count)

    return evaluate


class Pointer(NamedTuple):
    """The neural cache of Grave et al.: its window, sharpness and share.

    P(v) = (1 - share) P_model(v) + share sum_i softmax_i(theta h_t . h_i) [x_i+1 = v],
    i over the last `window` positions; P_model alone where there are none.
    """

    window: int = 500
    theta: float = 1.0
    share: float = 0.1


def evaluate_with_cache(
    model: Model, params: Any, ids: np.ndarray, length: int, pointer: Pointer
) -> Evaluation:
    """Score a text, read as one row, with a cache of the states before each word."""

    @jax.jit
    def score(params, batch, carry, past):
        hidden_BSD, carry = model.hidden(params, batch, carry)
        real_S, labels_S = batch.weights_BS[0] != 0, batch.labels_BS[0]
        output = model.output(params)
        nll_S = model.head.nll(*output, hidden_BSD[0], labels_S, **model.options)
        now = (hidden_BSD[0].astype(jnp.float32), labels_S, real_S)
        key_MD, word_M, seen_M = (
            jnp.concatenate([old, new]) for old, new in zip(past, now, strict=True)
        )
        visible_SM = cache.window(len(real_S), pointer.window) & seen_M[None]
        target_S, lse_S = cache.masses(
            now[0], key_MD, word_M, labels_S, visible_SM, pointer.theta
        )
        mixed_S = jnp.logaddexp(
            jnp.log1p(-pointer.share) - nll_S,
            jnp.log(pointer.share) + target_S - lse_S,
        )
        mixed_S = jnp.where(jnp.isneginf(lse_S), -nll_S, mixed_S)
        past = (key_MD[len(real_S) :], word_M[len(real_S) :], seen_M[len(real_S) :])
        return -jnp.sum(jnp.where(real_S, mixed_S, 0.0)), carry, past

    carry, total, count = model.initial_carry(1), 0.0, 0
    past = _empty_past(model, params, pointer.window)
    for batch in batches.evaluation(ids, 1, length):
        nll, carry, past = score(params, batch, carry, past)
        total, count = total + float(nll), count + int(batch.weights_BS.sum())
    return Evaluation(total, count)


def _empty_past(model, params, window):
    ones = np.ones((1, 1), np.int32)
    batch = batches.Batch(ones, ones, ones.astype(np.float32), ones)
    hidden = jax.eval_shape(model.hidden, params, batch, model.initial_carry(1))[0]
    hidden_WD = jnp.zeros((window, hidden.shape[-1]))
    return hidden_WD, jnp.zeros(window, jnp.int32), jnp.zeros(window, bool)


def states(
    model: Model, params: Any, ids: np.ndarray
) -> Iterator[tuple[jax.Array, np.ndarray, np.ndarray]]:
    """What the trunk makes of a text read as one row, a stretch at a time.

    Yields:
        (hidden states [C, D] in float32, the words read [C], the words after them [C]).
    """
    carry, hidden = model.initial_carry(1), jax.jit(model.hidden)
    for batch in batches.evaluation(ids, 1, min(1024, len(ids) - 1)):
        hidden_BSD, carry = hidden(params, batch, carry)
        real_S = batch.weights_BS[0] > 0
        hidden_CD = hidden_BSD[0][real_S].astype(jnp.float32)
        yield hidden_CD, batch.ids_BS[0][real_S], batch.labels_BS[0][real_S]


def log_probs(
    model: Model, params: Any, ids: np.ndarray, positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities along the start of a text.

    Returns:
        (log P [T, V] in float32, the words read [T]), T at most `positions`.
    """
    ids = ids[: positions + 1]
    rows, words = [], []
    for hidden_TD, previous_T, _ in states(model, params, ids):
        rows.append(
            model.head.log_probs(*model.output(params), hidden_TD, **_plain(model))
        )
        words.append(previous_T)
    log_p_TV = np.concatenate([np.asarray(part) for part in rows])
    return log_p_TV[:, : model.options["vocab"]], np.concatenate(words)


def _plain(model):
    """The head's options, with products in the parameters' own precision."""
    return model.options | {"compute_dtype": None}
