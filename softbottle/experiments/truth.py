"""A trained model beside the language it was trained on, where that is known."""

import math
import pathlib
from typing import Any

import numpy as np

from softbottle import config as config_lib
from softbottle import drawing
from softbottle.analysis.instruments import rank
from softbottle.data import synthetic
from softbottle.data.vocab import Corpus
from softbottle.training import evaluate, metrics
from softbottle.training.state import Run

POSITIONS = 8192  # of the test text, at which distributions are compared
# Of a run, a softmax of its width and one of its size: Okabe and Ito's blue, vermilion
# and grey, which color-blind readers tell apart.
COLORS = (drawing.BLUE, drawing.VERMILION, drawing.GRAY)


def summarize(run: Run, corpus: Corpus, workdir: pathlib.Path) -> dict[str, Any]:
    """Divergence from the truth and ranks, and their picture in `workdir`.

    Returns:
        `true_perplexity` on the test text, `kl` to the truth in nats, the `rank` of
        the learned log-probability matrix, the `softmax_rank_bound` of that width and
        the `true_rank`.
    """
    truth = synthetic.language(run.config.data.synthetic)
    log_q_TV, previous_T = evaluate.log_probs(
        run.model, run.params, corpus.test, POSITIONS, run.config.data.eval_length
    )
    true_T = truth.log_p_VV[corpus.test[:-1], corpus.test[1:]]
    learned = rank.streamed([log_q_TV])
    # Equal rows as one, times the root of their number: the same singular values.
    words_U, counts_U = np.unique(previous_T, return_counts=True)
    log_p_UV = np.sqrt(counts_U)[:, None] * truth.log_p_VV[words_U]
    true = rank.spectrum(log_p_UV, np.float64)
    width = config_lib.context_dim(run.config)
    summary = {
        "true_perplexity": math.exp(-true_T.mean()),
        "kl": synthetic.divergence(truth, previous_T, log_q_TV),
        "rank": learned.ranks["float32"],
        "softmax_rank_bound": rank.softmax_bound(width),
        "true_rank": true.rank,
    }
    figure = _draw(metrics.read(workdir), truth.entropy, learned, true, summary)
    figure.save(workdir / "quickstart.png")
    return summary


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """Runs side by side as a small table of text."""
    columns = (
        ("d", "context_dim", "d"),
        ("parameters", "parameters", ",d"),
        ("test ppl", "test_perplexity", ".3f"),
        ("true ppl", "true_perplexity", ".3f"),
        ("KL (nats)", "kl", ".4f"),
        ("rank", "rank", "d"),
        ("softmax bound", "softmax_rank_bound", "d"),
        ("true rank", "true_rank", "d"),
        ("seconds", "seconds", ".1f"),
    )
    first = next(iter(summaries.values()))
    shown = [column for column in columns if column[1] in first]
    rows = [["head", *(title for title, _, _ in shown)]]
    for name, summary in summaries.items():
        rows.append([name, *(format(summary[key], how) for _, key, how in shown)])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def reading(summaries: dict[str, dict[str, Any]]) -> str:
    """What a table of runs says, the first of them beside the others, in sentences."""
    (name, first), *others = summaries.items()
    bound, rank = first["softmax_rank_bound"], first["true_rank"]
    sentences = [
        "KL is the distance to the language's true distribution, in nats; 0 is "
        f"perfect. {name} is at {first['kl']:.2f} with d = {first['context_dim']}."
    ]
    for other, summary in others:
        ratio = summary["kl"] / first["kl"]
        beside = f"{ratio:.1f} times as far" if ratio >= 1 else "closer"
        sentences.append(
            f"{other} (d = {summary['context_dim']}): {summary['kl']:.2f}, {beside}."
        )
    sentences.append(
        f"A softmax of d = {first['context_dim']} gives log P a rank of {bound} at "
        f"most; {name} reached {first['rank']}, and the truth has {rank}."
    )
    return "\n".join(sentences)


def compare(
    config: config_lib.Synthetic,
    summaries: dict[str, dict[str, Any]],
    lines: dict[str, list[dict[str, Any]]],
) -> drawing.Figure:
    """Runs on one language side by side: their losses, and how far they end from it.

    Args:
        config: of the language.
        summaries: by name, a run's summary.
        lines: by name, a run's metrics.
    """
    figure = drawing.Figure(figsize=(10, 4))
    loss, bars = figure.subplots(1, 2)
    for color, (name, run) in zip(COLORS, lines.items(), strict=False):
        reported = [line for line in run if "loss" in line]
        steps, losses = ([line[key] for line in reported] for key in ("step", "loss"))
        loss.plot(steps, losses, color=color, label=name)
    entropy = synthetic.language(config).entropy
    loss.axhline(entropy, color="black", linestyle="--", label="the language's entropy")
    loss.set(xlabel="step", ylabel="training loss (nats per word)")
    loss.set_title(synthetic.describe(config))
    drawing.label(loss)
    names = [
        f"{name}\nd = {summary['context_dim']}, {summary['parameters']:,} parameters"
        for name, summary in summaries.items()
    ]
    kls = [summary["kl"] for summary in summaries.values()]
    drawn = bars.barh(names, kls, color=COLORS[: len(names)], height=0.6)
    bars.bar_label(drawn, fmt="%.3f", padding=4)
    bars.margins(x=0.15)
    bars.invert_yaxis()
    bars.set(xlabel="nats", title="Distance to the truth (KL)")
    bars.grid(False)
    return figure


def _draw(lines, entropy, learned, true, summary):
    figure = drawing.Figure(figsize=(10, 4))
    loss, spectra = figure.subplots(1, 2)
    # None, where a run was shorter than the distance between two reports.
    reported = [line for line in lines if "loss" in line]
    steps, losses = ([line[name] for line in reported] for name in ("step", "loss"))
    loss.plot(steps, losses, label="training loss")
    loss.axhline(entropy, color="black", linestyle="--", label="entropy of the truth")
    loss.set(xlabel="step", ylabel="nats per word", title="Loss")
    drawing.label(loss)
    for name, spectrum in (("learned", learned), ("true", true)):
        sigma = spectrum.sigma / spectrum.sigma[0]
        spectra.semilogy(np.arange(1, len(sigma) + 1), sigma, label=name)
    bound = summary["softmax_rank_bound"]
    spectra.axvline(bound, color=drawing.GRAY, linestyle=":")
    spectra.annotate(
        f"softmax bound, rank {bound}", (bound, 3e-9), fontsize=drawing.SMALL
    )
    spectra.set(
        xlabel="index",
        ylabel="singular value over the largest",
        title=f"log P: rank {summary['rank']} learned, {summary['true_rank']} true",
        ylim=(1e-9, 2),
    )
    drawing.label(spectra)
    return figure
