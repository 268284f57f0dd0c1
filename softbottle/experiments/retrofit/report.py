"""The rows of a retrofit as a page.

Of an arm's learning rates the one with the best objective on the validation regions is
shown; the numbers are of the other regions, means over the seeds.

A mixture of softmaxes is judged against the mixture of as many contexts of the same
width and kind, which has its parameters and not its rank, and never against the
untouched model. Where that one was not run, it is judged against another mixture of
contexts, as heads without components are; the table names what was subtracted. A
difference has two deviations: over seeds, pooled over all arms of that width; and over
the text, from the paired differences of its regions. It counts if it is below -0.01
nats and beyond three of the larger one. With a narrow table a head is also judged by
its divergence from the model's own head, against the softmax of the same flop and that
of the same parameters.
"""

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from softbottle import files
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.retrofit.arms import OWN, SOFTMAX
from softbottle.experiments.retrofit.data import Problem

Row = dict[str, Any]
EFFECT, DEVIATIONS = -0.01, 3.0
RULE = (
    "Decision rule, written before any run: there is an effect if the held-out loss "
    f"of MoS minus that of MoC is below {EFFECT} nats and beyond {DEVIATIONS:g} "
    "deviations (the larger of that over seeds and that over regions of the text). MoS "
    "minus the untouched model proves nothing: MoC has the same parameters. No effect "
    "is a result."
)
COST_RULE = (
    "A narrow head gives something back if its KL to the model's own head is below "
    "that of the softmax of equal flop and that of equal parameters, each by "
    f"{-EFFECT} nats and {DEVIATIONS:g} deviations."
)


class Point(NamedTuple):
    """An arm at a width and its best rate; `rates` are all that were tried."""

    arm: str
    asked: int | None
    runs: list[Row]
    rates: tuple[float, ...]

    @property
    def width(self) -> int:
        """Of its table."""
        return self.runs[0]["width"]

    @property
    def edge(self) -> str:
        """Which end of the rates the best one is, if there are several."""
        best = self.runs[0]["rate"]
        ends = {"lowest": self.rates[0], "highest": self.rates[-1]}
        at = [name for name, rate in ends.items() if rate == best]
        return at[0] if len(self.rates) > 1 and at else ""

    def mean(self, field: str) -> float:
        """The mean over seeds; NaN where a run does not have the field."""
        values = [row.get(field, math.nan) for row in self.runs]
        return math.nan if None in values else statistics.fmean(values)


class Difference(NamedTuple):
    """A head against its capacity control; nats, negative if it is better.

    `fair` is whether the same rates were tried for both, `edge` the end of them at
    which one of the two was best, and `least` the smaller number of seeds.
    """

    arm: str
    control: str
    width: int
    nats: float
    seeds: float
    text: float
    fair: bool
    edge: str
    least: int

    @property
    def verdict(self) -> str:
        """By the decision rule."""
        if not self.fair:
            return "undecided: not the same rates were tried"
        deviation = np.nanmax([self.seeds, self.text])
        if self.least < 2 or not np.isfinite(deviation) or math.isnan(self.seeds):
            return "one seed decides nothing"
        if abs(self.nats) <= DEVIATIONS * deviation or abs(self.nats) < -EFFECT:
            said = "no effect"
        else:
            said = "an effect" if self.nats < 0 else "worse"
        return f"{said}, at the {self.edge} rate tried" if self.edge else said


def best_rate(rows: Sequence[Row], arm: str, asked: int | None) -> float | None:
    """The rate of an arm with the best validation; None without runs."""
    losses = {
        row["rate"]: row["valid"]
        for row in rows
        if (row["arm"], row["asked_width"], row["seed"]) == (arm, asked, 0)
        and "failed" not in row
    }
    return min(losses, key=losses.__getitem__) if losses else None


def points(rows: Sequence[Row]) -> list[Point]:
    """Every arm and width that has a run, at its best rate, the model's own first."""
    cases = dict.fromkeys((row["arm"], row["asked_width"]) for row in rows)
    found = []
    for arm, asked in cases:
        rate = best_rate(rows, arm, asked)
        runs = [
            row
            for row in rows
            if (row["arm"], row["asked_width"], row["rate"]) == (arm, asked, rate)
            and "failed" not in row
        ]
        tried = {
            row["rate"]
            for row in rows
            if (row["arm"], row["asked_width"]) == (arm, asked)
        }
        if runs:
            found.append(Point(arm, asked, runs, tuple(sorted(tried))))
    return sorted(found, key=lambda point: point.arm != OWN)


