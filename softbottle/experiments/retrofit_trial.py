"""One head on a frozen model: its training, and what it comes to on held-out text."""

import functools
import itertools
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from softbottle import heads
from softbottle.analysis.capture import enough
from softbottle.analysis.instruments import rank
from softbottle.experiments import retrofit_arms, retrofit_data
from softbottle.experiments.frontier_trial import DECILES
from softbottle.experiments.retrofit_arms import Start
from softbottle.experiments.retrofit_data import Problem, Rows
from softbottle.ops import Options
from softbottle.training.metrics import NonFiniteLossError

OBJECTIVES = ("words", "distill", "both")
FROZEN = ("table", "none")
REGIONS = 32  # of the held-out text, whose losses are kept
_WARMUP = 0.05
_CHECK = 50  # steps between two looks at the loss and the clock
_COLUMNS = 2048  # words of log P at a time, for its rank


class Training(NamedTuple):
    """How a head is trained.

    Attributes:
        steps: of Adam, with a linear warm-up of 5% and a cosine decay to zero.
        batch: tokens per step.
        rate: the learning rate's peak.
        objective: "words", the next word's -log P; "distill", KL(own || head); "both",
            their sum.
        freeze: "table": table and bias stay; "none".
        compute_dtype: of the products with the table.
    """

    steps: int
    batch: int
    rate: float
    objective: str = "words"
    freeze: str = "table"
    compute_dtype: str = "float32"

    @property
    def options(self) -> Options:
        """Of the head's operations."""
        wide = self.compute_dtype == "float32"
        return Options(compute_dtype=None if wide else self.compute_dtype)


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


def trainable(begun: Start, training: Training) -> Any:
    """What the optimizer changes: the head's parameters, and maybe table and bias."""
    if training.freeze == "table":
        return {"params": begun.params}
    return {
        "params": begun.params,
        "table_VE": begun.table_VE,
        "bias_V": begun.bias_V,
    }


def assemble(begun: Start, learned: Any) -> Start:
    """A head with what was learned in place of what it began with."""
    return begun._replace(**learned)


def loss(
    learned: Any,
    begun: Start,
    own: Start,
    hidden_TD: jax.Array,
    labels_T: jax.Array,
    training: Training,
) -> jax.Array:
    """What is lowered, a mean over tokens in nats."""
    made, options = assemble(begun, learned), training.options
    total = jnp.zeros(())
    if training.objective in ("words", "both"):
        arrays = (made.params, made.table_VE, made.bias_V, hidden_TD, labels_T)
        total += made.head.loss(*arrays, reduction="mean", options=options)
    if training.objective in ("distill", "both"):
        pair = made.output(hidden_TD), own.output(hidden_TD)
        total += heads.distill(*pair, reduction="mean", options=options)
    return total


def schedule(training: Training) -> optax.Schedule:
    """Linear warm-up over 5% of the steps, cosine decay to zero; its peak is 1."""
    warmup = int(_WARMUP * training.steps)
    return optax.warmup_cosine_decay_schedule(
        0.0 if warmup else 1.0, 1.0, warmup, max(2, training.steps)
    )


def optimizer(training: Training) -> optax.GradientTransformation:
    """Adam at the rates of `schedule`, gradients clipped to a norm of 1."""
    adam = optax.adam(schedule(training))
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def updated(
    params: Any,
    opt_state: optax.OptState,
    grads: Any,
    rate: jax.typing.ArrayLike,
    training: Training,
) -> tuple[Any, optax.OptState]:
    """Parameters after a step; the rate is an argument: one program serves all."""
    updates, opt_state = optimizer(training).update(grads, opt_state, params)
    updates = jax.tree.map(lambda update: rate * update, updates)
    return optax.apply_updates(params, updates), opt_state


