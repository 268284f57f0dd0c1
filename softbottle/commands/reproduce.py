r"""The papers' tables: train, finetune, evaluate, and our numbers beside theirs.

    softbottle reproduce ptb --workdir runs/ptb --minutes 20
    softbottle reproduce ptb --workdir runs/ptb-seeds --heads mos,softmax,moc \
        --seeds 28,1,2 --scale 0.4
    softbottle reproduce ranks --workdir runs/ranks --scale 0.1
    softbottle reproduce --table wt2 --workdir runs/wt2 --as_is

Tables: ptb, wt2, ranks (of log P, on PTB), time (per step), lm1b. Every stage that is
done is a line of reproduce.jsonl in --workdir; the table is TABLE.md there. Started
again it goes on where it stopped: at the end of --minutes, by Ctrl-C or SIGTERM. Small
models leave room on a GPU: several processes, each with heads of its own, a --workdir
of its own and --untimed, can share one, and their lines be joined in one file.
"""

import json

from softbottle.cli import configs, program
from softbottle.cli.program import flags
from softbottle.experiments import processes
from softbottle.experiments.reproduce import run as reproduce
from softbottle.experiments.reproduce.plan import Grid
from softbottle.experiments.reproduce.tables import HEADS, TABLES, check_heads

FIRST_WORD = "table"  # its flag may be left out before the value

TABLE = flags.DEFINE_enum(
    "table", None, list(TABLES), "Which table; --table may be left out.", required=True
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where it all goes.", required=True)
CHOSEN = flags.DEFINE_list(
    "heads", [], f"Instead of the table's own; there are {', '.join(HEADS)}."
)
SEEDS = program.define_numbers(
    "seeds", None, "Of the runs; by default the recipe's own.", int
)
MINUTES = program.define_minutes(
    "End after so many: what is under way saves and stops, and what is left is said."
)
SCALE = program.define_float(
    "scale", 1.0, "Share of the epochs, and of the switch to averaging.", lower_bound=0
)
AS_IS = flags.DEFINE_bool(
    "as_is", False, "Train no further; evaluate what was cut short as it is."
)
UNTIMED = flags.DEFINE_bool(
    "untimed", False, "Other work shares the device: record no times of trainings."
)
SET = flags.DEFINE_multi_string(
    "set", [], "A setting of all runs: data.path=data/ptb, train.epochs=350."
)
program.define_compilation_cache()


def main() -> None:
    """Reproduce what the flags say."""
    check_heads(CHOSEN.value, TABLES[TABLE.value])
    grid = Grid(
        TABLE.value,
        CHOSEN.value,
        SEEDS.value,
        SCALE.value,
        dict(map(_setting, SET.value)),
    )
    processes.leave_devices()
    reproduce.run(
        *(grid, WORKDIR.value, configs.load),
        *(MINUTES.value, AS_IS.value, UNTIMED.value),
    )


def _setting(text):
    """("train.epochs", 350) of train.epochs=350; a value that is no JSON is a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes SECTION.FIELD=VALUE, got {text!r}.")
    try:
        return name, None if value.lower() == "none" else json.loads(value)
    except ValueError:
        return name, value