def differences(found: Sequence[Point]) -> list[Difference]:
    """Losses of every arm but softmaxes and MoC less that of a MoC of its width."""
    compared = []
    for same in _by_width(found):
        controls = {point.arm: point for point in same if point.arm.startswith("moc")}
        if not controls:
            continue
        first = next(iter(controls.values()))
        for point in same:
            if point.arm in controls or point.arm.startswith(SOFTMAX):
                continue
            control = controls.get(point.arm.replace("mos", "moc"), first)
            compared.append(_difference(point, control, same, "loss", "regions"))
    return compared


def against_costs(found: Sequence[Point]) -> list[Difference]:
    """Divergences from the model's own head less those of the softmaxes matched."""
    compared = []
    for same in _by_width(found):
        by_arm = {point.arm: point for point in same}
        for point in same:
            rival = by_arm.get(point.arm.partition(":")[2])
            if rival is not None:
                compared.append(_difference(rival, point, same, "kl", "kl_regions"))
    return compared


def _by_width(found):
    """Points that may be compared: of one width that was asked for."""
    for asked in dict.fromkeys(point.asked for point in found):
        yield [point for point in found if point.asked == asked and point.arm != OWN]


def _difference(point, control, same, field, regions):
    counts = len(point.runs), len(control.runs)
    return Difference(
        point.arm,
        control.arm,
        point.width,
        point.mean(field) - control.mean(field),
        _noise(same, field) * math.sqrt(sum(1 / count for count in counts)),
        _text_deviation(point, control, regions),
        point.rates == control.rates,
        point.edge or control.edge,
        min(counts),
    )


def write(
    workdir: pathlib.Path, problem: Problem, rows: Sequence[Row], missing: list[str]
) -> str:
    """Write `retrofit.md`.

    Args:
        workdir: where it goes.
        problem: what the rows are of.
        rows: of the runs that are finished.
        missing: the runs that are not.

    Returns:
        The tables.
    """
    found = points(rows)
    if not found:
        return "no run is finished yet."
    compared = differences(found)
    tables = [table(found)]
    if compared:
        tables += ["", verdicts(compared)]
    heading = f"# Other heads on {problem.name}" + (": partial" if missing else "")
    text = [heading, "", *_setting(problem, rows), "", "## Held-out text", ""]
    text += [
        table(found),
        "",
        "![](retrofit.png)",
        "",
        "![](retrofit-words.png)",
        "",
        "## Against MoC",
        "",
        RULE,
        "",
    ]
    if compared:
        text += [verdicts(compared), ""]
    else:
        text += ["No arm `moc-K` was run beside others: nothing is decided.", ""]
    matched = against_costs(found)
    if matched:
        tables += ["", verdicts(matched)]
        text += ["## Against a softmax of the same cost", "", COST_RULE, ""]
        text += [verdicts(matched), ""]
    text += ["## Components", "", components(found), ""]
    failed = [row for row in rows if "failed" in row]
    if failed:
        text += ["## Failed", "", *map(_failure, failed), ""]
    if missing:
        text += ["## Missing", "", *(f"- {name}" for name in missing), ""]
    files.replace(workdir / "retrofit.md", "\n".join(text))
    return "\n".join(tables)


def table(found: Sequence[Point]) -> str:
    """The points as a Markdown table."""
    titles = [
        *("arm", "width", "rate", "seeds", "loss", "minus own", "KL to own", "start"),
        *("rank", "parameters", "table MB", "Mflop per token", "ms per step"),
    ]
    own = next((point.mean("loss") for point in found if point.arm == OWN), math.nan)
    lines: list[list[str]] = []
    for point in found:
        row = point.runs[0]
        lines.append(
            [
                *(
                    point.arm,
                    str(point.width),
                    f"{row['rate']:g}",
                    str(len(point.runs)),
                ),
                rows_lib.spread([run["loss"] for run in point.runs], 4),
                f"{point.mean('loss') - own:+.4f}",
                rows_lib.spread([run["kl"] for run in point.runs], 4),
                _number(row.get("start_loss"), ".4f"),
                _ranks(point),
                f"{row['parameters']:,}",
                f"{row['table_bytes'] / 1e6:.1f}",
                f"{row['flop'] / 1e6:.1f}",
                _number(row.get("step_ms"), ".1f"),
            ]
        )
    return rows_lib.table(titles, lines)


