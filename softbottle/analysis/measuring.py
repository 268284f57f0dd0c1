"""Instruments on sources: one source in memory at a time, nothing dropped in silence.

An instrument measures one capture, and what it measured stands without the capture's
arrays; when all sources have been read, the measurements are put side by side.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from softbottle.analysis.capture import Capture
from softbottle.analysis.report import About, Section, Table
from softbottle.analysis.settings import Settings
from softbottle.analysis.sources import opening
from softbottle.analysis.sources.opening import REFUSALS, Source

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
    "parameters": "the number of its parameters is not known",
    "attention_rows": "there are no logits and values of an attention layer",
    "models": "there are no parameters, tokens and losses of trained models",
}

_SERIES = "series"


class Instrument(NamedTuple):
    """A line of the table.

    Attributes:
        measure: what is measured of a capture, which stands without its arrays.
        section: the section on what was measured, by name of the capture.
        about: what the section explains itself by.
        needs: fields of `Capture` without which there is none.
        uses: fields that it looks at where they are there.
        after: an instrument whose measurement of the same capture is handed to
            `measure` as well.
        alone: whether a section has one capture, and several have a section each.
        least: how many captures a section needs.
    """

    measure: Callable[..., Any]
    section: Callable[[Any], Section]
    about: About
    needs: tuple[str, ...]
    uses: tuple[str, ...] = ()
    after: str | None = None
    alone: bool = False
    least: int = 1


class Shape(NamedTuple):
    """How large a model is; None where that is not known, or there is no model."""

    parameters: int | None
    width: int | None
    vocab: int | None


class Inspection(NamedTuple):
    """What a report tells.

    Attributes:
        sections: in the order of the report.
        shapes: by name, in the order of the sources.
        facts: by name, sentences on what was read.
        refused: by name, why a source was not read.
    """

    sections: list[Section]
    shapes: dict[str, Shape]
    facts: dict[str, tuple[str, ...]]
    refused: dict[str, str]


class Choice(NamedTuple):
    """The instruments for a source, and those that nothing is said of if left out."""

    names: Sequence[str]
    quiet: Collection[str] = ()


def survey(
    table: Mapping[str, Instrument],
    sources: Sequence[Source],
    order: Sequence[str],
    choose: Callable[[Source], Choice],
    asked: Sequence[str],
    settings: Settings,
) -> Inspection:
    """Read and measure one source after another, then put them side by side.

    Args:
        table: the instruments.
        sources: what is looked into.
        order: of the instruments in the report.
        choose: which of them are for a source.
        asked: those that say in their own place what they leave out.
        settings: how closely.

    Raises:
        ValueError: for a source that is given twice, and if nothing could be measured
            since all was refused.
    """
    made = Inspection([], {}, {}, {})
    values: dict[str, dict[str, Any]] = {name: {} for name in order}
    skipped: dict[str, dict[str, str]] = {name: {} for name in order}
    labels = opening.distinct(sources)
    where = {
        label: source.labels[-1] for label, source in zip(labels, sources, strict=True)
    }
    errors: list[str] = []
    for label, source in zip(labels, sources, strict=True):
        chosen = choose(source)
        try:
            found = _measure(table, source, label, chosen.names, settings)
        except REFUSALS as error:
            if len(sources) == 1:
                raise
            made.refused[label] = reason_of(error)
            continue
        made.shapes[label], made.facts[label] = found.shape, found.facts
        # A file of arrays without a head is not asked for what needs one.
        headless = source.kind == "arrays" and found.shape.width is None
        for name in chosen.names:
            if name in found.values:
                values[name][label] = found.values[name]
            elif name not in chosen.quiet and not (headless and name not in asked):
                skipped[name][label] = found.reasons[name]
        errors += [f"{where[label]}: {found.reasons[name]}" for name in found.errors]
    for name in order:
        drawn, refused = _written(table[name], values[name])
        made.sections.extend(drawn)
        errors += [f"{where[label]}: {reason}" for label, reason in refused.items()]
        if 0 < len(values[name]) < table[name].least and name in asked:
            refused = dict.fromkeys(values[name], "no other model is beside it")
        skipped[name] |= refused
        if skipped[name] and name in asked:
            made.sections.append(_skipped(name, skipped.pop(name)))
    _check_any(made, errors)
    left_out = {name: reasons for name, reasons in skipped.items() if reasons}
    if left_out or made.refused:
        made.sections.append(_left_out(left_out, made.refused))
    return made


def _check_any(made, errors):
    """Raise if nothing is there to be shown, and the cause is what was refused."""
    causes = [*made.refused.values(), *errors]
    if causes and not any(section.figures for section in made.sections):
        raise ValueError(" ".join(causes))


class _Found(NamedTuple):
    """What the instruments measured of a source, and why some did not.

    `errors` are those that refused it, rather than lacked a field.
    """

    shape: Shape
    facts: tuple[str, ...]
    values: dict[str, Any]
    reasons: dict[str, str | None]
    errors: list[str]


def _measure(table, source, label, names, settings):
    """Read a source and let the instruments measure it; nothing else stays of it."""
    lines = _chosen(table, names)
    capture = source.read(label, fields(table, names))
    found = _Found(shape_of(capture), capture.facts, {}, {}, [])
    # Other checkpoints are read last, when the arrays of this one are let go.
    for name, line in sorted(lines.items(), key=lambda item: _SERIES in item[1].needs):
        if line.needs == (_SERIES,):
            capture = Capture(label, series=capture.series, absent=capture.absent)
        reason = _absent(capture, line)
        earlier = ()
        if line.after is not None:
            reason = reason or found.reasons[line.after]
            earlier = (found.values.get(line.after),)
        if reason is None:
            try:
                found.values[name] = line.measure(capture, settings, *earlier)
            except REFUSALS as error:
                reason = reason_of(error)
                found.errors.append(name)
        found.reasons[name] = reason
    return found


def _written(line, values):
    """The sections of an instrument on what it measured, and what they refuse."""
    if len(values) < line.least:
        return [], {}
    groups = [values]
    if line.alone:
        groups = [{label: value} for label, value in values.items()]
    sections, refused = [], {}
    for place, group in enumerate(groups):
        (label, value), *_ = group.items()
        try:
            section = line.section(value if line.alone else group)
        except REFUSALS as error:
            refused |= dict.fromkeys(group, reason_of(error))
        else:
            section = section._replace(about=line.about)
            sections.append(_own(section, label, place, len(groups)))
    return sections, refused


def _own(section, label, place, count):
    """A section on one capture of several: titles and figures have their own names."""
    if count == 1:
        return section
    figures = [
        figure._replace(name=f"{figure.name}-{place}") for figure in section.figures
    ]
    return section._replace(title=f"{section.title}: {label}", figures=figures)


def reason_of(error: BaseException) -> str:
    """What was refused, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def fields(table: Mapping[str, Instrument], names: Sequence[str]) -> set[str]:
    """Fields of `Capture` that some instruments look at."""
    lines = _chosen(table, names).values()
    return {field for line in lines for field in (*line.needs, *line.uses)}


