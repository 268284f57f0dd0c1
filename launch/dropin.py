"""Put a mixture in the place of a softmax, wherever a new user may: is it ever worse?

    python launch/dropin.py --config configs/dropin.py --workdir runs/dropin \
        --config.data.path=data/wikitext-2
    python launch/dropin.py --config configs/dropin.py:transformer \
        --workdir runs/dropin-transformer --config.data.path=data/wikitext-2

Trains small models at every table start, learning rate and tying of the grid in
experiments/dropin.py with each head. Writes dropin.jsonl and dropin.md to --workdir;
started again, it goes on where it stopped.
"""

from softbottle import command
from softbottle.command import app, config_flags, flags
from softbottle.experiments import dropin

CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="A file of configs/; its head is not read."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Where it all goes.", required=True)
RIVALS = flags.DEFINE_list("rivals", ["mos"], f"Of {', '.join(dropin.RIVALS)}.")
SEEDS = flags.DEFINE_integer("seeds", 3, "How many for the softmax.", lower_bound=2)


def main() -> None:
    """Compare the rivals with a softmax."""
    if CONFIG.value is None:
        raise app.UsageError("--config is needed, for example configs/dropin.py")
    dropin.run(CONFIG.value, WORKDIR.value, RIVALS.value, SEEDS.value)


if __name__ == "__main__":
    command.run(main)
