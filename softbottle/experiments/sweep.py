"""Heads against each other over widths and seeds: the picture of the bottleneck.

Every run is an ordinary run (trial.py) in a folder of its own, so a sweep that was
interrupted resumes where it stopped, and each of its points can be looked at.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import numpy as np

from softbottle import config as config_lib
from softbottle import model
from softbottle.experiments import trial

EQUAL = "softmax, as many parameters as mos"


def run(
    config: config_lib.Config,
    workdir: pathlib.Path | str,
    heads: Sequence[str],
    widths: Sequence[int],
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """Train every head at every width with every seed.

    A seed changes the language as well as the model. Beside each mixture of softmaxes
    a softmax with as many parameters is trained.

    Returns:
        A row for each head and width with the mean and deviation of `kl` over the
        seeds, also in `workdir/sweep.json`; the table is printed, the picture drawn.
    """
    workdir = pathlib.Path(workdir)
    summaries: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for head in heads:
        for width in widths:
            for seed in seeds:
                variant = model.with_head(config, head, width)
                variant.seed = variant.data.synthetic.seed = seed
                variant.train.equal_softmax = head == "mos"
                summary = train(variant, workdir / f"{head}-{width}-{seed}")
                summaries.setdefault((head, width), []).append(summary)
                if "equal_softmax" in summary:
                    other = summary["equal_softmax"]
                    summaries.setdefault((EQUAL, width), []).append(other)
    rows = [_row(head, width, runs) for (head, width), runs in summaries.items()]
    (workdir / "sweep.json").write_text(json.dumps(rows, indent=2))
    print(table(rows))
    draw(rows).savefig(workdir / "sweep.png", dpi=150)
    return rows


def train(config: config_lib.Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Train one run of the sweep; one that is asked to stop ends the sweep.

    Returns:
        Its summary.
    """
    summary = trial.run(config, workdir)
    if not summary:
        raise SystemExit("asked to stop; start again to resume.")
    return summary


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| head | d of the point | parameters | KL to the truth (nats) | rank |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['head']} | {row['width']} | {row['parameters']:,} | "
            f"{row['kl']:.4f} ± {row['kl_deviation']:.4f} | {row['rank']:.0f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> matplotlib.figure.Figure:
    """Divergence from the truth, and rank, against the width."""
    figure = matplotlib.figure.Figure(figsize=(10, 4.6), layout="constrained")
    divergence, ranks = figure.subplots(1, 2)
    for head in dict.fromkeys(row["head"] for row in rows):
        points = [row for row in rows if row["head"] == head]
        style = "--" if head == EQUAL else "-"
        widths = [row["width"] for row in points]
        divergence.errorbar(
            widths,
            [row["kl"] for row in points],
            [row["kl_deviation"] for row in points],
            label=head,
            linestyle=style,
            marker="o",
            capsize=3,
        )
        ranks.plot(
            widths, [row["rank"] for row in points], style, marker="o", label=head
        )
    widths = sorted({row["width"] for row in rows})
    bound = [width + 2 for width in widths]
    ranks.plot(widths, bound, ":", color="black", label="softmax bound, d + 2")
    divergence.set(
        xlabel="width d of the context",
        ylabel="KL to the true distribution (nats)",
        title="What a head cannot express",
        yscale="log",
    )
    ranks.set(
        xlabel="width d of the context",
        ylabel="numerical rank of log P",
        title="Rank",
    )
    for axes in (divergence, ranks):
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(width) for width in widths])
    # The right-hand panel has every line of the left one, and the bound.
    figure.legend(
        *ranks.get_legend_handles_labels(), loc="outside lower center", ncols=5
    )
    return figure


def _row(head, width, runs):
    kls = np.array([summary["kl"] for summary in runs])
    return {
        "head": head,
        "width": width,
        "seeds": len(runs),
        "parameters": round(np.mean([summary["parameters"] for summary in runs])),
        "kl": float(kls.mean()),
        "kl_deviation": float(kls.std(ddof=1)) if len(runs) > 1 else 0.0,
        "rank": float(np.mean([summary["rank"] for summary in runs])),
    }
