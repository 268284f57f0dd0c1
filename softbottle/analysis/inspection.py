"""The table of instruments, and all of them on the captures of a source.

An instrument is wired once, whatever the captures come from: it names the fields of
`Capture` that it needs, and captures in which one is None are left out of its section.
Every one that is left out is named with the reason, by the instrument that was asked
for or in one section at the end.

Axes of fields: L layers, W stretches of S positions, H attention heads.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from softbottle.analysis import curves
from softbottle.analysis.capture import Capture
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
    turns,
)
from softbottle.analysis.report import About, Section
from softbottle.analysis.settings import DEFAULT, Settings
from softbottle.analysis.sources import arrays, run, texts
from softbottle.data.vocab import Split


class Instrument(NamedTuple):
    """A line of the table.

    Attributes:
        inspect: the section on some captures, side by side.
        about: what the section explains itself by.
        needs: fields of `Capture` without which there is none.
        uses: fields that it looks at where they are there.
    """

    inspect: Callable[[Sequence[Capture], Settings], Section]
    about: About
    needs: tuple[str, ...]
    uses: tuple[str, ...] = ()


INSTRUMENTS: dict[str, Instrument] = {
    "curve": Instrument(curves.inspect, curves.ABOUT, ("validations",)),
    "rank": Instrument(rank.inspect, rank.ABOUT, ("tokens",)),
    "saturation": Instrument(
        saturation.inspect, saturation.ABOUT, ("table_VE",), ("states",)
    ),
    "training": Instrument(turns.inspect, turns.ABOUT, ("series",)),
    "attention": Instrument(
        attention_layers.inspect, attention_layers.ABOUT, ("states", "logits_LWHS")
    ),
    "gradient": Instrument(gradient.inspect, gradient.ABOUT, ("mixed",)),
    "lowrank": Instrument(lowrank.inspect, lowrank.ABOUT, ("frozen",)),
    "argmax": Instrument(argmax.inspect, argmax.ABOUT, ("trials",)),
    "ngram": Instrument(ngram.inspect, ngram.ABOUT, ("text",)),
    "limits": Instrument(attention.inspect, attention.ABOUT, ("attention_rows",)),
    "scaling": Instrument(scaling.inspect, scaling.ABOUT, ("models",)),
}
_ABSENT = {
    "validations": "there are no validations among its metrics",
    "tokens": "the states that its head reads are not known",
    "table_VE": "there is no output table",
    "series": "it has no series of checkpoints (train.series=True stores one)",
    "states": "the states of its layers are not known",
    "logits_LWHS": "no attention logits of its layers are known",
    "mixed": ("states with labels are not known, or its words have contexts by class"),
    "frozen": "states with labels are not known",
    "trials": "there is no single linear map that ranks its words",
    "text": "there is no text to count n-grams in",
    "attention_rows": "there are no logits and values of an attention layer",
    "models": "there are no parameters, tokens and losses of trained models",
}

# By default all but the one that trains.
PRETRAINED = ("rank", "saturation", "attention", "gradient", "argmax", "ngram")
RUNS = ("curve", "rank", "saturation", "training", *PRETRAINED[2:])
BARE = ("rank", "saturation", "gradient")  # of arrays that nothing more is known about
_ALWAYS = ("limits", "scaling")  # of arrays, wherever the file has what they need


def sections(
    captures: Sequence[Capture],
    names: Sequence[str],
    settings: Settings = DEFAULT,
    *,
    asked: Sequence[str] = (),
) -> list[Section]:
    """Sections on captures side by side, and what was left out with the reason.

    Args:
        captures: what is looked at; their names differ.
        names: from `INSTRUMENTS`, in the order of the report.
        settings: how closely.
        asked: those of the names that were asked for one by one. Where such an
            instrument leaves a capture out, a section in its place says why; for all
            others the last section does.

    Raises:
        ValueError: for an unknown instrument, or what an instrument refuses.
    """
    check(names)
    written, left_out = [], {}
    for name in names:
        instrument = INSTRUMENTS[name]
        reasons = {capture.name: _absent(capture, instrument) for capture in captures}
        fit = [capture for capture in captures if reasons[capture.name] is None]
        if fit:
            section = instrument.inspect(fit, settings)
            written.append(section._replace(about=instrument.about))
        reasons = {key: reason for key, reason in reasons.items() if reason}
        if reasons and name in asked:
            written.append(_skipped(name, reasons))
        elif reasons:
            left_out[name] = reasons
    return [*written, _left_out(left_out)] if left_out else written


def check(names: Sequence[str]) -> None:
    """Raise ValueError unless all names are instruments, and there is one."""
    unknown = [name for name in names if name not in INSTRUMENTS]
    if unknown or not names:
        raise ValueError(f"no instrument {unknown}; there are {list(INSTRUMENTS)}.")


def of_runs(
    workdirs: Sequence[pathlib.Path | str],
    asked: Sequence[str] | None = None,
    split: Split = "test",
    positions: int | None = None,
    settings: Settings = DEFAULT,
) -> list[Section]:
    """Sections on one run, or on several side by side.

    Args:
        workdirs: the runs' folders; a run is called by its folder's name.
        asked: names from `INSTRUMENTS`, in the order of the report; None for `RUNS`.
        split: the text that is read, "train", "valid" or "test".
        positions: how much of it; None as `run.read`.
        settings: how closely.

    Raises:
        ValueError: for an unknown instrument, a folder without a run, two folders of
            one name, or a text shorter than two words.
    """
    names = RUNS if asked is None else asked
    check(names)
    folders = [pathlib.Path(workdir).resolve().name for workdir in workdirs]
    if len(set(folders)) < len(folders):
        raise ValueError(f"the runs need folders of different names, got {folders}.")
    lines = [INSTRUMENTS[name] for name in names]
    parts = {field for line in lines for field in (*line.needs, *line.uses)}
    captures = [run.read(workdir, parts, split, positions) for workdir in workdirs]
    return sections(captures, names, settings, asked=asked or ())


def of_arrays(
    path: pathlib.Path | str,
    asked: Sequence[str] | None = None,
    settings: Settings = DEFAULT,
) -> list[Section]:
    """Sections on arrays from anywhere.

    Args:
        path: an .npz file, as `arrays.capture` reads it.
        asked: names from `INSTRUMENTS`; None for `BARE`. The limits of an attention
            layer and the scaling law follow where the file has what they need.
        settings: how closely.

    Raises:
        ValueError: for an unknown instrument, and as `arrays.capture`.
    """
    check(BARE if asked is None else asked)
    capture = arrays.capture(path)
    # A file without a head is not asked for what needs one.
    bare = BARE if capture.table_VE is not None else ()
    names = list(bare if asked is None else asked)
    names += [
        name
        for name in _ALWAYS
        if name not in names and not _absent(capture, INSTRUMENTS[name])
    ]
    try:
        return sections([capture], names, settings, asked=asked or ())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def of_texts(
    paths: Sequence[pathlib.Path | str],
    asked: Sequence[str] | None = None,
    settings: Settings = DEFAULT,
    vocab: int = 10_000,
) -> list[Section]:
    """Sections on texts side by side, each named by its file or folder.

    Args:
        paths: files or folders.
        asked: names from `INSTRUMENTS`; None for the n-grams alone.
        settings: how closely.
        vocab: words that are told apart.

    Raises:
        ValueError: as `texts.captures`, or if a text is shorter than the order.
    """
    names = ("ngram",) if asked is None else asked
    check(names)
    captures = texts.captures(paths, vocab)
    return sections(captures, names, settings, asked=asked or ())


def of_pretrained(
    capture: Capture,
    asked: Sequence[str] | None = None,
    settings: Settings = DEFAULT,
) -> list[Section]:
    """Sections on a model that others trained.

    Args:
        capture: of `hugging_face.from_hf` or `hugging_face.from_gguf`.
        asked: names from `INSTRUMENTS`; None for `PRETRAINED`.
        settings: how closely.

    Raises:
        ValueError: for an unknown instrument, or what an instrument refuses.
    """
    names = PRETRAINED if asked is None else asked
    return sections([capture], names, settings, asked=asked or ())


def _absent(capture, instrument):
    """Why an instrument leaves a capture out, or None."""
    absent = (need for need in instrument.needs if getattr(capture, need) is None)
    return next((capture.absent.get(need, _ABSENT[need]) for need in absent), None)


def _skipped(name, reasons):
    """The line that stands for an instrument, or for the captures it leaves out."""
    causes = "; ".join(f"{key}: {reason}" for key, reason in reasons.items())
    return Section(name, f"skipped: {causes}.", [], {"skipped": reasons})


def _left_out(skipped):
    """The section on instruments that run by default and could not."""
    lines = [
        f"{name} ({'; '.join(f'{key}: {reason}' for key, reason in reasons.items())})"
        for name, reasons in skipped.items()
    ]
    return Section("Left out", f"{', '.join(lines)}.", [], {"skipped": skipped})
