"""The table of instruments, and all of them on what a report looks into.

An instrument is wired once, whatever the captures come from: it names the fields of
`Capture` that it needs, and captures in which one is None are left out of its section.
It measures one capture at a time, and what it measured is put side by side when all
have been read: the arrays of one model are held at a time.

Every one that is left out is named with the reason, by the instrument that was asked
for or in one section at the end; so is a source that cannot be read.

Axes of fields: L layers, W stretches of S positions, H attention heads.
"""

import pathlib
from collections.abc import Sequence

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
    rank_section,
    saturation,
    scaling,
    sizes,
    turns,
)
from softbottle.analysis.measuring import Choice, Inspection, Instrument, survey
from softbottle.analysis.report import Section
from softbottle.analysis.settings import DEFAULT, Settings
from softbottle.analysis.sources import opening
from softbottle.analysis.sources.opening import Source
from softbottle.data.vocab import Split

INSTRUMENTS: dict[str, Instrument] = {
    "curve": Instrument(
        curves.of_capture, curves.section, curves.ABOUT, ("validations",)
    ),
    "rank": Instrument(
        rank.of_capture, rank_section.section, rank_section.ABOUT, ("tokens",)
    ),
    "saturation": Instrument(
        saturation.of_capture,
        saturation.compare,
        saturation.ABOUT,
        ("table_VE",),
        ("states",),
    ),
    "training": Instrument(turns.of_capture, turns.section, turns.ABOUT, ("series",)),
    "attention": Instrument(
        attention_layers.of_capture,
        attention_layers.section,
        attention_layers.ABOUT,
        ("states", "logits_LWHS"),
    ),
    "gradient": Instrument(
        gradient.of_capture, gradient.section, gradient.ABOUT, ("mixed",)
    ),
    "lowrank": Instrument(
        lowrank.of_capture, lowrank.section, lowrank.ABOUT, ("frozen",)
    ),
    "argmax": Instrument(argmax.of_capture, argmax.compare, argmax.ABOUT, ("trials",)),
    "ngram": Instrument(ngram.of_capture, ngram.compare, ngram.ABOUT, ("text",)),
    "sizes": Instrument(
        sizes.of_capture,
        sizes.section,
        sizes.ABOUT,
        ("parameters", "tokens"),
        after="rank",
        least=2,
    ),
    "limits": Instrument(
        attention.of_capture,
        attention.section,
        attention.ABOUT,
        ("attention_rows",),
        alone=True,
    ),
    "scaling": Instrument(
        scaling.of_capture, scaling.compare, scaling.ABOUT, ("models",), alone=True
    ),
}
# By default all but the one that trains.
PRETRAINED = ("rank", "saturation", "attention", "gradient", "argmax", "ngram")
RUNS = ("curve", "rank", "saturation", "training", *PRETRAINED[2:], "sizes")
BARE = ("rank", "saturation", "gradient")  # of arrays that nothing more is known about
_DEFAULTS = {"run": RUNS, "pretrained": PRETRAINED, "arrays": BARE, "text": ("ngram",)}
# Beside them, wherever there is what they need; nothing is said where there is not.
_OFFERED = {
    "run": ("sizes",),
    "pretrained": ("training", "sizes"),
    "arrays": ("limits", "scaling"),
    "text": (),
}


def inspect(
    sources: Sequence[Source],
    asked: Sequence[str] | None = None,
    settings: Settings = DEFAULT,
) -> Inspection:
    """All instruments on all sources, side by side, one source in memory at a time.

    Args:
        sources: what is looked into.
        asked: names from `INSTRUMENTS`, in the order of the report. None runs those
            that each kind of source is for.
        settings: how closely.

    Raises:
        ValueError: for an unknown instrument, for a source that is given twice, and if
            nothing could be measured since all was refused.
    """
    if asked is not None:
        check(asked)
        return survey(
            INSTRUMENTS, sources, asked, lambda source: Choice(asked), asked, settings
        )
    order = list(dict.fromkeys([*RUNS, *INSTRUMENTS]))
    return survey(INSTRUMENTS, sources, order, _by_default, (), settings)


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
        ValueError: for an unknown instrument, or if all that was to be measured is
            refused.
    """
    check(names)
    sources = [opening.of_capture(capture) for capture in captures]
    choice = Choice(names)
    return survey(
        INSTRUMENTS, sources, names, lambda source: choice, asked, settings
    ).sections


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
        ValueError: for an unknown instrument, a run that is given twice, or if no
            folder has a run, or a text of two words or more.
    """
    return inspect(opening.runs(workdirs, split, positions), asked, settings).sections


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
    return inspect(opening.files([path]), asked, settings).sections


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
    return inspect(opening.bare_texts(paths, vocab), asked, settings).sections


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
        ValueError: for an unknown instrument, or what all instruments refuse.
    """
    return inspect([opening.of_capture(capture)], asked, settings).sections


def _by_default(source):
    offered = _OFFERED[source.kind]
    return Choice([*dict.fromkeys([*_DEFAULTS[source.kind], *offered])], offered)
