"""Every setting of a run, with its default, in one place.

A config is a tree of dataclasses. It is mutable while it is being put together (by a
file under configs/ and by `--config.section.field=value`); `validate` checks it and
returns a frozen copy. A field that does not exist, or a value of the wrong type, is an
error the moment it is set. `None` is "not set", and `=none` on the command line.

What a field allows stands beside it: `within(default, low, high)` bounds it on both
sides, ends included; `positive` is above 0; `one_of` lists its values (sections.py).
What it means is the comment beside it, or above it, which `--helpfull` and
docs/config.md show (cli/fields.py).
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from softbottle import sections
from softbottle.sections import BELOW_ONE, Section, one_of, positive, within

BACKBONES = ("window", "awd_lstm", "transformer")
CORPORA = ("synthetic", "templates", "ptb", "wt2", "lm1b", "text")
OPTIMIZERS = ("adamw", "sgd")
OBJECTIVES = ("plain", "trime", "histalign")
UNITS = ("stream", "packed", "lines", "answers")
AVERAGING = ("none", "nt", "et", "now")
DTYPES = ("float32", "bfloat16")
BIASES = ("zero", "frequency")
# Version of the settings' meaning, stored with them. 0 had 0 and "" for "not set"; in 0
# and 1 every mixture had tanh contexts; in 2 the other kinds read a longer direction;
# up to 3 sgd took settings of adamw's schedule, and no notice of them, and heads had
# the defaults of _HEADS_BEFORE.
FORMAT = 4


@dataclasses.dataclass
class Synthetic(Section):
    """The built-in languages: see data/synthetic.py."""

    words: int = within(64, 4)  # of its vocabulary
    readings: int | None = positive(None)  # of each word; None: the random language
    rank: int = positive(8)  # of the logits of a reading
    spread: float = positive(1.5)  # standard deviation of the true logits
    train_tokens: int = positive(4_000_000)  # words of its training text
    eval_tokens: int = positive(100_000)  # words of its validation and of its test text
    seed: int = within(0, 0)  # of the language and its texts


@dataclasses.dataclass
class Templates(Section):
    """The ambiguous templates: see data/templates.py."""

    train_lines: int = positive(20_000)  # of the training text
    eval_lines: int = positive(1_000)  # of the validation and of the test text
    seed: int = within(0, 0)  # of the lines


@dataclasses.dataclass
class Data(Section):
    """Which text, and how it becomes integers."""

    name: str = one_of("synthetic", CORPORA)  # the corpus; text: files of your own
    path: str | None = None  # the folder that holds the corpus; for text also a file
    cache: str | None = None  # where encodings are kept; None: ~/.cache/softbottle
    vocab_size: int | None = within(None, 3)  # keep the most frequent types; None: all
    vocab_file: str | None = None  # a vocabulary of at most vocab_size, a word per line
    subwords: bool = False  # byte pair encoding, learned from the text, of vocab_size
    lowercase: bool = False  # all words in lower case
    unit: str = one_of("stream", UNITS)  # what a row of a batch holds: data/lines.py
    rows: int = positive(32)  # rows of a training batch
    length: int = positive(32)  # positions of a row; the law's mean when it is variable
    variable: bool = False  # draw each batch's length by the AWD-LSTM law
    max_delta: int = within(40, 0)  # a drawn length is at most length + max_delta
    eval_rows: int = positive(10)  # rows that the validation text is read in
    test_rows: int = positive(1)  # rows that the test text is read in
    eval_length: int = positive(70)  # positions that validation and test read at a time
    synthetic: Synthetic = dataclasses.field(default_factory=Synthetic)
    templates: Templates = dataclasses.field(default_factory=Templates)


@dataclasses.dataclass
class Head(Section):
    """The output layer.

    From `components` on a setting belongs to the heads that have a field of its name
    (heads/); None is the head's own default, which not all settings have, and all that
    a head without that field takes.
    The words that mixtape takes for frequent are the first of the vocabulary, which
    `data.vocab_size` sorts by frequency.
    """

    name: str = "mos"  # kind
    budget_mib: int | None = positive(None)  # memory of a block of logits, in MiB
    implementation: str = "auto"  # of the loss; auto: by the device
    components: int | None = positive(None)  # of a mixture, or of mixtape: K
    context: str | None = None  # of a mixture: residual, linear or tanh
    active: int | None = positive(None)  # mos, moss: components per token
    draw: bool | None = None  # mos, moss: one of the active components, in training
    classes: int | None = positive(None)  # partition, mfs: classes of words, v mod this
    lower: int | None = positive(None)  # doc: components that read the layer below
    layers: int | None = positive(None)  # mfs: how many of the last ones are read
    positions: int | None = positive(None)  # mfs: the token's own and those before it
    frequent: int | None = positive(None)  # mixtape: words with gates of their own
    gate_dim: int | None = positive(None)  # mixtape: width of the gates' features
    center: float | None = None  # gss: where g bends
    slope: float | None = positive(None)  # gss: of g far below the center
    knots: int | None = positive(None)  # plif: segments of g; None: 100,000
    span: float | None = positive(None)  # plif: they divide [-span, span]; None: 20
    rank: int | None = positive(None)  # lowrank: of the output table
    cap: float | None = positive(None)  # softcap: the largest logit; None: 30


@dataclasses.dataclass
class Model(Section):
    """Table and backbone."""

    backbone: str = one_of("awd_lstm", BACKBONES)  # window: feed-forward n-grams
    embed_dim: int = positive(8)  # width of the input table; of the output's when tied
    context_dim: int | None = positive(None)  # output table's width; None: embed_dim
    hidden_dim: int = positive(64)  # inner width of the backbone
    last_dim: int = positive(8)  # width of the state that the head reads
    layers: int = positive(1)  # awd_lstm, transformer: how many
    attention_heads: int = positive(4)  # transformer: per layer
    order: int = positive(1)  # window: how many words it sees
    tied: bool = True  # tied embeddings: one table for input and output
    table_range: float = positive(0.1)  # tables start uniform in plus or minus this
    gain: float = positive(1.0)  # what the head reads is the last state times this
    bias_start: str = one_of("zero", BIASES)  # frequency: predicts word frequencies
    vocab_multiple: int = positive(1)  # table rows are rounded up to a multiple of this
    compute_dtype: str = one_of("float32", DTYPES)  # of GEMMs; parameters stay float32
    remat: bool = False  # transformer: activation checkpointing, block by block
    scan_layers: bool = False  # transformer: compile one block for all; slower steps


@dataclasses.dataclass
class Regularise(Section):
    """Dropout rates and penalties.

    Locked is variational dropout: one mask per row, the same at every position.
    """

    rows: float = within(0.0, 0, BELOW_ONE)  # whole rows of the input table (dropoute)
    input: float = within(0.0, 0, BELOW_ONE)  # embedded tokens, locked over time
    hidden: float = within(0.0, 0, BELOW_ONE)  # between layers, locked (dropouth)
    output: float = within(0.0, 0, BELOW_ONE)  # last layer, locked (dropout)
    latent: float = within(0.0, 0, BELOW_ONE)  # the mixture's contexts, locked
    recurrent: float = within(0.0, 0, BELOW_ONE)  # DropConnect (wdrop)
    activation: float = within(0.0, 0)  # AR, on the dropped last output (alpha)
    slowness: float = within(0.0, 0)  # TAR, on the raw last output (beta)
    # squared coefficient of variation of a mixture's weights, summed over the batch
    balance: float = within(0.0, 0)


@dataclasses.dataclass
class Cache(Section):
    """Training with a cache of the row's own history: see heads/cache.py.

    plain trains without; trime takes the likelihood with the cache; histalign adds
    alpha times the ranking loss to that.
    """

    objective: str = one_of("plain", OBJECTIVES)  # what is trained, as said above
    alpha: float = within(1.0, 0)  # histalign: weight of the ranking loss
    margin: float = within(0.001, 0)  # histalign: lambda, for every place in the order


@dataclasses.dataclass
class Optim(Section):
    """The optimizer, its schedule and its average."""

    name: str = one_of("adamw", OPTIMIZERS)  # which optimizer
    learning_rate: float = positive(1e-3)  # adamw: the peak of the schedule
    table_learning_rate: float | None = positive(None)  # word tables; None: as others
    slope_learning_rate: float | None = positive(None)  # plif's slopes; None: as others
    warmup_steps: int = within(0, 0)  # adamw: linear learning-rate warm-up
    decay_steps: int | None = positive(None)  # adamw: cosine decay ends at this step
    end_factor: float = within(0.0, 0)  # adamw: the last learning rate over the peak
    weight_decay: float = within(0.0, 0)  # of all parameters
    clip: float | None = positive(None)  # gradient clipping, by the global norm
    # of parameters; nt: by the non-monotone trigger, et: at switch_epoch
    averaging: str = one_of("none", AVERAGING)
    patience: int = positive(5)  # nt: epochs without a new best before averaging
    switch_epoch: int = within(200, 0)  # et: the epoch at which averaging begins
    accumulate: int = positive(1)  # gradient accumulation: parts a batch is cut into


@dataclasses.dataclass
class Mesh(Section):
    """How many devices share a run, and how: see sharding.py."""

    data: int | None = positive(1)  # groups, data parallel; None: all there are
    model: int = positive(1)  # devices of a group, vocabulary parallel


@dataclasses.dataclass
class Train(Section):
    """The loop; it ends after `steps` or `epochs`, whichever comes first."""

    steps: int | None = positive(1000)  # how long; None: until `epochs`
    epochs: int | None = positive(None)  # how long; None: until `steps`
    eval_every: int | None = positive(None)  # steps per validation; None: one per epoch
    log_every: int = positive(50)  # steps per line of metrics.jsonl
    checkpoint_every: int = positive(500)  # steps per checkpoint
    # newest checkpoints that are kept: one is there while another is written
    keep: int = within(2, 2)
    # also keep the parameters after 1, 2, 4, ... steps, evenly spaced later, the last
    series: bool = False
    series_every: int = positive(1000)  # steps per checkpoint of a series, from there
    init_from: str | None = None  # start from the best checkpoint of this run
    profile_steps: int | None = positive(None)  # trace so many steps
    # stop if a validation is no better than all but the last so many
    stop_patience: int | None = positive(None)
    equal_softmax: bool = False  # also train a softmax with as many parameters
    same_width_softmax: bool = False  # also train a softmax of the same context_dim


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
    seed: int = within(0, 0)  # of parameters, dropout and the order of the text


def validate(config: Config, trained: bool = False) -> Config:
    """Check every setting, alone and against the others.

    Args:
        config: to be checked.
        trained: whether it is that of a trained model, which is no less for a setting
            that nothing read; earlier versions let these pass.

    Returns:
        A frozen copy; the config itself stays as it is.

    Raises:
        ValueError: naming the field, its value and what was expected.
    """
    sections.check(config)
    _check_together(config)
    if not trained:
        _check_read(config)
    return sections.frozen(config)


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested plain values, for JSON, with the version of its format."""
    return {"format": FORMAT, **dataclasses.asdict(config)}


