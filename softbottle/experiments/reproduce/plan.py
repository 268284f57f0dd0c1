"""Which stages a table takes, with which settings, and what they are known by."""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from softbottle import config as config_lib
from softbottle.data import corpus as corpus_lib
from softbottle.data import lines
from softbottle.experiments.frontier.arms import fingerprint
from softbottle.experiments.reproduce.tables import HEADS, TABLES, Stage, check_heads

Row = dict[str, Any]
Load = Callable[[str], config_lib.Config]
_MIXTURES = ("mos", "moc", "moss")
# Settings that every unit has its own of, and what to do instead.
_OWN = {
    "seed": "use --seeds",
    "train.init_from": "a stage knows what it starts from",
}


class Grid(NamedTuple):
    """What is to be reproduced.

    Attributes:
        table: a name of TABLES.
        heads: names of HEADS; none: the table's.
        seeds: of the runs; none: the recipe's own.
        scale: share of the epochs and of the switch to averaging.
        changes: settings of all configs, by name: {"data.path": "data/ptb"}.
    """

    table: str
    heads: Sequence[str] = ()
    seeds: Sequence[int] = ()
    scale: float = 1.0
    changes: Mapping[str, Any] = {}


class Unit(NamedTuple):
    """A stage of a head with a seed."""

    head: str
    seed: int
    stage: str

    @property
    def run(self) -> str:
        """The name of the folder of all its stages."""
        return f"{self.head}-seed{self.seed}"

    def __str__(self) -> str:
        """As it is named in a queue."""
        return f"{self.run} {self.stage}"


