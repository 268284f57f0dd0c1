r"""Which head for which cost: perplexity against time, parameters and memory.

    softbottle frontier --config lm1b --workdir runs/frontier \
        --config.data.path=data/books --config.data.rows=256
    softbottle frontier --config lm1b --workdir runs/frontier \
        --config.data.path=data/books --config.data.rows=256 \
        --minutes 20 --arms softmax,moc-7-residual,mos-7-tanh --learning_rates 0.004 \
        --gains 1,4 --table_rates 1,2,4
    softbottle frontier --workdir runs/frontier --draw

Every arm at every learning rate, gain and rate of the word tables is one run over the
text. Finished runs are lines of frontier.jsonl in --workdir, with a table in
frontier.md and a picture in frontier.png. Started again it trains what has no line yet,
on another machine too if the file is copied there. --minutes ends it in time, and it
says what is missing. Other settings and seeds of an arm take as long as its first run:
with --untimed they can be trained by several processes at once, each with a --workdir
of its own, and their lines joined.
"""

from softbottle.cli import program
from softbottle.cli.program import app, flags
from softbottle.experiments import processes
from softbottle.experiments.frontier import arms
from softbottle.experiments.frontier import run as frontier

CONFIG = program.define_config(", that trains a mixture by AdamW")
WORKDIR = flags.DEFINE_string("workdir", None, "Where it all goes.", required=True)
MINUTES = program.define_minutes(
    "End after so many; a run that would not end by then is not started."
)
ARMS = flags.DEFINE_list("arms", list(arms.ARMS), "What is compared; all by default.")
RATES = program.define_numbers("learning_rates", [0.002, 0.004], "Of every arm.", float)
GAINS = program.define_numbers(
    "gains",
    None,
    "Factors on the states, of every arm; the config's by default.",
    float,
)
TABLE_RATES = program.define_numbers(
    "table_rates",
    None,
    "Learning rates of the word tables over those of all else, of every arm; the "
    "config's by default.",
    float,
)
SEEDS = program.define_numbers(
    "seeds",
    [0],
    "The first is for all arms, the others for those that matter most: "
    f"{', '.join(arms.SEVERAL_SEEDS)}.",
    int,
)
DRAW = flags.DEFINE_bool(
    "draw",
    False,
    "Train nothing; draw what there is, and say what is missing of what flags ask.",
)
UNTIMED = flags.DEFINE_bool(
    "untimed",
    False,
    "Other work shares the device: record no times. The arm's timed runs speak for it.",
)
KEEP = flags.DEFINE_bool("keep", False, "Keep the folders of finished runs.")
program.define_compilation_cache()


def main() -> None:
    """Train and draw what the flags say."""
    arms.check_names(ARMS.value)
    tried = (GAINS.value or None, TABLE_RATES.value or None)
    grid = frontier.Grid(ARMS.value, RATES.value, SEEDS.value, *tried)
    if DRAW.value:
        program.refuse_unread("with --draw", CONFIG, MINUTES, UNTIMED, KEEP)
        asked = any(flag.present for flag in (ARMS, RATES, GAINS, TABLE_RATES, SEEDS))
        frontier.report(WORKDIR.value, grid if asked else None)
        return
    if CONFIG.value is None:
        raise app.UsageError("--config is needed, for example --config lm1b")
    processes.leave_devices()
    frontier.run(
        *(CONFIG.value, WORKDIR.value, grid, MINUTES.value, KEEP.value, UNTIMED.value)
    )