def from_dict(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`; also reads what earlier versions wrote.

    Raises:
        ValueError: for a field that does not exist, a value of another type, a format
            of a later version, or a head whose contexts are made otherwise since then.
    """
    values = dict(values)
    version = values.pop("format", 0)
    if not isinstance(version, int) or version > FORMAT:
        raise ValueError(
            f"the settings are of format {version!r}, and this version of softbottle "
            f"reads formats up to {FORMAT}: install a newer one."
        )
    config = Config()
    try:
        sections.update(config, values, _UNSET_BEFORE if version == 0 else {})
    except AttributeError as error:
        raise ValueError(str(error)) from error
    head = config.head
    mixtures = ("mos", "moc", "moss", "partition", "mixtape")
    mixes = head.components or head.name in mixtures
    if version < 2 and mixes:
        head.context = "tanh"
    if version == 2 and mixes and head.context != "tanh":
        raise ValueError(
            f"the settings are of format 2, whose {head.context or 'residual'} "
            "contexts read h / |h|; from format 3 on they read h / (4 |h|). "
            "The run has to be trained again."
        )
    if version < 4:
        if config.optim.name == "sgd":
            config.optim.warmup_steps, config.optim.decay_steps = 0, None
        for name, value in _HEADS_BEFORE.get(head.name, {}).items():
            if getattr(head, name) is None:
                setattr(head, name, value)
    return config


def unset(config: Config, name: str) -> None:
    """Set a field, named like `train.steps`, to None.

    Raises:
        ValueError: if it cannot be None.
    """
    *path, field = name.split(".")
    setattr(functools.reduce(getattr, path, config), field, None)


def differences(ours: Config, theirs: dict[str, Any]) -> list[str]:
    """The fields on which a config and a stored one differ, as readable lines."""
    flat_ours, flat_theirs = sections.flatten(to_dict(ours)), sections.flatten(theirs)
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


def _check_together(config):
    """Raise ValueError where settings contradict each other."""
    data, model = config.data, config.model
    if data.subwords and (data.vocab_size is None or data.vocab_file is not None):
        raise ValueError(
            "data.subwords are learned from the text: set data.vocab_size, and not "
            "data.vocab_file."
        )
    if data.subwords and config.head.name == "mixtape":
        raise ValueError(
            "mixtape wants the words sorted by frequency, and data.subwords are not."
        )
    if data.variable and data.unit != "stream":
        raise ValueError(
            f"data.variable draws the length of a stream's batches, and data.unit is "
            f"{data.unit!r}."
        )
    if config.train.steps is None and config.train.epochs is None:
        raise ValueError(
            "neither train.steps nor train.epochs is set: nothing to train."
        )
    if model.tied and context_dim(config) != model.embed_dim:
        raise ValueError(
            f"model.tied shares one table, so model.context_dim="
            f"{model.context_dim} must be None or model.embed_dim={model.embed_dim}."
        )
    if config.head.draw and config.cache.objective != "plain":
        raise ValueError(
            f"head.draw is for cache.objective='plain', got "
            f"{config.cache.objective!r}: beside a cache nothing is drawn."
        )
    if data.rows % config.optim.accumulate:
        raise ValueError(
            f"data.rows={data.rows} is not a multiple of "
            f"optim.accumulate={config.optim.accumulate}."
        )
    _check_schedule(config.optim)


def _check_read(config):
    """Raise ValueError for settings that nothing would read, or not as they are."""
    data, optim = config.data, config.optim
    made = data.name in ("synthetic", "templates")
    unread = ("path", "vocab_size", "vocab_file")
    given = [name for name in unread if getattr(data, name) is not None]
    if made and given:
        named = ", ".join(f"data.{name}={getattr(data, name)!r}" for name in given)
        raise ValueError(
            f"data.name={data.name!r} is made, not read from files, and {named} "
            "would not be followed: set data.name too, for example to 'text'."
        )
    sized = data.vocab_size is not None or data.vocab_file is not None
    if config.head.name == "mixtape" and not made and not sized:
        raise ValueError(
            "mixtape wants the words sorted by frequency, and without data.vocab_size "
            "they are in the order of the text."
        )
    if optim.end_factor and optim.decay_steps is None:
        raise ValueError(
            f"optim.end_factor={optim.end_factor} is of where the decay ends, and "
            "there is none without optim.decay_steps."
        )
    backbone, head = config.model.backbone, config.head.name
    readers = {
        "model.remat": (backbone, ("transformer",)),
        "model.scan_layers": (backbone, ("transformer",)),
        "regularise.recurrent": (backbone, ("awd_lstm",)),
        "regularise.input": (backbone, ("awd_lstm", "transformer")),
        "regularise.hidden": (backbone, ("awd_lstm", "transformer")),
        "optim.slope_learning_rate": (head, ("plif",)),
    }
    for name, (ours, those) in readers.items():
        value = functools.reduce(getattr, name.split("."), config)
        if value and ours not in those:
            raise ValueError(
                f"{name}={value} is of {' and '.join(those)}; {ours} does not read it."
            )


def _check_schedule(optim):
    """Raise ValueError for a warm-up or a decay that cannot be."""
    warmup, decay = optim.warmup_steps, optim.decay_steps
    if optim.name == "sgd" and (warmup or decay):
        raise ValueError(
            f"optim.warmup_steps={warmup} and optim.decay_steps={decay} are of adamw's "
            "schedule; optim.name='sgd' has none, so they must be 0 and None."
        )
    if decay is not None and warmup >= decay:
        raise ValueError(
            f"optim.warmup_steps={warmup} must be below optim.decay_steps={decay}, the "
            "step at which the decay that follows the warm-up ends."
        )


# What format 0 wrote for "not set", and its defaults of settings of single heads.
_UNSET_BEFORE = {
    "data.path": "",
    "data.cache": "",
    "data.vocab_size": 0,
    "data.vocab_file": "",
    "head.components": 1,
    "head.center": 0.0,
    "head.slope": 1.0,
    "head.knots": 100_000,
    "head.span": 20.0,
    "head.rank": 0,
    "head.budget_mib": 0,
    "model.context_dim": 0,
    "optim.slope_learning_rate": 0.0,
    "optim.decay_steps": 0,
    "optim.clip": 0.0,
    "mesh.data": -1,
    "train.steps": 0,
    "train.epochs": 0,
    "train.eval_every": 0,
    "train.init_from": "",
    "train.profile_steps": 0,
    "train.stop_patience": 0,
}

# What was meant up to format 3 by settings of heads that are not set, and now must be.
_HEADS_BEFORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mos", "moc", "moss"), {"components": 1}),
    "gss": {"center": 0.0, "slope": 1.0},
}