def fit(
    problem: Problem,
    begun: Start,
    training: Training,
    seed: int,
    deadline: float = math.inf,
) -> tuple[Start, dict[str, Any]] | None:
    """Train a head on a frozen model's states.

    Args:
        problem: states and the model's own head.
        begun: the head before its training.
        training: how.
        seed: of the order of the batches.
        deadline: of time.monotonic; None is returned when it has passed.

    Returns:
        The trained head; the median milliseconds per step, the seconds that makes for
        all of them, and the mean training loss of the last.

    Raises:
        NonFiniteLossError: if the loss is lost.
    """
    learned = trainable(begun, training)
    if not jax.tree.leaves(learned) or not training.steps:
        return begun, {"step_ms": None, "seconds": 0.0, "train_loss": None}
    shared = {"head": begun.head, "training": training._replace(rate=0.0)}
    # Copied: the steps reuse the memory of what they are given.
    state = jax.tree.map(jnp.copy, learned), optimizer(training).init(learned)
    arrays = begun[1:], retrofit_arms.own(problem)[1:]
    marks: list[tuple[int, float]] = []
    losses: list[jax.Array] = []
    walk = retrofit_data.batches(problem.train, training.batch, training.steps, seed)
    for number, (hidden_TD, labels_T) in enumerate(walk, 1):
        batch = hidden_TD, labels_T
        state, value = _step(state, training.rate, arrays, *batch, **shared)
        losses.append(value)
        if number % _CHECK and number not in (1, training.steps):
            continue
        if not math.isfinite(float(value)):
            raise NonFiniteLossError(f"the loss of step {number} is {float(value)}.")
        marks.append((number, time.monotonic()))
        if marks[-1][1] > deadline and number < training.steps:
            return None
    step_ms = step_time(marks)
    return assemble(begun, state[0]), {
        "step_ms": step_ms,
        "seconds": None if step_ms is None else training.steps * step_ms / 1e3,
        "train_loss": float(jnp.mean(jnp.stack(losses[-_CHECK:]))),
    }


def step_time(marks: list[tuple[int, float]]) -> float | None:
    """Median milliseconds per step between marks; the first is behind compilation."""
    spans = [
        (later[1] - sooner[1]) / (later[0] - sooner[0])
        for sooner, later in itertools.pairwise(marks)
    ]
    return 1e3 * statistics.median(spans) if spans else None


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
    arrays, decile_V = (made[1:], retrofit_arms.own(problem)[1:]), problem.decile_V
    shared = {"head": made.head, "options": options}
    total: Any = None
    by_token = []
    walks = (retrofit_data.in_order(each, batch) for each in (rows, own_rows or rows))
    for tokens, (own_TD, *_) in zip(*walks, strict=True):
        sums, nll_T, kl_T = _score(arrays, decile_V, *tokens, own_TD, **shared)
        sums = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sums)
        total = sums if total is None else jax.tree.map(np.add, total, sums)
        real_T = tokens[2] > 0
        by_token.append([np.asarray(each)[real_T] for each in (nll_T, kl_T)])
    nll_T, kl_T = map(np.concatenate, zip(*by_token, strict=True))
    return Sums(**total, nll_T=nll_T, kl_T=kl_T)


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
    costs = retrofit_arms.costs(made)
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
        log_p_TV = _log_probs(made[1:], hidden_TD, head=made.head)
    words = log_p_TV.shape[1]
    # Its transpose has the same singular values and a Gram matrix of the shorter side.
    blocks = [
        np.asarray(log_p_TV[:, at : at + _COLUMNS]).T
        for at in range(0, words, _COLUMNS)
    ]
    found = rank.streamed(blocks if count < words else [np.asarray(log_p_TV)])
    return {
        "rank": found.ranks["float32"],
        "effective_rank": found.effective[1e-4],
        "rank_positions": count,
    }


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("head", "training"))
def _step(state, rate, arrays, hidden_TD, labels_T, *, head, training):
    learned, opt_state = state
    begun, own = Start(head, *arrays[0]), Start(heads.softmax(), *arrays[1])
    value, grads = jax.value_and_grad(loss)(
        learned, begun, own, hidden_TD, labels_T, training
    )
    return updated(learned, opt_state, grads, rate, training), value


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
    return head.log_probs(*arrays, hidden_TD)


def _regions(values_T):
    """Means of stretches of the text."""
    parts = np.array_split(values_T, min(REGIONS, len(values_T)))
    return [float(part.mean()) for part in parts]


def _sorted(shares_K):
    return sorted(map(float, shares_K), reverse=True)
