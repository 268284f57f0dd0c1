"""Dynamic evaluation: a model that keeps learning from the text it is tested on.

After a segment is scored, the parameters take one step (Krause et al., 2018)

    p <- p + decay R (p_0 - p) - rate g / (MS + epsilon),
    R  = min(MS / mean(MS), 1 / decay),    MS = sqrt(mean of g^2 over training batches),

where p_0 are the trained parameters, g is the gradient of the segment's mean loss and
mean(MS) is the mean over parameter arrays of their means. All dropout is off, weight
drop too, both here and in the statistics.

The settings follow the convention of the published code of 2018. An older one, used by
the MoS code, does not divide the sum of squares by the number of batches and sums over
parameter arrays instead of averaging; `from_sums` converts its numbers.
"""

import functools
import math
from collections.abc import Sequence
from concurrent import futures
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from softbottle import sharding
from softbottle.data import batches
from softbottle.model import Model, Params
from softbottle.training.evaluate import Evaluation


class Settings(NamedTuple):
    """How fast it learns and forgets.

    Attributes:
        learning_rate: eta.
        decay: lambda, the pull back to the trained parameters.
        epsilon: added to MS.
        length: words of a segment.
        rows: rows of the batches that the statistics are taken from.
    """

    learning_rate: float = 5e-5
    decay: float = 0.002
    epsilon: float = 2e-5
    length: int = 5
    rows: int = 100


DEFAULT = Settings()
_STRETCH = 1000  # segments of one call, at most


def from_sums(
    learning_rate: float,
    decay: float,
    epsilon: float,
    train: np.ndarray,
    params: Params,
    length: int = DEFAULT.length,
) -> Settings:
    """Settings given in the older convention of sums.

    Args:
        learning_rate, decay, epsilon: in that convention.
        train: the text behind the statistics (PTB's makes 1,860 batches).
        params: the model's (17 arrays for MoS).
        length: words of a segment.
    """
    settings = DEFAULT._replace(length=length)
    root = math.sqrt(_batch_count(train, settings))
    arrays = len(jax.tree.leaves(params))
    return settings._replace(
        learning_rate=learning_rate / root,
        decay=decay / arrays,
        epsilon=epsilon / root,
    )


def root_mean_squares(
    model: Model, params: Params, train: np.ndarray, settings: Settings
) -> Params:
    """sqrt(mean of g^2) of every parameter over training batches."""

    @functools.partial(jax.jit, compiler_options=model.compiler_options)
    def add(params, sums, batch, carry):
        grads, (_, carry) = jax.grad(_mean_nll, argnums=1, has_aux=True)(
            model, params, batch, carry
        )
        return jax.tree.map(lambda total, g: total + jnp.square(g), sums, grads), carry

    zeros = jax.jit(functools.partial(jax.tree.map, jnp.zeros_like))(params)
    sums, carry = sharding.committed((zeros, model.initial_carry(settings.rows)))
    count = 0
    stream = batches.evaluation(train, settings.rows, settings.length)
    total = _batch_count(train, settings)
    for batch in tqdm.tqdm(stream, "gradient statistics", total, unit="batch"):
        sums, carry = add(params, sums, batch, carry)
        count += 1
    return _roots(sums, count)


def evaluate(
    model: Model,
    params: Params,
    train: np.ndarray,
    ids: np.ndarray,
    settings: Settings = DEFAULT,
) -> Evaluation:
    """Score a text while learning from it; each segment before its own update.

    Args:
        model, params: the trained model.
        train: training text, for the statistics.
        ids: the text to score.
        settings: see `Settings`.
    """
    run, stretches = _make_run(model, settings), _stretches(ids, settings.length)
    state = params, _ = sharding.committed((params, model.initial_carry(1)))
    total, count = 0.0, 0
    lowered = run.lower((params,) * 3, state, stretches[0])
    with futures.ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(lowered.compile)
        scale = root_mean_squares(model, params, train, settings)
        compiled.result()
    fixed = (params, _decay_rates(scale, settings.decay, model.vocab), scale)
    segments = math.ceil((len(ids) - 1) / settings.length)
    with tqdm.tqdm(total=segments, desc="dynamic evaluation", unit="segment") as bar:
        for stretch in stretches:
            state, totals = run(fixed, state, stretch)
            total += float(np.sum(np.asarray(totals, np.float64)))
            count += int(stretch.weights_BS.sum())
            bar.update(min(len(totals), segments - bar.n))
    return Evaluation(total, count)


def _make_run(model, settings):
    """A compiled scan over segments: (fixed, state, segments) -> (state, losses)."""

    def update(p, grad, first, rate, ms):
        pull = settings.decay * rate * (first - p)
        return p + pull - settings.learning_rate * grad / (ms + settings.epsilon)

    @functools.partial(jax.jit, compiler_options=model.compiler_options)
    def run(fixed, state, stretch):
        def segment(state, batch):
            params, carry = state
            grads, (total, carry) = jax.grad(_mean_nll, argnums=1, has_aux=True)(
                model, params, batch, carry
            )
            return (jax.tree.map(update, params, grads, *fixed), carry), total

        return jax.lax.scan(segment, state, stretch)

    return run


def _batch_count(train, settings):
    columns = math.ceil((len(train) - 1) / settings.rows)
    return math.ceil(columns / settings.length)


def _mean_nll(model, params, batch, carry):
    nll_BS, carry = model.nll(params, batch, carry)
    total = jnp.sum(nll_BS)
    return total / jnp.maximum(jnp.sum(batch.weights_BS), 1.0), (total, carry)


# Each as one program: op by op every shape would have one of its own.
@jax.jit
def _roots(sums, count):
    return jax.tree.map(lambda total: jnp.sqrt(total / count), sums)


@functools.partial(jax.jit, static_argnames=("decay", "vocab"))
def _decay_rates(scale, decay, vocab):
    # Table rows that are no words have no gradient, and are no parameters either.
    live = {
        name: ms[:vocab] if name in sharding.TABLES else ms
        for name, ms in scale.items()
    }
    means = [jnp.mean(ms) for ms in jax.tree.leaves(live)]
    mean = sum(means) / len(means)
    most = 1 / decay if decay else math.inf
    return jax.tree.map(lambda ms: jnp.minimum(ms / mean, most), scale)


def _stretches(ids: np.ndarray, length: int) -> Sequence[batches.Batch]:
    """Segments stacked along a first axis, as many in each stretch: one program.

    The last are filled up by segments without weight. They are behind the text, so that
    it does not matter what is learned from them.
    """
    segments = list(batches.evaluation(ids, 1, length))
    size = math.ceil(len(segments) / math.ceil(len(segments) / _STRETCH))
    empty = segments[-1]._replace(weights_BS=np.zeros_like(segments[-1].weights_BS))
    segments += [empty] * (-len(segments) % size)
    return [
        jax.tree.map(lambda *parts: np.stack(parts), *segments[first : first + size])
        for first in range(0, len(segments), size)
    ]
