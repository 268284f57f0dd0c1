"""The first screen of a report: what was read, and the models by their key numbers."""

import datetime
import importlib.metadata
import platform

import softbottle
from softbottle.analysis import report
from softbottle.analysis.measuring import Inspection

_MANY = 3  # models that a title names
_NONE = "–"
_VERSIONS = ("softbottle", "jax", "numpy")
_PRETRAINED = ("torch", "transformers")


def title(made: Inspection) -> str:
    """The first models by name, and how many more there are."""
    names = list(made.shapes)
    shown = ", ".join(names[:_MANY])
    return shown if len(names) <= _MANY else f"{shown} and {len(names) - _MANY} more"


def header(made: Inspection, command: str, pretrained: bool) -> list[str]:
    """Sentences on what was read that are of all models alike, and how.

    Args:
        made: what was measured.
        command: that asked for it.
        pretrained: whether transformers read some of the models.
    """
    packages = (*_VERSIONS, *(_PRETRAINED if pretrained else ()))
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        *_shared(made),
        f"Command: {command}",
        f"Made: {now}, by {versions}, Python {platform.python_version()}.",
    ]


def opening(made: Inspection) -> report.Opening:
    """The table of models, the verdicts, and what was read of each."""
    shared = _shared(made)
    readers: dict[str, list[str]] = {}
    for name, lines in made.facts.items():
        for fact in lines:
            if fact not in shared:
                readers.setdefault(fact, []).append(name)
    facts = [
        # The model's own line has its name.
        fact if fact.startswith("Model: ") else f"{', '.join(names)}: {fact}"
        for fact, names in readers.items()
    ]
    return report.Opening(_table(made), _verdicts(made), facts)


def _shared(made):
    """Facts that every model has; of one model all."""
    first, *others = made.facts.values() if made.facts else [()]
    return [fact for fact in first if all(fact in lines for lines in others)]


def _table(made):
    columns: dict[str, None] = {}
    for section in made.sections:
        for cells in section.key.values():
            columns |= dict.fromkeys(cells)
    sizes = {
        name: [_number(count) for count in shape] for name, shape in made.shapes.items()
    }
    # What no model has is no column.
    known = [at for at in range(3) if any(row[at] != _NONE for row in sizes.values())]
    heads = [("parameters", "width", "vocabulary")[at] for at in known]
    rows = [
        [name, *(row[at] for at in known), *_cells(made.sections, name, columns)]
        for name, row in sizes.items()
    ]
    # A text, or a file without a head, is no model.
    rows = [row for row in rows if set(row[1:]) != {_NONE}]
    return report.Table(("model", *heads, *columns), rows)


def _cells(sections, name, columns):
    merged: dict[str, str] = {}
    for section in sections:
        merged |= section.key.get(name, {})
    return [merged.get(column, _NONE) for column in columns]


def _verdicts(made):
    clauses: dict[str, list[str]] = {name: [] for name in made.shapes}
    for section in made.sections:
        for name, clause in section.verdicts.items():
            clauses.setdefault(name, []).append(clause)
    verdicts = {name: f"{'; '.join(said)}." for name, said in clauses.items() if said}
    return verdicts | {
        name: f"was refused: {why}" for name, why in made.refused.items()
    }


def _number(count):
    return _NONE if count is None else f"{count:,}"


def _version(package):
    if package == "softbottle":
        return softbottle.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
