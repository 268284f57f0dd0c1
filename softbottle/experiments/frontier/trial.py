"""One run of the frontier, in a process of its own, and what is measured of it."""

import json
import pathlib
import signal
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import config as config_lib
from softbottle import files, sharding
from softbottle import model as model_lib
from softbottle.data import batches, frequency, lines
from softbottle.experiments import processes
from softbottle.training import loop, metrics, optim
from softbottle.training import step as step_lib
from softbottle.training.state import Run

_OUTCOME = "outcome.json"


def supervise(
    values: dict[str, Any], folder: pathlib.Path, vocab: int, seconds: float | None
) -> int:
    """Call `train` in a new process and wait for its end.

    An outcome from before is forgotten: the settings may have been others.

    Args:
        values: the run's settings, of `config.to_dict`.
        folder: the run's.
        vocab: how many words there are.
        seconds: after which the run is asked to save and stop; None for never.

    Returns:
        The exit status.

    Raises:
        KeyboardInterrupt: on SIGINT, when the run has been asked to stop and has ended.
    """
    (folder / _OUTCOME).unlink(missing_ok=True)
    return processes.supervise(train, (values, folder, vocab), seconds)


def train(values: dict[str, Any], folder: pathlib.Path, vocab: int) -> None:
    """Train a model, or resume training it, and leave what `outcome` reads.

    A loss that is not finite and a lack of memory are outcomes: {"failed": reason};
    so is a refusal, {"refused": why}. A run that was asked to stop leaves nothing but
    its checkpoint.
    """
    # The loop has a handler of its own, which saves; the rest takes seconds.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_lib.validate(config_lib.from_dict(values))
    try:
        outcome = _outcome(config, folder, vocab)
    except ValueError as error:
        outcome = {"refused": str(error)}
    if outcome:
        files.replace(folder / _OUTCOME, json.dumps(outcome))


def outcome(folder: pathlib.Path) -> dict[str, Any] | None:
    """What a run left, if it has ended."""
    path = folder / _OUTCOME
    return json.loads(path.read_text()) if path.exists() else None


def loss_by_decile(
    run: Run, ids: np.ndarray, rows: int, decile_V: np.ndarray
) -> list[dict[str, Any]]:
    """Tokens and mean loss of a text by the decile of the predicted word.

    The text is read as `evaluate.make_evaluator` reads it, so that the mean of the
    losses, weighted by tokens, is the loss of the whole text.
    """
    data, model = run.config.data, run.model
    rows, cut = min(rows, len(ids) - 1), lines.cut(data, run.vocab)

    @jax.jit
    def score(params, batch, carry):
        nll_BS, carry = model.nll(params, batch, carry)
        # Padding may hold no word, and its loss is 0.
        label_BS = jnp.where(batch.weights_BS != 0, batch.labels_BS, 0)
        group_BS = jnp.asarray(decile_V)[label_BS]
        sums = jax.ops.segment_sum(nll_BS.ravel(), group_BS.ravel(), frequency.DECILES)
        return sums, carry

    empty = carry = model.initial_carry(rows)
    total, count = np.zeros(frequency.DECILES), np.zeros(frequency.DECILES, np.int64)
    for batch in (cut or batches.evaluation)(ids, rows, data.eval_length):
        sums, carry = score(run.params, batch, empty if cut else carry)
        total += np.asarray(sums, np.float64)
        predicted = batch.labels_BS[batch.weights_BS > 0]
        count += np.bincount(decile_V[predicted], minlength=frequency.DECILES)
    words = np.bincount(decile_V, minlength=frequency.DECILES)
    return [
        {
            "words": int(words[decile]),
            "tokens": int(count[decile]),
            "loss": float(total[decile] / count[decile]) if count[decile] else None,
        }
        for decile in range(frequency.DECILES)
    ]


def _outcome(config, folder, vocab):
    mesh = sharding.make_mesh(config.mesh)
    model = model_lib.make(config, vocab, mesh)
    try:
        step_lib.check_memory(config, model, optim.make(config.optim), mesh)
    except ValueError as error:
        return {"failed": str(error)}

    def run():
        return loop.run(config, folder, at_end=_measure).get("frontier", {})

    return processes.attempt(run)


def _measure(ended: loop.Ended) -> dict[str, Any]:
    """The run's numbers, in the summary's entry `frontier`."""
    began = time.monotonic()
    # First, before this function adds to the memory.
    measured, data = measure(ended), ended.run.config.data
    decile_V = frequency.deciles(ended.corpus.train, len(ended.corpus.vocab))
    by_decile = loss_by_decile(ended.run, ended.corpus.test, data.test_rows, decile_V)
    tokens = sum(decile["tokens"] for decile in by_decile)
    test_loss = sum(row["tokens"] * (row["loss"] or 0.0) for row in by_decile) / tokens
    measured |= {
        "test_loss": test_loss,
        "test_perplexity": ended.summary["test_perplexity"],
        "deciles": by_decile,
    }
    loop_seconds = ended.summary["seconds"] + time.monotonic() - began
    return {"frontier": measured | {"elapsed": round(loop_seconds, 3)}}


def measure(ended: loop.Ended) -> dict[str, Any]:
    """What a run's device and its metrics tell: time, memory and validations."""
    device, recorded = jax.local_devices()[0], metrics.read(ended.workdir)
    memory = device.memory_stats() or {}
    median = step_ms(recorded)
    valid = [line for line in recorded if line.get("valid_loss") is not None]
    valid_loss = min(line["valid_loss"] for line in valid)
    return {
        "seconds": round(ended.summary["steps"] * median / 1e3, 3),
        "step_ms": median,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "train_loss": train_loss(recorded),
        "valid_loss": valid_loss,
        "valid_perplexity": metrics.perplexity(valid_loss),
        "validations": [[line["step"], line["valid_loss"]] for line in valid],
        "device": device.device_kind,
        "jax": jax.__version__,
    }


def train_loss(recorded: list[dict[str, Any]]) -> float | None:
    """The mean loss of the last two lines of a run's metrics; None without any.

    In one pass without dropout these batches are new text, too. A validation that is
    far above them reads the text in another state than the training does.
    """
    losses = [line["loss"] for line in recorded if line.get("loss") is not None]
    return statistics.fmean(losses[-2:]) if losses else None


def step_ms(recorded: list[dict[str, Any]]) -> float:
    """The median time of a step, in ms, of a run's metrics.

    Raises:
        ValueError: if none was reported.
    """
    times = [line["step_ms"] for line in recorded if line.get("step_ms") is not None]
    if not times:
        raise ValueError(
            "the run reported no time per step: train.log_every is larger than the "
            "number of its steps."
        )
    return statistics.median(times)
