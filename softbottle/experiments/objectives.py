"""Objectives against each other over learning rates and seeds, on the templates.

Every run is an ordinary run (trial.py) in a folder of its own, as in sweep.py, so a
sweep that was interrupted resumes where it stopped. A row of the table is an objective
at a learning rate, and has the range of every number over the seeds.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from softbottle import config as config_lib
from softbottle import files
from softbottle.experiments import ambiguity, sweep
from softbottle.experiments import rows as rows_lib

PLACES = (2, 5, 10)  # the k of Acc@k that the table shows
DISTRIBUTIONS = dict(
    zip(ambiguity.NAMES, ("head alone", "head and cache", "cache alone"), strict=True)
)


def run(
    config: config_lib.Config,
    workdir: pathlib.Path | str,
    rates: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """Train every objective at each of its learning rates with every seed.

    A seed changes the lines as well as the model. `{seed}` in `train.init_from` stands
    for it, so that each run starts from one that saw the same lines.

    Args:
        config: a run's settings.
        workdir: a run's folder in it is called by objective, rate and seed.
        rates: the learning rates of each objective.
        seeds: how many, and which.

    Returns:
        A row for each objective and rate with the summaries of its seeds, also in
        `workdir/objectives.json`; the table is printed and in `workdir/objectives.md`.

    Raises:
        ValueError: if the corpus is not the templates, which have the right answers,
            or for an objective or a rate that cannot be.
    """
    if config.data.name != "templates":
        raise ValueError(
            f"objectives are compared on the templates, and data.name is "
            f"{config.data.name!r}."
        )
    workdir, rows = pathlib.Path(workdir), []
    # All of them before any is trained.
    variants = {
        (objective, rate): [_variant(config, objective, rate, seed) for seed in seeds]
        for objective, learning_rates in rates.items()
        for rate in learning_rates
    }
    for (objective, rate), settings in variants.items():
        runs = [
            sweep.train(variant, workdir / f"{objective}-{rate:g}-{variant.seed}")
            for variant in settings
        ]
        rows.append({"objective": objective, "rate": rate, "runs": runs})
    files.replace(workdir / "objectives.json", json.dumps(rows, indent=2))
    files.replace(workdir / "objectives.md", table(rows) + "\n")
    print(table(rows))
    return rows


def _variant(config, objective, rate, seed):
    variant = config_lib.from_dict(config_lib.to_dict(config))
    variant.cache.objective, variant.optim.learning_rate = objective, rate
    variant.seed = variant.data.templates.seed = seed
    if variant.train.init_from is not None:
        start = variant.train.init_from.replace("{seed}", str(seed))
        variant.train.init_from = start
    return config_lib.validate(variant)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; accuracies are in percent."""
    titles = [f"{name}, Acc@{_joined(PLACES)}" for name in DISTRIBUTIONS.values()]
    titles = ["objective", "rate", "seeds", *titles, "rank", "test perplexity"]
    lines = []
    for row in rows:
        runs = row["runs"]
        cells = [row["objective"], f"{row['rate']:g}", str(len(runs))]
        for name in DISTRIBUTIONS:
            fields = [f"{name}_acc@{k}" for k in PLACES]
            cells.append(_joined(_range(runs, field, 100, 0) for field in fields))
        ranked = [f"{name}_rank" for name in ambiguity.NAMES[:2]]
        cells.append(_joined(_range(runs, field, 1, 0) for field in ranked))
        cells.append(_range(runs, "test_perplexity", 1, 2))
        lines.append(cells)
    return rows_lib.table(titles, lines)


def _range(runs, field, factor, digits):
    """Lowest-highest over the runs, or one number where they print alike."""
    values = [factor * summary[field] for summary in runs]
    ends = [f"{value:.{digits}f}" for value in (min(values), max(values))]
    return "-".join(dict.fromkeys(ends))


def _joined(parts):
    return " / ".join(str(part) for part in parts)
