"""A table as a page: our numbers beside the published ones, and a picture of them."""

import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from softbottle import files
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.reproduce import plot
from softbottle.experiments.reproduce import published as published_lib
from softbottle.experiments.reproduce.plan import Plan, Unit
from softbottle.training import checkpoint, metrics

Row = dict[str, Any]
_MEASURED = "measured with float32 GEMMs"
_COUNTED = "random words in the batches of the MoS recipe, all positions real"


def write(
    plan: Plan,
    workdir: pathlib.Path,
    rows: Mapping[Unit, Row],
    queue: Sequence[Unit],
    broken: Mapping[Unit, str],
) -> str:
    """Write `workdir/TABLE.md` and its pictures.

    `TABLE.png` is there where K differs from head to head, `TABLE-curves.png` where
    trainings have validations.

    Args:
        plan: of the table.
        workdir: where it goes.
        rows: of the stages that are done or begun.
        queue: what is left.
        broken: why something is left, where that is known.

    Returns:
        The table.
    """
    table = numbers(plan, rows)
    partial = ": partial" if queue else ""
    text = [f"# {plan.table.title}{partial}", "", *_setting(plan, rows), "", table, ""]
    if shown := plot.panels(plan, rows):
        picture = f"{plan.grid.table}.png"
        plot.draw(shown).save(workdir / picture)
        text += [f"![By the components of the mixture]({picture})", ""]
    if trained := _runs(plan, rows):
        text += ["## Runs", "", trained, ""]
    if (figure := plot.curves(plan, rows)) is not None:
        picture = f"{plan.grid.table}-curves.png"
        figure.save(workdir / picture)
        text += [f"![Validation perplexity along the trainings]({picture})", ""]
    if timed := _steps(plan, rows):
        text += ["## Steps", "", timed, ""]
    own = {unit: rows[unit] for unit in plan.units if unit in rows}
    failed = [f"- {unit}: {row['failed']}" for unit, row in own.items() if _lost(row)]
    if failed:
        text += ["## Failed", "", *failed, ""]
    if queue:
        names = (f"- {unit}{_reason(plan, rows, unit, broken)}" for unit in queue)
        text += ["## Left", "", *names, ""]
    files.replace(workdir / f"{plan.grid.table}.md", "\n".join(text))
    return table


def numbers(plan: Plan, rows: Mapping[Unit, Row]) -> str:
    """The lines of every head: mean and deviation over the seeds, and the papers'."""
    titles = ["head", "what", "ours", "seeds", "published", "cut short"]
    lines: list[list[str]] = []
    sources: dict[str, int] = {}
    for head in plan.heads:
        for line in plan.table.lines:
            published = published_lib.find(plan.table.published, head, line.key)
            cited = [
                f"{value} [{sources.setdefault(source, len(sources) + 1)}]"
                for value, source in published
            ]
            ours, seeds, cut = _ours(plan, rows, head, line)
            lines.append([head, line.title, ours, seeds, "; ".join(cited), cut])
    listed = [f"- [{number}] {source}" for source, number in sources.items()]
    return "\n".join([rows_lib.table(titles, lines), "", *listed]).strip()


def _ours(plan, rows, head, line):
    """Cells of a line: mean and deviation, how many seeds, and what was cut short.

    Runs that were cut short count where no run of the head came to its end.
    """
    units = [u for u in plan.units if (u.head, u.stage) == (head, line.stage)]
    found = [rows[unit] for unit in units if line.field in rows.get(unit, {})]
    whole = [row for row in found if row.get("complete", True)]
    if found:
        values = [row[line.field] for row in whole or found]
        ours, seeds = rows_lib.spread(values, line.digits), str(len(values))
        cut = [] if whole else [(row["seed"], row["progress"]) for row in found]
    else:
        starts = [start for start in map(plan.start, units) if start]
        begun = [start for start in starts if "begun" in rows.get(start, {})]
        ours, seeds = "", ""
        cut = [(start.seed, progress(plan, start)) for start in begun]
    return ours, seeds, "; ".join(f"seed {seed}: {why}" for seed, why in cut)


def _setting(plan, rows):
    """What was run, on what, and how much of the recipe."""
    grid = plan.grid
    command = ["softbottle", "reproduce", grid.table, "--heads", ",".join(plan.heads)]
    if grid.seeds:
        command += ["--seeds", ",".join(map(str, grid.seeds))]
    if grid.scale != 1:
        command += ["--scale", f"{grid.scale:g}"]
    for name, value in grid.changes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        command += ["--set", f"{name}={'none' if value is None else text}"]
    own = [rows[unit] for unit in plan.units if unit in rows]
    devices = sorted({row["device"] for row in own if "device" in row})
    versions = sorted({row["jax"] for row in own if "jax" in row})
    lines = [f"    {shlex.join(command)}", ""]
    if grid.scale != 1:
        lines += [
            f"**At {grid.scale:g} of the recipe**: every training has that share of "
            "its epochs, and averaging",
            "and decay come at that share of theirs. Published numbers are of whole "
            "ones.",
            "",
        ]
    lines.append(
        f"{', '.join(devices) or 'no device yet'}, jax "
        f"{', '.join(versions) or 'unknown'}. Mean ± deviation over the seeds; "
        f"{_COUNTED if plan.table.words else _MEASURED}."
    )
    if plan.table.recipe is not None:
        lines += ["", *_evaluation(plan.table.recipe)]
    return lines


