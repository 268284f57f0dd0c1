"""Every setting of a run, with its default, in one place.

A config is a tree of dataclasses. It is mutable while it is being put together (by a
file under configs/ and by `--config.section.field=value`) and frozen by `validate`,
which is the only place where settings are checked against each other. A field that
does not exist, or a value of the wrong type, is an error the moment it is set.
"""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Sequence
from typing import Any

BACKBONES = ("window", "awd_lstm", "transformer")
CORPORA = ("synthetic", "templates", "ptb", "wt2", "lm1b", "text")
OPTIMISERS = ("adamw", "sgd")
OBJECTIVES = ("plain", "trime", "histalign")
UNITS = ("stream", "packed", "lines", "answers")
AVERAGING = ("none", "nt", "et", "now")
DTYPES = ("float32", "bfloat16")


class Section:
    """A group of settings that names its fields when it is misused."""

    _frozen = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field that exists to a value of its type."""
        if self._frozen:
            raise ValueError(
                f"the config is validated and frozen; {self._title()}.{name} "
                "can no longer be set."
            )
        types = {field.name: _types(field) for field in dataclasses.fields(self)}
        if name not in types:
            raise ValueError(self._no_field(name))
        if float in types[name] and type(value) is int:
            value = float(value)
        if type(value) not in types[name]:
            allowed = " or ".join(
                "None" if kind is type(None) else kind.__name__ for kind in types[name]
            )
            raise ValueError(
                f"{self._title()}.{name} must be {allowed}, got {value!r} of type "
                f"{type(value).__name__}."
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Only called when the ordinary look-up fails.
        raise AttributeError(self._no_field(name))

    def _title(self) -> str:
        return type(self).__name__

    def _no_field(self, name: str) -> str:
        names = [field.name for field in dataclasses.fields(self)]
        return f"{self._title()} has no field {name!r}; it has {names}."


@dataclasses.dataclass
class Synthetic(Section):
    """The built-in language: see data/synthetic.py."""

    words: int = 64
    spread: float = 1.5  # standard deviation of the true logits
    train_tokens: int = 4_000_000
    eval_tokens: int = 100_000
    seed: int = 0


@dataclasses.dataclass
class Templates(Section):
    """The ambiguous templates: see data/templates.py."""

    train_lines: int = 20_000
    eval_lines: int = 1_000
    seed: int = 0


@dataclasses.dataclass
class Data(Section):
    """Which text, and how it becomes integers."""

    name: str = "synthetic"  # one of CORPORA
    path: str = ""  # the folder that holds the corpus
    cache: str = ""  # where encodings are kept; empty: ~/.cache/softbottle
    vocab_size: int = 0  # keep the most frequent types; 0 keeps all of them
    vocab_file: str = ""  # a given vocabulary, one word a line
    lowercase: bool = False
    unit: str = "stream"  # one of UNITS; what a row of a batch holds: data/lines.py
    rows: int = 32  # rows of a training batch
    length: int = 32  # positions of a row; the law's mean when it is variable
    variable: bool = False  # draw each batch's length by the AWD-LSTM law
    max_delta: int = 40  # a drawn length is at most length + max_delta
    eval_rows: int = 10
    test_rows: int = 1
    eval_length: int = 70
    synthetic: Synthetic = dataclasses.field(default_factory=Synthetic)
    templates: Templates = dataclasses.field(default_factory=Templates)


@dataclasses.dataclass
class Head(Section):
    """The output layer.

    From `components` on a setting belongs to the heads that have a field of its name
    (heads/); None is the head's own default, and all a head without that field takes.
    """

    name: str = "mos"  # one of heads.HEADS
    budget_mib: int | None = None  # of a block of logits; None: the platform's own
    implementation: str = "auto"  # see ops/mixture/api.py
    components: int | None = None  # mos, moc, moss, gss, plif, softcap
    center: float | None = None  # gss
    slope: float | None = None  # gss
    knots: int | None = None  # plif
    span: float | None = None  # plif
    rank: int | None = None  # lowrank
    cap: float | None = None  # softcap


@dataclasses.dataclass
class Model(Section):
    """Table and backbone."""

    backbone: str = "awd_lstm"  # one of BACKBONES
    embed_dim: int = 8  # width of the input table; of the output table when tied
    context_dim: int = 0  # width of the output table; 0: embed_dim
    hidden_dim: int = 64  # inner width of the backbone
    last_dim: int = 8  # width of the state that the head reads
    layers: int = 1
    attention_heads: int = 4  # transformer
    order: int = 1  # window: how many words it sees
    tied: bool = True  # one table for input and output
    table_range: float = 0.1  # the tables start uniform in plus or minus this
    vocab_multiple: int = 1  # table rows are rounded up to a multiple of this
    compute_dtype: str = "float32"  # one of DTYPES; parameters stay float32
    remat: bool = False  # transformer
    scan_layers: bool = False  # transformer


@dataclasses.dataclass
class Regularise(Section):
    """Dropout rates, and the penalties AR and TAR."""

    rows: float = 0.0  # whole rows of the input table (dropoute)
    input: float = 0.0  # embedded tokens, locked over time (dropouti)
    hidden: float = 0.0  # between layers, locked (dropouth)
    output: float = 0.0  # last layer, locked (dropout)
    latent: float = 0.0  # the mixture's contexts, locked (dropoutl)
    recurrent: float = 0.0  # hidden-to-hidden weights (wdrop)
    activation: float = 0.0  # AR, on the dropped last output (alpha)
    slowness: float = 0.0  # TAR, on the raw last output (beta)


@dataclasses.dataclass
class Cache(Section):
    """Training with a cache of the row's own history: see heads/cache.py.

    plain trains without; trime takes the likelihood with the cache; histalign adds
    alpha times the ranking loss to that.
    """

    objective: str = "plain"  # one of OBJECTIVES
    alpha: float = 1.0  # histalign: weight of the ranking loss
    margin: float = 0.001  # histalign: lambda, for every place in the order


@dataclasses.dataclass
class Optim(Section):
    """The optimiser, its schedule and its average."""

    name: str = "adamw"  # one of OPTIMISERS
    learning_rate: float = 1e-3
    slope_learning_rate: float = 0.0  # plif's slopes; 0: as all the rest
    warmup_steps: int = 0  # adamw: a linear rise
    decay_steps: int = 0  # adamw: a cosine fall over these steps; 0: none
    end_factor: float = 0.0  # adamw: the last learning rate over the peak
    weight_decay: float = 0.0
    clip: float = 0.0  # global norm; 0 switches it off
    averaging: str = "none"  # one of AVERAGING
    patience: int = 5  # nt: epochs without a new best before averaging
    switch_epoch: int = 200  # et: the epoch at which averaging begins
    accumulate: int = 1  # gradient accumulation: parts a batch is cut into


@dataclasses.dataclass
class Mesh(Section):
    """How many devices share a run, and how: see sharding.py."""

    data: int = 1  # groups of devices, each with rows of its own; -1: all there are
    model: int = 1  # devices of a group, each with words of its own


@dataclasses.dataclass
class Train(Section):
    """The loop."""

    steps: int = 1000  # 0: as many as `epochs` has
    epochs: int = 0
    eval_every: int = 0  # steps; 0: once an epoch
    log_every: int = 50
    checkpoint_every: int = 500  # steps
    keep: int = 2  # newest checkpoints kept, beside the best
    series: bool = False  # also keep checkpoints at log-spaced steps
    init_from: str = ""  # start from the best checkpoint of this run
    profile_steps: int = 0  # trace so many to workdir/profile: see profiling.py
    stop_patience: int = 0  # stop when no better than the best of all but so many
    equal_softmax: bool = False  # also train a softmax with as many parameters


@dataclasses.dataclass
class Config(Section):
    """A whole run."""

    data: Data = dataclasses.field(default_factory=Data)
    head: Head = dataclasses.field(default_factory=Head)
    model: Model = dataclasses.field(default_factory=Model)
    regularise: Regularise = dataclasses.field(default_factory=Regularise)
    cache: Cache = dataclasses.field(default_factory=Cache)
    optim: Optim = dataclasses.field(default_factory=Optim)
    train: Train = dataclasses.field(default_factory=Train)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    seed: int = 0


def validate(config: Config) -> Config:
    """Check every setting against the others and freeze the config.

    Returns:
        The same config, frozen.

    Raises:
        ValueError: naming the field, its value and what was expected.
    """
    _check_choices(config)
    _check_ranges(config)
    _check_widths(config)
    nested = (config.data.synthetic, config.data.templates)
    for section in (config, *nested, *_sections(config)):
        object.__setattr__(section, "_frozen", True)
    return config


def to_dict(config: Section) -> dict[str, Any]:
    """The config as nested plain values, for JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`.

    Raises:
        ValueError: for a field that does not exist or a value of another type.
    """
    config = Config()
    try:
        _update(config, values, _UNSET_BEFORE)
    except AttributeError as error:
        raise ValueError(str(error)) from error
    return config


def differences(ours: Config, theirs: dict[str, Any]) -> list[str]:
    """The fields on which a config and a stored one differ, as readable lines."""
    flat_ours, flat_theirs = _flatten(to_dict(ours)), _flatten(theirs)
    return [
        f"{name}: {json.dumps(flat_ours.get(name))} here, "
        f"{json.dumps(flat_theirs.get(name))} there"
        for name in sorted(flat_ours.keys() | flat_theirs.keys())
        if flat_ours.get(name) != flat_theirs.get(name)
    ]


def check_overrides(arguments: Sequence[str]) -> None:
    """Raise ValueError if a `--config.section.field` does not exist.

    ml_collections would raise a bare KeyError from deep inside the flag parser.
    """
    for argument in arguments:
        match = re.match(r"--?(?:no)?config\.([^=]+)", argument)
        section = Config()
        for name in match[1].split(".") if match else ():
            try:
                section = getattr(section, name)
            except AttributeError as error:
                raise ValueError(f"{argument}: {error}") from error


def context_dim(config: Config) -> int:
    """Width of the output table."""
    return config.model.context_dim or config.model.embed_dim


def _types(field):
    """The types that a field's values may have."""
    return typing.get_args(field.type) or (field.type,)


def _sections(config):
    return [getattr(config, name) for name in _SECTION_NAMES]


def _update(section, values, unset_before, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(getattr(section, name), Section):
            _update(getattr(section, name), value, unset_before, f"{prefix}{name}.")
        elif (prefix + name) in unset_before and value == unset_before[prefix + name]:
            setattr(section, name, None)
        else:
            setattr(section, name, value)


def _flatten(values, prefix=""):
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _check_choices(config):
    for name, value, choices in (
        ("data.name", config.data.name, CORPORA),
        ("data.unit", config.data.unit, UNITS),
        ("model.backbone", config.model.backbone, BACKBONES),
        ("model.compute_dtype", config.model.compute_dtype, DTYPES),
        ("cache.objective", config.cache.objective, OBJECTIVES),
        ("optim.name", config.optim.name, OPTIMISERS),
        ("optim.averaging", config.optim.averaging, AVERAGING),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")


def _check_ranges(config):
    flat = _flatten(to_dict(config))
    positive = (
        "data.rows data.length data.eval_rows data.test_rows data.eval_length "
        "data.synthetic.train_tokens data.synthetic.eval_tokens head.components "
        "head.knots head.span head.slope head.rank head.cap head.budget_mib "
        "model.embed_dim "
        "model.hidden_dim model.last_dim model.layers model.attention_heads "
        "model.order model.table_range model.vocab_multiple optim.learning_rate "
        "optim.accumulate optim.patience train.log_every train.checkpoint_every "
        "data.synthetic.spread data.templates.train_lines data.templates.eval_lines "
        "mesh.model"
    )
    for name in positive.split():
        if flat[name] is not None and not flat[name] > 0:
            raise ValueError(f"{name} must be positive, got {flat[name]!r}.")
    signed = ("head.center", "mesh.data")
    for name, value in flat.items():
        # jax takes the lowest 32 bits of a seed; no size needs as many.
        if type(value) is int and value >= 2**32:
            raise ValueError(f"{name} must be below 2**32, got {value}.")
        if type(value) is float and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}.")
        if isinstance(value, int | float) and not value >= 0 and name not in signed:
            raise ValueError(f"{name} must not be negative, got {value!r}.")
    for name in ["rows", "input", "hidden", "output", "latent", "recurrent"]:
        rate = getattr(config.regularise, name)
        if not 0 <= rate < 1:
            raise ValueError(f"regularise.{name} must be in [0, 1), got {rate!r}.")
    if config.data.variable and config.data.unit != "stream":
        raise ValueError(
            f"data.variable draws the length of a stream's batches, and data.unit is "
            f"{config.data.unit!r}."
        )
    if config.data.synthetic.words < 4:
        raise ValueError(
            f"data.synthetic.words must be at least 4, "
            f"got {config.data.synthetic.words}."
        )
    if config.train.keep < 2:
        raise ValueError(
            "train.keep must be at least 2, so that a checkpoint is there while the "
            f"next is written; got {config.train.keep}."
        )
    if config.mesh.data == 0 or config.mesh.data < -1:
        raise ValueError(
            f"mesh.data must be positive, or -1 for all devices; got "
            f"{config.mesh.data}."
        )
    if not config.train.steps and not config.train.epochs:
        raise ValueError("train.steps and train.epochs are both 0: nothing to train.")


def _check_widths(config):
    model = config.model
    if model.tied and context_dim(config) != model.embed_dim:
        raise ValueError(
            f"model.tied shares one table, so model.context_dim="
            f"{model.context_dim} must be 0 or model.embed_dim={model.embed_dim}."
        )
    if config.data.rows % config.optim.accumulate:
        raise ValueError(
            f"data.rows={config.data.rows} is not a multiple of "
            f"optim.accumulate={config.optim.accumulate}."
        )


# What earlier versions wrote for "not set".
_UNSET_BEFORE = {
    "head.components": 1,
    "head.center": 0.0,
    "head.slope": 1.0,
    "head.knots": 100_000,
    "head.span": 20.0,
    "head.rank": 0,
    "head.budget_mib": 0,
}
_SECTION_NAMES = (
    "data",
    "head",
    "model",
    "regularise",
    "cache",
    "optim",
    "train",
    "mesh",
)
