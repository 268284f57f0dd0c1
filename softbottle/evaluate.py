"""A trained model against text, without dropout."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import metrics
from softbottle.data import batches
from softbottle.model import Model


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


def log_probs(
    model: Model, params: Any, ids: np.ndarray, positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities along the start of a text.

    Returns:
        (log P [T, V] in float32, the words read [T]), T at most `positions`.
    """
    ids = ids[: positions + 1]
    rows, words = [], []
    for hidden_TD, previous_T in _states(model, params, ids):
        rows.append(
            model.head.log_probs(*model.output(params), hidden_TD, **_plain(model))
        )
        words.append(previous_T)
    log_p_TV = np.concatenate([np.asarray(part) for part in rows])
    return log_p_TV[:, : model.options["vocab"]], np.concatenate(words)


def _states(model, params, ids) -> Iterator[tuple[jax.Array, np.ndarray]]:
    carry = model.initial_carry(1)
    hidden = jax.jit(model.hidden)
    for batch in batches.evaluation(ids, 1, min(1024, len(ids) - 1)):
        hidden_BSD, carry = hidden(params, batch, carry)
        real_S = batch.weights_BS[0] > 0
        yield hidden_BSD[0][real_S], batch.ids_BS[0][real_S]


def _plain(model):
    """The head's options, with products in the parameters' own precision."""
    return model.options | {"compute_dtype": None}
