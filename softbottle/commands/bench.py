r"""Race ours against peers, or time a training step by part, on this machine.

    softbottle bench --suite head --peers torch,cce --json head.json
    softbottle bench --suite head --sweep components --peers torch --json k.json
    softbottle bench --suite head --shapes lm1b-100k --options all
    softbottle bench --suite step --shapes ptb --kernels 20
    softbottle bench --draw k.json,v.json --out docs/results/cost.png
    softbottle bench --config ptb:mos --vocab 10000 --length 70
    softbottle bench --suite objective --config books \
        --vocab 20000 --length 512

Prints tables, and writes every number to --json. docs/bench.md explains the columns.
"""

import json
import pathlib

from softbottle.bench import race, table, worker
from softbottle.cli import configs, program
from softbottle.cli.program import flags
from softbottle.ops.lstm import api as lstm

# What a suite needs is imported when it is run: a step takes the whole training system,
# a race jax alone.
SUITES = ("head", "lstm", "step", "objective", "decode")
# The flags that a suite reads beside --suite, --json and --kernels.
_RACE = ("seconds", "limit")
_FLAGS = {
    "head": (
        *("shapes", "sweep", "heads", "options", "implementations", "peers"),
        *("budget_mib", *_RACE),
    ),
    "lstm": ("shapes", "implementations", "peers", "dtype", *_RACE),
    "step": ("shapes", "implementations", "peers", "budget_mib", "dtype", *_RACE),
    "step with --config": ("config", "vocab", "length", "dtype"),
    "objective": ("config", "vocab", "length", *_RACE),
    "decode": ("shapes", "implementations", "budget_mib", *_RACE),
}
# The recipes whose steps are compared, and how many words their corpora have.
RECIPES = {"ptb": ("ptb", 10_000), "wt2": ("wt2", 33_278), "lm1b-100k": ("lm1b", 10**5)}

CONFIG = program.define_config()
SUITE = flags.DEFINE_string("suite", None, f"One of {', '.join(SUITES)}.")
SHAPES = flags.DEFINE_list("shapes", [], "Sizes by name; default: all, tiny on a CPU.")
SWEEP = flags.DEFINE_string("sweep", None, "head: components or vocab.")
HEADS = flags.DEFINE_list(
    "heads",
    None,
    "head: whole ones, at tiny, lm1b-100k or with --options; default: all.",
)
OPTIONS = flags.DEFINE_list(
    "options", [], "head: what is asked of the loss, by name or all."
)
IMPLEMENTATIONS = flags.DEFINE_list("implementations", [], "Ours, by name.")
PEERS = flags.DEFINE_list("peers", [], "torch, cce, tokamax, liger, quack.")
BUDGET = flags.DEFINE_integer("budget_mib", 0, "0: the default.", lower_bound=0)
DTYPE = flags.DEFINE_enum(
    "dtype", None, ["bfloat16", "float32"], "lstm, step: of our GEMMs' inputs."
)
SECONDS = program.define_float("seconds", 0.5, "Of timing, per variant.", lower_bound=0)
LIMIT = program.define_float("limit", 180.0, "Seconds per variant, all in all.")
VOCAB = flags.DEFINE_integer("vocab", 10_000, "--config: words.", lower_bound=2)
LENGTH = flags.DEFINE_integer("length", 70, "--config: positions.", lower_bound=2)
TRACE = flags.DEFINE_integer(
    "kernels", 0, "Of ours, name so many that take longest.", lower_bound=0
)
JSON = flags.DEFINE_string("json", None, "Where the numbers go as well.")
DRAW = flags.DEFINE_list("draw", [], "JSON files of sweeps, to be drawn, not run.")
OUT = flags.DEFINE_string("out", "docs/results/cost.png", "Where --draw draws.")


def main() -> None:
    """Race or time what the flags say."""
    if DRAW.value:
        from softbottle.bench import plot

        race_flags = sorted(
            set().union(*_FLAGS.values()) | {"suite", "json", "kernels"}
        )
        program.refuse_unread(
            "with --draw", *(flags.FLAGS[name] for name in race_flags)
        )
        plot.cost(DRAW.value, OUT.value)
        return
    result = _run(SUITE.value or ("step" if CONFIG.value else ""))
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(result, indent=2))