class Plan:
    """The units of a table, in their order, and what each of them is to do.

    Args:
        grid: what is to be reproduced.
        workdir: where the runs' folders are.
        load: the config of a value of --config.

    Attributes:
        grid: as it was given.
        table: of TABLES.
        heads: those of the grid, or the table's.
        units: in the order in which they are done.
        fingerprints: hashes of what each unit is to do.

    Raises:
        ValueError: for a head that there is not, or settings that cannot be.
    """

    def __init__(self, grid: Grid, workdir: pathlib.Path, load: Load):
        self.grid, self.table = grid, TABLES[grid.table]
        self.heads = tuple(dict.fromkeys(grid.heads)) or self.table.heads
        check_heads(self.heads, self.table)
        if not 0 < grid.scale <= 1:
            raise ValueError(f"the scale must be above 0, at most 1, got {grid.scale}.")
        for name, instead in _OWN.items():
            if name in grid.changes:
                raise ValueError(f"{name} is not set for all runs: {instead}.")
        self._workdir, self._load = workdir, load
        self._configs: dict[Unit, config_lib.Config] = {}
        self._texts: dict[str, tuple[dict[str, str], int]] = {}
        self.units = [
            Unit(head, self._seed(head) if seed is None else seed, stage.name)
            for seed in dict.fromkeys(grid.seeds) or (None,)
            for head in self.heads
            for stage in self.table.stages
        ]
        # What a unit starts from comes before it.
        self.fingerprints: dict[Unit, str] = {}
        for unit in self.units:
            self.fingerprints[unit] = self._fingerprint(unit)

    def stage(self, unit: Unit) -> Stage:
        """What a unit is an instance of."""
        return self.table.stage(unit.stage)

    def start(self, unit: Unit) -> Unit | None:
        """The training that it starts from, or that it measures."""
        start = self.stage(unit).start
        return unit._replace(stage=start) if start else None

    def folder(self, unit: Unit) -> pathlib.Path:
        """That of a training."""
        return self._workdir / unit.run / unit.stage

    def config(self, unit: Unit) -> config_lib.Config:
        """The settings of what is trained or timed."""
        if unit not in self._configs:
            try:
                self._configs[unit] = self._configured(unit)
            except ValueError as error:
                raise ValueError(f"{unit} cannot be made: {error}") from error
        return self._configs[unit]

    def task(self, unit: Unit) -> Row:
        """What stage.py is to do."""
        stage, start = self.stage(unit), self.start(unit)
        task: Row = {"measure": stage.measure}
        if stage.config is not None:
            task["config"] = config_lib.to_dict(self.config(unit))
        if stage.measure is None:
            return task | {"folder": str(self.folder(unit))}
        if start is not None:
            task["folder"] = str(self.folder(start))
        return task | {"settings": self._settings(unit)}

    def _fingerprint(self, unit):
        """A hash of the text, of all settings, and of those of what it starts from."""
        stage, start = self.stage(unit), self.start(unit)
        parts = [stage.measure, start and self.fingerprints[start]]
        if stage.measure is not None:
            parts.append(self._settings(unit))
        if stage.config is not None:
            config = self.config(unit)
            text = self._text(config)[0] if stage.measure is None else {}
            parts += [fingerprint(config, text), config.train.epochs]
            parts.append(config.train.stop_patience)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def _seed(self, head):
        """The seed that the recipe of a head has."""
        config = next(stage.config for stage in self.table.stages if stage.config)
        return self._load(config.format(head=HEADS[head].argument)).seed

    def _configured(self, unit):
        stage, head = self.stage(unit), HEADS[unit.head]
        config = self._load(stage.config.format(head=head.argument))
        changes = {**stage.changes, **head.changes}
        if stage.measure is not None:
            # All heads of a data set are timed on the same batches.
            rows = self._load(stage.config.format(head="mos")).data.rows
            changes["data.rows"] = rows
        if config.optim.name == "sgd":
            config.optim.learning_rate *= head.sgd_rate
        config = changed(config, {**changes, **self.grid.changes, "seed": unit.seed})
        if stage.measure is not None:
            return config_lib.validate(config)
        _shorten(config, self.grid.scale, lambda: self._text(config)[1])
        if (start := self.start(unit)) is not None:
            config.train.init_from = str(self.folder(start))
        return config_lib.validate(config)

    def _settings(self, unit):
        """What a measure goes by."""
        measure, recipe = self.stage(unit).measure, self.table.recipe
        if measure == "time":
            words, config = self.table.words[unit.stage], self.config(unit)
            return {"vocab": words, "length": config.data.length}
        if recipe is None or measure == "static":
            return {}
        if measure == "dynamic":
            mixes = HEADS[unit.head].argument in _MIXTURES
            return {"sums": recipe.mixture if mixes else recipe.single}
        if measure == "cache":
            return {"pointer": recipe.pointer}
        return {"positions": recipe.positions}

    def _text(self, config):
        """(hashes of a config's text, its steps per epoch)."""
        name = json.dumps(config_lib.to_dict(config)["data"])
        if name not in self._texts:
            corpus = corpus_lib.load(config.data)
            stream = lines.stream(config.data, corpus.vocab, corpus.train, 0)
            self._texts[name] = corpus_lib.digest(corpus), stream.steps_per_epoch
        return self._texts[name]


def changed(config: config_lib.Config, changes: Mapping[str, Any]) -> config_lib.Config:
    """The config itself, with fields set that are named like `train.steps`.

    Raises:
        ValueError: for a field that there is not, or a value of another type.
    """
    for name, value in changes.items():
        *path, field = name.split(".")
        try:
            setattr(functools.reduce(getattr, path, config), field, value)
        except AttributeError as error:
            raise ValueError(str(error)) from error
    return config


def _shorten(config, scale, steps_per_epoch):
    """Train for a share of the epochs, and switch and decay at that share of them."""
    if scale == 1:
        return
    train, optim = config.train, config.optim
    if optim.decay_steps is not None and train.epochs is not None:
        # A decay goes by steps, and its recipe may have no whole epoch.
        steps = train.epochs * steps_per_epoch()
        train.steps, train.epochs = min(steps, train.steps or steps), None
    if train.steps is not None:
        train.steps = _share(train.steps, scale)
    if train.epochs is not None:
        train.epochs = _share(train.epochs, scale)
    optim.warmup_steps = round(scale * optim.warmup_steps)
    if optim.decay_steps is not None:
        optim.decay_steps = _share(optim.decay_steps, scale)
        # Few steps may round to as many of either, and the decay needs one.
        optim.warmup_steps = min(optim.warmup_steps, optim.decay_steps - 1)
    optim.switch_epoch = round(scale * optim.switch_epoch)


def _share(count, scale):
    return max(1, round(scale * count))
