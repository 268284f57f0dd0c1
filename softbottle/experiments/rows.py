"""Rows of finished runs: lines of JSON in a file, and lines of a Markdown table."""

import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from softbottle import files

Row = dict[str, Any]


def read(path: pathlib.Path, key: Callable[[Row], Any]) -> list[Row]:
    """The rows of a file; none where there is no file.

    Args:
        path: the file.
        key: which run a row is of; a line for which it fails is no row.

    Raises:
        ValueError: if a line is not a row.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            key(row)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: line {number} is not a run's row.") from error
        rows.append(row)
    return rows


def write(path: pathlib.Path, rows: Iterable[Row]) -> None:
    """Replace a file by these rows."""
    files.replace(path, "".join(json.dumps(row) + "\n" for row in rows))


def check(path: pathlib.Path, run: Any, row: Row | None, fingerprint: str) -> None:
    """Raise ValueError if a run's row is of other settings than its fingerprint."""
    if row is not None and row["fingerprint"] != fingerprint:
        raise ValueError(
            f"{path.name} has {run} of other settings or of another text; use another "
            "workdir."
        )


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    written = ["| " + " | ".join(cells) + " |" for cells in (titles, *lines)]
    return "\n".join([written[0], "|---" * len(titles) + "|", *written[1:]])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean, and the deviation where there are several."""
    mean = f"{statistics.fmean(values):,.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}"
