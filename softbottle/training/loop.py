"""Training: the loop that feeds the step.

The key of a step is a function of (seed, step), the batch a function of the stream's
position, and everything else is in the checkpoint, so a resumed run is the same run.
The loop reads a step's metrics when the device has them, up to `metrics.AHEAD` steps
later, so that the device does not wait for the host.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from softbottle import config as config_lib
from softbottle import distributed, files, sharding
from softbottle import model as model_lib
from softbottle.data.vocab import Corpus
from softbottle.training import (
    checkpoint,
    lock,
    metrics,
    optim,
    profiling,
    start,
    stopping,
)
from softbottle.training import state as state_lib

# How far the loss of parameters that were read back may be from the one before.
_SAME_LOSS = 0.005


class Ended(NamedTuple):
    """A run that has come to its end.

    Attributes:
        run: its model with the best parameters, on one device.
        corpus: its text.
        workdir: its folder.
        summary: what is to be written to `summary.json`.
    """

    run: state_lib.Run
    corpus: Corpus
    workdir: pathlib.Path
    summary: dict[str, Any]


AtEnd = Callable[[Ended], dict[str, Any] | None]


def run(
    config: config_lib.Config,
    workdir: pathlib.Path | str,
    at_end: AtEnd | None = None,
) -> dict[str, Any]:
    """Train a model, or resume training it, and sum it up.

    Args:
        config: a run's settings; validated and frozen here.
        workdir: where checkpoints, metrics and the summary go. A run that is already
            there is resumed.
        at_end: called in every process when the training is done, for more entries of
            the summary; None from it leaves the run unfinished.

    Returns:
        What `workdir/summary.json` holds; empty if the run was asked to stop early.

    Raises:
        ValueError: if the settings contradict themselves or the run in `workdir`, the
            text is not the run's, or the model does not fit into memory.
        lock.LockedError: if another process trains in `workdir`.
        metrics.NonFiniteLossError: naming the step and the batch.
        checkpoint.CheckpointError: if a checkpoint cannot be written or read.
    """
    config, workdir = config_lib.validate(config), pathlib.Path(workdir)
    model_lib.make_head(config)  # refused before anything is read or written
    if jax.process_count() == 1:
        return _train(config, workdir, at_end)
    try:
        return _train(config, workdir, at_end)
    except BaseException as error:
        distributed.exit_process(error)


def _train(config, workdir, at_end):
    # In a job its first process holds the folder for all of them.
    leads = jax.process_index() == 0
    with lock.Lock(workdir) if leads else contextlib.nullcontext() as held:
        trainer = start.prepare(config, workdir, held)
        try:
            with start.compile_steps(trainer) as program:
                state, history = start.resume(trainer)
                state, history, finished = _loop(trainer, program, state, history)
        except BaseException as error:
            # Closing the checkpoints would wait for processes that are dead or at work.
            if jax.process_count() > 1:
                distributed.exit_process(error)
            raise
        finally:
            for checkpoints in (trainer.latest, trainer.best, trainer.series):
                if checkpoints is not None:
                    checkpoints.close()
        if not finished:
            return {}
        return _finish(trainer, int(state.step), history, at_end)


def _loop(trainer, program, state, history):
    """Step until the run's bound, a stop rule or a signal to stop."""
    train, stream = trainer.config.train, trainer.stream
    step, rows = int(state.step), trainer.config.data.rows
    report = _report(trainer, step, history)
    begun = f"resumed from step {step:,}" if step else "a new run"
    report.say(f"{trainer.workdir}: {begun}")
    if _continues(train, step, stream.epoch, history) and jax.process_index() == 0:
        # Of an earlier end; a job is finished only if the run that resumes now is.
        (trainer.workdir / "summary.json").unlink(missing_ok=True)
    # Processes of one machine would write the same files.
    traced = (train.profile_steps or 0) if jax.process_index() == 0 else 0
    trace = profiling.Trace(trainer.workdir / "profile", step, traced, report.say)
    with (
        stopping.watch() as asked_to_stop,
        contextlib.closing(report),
        contextlib.closing(trace),
    ):
        while _continues(train, step, stream.epoch, history):
            epoch, position = stream.epoch, stream.position
            batch = sharding.to_mesh(trainer.mesh, stream.next(), rows)
            take = trainer.step
            if trainer.mesh is None:
                take = program(batch.ids_BS.shape[1]).result()
            state, measured = take(state, batch, stream.fresh)
            # Sent for together, and on their way while the next step runs.
            for value in measured.values():
                value.copy_to_host_async()
            step += 1
            report.add(step, position, measured)
            trace.after(step, measured)
            ended = stream.epoch > epoch and not train.eval_every
            if ended or (train.eval_every and step % train.eval_every == 0):
                report.settle()
                loss = _validate(trainer, state, history, report)
                state = _after_epoch(trainer, state, history, report, loss)
            if train.series and in_series(step, train.series_every):
                report.settle()
                trainer.series.save(step, state.params, {"step": step})
            leaving = asked_to_stop(step)
            if step % train.checkpoint_every == 0 or leaving:
                report.settle()
                if not _continues(train, step, stream.epoch, history):
                    # A run that resumes from its last step has no metrics to report.
                    report.finish()
                _save(trainer, state, history, report)
            if leaving:
                break
        else:
            report.finish()
            if history.evaluated != step:
                _validate(trainer, state, history, report)
            trainer.latest.wait()
            if trainer.latest.latest() != step:
                _save(trainer, state, history, report)
            _end_series(trainer, step, state.params)
            # Asked since the last step: what comes after this run is not begun.
            leaving = asked_to_stop(step + 1)
        if leaving:
            trainer.latest.wait()
            report.say(
                f"asked to stop: saved at step {step:,}; the same command resumes"
            )
    return state, history, not leaving


