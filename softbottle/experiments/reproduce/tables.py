"""The papers' tables as data: stages, heads and lines.

A stage trains, if it has no `measure`, or it measures the run of the stage that it
starts from. Its config is a value of --config, in which `{head}` stands for the head's
argument of that file.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Of a recipe's first stage and of its finetuning, at scale 1.
EPOCHS = 500


class Stage(NamedTuple):
    """A part of a table that is done once for each head and seed.

    Attributes:
        name: of its folder and of its rows.
        config: what is trained or timed; None where a run is measured.
        start: the stage whose run it starts from (`train.init_from`), or measures.
        measure: "static", "dynamic", "cache", "rank" or "time"; None: it trains.
        changes: settings that differ from the config's, by name.
    """

    name: str
    config: str | None = None
    start: str | None = None
    measure: str | None = None
    changes: Mapping[str, Any] = {}


class Line(NamedTuple):
    """A line of a table for each head: a number of a stage's rows.

    Attributes:
        key: what published values are found by.
        title: what it is.
        stage: whose rows have it.
        field: of these rows.
        digits: that are printed.
    """

    key: str
    title: str
    stage: str
    field: str
    digits: int = 2


class Recipe(NamedTuple):
    """How models of a data set are evaluated, as their papers' code does.

    Attributes:
        mixture: learning rate, decay and epsilon of dynamic evaluation in the MoS
            code's convention (scoring/dynamic.py), for mixtures.
        single: the same for the other heads, which have the AWD-LSTM's sizes.
        pointer: window, theta and share of the neural cache, the AWD-LSTM's.
        positions: of the test text, whose log P has the rank.
    """

    mixture: tuple[float, float, float]
    single: tuple[float, float, float]
    pointer: tuple[int, float, float]
    positions: int


class Table(NamedTuple):
    """One table.

    Attributes:
        title: its heading.
        published: the data set in published.py.
        stages: in their order, for each head and seed.
        heads: names of HEADS that are there by default.
        lines: of each head.
        recipe: None where nothing is evaluated dynamically, with a cache or for rank.
        words: of the data sets that are timed, by stage.
    """

    title: str
    published: str
    stages: tuple[Stage, ...]
    heads: tuple[str, ...]
    lines: tuple[Line, ...]
    recipe: Recipe | None = None
    words: Mapping[str, int] = {}

    @property
    def data(self) -> set[str]:
        """The data sets whose configs it takes."""
        configs = (stage.config for stage in self.stages if stage.config)
        return {config.partition(":")[0] for config in configs}

    def stage(self, name: str) -> Stage:
        """A stage by its name."""
        (found,) = (stage for stage in self.stages if stage.name == name)
        return found


class Head(NamedTuple):
    """What `{head}` of a config is, and what differs from its recipe.

    Attributes:
        argument: of the config.
        changes: settings.
        sgd_rate: its learning rate over the recipe's, where that is by SGD.
        data: the data set that the changes are for; None for any.
    """

    argument: str
    changes: Mapping[str, Any] = {}
    sgd_rate: float = 1.0
    data: str | None = None


_PLAIN = ("softmax", "moc", "sigsoftmax", "gss", "plif", "mos", "moss")
_COMPONENTS = (1, 2, 3, 5, 7, 10, 20)
_FEW = 3  # components
_SLOW = 0.5  # of heads that do not learn at PTB's 20 (docs/results/ptb.md)
_PARTITION = {"head.name": "partition", "head.classes": 4, "head.components": None}
_ONE_WIDTH = {"model.embed_dim": 340, "model.hidden_dim": 960, "model.last_dim": 340}
HEADS: dict[str, Head] = {
    **{name: Head(name) for name in _PLAIN},
    **{
        f"mos-{k}": Head("mos", {"head.components": k}, _SLOW if k <= _FEW else 1.0)
        for k in _COMPONENTS
    },
    # Cheap heads that do best on the frontier (docs/results/frontier.md), with the
    # mixture's widths.
    "moc-residual": Head("moc", {"head.context": "residual"}, _SLOW),
    "partition-4": Head("mos", {**_PARTITION, "head.context": "residual"}, _SLOW),
    "partition-4-tanh": Head("mos", _PARTITION),
    # Equal parameters, as Parthiban et al. compare them on PTB: 17.53M and 17.56M. The
    # softmax has the learning rate and the dropout between layers of their softmax.
    "mos-280": Head("mos", {"model.last_dim": 280}, data="ptb"),
    "softmax-340": Head(
        "softmax",
        {
            **_ONE_WIDTH,
            **{"data.rows": 12, "regularise.rows": 0.15, "regularise.hidden": 0.3},
            "optim.learning_rate": 20.0,
        },
        data="ptb",
    ),
}

# The mixture that the papers vary the components of, with all numbers of them.
BY_COMPONENTS = ("mos", *(f"mos-{k}" for k in _COMPONENTS))

_LENGTH = {"train.epochs": EPOCHS}
_VALID = Line("valid", "not finetuned, static, valid", "static", "valid")
_TEST = Line("test", "not finetuned, static, test", "static", "test")
_RANK = "rank of log P, test"
_SUMS = (0.002, 0.02, 0.001)
_PTB = Recipe((0.002, 0.075, 0.001), _SUMS, (500, 1.0, 0.1), 82_430)
_WT2 = Recipe((0.002, 0.02, 0.002), _SUMS, (3785, 0.662, 0.1279), 33_320)


def _language_model(title, data, recipe):
    """Train, finetune and evaluate in every way."""
    ways = ("static", "dynamic", "cache", "rank")
    stages = (
        Stage("train", f"{data}:{{head}},et", changes=_LENGTH),
        Stage("static", start="train", measure="static"),
        Stage("finetune", f"{data}:{{head}},finetune", "train", changes=_LENGTH),
        *(Stage(f"fine-{way}", None, "finetune", way) for way in ways),
    )
    lines = (
        *(_VALID, _TEST),
        Line("fine_valid", "finetuned, static, valid", "fine-static", "valid"),
        Line("fine_test", "finetuned, static, test", "fine-static", "test"),
        Line("dynamic", "finetuned, dynamic evaluation, test", "fine-dynamic", "test"),
        Line("cache", "finetuned, neural cache, test", "fine-cache", "test"),
        Line("rank", f"finetuned, {_RANK}", "fine-rank", "rank", 0),
    )
    return Table(title, data, stages, ("mos",), lines, recipe)


_TIMED = {"ptb": 10_000, "wt2": 33_278, "lm1b": 100_000}
TABLES: dict[str, Table] = {
    "ptb": _language_model("Penn Treebank", "ptb", _PTB),
    "wt2": _language_model("WikiText-2", "wt2", _WT2),
    "ranks": Table(
        "Ranks of log P on Penn Treebank",
        "ptb",
        (
            Stage("train", "ptb:{head},et", changes=_LENGTH),
            Stage("static", start="train", measure="static"),
            Stage("rank", start="train", measure="rank"),
        ),
        (
            *("softmax", "moc", "sigsoftmax", "mos"),
            *("mos-1", "mos-2", "mos-3", "mos-5", "mos-10", "mos-20"),
        ),
        (_VALID, _TEST, Line("rank", f"not finetuned, {_RANK}", "rank", "rank", 0)),
        _PTB,
    ),
    "time": Table(
        "Time per training step",
        "time",
        tuple(Stage(data, f"{data}:{{head}}", measure="time") for data in _TIMED),
        ("softmax", "moc", "sigsoftmax", "mos-5", "mos-10", "mos"),
        tuple(Line(data, f"{data}, ms per step", data, "step_ms") for data in _TIMED),
        words=_TIMED,
    ),
    "lm1b": Table(
        "One Billion Words",
        "lm1b",
        (
            Stage("train", "lm1b:{head}"),
            Stage("static", start="train", measure="static"),
        ),
        ("softmax", "mos"),
        (
            Line("valid", "held-out, valid", "static", "valid"),
            Line("test", "held-out, test", "static", "test"),
        ),
    ),
}


def check_heads(names: Sequence[str], table: Table) -> None:
    """Raise ValueError, with the heads that a table has, unless all of these are."""
    known = [
        name
        for name, head in HEADS.items()
        if head.data is None or {head.data} == table.data
    ]
    for name in names:
        if name not in known:
            raise ValueError(
                f"no head is called {name!r} here; there are {', '.join(known)}."
            )
