"""The papers' tables: one command each, that can be stopped anywhere and goes on.

A table is a list of stages for each head and seed (tables.py). Each has a process of
its own (stage.py), and what it came to is a line of `reproduce.jsonl`:

    head, seed, stage, fingerprint
    begun             of a training that is under way or was cut short; nothing more
    failed            the reason, of a loss that is not finite or a lack of memory
    complete          whether the run that was measured had come to its end
    progress          how far it had come, if not
    steps, epochs, parameters, validations, step_ms ...     of a training; no step_ms
                      where others shared the device
    valid, test       perplexities, by `static`, `dynamic` and `cache`
    rank, bound, effective, divergence                      by `rank`
    step_ms, head_ms ...                                    by `time`
    elapsed, device, jax

The file alone says what is left to do; measurements also need the folders of the runs,
mos-seed28/train and mos-seed28/finetune, and train again what is no longer there.
"""

import json
import pathlib
from typing import Any

from softbottle.experiments import processes
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.reproduce import report, stage
from softbottle.experiments.reproduce.plan import Grid, Load, Plan, Unit
from softbottle.experiments.reproduce.tables import TABLES
from softbottle.training import checkpoint, lock

Row = dict[str, Any]
_ROWS = "reproduce.jsonl"
_OUTCOME = "outcome.json"


def read(workdir: pathlib.Path) -> dict[Unit, Row]:
    """The rows of a workdir; none where there is no file.

    Raises:
        ValueError: if a line is not a row.
    """
    return {_unit(row): row for row in rows_lib.read(workdir / _ROWS, _unit)}


def run(
    grid: Grid,
    workdir: pathlib.Path | str,
    load: Load,
    minutes: float | None = None,
    as_is: bool = False,
    untimed: bool = False,
) -> dict[Unit, Row]:
    """Do what is left of a table, in order, and write it.

    Args:
        grid: what is reproduced.
        workdir: where rows, runs and the table are.
        load: the config of a value of --config, such as `ptb:mos,et`.
        minutes: after which the stage under way is stopped; None for no limit.
        as_is: train nothing, and measure runs that were cut short as well.
        untimed: others share the device, so that times would mean nothing: trainings
            have none.

    Returns:
        All rows of the workdir, by unit.

    Raises:
        ValueError: for heads and settings that cannot be, for rows of other settings or
            of another text, for a stage that was refused, for a table of times that is
            not to be timed, and where another process is at work in the same workdir.
        metrics.UnfinishedError: at the end, for stages that ended without a result.
    """
    workdir = pathlib.Path(workdir)
    if untimed and TABLES[grid.table].words:
        raise ValueError(f"the table {grid.table!r} is of times; leave out --untimed.")
    plan, rows = Plan(grid, workdir, load), read(workdir)
    for unit, mark in plan.fingerprints.items():
        rows_lib.check(workdir / _ROWS, unit, rows.get(unit), mark)
    with lock.Lock(workdir):
        # Another process may have written since.
        return _finish(plan, workdir, read(workdir), minutes, as_is, untimed)


def _finish(plan, workdir, rows, minutes, as_is, untimed):
    """Do what can be done, write the table, and say what is left."""
    broken, tried = {}, set()

    def choose(seconds):
        del seconds
        queue = left(plan, rows, as_is)
        for unit in queue:
            if unit not in tried and _ready(plan, rows, unit, as_is):
                tried.add(unit)
                print(f"{unit}; to go: {len(queue)}", flush=True)
                return unit
        return None

    def do(unit, seconds):
        row, status = _row(plan, workdir, rows, unit, seconds)
        if row is None:
            return status
        if untimed and "step_ms" in row:
            row |= {"seconds": None, "step_ms": None}
        rows[unit] = row
        rows_lib.write(workdir / _ROWS, rows.values())
        report.write(plan, workdir, rows, left(plan, rows), broken)
        return None

    processes.one_by_one(minutes, broken, choose, do)
    queue = left(plan, rows)
    print(report.write(plan, workdir, rows, queue, broken))
    if queue:
        print("left: " + ", ".join(map(str, queue)))
    if cut := [unit for unit in left(plan, rows, True) if _was_cut(plan, rows, unit)]:
        print("with --as_is, of what was cut short: " + ", ".join(map(str, cut)))
    processes.check(broken)
    return rows


def left(plan: Plan, rows: dict[Unit, Row], as_is: bool = False) -> list[Unit]:
    """What is to be done, in order.

    Args:
        plan: of the table.
        rows: of the workdir.
        as_is: train nothing; what was measured of a run that was cut short is to be
            measured again if the run has better parameters since.
    """
    queue = [unit for unit in plan.units if not _done(plan, rows, unit, as_is)]
    if as_is:
        return [unit for unit in queue if plan.stage(unit).measure is not None]
    # What is measured and what is finetuned need the run itself, and so on.
    for unit in queue:
        start = plan.start(unit)
        if start is None or start in queue or not _ended(rows.get(start)):
            continue
        if _best_step(plan, start) is None:
            queue.append(start)
    return [unit for unit in plan.units if unit in queue]


def _done(plan, rows, unit, as_is):
    row = rows.get(unit)
    if row is None or "begun" in row:
        return False
    if row.get("complete", True):
        return True
    return as_is and row.get("step") == _best_step(plan, plan.start(unit))


def _ready(plan, rows, unit, as_is):
    """Whether a unit has what it starts from."""
    start = plan.start(unit)
    if start is None:
        return True
    if _best_step(plan, start) is None:
        return False
    return as_is or _ended(rows.get(start))


def _was_cut(plan, rows, unit):
    """Whether a unit measures a training that was cut short and left parameters."""
    start = plan.start(unit)
    begun = start is not None and "begun" in rows.get(start, {})
    return begun and _best_step(plan, start) is not None


def _ended(row):
    """Whether a training came to its end, and well."""
    return row is not None and "begun" not in row and "failed" not in row


def _best_step(plan, unit):
    """The step of a run's best parameters, None where it has none."""
    steps = checkpoint.sealed_steps(plan.folder(unit) / "best")
    return steps[-1] if steps else None


def _row(plan, workdir, rows, unit, seconds):
    """The row of a unit, None where there is none yet, and its process's status."""
    name = dict(zip(unit._fields, unit, strict=True))
    row = name | {"fingerprint": plan.fingerprints[unit]}
    start = plan.start(unit)
    if plan.stage(unit).measure is None:
        # Settings bind from the start: what is begun is resumed with the same ones.
        rows[unit] = row | {"begun": True}
        rows_lib.write(workdir / _ROWS, rows.values())
    elif start is not None:
        row["complete"] = _ended(rows.get(start))
        if not row["complete"]:
            row["progress"] = report.progress(plan, start)
    path = workdir / _OUTCOME
    path.unlink(missing_ok=True)
    status = stage.supervise(plan.task(unit), path, seconds)
    if not path.exists():
        return None, status
    outcome = json.loads(path.read_text())
    path.unlink()
    if "refused" in outcome:
        raise ValueError(f"{unit}: {outcome['refused']}")
    return row | outcome, status


def _unit(row):
    return Unit(row["head"], row["seed"], row["stage"])
