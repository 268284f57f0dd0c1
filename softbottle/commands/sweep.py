r"""Heads at several widths or numbers of components, or objectives at several rates.

    softbottle sweep --config quickstart:mos,random --workdir runs/random
    softbottle sweep --config quickstart --workdir runs/sweep \
        --widths 2,4,8,16 --beside runs/random/sweep.json
    softbottle sweep --config quickstart --workdir runs/components \
        --components 1,2,4,8
    softbottle sweep --config templates --workdir runs/templates \
        --objectives plain,trime,histalign --rates 1e-3,3e-3,1e-2
    softbottle sweep --config templates:histalign,finetune \
        --config.train.init_from=runs/templates/plain-0.003-{seed} \
        --objectives trime,histalign --rates 1e-4,3e-4,1e-3 --workdir runs/tuned

Of heads it makes sweep.json and sweep.png in --workdir, in about ten minutes on two
cores; with --beside another sweep is drawn in a panel of its own. Of components K it
makes components.json, .md and .png: rank of log P, perplexity and time per step of the
config's head, or of --heads, at the config's width, on any text. Of objectives it makes
objectives.json and objectives.md, in about two minutes per run from scratch. Started
again, it resumes where it stopped.
"""

from softbottle.cli import program
from softbottle.cli.program import app, flags
from softbottle.experiments import components, objectives, sweep

CONFIG = program.define_config(
    ", on the synthetic language for heads, templates for objectives"
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where it all goes.", required=True)
HEADS = flags.DEFINE_list("heads", ["softmax", "moc", "mos"], "Heads to compare.")
WIDTHS = program.define_numbers("widths", [4, 8, 16, 32], "Context widths.", int)
COMPONENTS = program.define_numbers(
    "components", None, "Numbers of components of a mixture, instead of widths.", int
)
OBJECTIVES = flags.DEFINE_list("objectives", [], "Objectives, instead of heads.")
RATES = program.define_numbers(
    "rates", [1e-3, 3e-3, 1e-2], "Their learning rates.", float
)
BESIDE = flags.DEFINE_string(
    "beside", None, "The sweep.json of another language, to be drawn beside this one."
)
SEEDS = flags.DEFINE_integer("seeds", 3, "How many seeds.", lower_bound=1)
program.define_compilation_cache()


def main() -> None:
    """Sweep what the flags say."""
    if CONFIG.value is None:
        raise app.UsageError("--config is needed, for example --config quickstart")
    seeds = range(SEEDS.value)
    if COMPONENTS.value:
        _check_alone()
        named = (
            HEADS.value if flags.FLAGS["heads"].present else [CONFIG.value.head.name]
        )
        components.run(CONFIG.value, WORKDIR.value, named, COMPONENTS.value, seeds)
        return
    if OBJECTIVES.value:
        program.refuse_unread("with --objectives", HEADS, WIDTHS, BESIDE)
        by_objective = dict.fromkeys(OBJECTIVES.value, RATES.value)
        objectives.run(CONFIG.value, WORKDIR.value, by_objective, seeds)
    else:
        program.refuse_unread("without --objectives", RATES)
        swept = HEADS.value, WIDTHS.value, seeds, BESIDE.value
        sweep.run(CONFIG.value, WORKDIR.value, *swept)


def _check_alone():
    others = [
        name
        for name in ("widths", "objectives", "rates", "beside")
        if flags.FLAGS[name].present
    ]
    if others:
        raise app.UsageError(f"--components is swept alone, not with --{others[0]}")
