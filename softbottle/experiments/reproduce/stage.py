"""One stage of a table, in a process of its own."""

import json
import pathlib
import signal
import time
from typing import Any

import jax

from softbottle import config as config_lib
from softbottle import files
from softbottle.analysis import curves
from softbottle.bench import race, worker
from softbottle.data import lines
from softbottle.experiments import ending, processes
from softbottle.experiments.frontier import trial
from softbottle.scoring import dynamic
from softbottle.training import evaluate, loop, metrics, state

Row = dict[str, Any]
_TIMING = 0.5  # seconds per part of a step


def supervise(task: Row, outcome: pathlib.Path, seconds: float | None) -> int:
    """Call `run` in a new process and wait for its end, as `processes.supervise`."""
    return processes.supervise(run, (task, outcome), seconds)


def run(task: Row, outcome: pathlib.Path) -> None:
    """Do what a task of `plan.Plan` says.

    A training that is asked to stop leaves nothing but its checkpoint. What it comes to
    otherwise is written to `outcome`: numbers, {"failed": reason} of a loss that is not
    finite or of a lack of memory, or {"refused": reason} of settings and files.
    """
    stage = _train if task["measure"] is None else _measure
    try:
        result = processes.attempt(lambda: stage(task))
    except ValueError as error:
        result = {"refused": str(error)}
    if result:
        outcome.parent.mkdir(parents=True, exist_ok=True)
        files.replace(outcome, json.dumps(result))


def _train(task):
    # The loop has a handler of its own, which saves; the rest takes seconds.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = config_lib.validate(config_lib.from_dict(task["config"]))
    return loop.run(config, task["folder"], at_end=_ended).get("reproduced", {})


def _ended(ended: loop.Ended) -> Row:
    """The run's numbers, in the summary's entry `reproduced`, and its curve."""
    measured = trial.measure(ended)
    config, recorded = ended.run.config, metrics.read(ended.workdir)
    curves.write(ended.workdir, f"{config.head.name} on {config.data.name}")
    summary = ended.summary
    return {
        "reproduced": {
            **{name: summary[name] for name in ("steps", "parameters")},
            "test_perplexity": summary["test_perplexity"],
            "epochs": max(line.get("epoch", 0) for line in recorded),
            "elapsed": summary["seconds"],
            **measured,
        }
    }


def _measure(task):
    # A measurement that is stopped is begun anew; who asks for it sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    measured = _MEASURES[task["measure"]](task, **task["settings"])
    if "failed" not in measured:
        measured["elapsed"] = round(time.monotonic() - began, 3)
        measured["device"] = jax.local_devices()[0].device_kind
        measured["jax"] = jax.__version__
    return measured


def _loaded(task, *splits):
    """A run with products in float32, and its corpus, whose splits are to be used."""
    run = state.load_run(task["folder"], "float32")
    return run, state.load_corpus(task["folder"], run, *splits)


def _static(task):
    run, corpus = _loaded(task, "valid", "test")
    data = run.config.data
    score = evaluate.make_evaluator(run.model, cut=lines.cut(data, run.vocab))
    rows = {"valid": data.eval_rows, "test": data.test_rows}
    found = {
        split: score(run.params, corpus.splits[split], count, data.eval_length)
        for split, count in rows.items()
    }
    return {split: each.perplexity for split, each in found.items()} | {
        "step": run.step,
        "tokens": found["test"].count,
    }


def _dynamic(task, sums):
    run, corpus = _loaded(task, "train", "test")
    settings = dynamic.from_sums(*sums, corpus.train, run.params)
    score = dynamic.evaluate(run.model, run.params, corpus.train, corpus.test, settings)
    return {"test": score.perplexity, "step": run.step, "tokens": score.count}


def _cache(task, pointer):
    run, corpus = _loaded(task, "test")
    kind, length = evaluate.Pointer(*pointer), run.config.data.eval_length
    score = evaluate.evaluate_with_cache(
        run.model, run.params, corpus.test, length, kind
    )
    return {"test": score.perplexity, "step": run.step, "tokens": score.count}


def _rank(task, positions):
    run, corpus = _loaded(task, "test")
    return ending.ranks(run, corpus.test[: positions + 1]) | {"step": run.step}


def _time(task, vocab, length):
    kind = {"kind": "step", "seconds": _TIMING, "config": task["config"]}
    row = worker.in_process(race.OURS, kind | {"vocab": vocab, "length": length})
    if row["status"] != "ok":
        return {"failed": row["reason"]}
    fields = ("step_ms", "head_ms", "recurrence_ms", "rest_ms")
    fields += ("components", "tokens", "peak_bytes")
    return {name: row[name] for name in fields}


_MEASURES = {
    "static": _static,
    "dynamic": _dynamic,
    "cache": _cache,
    "rank": _rank,
    "time": _time,
}
