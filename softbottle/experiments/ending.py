"""What is measured and shown of a run that has ended: curves, truth and rivals."""

import pathlib
import shlex
import warnings
from typing import Any

import jax
import numpy as np

from softbottle import config as config_lib
from softbottle import variants as variants_lib
from softbottle.analysis import curves
from softbottle.analysis.instruments import rank
from softbottle.analysis.sources import run as run_source
from softbottle.experiments import ambiguity, truth
from softbottle.training import loop, metrics
from softbottle.training.state import Run

# A rival's folder in that of the run, entry of its summary and setting of `train`; and
# what it is called.
RIVALS = {
    "same_width_softmax": "softmax, same width",
    "equal_softmax": "softmax, as many parameters",
}


def told(
    config: config_lib.Config, workdir: pathlib.Path | str, summary: dict[str, Any]
) -> str:
    """A run beside its rivals as a table, with what to make of it and do next."""
    rivals = [name for name in RIVALS if name in summary]
    rows = {config.head.name: summary}
    rows |= {RIVALS[name]: summary[name] for name in rivals}
    text = truth.table(rows)
    if config.data.name == "templates":
        text += f"\n{ambiguity.table(summary)}"
    if "same_width_softmax" in rivals and config.data.name == "synthetic":
        text += f"\n\n{truth.reading(rows)}\n{_next(pathlib.Path(workdir), rivals)}"
    return text


def ranks(run: Run, ids: np.ndarray) -> dict[str, Any]:
    """The rank of log P along a text, beside the bound of a softmax of that width.

    Args:
        run: with products in float32.
        ids: the text.

    Returns:
        `rank`, `bound`, the `shape` of log P, the `effective` rank by loss, and the
        `divergence` of two contexts.
    """
    head = rank.measure(run_source.capture("run", run, ids, {"tokens"}))
    return {
        "rank": head.ranks.ranks[head.ranks.precision],
        "bound": head.bound,
        "shape": list(head.ranks.shape),
        "effective": {f"{loss:g}": k for loss, k in head.ranks.effective.items()},
        "divergence": head.kl,
    }


def measure(ended: loop.Ended) -> dict[str, Any] | None:
    """What is added to a run's summary; None if a rival was asked to stop."""
    measured = _inspect(ended) if jax.process_index() == 0 else {}
    workdirs = {ended.run.config.head.name: ended.workdir}
    for name, rival in _rivals(ended).items():
        workdirs[RIVALS[name]] = ended.workdir / name
        beside = loop.run(rival, ended.workdir / name, at_end=measure)
        if not beside:
            return None
        measured[name] = beside
    known = ended.run.config.data.name == "synthetic"
    if known and len(workdirs) > 1 and jax.process_index() == 0:
        _compare(ended, measured, workdirs)
    return measured


def _rivals(ended):
    """The settings of the softmaxes that are trained beside a run, by RIVALS."""
    config, rivals = ended.run.config, {}
    if config.train.same_width_softmax:
        width = config_lib.context_dim(config)
        rivals["same_width_softmax"] = variants_lib.with_head(config, "softmax", width)
    if config.train.equal_softmax:
        vocab, parameters = len(ended.corpus.vocab), ended.summary["parameters"]
        rivals["equal_softmax"] = variants_lib.equal_softmax(config, vocab, parameters)
    for rival in rivals.values():
        rival.train.equal_softmax = rival.train.same_width_softmax = False
    return rivals


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


def _compare(ended, measured, workdirs):
    """Draw a run and its rivals side by side."""
    summaries = [ended.summary | measured]
    summaries += [measured[name] for name in RIVALS if name in measured]
    rows = dict(zip(workdirs, summaries, strict=True))
    lines = {name: metrics.read(folder) for name, folder in workdirs.items()}
    figure = truth.compare(ended.run.config.data.synthetic, rows, lines)
    figure.save(ended.workdir / "comparison.png")


def _next(workdir, rivals):
    """Where the figures are, and what to try next."""
    command = ["softbottle", "analyze", "--workdir", str(workdir)]
    command += ["--workdir", str(workdir / rivals[0])]
    command += ["--out", str(workdir / "report")]
    return (
        f"Figures: {workdir / 'comparison.png'} (these runs), "
        f"{workdir / 'quickstart.png'} (the spectrum of log P).\n"
        f"Next, look into both models (writes {workdir / 'report/report.html'}):\n"
        f"    {shlex.join(command)}"
    )
