"""What an analysis shows a person: one HTML file, the numbers as JSON, and PNGs.

An instrument measures arrays and returns plain numbers; its `section` turns them into a
title, a reading in plain words, figures and the numbers beneath. This file lays
sections out; it knows nothing of what they measure.
"""

import base64
import html
import itertools
import json
import math
import os
import pathlib
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from softbottle import drawing, files
from softbottle.analysis import page

# Letters of 10 points are then 7.5 pixels high at least: on a phone a wide figure is
# moved sideways under the finger rather than made too small to read.
_REM_PER_INCH = 3.4
_WIDEST = 6.9  # rem per inch, at which a figure has the size of the page's own letters
_NARROW = 5.2  # inches up to which figures stand side by side
_CARDS = 10  # rows up to which a table turns into cards on a phone


class Figure(NamedTuple):
    """A picture and how to read it.

    Attributes:
        name: of its PNG, in letters, digits and dashes.
        figure: the picture.
        reading: what it shows, in plain words.
    """

    name: str
    figure: drawing.Figure
    reading: str


class About(NamedTuple):
    """What an instrument is, for a reader who meets it for the first time.

    Attributes:
        measures: what is measured, a sentence.
        means: what it means for the reader's own model, a sentence.
        theory: the heading of docs/theory.md that explains it; "" for none.
    """

    measures: str
    means: str
    theory: str = ""


class Table(NamedTuple):
    """Rows of cells under a heading each, as they are shown.

    Attributes:
        heads: of the columns; the first column names a row.
        rows: of cells.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


class Opening(NamedTuple):
    """The first screen of a page, beside its header.

    Attributes:
        models: a row per model, with its key numbers.
        verdicts: by model, a sentence of what to make of them.
        facts: sentences on what was read that are not of all models alike.
    """

    models: Table
    verdicts: Mapping[str, str]
    facts: Sequence[str] = ()


class Section(NamedTuple):
    """One instrument's part of a report.

    Attributes:
        title: a few words.
        reading: what was found, in plain words, a sentence or three.
        figures: the pictures.
        numbers: nested dicts, lists and numbers, NumPy's included.
        about: what the instrument is; None if nothing was measured.
        tables: what was found where there is more of it than sentences can hold.
        remarks: what the page says in place of the reading, where tables have the rest.
        key: by model and column, cells of the table of models that opens a report.
        verdicts: by model, a clause of what to make of it, for the same place.
    """

    title: str
    reading: str
    figures: list[Figure]
    numbers: dict[str, Any]
    about: About | None = None
    tables: Sequence[Table] = ()
    remarks: str | None = None
    key: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    verdicts: Mapping[str, str] = MappingProxyType({})


def write(
    folder: pathlib.Path | str,
    title: str,
    sections: Sequence[Section],
    header: Sequence[str] = (),
    opening: Opening | None = None,
) -> None:
    """Write `report.html`, `report.json` and a PNG for each figure.

    Args:
        folder: where they go; it is made.
        title: of the page.
        sections: of the page, in order.
        header: sentences beneath the title, on what was read and how.
        opening: the rest of the first screen.

    Raises:
        ValueError: if there is nothing to report, or two figures share a name.
    """
    names = [figure.name for section in sections for figure in section.figures]
    if not sections or len(set(names)) < len(names):
        raise ValueError(
            f"a report needs sections, and figures of different names; got {names}."
        )
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    body = _header(header) + _opening(opening) + _contents(sections)
    theory = _theory(folder)
    body += "".join(_section(folder, section, theory) for section in sections)
    title = html.escape(title)
    files.replace(folder / "report.html", page.PAGE.format(title=title, body=body))
    numbers: dict[str, Any] = {"header": list(header)} if header else {}
    if opening is not None:
        numbers["models"] = _models(opening)
    numbers |= {section.title: plain(section.numbers) for section in sections}
    files.replace(folder / "report.json", json.dumps(numbers, indent=2))


def plain(value: Any) -> Any:
    """Nested numbers as JSON has them; what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _header(lines):
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<ul class="header">{items}</ul>' if lines else ""


def _opening(opening):
    """Models by key numbers, what to make of them, and what else was read."""
    if opening is None:
        return ""
    items = "".join(
        f"<li><strong>{html.escape(name)}</strong> {html.escape(sentence)}</li>"
        for name, sentence in opening.verdicts.items()
    )
    facts = _header(opening.facts)
    if facts:
        facts = f"<details><summary>What was read, by model</summary>{facts}</details>"
    verdicts = f'<ul class="verdicts">{items}</ul>' if items else ""
    models = _cells(opening.models) if opening.models.rows else ""
    return f"{models}{verdicts}{facts}"


