"""Heads by what they cost: perplexity against time, parameters and memory.

Every arm (arms.py) with every setting, a learning rate, a gain and a rate of the word
tables, is an ordinary run in a folder of its own (trial.py). A finished run is a line
of `frontier.jsonl` and its folder is deleted: the file alone says what is left to do,
on any machine. A line has

    arm, head, learning_rate, seed, parameters, steps
    gain              of the states, model.gain; 1 where a line has none
    table_rate        the learning rate of the word tables over that of all else; 1
                      where a line has none
    flop              6 flop per token and parameter of all steps (model.step_flop)
    seconds           of training: steps times the median of step_ms. Neither
                      compilation nor validations nor checkpoints are in it. Null
                      where others shared the device, as is step_ms
    step_ms           median over the run's windows of train.log_every steps of the wall
                      time per step
    elapsed           wall seconds of the whole run, its process and evaluation included
    peak_bytes        the most that the run's process held on its device; null where
                      the device does not count it, as a CPU
    train_loss        of the last two windows of train.log_every steps
    valid_loss, valid_perplexity      the best validation
    test_loss, test_perplexity        of the parameters of that validation
    validations       [step, loss] of each
    deciles           words, tokens and test loss by the frequency of the word in the
                      training text, from the most frequent tenth of its tokens on
    device, jax
    fingerprint       a hash of the settings and the text

or, of a run that lost its loss or did not fit into memory, `failed` with the reason.

Runs come in rounds: the arms of the first question with the first setting and seed, the
other arms, all arms with the other settings, and last the other seeds of the arms that
matter, each with its best setting.
"""

import itertools
import math
import pathlib
import shutil
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from softbottle import config as config_lib
from softbottle.data import corpus as corpus_lib
from softbottle.data import lines
from softbottle.experiments import processes
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.frontier import plot, trial
from softbottle.experiments.frontier import report as report_lib
from softbottle.experiments.frontier.arms import (
    ARMS,
    SEVERAL_SEEDS,
    Key,
    Setting,
    Variant,
    Variants,
    check_names,
)
from softbottle.training import lock, metrics

Row = dict[str, Any]
_ROWS = "frontier.jsonl"
_DIGITS = 9  # of a quotient that is a setting


class Grid(NamedTuple):
    """What is to be compared.

    Attributes:
        arms: names of arms.ARMS.
        rates: learning rates of every arm.
        seeds: the first for all, the others for `arms.SEVERAL_SEEDS`.
        gains: values of `model.gain` for every arm; None for the config's alone.
        table_rates: learning rates of the word tables over those of all else, for
            every arm; None for the config's alone.
    """

    arms: Sequence[str] = tuple(ARMS)
    rates: Sequence[float] = (0.002, 0.004)
    seeds: Sequence[int] = (0,)
    gains: Sequence[float] | None = None
    table_rates: Sequence[float] | None = None


def plan(grid: Grid, rows: Sequence[Row]) -> list[Key]:
    """All runs in their order; the settings of the last round depend on the rows.

    Without gains and table rates those of the rows are meant, or 1 if there is no row.
    """
    arms = [name for name in ARMS if name in grid.arms]
    arms.sort(key=lambda name: not ARMS[name].first)
    seed, *others = grid.seeds
    more = _gains_and_table_rates(grid, rows)
    settings = [Setting(rate, *values) for rate in grid.rates for values in more]
    keys = [_with(arm, setting, seed) for setting in settings for arm in arms]
    for other in others:
        for arm in SEVERAL_SEEDS:
            if arm in arms:
                best = report_lib.best_setting(rows, arm) or settings[0]
                keys.append(_with(arm, best, other))
    return keys


def missing(grid: Grid, rows: Sequence[Row]) -> list[Key]:
    """The runs of a plan that have no row."""
    done = {_key(row) for row in rows}
    return [key for key in plan(grid, rows) if key not in done]


def read(workdir: pathlib.Path | str) -> list[Row]:
    """The rows of finished runs; none where there is no file.

    Raises:
        ValueError: if a line is not a row.
    """

    def mark(row):
        return _key(row), row["fingerprint"]

    rows = rows_lib.read(pathlib.Path(workdir) / _ROWS, mark)
    # Files that were joined may both have a run: it is one seed.
    return list({mark(row): row for row in rows}.values())


