"""How a command begins and ends.

    2     what a user can mend: a flag, a setting, a file, a missing package
    1     a run that failed by itself: a full disk, a lack of memory, a loss that is
          not finite
    130   interrupted

are its exit statuses. Each of these errors is printed as one line on stderr;
`--traceback` adds where it was raised. Any other error is a bug and prints its
traceback.

A command takes absl and ml_collections from here: if a package is missing, importing
this module prints the one line and exits with status 2.
"""

import importlib.util
import math
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

if _missing := [
    name
    for name in (
        *("absl", "filelock", "flax", "matplotlib", "ml_collections", "ml_dtypes"),
        *("optax", "orbax", "tqdm"),
    )
    if importlib.util.find_spec(name) is None
]:
    _extra = "analysis" if "analyze" in pathlib.Path(sys.argv[0]).name else "train"
    print(
        f"{sys.argv[0]} needs packages that are not installed ({', '.join(_missing)}): "
        f"pip install 'softbottle[{_extra}]'",
        file=sys.stderr,
    )
    sys.exit(2)

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from softbottle import config as config_lib
from softbottle.cli import configs, help_page
from softbottle.training.checkpoint import CheckpointError
from softbottle.training.metrics import (
    NonFiniteLossError,
    UnfinishedError,
    WriteError,
)

__all__ = [
    *("app", "define_compilation_cache", "define_config", "define_float"),
    *("define_minutes", "define_numbers", "flags", "refuse_unread", "run"),
]

Number = TypeVar("Number", int, float)

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
CACHE_BYTES = 4 * 2**30
TRACEBACK = flags.DEFINE_bool(
    "traceback", False, "Show where in the code an error was raised."
)
# A flag that is defined by a function below is its caller's.
flags.disclaim_key_flags()
_OF_THE_RUN = (CheckpointError, NonFiniteLossError, WriteError, UnfinishedError)
_OF_THE_USER = (ValueError, OSError, ImportError, app.UsageError, flags.Error)
_OUT_OF_MEMORY = (
    "the device's memory is too small. Take fewer rows at a time (data.rows, or in "
    "training a larger optim.accumulate)."
)
# Modules that are imported only when a corpus asks for them, and their extra. A text
# that is encoded already needs no pyarrow.
_EXTRAS = {
    "importlib_resources": "data",
    "pyarrow": "train",
    "tensorflow_datasets": "data",
    "tokenizers": "subwords",
}


def define_config(about: str = "") -> flags.FlagHolder[config_lib.Config]:
    """The flag --config; `about` says which configs, if not all, a command takes."""
    return config_flags.DEFINE_config_file(
        "config",
        help_string="A Python file, the name of one that comes with softbottle "
        f"({', '.join(configs.files())}), or a run's config.json{about}; "
        "FILE:ARGUMENT picks a variant.",
    )


def define_compilation_cache() -> flags.FlagHolder[str]:
    """The flag --compilation_cache: the command keeps its compiled programs there."""
    return flags.DEFINE_string(
        "compilation_cache",
        "~/.cache/softbottle/compiled",
        f"For compiled programs, {CACHE_BYTES >> 30} GiB; none: not kept.",
    )


def define_float(
    name: str,
    default: float,
    help_string: str,
    *,
    lower_bound: float | None = None,
    upper_bound: float | None = None,
) -> flags.FlagHolder[float]:
    """A flag that is a finite number, between `lower_bound` and `upper_bound`."""
    bounds = (lower_bound, upper_bound)
    return _finite(flags.DEFINE_float(name, default, help_string, *bounds))


def define_minutes(help_string: str) -> flags.FlagHolder[float | None]:
    """The flag --minutes, a finite number; None by default, for no limit."""
    return _finite(flags.DEFINE_float("minutes", None, help_string, lower_bound=0.0))


def _finite(holder):
    """The flag, which refuses NaN and infinity."""

    def finite(value):
        return value is None or math.isfinite(value)

    flags.register_validator(holder, finite, f"--{holder.name} must be finite")
    return holder


class _Numbers(flags.ArgumentParser[list[Number]]):
    """Finite numbers with commas between them, as text or as a default."""

    def __init__(self, kind: type[Number]):
        super().__init__()
        self._kind: type[Number] = kind

    def parse(self, argument: str | Sequence[Number]) -> list[Number]:
        """The numbers; ValueError if these are none."""
        words = argument.split(",") if isinstance(argument, str) else argument
        try:
            numbers = [self._kind(word) for word in words]
            finite = all(map(math.isfinite, numbers))
        except ValueError:
            finite = False
        if not finite:
            whole = "whole numbers" if self._kind is int else "numbers"
            raise ValueError(f"must be {whole} with commas between them")
        return numbers

    def flag_type(self) -> str:
        """What absl calls it."""
        return f"comma separated {self._kind.__name__}s"


def define_numbers(
    name: str,
    default: Sequence[Number] | None,
    help_string: str,
    kind: type[Number],
) -> flags.FlagHolder[list[Number]]:
    """A flag that is a list of finite numbers, --name=1,2; empty without a default."""
    serializer = flags.ListSerializer[Number](",")
    return flags.DEFINE(
        _Numbers(kind), name, default or [], help_string, serializer=serializer
    )