def _chosen(table, names):
    """Lines of the table, with those that others come after, in its order."""
    chosen = {*names, *(table[name].after for name in names)}
    return {name: line for name, line in table.items() if name in chosen}


def shape_of(capture: Capture) -> Shape:
    """How large the model of a capture is."""
    table_VE = capture.table_VE
    vocab, width = (None, None) if table_VE is None else table_VE.shape
    return Shape(capture.parameters, width, vocab)


def _absent(capture, instrument):
    """Why an instrument leaves a capture out, or None."""
    absent = (need for need in instrument.needs if getattr(capture, need) is None)
    return next((capture.absent.get(need, _ABSENT[need]) for need in absent), None)


def _skipped(name, reasons):
    """The line that stands for an instrument, or for the captures it leaves out."""
    causes = "; ".join(f"{key}: {reason}" for key, reason in reasons.items())
    return Section(name, f"skipped: {causes}.", [], {"skipped": reasons})


def _left_out(skipped, refused):
    """The section on models that were refused and instruments that could not run."""
    lines = [
        f"{name} is refused: {reason.rstrip('.')}" for name, reason in refused.items()
    ]
    lines += [
        f"{name} ({'; '.join(f'{key}: {reason}' for key, reason in reasons.items())})"
        for name, reasons in skipped.items()
    ]
    numbers = {"skipped": skipped} | ({"refused": refused} if refused else {})
    rows = [("all", name, f"refused: {reason}") for name, reason in refused.items()]
    rows += [
        (instrument, name, reason)
        for instrument, reasons in skipped.items()
        for name, reason in reasons.items()
    ]
    table = Table(("instrument", "model", "reason"), rows)
    return Section(
        "Left out", f"{', '.join(lines)}.", [], numbers, tables=[table], remarks=""
    )
