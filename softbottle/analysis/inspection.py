"""All the instruments on one thing: trained runs side by side, or bare arrays."""

import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from softbottle.analysis import captured, curves
from softbottle.analysis.asked import USUAL, Asked
from softbottle.analysis.instruments import (
    argmax,
    attention,
    attention_layers,
    gradient,
    lowrank,
    ngram,
    rank,
    saturation,
    scaling,
)
from softbottle.analysis.report import Section
from softbottle.analysis.sources import arrays as arrays_lib
from softbottle.analysis.sources import run as training
from softbottle.data.vocab import Corpus
from softbottle.training import evaluate, metrics
from softbottle.training.state import Run, load_corpus, load_run

_DIMENSIONS = 512  # of the text's next-word matrix, at most


class Subject(NamedTuple):
    """A run, its corpus, and the stretch of text that it is looked at on."""

    workdir: pathlib.Path
    run: Run
    corpus: Corpus
    ids: np.ndarray


def of_runs(
    workdirs: Sequence[pathlib.Path | str],
    instruments: Sequence[str],
    split: str = "test",
    positions: int = 8192,
    asked: Asked = USUAL,
) -> list[Section]:
    """Sections on one run, or on several side by side.

    Args:
        workdirs: the runs' folders; a run is called by its folder's name.
        instruments: names from `INSTRUMENTS`, in the order of the report.
        split: the text that is read, "train", "valid" or "test".
        positions: how much of it.
        asked: how closely.

    Raises:
        ValueError: for an unknown instrument, a folder without a run, two folders of
            one name, or a text shorter than two words.
    """
    unknown = [name for name in instruments if name not in INSTRUMENTS]
    if unknown or not instruments:
        raise ValueError(f"no instrument {unknown}; there are {list(INSTRUMENTS)}.")
    names = [pathlib.Path(workdir).resolve().name for workdir in workdirs]
    if len(set(names)) < len(names):
        raise ValueError(f"the runs need folders of different names, got {names}.")
    subjects = {
        name: _subject(workdir, split, positions)
        for name, workdir in zip(names, workdirs, strict=True)
    }
    sections = [INSTRUMENTS[name](subjects, asked) for name in instruments]
    return [section for section in sections if section is not None]


def of_arrays(
    path: pathlib.Path | str,
    instruments: Sequence[str] = captured.BARE,
    asked: Asked = USUAL,
) -> list[Section]:
    """Sections on a head's or an attention layer's arrays from anywhere.

    Args:
        path: an .npz file with `hidden` [N, D] and `table` [V, D], and if there are
            any `bias` [V] and `labels` [N]; or with attention `logits` [R, L] and
            `values` [L, D]; or with `parameters`, `tokens` and `loss` [M] of trained
            models, and if there are any their `names` [M] and which are to be `fitted`
            [M]; or with all of these.
        instruments: names from `captured.INSTRUMENTS` for the head's arrays.
        asked: how closely.

    Raises:
        ValueError: if the file is of another kind or larger than it says, or an array
            is missing, has another shape, is complex or is not finite.
    """
    arrays = arrays_lib.load(path)
    try:
        return _array_sections(pathlib.Path(path).stem, arrays, instruments, asked)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _array_sections(name, arrays, instruments, asked):
    texts = [key for key, array in arrays.items() if array.dtype.kind in "US"]
    if set(texts) - {"names"}:
        raise ValueError(f"{texts} hold texts; only names may.")
    sections = []
    if {"hidden", "table"} <= set(arrays):
        capture = captured.Capture(
            name,
            arrays["table"],
            arrays.get("bias"),
            [arrays["hidden"]],
            arrays.get("labels"),
        )
        sections += captured.sections(capture, instruments, asked)
    if {"logits", "values"} <= set(arrays):
        found = attention.survey(arrays["logits"], arrays["values"])
        sections.append(attention.section(found))
    if {"parameters", "tokens", "loss"} <= set(arrays):
        sections.append(
            scaling.of_models(
                *(arrays[name] for name in ("parameters", "tokens", "loss")),
                arrays.get("names"),
                arrays.get("fitted"),
            )
        )
    if not sections:
        raise ValueError(
            "it needs hidden and table, or logits and values, or parameters, tokens "
            f"and loss; it has {sorted(arrays)}."
        )
    return sections


def _subject(workdir, split, positions):
    run = load_run(workdir, "float32")
    corpus = load_corpus(workdir, run, split)
    return Subject(
        pathlib.Path(workdir), run, corpus, getattr(corpus, split)[: positions + 1]
    )


