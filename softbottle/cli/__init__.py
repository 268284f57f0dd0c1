"""The command `softbottle`: it runs the command that its first argument names.

Only that one is imported, so `softbottle --help` waits neither for jax nor for others.
"""

import ast
import importlib
import importlib.util
import sys

import softbottle

# Files of softbottle/commands and of launch, in the order in which one meets them.
COMMANDS = (
    *("train", "evaluate", "generate", "analyze", "sweep", "frontier", "dropin"),
    *("retrofit", "saturation", "reproduce", "continuation", "bench", "compile"),
    "export",
)


def main() -> int:
    """Run the command that the command line names, or say which there are."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h"):
        print(overview())
    elif name == "--version":
        print(f"softbottle {softbottle.__version__}")
    elif name in COMMANDS:
        sys.argv[:] = [f"softbottle {name}", *sys.argv[2:]]
        run(name)
    else:
        there_are = ", ".join(COMMANDS)
        print(f"there is no command {name!r}; there are {there_are}.", file=sys.stderr)
        return 2
    return 0


def run(name: str) -> None:
    """Run a command with the rest of the command line, and exit with its status."""
    try:
        # First, because it looks for the packages that all commands need.
        program = importlib.import_module("softbottle.cli.program")
        command = importlib.import_module(f"softbottle.commands.{name}")
    except KeyboardInterrupt:
        # Seconds pass here, in which one sees what one has mistyped.
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    program.run(command)


def overview() -> str:
    """What `softbottle --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"    {name:{width}}  {_first_line(name)}" for name in COMMANDS]
    return "\n".join(
        [
            "Language-model output heads beyond the softmax bottleneck.",
            "",
            "    softbottle COMMAND [FLAGS]",
            "",
            *lines,
            "",
            "See the bottleneck on a laptop, without data, in about a minute:",
            "",
            "    softbottle train --config quickstart",
            "",
            "`softbottle COMMAND --help` has a command's flags and examples. In a "
            "checkout",
            "`python launch/COMMAND.py` is the same command.",
        ]
    )


def _first_line(name):
    """What a command says of itself, read without importing it."""
    spec = importlib.util.find_spec(f"softbottle.commands.{name}")
    source = spec.loader.get_source(spec.name)
    return ast.get_docstring(ast.parse(source)).splitlines()[0]
