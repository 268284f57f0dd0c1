"""How a program of launch/ begins and ends.

    2     what a user can mend: a flag, a setting, a file, a missing package
    1     a run that failed by itself: a full disk, a loss that is not finite
    130   interrupted

are its exit statuses. Each of these errors is printed as one line on stderr;
`--traceback` adds where it was raised. Any other error is a bug and prints its
traceback.

A program imports this module first, and takes absl and ml_collections from here: if a
package is missing, importing this module prints the one line and exits with status 2.
"""

import importlib.util
import itertools
import math
import pathlib
import re
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

if _missing := [
    name
    for name in (
        *("absl", "flax", "matplotlib", "ml_collections", "ml_dtypes", "optax"),
        *("orbax", "tqdm"),
    )
    if importlib.util.find_spec(name) is None
]:
    _extra = "analysis" if sys.argv[0].endswith("analyze.py") else "train"
    print(
        f"{sys.argv[0]} needs packages that are not installed ({', '.join(_missing)}): "
        f"pip install 'softbottle[{_extra}]'",
        file=sys.stderr,
    )
    sys.exit(2)

from absl import app, flags, logging
from ml_collections import config_flags

from softbottle import config as config_lib
from softbottle.training.checkpoint import CheckpointError
from softbottle.training.metrics import NonFiniteLossError, WriteError

__all__ = ["app", "config_flags", "define_float", "flags", "run"]

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
TRACEBACK = flags.DEFINE_bool(
    "traceback", False, "Show where in the code an error was raised."
)
_OF_THE_RUN = (CheckpointError, NonFiniteLossError, WriteError)
_OF_THE_USER = (ValueError, OSError, ImportError, app.UsageError, flags.Error)
# Modules that are imported only when a corpus asks for them, and their extra. A text
# that is encoded already needs no pyarrow.
_EXTRAS = {
    "importlib_resources": "data",
    "pyarrow": "train",
    "tensorflow_datasets": "data",
    "tokenizers": "subwords",
}


def define_float(
    name: str,
    default: float,
    help_string: str,
    *,
    lower_bound: float | None = None,
    upper_bound: float | None = None,
) -> flags.FlagHolder[float]:
    """A flag that is a finite number, between `lower_bound` and `upper_bound`."""
    holder = flags.DEFINE_float(name, default, help_string, lower_bound, upper_bound)
    flags.register_validator(holder, math.isfinite, f"--{name} must be finite")
    return holder


def run(main: Callable[[], int | None]) -> NoReturn:
    """Parse the command line, call `main`, and exit with what it returns."""

    def call(arguments):
        if len(arguments) > 1:
            raise app.UsageError(f"not understood: {' '.join(arguments[1:])}")
        # Orbax logs every step of its work at level info.
        logging.set_verbosity(logging.WARNING)
        return main()

    app.run(_with_one_line_errors(call), flags_parser=_with_one_line_errors(_parse))
    raise AssertionError("app.run exits")


def _parse(arguments):
    config_lib.check_overrides(arguments[1:])
    _let_configs_import_one_another(arguments)
    # The flags of a number do not take a word, so what is unset is taken out of them.
    unset = [re.fullmatch(r"--config\.([\w.]+)=none", word) for word in arguments]
    rest = [word for word, match in zip(arguments, unset, strict=True) if not match]
    remaining = flags.FLAGS(rest)
    for match in filter(None, unset):
        config_lib.unset(flags.FLAGS.config, match[1])
    return remaining


def _let_configs_import_one_another(arguments):
    """Put the folder above the config's on the path: `from configs import ptb`."""
    for word, following in itertools.pairwise([*arguments, ""]):
        file = following if word in ("--config", "-config") else word.partition("=")[2]
        if re.match(r"--?config(=|$)", word) and file:
            folder = pathlib.Path(file.partition(":")[0]).resolve().parents[1]
            sys.path.append(str(folder))


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

    return call


def _line(error):
    """An error as one line; ml_collections puts the cause into the last of several."""
    text = str(error).strip()
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