def verdicts(compared: Sequence[Difference]) -> str:
    """The differences as a Markdown table."""
    titles = ["arm", "width", "minus", "nats", "deviation: seeds", "text", "verdict"]
    lines = [
        [
            *(each.arm, str(each.width), each.control, f"{each.nats:+.4f}"),
            *(_number(each.seeds, ".4f"), _number(each.text, ".4f"), each.verdict),
        ]
        for each in compared
    ]
    return rows_lib.table(titles, lines)


def components(found: Sequence[Point]) -> str:
    """Mean weights and responsibilities of the first seed, the largest first."""
    titles = ["arm", "width", "weights", "entropy", "given the word", "entropy"]
    lines = []
    for point in found:
        row = point.runs[0]
        if "prior" not in row:
            continue
        cells = [point.arm, str(point.width)]
        for field, entropy in (
            ("prior", "prior_entropy"),
            ("responsibilities", "responsibility_entropy"),
        ):
            shares = " ".join(f"{share:.3f}" for share in row.get(field, ()))
            cells += [shares, _number(row.get(entropy), ".3f")]
        lines.append(cells)
    return rows_lib.table(titles, lines) if lines else "No arm has components."


def _noise(same, field):
    """The deviation over seeds, pooled over arms; NaN with one seed each."""
    variances = [
        statistics.variance([row[field] for row in point.runs])
        for point in same
        if len(point.runs) > 1
    ]
    return math.sqrt(statistics.fmean(variances)) if variances else math.nan


def _text_deviation(point, control, field):
    """The standard error of the difference over regions, means over the seeds."""
    both = [
        np.mean([row[field] for row in each.runs], axis=0) for each in (point, control)
    ]
    gaps = both[0] - both[1]
    if len(gaps) < 2:
        return math.nan
    return float(np.std(gaps, ddof=1) / math.sqrt(len(gaps)))


def _setting(problem, rows):
    # One that failed does not have all.
    row = max(rows, key=lambda row: "failed" not in row)
    trained = {
        "words": "the next word",
        "distill": "KL from the model's own head",
        "both": "the next word plus KL from the model's own head",
    }[row["objective"]]
    if row["trunk_rate"] is not None:
        kept = f"Trunk and table are trained, at {row['trunk_rate']:g}."
    elif row["freeze"] == "table":
        kept = "Trunk, table and bias are frozen."
    else:
        kept = "The trunk is frozen; table and bias are trained."
    sizes = [len(part) for part in (problem.train, problem.valid, problem.heldout)]
    return [
        *(f"- {fact}" for fact in problem.facts),
        "- Whether the model saw these texts in its own training is not known: its "
        "loss on them may be that of memory (contamination).",
        f"- {sizes[0]:,} states to train on, {sizes[1]:,} to choose the rate by, "
        f"{sizes[2]:,} held out, by regions of the text.",
        f"- Objective: {trained}. {kept} {row['steps']:,} steps of {row['batch']:,} "
        f"tokens, products in {row['compute_dtype']}, {row['device']}, jax "
        f"{row['jax']}.",
        "- The rate is the best by the validation regions; `start` is the loss at step "
        "0, `table MB` in bfloat16, flop those of the head, rank that of log P on "
        f"{row.get('rank_positions', 0):,} positions.",
    ]


def _ranks(point):
    """Of all seeds; the sample is named where it is the limit."""
    ranks = [row["rank"] for row in point.runs]
    told = "-".join(dict.fromkeys(f"{end:,}" for end in (min(ranks), max(ranks))))
    return f"{told}, all" if max(ranks) == point.runs[0]["rank_positions"] else told


def _failure(row):
    return f"- {row['arm']} at {row['rate']:g}, seed {row['seed']}: {row['failed']}"


def _number(value, form):
    if value is None or not math.isfinite(value):
        return ""
    return format(value, form)
