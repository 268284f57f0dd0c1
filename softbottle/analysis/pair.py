"""Two models on one text: how their predictions differ, before all else there is.

Both captures are held at a time, and have to be of the same tokens: a run reads the
text as one row, whatever rows it is evaluated in.
"""

from collections.abc import Sequence

from softbottle.analysis import inspection, measuring
from softbottle.analysis.capture import Capture
from softbottle.analysis.instruments import divergence_section
from softbottle.analysis.measuring import Inspection
from softbottle.analysis.report import Section
from softbottle.analysis.settings import DEFAULT, Settings
from softbottle.analysis.sources import opening
from softbottle.analysis.sources.opening import Source

FIELDS = frozenset({"tokens", "text"})  # of `Capture`, that a comparison looks at


def inspect(
    sources: Sequence[Source],
    asked: Sequence[str] = (),
    settings: Settings = DEFAULT,
) -> Inspection:
    """Two models compared, then the sections of instruments that were asked for.

    Args:
        sources: two models that have one vocabulary and read the same tokens.
        asked: names from `inspection.INSTRUMENTS`.
        settings: how closely.

    Raises:
        ValueError: for an unknown instrument, a model that is given twice or cannot be
            read, or if vocabularies or tokens differ.
    """
    if asked:
        inspection.check(asked)
    fields = FIELDS | measuring.fields(inspection.INSTRUMENTS, asked)
    names = opening.distinct(sources)
    captures = [
        source.read(name, fields) for name, source in zip(names, sources, strict=True)
    ]
    return Inspection(
        sections(captures, asked, settings),
        {capture.name: measuring.shape_of(capture) for capture in captures},
        {capture.name: capture.facts for capture in captures},
        {},
    )


def sections(
    captures: Sequence[Capture],
    asked: Sequence[str] = (),
    settings: Settings = DEFAULT,
) -> list[Section]:
    """The sections of `inspect` on captures, whose names differ.

    Raises:
        ValueError: as `inspect`.
    """
    section = divergence_section.inspect(captures, settings)
    compared = [section._replace(about=divergence_section.ABOUT)]
    if asked:
        compared += inspection.sections(captures, asked, settings, asked=asked)
    return compared
