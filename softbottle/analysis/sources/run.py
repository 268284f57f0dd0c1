"""Our own runs: what they hold along a text, now and along the training.

The states of every layer come from one row of text in stretches of `data.eval_length`
positions. What the head reads comes from `data.eval_rows` rows, as in validation: it is
what the run's perplexity is made of. Where the lines of a text are packed into rows, a
line is read by itself everywhere, as in training. A run whose rows are single lines
(`data.unit` of lines or answers) is read as one stream nevertheless; its facts say so.

Axes: L layers, W stretches, H (in a backbone's own arrays N) attention heads, S
positions of a stretch, N = W S.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.analysis import curves
from softbottle.analysis.capture import (
    SAMPLE,
    Capture,
    Checkpoint,
    Mixed,
    Readout,
    Text,
    Tokens,
    Trials,
    enough,
    joined,
    present,
    sizes_below,
)
from softbottle.analysis.instruments.predictions import spread
from softbottle.analysis.sources.reading import Reading, token_ids
from softbottle.data import batches
from softbottle.data import lines as lines_lib
from softbottle.data.vocab import Split
from softbottle.model import Params, count_parameters
from softbottle.ops.mixture import classes
from softbottle.training import checkpoint, evaluate, metrics
from softbottle.training.state import Run, load_corpus, load_run

POSITIONS = 8192  # that are read by default, or more for a wide head
_DIMENSIONS = 512  # of the text's next-word matrix, at most


class Inner(NamedTuple):
    """What a backbone holds along a text.

    Attributes:
        states: [N, D] by layer, the embedded words first; the head reads the last.
        logits_LWHS: of a transformer, attention logits of the last position of each of
            W whole stretches of S positions, N = W S; or None.
    """

    states: list[np.ndarray]
    logits_LWHS: np.ndarray | None


Reader = Callable[[Params, np.ndarray], Inner]


def read(
    workdir: pathlib.Path | str,
    parts: Collection[str],
    split: Split = "test",
    positions: int | None = None,
    text: pathlib.Path | str | None = None,
    in_order: bool = False,
) -> Capture:
    """The capture of a run, called by its folder's name.

    Args:
        workdir: the run's folder.
        parts: fields of `Capture` to fill; the others cost nothing and stay None.
        split: the text that is read, "train", "valid" or "test".
        positions: how much of it; None reads `POSITIONS`, or `enough` of them for the
            width of the head's table.
        text: a file that is read instead of a split, text or ids in .npy.
        in_order: the head reads the text as one row, and `tokens` has the positions one
            after the other, whatever rows and stretches the run is evaluated in.

    Raises:
        ValueError: for a folder without a run, or a text shorter than two words.
    """
    workdir = pathlib.Path(workdir)
    run = load_run(workdir, "float32")
    if text is None:
        corpus = load_corpus(workdir, run, split)
        whole, counted = corpus.splits[split], corpus.train
    else:
        whole = counted = token_ids(Reading(text), len(run.vocab), run.vocab.encode)
    width = run.model.output(run.params)[1].shape[1]
    ids = whole[: (positions or enough(width, POSITIONS)) + 1]
    reader = make_reader(run)
    lines = metrics.read(workdir) if "validations" in parts else []
    series = Series(workdir, run, ids, reader)
    counts = Text(np.asarray(counted), len(run.vocab), _DIMENSIONS, "text of {}")
    rows = 1 if in_order else run.config.data.eval_rows
    found = capture(workdir.resolve().name, run, ids, parts, reader, rows)
    source = (
        f"{split} text of {run.config.data.name}"
        if text is None
        else (pathlib.Path(text).name)
    )
    fact = (
        f"Text: {source}, {len(whole):,} tokens. Read: the first {len(ids) - 1:,}, in "
        f"{rows} {'row' if rows == 1 else 'rows'}."
    )
    return dataclasses.replace(
        found,
        facts=(*found.facts, fact),
        text=counts if "text" in parts else None,
        validations=lines if curves.validations(lines) else None,
        series=series if "series" in parts and steps(workdir) else None,
    )


def capture(
    name: str,
    run: Run,
    ids: np.ndarray,
    parts: Collection[str],
    reader: Reader | None = None,
    rows: int | None = None,
) -> Capture:
    """What a run holds along a text; without what only its folder knows.

    Args:
        name: of the run.
        run: its model and parameters.
        ids: the text.
        parts: fields of `Capture` to fill.
        reader: what `make_reader` gave for this run, if it is there already.
        rows: of the text as the head reads it; None for `data.eval_rows`.

    Raises:
        ValueError: if the text is shorter than two words.
    """
    _check(ids)
    output, options = run.model.output(run.params), run.model.options
    words = options.vocab
    table_VE, bias_V = (np.asarray(array[:words]) for array in output[1:])
    inner = Inner([], None)
    if {"states", "logits_LWHS"} & set(parts):
        inner = (reader or make_reader(run))(run.params, ids)
    tokens = None
    if {"tokens", "frozen"} & set(parts):
        tokens = _tokens(run, ids, rows)
    return Capture(
        name,
        table_VE,
        bias_V,
        readout=Readout(run.model.head, output, options),
        tokens=tokens,
        mixed=mixed(run, ids) if "mixed" in parts else None,
        frozen=joined(tokens) if tokens and "frozen" in parts else None,
        trials=_trials(*table_VE.shape) if run.model.head.is_linear else None,
        states=inner.states or None,
        logits_LWHS=inner.logits_LWHS,
        parameters=count_parameters(run.params, len(table_VE)),
        trained=run.step * run.config.data.rows * run.config.data.length,
        family=f"{run.config.head.name} on {run.config.model.backbone}",
        facts=_facts(name, run, table_VE.shape),
        words=run.vocab.words,
    )


def mixed(run: Run, ids: np.ndarray, positions: int = SAMPLE) -> Mixed | None:
    """The head's contexts and mixture weights along the start of a text.

    None if they are by class of words, or words have others of their own: a gradient
    then passes by more than these.
    """
    if not run.model.head.mixes_all:
        return None
    hidden_TD, labels_T = joined(_tokens(run, ids[: positions + 1]))
    params = run.model.output(run.params)[0]
    log_prior_TK, context_TKE = run.model.head.mix(params, jnp.asarray(hidden_TD))
    if classes.count(context_TKE) > 1:
        return None
    place_Tk = run.model.head.components_of(params, jnp.asarray(hidden_TD))
    if place_Tk is not None:
        count = run.model.head.contexts
        log_prior_TK = spread(log_prior_TK, place_Tk, count, -jnp.inf)
        context_TKE = spread(context_TKE, place_Tk, count, 0.0)
    activation = run.model.head.activation(params)
    return Mixed(
        np.asarray(log_prior_TK),
        np.asarray(context_TKE),
        present("labels_T", labels_T),
        activation,
    )


def make_reader(run: Run) -> Reader:
    """A compiled `read(params, ids) -> Inner` of a run's backbone.

    It is compiled once, whatever parameters it is called with: those of every
    checkpoint of a series have the same shapes.
    """
    backbone, cut = run.model.backbone, _cut(run)
    empty = backbone.initial_carry(1)

    @jax.jit
    def stretch(params, batch, carry):
        embedded_BSE = params["table_VE"][batch.ids_BS]
        trunk, variables = backbone.apply(
            {"params": params["backbone"]},
            embedded_BSE.astype(run.config.model.compute_dtype),
            carry,
            batch.segments_BS,
            train=False,
            mutable=["intermediates"],
        )
        between = variables.get("intermediates", {})
        hidden_BSD = run.model.read(trunk.hidden_BSD)
        return (embedded_BSE, hidden_BSD, between), trunk.carry

    def read(params, ids):
        _check(ids)
        length = min(run.config.data.eval_length, len(ids) - 1)
        parts, carry = [], empty
        end = (len(ids) - 1) // length * length
        for batch in (cut or batches.evaluation)(ids[: end + 1], 1, length):
            held, carry = stretch(params, batch, carry)
            carry = carry if cut is None else empty
            parts.append(_layers(*held))
        states, logits = zip(*parts, strict=True)
        layers = [np.concatenate(layer) for layer in zip(*states, strict=True)]
        return Inner(layers, None if logits[0] is None else np.stack(logits, axis=1))

    return read


def inner(run: Run, ids: np.ndarray) -> Inner:
    """States of every layer along a text, but for a last stretch that is not whole.

    Raises:
        ValueError: if the text is shorter than two words.
    """
    return make_reader(run)(run.params, ids)


def steps(workdir: pathlib.Path) -> list[int]:
    """The steps whose parameters a run stored in its series, rising."""
    return checkpoint.sealed_steps(workdir / "series")


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """The checkpoints of a run's series, which are read as they are iterated over.

    Attributes:
        workdir: the run's folder.
        run: its model.
        ids: the text on which its states and losses are taken.
        reader: what `make_reader` gave for this run.
        scored: a text for the losses alone; None: `ids`.
    """

    workdir: pathlib.Path
    run: Run
    ids: np.ndarray
    reader: Reader
    scored: np.ndarray | None = None

    def __iter__(self) -> Iterator[Checkpoint]:
        """Each checkpoint, in the order of the steps."""
        model, ids, data = self.run.model, self.ids, self.run.config.data
        cut = _cut(self.run)
        score = evaluate.make_evaluator(model, cut=cut)
        words, length = model.vocab, data.eval_length
        scored = ids if self.scored is None else self.scored
        # Lines that are read by themselves do not ask for the text's order.
        whole = max(1, (len(scored) - 1) // length)
        rows = 1 if cut is None else min(data.eval_rows, whole)
        for step in steps(self.workdir):
            params, _ = checkpoint.read(self.workdir / "series", step, self.run.params)
            table_VE = np.asarray(model.output(params)[1][:words])
            last_ND = self.reader(params, ids).states[-1]
            loss = score(params, scored, rows, length).loss
            yield Checkpoint(step, table_VE, last_ND, loss)


def _cut(run):
    """How a text is cut for a run whose lines are packed; None for one stream."""
    if run.config.data.unit != "packed":
        return None
    return lines_lib.cut(run.config.data, run.vocab)


def _facts(name, run, shape):
    (size, width), unit = shape, run.config.data.unit
    facts = (
        f"Model: {name}, {run.model.head!r} on {run.config.model.backbone}, width "
        f"{width:,}, {size:,} words, the best of its validations (step {run.step:,}).",
    )
    if unit in ("stream", "packed"):
        return facts
    return (
        *facts,
        f"Its text is read here as one stream, in its validation by {unit} "
        "(data.unit): losses are not those of its validation.",
    )


def _tokens(run, ids, rows=None):
    data = run.config.data
    shape = rows or data.eval_rows, data.eval_length
    blocks = evaluate.states(run.model, run.params, ids, *shape, _cut(run))
    return [Tokens(hidden_CD, labels_C) for hidden_CD, _, labels_C in blocks]


def _trials(vocab, dim):
    return Trials(None, sizes_below(vocab, (1, 2, dim // 4, dim // 2, dim)), 20)


def _layers(embedded_BSE, hidden_BSD, between):
    """States [S, D] of one stretch by layer, and its attention logits."""
    inside, logits_LHS = list(between.get("inner_BSH", ())), None
    if "entering_LBSD" in between:
        # The first is the embedded words, projected where their width differs.
        inside = list(between["entering_LBSD"][0][1:])
        logits_LHS = np.asarray(between["logits_LBNS"][0][:, 0], np.float32)
    layers = (embedded_BSE, *inside, hidden_BSD)
    return [np.asarray(layer[0], np.float32) for layer in layers], logits_LHS


def _check(ids):
    if len(ids) < 2:
        raise ValueError(f"a text of two words or more is needed, got {len(ids)}.")
