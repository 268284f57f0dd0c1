"""What an analysis shows a person: one HTML file, the numbers as JSON, and PNGs.

An instrument measures arrays and returns plain numbers; its `section` turns them into a
title, a reading in plain words, figures and the numbers beneath. This file lays
sections out; it knows nothing of what they measure.
"""

import base64
import html
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from softbottle import drawing, files

# Letters of 10 points are then 7.5 pixels high at least: on a phone a wide figure is
# moved sideways under the finger rather than made too small to read.
_REM_PER_INCH = 3.4


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
) -> None:
    """Write `report.html`, `report.json` and a PNG for each figure.

    Args:
        folder: where they go; it is made.
        title: of the page.
        sections: of the page, in order.
        header: sentences beneath the title, on what was read and how.

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
    body = _header(header)
    body += "".join(_section(folder, section) for section in sections)
    title = html.escape(title)
    files.replace(folder / "report.html", _PAGE.format(title=title, body=body))
    numbers: dict[str, Any] = {"header": list(header)} if header else {}
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


def _section(folder, section):
    figures = "".join(_figure(folder, figure) for figure in section.figures)
    return (
        f"<section><h2>{html.escape(section.title)}</h2>{_about(section.about)}"
        f"<p>{html.escape(section.reading)}</p>{figures}"
        f"<details><summary>Numbers</summary>{_table(plain(section.numbers))}"
        "</details></section>"
    )


def _about(about):
    if about is None:
        return ""
    measures, means = map(html.escape, about)
    return (
        f'<p class="about">{measures} <strong>What it means for you:</strong> '
        f"{means}</p>"
    )


def _figure(folder, figure):
    if not re.fullmatch(r"[A-Za-z0-9-]+", figure.name):
        raise ValueError(
            f"a figure's name is letters, digits and dashes: {figure.name}"
        )
    picture = figure.figure.png()
    files.replace(folder / f"{figure.name}.png", picture)
    data = base64.b64encode(picture).decode()
    reading = html.escape(figure.reading)
    least = _REM_PER_INCH * figure.figure.get_figwidth()
    return (
        f'<figure><div><img alt="{reading}" style="min-width: {least:.1f}rem" '
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


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --ink: #1c1e21; --paper: #fdfdfc; --soft: #6b7078;
  --line: #dcdee2; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e3; --paper: #17181b; --soft: #9aa0a8; --line: #33363b; }}
  img {{ filter: invert(.9) hue-rotate(180deg); }} }}
body {{ margin: 0 auto; max-width: 60rem; padding: 1rem 1.2rem 4rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.55 system-ui, sans-serif;
  overflow-wrap: anywhere; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid var(--line); }}
figure {{ margin: 1.2rem 0; }}
img {{ width: 100%; height: auto; background: white; border-radius: .4rem; }}
figcaption, summary {{ color: var(--soft); }}
.about {{ border-left: .2rem solid var(--line); padding-left: .8rem;
  color: var(--soft); }}
.header {{ padding-left: 1.1rem; font-size: .92rem; }}
details, figure div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; overflow-wrap: normal; }}
th, td {{ text-align: left; vertical-align: top; padding: .15rem .6rem .15rem 0;
  font-variant-numeric: tabular-nums; }}
th {{ font-weight: 500; color: var(--soft); }}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""
