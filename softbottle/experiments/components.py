"""Mixtures by their number of components: rank of log P, perplexity, time per step.

Every run is an ordinary run (trial.py) in a folder of its own, as in sweep.py, so a
sweep that was interrupted resumes where it stopped. The rank is that of the test
text's first positions, the time the median of a run's own reports: runs of one sweep
on one idle machine can be compared, others cannot.

Axes: K numbers of components.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.axes
import numpy as np

from softbottle import config as config_lib
from softbottle import drawing, files, heads
from softbottle import variants as variants_lib
from softbottle.experiments import ending, sweep
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.frontier.trial import step_ms
from softbottle.training import metrics, state

Row = dict[str, Any]
POSITIONS = 8192  # of the test text, whose log P has the rank
_MEASURES = {
    "test_perplexity": "test perplexity",
    "rank": "rank of log P",
    "step_ms": "ms per step",
}


def run(
    config: config_lib.Config,
    workdir: pathlib.Path | str,
    names: Sequence[str],
    components: Sequence[int],
    seeds: Sequence[int],
) -> list[Row]:
    """Train every head with every number of components and every seed.

    A seed changes the language as well as the model, where the language is synthetic.

    Args:
        config: a run's settings.
        workdir: where each run has a folder, and `components.json`, `components.md` and
            `components.png` go.
        names: of heads that have components; the width stays the config's.
        components: K, in the order of the table.
        seeds: of the runs.

    Returns:
        A row for each head and K with the runs of its seeds, also in
        `workdir/components.json`.

    Raises:
        ValueError: for a head without components, a K that cannot be, or runs too short
            to report a time.
    """
    workdir = pathlib.Path(workdir)
    variants = {
        (name, k, seed): _variant(config, name, k, seed)
        for name in dict.fromkeys(names)
        for k in dict.fromkeys(components)
        for seed in seeds
    }
    found: dict[tuple[str, int], list[Row]] = {}
    for (name, k, seed), variant in variants.items():
        folder = workdir / f"{name}-k{k}-{seed}"
        summary = sweep.train(variant, folder)
        runs = found.setdefault((name, k), [])
        runs.append({"seed": seed} | _measured(summary, folder))
    rows = [
        {"head": name, "components": k, "runs": runs}
        for (name, k), runs in found.items()
    ]
    files.replace(workdir / "components.json", json.dumps(rows, indent=2))
    files.replace(workdir / "components.md", table(rows) + "\n")
    draw(rows).save(workdir / "components.png")
    print(table(rows))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: means, with deviations over several seeds."""
    titles = ["head", "K", "parameters", *_MEASURES.values(), "effective rank"]
    titles.append("a softmax's bound")
    lines = []
    for row in rows:
        runs = row["runs"]
        lines.append(
            [
                row["head"],
                str(row["components"]),
                f"{runs[0]['parameters']:,}",
                rows_lib.spread([run["test_perplexity"] for run in runs], 2),
                rows_lib.spread([run["rank"] for run in runs], 0),
                rows_lib.spread([run["step_ms"] for run in runs], 2),
                rows_lib.spread([run["effective"] for run in runs], 0),
                f"{runs[0]['bound']:,}",
            ]
        )
    return rows_lib.table(titles, lines)


def draw(rows: Sequence[Row]) -> drawing.Figure:
    """Perplexity, rank and time against K, a panel each and a line for each head."""
    figure = drawing.Figure(figsize=(11, 3.8))
    panels = figure.subplots(1, len(_MEASURES))
    for axes, (measure, title) in zip(panels, _MEASURES.items(), strict=True):
        for name in dict.fromkeys(row["head"] for row in rows):
            _draw_head(
                axes, name, measure, [row for row in rows if row["head"] == name]
            )
        counts = sorted({row["components"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(k) for k in counts])
        axes.tick_params(axis="x", which="minor", bottom=False)
        axes.set(xlabel="components K", title=title)
    bound = rows[0]["runs"][0]["bound"]
    panels[1].axhline(bound, color=drawing.GRAY, linestyle="--", linewidth=1)
    panels[1].annotate(
        f"a softmax's bound, {bound:,}",
        (0.98, bound),
        (0, 3),
        xycoords=panels[1].get_yaxis_transform(),
        textcoords="offset points",
        ha="right",
        fontsize=drawing.SMALL,
        color=drawing.GRAY,
    )
    panels[1].set_ylim(0, None)
    panels[2].set_ylim(0, None)
    for axes in panels:
        drawing.label(axes)
    return figure


def _variant(config, name, components, seed):
    if "components" not in heads.settings(name):
        raise ValueError(f"the head {name!r} has no components that could be swept.")
    variant = config_lib.from_dict(config_lib.to_dict(config))
    variant.head.components, variant.seed = components, seed
    variant = variants_lib.with_head(variant, name, config_lib.context_dim(config))
    if variant.data.name == "synthetic":
        variant.data.synthetic.seed = seed
    variant.train.equal_softmax = variant.train.same_width_softmax = False
    return config_lib.validate(variant)


def _measured(summary, folder):
    """The numbers of a run that has ended."""
    run = state.load_run(folder, "float32")
    text = state.load_corpus(folder, run, "test").test
    ranks = ending.ranks(run, text[: POSITIONS + 1])
    return {
        "parameters": summary["parameters"],
        "test_perplexity": summary["test_perplexity"],
        "valid_perplexity": summary["valid_perplexity"],
        "step_ms": step_ms(metrics.read(folder)),
        "rank": ranks["rank"],
        "bound": ranks["bound"],
        "shape": ranks["shape"],
        "effective": ranks["effective"]["0.0001"],
    }


def _draw_head(
    axes: matplotlib.axes.Axes, name: str, measure: str, rows: Sequence[Row]
) -> None:
    # A line goes from left to right, whatever the order of --components.
    rows = sorted(rows, key=lambda row: row["components"])
    values = [[run[measure] for run in row["runs"]] for row in rows]
    axes.errorbar(
        [row["components"] for row in rows],
        [np.mean(value) for value in values],
        [np.std(value, ddof=1) if len(value) > 1 else 0.0 for value in values],
        color=drawing.HEADS.get(name, drawing.GRAY),
        marker="o",
        capsize=3,
        label=name,
    )
