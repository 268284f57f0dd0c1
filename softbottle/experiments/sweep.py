"""Heads against each other over widths and seeds: the picture of the bottleneck.

Every run is an ordinary run (trial.py) in a folder of its own, so a sweep that was
interrupted resumes where it stopped, and each of its points can be looked at.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from softbottle import config as config_lib
from softbottle import drawing, files
from softbottle import variants as variants_lib
from softbottle.data import synthetic
from softbottle.experiments import rows as rows_lib
from softbottle.experiments import trial

EQUAL = "softmax, as many parameters as mos"


def run(
    config: config_lib.Config,
    workdir: pathlib.Path | str,
    heads: Sequence[str],
    widths: Sequence[int],
    seeds: Sequence[int],
    beside: pathlib.Path | str | None = None,
) -> list[dict[str, Any]]:
    """Train every head at every width with every seed.

    A seed changes the language as well as the model. Beside each mixture of softmaxes
    a softmax with as many parameters is trained.

    Args:
        config: on a synthetic language.
        workdir: where each run has a folder, and `sweep.json` and `sweep.png` go.
        heads: by name.
        widths: of the contexts.
        seeds: from 0 on.
        beside: the sweep.json of another language, for a panel of its own.

    Returns:
        A row for each head and width with the mean and deviation of `kl` over the
        seeds, also in `workdir/sweep.json`; the table is printed, the picture drawn.

    Raises:
        ValueError: if the language is not synthetic, a head needs a setting that is not
            set, or `beside` is no such file.
    """
    if config.data.name != "synthetic":
        raise ValueError(
            "heads are compared by their divergence from the truth of a synthetic "
            f"language, and data.name is {config.data.name!r}: sweep --components, or "
            "--objectives on the templates."
        )
    others = _read(pathlib.Path(beside)) if beside else []
    workdir = pathlib.Path(workdir)
    variants = {
        (head, width, seed): _variant(config, head, width, seed)
        for head in heads
        for width in widths
        for seed in seeds
    }
    summaries: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for (head, width, seed), variant in variants.items():
        summary = train(variant, workdir / f"{head}-{width}-{seed}")
        summaries.setdefault((head, width), []).append(summary)
        if "equal_softmax" in summary:
            other = summary["equal_softmax"]
            summaries.setdefault((EQUAL, width), []).append(other)
    language = synthetic.describe(config.data.synthetic)
    rows = [
        {"language": language, **_row(head, width, runs)}
        for (head, width), runs in summaries.items()
    ]
    files.replace(workdir / "sweep.json", json.dumps(rows, indent=2))
    print(table(rows))
    draw(rows + others).save(workdir / "sweep.png")
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
    titles = ["head", "d of the point", "parameters", "KL to the truth (nats)", "rank"]
    lines = [
        [
            row["head"],
            str(row["width"]),
            f"{row['parameters']:,}",
            f"{row['kl']:.4f} ± {row['kl_deviation']:.4f}",
            f"{row['rank']:.0f}",
        ]
        for row in rows
    ]
    return rows_lib.table(titles, lines)


def draw(rows: list[dict[str, Any]]) -> drawing.Figure:
    """Divergence from the truth against the width, with a panel for each language."""
    languages = list(dict.fromkeys(row["language"] for row in rows))
    figure = drawing.Figure(figsize=(5.5 * len(languages), 4))
    panels = figure.subplots(1, len(languages), squeeze=False)[0]
    for axes, language in zip(panels, languages, strict=True):
        _draw_language(axes, [row for row in rows if row["language"] == language])
        axes.set_title(language)
    panels[0].set_ylabel("KL to the true distribution (nats)")
    return figure


def _draw_language(axes, rows):
    for head in dict.fromkeys(row["head"] for row in rows):
        points = [row for row in rows if row["head"] == head]
        # A line goes from left to right, whatever the order of --widths.
        points.sort(key=lambda row: row["width"])
        axes.errorbar(
            [row["width"] for row in points],
            [row["kl"] for row in points],
            [row["kl_deviation"] for row in points],
            color=drawing.HEADS.get(head, drawing.GRAY),
            linestyle="--" if head == EQUAL else "-",
            marker="o",
            capsize=3,
            label=head.replace(", as", ",\nas").replace(" as mos", "\nas mos"),
        )
    widths = sorted({row["width"] for row in rows})
    axes.set(xlabel="width d of the context", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    drawing.label(axes)


def _read(path):
    """The rows of another sweep."""
    rows = json.loads(path.read_text())
    if not (isinstance(rows, list) and all("language" in row for row in rows)):
        raise ValueError(f"{path} is no sweep.json: its rows name no language.")
    return rows


def _variant(config, head, width, seed):
    variant = variants_lib.with_head(config, head, width)
    variant.seed = variant.data.synthetic.seed = seed
    variant.train.equal_softmax = head == "mos"
    variant.train.same_width_softmax = False
    return config_lib.validate(variant)


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
