"""Every setting of a run, as --helpfull and docs/config.md show it.

    python -m softbottle.cli.fields > docs/config.md

Names, defaults and what is allowed are those of the dataclasses of config.py. What a
setting means is the comment beside its line there, or in the lines above it.
"""

import ast
import inspect
import io
import textwrap
import tokenize
from typing import NamedTuple

from softbottle import config as config_lib
from softbottle import heads, sections
from softbottle.ops.mixture.options import IMPLEMENTATIONS

_TOP = """\
# Settings

`softbottle/config.py` as a page: `python -m softbottle.cli.fields > docs/config.md`.

A file of `configs/` sets some of these; `--config.SECTION.FIELD=VALUE` changes one for
a single run. `None` is "not set", and `=none` on the command line.
"""
# What is checked where it is used, and not by config.py.
_ELSEWHERE = {
    "head.name": ", ".join(heads.HEADS),
    "head.implementation": ", ".join(("auto", *IMPLEMENTATIONS)),
}


class Field(NamedTuple):
    """A setting: its dotted name, default, what it may be, and what it means."""

    name: str
    default: str
    allowed: str
    meaning: str


class Group(NamedTuple):
    """The settings of one section, whose dotted name is "" for the whole config."""

    name: str
    about: str
    fields: list[Field]


def groups() -> list[Group]:
    """All settings, section by section."""
    return list(_groups(config_lib.Config(), "", _comments()))


def lines(width: int) -> list[str]:
    """The settings as lines for a terminal."""
    found: list[str] = []
    for group in groups():
        about = " ".join(group.about.split())
        found += ["", *textwrap.wrap(f"{group.name or 'config'}: {about}", width)]
        for name, default, allowed, meaning in group.fields:
            unset = default.replace("None", "none")  # as the command line has it
            found.append(f"  --config.{name}={unset}")
            indent = 6 * " "
            found += textwrap.wrap(
                f"{meaning} ({allowed})",
                width,
                initial_indent=indent,
                subsequent_indent=indent,
            )
    return found


def markdown() -> str:
    """The settings as the page docs/config.md."""
    parts = [_TOP]
    for group in groups():
        parts.append(f"## `{group.name or 'config'}`\n\n{group.about}\n")
        parts.append("| setting | default | values | meaning |\n|---|---|---|---|")
        for name, default, allowed, meaning in group.fields:
            parts.append(f"| `{name}` | `{default}` | {allowed} | {meaning} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _groups(section, prefix, comments):
    """The settings of a section itself, then those of the sections in it."""
    inner = {
        name: value
        for name, value in vars(section).items()
        if isinstance(value, sections.Section)
    }
    own = [
        Field(
            prefix + field.name,
            str(value),
            _ELSEWHERE.get(prefix + field.name, sections.allowed(field)),
            comments[type(section).__name__, field.name],
        )
        for name, field, value in sections.leaves(section)
        if "." not in name
    ]
    if own:
        yield Group(prefix.rstrip("."), inspect.getdoc(section), own)
    for name, value in inner.items():
        yield from _groups(value, f"{prefix}{name}.", comments)


def _comments():
    """The comment of each line of the form `field: type = ...`, by (class, field)."""
    source = inspect.getsource(config_lib)
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    found = {}
    for group in ast.parse(source).body:
        for node in getattr(group, "body", ()):
            if isinstance(group, ast.ClassDef) and isinstance(node, ast.AnnAssign):
                first = node.lineno
                while first - 1 in alone:
                    first -= 1
                numbers = range(first, node.end_lineno + 1)
                told = [comments[line] for line in numbers if line in comments]
                found[group.name, node.target.id] = " ".join(told)
    return found


if __name__ == "__main__":
    print(markdown(), end="")
