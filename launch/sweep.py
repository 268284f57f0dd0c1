"""Train several heads at several widths and draw what each cannot express.

    python launch/sweep.py --config configs/quickstart.py --workdir runs/sweep

Makes sweep.json and sweep.png in --workdir; about ten minutes on two cores. Started
again, it goes on where it stopped.
"""

import sys

from absl import app, flags, logging
from ml_collections import config_flags

from softbottle import config, sweep

CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="A file of configs/ on the synthetic language."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where it all goes.", required=True)
HEADS = flags.DEFINE_list("heads", ["softmax", "moc", "mos"], "Heads to compare.")
WIDTHS = flags.DEFINE_list("widths", ["4", "8", "16", "32"], "Context widths.")
SEEDS = flags.DEFINE_integer("seeds", 3, "How many seeds.", lower_bound=1)


def main(arguments: list[str]) -> None:
    """Sweep what the flags say."""
    if len(arguments) > 1:
        raise app.UsageError(f"not understood: {arguments[1:]}")
    if CONFIG.value is None:
        raise app.UsageError("--config is needed, for example configs/quickstart.py")
    logging.set_verbosity(logging.WARNING)
    widths = [int(width) for width in WIDTHS.value]
    sweep.run(CONFIG.value, WORKDIR.value, HEADS.value, widths, range(SEEDS.value))


if __name__ == "__main__":
    config.check_overrides(sys.argv[1:])
    app.run(main)
