r"""Put other heads on a pretrained model: what do they gain over its own?

    softbottle retrofit --gguf model.gguf --text book.txt --head mos \
        --components 4 --workdir runs/retrofit
    softbottle retrofit --hf FOLDER --text train.txt --heldout valid.txt \
        --width 64,128 --objective distill --freeze none --workdir runs/narrow
    softbottle retrofit --states FOLDER --arms affine,moc-4,mos-4 --workdir runs/b

The model's states are computed once, into --states; then its trunk is not needed.
Writes retrofit.jsonl, .md and .png to --workdir; started again, it goes on.
"""

import pathlib

from softbottle.analysis.sources import states, trunk
from softbottle.cli import program
from softbottle.cli.program import app, flags
from softbottle.experiments.retrofit import arms as arms_lib
from softbottle.experiments.retrofit import data, trial
from softbottle.experiments.retrofit import run as retrofit
from softbottle.experiments.retrofit.trunk import Tuner

WORKDIR = flags.DEFINE_string("workdir", None, "Where it all goes.", required=True)
HF = flags.DEFINE_string("hf", None, "A Hugging Face model: a folder, or its name.")
GGUF = flags.DEFINE_string("gguf", None, "A model in a GGUF file.")
TEXTS = flags.DEFINE_multi_string(
    "text", [], "What it reads: a text, ids in a .npy file, or a folder of these."
)
HELDOUT = flags.DEFINE_multi_string(
    "heldout", [], "Text to judge by; else the last 5% of each --text."
)
STATES = flags.DEFINE_string(
    "states", None, "Where the states are, or go; WORKDIR/states by default."
)
ONLY = flags.DEFINE_bool("only_states", False, "Compute the states, and stop.")
POSITIONS = flags.DEFINE_integer(
    "positions", None, "How many tokens of each text; all by default.", lower_bound=2
)
WINDOW = flags.DEFINE_integer(
    "window", 512, "Tokens that the model reads at a time.", lower_bound=2
)
TRUNK = flags.DEFINE_enum(
    "trunk_dtype", "float32", trunk.DTYPES, "Of the trunk's products."
)
HEAD = flags.DEFINE_enum(
    "head", None, arms_lib.MIXED, "One head; its control, moc, is trained, too."
)
COMPONENTS = flags.DEFINE_integer(
    "components", 4, "Components, or classes of words, of --head.", lower_bound=1
)
ARMS = flags.DEFINE_list(
    "arms", None, f"Several heads, such as {','.join(arms_lib.FULL)}."
)
WIDTH = program.define_numbers(
    "width", None, "Of narrow tables; else as wide as states.", int
)
FREEZE = flags.DEFINE_enum(
    "freeze", "table", trial.FROZEN, "What is not trained, beside the trunk."
)
OBJECTIVE = flags.DEFINE_enum(
    "objective", "words", trial.OBJECTIVES, "Next word, KL to own, or both."
)
RATES = program.define_numbers("rates", [0.001], "Learning rates of every head.", float)
SEEDS = flags.DEFINE_integer(
    "seeds", 2, "Runs of every head at its best rate.", lower_bound=1
)
STEPS = flags.DEFINE_integer(
    "steps", None, "Of every run; one pass over the states by default.", lower_bound=1
)
BATCH = flags.DEFINE_integer("batch", 4096, "Tokens per step.", lower_bound=1)
COMPUTE = flags.DEFINE_enum(
    "compute_dtype", "float32", trunk.DTYPES, "Of products with the table."
)
UNFREEZE = flags.DEFINE_bool("unfreeze", False, "Train trunk and table with the head.")
TRUNK_RATE = program.define_float(
    "trunk_rate", 1e-5, "The trunk's learning rate with --unfreeze.", lower_bound=0.0
)
KEEP = flags.DEFINE_bool("keep", False, "Keep the trained heads in WORKDIR/heads.")
MINUTES = program.define_minutes("End after so many.")
program.define_compilation_cache()


def main() -> None:
    """Compute states, train heads and report, as the flags say."""
    _check_flags()
    grid = _grid()
    freeze = "none" if UNFREEZE.value else FREEZE.value
    training = trial.Training(
        *(STEPS.value or 0, BATCH.value, 0.0, OBJECTIVE.value, freeze),
        compute_dtype=COMPUTE.value,
    )
    retrofit.check(grid, training)
    folder = STATES.value or str(pathlib.Path(WORKDIR.value) / "states")
    model = HF.value or GGUF.value
    if bool(model) != bool(TEXTS.value):
        raise app.UsageError("a model (--hf, --gguf) and --text go together")
    if UNFREEZE.value and (not model or WIDTH.value or OBJECTIVE.value != "words"):
        raise app.UsageError(
            "--unfreeze needs the model itself, its own width and --objective words"
        )
    if model:
        pretrained = trunk.load(HF.value, GGUF.value)
        encoded = trunk.encode(
            *(pretrained, TEXTS.value, HELDOUT.value),
            window=WINDOW.value,
            positions=POSITIONS.value,
        )
        stored = trunk.keep(pretrained, encoded, folder, TRUNK.value)
    else:
        stored = states.read(folder)
    for fact in stored.train.facts:
        print(fact)
    if ONLY.value:
        return
    problem = data.make(stored.train, stored.heldout, stored.digest)
    if not STEPS.value:
        steps = data.steps_per_pass(problem.train, BATCH.value)
        training = training._replace(steps=steps)
    fit, rate = retrofit.frozen(problem), None
    if UNFREEZE.value:
        rate = TRUNK_RATE.value
        fit = Tuner(pretrained, encoded, problem, rate).fit
    how = (training, fit, MINUTES.value, rate, KEEP.value)
    retrofit.compare(problem, WORKDIR.value, grid, *how)


def _check_flags():
    """Refuse what is not read on the way that the others ask for."""
    if not (HF.value or GGUF.value):
        reading = (HELDOUT, POSITIONS, WINDOW, TRUNK)
        program.refuse_unread("without a model: states are as they are", *reading)
    if not HEAD.value:
        program.refuse_unread("without --head; an arm's name has it", COMPONENTS)
    if not UNFREEZE.value:
        program.refuse_unread("without --unfreeze", TRUNK_RATE)
    elif FREEZE.value != "none":
        program.refuse_unread("with --unfreeze, which trains all", FREEZE)


def _grid():
    if ARMS.value and HEAD.value:
        raise app.UsageError("give --arms or --head, not both")
    widths = WIDTH.value or [None]
    arms = ARMS.value or (arms_lib.NARROW if WIDTH.value else arms_lib.FULL)
    if HEAD.value:
        # With the control that has its parameters, or nothing could be said of it.
        named = (f"{name}-{COMPONENTS.value}" for name in ("moc", HEAD.value))
        arms = list(dict.fromkeys(named))
    return retrofit.Grid(arms, widths, RATES.value, SEEDS.value)
