"""Heads against each other over widths and seeds: the picture of the bottleneck.

Every run is an ordinary run (trial.py) in a folder of its own, so a sweep that was
interrupted resumes where it stopped, and each of its points can be looked at.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np

from softbottle import config as config_lib
from softbottle import model
from softbottle.data import synthetic
from softbottle.experiments import trial, truth

EQUAL = "softmax, as many parameters as mos"
_COLORS = dict(zip(("mos", "softmax", EQUAL), truth.COLORS, strict=True))
_COLORS |= {"moc": "#E69F00", "sigsoftmax": "#009E73", "moss": "#CC79A7"}


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
        ValueError: if `beside` is no such file.
    """
    others = _read(pathlib.Path(beside)) if beside else []
    workdir = pathlib.Path(workdir)
    summaries: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for head in heads:
        for width in widths:
            for seed in seeds:
                variant = model.with_head(config, head, width)
                variant.seed = variant.data.synthetic.seed = seed
                variant.train.equal_softmax = head == "mos"
                variant.train.same_width_softmax = False
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
    (workdir / "sweep.json").write_text(json.dumps(rows, indent=2))
    print(table(rows))
    draw(rows + others).savefig(workdir / "sweep.png", dpi=150)
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
    """Divergence from the truth against the width, with a panel for each language."""
    languages = list(dict.fromkeys(row["language"] for row in rows))
    figure = matplotlib.figure.Figure(
        figsize=(5 * len(languages), 4), layout="constrained"
    )
    panels = figure.subplots(1, len(languages), squeeze=False)[0]
    for axes, language in zip(panels, languages, strict=True):
        _draw_language(axes, [row for row in rows if row["language"] == language])
        axes.set_title(language)
    panels[0].set_ylabel("KL to the true distribution (nats)")
    return figure


def _draw_language(axes: matplotlib.axes.Axes, rows: list[dict[str, Any]]) -> None:
    ends: dict[str, float] = {}
    for head in dict.fromkeys(row["head"] for row in rows):
        points = [row for row in rows if row["head"] == head]
        axes.errorbar(
            [row["width"] for row in points],
            [row["kl"] for row in points],
            [row["kl_deviation"] for row in points],
            color=_COLORS.get(head, "black"),
            linestyle="--" if head == EQUAL else "-",
            marker="o",
            capsize=3,
        )
        ends[head] = points[-1]["kl"]
    widths = sorted({row["width"] for row in rows})
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set_xlabel("width d of the context")
    axes.spines[["top", "right"]].set_visible(False)
    places = _apart(axes, ends)
    for head, place in places.items():
        axes.annotate(
            head.replace(", as", ",\nas").replace(" as mos", "\nas mos"),
            (1.02, place),
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            color=_COLORS.get(head, "black"),
        )


def _apart(axes, ends):
    """Heights of labels at the lines' ends, as shares of the axes, none too close."""
    low, high = np.log(axes.get_ylim())
    gaps = {head: 0.14 if head == EQUAL else 0.07 for head in ends}
    places, below, needed = {}, -np.inf, 0.0
    for head in sorted(ends, key=lambda name: ends[name]):
        own = (np.log(ends[head]) - low) / (high - low)
        places[head] = max(own, below + (needed + gaps[head]) / 2)
        below, needed = places[head], gaps[head]
    return places


def _read(path):
    """The rows of another sweep."""
    rows = json.loads(path.read_text())
    if not (isinstance(rows, list) and all("language" in row for row in rows)):
        raise ValueError(f"{path} is no sweep.json: its rows name no language.")
    return rows


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
