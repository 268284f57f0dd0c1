"""How many dimensions a head needs: rank-constrained heads on frozen states.

For each rank r a head W = A B, A [V, r] and B [r, D], is trained from scratch on the
states of a model that does not change, and its loss on states it has not seen is set
beside the W-error of the model's own table cut to rank r,

    W-error(r) = ||sigma_{r+1:}||_2 / ||W||_F.

Where the loss stops falling is how many dimensions these states can make use of.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax

from softbottle import heads
from softbottle.analysis import report

NEAR = 0.02  # nats: losses this close to the best are called as good


class LowRank(NamedTuple):
    """Losses of rank-constrained heads.

    Attributes:
        ranks_R: the ranks, rising.
        loss_R: mean loss on unseen states after training, in nats.
        w_error_R: of the model's own table at these ranks; NaN without a table.
        knee: the smallest rank whose loss is within `NEAR` of the best.
    """

    ranks_R: np.ndarray
    loss_R: np.ndarray
    w_error_R: np.ndarray
    knee: int


def train(
    hidden_ND: np.ndarray,
    labels_N: np.ndarray,
    vocab: int,
    ranks: Sequence[int],
    table_VE: np.ndarray | None = None,
    steps: int = 1000,
    batch: int = 512,
    learning_rate: float = 2e-2,
    seed: int = 0,
) -> LowRank:
    """Train a head of each rank on nine tenths of the states and test it on the rest.

    Args:
        hidden_ND: frozen states.
        labels_N: the words that follow them.
        vocab: how many words there are.
        ranks: from 1 to D.
        table_VE: the model's own table, for its W-error.
        steps: Adam steps for each rank, with a cosine fall.
        batch: states of a step.
        learning_rate: its peak.
        seed: of the start and of the batches.

    Raises:
        ValueError: if the states are not finite or too few, a label is not a word, or
            a rank lies outside [1, D].
    """
    ranks = sorted(ranks)
    _check(hidden_ND, labels_N, vocab, ranks)
    # Unit scale, so that one learning rate fits the states of any model.
    scale = float(np.sqrt(np.mean(np.square(hidden_ND))))
    hidden_ND = jnp.asarray(hidden_ND / max(scale, 1e-30), jnp.float32)
    seen = len(hidden_ND) * 9 // 10
    first, rest = slice(0, seen), slice(seen, None)
    losses = []
    for rank in ranks:
        run = _fit(rank, vocab, steps, min(batch, seen), learning_rate, seed)
        params = run(hidden_ND[first], jnp.asarray(labels_N[first]))
        unseen = hidden_ND[rest], jnp.asarray(labels_N[rest])
        losses.append(float(_mean_loss(rank, params, *unseen)))
    loss_R = np.array(losses)
    knee = ranks[int(np.argmax(loss_R <= loss_R.min() + NEAR))]
    return LowRank(np.array(ranks), loss_R, _w_error(table_VE, ranks), knee)


def section(found: dict[str, LowRank]) -> report.Section:
    """Models side by side: loss against rank, and against W-error."""
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    by_rank, by_error = figure.subplots(1, 2)
    for name, one in found.items():
        by_rank.plot(one.ranks_R, one.loss_R, marker="o", label=name)
        by_error.plot(one.w_error_R, one.loss_R, marker="o", label=name)
    by_rank.set(xlabel="rank of the head", ylabel="loss (nats)", xscale="log")
    by_error.set(xlabel="W-error of the model's own table", ylabel="loss (nats)")
    by_rank.legend()
    lines = [
        f"{name}: a head of rank {one.knee:,} is as good as any here, "
        f"{one.loss_R.min():.3f} nats on states it has not seen."
        for name, one in found.items()
    ]
    reading = (
        "Heads of limited rank trained on the model's frozen states. A line that is "
        "still falling at its right end says that the width is the limit."
    )
    figures = [report.Figure("lowrank-loss", figure, reading)]
    numbers = {name: one._asdict() for name, one in found.items()}
    return report.Section("Heads of limited rank", " ".join(lines), figures, numbers)


def _fit(rank, vocab, steps, batch, learning_rate, seed):
    """A compiled training of one head: (states, labels) -> (params, table, bias)."""
    head = heads.lowrank(rank)
    tx = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    @jax.jit
    def run(hidden_ND, labels_N):
        init_key, table_key, step_key = jax.random.split(jax.random.key(seed), 3)
        table_VE = rank**-0.5 * jax.random.normal(table_key, (vocab, rank))
        params = head.init(init_key, hidden_ND.shape[1], rank)
        output = (params, table_VE, jnp.zeros(vocab))

        def step(state, key):
            output, opt_state = state
            chosen_B = jax.random.randint(key, (batch,), 0, len(hidden_ND))
            weights_B = jnp.full(batch, 1 / batch)

            def loss(output):
                return head.loss(
                    *output, hidden_ND[chosen_B], labels_N[chosen_B], weights_B
                )

            updates, opt_state = tx.update(jax.grad(loss)(output), opt_state)
            return (optax.apply_updates(output, updates), opt_state), None

        keys = jax.random.split(step_key, steps)
        (output, _), _ = jax.lax.scan(step, (output, tx.init(output)), keys)
        return output

    return run


def _mean_loss(rank, output, hidden_ND, labels_N):
    return jnp.mean(heads.lowrank(rank).nll(*output, hidden_ND, labels_N))


def _w_error(table_VE, ranks):
    if table_VE is None:
        return np.full(len(ranks), np.nan)
    sigma = np.linalg.svd(np.asarray(table_VE, np.float64), compute_uv=False)
    energy = np.square(sigma)
    return np.array([np.sqrt(energy[rank:].sum() / energy.sum()) for rank in ranks])


def _check(hidden_ND, labels_N, vocab, ranks):
    if hidden_ND.ndim != 2 or labels_N.shape != hidden_ND.shape[:1]:
        raise ValueError(
            f"states [N, D] and labels [N] are needed, got {hidden_ND.shape} and "
            f"{labels_N.shape}."
        )
    if len(hidden_ND) < 20 or not np.all(np.isfinite(hidden_ND)):
        raise ValueError(
            f"at least 20 states, all finite, are needed; got {len(hidden_ND)} with "
            f"{int(np.sum(~np.isfinite(hidden_ND)))} entries not finite."
        )
    if labels_N.min() < 0 or labels_N.max() >= vocab:
        raise ValueError(
            f"labels must lie in [0, {vocab}), got {labels_N.min()} to "
            f"{labels_N.max()}."
        )
    if not ranks or not 1 <= ranks[0] <= ranks[-1] <= hidden_ND.shape[1]:
        raise ValueError(
            f"ranks must lie in [1, {hidden_ND.shape[1]}], the states' width; got "
            f"{list(ranks)}."
        )