def run(
    config: config_lib.Config,
    workdir: pathlib.Path | str,
    grid: Grid,
    minutes: float | None = None,
    keep: bool = False,
    untimed: bool = False,
) -> list[Row]:
    """Train what has no row yet, in order, and draw the frontier.

    Args:
        config: the settings that all runs share.
        workdir: where rows, runs and report are.
        grid: what is compared.
        minutes: after which the run under way is stopped; a run that is not expected
            to end in time is not started. None for no limit.
        keep: leave the folders of finished runs.
        untimed: others share the device, so that times would mean nothing: the rows
            have none.

    Returns:
        All rows, those of earlier calls included.

    Raises:
        ValueError: before anything is trained, for an arm that there is not or that
            cannot be made, for rows of other settings or of another text, and where
            another process is at work in the same workdir; later, for a run that is
            refused, as one that was begun with other settings is.
        metrics.UnfinishedError: at the end, for runs that ended without a result.
    """
    workdir, rows = pathlib.Path(workdir), read(workdir)
    check_names(grid.arms)
    if grid.gains is None:
        grid = grid._replace(gains=[config.model.gain])
    if grid.table_rates is None:
        rate = config.optim.learning_rate
        over = (config.optim.table_learning_rate or rate) / rate
        # 0.009 / 0.003 is 3, the setting that --table_rates calls so.
        grid = grid._replace(table_rates=[round(over, _DIGITS)])
    corpus = corpus_lib.load(config.data)
    vocab, text = len(corpus.vocab), corpus_lib.digest(corpus)
    stream = lines.stream(config.data, corpus.vocab, corpus.train, config.seed)
    variants = Variants(config, vocab, stream.steps_per_epoch, text)
    for key in plan(grid, rows):
        variants.make(*key)
    broken: dict[Key, str] = {}

    def choose(left):
        runs = {key: variants.make(*key) for key in missing(grid, rows)}
        waits = {key: _expected(key, runs[key], rows, workdir) for key in runs}
        ready = [key for key in runs if key not in broken and waits[key] < left]
        if not ready:
            return None
        print(f"{ready[0]}: {len(runs)} runs to go{_told(waits[ready[0]])}", flush=True)
        return ready[0]

    def do(key, seconds):
        variant, folder = variants.make(*key), workdir / str(key)
        values, began = config_lib.to_dict(variant.config), time.monotonic()
        status = trial.supervise(values, folder, vocab, seconds)
        outcome = trial.outcome(folder)
        if outcome is None:
            return status
        if "refused" in outcome:
            raise ValueError(f"{key}: {outcome['refused']}")
        spent = round(time.monotonic() - began, 3)
        if untimed and "failed" not in outcome:
            outcome |= {"seconds": None, "step_ms": None}
        rows.append(_row(key, variant, outcome, spent))
        rows_lib.write(workdir / _ROWS, rows)
        report_lib.write_table(workdir, rows, _named(grid, rows, broken))
        if not keep:
            shutil.rmtree(folder)
        return None

    with lock.Lock(workdir):
        # Another process may have written since.
        rows = read(workdir)
        _check(workdir, rows, variants)
        processes.one_by_one(minutes, broken, choose, do)
        report(workdir, grid, broken)
    processes.check(broken)
    return rows


def _check(workdir, rows, variants):
    """Raise ValueError for a row of other settings, whether it was asked for or not.

    All rows of a workdir are compared in one table.
    """
    for row in rows:
        if row["arm"] in ARMS:
            key = _key(row)
            mark = variants.make(*key).fingerprint
            rows_lib.check(workdir / _ROWS, key, row, mark)


def report(
    workdir: pathlib.Path | str,
    grid: Grid | None,
    broken: dict[Key, str] | None = None,
) -> None:
    """Draw the rows that there are, print their table, and say what is missing.

    Args:
        workdir: where the rows are and the report goes.
        grid: what was to be compared; None for what there is.
        broken: why runs have no row, where that is known.
    """
    workdir, rows = pathlib.Path(workdir), read(workdir)
    named = {} if grid is None else _named(grid, rows, broken or {})
    if rows:
        print(report_lib.write_table(workdir, rows, named))
        plot.draw(rows).save(workdir / "frontier.png")
        plot.cover(rows).save(workdir / "frontier-cover.png")
        for field in ("gain", "table_rate"):
            if (tried := plot.by_setting(rows, field)) is not None:
                tried.save(workdir / f"frontier-{field.replace('_', '-')}.png")
    else:
        print("no run is finished yet.")
    for line in report_lib.gaps(named):
        print(f"missing: {line}")


def _named(grid, rows, broken):
    """The runs that are missing, and why if that is known."""
    return {key: broken.get(key, "") for key in missing(grid, rows)}


def _gains_and_table_rates(grid, rows):
    """The pairs that a grid asks for; of what it leaves open those of the rows."""
    known = {(key.gain, key.table_rate) for key in map(_key, rows)} or {(1.0, 1.0)}
    if not grid.gains and not grid.table_rates:
        return sorted(known)
    gains, tables = (sorted(set(values)) for values in zip(*known, strict=True))
    return [*itertools.product(grid.gains or gains, grid.table_rates or tables)]


def _row(key: Key, variant: Variant, outcome: Row, spent: float) -> Row:
    # A run that resumed has spent time in earlier processes, which the outcome knows.
    elapsed = max(spent, outcome.get("elapsed", 0.0))
    return {
        "arm": key.arm,
        "head": variant.head,
        "learning_rate": key.rate,
        "seed": key.seed,
        "gain": key.gain,
        "table_rate": key.table_rate,
        "parameters": variant.parameters,
        "steps": variant.steps,
        "flop": variant.flop,
        "fingerprint": variant.fingerprint,
        **outcome,
        "elapsed": elapsed,
    }


def _key(row):
    return _with(row["arm"], report_lib.setting(row), row["seed"])


def _with(arm: str, setting: Setting, seed: int) -> Key:
    return Key(arm, setting.rate, seed, setting.gain, setting.table_rate)


def _expected(key, variant, rows, workdir):
    """Seconds that a run will take: as its arm took, or the arm nearest in flop."""
    ended = [row for row in rows if "failed" not in row]
    if not ended:
        return 0.0
    own = [row["elapsed"] for row in ended if row["arm"] == key.arm]
    if own:
        seconds = statistics.median(own)
    else:
        nearest = min(ended, key=lambda row: abs(math.log(row["flop"] / variant.flop)))
        seconds = nearest["elapsed"] * variant.flop / nearest["flop"]
    recorded = metrics.read(workdir / str(key))
    done = recorded[-1]["step"] / variant.steps if recorded else 0.0
    return seconds * (1 - done)


def _told(seconds):
    return f", {seconds / 60:.1f} minutes expected" if seconds else ""
