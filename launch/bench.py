"""Time a training step, whole and by part, on this machine.

    python launch/bench.py --config configs/ptb.py:mos --vocab 10000 --length 70

Prints one JSON line, and writes it to --json if that is given.
"""

import json
import pathlib
import sys

from absl import app, flags
from ml_collections import config_flags

from softbottle import config
from softbottle.bench import step

CONFIG = config_flags.DEFINE_config_file("config", help_string="A file of configs/.")
VOCAB = flags.DEFINE_integer("vocab", 10_000, "How many words.", lower_bound=2)
LENGTH = flags.DEFINE_integer("length", 70, "Positions of a row.", lower_bound=2)
JSON = flags.DEFINE_string("json", None, "Where the numbers go as well.")


def main(arguments: list[str]) -> None:
    """Time what the flags say."""
    if len(arguments) > 1:
        raise app.UsageError(f"not understood: {arguments[1:]}")
    if CONFIG.value is None:
        raise app.UsageError("--config is needed, for example configs/ptb.py")
    result = step.run(CONFIG.value, VOCAB.value, LENGTH.value)
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    config.check_overrides(sys.argv[1:])
    app.run(main)
