"""Two models on one text: how their predictions differ, before all else there is.

Both captures are held at a time, and have to be of the same tokens: a run reads the
text as one row, whatever rows it is evaluated in.
"""

import pathlib
from collections.abc import Sequence

from softbottle.analysis import inspection
from softbottle.analysis.capture import Capture
from softbottle.analysis.instruments import divergence_section
from softbottle.analysis.report import Section
from softbottle.analysis.settings import DEFAULT, Settings
from softbottle.analysis.sources import run
from softbottle.data.vocab import Split

FIELDS = frozenset({"tokens", "text"})  # of `Capture`, that a comparison looks at


def of_run(
    workdir: pathlib.Path | str,
    asked: Sequence[str] = (),
    split: Split = "test",
    positions: int | None = None,
    text: pathlib.Path | str | None = None,
) -> Capture:
    """A run as one of two models, with what instruments that were asked for need.

    Args:
        workdir: the run's folder.
        asked: names of instruments.
        split: the text that is read.
        positions: how much of it; None as `run.read`.
        text: a file that is read instead.

    Raises:
        ValueError: for an unknown instrument, and as `run.read`.
    """
    if asked:
        inspection.check(asked)
    lines = [inspection.INSTRUMENTS[name] for name in asked]
    parts = FIELDS.union(*((*line.needs, *line.uses) for line in lines))
    return run.read(workdir, parts, split, positions, text, in_order=True)


def sections(
    captures: Sequence[Capture],
    asked: Sequence[str] = (),
    settings: Settings = DEFAULT,
) -> list[Section]:
    """Two models compared, then the sections of instruments that were asked for.

    Args:
        captures: of two models that have one vocabulary and read the same tokens.
        asked: names from `inspection.INSTRUMENTS`.
        settings: how closely.

    Raises:
        ValueError: for an unknown instrument, equal names, or if vocabularies or tokens
            differ.
    """
    names = [capture.name for capture in captures]
    if len(set(names)) < len(names):
        raise ValueError(f"two models need different names, got {names}.")
    section = divergence_section.inspect(captures, settings)
    compared = [section._replace(about=divergence_section.ABOUT)]
    if asked:
        compared += inspection.sections(captures, asked, settings, asked=asked)
    return compared
