"""A mixture put in the place of a softmax: is it ever worse?

Small models are trained with either head on everything that a new user may have:
backbone, tied or untied table, standard deviation of the table's start, Adam's learning
rate. All else is the same: data, order, steps, width of the table and of the state.

The rule, written before its runs. A seed is a start of the parameters and a place of
the text at which training begins. Every head has the same seeds, and is judged by its
mean over them. A head's noise is the standard deviation of its validation loss over the
seeds, at the same point, pooled over the points of the same learning rate. A mixture is
worse at a point if its mean is above the softmax's by more than twice the standard
error of their difference; one seed has no noise, and decides nothing. A component is
dead if its share of the prior, averaged over the validation text, is below a hundredth
of an equal share.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from softbottle import config as config_lib
from softbottle import files, sections
from softbottle import model as model_lib
from softbottle import variants as variants_lib
from softbottle.data import corpus as corpora
from softbottle.data.batches import Batch, Stream, evaluation
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.frontier.arms import fingerprint
from softbottle.training import lock
from softbottle.training import step as step_lib

Row = rows_lib.Row
SOFTMAX = "softmax"
# By the name of their rows; `config.head` of each. The first is what users put in.
RIVALS: dict[str, Row] = {
    "mos": {"name": "mos", "components": 4},
    "mos linear": {"name": "mos", "components": 4, "context": "linear"},
    "mos tanh": {"name": "mos", "components": 4, "context": "tanh"},
    "moc": {"name": "moc", "components": 4},
    "partition": {"name": "partition", "classes": 4},
}
DEVIATIONS = (0.02, 0.1, 0.5, 1.0)
RATES = (1e-3, 3e-3, 1e-2)
TIED = (True, False)
VALIDATED = 40  # batches
PLACES = 16  # of the text at which a training may begin
# What the loop here does not do, of the settings that change what a model learns.
_NOT_DONE = (
    *("data.unit", "data.variable", "cache.objective"),
    *("regularise.activation", "regularise.slowness", "regularise.balance"),
    *("optim.name", "optim.table_learning_rate", "optim.slope_learning_rate"),
    *("optim.warmup_steps", "optim.decay_steps", "optim.weight_decay"),
    *("optim.averaging", "optim.accumulate"),
    *("train.epochs", "train.init_from", "train.stop_patience"),
)


class Point(NamedTuple):
    """Where a head is put."""

    backbone: str
    tied: bool
    deviation: float
    rate: float


def run(
    config: config_lib.Config,
    workdir: pathlib.Path | str,
    rivals: Sequence[str],
    seeds: int,
    rates: Sequence[float] = RATES,
) -> list[Row]:
    """Train every rival and a softmax at every point; resumes where it stopped.

    Args:
        config: the backbone, the text and the steps; of its head only how the loss is
            computed is read.
        workdir: where `dropin.jsonl` and `dropin.md` go.
        rivals: names of RIVALS.
        seeds: how many models per head and point.
        rates: the learning rates of the points.

    Returns:
        The rows: a line of dropin.jsonl each.

    Raises:
        ValueError: if there is no such rival, a rate is not positive or none is given,
            the config has settings that are not followed here or widths that no softmax
            has, `workdir` has rows of other settings or lines that are no rows, or
            another process is at work there.
    """
    for name in rivals:
        if name not in RIVALS:
            raise ValueError(f"no rival is called {name!r}; there are {list(RIVALS)}.")
    if not rates or not all(rate > 0 for rate in rates):
        raise ValueError(f"the learning rates must be positive, got {list(rates)}.")
    _check_followed(config)
    heads = {SOFTMAX: {"name": SOFTMAX}} | {name: RIVALS[name] for name in rivals}
    variants = {
        (tied, name): variant(config, head, tied)
        for tied, (name, head) in itertools.product(TIED, heads.items())
    }
    corpus = corpora.load(config.data)
    told = corpora.digest(corpus) | {"begins": f"at one of {PLACES} places"}
    mark = fingerprint(variant(config, {"name": SOFTMAX}, True), told)
    workdir = pathlib.Path(workdir)
    path = workdir / "dropin.jsonl"
    with lock.Lock(workdir):
        return _finish(path, variants, corpus, mark, seeds, rates)


def _finish(path, variants, corpus, mark, seeds, rates):
    """Train what has no row yet, and write the table."""
    rows = rows_lib.read(path, lambda row: (_identity(row), row["fingerprint"]))
    if any(row["fingerprint"] != mark for row in rows):
        raise ValueError(f"{path} has rows of other settings or of another text.")
    done = {_identity(row) for row in rows}
    for (tied, name), settings in variants.items():
        trainer = None
        for deviation, rate, seed in itertools.product(DEVIATIONS, rates, range(seeds)):
            point = Point(settings.model.backbone, tied, deviation, rate)
            row = {"head": name, "seed": seed, **point._asdict(), "fingerprint": mark}
            if _identity(row) in done:
                continue
            if trainer is None:
                trainer = _Trainer(settings, corpus)
            rows.append(row | trainer.train(deviation, rate, seed))
            rows_lib.write(path, rows)
            print(json.dumps(rows[-1]), flush=True)
    text = report(rows, seeds)
    files.replace(path.with_suffix(".md"), text + "\n")
    print(text)
    return rows


def variant(config: config_lib.Config, head: Row, tied: bool) -> config_lib.Config:
    """The config with a head and a table of its own.

    Raises:
        ValueError: if the widths of state and table do not go with the head.
    """
    changed = variants_lib.replace_head(config, head)
    changed.model.tied = tied
    changed = config_lib.validate(changed)
    model_lib.make_head(changed)
    return changed


def noise(rows: Sequence[Row], head: str, rate: float) -> float:
    """A head's standard deviation over seeds, pooled over a rate's points."""
    variances = [
        float(np.var(losses, ddof=1))
        for point, losses in _by_point(rows, head).items()
        if point.rate == rate and len(losses) > 1 and np.all(np.isfinite(losses))
    ]
    return float(np.sqrt(np.mean(variances))) if variances else math.nan


def report(rows: Sequence[Row], seeds: int) -> str:
    """A table for every backbone and table: mean losses over seeds, and verdicts.

    Args:
        rows: of runs. A head is left out, and named, unless it has all seeds at every
            point: a call that was stopped may have left a part.
        seeds: how many are compared; there may be rows of more.
    """
    rows = [row for row in rows if row["seed"] < seeds]
    asked = {(_point(row), row["seed"]) for row in rows if row["head"] == SOFTMAX}
    names: list[str] = []
    left_out: list[str] = []
    for name in dict.fromkeys(row["head"] for row in rows if row["head"] != SOFTMAX):
        runs = {(_point(row), row["seed"]) for row in rows if row["head"] == name}
        (names if runs >= asked else left_out).append(name)
    by_head = {
        name: {point: float(np.mean(x)) for point, x in _by_point(rows, name).items()}
        for name in (SOFTMAX, *names)
    }
    rates = sorted({point.rate for point in by_head[SOFTMAX]})
    noises = {
        name: {rate: noise(rows, name, rate) for rate in rates} for name in by_head
    }
    text = [f"Standard deviation over {seeds} seeds, in nats by learning rate:", ""]
    for name, by_rate in noises.items():
        told = ", ".join(f"{value:.4f} at {rate:g}" for rate, value in by_rate.items())
        text.append(f"- {name}: {told}")
    text.append("")
    if left_out:
        text += [f"Left out, without all of these runs: {', '.join(left_out)}.", ""]
    if seeds == 1:
        text += ["One seed has no noise to judge by: nothing is said to be worse.", ""]
    verdicts = [
        _verdict(name, rows, by_head, noises, seeds)
        for name in by_head
        if name != SOFTMAX
    ]
    titles = ["head", "points", "worse", "worst, nats", "mean, nats", "runs with dead"]
    text.append(rows_lib.table(titles, verdicts))
    for kind, points in itertools.groupby(
        sorted(by_head[SOFTMAX]), key=lambda point: point[:2]
    ):
        text += ["", f"{kind[0]}, {'tied' if kind[1] else 'untied'}:", ""]
        lines = []
        for point in points:
            means = [f"{losses[point]:.3f}" for losses in by_head.values()]
            lines.append([str(point.deviation), str(point.rate), *means])
        text.append(rows_lib.table(["std", "rate", *by_head], lines))
    return "\n".join(text)


def _verdict(name, rows, by_head, noises, seeds):
    """The cells of a head beside the softmax."""
    differences = {
        point: _behind(loss, by_head[SOFTMAX][point])
        for point, loss in by_head[name].items()
    }
    margins = {
        rate: 2 * math.hypot(noises[SOFTMAX][rate], own) / seeds**0.5
        for rate, own in noises[name].items()
    }
    # A loss that is not a number is as bad as can be.
    worse = sum(
        difference > 0 and not difference <= margins[point.rate]
        for point, difference in differences.items()
    )
    dead = sum(row.get("dead", 0) > 0 for row in rows if row["head"] == name)
    worst, mean = max(differences.values()), np.mean(list(differences.values()))
    judged = worse if seeds > 1 else "-"
    cells = [len(differences), judged, f"{worst:+.3f}", f"{mean:+.3f}", dead]
    return [name, *map(str, cells)]


def _behind(loss, softmax):
    """How much a loss is above the softmax's; one that is no number is infinite."""
    loss, softmax = (x if math.isfinite(x) else math.inf for x in (loss, softmax))
    return 0.0 if loss == softmax else loss - softmax


