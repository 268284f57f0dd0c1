r"""Follow trained models along their training: which saturate, and under which head?

    softbottle saturation --workdir runs/saturation \
        --run runs/saturation/softmax-64-0 --run runs/saturation/mos-64-0
    softbottle saturation --workdir runs/saturation

Measures the checkpoints of each --run (`train.series=True` stores them) on held-out
text and adds it to saturation.jsonl in --workdir, which keeps the rows of runs whose
folders are gone. Then writes all rows as a table to saturation.md, with what they
decide, and as a picture to saturation.png.
"""

from typing import cast

from softbottle.analysis.sources import run as run_source
from softbottle.cli import program
from softbottle.cli.program import flags
from softbottle.data.vocab import Split
from softbottle.experiments.saturation import report
from softbottle.experiments.saturation import run as saturation

WORKDIR = flags.DEFINE_string("workdir", None, "Where it all goes.", required=True)
RUNS = flags.DEFINE_multi_string("run", [], "A run's folder; maybe several.")
SPLIT = flags.DEFINE_enum(
    "split", "test", ["train", "valid", "test"], "The text that is read."
)
POSITIONS = flags.DEFINE_integer(
    "positions",
    run_source.POSITIONS,
    "From its start, whose states are taken; all of it has a loss.",
    lower_bound=2,
)
program.define_compilation_cache()


def main() -> None:
    """Measure what the flags say, and report all there is."""
    if not RUNS.value:
        program.refuse_unread("without --run", SPLIT, POSITIONS)
    for run in RUNS.value:
        row = saturation.measure(run, cast(Split, SPLIT.value), POSITIONS.value)
        saturation.add(WORKDIR.value, row)
    print(report.write(WORKDIR.value))
