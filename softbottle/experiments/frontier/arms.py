"""What the frontier compares: arms, and the settings of a run that trains one.

An arm is a head and, for the rivals of a mixture, what the softmax is matched to. The
widths come from the config: a head that projects its contexts has the config's table,
one that reads the state itself has a table as wide as `model.last_dim`. All runs see
the config's text in the config's batches, with a warm-up of 5% of their steps and a
cosine decay to zero over all of them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from softbottle import config as config_lib
from softbottle import heads, sections
from softbottle import model as model_lib
from softbottle import variants as variants_lib


class Arm(NamedTuple):
    """One of the things that are compared.

    Attributes:
        head: settings of `config.head`; all others have the head's default.
        match: what a softmax, plain or projected, is to have in common with REFERENCE
            or with itself.

            width       half of the softmax's
            parameters  at most as many as REFERENCE, as nearly as the width gives it
            trunk       about the time of a step of REFERENCE, by a wider
                        `model.hidden_dim`
            passes      the flop of all steps of REFERENCE, by more passes
        first: whether it belongs to the first question, contexts or mixture.
        frequent: the share of the words that are the head's `frequent` ones.
    """

    head: dict[str, Any]
    match: str | None = None
    first: bool = False
    frequent: float | None = None


SOFTMAX, REFERENCE = "softmax", "mos-7-tanh"


def _mixtures(name, components, contexts, first=False):
    return {
        f"{name}-{components}-{context}": Arm(
            {"name": name, "components": components, "context": context},
            first=first and context != "linear",
        )
        for context in contexts
    }


# A mixture of one: what its projection between state and table does by itself.
_PROJECTED = {"name": "mos", "components": 1, "context": "residual"}
_ALL, _TWO = ("tanh", "residual", "linear"), ("tanh", "residual")
ARMS = {
    SOFTMAX: Arm({"name": "softmax"}, first=True),
    "softmax-half": Arm({"name": "softmax"}, "width"),
    "softmax-parameters": Arm({"name": "softmax"}, "parameters"),
    "softmax-time-trunk": Arm({"name": "softmax"}, "trunk"),
    "softmax-time-passes": Arm({"name": "softmax"}, "passes"),
    "softmax-projected": Arm(_PROJECTED, first=True),
    "softmax-projected-tanh": Arm(_PROJECTED | {"context": "tanh"}, first=True),
    "softmax-projected-linear": Arm(_PROJECTED | {"context": "linear"}),
    "softmax-projected-trunk": Arm(_PROJECTED, "trunk"),
    "softmax-projected-passes": Arm(_PROJECTED, "passes"),
    "sigsoftmax": Arm({"name": "sigsoftmax"}),
    "softcap": Arm({"name": "softcap", "cap": 30.0}),
    **_mixtures("moc", 7, _ALL, first=True),
    **_mixtures("mos", 7, _ALL, first=True),
    **_mixtures("moc", 15, _TWO),
    **_mixtures("moc", 30, ("tanh",)),
    **_mixtures("mos", 2, _TWO),
    **_mixtures("mos", 4, _TWO),
    "partition-4": Arm({"name": "partition", "classes": 4}),
    "partition-4-tanh": Arm({"name": "partition", "classes": 4, "context": "tanh"}),
    "partition-8": Arm({"name": "partition", "classes": 8}),
    "partition-8-tanh": Arm({"name": "partition", "classes": 8, "context": "tanh"}),
    "partition-4-mos-2": Arm({"name": "partition", "classes": 4, "components": 2}),
    "mixtape-4": Arm({"name": "mixtape", "components": 4}, frequent=0.1),
    "mos-7-active-2": Arm({"name": "mos", "components": 7, "active": 2}),
    "mos-7-active-2-draw": Arm(
        {"name": "mos", "components": 7, "active": 2, "draw": True}
    ),
    "mos-15-active-2": Arm({"name": "mos", "components": 15, "active": 2}),
}
# Those that matter, which are trained with several seeds.
SEVERAL_SEEDS = (
    *(SOFTMAX, "softmax-projected", "moc-7-residual", "moc-7-tanh"),
    *("mos-7-residual", REFERENCE),
)
_WARMUP, _VALIDATIONS, _WINDOWS = 0.05, 8, 40
# An LSTM's steps wait for one another: at 1,536 wide and more one H200 does 215 TF/s of
# their products and 560 of those with the table (docs/results/frontier.md).
_LSTM_SLOWER = 2.6
# How often a run reports, and where its text lies, make no other run of it.
_FREE = ("train.", "mesh.", "data.path", "data.cache", "format")


class Setting(NamedTuple):
    """What is tried of every arm.

    Attributes:
        rate: the learning rate.
        gain: of the states, `model.gain`.
        table_rate: the learning rate of the word tables over `rate`.
    """

    rate: float
    gain: float = 1.0
    table_rate: float = 1.0


class Key(NamedTuple):
    """Which run."""

    arm: str
    rate: float
    seed: int
    gain: float = 1.0
    table_rate: float = 1.0

    def __str__(self) -> str:
        """The name of its folder."""
        name = f"{self.arm}-{self.rate:g}-{self.seed}"
        if self.gain != 1:
            name += f"-gain-{self.gain:g}"
        return name if self.table_rate == 1 else f"{name}-table-{self.table_rate:g}"


class Variant(NamedTuple):
    """The settings of a run, and what shapes tell of it."""

    config: config_lib.Config
    head: str
    parameters: int
    steps: int
    flop: float
    fingerprint: str


class _Model(NamedTuple):
    """What runs of an arm share; the flop are those of a step."""

    config: config_lib.Config
    passes: int
    flop: int
    parameters: int


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError, with the arms that there are, unless all of these are."""
    for name in names:
        if name not in ARMS:
            raise ValueError(f"no arm is called {name!r}; there are {', '.join(ARMS)}.")