def _curve(subjects, asked):
    """Only where a run has metrics of its validations."""
    del asked
    found = {name: metrics.read(one.workdir) for name, one in subjects.items()}
    found = {name: lines for name, lines in found.items() if curves.validations(lines)}
    return curves.section(found) if found else None


def _rank(subjects, asked):
    return rank.section(
        {
            name: rank.of_run(one.run, one.ids, asked.precision)
            for name, one in subjects.items()
        }
    )


def _saturation(subjects, asked):
    del asked
    states, heads = {}, {}
    for name, one in subjects.items():
        inner = training.inner(one.run, one.ids)
        states[name] = saturation.layers(inner.states)
        heads[name] = saturation.head(_table(one.run)[0])
    return saturation.section(states, heads)


def _attention(subjects, asked):
    """Only where there is attention."""
    del asked
    found = {}
    for name, one in subjects.items():
        if one.run.config.model.backbone == "transformer":
            inner = training.inner(one.run, one.ids)
            entering = inner.states[: len(inner.logits_LWHS)]
            found[name] = attention_layers.measure(inner.logits_LWHS, entering)
    return attention_layers.section(found) if found else None


def _training(subjects, asked):
    """Only where a run kept its series of checkpoints."""
    del asked
    found = {
        name: saturation.curves(training.checkpoints(one.workdir, one.run, one.ids))
        for name, one in subjects.items()
        if training.steps(one.workdir)
    }
    return saturation.run_section(found) if found else None


def _gradient(subjects, asked):
    del asked
    return gradient.section(
        {name: gradient.of_run(one.run, one.ids) for name, one in subjects.items()}
    )


def _lowrank(subjects, asked):
    """Heads of every power of two up to the width of the states."""
    del asked
    found = {}
    for name, one in subjects.items():
        data = one.run.config.data
        how = one.ids, data.eval_rows, data.eval_length
        parts = list(evaluate.states(one.run.model, one.run.params, *how))
        hidden_ND, _, labels_N = (np.concatenate(p) for p in zip(*parts, strict=True))
        width, table_VE = hidden_ND.shape[1], _table(one.run)[0]
        ranks = {min(2**power, width) for power in range(width.bit_length() + 1)}
        found[name] = lowrank.train(
            hidden_ND, labels_N, len(table_VE), sorted(ranks), table_VE
        )
    return lowrank.section(found)


def _argmax(subjects, asked):
    """Only where the words are ranked by one linear map: softmax heads."""
    del asked
    linear = {
        name: _table(one.run)
        for name, one in subjects.items()
        if one.run.model.head.is_linear
    }
    if not linear:
        return None
    reaches = {name: argmax.reach(*table) for name, table in linear.items()}
    sets = {
        name: argmax.top_sets(*table, sizes=_sizes(*table[0].shape), trials=20)
        for name, table in linear.items()
    }
    return argmax.section(reaches, sets)


def _sizes(vocab, dim):
    return sorted(
        {size for size in (1, 2, dim // 4, dim // 2, dim) if 0 < size < vocab}
    )


def _ngram(subjects, asked):
    """One line for each text: runs that were trained on the same one share it."""
    sharing = {}
    for name, one in subjects.items():
        text = np.asarray(one.corpus.train)
        sharing.setdefault(hash(text.tobytes()), (one, text, []))[2].append(name)
    errors, widths = {}, {}
    for one, text, names in sharing.values():
        table = ngram.next_word(text, len(one.corpus.vocab), asked.order)
        dimensions = min(asked.dimensions or _DIMENSIONS, *table.matrix_CV.shape)
        title = "text of " + ", ".join(names)
        errors[title] = ngram.w_error(table.matrix_CV, dimensions)
        widths[title] = {name: _table(subjects[name].run)[0].shape[1] for name in names}
    return ngram.section(errors, widths)


def _table(run):
    """The words' rows of the output table, and their biases."""
    _, table_VE, bias_V = run.model.output(run.params)
    words = run.model.options["vocab"]
    return np.asarray(table_VE[:words]), np.asarray(bias_V[:words])


# By default all but the one that trains.
QUICK = (
    "curve",
    "rank",
    "saturation",
    "training",
    "attention",
    "gradient",
    "argmax",
    "ngram",
)
INSTRUMENTS: dict[str, Callable[..., Section | None]] = {
    "curve": _curve,
    "rank": _rank,
    "saturation": _saturation,
    "training": _training,
    "attention": _attention,
    "gradient": _gradient,
    "lowrank": _lowrank,
    "argmax": _argmax,
    "ngram": _ngram,
}
