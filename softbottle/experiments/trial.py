"""A run and what is shown at its end: curves, the truth where it is known, a rival.

The training loop imports none of this; it is handed to the loop as `at_end`.
"""

import pathlib
import warnings
from typing import Any

import jax

from softbottle import config as config_lib
from softbottle import model as model_lib
from softbottle.analysis import curves
from softbottle.experiments import ambiguity, truth
from softbottle.training import loop, metrics


def run(config: config_lib.Config, workdir: pathlib.Path | str) -> dict[str, Any]:
    """Train a model, or resume training it, measure it, and print a table.

    Arguments, returned value and errors are those of `loop.run`. A synthetic corpus
    adds the divergence from its truth, templates add the accuracy on their answers,
    and `train.equal_softmax` the same of a softmax with as many parameters, which is
    trained in `workdir/equal_softmax`.
    """
    summary = loop.run(config, workdir, at_end=_measure)
    if summary and jax.process_index() == 0:
        rows = {config.head.name: summary}
        if summary.get("equal_softmax"):
            rows["softmax, as many parameters"] = summary["equal_softmax"]
        print(truth.table(rows))
        if config.data.name == "templates":
            print(ambiguity.table(summary))
    return summary


def _measure(ended: loop.Ended) -> dict[str, Any] | None:
    """What is added to a run's summary; None if its rival was asked to stop."""
    measured = _inspect(ended) if jax.process_index() == 0 else {}
    config = ended.run.config
    if not config.train.equal_softmax:
        return measured
    vocab, parameters = len(ended.corpus.vocab), ended.summary["parameters"]
    rival = model_lib.equal_softmax(config, vocab, parameters)
    beside = loop.run(rival, ended.workdir / "equal_softmax", at_end=_measure)
    return measured | {"equal_softmax": beside} if beside else None


def _inspect(ended):
    """Draw the run's curves, and measure what its corpus lets one measure."""
    config, workdir = ended.run.config, ended.workdir
    if curves.validations(metrics.read(workdir)):
        curves.write(workdir, f"{config.head.name} on {config.data.name}")
    else:
        warnings.warn(
            f"{workdir / 'metrics.jsonl'} has lost its validations: no curve is drawn.",
            stacklevel=2,
        )
    if config.data.name == "synthetic":
        return truth.summarize(ended.run, ended.corpus, workdir)
    if config.data.name == "templates":
        return ambiguity.summarize(ended.run, ended.corpus)
    return {}
