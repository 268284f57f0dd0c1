"""What `--help` and `--helpfull` of a command print.

`--help` fits a screen: the command's docstring, its flags, and the names of the
settings where it takes a config. `--helpfull` has all of each setting.
"""

import pathlib
import re
import sys
import textwrap
import types

from absl import flags

from softbottle.cli import fields

WIDTH = 96
_LONGEST_DEFAULT = 40


def render(command: types.ModuleType, values: flags.FlagValues, full: bool) -> str:
    """The page of a command whose flags are defined."""
    name = command.__name__.rpartition(".")[2]
    program = pathlib.Path(sys.argv[0])
    started = f"python {program}" if program.suffix == ".py" else str(program)
    about = (command.__doc__ or "").strip().replace(f"softbottle {name}", started)
    lines = [about, "", *_flags(values, command.__name__), ""]
    if "config" not in values:
        return "\n".join(lines[:-1])
    if full:
        return "\n".join([*lines[:-1], *fields.lines(WIDTH)])
    if name == "train":
        lines += ["Settings, as in --config.train.steps=1000 (=none unsets one):"]
        lines += _settings()
    lines += [f"What every setting means: {started} --helpfull, or docs/config.md."]
    return "\n".join(lines)


def _flags(values, module):
    """The flags of a command, and the one that all commands have."""
    ours = [*values.flags_by_module_dict()[module], values["traceback"]]
    column = max(len(flag.name) for flag in ours) + 6
    lines = []
    for flag in ours:
        # absl's own words for a flag that may be repeated.
        told = re.sub(r";\s+repeat this option.*", " May be repeated.", flag.help)
        default = (flag.default_as_str or "").strip("'") if flag.default else ""
        if 0 < len(default) <= _LONGEST_DEFAULT:
            told += f" (default {default})"
        lines += _wrapped(told, f"  --{flag.name}".ljust(column), column * " ")
    return lines


def _settings():
    """The names of all settings, by section."""
    lines = []
    for group in fields.groups():
        names = " ".join(field.name.rpartition(".")[2] for field in group.fields)
        lines += _wrapped(names, f"  {group.name}: " if group.name else "  ", "    ")
    return lines


def _wrapped(text, start, indent):
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