def _run(suite):
    race.check_names("suite", [suite], list(SUITES))
    _check_flags(suite)
    if suite == "step" and CONFIG.value:
        from softbottle.bench import kernels, step

        CONFIG.value.model.compute_dtype = (
            DTYPE.value or CONFIG.value.model.compute_dtype
        )
        with kernels.asked(TRACE.value):
            return step.run(CONFIG.value, VOCAB.value, LENGTH.value)
    with worker.children(LIMIT.value) as ask:
        result = RUNS[suite](_with_log(_with_trace(ask)), seconds=SECONDS.value)
    print(table.render(result))
    return result


def _check_flags(suite):
    """Refuse flags that the suite would not read.

    Raises:
        ValueError: that names them.
    """
    if suite == "step" and CONFIG.value:
        suite = "step with --config"
    known = set().union(*_FLAGS.values())
    unread = known - set(_FLAGS[suite])
    if given := sorted(name for name in unread if flags.FLAGS[name].present):
        names = ", ".join(f"--{name}" for name in given)
        read = ", ".join(f"--{name}" for name in _FLAGS[suite])
        raise ValueError(f"--suite {suite} does not read {names}; it reads {read}.")
    if suite == "step" and len(IMPLEMENTATIONS.value) > 1:
        raise ValueError(
            "--suite step takes one implementation, "
            f"got {','.join(IMPLEMENTATIONS.value)}."
        )


def _with_trace(ask):
    """`ask`, whose tasks say how many kernels of ours are to be named."""
    return lambda module, task: ask(module, task | {"trace": TRACE.value})


def _with_log(ask):
    """`ask`, whose rows also go to lines beside --json, for a run that is cut short."""
    if not JSON.value:
        return ask
    lines = pathlib.Path(JSON.value).with_suffix(".jsonl")
    lines.write_text("")

    def logged(module, task):
        row = ask(module, task)
        with lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    return logged


def _head(ask, seconds):
    return race.head(
        ask,
        SHAPES.value,
        IMPLEMENTATIONS.value or (["auto"] if OPTIONS.value else ["auto", "blocked"]),
        PEERS.value,
        sweep=SWEEP.value,
        heads=HEADS.value,
        asked=OPTIONS.value,
        budget_mib=BUDGET.value,
        seconds=seconds,
    )


def _lstm(ask, seconds):
    return race.lstm(
        ask,
        SHAPES.value,
        IMPLEMENTATIONS.value or list(lstm.IMPLEMENTATIONS),
        PEERS.value,
        dtype=DTYPE.value or "bfloat16",
        seconds=seconds,
    )


def _step(ask, seconds):
    from softbottle.bench import slowdown

    names = SHAPES.value or list(RECIPES)
    race.check_names("recipe", names, list(RECIPES))
    recipes = {name: (_recipe(RECIPES[name][0]), RECIPES[name][1]) for name in names}
    return slowdown.run(ask, recipes, PEERS.value, seconds=seconds)


def _objective(ask, seconds):
    from softbottle.bench import objective

    if CONFIG.value is None:
        raise ValueError("--suite objective needs --config, whose step it times.")
    sizes = (VOCAB.value, LENGTH.value)
    return objective.run(ask, CONFIG.value, *sizes, seconds=seconds)


def _decode(ask, seconds):
    return race.decode(
        ask,
        SHAPES.value,
        IMPLEMENTATIONS.value or ["auto"],
        budget_mib=BUDGET.value,
        seconds=seconds,
    )


def _recipe(name):
    """The mixture of a config that comes with softbottle, as the flags change it."""
    recipe = configs.load(f"{name}:mos")
    recipe.model.compute_dtype = DTYPE.value or recipe.model.compute_dtype
    recipe.head.budget_mib = BUDGET.value or recipe.head.budget_mib
    recipe.head.implementation = (IMPLEMENTATIONS.value or ["auto"])[0]
    return recipe


RUNS = {
    "head": _head,
    "lstm": _lstm,
    "step": _step,
    "objective": _objective,
    "decode": _decode,
}