def _report(trainer, step, history):
    config, choices = trainer.config, trainer.model.choices()
    device = trainer.model.device.kind
    header = {
        "config": config_lib.to_dict(config),
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "device": device,
        "devices": 1 if trainer.mesh is None else trainer.mesh.size,
        "choices": choices._asdict(),
    }
    total = config.train.steps or config.train.epochs * trainer.stream.steps_per_epoch
    writer = progress = metrics.Silence()
    if jax.process_index() == 0:
        # The checkpoint knows how many steps had no line yet.
        logged = step - history.window[2]
        # One that was saved before the last validation has it done once more.
        ended = not _continues(config.train, step, trainer.stream.epoch, history)
        validates = ended and history.evaluated != step
        writer = metrics.Writer(trainer.workdir, step, header, logged, validates)
        progress = metrics.Progress(total, step, config.head.name)
    report = metrics.Report(
        writer,
        progress,
        config.train.log_every,
        history.seconds,
        history.window,
    )
    report.say(f"{header['devices']} x {device}: {choices}")
    return report


def _continues(train, step, epoch, history):
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
        _check_lock(trainer)
        host = {"step": step, "valid_loss": loss}
        # The last checkpoint's own best stays until another checkpoint is sealed.
        trainer.latest.wait()
        trainer.best.save(step, params, host, needed_at=trainer.latest.latest())
    return loss


def _after_epoch(trainer, state, history, report, loss):
    """Begin to average, or stop, when the validation losses say so."""
    config, epoch = trainer.config, trainer.stream.epoch
    if not optim.is_averaging(state.opt_state) and optim.should_average(
        config.optim, history.losses, loss, epoch
    ):
        report.say(f"averaging begins after epoch {epoch}")
        state = state.replace(opt_state=optim.start_averaging(state.opt_state))
    history.losses.append(loss)
    history.stopped = optim.should_stop(config.train.stop_patience, history.losses)
    return state


def _save(trainer, state, history, report):
    history.seconds, history.window = report.seconds, report.window
    host = {
        "position": trainer.stream.position,
        "history": dataclasses.asdict(history),
    }
    _check_lock(trainer)
    # The history speaks of the best parameters, so they must be there first.
    trainer.best.wait()
    trainer.latest.save(int(state.step), state, host)


def _check_lock(trainer):
    if trainer.lock is not None:
        trainer.lock.check()


def _finish(trainer, step, history, at_end):
    """Test the best parameters and write summary.json, the last of a run's files."""
    config, workdir = trainer.config, trainer.workdir
    best = state_lib.load_run(workdir, mesh=trainer.mesh)
    data = config.data
    _check_best(trainer, best, history)
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
    if at_end is not None:
        if trainer.mesh is not None:
            model = model_lib.make(config, vocab)
            best = best._replace(model=model, params=sharding.gather(best.params))
        entries = at_end(Ended(best, trainer.corpus, workdir, summary))
        if entries is None:
            return {}
        summary |= entries
    if jax.process_index() == 0:
        files.replace(workdir / "summary.json", json.dumps(summary, indent=2))
    distributed.barrier("the summary is written")
    return summary


def _check_best(trainer, best, history):
    """Refuse to test parameters that are not those of the best validation.

    A hash of a checkpoint's files says nothing of the way between device and file.
    """
    data = trainer.config.data
    loss = trainer.evaluate(
        best.params, trainer.corpus.valid, data.eval_rows, data.eval_length
    ).loss
    # Another machine or mesh than the validation's rounds otherwise.
    if not math.isclose(loss, history.best, rel_tol=_SAME_LOSS):
        raise checkpoint.CheckpointError(
            f"the parameters that were read from {trainer.workdir / 'best'}, of step "
            f"{best.step}, have a validation loss of {loss:.4f}, and it was "
            f"{history.best:.4f} when they were saved. Start again to read them once "
            "more; if they stay what they are, they were saved wrongly."
        )


def in_series(step: int, every: int) -> bool:
    """Whether a step is one of 1, 2, 4, ... below `every`, or a multiple of it.

    A model changes with the logarithm of the step at first. Where it saturates later,
    powers of two would be too far apart to tell where.
    """
    return step % every == 0 or (step < every and step & (step - 1) == 0)


def _end_series(trainer, step, params):
    """The last step is part of the series, whatever it is."""
    if trainer.series is not None:
        trainer.series.wait()
        if trainer.series.latest() != step:
            trainer.series.save(step, params, {"step": step})
