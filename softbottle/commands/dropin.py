r"""Put a mixture in the place of a softmax at many settings: is it ever worse?

    softbottle dropin --config dropin --workdir runs/dropin \
        --config.data.path=data/wikitext-2
    softbottle dropin --config dropin:transformer \
        --workdir runs/dropin-transformer --config.data.path=data/wikitext-2

Trains small models at every table start, learning rate and tying of the grid in
experiments/dropin.py with each head. Writes dropin.jsonl and dropin.md to --workdir;
started again, it goes on where it stopped. Several processes may share a GPU, each with
one of the --learning_rates and a --workdir of its own: join their lines in one
dropin.jsonl and start there with all rates, for the table.
"""

from softbottle.cli import program
from softbottle.cli.program import app, flags
from softbottle.experiments import dropin

CONFIG = program.define_config(", whose head is not read")
WORKDIR = flags.DEFINE_string("workdir", None, "Where it all goes.", required=True)
RIVALS = flags.DEFINE_list("rivals", ["mos"], f"Of {', '.join(dropin.RIVALS)}.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Models per head and setting.", lower_bound=2)
RATES = program.define_numbers(
    "learning_rates", list(dropin.RATES), "Of every head.", float
)
program.define_compilation_cache()


def main() -> None:
    """Compare the rivals with a softmax."""
    if CONFIG.value is None:
        raise app.UsageError("--config is needed, for example --config dropin")
    dropin.run(CONFIG.value, WORKDIR.value, RIVALS.value, SEEDS.value, RATES.value)