class Variants:
    """The runs of arms on one text.

    Args:
        config: the settings that all runs share.
        vocab: how many words there are.
        steps_per_epoch: of the training text.
        text: the hashes of the corpus.

    Raises:
        ValueError: if the optimizer has no decay, or parameters come from another run.
    """

    def __init__(
        self,
        config: config_lib.Config,
        vocab: int,
        steps_per_epoch: int,
        text: dict[str, str],
    ):
        if config.optim.name != "adamw":
            raise ValueError(
                "the frontier decays the learning rate over a pass, which optim.name="
                f"{config.optim.name!r} does not do; use adamw."
            )
        if config.train.init_from is not None:
            raise ValueError(
                "the frontier trains from the start, and train.init_from is "
                f"{config.train.init_from!r}."
            )
        self._config, self._vocab, self._text = config, vocab, text
        if config.mesh != config_lib.Mesh():
            # Times are of that many devices.
            mesh = sections.flatten(config_lib.to_dict(config))
            shares = {name: mesh[name] for name in mesh if name.startswith("mesh.")}
            self._text = text | {"mesh": json.dumps(shares)}
        steps = (config.train.epochs or 1) * steps_per_epoch
        self._steps = min(steps, config.train.steps or steps)
        self._models: dict[str, _Model] = {}

    def make(
        self,
        name: str,
        rate: float,
        seed: int,
        gain: float = 1.0,
        table_rate: float = 1.0,
    ) -> Variant:
        """The run of an arm with a setting and a seed: the fields of a `Key`.

        Raises:
            ValueError: naming the arm, if this version has no such head or the config
                no such model.
        """
        if name not in self._models:
            try:
                self._models[name] = self._model(name)
            except ValueError as error:
                raise ValueError(f"the arm {name} cannot be made: {error}") from error
        model = self._models[name]
        config = config_lib.from_dict(config_lib.to_dict(model.config))
        steps = model.passes * self._steps
        config.seed, config.model.gain = seed, gain
        optim, train = config.optim, config.train
        optim.learning_rate, optim.end_factor = rate, 0.0
        optim.table_learning_rate = None if table_rate == 1 else table_rate * rate
        # The last update has the rate 0, as in docs/results/lm1b.md.
        optim.warmup_steps, optim.decay_steps = int(_WARMUP * steps), max(1, steps - 1)
        train.steps, train.epochs, train.stop_patience = steps, None, None
        train.equal_softmax = train.same_width_softmax = train.series = False
        train.eval_every = math.ceil(steps / _VALIDATIONS)
        train.log_every = min(train.log_every, math.ceil(steps / _WINDOWS))
        train.checkpoint_every = steps
        config = config_lib.validate(config)
        head, flop = repr(model_lib.make_head(config)), model.flop * steps
        mark = fingerprint(config, self._text)
        return Variant(config, head, model.parameters, steps, flop, mark)

    def _model(self, name):
        config, passes = self._matched(ARMS[name])
        return _Model(config, passes, *self._costs(config))

    def _matched(self, arm):
        """The arm's settings but for the optimizer's, and its passes."""
        settings = arm.head
        if arm.frequent is not None:
            frequent = max(1, int(arm.frequent * self._vocab))
            settings = settings | {"frequent": frequent}
        config = self._with_head(settings)
        if arm.match is None:
            return config, 1
        softmax = config
        if arm.match == "width":
            width = max(1, softmax.model.last_dim // 2)
            return variants_lib.with_head(softmax, "softmax", width), 1
        reference = self._with_head(ARMS[REFERENCE].head)
        flop, parameters = self._costs(reference)
        if arm.match == "parameters":
            return variants_lib.equal_softmax(reference, self._vocab, parameters), 1
        if arm.match == "passes":
            return softmax, max(1, round(flop / self._costs(softmax)[0]))
        return self._with_trunk(softmax, self._time(reference)), 1

    def _with_head(self, settings):
        config = variants_lib.replace_head(self._config, settings)
        if not heads.from_config(config.head).projects:
            width = config.model.last_dim
            config = variants_lib.with_head(config, config.head.name, width)
        model_lib.make_head(config)
        return config

    def _with_trunk(self, config, time):
        """The config with the inner width whose step comes closest to that time."""
        unit = 1
        if config.model.backbone == "transformer":
            unit = 2 * config.model.attention_heads

        def wider(units):
            variant = config_lib.from_dict(config_lib.to_dict(config))
            variant.model.hidden_dim = unit * units
            return variant

        def cost(units):
            return self._time(wider(units))

        if cost(2) == cost(1):
            raise ValueError("model.hidden_dim does not change this backbone.")
        units = _closest(cost, time)
        # GEMMs of odd widths are slow; this changes the width by 0.5% at most.
        multiple = 1 << max(0, (units // 100).bit_length() - 1)
        return wider(multiple * round(units / multiple))

    def _costs(self, config):
        """(flop of a step, parameters)."""
        params, tokens = self._shapes(config)
        flop = model_lib.step_flop(config, params, tokens)
        return flop, model_lib.count_parameters(params, self._vocab)

    def _time(self, config):
        """Of a step, in flop of a head's GEMMs."""
        params, tokens = self._shapes(config)
        flop = model_lib.step_flop(config, params, tokens)
        if config.model.backbone != "awd_lstm":
            return flop
        trunk = sum(leaf.size for leaf in jax.tree.leaves(params["backbone"]))
        return flop + (_LSTM_SLOWER - 1) * 6 * tokens * trunk

    def _shapes(self, config):
        """(shapes of the parameters, tokens of a step)."""
        init = model_lib.make(config, self._vocab).init
        params = jax.eval_shape(init, jax.random.key(0))
        return params, config.data.rows * config.data.length


def _closest(cost: Callable[[int], float], target: float) -> int:
    """The number from 1 on whose cost, which rises with it, is nearest to a target."""
    low, high = 1, 2
    while cost(high) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < target else (low, middle)
    return min(low, high, key=lambda number: abs(cost(number) - target))


def fingerprint(config: config_lib.Config, text: dict[str, str]) -> str:
    """A hash of the text and of all settings that are not the defaults."""
    defaults = sections.flatten(config_lib.to_dict(config_lib.Config()))
    settings = {
        name: value
        for name, value in sections.flatten(config_lib.to_dict(config)).items()
        if not name.startswith(_FREE) and value != defaults[name]
    }
    steps = config.train.steps
    told = json.dumps([settings, steps, text], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]
