"""Perplexity of a trained model on a text, without dropout, and its states there.

Axes: M entries of a cache, W of its window.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from softbottle import heads, sharding
from softbottle.data import batches
from softbottle.model import Model, Params
from softbottle.ops.cache import api as cache
from softbottle.training import metrics

# (ids, rows, length) -> batches
Cut = Callable[[np.ndarray, int, int], Iterator[batches.Batch]]
_POSITIONS = 1024  # whose states are handed on together


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Sum of the negative log-likelihoods, and how many tokens it is over.

    `hits` is to how many of them a cache, where there is one, gives most of its mass.
    """

    total: float
    count: int
    hits: int | None = None

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood, in nats."""
        return self.total / self.count

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return metrics.perplexity(self.loss)


def check_text(name: str, ids: np.ndarray, length: int, cut: Cut | None) -> None:
    """Raise ValueError unless a text can be evaluated; for before a training.

    Args:
        name: of its split, for the message.
        ids: the text.
        length: `data.eval_length`.
        cut: as `make_evaluator` takes it.
    """
    if len(ids) < 2:
        raise ValueError(
            f"the {name} text is one word long, and none follows it to be predicted."
        )
    if cut is None:
        return
    try:
        next(cut(ids, 1, length))
    except ValueError as error:
        raise ValueError(
            f"the {name} text cannot be read with data.eval_length={length}: {error}"
        ) from error


def make_evaluator(
    model: Model,
    *,
    cached: bool = False,
    cut: Cut | None = None,
    mesh: Mesh | None = None,
) -> Callable[[Params, np.ndarray, int, int], Evaluation]:
    """A compiled `evaluate(params, ids, rows, length) -> Evaluation`.

    Every token but the first is predicted once, and the mean divides by their number.

    Args:
        model: what is evaluated.
        cached: join the head with a cache of the positions of the same batch.
        cut: (ids, rows, length) -> batches, each of which begins anew (data/lines.py);
            None reads the text as contiguous rows.
        mesh: that of the model.
    """

    @jax.jit
    def score(params, batch, carry):
        if cached:
            nll_BS, hit_BS, carry = model.cached_nll(params, batch, carry)
            return (jnp.sum(nll_BS), jnp.sum(hit_BS)), carry
        nll_BS, carry = model.nll(params, batch, carry)
        return (jnp.sum(nll_BS), 0), carry

    def evaluate(params, ids, rows, length):
        rows = min(rows, len(ids) - 1)
        empty = sharding.padded(mesh, model.initial_carry(rows))
        carry, total, count, hits = empty, 0.0, 0, 0
        stretches = (cut or batches.evaluation)(ids, rows, length)
        # The host does not wait for every sum, and adds them up in more digits.
        while some := list(itertools.islice(stretches, 64)):
            sums = []
            for batch in some:
                placed = sharding.padded(mesh, batch)
                both, carry = score(params, placed, carry)
                sums.append(both)
                if cut is not None:
                    carry = empty
                count += int(batch.weights_BS.sum())
            for nll, right in jax.device_get(sums):
                total, hits = total + float(nll), hits + int(right)
        return Evaluation(total, count, hits if cached else None)

    return evaluate


class Pointer(NamedTuple):
    """The neural cache of Grave et al.: its window, sharpness and share.

    P(v) = (1 - share) P_model(v) + share sum_i softmax_i(theta h_t . h_i) [x_i+1 = v],
    i over the last `window` positions; P_model alone where there are none.
    """

    window: int = 500
    theta: float = 1.0
    share: float = 0.1


class Joint(NamedTuple):
    """The cache of heads/cache.py, under the head's normalizers, and its window."""

    window: int = 500


def evaluate_with_cache(
    model: Model, params: Params, ids: np.ndarray, length: int, kind: Pointer | Joint
) -> Evaluation:
    """Score a text, read as one row, with a cache of the states before each word."""

    @jax.jit
    def score(params, batch, carry, past):
        hidden_BSD, carry = model.hidden(params, batch, carry)
        real_BS, labels_BS = batch.weights_BS != 0, batch.labels_BS
        states_BSD = hidden_BSD.astype(jnp.float32)
        now = (states_BSD, labels_BS, real_BS)
        key_BMD, word_BM, seen_BM = (
            jnp.concatenate(pair, axis=1) for pair in zip(past, now, strict=True)
        )
        size = real_BS.shape[1]
        visible_BSM = cache.window(size, kind.window)[None] & seen_BM[:, None]
        memory = heads.Memory(key_BMD, word_BM, visible_BSM)
        nll_BS = _with_memory(model, params, hidden_BSD, labels_BS, memory, kind)
        width = states_BSD.shape[-1]
        scale = kind.theta if isinstance(kind, Pointer) else width**-0.5
        score_SM = cache.similarities(states_BSD, key_BMD, visible_BSM, scale)[0]
        hit_S = cache.best_word(score_SM, word_BM[0]) == labels_BS[0]
        past = (key_BMD[:, size:], word_BM[:, size:], seen_BM[:, size:])
        hits = jnp.sum(hit_S & real_BS[0])
        return jnp.sum(jnp.where(real_BS, nll_BS, 0.0)), hits, carry, past

    past = _empty_past(model, params, kind.window)
    carry, past = sharding.committed((model.initial_carry(1), past))
    total, count, hits = 0.0, 0, 0
    for batch in batches.evaluation(ids, 1, length):
        nll, right, carry, past = score(params, batch, carry, past)
        total, count = total + float(nll), count + int(batch.weights_BS.sum())
        hits += int(right)
    return Evaluation(total, count, hits)


