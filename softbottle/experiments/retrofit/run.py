"""Other heads on a model that exists: what do they gain over its own?

A pretrained model's states along a text are computed once (analysis/sources/trunk.py)
and heads are trained on them (arms.py, trial.py): the trunk is frozen. A finished run
is a line of `retrofit.jsonl`; the file alone says what is left to do, on any machine. A
line has

    arm, asked_width, width      the arm, the table's width that was asked for (null is
                      as wide as the states) and that it has
    rate, seed        learning rate; of the head's start and the order of the batches
    head              what the arm is
    start_loss        held-out loss at step 0: the model's own, at full width
    loss              held-out loss, in nats
    valid             the objective on the regions of held-out text that choose the rate
    kl, start_kl      KL(own || head) on the held-out text, and at step 0
    deciles           words, tokens and loss by frequency of the next word
    regions, kl_regions          loss and KL of stretches of the held-out text
    rank, effective_rank, rank_positions    of log P on some of the held-out text
    prior, responsibilities, and their entropies    mean by component, largest first
    parameters, table_bytes, flop           of the head (arms.Costs)
    step_ms, seconds  median per step; of all steps, without compilation
    elapsed           wall seconds with compilation and evaluation
    objective, freeze, batch, steps, compute_dtype, device, jax
    trunk_rate        null where the trunk is frozen
    fingerprint       a hash of the settings and of what the states are of

or `failed` with the reason. The first line is the model's own head, `own`.

Every arm is trained at every rate with the first seed, and with the other seeds at its
best rate, by `valid`.
"""

import hashlib
import io
import json
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from softbottle import files
from softbottle.analysis.capture import Capture
from softbottle.experiments import processes
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.retrofit import arms as arms_lib
from softbottle.experiments.retrofit import data, plot, report, scores, trial
from softbottle.experiments.retrofit.arms import OWN, SOFTMAX, Start
from softbottle.experiments.retrofit.data import Problem
from softbottle.experiments.retrofit.trial import Training
from softbottle.training import lock

Row = dict[str, Any]
ROWS = "retrofit.jsonl"


class Key(NamedTuple):
    """Which run; the model's own head has the rate 0."""

    arm: str
    width: int | None
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        width = "" if self.width is None else f"-{self.width}"
        return f"{self.arm.replace(':', '-')}{width}-{self.rate:g}-{self.seed}"

    def __str__(self) -> str:
        """For people."""
        table = "" if self.width is None else f" with a table {self.width} wide"
        return f"{self.arm}{table} at {self.rate:g}, seed {self.seed}"


class Grid(NamedTuple):
    """What is compared.

    Attributes:
        arms: names of arms.py.
        widths: of the table; None is as wide as the states.
        rates: learning rates of every arm.
        seeds: how many.
    """

    arms: Sequence[str] = arms_lib.FULL
    widths: Sequence[int | None] = (None,)
    rates: Sequence[float] = (1e-3,)
    seeds: int = 2


class Result(NamedTuple):
    """What a run came to: the trained head, and what its row has beside its scores."""

    made: Start
    row: Row


Fit = Callable[[Start, Training, int, float], Result | None]


def run(
    capture: Capture,
    workdir: pathlib.Path | str,
    grid: Grid,
    training: Training,
    *,
    heldout: Capture | None = None,
    digest: str = "",
    minutes: float | None = None,
) -> list[Row]:
    """Train what has no row yet on a frozen model, in order, and report.

    Args:
        capture: a model's states along a text, with labels and its own head, as
            `Capture.from_states` has them.
        workdir: where `retrofit.jsonl`, `retrofit.md` and its pictures go.
        grid: what is compared.
        training: of every run; its rate is not read.
        heldout: states of held-out text; None holds out the end of the text.
        digest: a hash of what the states are of.
        minutes: after which nothing new begins; a run that is not expected to end in
            time is not started. None for no limit.

    Returns:
        All rows, those of earlier calls included.

    Raises:
        ValueError: for an arm that there is not, states that cannot be used, rows of
            other settings, or where another process is at work in the same workdir.
    """
    problem = data.make(capture, heldout, digest)
    return compare(problem, workdir, grid, training, frozen(problem), minutes)


def frozen(problem: Problem) -> Fit:
    """How a head is trained on states that stay as they are."""

    def fit(begun, training, seed, deadline):
        fitted = trial.fit(problem, begun, training, seed, deadline)
        if fitted is None:
            return None
        made, told = fitted
        return Result(made, told | scores.outcome(problem, made, training))

    return fit


def compare(
    problem: Problem,
    workdir: pathlib.Path | str,
    grid: Grid,
    training: Training,
    fit: Fit,
    minutes: float | None = None,
    trunk_rate: float | None = None,
    keep: bool = False,
) -> list[Row]:
    """`run`, with any way to train a head.

    Args:
        problem: states and the model's own head.
        workdir: as of `run`.
        grid: as of `run`.
        training: as of `run`.
        fit: trains a head; None if it was not ready in time.
        minutes: as of `run`.
        trunk_rate: the trunk's learning rate, if `fit` trains it as well.
        keep: whether trained heads are kept in `workdir/heads` (`save`).

    Raises:
        ValueError: as `run`.
    """
    check(grid, training)
    workdir = pathlib.Path(workdir)
    mark = fingerprint(problem, training, trunk_rate)
    rows = read(workdir, mark)
    for key in plan(grid, training, rows):
        if key.arm != OWN:
            arms_lib.expected_costs(problem, key.arm, key.width)
    shared = training._asdict() | {"trunk_rate": trunk_rate, "fingerprint": mark}
    shared |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    broken: dict[Key, str] = {}

    def choose(left):
        runs = missing(grid, training, rows)
        for key in runs:
            if key not in broken and _expected(problem, key, rows) < left:
                print(f"{key}: {len(runs)} runs to go", flush=True)
                return key
        return None

    def do(key, seconds):
        began = time.monotonic()
        deadline = math.inf if seconds is None else began + seconds
        folder = workdir / "heads" if keep else None
        row = processes.attempt(
            lambda: _row(problem, key, training, fit, deadline, folder)
        )
        if not row:
            return 0
        spent = round(time.monotonic() - began, 3)
        # The row's width is the table's; a matched arm finds its own.
        asked = key._asdict() | {"asked_width": key.width}
        rows.append(shared | asked | row | {"elapsed": spent})
        rows_lib.write(workdir / ROWS, rows)
        return None

    with lock.Lock(workdir):
        # Another process may have written since.
        rows = read(workdir, mark)
        processes.one_by_one(minutes, broken, choose, do)
        _report(workdir, problem, rows, missing(grid, training, rows))
    return rows


