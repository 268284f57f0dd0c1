"""How many dimensions a head needs: rank-constrained heads on frozen states.

For each rank r a head W = A B, A [V, r] and B [r, D], is trained on the states of a
model that does not change, and its loss on states it has not seen is set beside the
W-error of the model's own table cut to rank r,

    W-error(r) = ||sigma_{r+1:}||_2 / ||W||_F.

Where the loss stops falling is how many dimensions these states can make use of.

From scratch and from labels (`train`) a head needs far more states than it has rows.
Where the model's own head is softmax(h W' + b) a few thousand are enough to learn from
that head instead (`cut`): training lowers KL(P_own || P_r), and starts from the A B of
rank r that is nearest to W in the logits of the states H,

    min ||H (W - A B)'||_F   at   B' = L^-T U_r,  A = W L U_r,   H'H = L L',

U_r being the first r left singular vectors of L' W' (Eckart and Young).

Axes: N states, S of them trained on, U unseen, R ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from softbottle import drawing, heads
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, bias_or_zeros, powers, present, real
from softbottle.analysis.settings import Settings

ABOUT = report.About(
    "Heads of every rank up to the model's width are trained on its frozen states, "
    "and judged on states they have not seen.",
    "Where the curve is flat before its right end, the table could be narrower; where "
    "it still falls there, every dimension is in use.",
    "Heads of limited rank",
)
NEAR = 0.02  # nats: losses this close to the best are called as good


class LowRank(NamedTuple):
    """Losses of rank-constrained heads.

    Attributes:
        ranks_R: the ranks, rising.
        loss_R: mean loss on unseen states after training, in nats.
        w_error_R: of the model's own table at these ranks; NaN without a table.
        knee: the smallest rank whose loss is within `NEAR` of the best.
        cut_R: mean loss on unseen states before training, where it began with a cut.
        own: mean loss of the model's own head on them, where it is known.
    """

    ranks_R: np.ndarray
    loss_R: np.ndarray
    w_error_R: np.ndarray
    knee: int
    cut_R: np.ndarray | None = None
    own: float | None = None


class Training(NamedTuple):
    """How the head of each rank is trained.

    Attributes:
        steps: of Adam, with a cosine decay of the learning rate.
        batch: states per step.
        learning_rate: its peak.
        seed: of the batches, and of the start where that is random.
    """

    steps: int
    batch: int
    learning_rate: float
    seed: int = 0


FROM_SCRATCH = Training(steps=1000, batch=512, learning_rate=2e-2)
FROM_OWN = Training(steps=300, batch=256, learning_rate=1e-3)


class Own(NamedTuple):
    """A model's own head, softmax(h W' + b)."""

    table_VD: np.ndarray
    bias_V: np.ndarray


def train(
    hidden_ND: np.ndarray,
    labels_N: np.ndarray,
    vocab: int,
    ranks: Sequence[int],
    table_VE: np.ndarray | None = None,
    training: Training = FROM_SCRATCH,
) -> LowRank:
    """Train a head of each rank on nine tenths of the states and test it on the rest.

    Args:
        hidden_ND: frozen states.
        labels_N: the words that follow them.
        vocab: how many words there are.
        ranks: from 1 to D.
        table_VE: the model's own table, for its W-error.
        training: of each head.

    Raises:
        ValueError: if the states are not finite or too few, a label is not a word, or
            a rank lies outside [1, D].
    """
    ranks = sorted(ranks)
    _check(hidden_ND, labels_N, vocab, ranks)
    split = _split(hidden_ND, labels_N)

    def start(rank):
        init_key, table_key = jax.random.split(jax.random.key(training.seed))
        table_VE = rank**-0.5 * jax.random.normal(table_key, (vocab, rank))
        params = heads.lowrank(rank).init(init_key, hidden_ND.shape[1], rank)
        return params, table_VE, jnp.zeros(vocab)

    def loss(output, hidden_BD, labels_B):
        head = heads.lowrank(output[1].shape[1])
        weights_B = jnp.full(len(labels_B), 1 / len(labels_B))
        return head.loss(*output, hidden_BD, labels_B, weights_B)

    fit = _fit(loss, training)
    losses = [_mean_losses(fit, start(rank), split)[1] for rank in ranks]
    w_error_R = _w_error(table_VE, ranks)
    return LowRank(np.array(ranks), np.array(losses), w_error_R, _knee(ranks, losses))


def cut(
    hidden_ND: np.ndarray,
    labels_N: np.ndarray,
    ranks: Sequence[int],
    own: Own,
    training: Training = FROM_OWN,
) -> LowRank:
    """As `train`, but each head starts from the model's own, and learns from it.

    Args:
        hidden_ND: frozen states, which the model's own head reads.
        labels_N: the words that follow them, by which heads are judged.
        ranks: from 1 to D.
        own: the model's own head; its rows are the words there are.
        training: of each head.

    Raises:
        ValueError: as `train`, and if the table has another width than the states.
    """
    ranks, vocab = sorted(ranks), len(own.table_VD)
    _check(hidden_ND, labels_N, vocab, ranks)
    if own.table_VD.shape[1:] != hidden_ND.shape[1:]:
        raise ValueError(
            f"states {hidden_ND.shape} and table {own.table_VD.shape} differ in width."
        )
    split = _split(hidden_ND, labels_N)
    root_DD, basis_DD = leading(split.hidden_SD, own.table_VD)
    whole = nearest(root_DD, basis_DD, own, split.scale)

    def loss(output, hidden_BD, labels_B):
        del labels_B
        student, teacher = (
            heads.Output(heads.lowrank(one[1].shape[1]), *one, hidden_BD)
            for one in (output, whole)
        )
        return heads.distill(student, teacher, reduction="mean")

    fit = _fit(loss, training)
    starts = (nearest(root_DD, basis_DD[:, :rank], own, split.scale) for rank in ranks)
    losses_R2 = np.array([_mean_losses(fit, start, split) for start in starts])
    before_R, after_R = losses_R2.T
    columns = np.array(ranks), after_R, _w_error(own.table_VD, ranks)
    own_loss = _mean_loss(whole, split.unseen_UD, split.follow_U)
    return LowRank(*columns, _knee(ranks, after_R), before_R, float(own_loss))


def leading(
    hidden_SD: np.ndarray | jax.Array, table_VD: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """L of H'H / S = L L', and the left singular vectors of L'W', the largest first."""
    hidden_SD, table_VD = (
        np.asarray(array, np.float64) for array in (hidden_SD, table_VD)
    )
    moment_DD = hidden_SD.T @ hidden_SD / len(hidden_SD)
    # A trace of the identity, since states may leave directions empty.
    moment_DD += 1e-6 * np.trace(moment_DD) / len(moment_DD) * np.eye(len(moment_DD))
    root_DD = np.linalg.cholesky(moment_DD)
    half_DD = root_DD.T @ (table_VD.T @ table_VD) @ root_DD
    return root_DD, np.linalg.eigh(half_DD)[1][:, ::-1]


def nearest(
    root_DD: np.ndarray, basis_DR: np.ndarray, own: Own, scale: float
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """The nearest head through these directions, for states over `scale`.

    Args:
        root_DD: of `leading`, on such states.
        basis_DR: of `leading`, the first R directions.
        own: the model's own head, for states as they are.
        scale: what the states were divided by.

    Returns:
        Parameters of `heads.lowrank(R)`, table and bias.
    """
    project_DR = np.linalg.solve(root_DD.T, basis_DR)
    table_VR = own.table_VD @ (root_DD @ basis_DR) * scale
    # A and B alike in size, so that one learning rate fits both.
    sizes = [np.sqrt(np.mean(factor**2, axis=0)) for factor in (table_VR, project_DR)]
    even_R = np.sqrt(np.maximum(sizes[0], 1e-30) / sizes[1])
    balanced = (project_DR * even_R[None], table_VR / even_R[None], own.bias_V)
    project_DE, table_VE, bias_V = (
        jnp.asarray(array, jnp.float32) for array in balanced
    )
    return {"project_DE": project_DE}, table_VE, bias_V


class _Split(NamedTuple):
    """States of unit scale, so that one learning rate fits those of any model."""

    scale: float
    hidden_SD: jax.Array
    labels_S: jax.Array
    unseen_UD: jax.Array
    follow_U: jax.Array


def _split(hidden_ND, labels_N):
    scale = max(float(np.sqrt(np.mean(np.square(hidden_ND)))), 1e-30)
    hidden_ND = jnp.asarray(hidden_ND / scale, jnp.float32)
    seen, labels_N = len(hidden_ND) * 9 // 10, jnp.asarray(labels_N)
    return _Split(
        scale, hidden_ND[:seen], labels_N[:seen], hidden_ND[seen:], labels_N[seen:]
    )


def _mean_losses(fit, start, split):
    """On unseen states, before and after training from `start`."""
    unseen = split.unseen_UD, split.follow_U
    trained = fit(start, split.hidden_SD, split.labels_S)
    return tuple(float(_mean_loss(output, *unseen)) for output in (start, trained))


def _knee(ranks, losses):
    loss_R = np.array(losses)
    return ranks[int(np.argmax(loss_R <= loss_R.min() + NEAR))]


def section(models: dict[str, LowRank]) -> report.Section:
    """Models side by side: loss against rank, and against W-error."""
    figure, beside = (drawing.Figure(figsize=(5, 3.6)) for _ in range(2))
    by_rank, by_error = figure.subplots(), beside.subplots()
    lines = []
    for name, curve in models.items():
        label = name if len(models) > 1 else "trained"
        (line,) = by_rank.plot(curve.ranks_R, curve.loss_R, marker="o", label=label)
        by_error.plot(curve.w_error_R, curve.loss_R, marker="o")
        sentence = (
            f"{name}: a head of rank {curve.knee:,} is as good as any here, "
            f"{curve.loss_R.min():.3f} nats on states it has not seen"
        )
        if curve.cut_R is not None:
            color = line.get_color()
            by_rank.plot(
                curve.ranks_R, curve.cut_R, ":", color=color, label="untrained"
            )
            by_rank.axhline(curve.own, color=color, lw=1, label="the model's own head")
            sentence += f" (the model's own head, over the same words: {curve.own:.3f})"
        lines.append(sentence + ".")
    by_rank.set(xlabel="rank of the head", ylabel="loss (nats)", xscale="log")
    by_error.set(xlabel="W-error of the model's own table", ylabel="loss (nats)")
    drawing.label(by_rank)
    reading = (
        "Heads of limited rank trained on the model's frozen states. A line that is "
        "still falling at its right end says that every dimension is in use; whether "
        "more of them would help, only a wider model can tell."
    )
    figures = [report.Figure("lowrank-loss", figure, reading)]
    if any(np.isfinite(curve.w_error_R).any() for curve in models.values()):
        caption = (
            "The same losses against what the model's own table loses if it is cut to "
            "that rank."
        )
        figures.append(report.Figure("lowrank-w-error", beside, caption))
    numbers = {name: curve._asdict() for name, curve in models.items()}
    table = report.Table(
        ("model", "rank as good as any", "loss at best", "the model's own head"),
        [
            (
                *(name, f"{curve.knee:,}", f"{curve.loss_R.min():.3f}"),
                "–" if curve.own is None else f"{curve.own:.3f}",
            )
            for name, curve in models.items()
        ],
    )
    return report.Section(
        "Heads of limited rank",
        " ".join(lines),
        figures,
        numbers,
        tables=[table],
        remarks="Losses in nats per token on states that were not trained on.",
    )


def of_capture(capture: Capture, settings: Settings) -> LowRank:
    """Heads of every power of two up to the width of the states.

    They start from the model's own softmax over the words that occur; where its head is
    another, from scratch.
    """
    del settings
    hidden_ND, labels = present("frozen", capture.frozen)
    labels_N = present("labels_T", labels)
    table_VE = present("table_VE", capture.table_VE)
    ranks = powers(hidden_ND.shape[1])
    if capture.readout is not None:
        return train(hidden_ND, labels_N, len(table_VE), ranks, table_VE)
    words_V, labels_N = np.unique(labels_N, return_inverse=True)
    own = Own(table_VE[words_V], bias_or_zeros(capture)[words_V])
    return cut(hidden_ND, labels_N, ranks, own)


def _fit(loss, training):
    """A compiled training: (output, states, labels) -> output.

    `loss` maps (output, some of the states, their labels) to what is lowered.
    """
    steps, batch, learning_rate, seed = training
    tx = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    @jax.jit
    def run(output, hidden_ND, labels_N):
        size = min(batch, len(hidden_ND))

        def step(state, key):
            output, opt_state = state
            chosen_B = jax.random.randint(key, (size,), 0, len(hidden_ND))
            grads = jax.grad(loss)(output, hidden_ND[chosen_B], labels_N[chosen_B])
            updates, opt_state = tx.update(grads, opt_state)
            return (optax.apply_updates(output, updates), opt_state), None

        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), steps)
        (output, _), _ = jax.lax.scan(step, (output, tx.init(output)), keys)
        return output

    return run


@jax.jit
def _mean_loss(output, hidden_ND, labels_N):
    head = heads.lowrank(output[1].shape[1])
    return jnp.mean(head.nll(*output, hidden_ND, labels_N))


def _w_error(table_VE, ranks):
    if table_VE is None:
        return np.full(len(ranks), np.nan)
    sigma = np.linalg.svd(real("table", table_VE), compute_uv=False)
    energy = np.square(sigma)
    return np.array([np.sqrt(energy[rank:].sum() / energy.sum()) for rank in ranks])


def _check(hidden_ND, labels_N, vocab, ranks):
    real("states", hidden_ND, None)
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
