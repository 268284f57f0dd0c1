"""Training: one pure step, and the loop that feeds it.

The key of a step is a function of (seed, step), the batch a function of the stream's
position, and everything else is in the checkpoint, so a resumed run is the same run.
The loop reads a step's metrics after the next step is under way, so that the device
never waits for the host.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from softbottle import checkpoint, evaluate, metrics, optim
from softbottle import config as config_lib
from softbottle import model as model_lib
from softbottle import state as state_lib
from softbottle.analysis import ambiguity, curves, truth
from softbottle.data import corpus as corpus_lib
from softbottle.data import lines
from softbottle.data.batches import Stream
from softbottle.data.vocab import Corpus
from softbottle.state import TrainState


@dataclasses.dataclass
class History:
    """What the loop itself remembers; saved with every checkpoint."""

    losses: list[float] = dataclasses.field(default_factory=list)  # validation
    best: float = math.inf
    evaluated: int = -1  # the step of the last validation
    seconds: float = 0.0
    window: tuple[float, float, int] = (0.0, 0.0, 0)  # metrics not yet reported
    stopped: bool = False


class Trainer(NamedTuple):
    """The parts of a run that do not change."""

    config: config_lib.Config
    workdir: pathlib.Path
    corpus: Corpus
    model: model_lib.Model
    step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[..., evaluate.Evaluation]
    stream: Stream | lines.Lines
    latest: checkpoint.Checkpoints
    best: checkpoint.Checkpoints
    series: checkpoint.Checkpoints | None


def run(config: config_lib.Config, workdir: pathlib.Path | str) -> dict[str, Any]:
    """Train a model, or go on training it, and sum it up.

    Args:
        config: a run's settings; validated and frozen here.
        workdir: where checkpoints, metrics and the summary go. A run that is already
            there is resumed.

    Returns:
        What `workdir/summary.json` holds; empty if the run was asked to stop early.

    Raises:
        ValueError: if the settings contradict themselves or the run in `workdir`.
        metrics.NonFiniteLossError: naming the step and the batch.
        checkpoint.CheckpointError: if a checkpoint cannot be written or read.
    """
    summary = _run(config_lib.validate(config), pathlib.Path(workdir))
    if summary:
        rows = {config.head.name: summary}
        if summary.get("equal_softmax"):
            rows["softmax, as many parameters"] = summary["equal_softmax"]
        print(truth.table(rows))
        if config.data.name == "templates":
            print(ambiguity.table(summary))
    return summary


def make_step(
    config: config_lib.Config,
    model: model_lib.Model,
    tx: optax.GradientTransformationExtraArgs,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """A compiled `step(state, batch, fresh) -> (state, metrics)`; `state` is donated.

    `fresh` says that the batch begins an epoch, so that no carry fits it. The learning
    rate is scaled by the batch's true length where lengths vary.
    """
    key = jax.random.key(config.seed)
    schedule = optim.learning_rate(config.optim)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, fresh):
        rows = batch.ids_BS.shape[0]
        carry = jax.tree.map(
            lambda first, last: jnp.where(fresh, first, last),
            model.initial_carry(rows),
            state.carry,
        )
        grads, loss, carry = _gradient(
            model,
            state.params,
            batch,
            carry,
            jax.random.fold_in(key, state.step),
            config.optim.accumulate,
        )
        scale = 1.0
        if config.data.variable:
            true_length = jnp.max(jnp.sum(batch.weights_BS, axis=1))
            scale = true_length / config.data.length
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, scale=scale
        )
        measured = {
            "total": loss.total,
            "count": loss.count,
            "penalty": loss.penalty,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(state.step) * scale,
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, carry), measured

    return step


def init_state(
    config: config_lib.Config,
    model: model_lib.Model,
    tx: optax.GradientTransformationExtraArgs,
) -> TrainState:
    """The state before the first step."""

    # In one jit, so that no two of its arrays share a buffer: the step donates them.
    @jax.jit
    def build():
        params = model.init(jax.random.fold_in(jax.random.key(config.seed), 2**31))
        carry = model.initial_carry(config.data.rows)
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), carry)

    return build()


def _run(config, workdir):
    trainer = _prepare(config, workdir)
    try:
        state, history = _start(trainer)
        state, history, finished = _loop(trainer, state, history)
    finally:
        for kept in (trainer.latest, trainer.best, trainer.series):
            if kept is not None:
                kept.close()
    return _finish(trainer, int(state.step), history) if finished else {}


def _gradient(model, params, batch, carry, key, accumulate):
    """Gradient of the mean loss, the batch's rows taken in `accumulate` parts."""
    # A part's share of the whole, not its own count: it may be all padding.
    share = jnp.sum(batch.weights_BS) / accumulate

    def objective(params, batch, carry, key):
        loss, carry = model.loss(params, batch, carry, key)
        return loss.total / share + loss.penalty, (loss, carry)

    differentiate = jax.grad(objective, has_aux=True)
    if accumulate == 1:
        grads, (loss, carry) = differentiate(params, batch, carry, key)
        return grads, loss, carry

    def split(array):
        return array.reshape(accumulate, len(array) // accumulate, *array.shape[1:])

    def add(sums, part):
        batch, carry, key = part
        grads, (loss, carry) = differentiate(params, batch, carry, key)
        return jax.tree.map(jnp.add, sums, (grads, loss)), carry

    zeros = jax.tree.map(jnp.zeros_like, params)
    sums = (zeros, model_lib.Loss(*jnp.zeros(3)))
    parts = (*jax.tree.map(split, (batch, carry)), jax.random.split(key, accumulate))
    (grads, loss), carry = jax.lax.scan(add, sums, parts)
    carry = jax.tree.map(
        lambda array: array.reshape(array.shape[0] * array.shape[1], *array.shape[2:]),
        carry,
    )
    grads = jax.tree.map(lambda leaf: leaf / accumulate, grads)
    return grads, loss._replace(penalty=loss.penalty / accumulate), carry


def _prepare(config, workdir):
    corpus = corpus_lib.load(config.data)
    state_lib.write_run(workdir, config, corpus.vocab)
    model = model_lib.make(config, len(corpus.vocab))
    data, train = config.data, config.train
    cached = config.cache.objective != "plain"
    cut = lines.cut(data, corpus.vocab)
    return Trainer(
        config,
        workdir,
        corpus,
        model,
        make_step(config, model, optim.make(config.optim)),
        evaluate.make_evaluator(model, cached=cached, cut=cut),
        lines.stream(data, corpus.vocab, corpus.train, config.seed),
        checkpoint.Checkpoints(workdir / "checkpoints", train.keep),
        checkpoint.Checkpoints(workdir / "best", 1),
        checkpoint.Checkpoints(workdir / "series", None) if train.series else None,
    )


def _start(trainer):
    """The newest checkpoint's state and history, or those of a new run."""
    config = trainer.config
    state = init_state(config, trainer.model, optim.make(config.optim))
    history = History()
    if trainer.latest.latest() is not None:
        state, host = trainer.latest.restore(state)
        trainer.stream.seek(host["position"])
        history = History(**host["history"])
    elif config.train.init_from:
        start = state_lib.load_run(config.train.init_from)
        state_lib.check_same_model(start, config, trainer.corpus.vocab)
        opt_state = jax.jit(optim.make(config.optim).init)(start.params)
        state = state.replace(params=start.params, opt_state=opt_state)
    # What was kept after the step that we go on from will be met again.
    for kept in (trainer.best, trainer.series):
        if kept is not None:
            kept.forget_after(int(state.step))
    if trainer.best.latest() is None:
        history.best, history.evaluated = math.inf, -1
    # On one device from the start, or the second step would be compiled again.
    return jax.device_put(state, jax.devices()[0]), history


def _loop(trainer, state, history):
    """Step until the run's bound, a stop rule or a signal to stop."""
    train, stream = trainer.config.train, trainer.stream
    step = int(state.step)
    report = _report(trainer, step, history)
    with _termination() as asked_to_stop, contextlib.closing(report):
        while _goes_on(train, step, stream.epoch, history):
            epoch, position = stream.epoch, stream.position
            batch = stream.next()
            state, measured = trainer.step(state, batch, stream.starts_epoch)
            step += 1
            report.add(step, position, measured)
            ended = stream.epoch > epoch and not train.eval_every
            if ended or (train.eval_every and step % train.eval_every == 0):
                report.settle()
                loss = _validate(trainer, state, history, report)
                state = _after_epoch(trainer, state, history, report, loss)
            if train.series and _is_logarithmic(step):
                report.settle()
                trainer.series.save(step, state.params, {"step": step})
            stopping = asked_to_stop.is_set()
            if step % train.checkpoint_every == 0 or stopping:
                report.settle()
                _save(trainer, state, history, report)
            if stopping:
                report.say(f"asked to stop: saved at step {step:,}")
                trainer.latest.wait()
                return state, history, False
        report.finish()
        if history.evaluated != step:
            _validate(trainer, state, history, report)
        trainer.latest.wait()
        if trainer.latest.latest() != step:
            _save(trainer, state, history, report)
    return state, history, True


def _report(trainer, step, history):
    config = trainer.config
    start = {
        "config": config_lib.to_dict(config),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "device": jax.devices()[0].device_kind,
    }
    total = config.train.steps or config.train.epochs * trainer.stream.steps_per_epoch
    return metrics.Report(
        metrics.Writer(trainer.workdir, step, start),
        metrics.Progress(total, step, config.head.name),
        config.train.log_every,
        history.seconds,
        history.window,
    )


def _goes_on(train, step, epoch, history):
    if history.stopped or (train.steps and step >= train.steps):
        return False
    return not train.epochs or epoch < train.epochs


def _validate(trainer, state, history, report):
    """The validation loss; parameters that are the best so far are kept."""
    data = trainer.config.data
    params = optim.evaluation_params(state.opt_state, state.params)
    loss = trainer.evaluate(
        params, trainer.corpus.valid, data.eval_rows, data.eval_length
    ).loss
    step = history.evaluated = int(state.step)
    if not math.isfinite(loss):
        raise metrics.NonFiniteLossError(f"step {step}: validation loss {loss}.")
    averaging = optim.is_averaging(state.opt_state)
    report.evaluated(step, trainer.stream.epoch, loss, averaging)
    if loss < history.best:
        history.best = loss
        trainer.best.save(step, params, {"step": step, "valid_loss": loss})
    return loss


def _after_epoch(trainer, state, history, report, loss):
    """Begin to average, or stop, when the validation losses say so."""
    config, epoch = trainer.config, trainer.stream.epoch
    if not optim.is_averaging(state.opt_state) and optim.should_average(
        config.optim, history.losses, loss, epoch
    ):
        report.say(f"averaging begins after epoch {epoch}")
        state = state.replace(opt_state=optim.start_averaging(state.opt_state))
    patience = config.train.stop_patience
    history.stopped = bool(patience) and optim.no_better(history.losses, loss, patience)
    history.losses.append(loss)
    return state


def _save(trainer, state, history, report):
    history.seconds, history.window = report.seconds, report.window
    host = {
        "position": trainer.stream.position,
        "history": dataclasses.asdict(history),
    }
    # The history speaks of the best parameters, so they must be there first.
    trainer.best.wait()
    trainer.latest.save(int(state.step), state, host)


def _finish(trainer, step, history):
    """Test the best parameters, write summary.json and print it."""
    config, workdir = trainer.config, trainer.workdir
    best = state_lib.load_run(workdir)
    data = config.data
    test = trainer.evaluate(
        best.params, trainer.corpus.test, data.test_rows, data.eval_length
    )
    vocab = len(trainer.corpus.vocab)
    summary = {
        "head": config.head.name,
        "context_dim": config_lib.context_dim(config),
        "steps": step,
        "test_perplexity": test.perplexity,
        "valid_perplexity": metrics.perplexity(history.best),
        "parameters": model_lib.count_parameters(best.params, vocab),
        "seconds": round(history.seconds, 3),
    }
    curves.write(workdir, f"{config.head.name} on {data.name}")
    if data.name == "synthetic":
        summary |= truth.summarise(best, trainer.corpus, workdir)
    if data.name == "templates":
        summary |= ambiguity.summarise(best, trainer.corpus)
    if config.train.equal_softmax:
        rival = model_lib.equal_softmax(config, vocab, summary["parameters"])
        rival = config_lib.validate(rival)
        summary["equal_softmax"] = _run(rival, workdir / "equal_softmax")
        if not summary["equal_softmax"]:
            return {}
    (workdir / "summary.json").write_text(json.dumps(summary, indent=2))
    return summary


@contextlib.contextmanager
def _termination() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, so that a preempted run can save and leave."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_logarithmic(step):
    """Whether a step is one of 1, 2, 4, 8, ..."""
    return step & (step - 1) == 0