def _with_memory(model, params, hidden_1SD, labels_1S, memory, kind):
    """-log P(label) under a head and a memory, joined or interpolated, [1, S]."""
    output = model.output(params)
    if isinstance(kind, Joint):
        tokens = (hidden_1SD, labels_1S, memory)
        return model.cached.nll(*output, *tokens, options=model.options)
    tokens = (hidden_1SD[0], labels_1S[0])
    nll_S = model.head.nll(*output, *tokens, options=model.options)
    target_1S, lse_1S = cache.masses(
        hidden_1SD.astype(jnp.float32),
        memory.states_BMD,
        memory.words_BM,
        labels_1S,
        memory.visible_BSM,
        kind.theta,
    )
    mixed_S = cache.interpolate(-nll_S, target_1S[0] - lse_1S[0], kind.share)
    return jnp.where(jnp.isneginf(lse_1S[0]), nll_S, -mixed_S)[None]


def _empty_past(model, params, window):
    ones = np.ones((1, 1), np.int32)
    batch = batches.Batch(ones, ones, ones.astype(np.float32), ones)
    hidden = jax.eval_shape(model.hidden, params, batch, model.initial_carry(1))[0]
    hidden_1WD = jnp.zeros((1, window, hidden.shape[-1]))
    return hidden_1WD, jnp.zeros((1, window), jnp.int32), jnp.zeros((1, window), bool)


def states(
    model: Model,
    params: Params,
    ids: np.ndarray,
    rows: int,
    length: int,
    cut: Cut | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The backbone's states along a text, a block of positions at a time.

    Args:
        model: whose backbone it is.
        params: its parameters.
        ids: the text.
        rows: that it is cut into and that are read side by side: one keeps the text's
            order; a recurrent backbone reads several in little more time than one.
        length: of the stretches it is read in, `data.eval_length` for the states that
            a run's perplexity is made of: a transformer sees no farther back.
        cut: as `make_evaluator` takes it.

    Yields:
        (hidden states [C, D] in float32, the words read [C], the words after them [C]),
        as many whole stretches as make about 1,024 positions.
    """
    length = min(length, len(ids) - 1)
    rows = max(1, min(rows, (len(ids) - 1) // length))
    empty = sharding.committed(model.initial_carry(rows))
    hidden = jax.jit(model.hidden)
    carry, together = empty, _POSITIONS // (rows * length)
    text = (cut or batches.evaluation)(ids, rows, length)
    while stretches := list(itertools.islice(text, max(1, together))):
        block = []
        for batch in stretches:
            hidden_BSD, carry = hidden(params, batch, carry)
            carry = carry if cut is None else empty
            real_BS = batch.weights_BS > 0
            hidden_CD = np.asarray(hidden_BSD.astype(jnp.float32))[real_BS]
            block.append((hidden_CD, batch.ids_BS[real_BS], batch.labels_BS[real_BS]))
        hidden_CD, read_C, follow_C = map(np.concatenate, zip(*block, strict=True))
        yield hidden_CD, read_C, follow_C


def log_probs(
    model: Model, params: Params, ids: np.ndarray, positions: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities along the start of a text, read as one row.

    Returns:
        (log P [T, V] in float32, the words read [T]), T at most `positions`.
    """
    ids = ids[: positions + 1]
    # Products in the parameters' own precision.
    exact = dataclasses.replace(model.options, compute_dtype=None)
    rows, words = [], []
    for hidden_TD, previous_T, _ in states(model, params, ids, 1, length):
        states_TD = jnp.asarray(hidden_TD)
        rows.append(
            model.head.log_probs(*model.output(params), states_TD, options=exact)
        )
        words.append(previous_T)
    log_p_TV = np.concatenate([np.asarray(part) for part in rows])
    return log_p_TV[:, : model.vocab], np.concatenate(words)
