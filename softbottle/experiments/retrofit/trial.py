"""The training of one head on a frozen model."""

import functools
import itertools
import math
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from softbottle import heads
from softbottle.experiments.retrofit import arms, data
from softbottle.experiments.retrofit.arms import Start
from softbottle.experiments.retrofit.data import Problem
from softbottle.ops import Options
from softbottle.training.metrics import NonFiniteLossError

OBJECTIVES = ("words", "distill", "both")
FROZEN = ("table", "none")
_WARMUP = 0.05
_CHECK = 50  # steps between two looks at the loss and the clock


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
        all of them, and the mean training loss of the last. The model's own head is
        not trained to be like itself.

    Raises:
        NonFiniteLossError: if the loss is lost.
    """
    learned = trainable(begun, training)
    # Steps would lead the model's own head away from itself: Adam makes steps of full
    # size out of a gradient that is rounding.
    at_best = training.objective == "distill" and begun.head == heads.softmax()
    if at_best or not jax.tree.leaves(learned) or not training.steps:
        return begun, {"step_ms": None, "seconds": 0.0, "train_loss": None}
    shared = {"head": begun.head, "training": training._replace(rate=0.0)}
    # Copied: the steps reuse the memory of what they are given.
    state = jax.tree.map(jnp.copy, learned), optimizer(training).init(learned)
    arrays = begun[1:], arms.own(problem)[1:]
    marks: list[tuple[int, float]] = []
    losses: list[jax.Array] = []
    walk = data.batches(problem.train, training.batch, training.steps, seed)
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


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("head", "training"))
def _step(state, rate, arrays, hidden_TD, labels_T, *, head, training):
    learned, opt_state = state
    begun, own = Start(head, *arrays[0]), Start(heads.softmax(), *arrays[1])
    value, grads = jax.value_and_grad(loss)(
        learned, begun, own, hidden_TD, labels_T, training
    )
    return updated(learned, opt_state, grads, rate, training), value