def _evaluation(recipe):
    """How the ways of evaluation were set."""
    mixture, single = (", ".join(map(str, sums)) for sums in recipe[:2])
    window, theta, share = recipe.pointer
    return [
        "Dynamic evaluation: learning rate, decay and epsilon in sums are "
        f"{mixture} for mixtures, {single} for others.",
        f"Neural cache: window {window:,}, theta {theta}, share {share}. Rank: at most "
        f"{recipe.positions:,} positions of the test text.",
    ]


def _runs(plan, rows):
    """The trainings, with how far each of them came."""
    titles = [
        *("run", "stage", "epochs", "averaging from", "learning rate", "steps"),
        *("parameters", "best validation", "ms per step", "minutes"),
    ]
    lines = []
    for unit in plan.units:
        row = rows.get(unit)
        if row is None or plan.stage(unit).measure is not None or _lost(row):
            continue
        cells = [unit.run, unit.stage]
        if "begun" in row:
            cells += [progress(plan, unit), *7 * [""]]
        else:
            optim, epochs = plan.config(unit).optim, plan.config(unit).train.epochs
            begins = {"et": f"epoch {optim.switch_epoch}", "now": "the start"}
            cells += [
                f"{row['epochs']} of {epochs}" if epochs else "",
                begins.get(optim.averaging, ""),
                f"{optim.learning_rate:g}",
                f"{row['steps']:,}",
                f"{row['parameters']:,}",
                f"{row['valid_perplexity']:.2f}",
                *_times(row),
            ]
        lines.append(cells)
    return rows_lib.table(titles, lines) if lines else ""


def _times(row):
    """Cells of a training: ms per step and minutes, none of a shared device."""
    if row["step_ms"] is None:
        return "", ""
    return f"{row['step_ms']:.2f}", f"{row['elapsed'] / 60:.1f}"


def _steps(plan, rows):
    """What was timed, by part and over the softmax on the same data."""
    titles = [
        *(
            "data",
            "head",
            "contexts",
            "tokens",
            "ms per step",
            "head",
            "recurrence",
            "rest",
        ),
        *("over softmax", "peak GiB"),
    ]
    timed = {unit: rows[unit] for unit in plan.units if "head_ms" in rows.get(unit, {})}
    softmax = {u.stage: row for u, row in timed.items() if u.head == "softmax"}
    lines = []
    for unit, row in sorted(timed.items(), key=lambda item: item[0].stage):
        parts = (row[f"{part}_ms"] for part in ("step", "head", "recurrence", "rest"))
        beside = softmax.get(unit.stage)
        lines.append(
            [
                *(unit.stage, unit.head, str(row["components"])),
                f"{row['tokens']:,}",
                *(f"{ms:.3f}" for ms in parts),
                f"{row['step_ms'] / beside['step_ms']:.2f}" if beside else "",
                f"{row['peak_bytes'] / 2**30:.2f}",
            ]
        )
    return rows_lib.table(titles, lines) if lines else ""


def progress(plan: Plan, unit: Unit) -> str:
    """How far a training that was cut short has come."""
    train, recorded = plan.config(unit).train, metrics.read(plan.folder(unit))
    valid = [line for line in recorded if line.get("valid_perplexity") is not None]
    saved = checkpoint.sealed_steps(plan.folder(unit) / "checkpoints")
    reached = f"cut short at step {max(saved, default=0):,}"
    if train.steps is not None:
        reached += f" of {train.steps:,}"
    if train.epochs is not None:
        epochs = valid[-1]["epoch"] if valid else 0
        reached += f", after {epochs:,} of {train.epochs:,} epochs"
    if valid:
        best = min(line["valid_perplexity"] for line in valid)
        reached += f", validation {best:.2f}"
    return reached


def _reason(plan, rows, unit, broken):
    """Why a unit is left, where that is known."""
    if unit in broken:
        return f": {broken[unit]}"
    start = plan.start(unit)
    if start is not None and _lost(rows.get(start, {})):
        return f": {start.stage} failed"
    row = rows.get(unit, {})
    if "begun" in row:
        return f": {progress(plan, unit)}"
    if not row.get("complete", True):
        return ": measured where the training was cut short, and again once it ends"
    return ""


def _lost(row):
    return "failed" in row