def _models(opening):
    """The table of models for report.json, as it is shown, with the verdicts."""
    first, *columns = opening.models.heads
    return {
        row[0]: dict(zip(columns, row[1:], strict=True))
        | {"verdict": opening.verdicts.get(row[0])}
        for row in opening.models.rows
    }


def _contents(sections):
    """Links to the sections, where there are several."""
    if len(sections) < 3:
        return ""
    links = "".join(
        f'<a href="#{_slug(section.title)}">{html.escape(section.title)}</a> '
        for section in sections
    )
    return f"<nav>{links}</nav>"


def _section(folder, section, theory):
    remarks = section.reading if section.remarks is None else section.remarks
    tables = "".join(map(_cells, section.tables))
    return (
        f'<section><a class="at" id="{_slug(section.title)}"></a>'
        f"<h2>{html.escape(section.title)}</h2>{_about(section.about, theory)}"
        f"<p>{html.escape(remarks)}</p>{tables}{_figures(folder, section.figures)}"
        f"<details><summary>Numbers</summary>{_table(plain(section.numbers))}"
        "</details></section>"
    )


def _about(about, theory):
    if about is None:
        return ""
    measures, means, heading = map(html.escape, about)
    why = ""
    if heading:
        why = f"<em>{heading}</em> in docs/theory.md"
        if theory is not None:
            why = (
                f'<a href="{theory}#{_slug(about.theory)}">{heading}</a> in the theory'
            )
        why = f' <span class="why">Why: {why}.</span>'
    return (
        f'<p class="about">{measures} <strong>What it means for you:</strong> '
        f"{means}{why}</p>"
    )


def _theory(folder):
    """Where docs/theory.md is, from the report; None where softbottle has no docs."""
    theory = pathlib.Path(__file__).resolve().parents[2] / "docs" / "theory.md"
    if not theory.is_file():
        return None
    relative = os.path.relpath(theory, folder.resolve())
    return html.escape(urllib.parse.quote(relative.replace(os.sep, "/")))


def _slug(heading):
    """The anchor of a heading, as GitHub and MkDocs make it."""
    kept = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return html.escape(re.sub(r"[\s]+", "-", kept))


def _cells(table):
    """A table that scrolls by itself; a short one is a card per row on a phone."""
    heads = [html.escape(head) for head in table.heads]
    top = "".join(f"<th>{head}</th>" for head in heads)
    rows = "".join(
        "<tr>"
        + "".join(
            f'<{tag} data-head="{head}">{html.escape(cell)}</{tag}>'
            for tag, head, cell in zip(
                ("th", *["td"] * (len(heads) - 1)), heads, row, strict=True
            )
        )
        + "</tr>"
        for row in table.rows
    )
    kind = "cells cards" if len(table.rows) <= _CARDS else "cells"
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _figures(folder, figures):
    """Narrow figures side by side where there is room, wide ones by themselves."""
    parts = []
    for narrow, group in itertools.groupby(
        figures, lambda figure: figure.figure.get_figwidth() <= _NARROW
    ):
        drawn = "".join(_figure(folder, figure) for figure in group)
        parts.append(f'<div class="panels">{drawn}</div>' if narrow else drawn)
    return "".join(parts)


def _figure(folder, figure):
    if not re.fullmatch(r"[A-Za-z0-9-]+", figure.name):
        raise ValueError(
            f"a figure's name is letters, digits and dashes: {figure.name}"
        )
    picture = figure.figure.png()
    files.replace(folder / f"{figure.name}.png", picture)
    data = base64.b64encode(picture).decode()
    reading = html.escape(figure.reading)
    width = figure.figure.get_figwidth()
    least, most = _REM_PER_INCH * width, _WIDEST * width
    return (
        f'<figure style="max-width: {most:.1f}rem"><div><img alt="{reading}" '
        f'style="min-width: {least:.1f}rem" '
        f'src="data:image/png;base64,{data}"></div>'
        f"<figcaption>{reading}</figcaption></figure>"
    )


def _table(numbers):
    """Nested numbers as nested tables; a long list is cut, report.json has it all."""
    if isinstance(numbers, dict):
        rows = "".join(
            f"<tr><th>{html.escape(key)}</th><td>{_table(value)}</td></tr>"
            for key, value in numbers.items()
        )
        return f"<table>{rows}</table>"
    if isinstance(numbers, list):
        shown = ", ".join(_table(value) for value in numbers[:12])
        more = len(numbers) - 12
        return shown + (f", … ({more:,} more)" if more > 0 else "")
    if isinstance(numbers, float):
        return f"{numbers:.6g}"
    return html.escape(f"{numbers:,}" if type(numbers) is int else str(numbers))