def read(workdir: pathlib.Path, mark: str) -> list[Row]:
    """The rows of finished runs; none where there is no file.

    Raises:
        ValueError: if a line is not a row, or one of another fingerprint.
    """
    path = workdir / ROWS
    rows = rows_lib.read(path, _key)
    for row in rows:
        rows_lib.check(path, _key(row), row, mark)
    # Files that were joined may both have a run: it is one seed.
    return list({_key(row): row for row in rows}.values())


def _report(workdir, problem, rows, missed):
    left = [str(key) for key in missed]
    print(report.write(workdir, problem, rows, left))
    if found := report.points(rows):
        plot.costs(found).save(workdir / "retrofit.png")
        plot.frequencies(found).save(workdir / "retrofit-words.png")


def check(grid: Grid, training: Training) -> None:
    """Raise ValueError for arms and settings that there are not."""
    for name in grid.arms:
        arms_lib.check(name)
    if grid.seeds < 1 or not grid.rates or min(grid.rates) <= 0:
        raise ValueError("at least one seed, and rates above 0, are needed.")
    if training.objective not in trial.OBJECTIVES:
        raise ValueError(
            f"objective must be one of {trial.OBJECTIVES}, got {training.objective!r}."
        )
    if training.freeze not in trial.FROZEN:
        raise ValueError(
            f"freeze must be one of {trial.FROZEN}, got {training.freeze!r}."
        )


def plan(grid: Grid, training: Training, rows: Sequence[Row]) -> list[Key]:
    """All runs in their order; the rates of the later seeds depend on the rows."""
    own = Key(OWN, None, 0.0, 0)
    cases = [
        (arm, width)
        for width in grid.widths
        for arm in grid.arms
        # Without its table nothing of the model's own head is left to train.
        if not (arm == SOFTMAX and width is None and training.freeze == "table")
    ]
    keys = [own, *(Key(*case, rate, 0) for rate in grid.rates for case in cases)]
    for seed in range(1, grid.seeds):
        for case in cases:
            rate = report.best_rate(rows, *case)
            keys.append(Key(*case, grid.rates[0] if rate is None else rate, seed))
    return keys


def missing(grid: Grid, training: Training, rows: Sequence[Row]) -> list[Key]:
    """The runs of a plan that have no row."""
    done = {_key(row) for row in rows}
    return [key for key in plan(grid, training, rows) if key not in done]


def fingerprint(
    problem: Problem, training: Training, trunk_rate: float | None = None
) -> str:
    """A hash of the settings that all rows share, and of what the states are of."""
    sizes = [len(rows) for rows in (problem.train, problem.valid, problem.heldout)]
    told = [problem.digest, sizes, training._replace(rate=0.0), trunk_rate]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def save(path: pathlib.Path, problem: Problem, made: Start) -> None:
    """Keep a head as an .npz file.

    It has `table`, `bias` and, as `params.NAME`, the head's own parameters, for states
    divided by `scale`; row v of the table is the model's token `order[v]`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        f"params.{name}": np.asarray(array) for name, array in made.params.items()
    }
    arrays |= {"table": np.asarray(made.table_VE), "bias": np.asarray(made.bias_V)}
    arrays |= {"scale": np.asarray(problem.train.scale), "order": problem.order_V}
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    files.replace(path, stream.getvalue())


def _row(problem, key, training, fit, deadline, folder):
    """What a run came to; nothing if it was not ready in time."""
    if key.arm == OWN:
        own = arms_lib.own(problem)
        return scores.outcome(problem, own, training) | {"steps": 0}
    begun = arms_lib.start(problem, key.arm, key.width, key.seed)
    options, batch = training.options, training.batch
    first = scores.evaluate(problem, begun, problem.heldout, batch, options)
    count = first.tokens_N.sum()
    result = fit(begun, training._replace(rate=key.rate), key.seed, deadline)
    if result is None:
        return {}
    if folder:
        save(folder / f"{key.name}.npz", problem, result.made)
    start = {"start_loss": float(first.nll_N.sum() / count)}
    return start | {"start_kl": float(first.kl / count)} | result.row


def _key(row):
    return Key(row["arm"], row["asked_width"], row["rate"], row["seed"])


def _expected(problem, key, rows):
    """Seconds that a run will take: as the last of its arm, or of the nearest in flop.

    The first of an arm was compiled, too.
    """
    ended = [row for row in rows if "failed" not in row and row["arm"] != OWN]
    if key.arm == OWN or not ended:
        return 0.0
    flop = arms_lib.expected_costs(problem, key.arm, key.width).flop
    nearest = min(ended[::-1], key=lambda row: abs(math.log(row["flop"] / flop)))
    return nearest["elapsed"] * max(1.0, flop / nearest["flop"])