def refuse_unread(
    without: str, *holders: flags.FlagHolder[Any] | flags.Flag[Any]
) -> None:
    """Raise UsageError if one of some flags is given that nothing would read.

    Args:
        without: why it would not, as in "without --cache".
        holders: the flags.
    """
    if given := [f"--{holder.name}" for holder in holders if holder.present]:
        raise app.UsageError(f"{', '.join(given)} would not be read {without}")


def run(command: types.ModuleType) -> NoReturn:
    """Parse the command line, call the command's `main`, and exit with its status.

    Where the command has a `FIRST_WORD`, its first argument may be the value of that
    flag alone: `softbottle reproduce ptb` for `softbottle reproduce --table=ptb`.
    """

    def parse(arguments):
        flag, first = getattr(command, "FIRST_WORD", None), arguments[1:2]
        if flag and first and not first[0].startswith("-"):
            arguments = [arguments[0], f"--{flag}={first[0]}", *arguments[2:]]
        asked = {"-h", "-help", "--help", "-helpfull", "--helpfull"} & {*arguments}
        if asked:
            full = any(word.endswith("full") for word in asked)
            print(help_page.render(command, flags.FLAGS, full))
            sys.exit(0)
        return _parse(arguments)

    def call(arguments):
        if len(arguments) > 1:
            raise app.UsageError(f"not understood: {' '.join(arguments[1:])}")
        # Orbax logs every step of its work at level info.
        logging.set_verbosity(logging.WARNING)
        if "compilation_cache" in flags.FLAGS:
            _keep_compiled(flags.FLAGS.compilation_cache)
        return command.main()

    app.run(_with_one_line_errors(call), flags_parser=_with_one_line_errors(parse))
    raise AssertionError("app.run exits")


def _keep_compiled(folder):
    """Have jax keep what takes a second to compile or more; its own settings go first.

    What the programs were compiled for, the processor included, is part of their keys.
    """
    if folder.lower() == "none" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    path = pathlib.Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"compiled programs are not kept: {error}", file=sys.stderr)
        return
    settings = {"compilation_cache_dir": str(path)}
    settings["compilation_cache_max_size"] = CACHE_BYTES
    for name, value in settings.items():
        jax.config.update(f"jax_{name}", value)
        # For the processes that a command starts.
        os.environ[f"JAX_{name.upper()}"] = str(value)


def _parse(arguments):
    config_lib.check_overrides(arguments[1:])
    arguments = _with_config_file(arguments)
    # The flags of a number do not take a word, so what is unset is taken out of them.
    unset = [re.fullmatch(r"--config\.([\w.]+)=none", word) for word in arguments]
    rest = [word for word, match in zip(arguments, unset, strict=True) if not match]
    try:
        remaining = flags.FLAGS(rest)
    except SyntaxError as error:
        raise ValueError(f"--config: {error}; a config is a Python file.") from error
    except AttributeError as error:
        if error.name != "get_config":
            raise
        raise ValueError("--config: the file has no function get_config.") from error
    config = flags.FLAGS.flag_values_dict().get("config")
    for match in filter(None, unset):
        if config is None:
            raise app.UsageError(f"--config is needed for {match[0]}")
        config_lib.unset(config, match[1])
    return remaining


def _with_config_file(arguments):
    """The arguments with the path of the config, which may import its neighbours."""
    words = list(arguments)
    for place, word in enumerate(words):
        flag, equals, file = word.partition("=")
        if flag not in ("--config", "-config") or words[place:] == [flag]:
            continue
        place, start = (place, f"{flag}=") if equals else (place + 1, "")
        file = configs.resolve(file if equals else words[place])
        words[place] = start + file
        if configs.run_folder(file) is None:
            configs.enable_imports(pathlib.Path(file.partition(":")[0]))
    return words


def _with_one_line_errors(function):
    """The function, with errors that are no bugs printed as one line."""

    def call(arguments):
        try:
            return function(arguments)
        except KeyboardInterrupt:
            _exit("interrupted", INTERRUPTED)
        except _OF_THE_RUN as error:
            _exit(_line(error), FAILED)
        except _OF_THE_USER as error:
            _exit(_line(error), REFUSED)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            _exit(f"{_line(error)[:300]}; {_OUT_OF_MEMORY}", FAILED)

    return call


def _line(error):
    """An error as one line; ml_collections puts the cause into the last of several."""
    text = str(error).strip()
    if needed := re.search(r"Flag (--\S+) must have a value other than None", text):
        return f"{needed[1]} is needed: {sys.argv[0]} --help has examples"
    if isinstance(error, app.UsageError | flags.Error):
        return text.splitlines()[-1].strip() if text else "the flags are wrong"
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        extra = _EXTRAS[error.name]
        return f"{error.name} is not installed: pip install 'softbottle[{extra}]'"
    return f"{type(error).__name__}: {' '.join(text.split())}"


def _exit(line, status):
    # Looked up, not parsed: the flags themselves may be what is wrong.
    if "--traceback" in sys.argv:
        traceback.print_exc()
    print(line, file=sys.stderr, flush=True)
    sys.exit(status)
