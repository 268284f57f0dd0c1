"""The frontier's rows as a table.

Of an arm's settings the one with the lowest validation loss is shown, and no test text
has a say in it. With several seeds of it the numbers are their means. A run that was
not timed has the time of the arm's others, which neither setting nor seed changes.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from softbottle import files
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.frontier.arms import ARMS, REFERENCE, SOFTMAX, Key, Setting

Row = dict[str, Any]
# Budgets of time over the softmax's, each of which has a recommendation.
BUDGETS = (1.0, 1.1, 1.3, 2.0, math.inf)
# Fields of a setting that have a table and a picture of their own, in words.
SETTINGS = {
    "gain": "the factor on the state",
    "table_rate": "the learning rate of the word tables, over that of all else",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """An arm with its best setting, means over the seeds."""

    arm: str
    head: str
    setting: Setting
    runs: list[Row]

    def mean(self, field: str) -> float:
        """The mean of a field; NaN where a run does not have it."""
        values = [row[field] for row in self.runs]
        return math.nan if None in values else statistics.fmean(values)

    @property
    def loss(self) -> float:
        """The test loss."""
        return statistics.fmean(row["test_loss"] for row in self.runs)

    @property
    def perplexity(self) -> float:
        """The mean of the seeds' test perplexities."""
        return statistics.fmean(row["test_perplexity"] for row in self.runs)


def setting(row: Row) -> Setting:
    """What was tried in a run; rows of before there was a setting have 1."""
    more = (row.get("gain", 1.0), row.get("table_rate", 1.0))
    return Setting(row["learning_rate"], *more)


def best_setting(rows: Sequence[Row], arm: str) -> Setting | None:
    """The setting of an arm with the lowest validation loss; None without runs.

    Those with the seed that most settings have are compared, on all seeds they share.
    """
    losses: dict[Setting, dict[int, float]] = {}
    for row in rows:
        if row["arm"] == arm and "failed" not in row:
            by_seed = losses.setdefault(setting(row), {})
            by_seed[row["seed"]] = row["valid_loss"]
    if not losses:
        return None
    seeds = [seed for by_seed in losses.values() for seed in by_seed]
    usual = max(sorted(set(seeds)), key=seeds.count)
    losses = {tried: by_seed for tried, by_seed in losses.items() if usual in by_seed}
    shared = set.intersection(*(set(by_seed) for by_seed in losses.values()))

    def loss(tried):
        by_seed = losses[tried]
        return statistics.fmean(by_seed[seed] for seed in shared)

    return min(losses, key=loss)


def points(rows: Sequence[Row]) -> list[Point]:
    """Every arm that has a run, with its best setting, in the arms' order."""
    order = {arm: place for place, arm in enumerate(ARMS)}
    arms = dict.fromkeys(row["arm"] for row in rows)
    found = []
    for arm in sorted(arms, key=lambda arm: order.get(arm, len(order))):
        best = best_setting(rows, arm)
        if best is None:
            continue
        ended = [row for row in rows if row["arm"] == arm and "failed" not in row]
        timed = [row["seconds"] for row in ended if row["seconds"] is not None]
        mean = statistics.fmean(timed) if timed else None
        runs = [
            row | {"seconds": mean} if row["seconds"] is None else row
            for row in ended
            if setting(row) == best
        ]
        found.append(Point(arm, runs[0]["head"], best, runs))
    return found


def by_setting(rows: Sequence[Row], field: str) -> dict[str, dict[float, float]]:
    """Mean test perplexity by arm and one field of `Setting`, of arms with several.

    The other fields of an arm are those with the most values tried, of these the ones
    with the lowest validation loss. Means are over the seeds that all values have, or
    over those of each where they share none.
    """
    found: dict[str, dict[float, float]] = {}
    for arm in (point.arm for point in points(rows)):
        others: dict[Setting, dict[float, list[Row]]] = {}
        for row in rows:
            if row["arm"] == arm and "failed" not in row:
                value = getattr(setting(row), field)
                by_value = others.setdefault(setting(row)._replace(**{field: 1.0}), {})
                by_value.setdefault(value, []).append(row)
        tried = max(others.values(), key=_tried)
        if len(tried) > 1:
            seeds = ({row["seed"] for row in runs} for runs in tried.values())
            shared = set.intersection(*seeds)
            found[arm] = {
                value: statistics.fmean(
                    row["test_perplexity"]
                    for row in tried[value]
                    if row["seed"] in shared or not shared
                )
                for value in sorted(tried)
            }
    return found


def write_table(
    workdir: pathlib.Path, rows: Sequence[Row], missing: Mapping[Key, str]
) -> str:
    """Write `workdir/frontier.md`.

    Args:
        workdir: where it goes.
        rows: of the runs that are finished.
        missing: those that are not, and why if that is known.

    Returns:
        The table.
    """
    found = points(rows)
    here = {point.arm for point in found}
    absent = [
        arm
        for arm in ARMS
        if arm not in here and any(key.arm == arm for key in missing)
    ]
    heading = "# The frontier"
    if absent:
        heading += f": partial, without {', '.join(absent)}"
    elif missing:
        heading += ": partial, some runs are missing"
    text = [heading, "", *_about(rows), "", table(found), ""]
    if any(point.arm == SOFTMAX and point.mean("seconds") > 0 for point in found):
        text += ["## Which head for how much time", "", recommendations(found), ""]
    text += ["## Validation perplexity along the training", "", along(found), ""]
    for field, title in SETTINGS.items():
        if tried := by_setting(rows, field):
            text += [f"## Test perplexity by {title}", "", _values(tried), ""]
    failed = [row for row in rows if "failed" in row]
    if failed:
        text += ["## Failed", "", *map(_failure, failed), ""]
    if missing:
        text += ["## Missing", "", *(f"- {line}" for line in gaps(missing)), ""]
    files.replace(workdir / "frontier.md", "\n".join(text))
    return table(found)