def _check_followed(config):
    """Raise ValueError, naming them, if settings of _NOT_DONE are not the defaults."""
    values = sections.flatten(config_lib.to_dict(config))
    usual = sections.flatten(config_lib.to_dict(config_lib.Config()))
    others = [
        f"{name}={values[name]!r} must be {usual[name]!r}"
        for name in _NOT_DONE
        if values[name] != usual[name]
    ]
    if others:
        raise ValueError(
            "dropin trains by Adam at a constant rate on a stream of text, for "
            f"train.steps, and follows no other setting: {', '.join(others)}."
        )


def _identity(row):
    return row["head"], row["seed"], _point(row)


def _point(row):
    return Point(*(row[field] for field in Point._fields))


def _by_point(rows: Sequence[Row], name: str) -> dict[Point, list[float]]:
    """The losses of a head at every point, by seed."""
    found: dict[Point, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        if row["head"] == name:
            found.setdefault(_point(row), []).append(row["loss"])
    return found


class _Trainer:
    """Trains a config's model from several starts, compiled once."""

    def __init__(self, config, corpus):
        self.model = model_lib.make(config, len(corpus.vocab))
        self.config = config
        data = config.data
        self.text = corpus.train
        passes = evaluation(corpus.valid, data.eval_rows, data.eval_length)
        few = list(itertools.islice(passes, VALIDATED))
        full = [batch for batch in few if batch.ids_BS.shape == few[0].ids_BS.shape]
        self.validation = jax.tree.map(lambda *arrays: np.stack(arrays), *full)
        self.bias_V = step_lib.bias_start(config.model, self.model, self.text)
        self.init = jax.jit(self.model.init)
        self.fit = jax.jit(self._fit)
        self.validate = jax.jit(self._validate)

    def train(self, deviation, rate, seed):
        """The validation loss, and the least share of a component."""
        params = self.init(jax.random.key(seed), self.bias_V)
        width = self.config.model.table_range / math.sqrt(3)
        for name in {"table_VE", "output_VE"} & params.keys():
            params[name] = params[name] * (deviation / width)
        key = jax.random.key(seed)
        params, losses = self.fit(params, rate, self._batches(seed), key)
        loss, shares = self.validate(params, self.validation)
        row = {"loss": float(loss), "last_training_loss": float(jnp.mean(losses[-50:]))}
        if len(shares) > 1:
            equal = 1 / len(shares)
            row["least_share"] = float(jnp.min(shares))
            row["dead"] = int(jnp.sum(shares < equal / 100))
        return row

    def _batches(self, seed):
        """Those of the whole training, from the seed's place of the text on."""
        begin = seed % PLACES * len(self.text) // PLACES
        data, text = self.config.data, np.roll(self.text, -begin)
        stream = Stream(text, data.rows, data.length)
        batches = [stream.next() for _ in range(self.config.train.steps)]
        return jax.tree.map(lambda *arrays: np.stack(arrays), *batches)

    def _fit(self, params, rate, batches, key):
        tx = optax.chain(
            optax.clip_by_global_norm(self.config.optim.clip or math.inf),
            optax.scale_by_adam(),
        )
        carry = self.model.initial_carry(self.config.data.rows)

        def step(state, numbered):
            (params, opt_state, carry), (number, batch) = state, numbered
            dropped = jax.random.fold_in(key, number)

            def mean(params):
                loss, after = self.model.loss(params, Batch(*batch), carry, dropped)
                return loss.total / loss.tokens, after

            (loss, carry), grads = jax.value_and_grad(mean, has_aux=True)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            updates = jax.tree.map(lambda update: -rate * update, updates)
            return (optax.apply_updates(params, updates), opt_state, carry), loss

        numbers = jnp.arange(self.config.train.steps)
        (params, *_), losses = jax.lax.scan(
            step, (params, tx.init(params), carry), (numbers, batches)
        )
        return params, losses

    def _validate(self, params, batches):
        carry = self.model.initial_carry(self.config.data.eval_rows)

        def score(carry, batch):
            batch = Batch(*batch)
            nll_BS, after = self.model.nll(params, batch, carry)
            hidden_BSD, _ = self.model.hidden(params, batch, carry)
            hidden_TD = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
            log_prior_TK = self.model.head.log_prior(params["head"], hidden_TD)
            shares = jnp.mean(jnp.exp(log_prior_TK), axis=0)
            return after, (jnp.sum(nll_BS), jnp.sum(batch.weights_BS), shares)

        _, (total, count, shares) = jax.lax.scan(score, carry, batches)
        return jnp.sum(total) / jnp.sum(count), jnp.mean(shares, axis=0)