def gaps(missing: Mapping[Key, str]) -> list[str]:
    """A line for each setting and seed with the arms that have no run of it.

    Args:
        missing: the runs, and why each is missing if that is known.
    """
    lines: dict[str, list[str]] = {}
    for key, why in missing.items():
        place = f"{_named(key)}, seed {key.seed}"
        told = f"{key.arm} ({why})" if why else key.arm
        lines.setdefault(place, []).append(told)
    return [f"{place}: {', '.join(arms)}" for place, arms in lines.items()]


def table(found: Sequence[Point]) -> str:
    """The points as a Markdown table, the lowest perplexity first."""
    titles = [
        *("arm", "head", "rate", "model.gain", "tables' rate over it", "seeds"),
        *("test perplexity", "validation"),
        *("training", "seconds", "over softmax", "parameters", "peak GiB"),
        "share of the gain",
    ]
    by_arm = {point.arm: point for point in found}
    softmax, reference = by_arm.get(SOFTMAX), by_arm.get(REFERENCE)
    lines: list[list[str]] = []
    for point in sorted(found, key=lambda point: point.perplexity):
        ratio = share = None
        if softmax:
            ratio = point.mean("seconds") / softmax.mean("seconds")
            ratio = None if math.isnan(ratio) else ratio
        if softmax and reference and softmax.loss > reference.loss:
            share = (softmax.loss - point.loss) / (softmax.loss - reference.loss)
        seconds, peak = point.mean("seconds"), point.mean("peak_bytes")
        cells = [
            *(point.arm, f"`{point.head}`"),
            *(f"{value:g}" for value in point.setting),
            str(len(point.runs)),
            rows_lib.spread([row["test_perplexity"] for row in point.runs]),
            rows_lib.spread([row["valid_perplexity"] for row in point.runs]),
            _training(point),
            "" if math.isnan(seconds) else f"{seconds:.4g}",
            "" if ratio is None else f"{ratio:.2f}",
            f"{point.runs[0]['parameters']:,}",
            "" if math.isnan(peak) else f"{peak / 2**30:.2f}",
            "" if share is None else f"{share:.0%}",
        ]
        lines.append(cells)
    return rows_lib.table(titles, lines)


def recommendations(found: Sequence[Point]) -> str:
    """For each budget of time the arm with the lowest validation loss within it."""
    (softmax,) = (point for point in found if point.arm == SOFTMAX)
    titles = ["training time over softmax, at most", "best by validation"]
    titles += ["over softmax", "test perplexity"]
    lines: list[list[str]] = []
    for budget in BUDGETS:
        ratios = {
            point: point.mean("seconds") / softmax.mean("seconds") for point in found
        }
        # An arm without a time is within no budget but any.
        within = [
            point for point in found if ratios[point] <= budget or math.isinf(budget)
        ]
        best = min(within, key=lambda point: point.mean("valid_loss"))
        limit = "any" if math.isinf(budget) else f"{budget:g}"
        ratio = "" if math.isnan(ratios[best]) else f"{ratios[best]:.2f}"
        cells = [limit, best.arm, ratio, f"{best.perplexity:.2f}"]
        lines.append(cells)
    return rows_lib.table(titles, lines)


def along(found: Sequence[Point]) -> str:
    """The validations of every arm's first seed by the share of its steps."""
    size = max(len(point.runs[0]["validations"]) for point in found) if found else 0
    titles = ["arm", *(f"{part}/{size}" for part in range(1, size + 1))]
    lines: list[list[str]] = []
    for point in found:
        losses = [loss for _, loss in point.runs[0]["validations"]]
        lines.append([point.arm, *(f"{math.exp(loss):.2f}" for loss in losses)])
    return rows_lib.table(titles, lines)


def _tried(by_value):
    """How much was tried, and how well it went."""
    losses = (row["valid_loss"] for runs in by_value.values() for row in runs)
    return len(by_value), -min(losses)


def _values(tried):
    values = sorted(set().union(*tried.values()))
    lines = [
        [arm, *(f"{found[value]:.2f}" if value in found else "" for value in values)]
        for arm, found in tried.items()
    ]
    return rows_lib.table(["arm", *(f"{value:g}" for value in values)], lines)


def _training(point):
    """The perplexity at the end of training, of the runs that have noted it."""
    losses = [row["train_loss"] for row in point.runs if row.get("train_loss")]
    return rows_lib.spread([math.exp(loss) for loss in losses]) if losses else ""


def _about(rows):
    devices = sorted({row["device"] for row in rows if "device" in row})
    versions = sorted({row["jax"] for row in rows if "jax" in row})
    return [
        f"{', '.join(devices) or 'no device'}, jax {', '.join(versions) or 'unknown'}. "
        "Settings are the best by validation.",
        "Seconds are steps times the median step, without compilation and validations.",
        "Training is the perplexity of a run's own last batches.",
        "A triangle in a picture is off the scale, with its perplexity beside it.",
        f"Shares are of the nats that {REFERENCE} gains over {SOFTMAX}.",
    ]


def _failure(row):
    where = _named(setting(row))
    return f"- {row['arm']}, {where}, seed {row['seed']}: {row['failed']}"


def _named(tried: Setting | Key) -> str:
    """A setting in words, without what it leaves as it is."""
    words = [f"rate {tried.rate:g}"]
    if tried.gain != 1:
        words.append(f"gain {tried.gain:g}")
    if tried.table_rate != 1:
        words.append(f"tables at {tried.table_rate:g} times")
    return ", ".join(words)
