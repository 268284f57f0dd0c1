"""Text from a trained model.

    softbottle generate --workdir runs/ptb-mos --prompt "the company said"
    echo "in new york" | softbottle generate --workdir runs/ptb-mos --prompt -

A prompt of "-" reads standard input, one prompt per line.
"""

import sys

import numpy as np

from softbottle.cli import program
from softbottle.cli.program import flags
from softbottle.data.vocab import printable
from softbottle.scoring import generate
from softbottle.training import state

WORKDIR = flags.DEFINE_string("workdir", None, "The run.", required=True)
PROMPT = flags.DEFINE_string("prompt", "", 'Text to continue; "-" for standard input.')
TOKENS = flags.DEFINE_integer("tokens", 100, "Words to generate.", lower_bound=1)
TEMPERATURE = program.define_float(
    "temperature", 1.0, "Below 1 sharpens; 0 takes the most probable.", lower_bound=0.0
)
TOP_K = flags.DEFINE_integer("top-k", 0, "Keep so many words; 0: all.", lower_bound=0)
TOP_P = program.define_float(
    "top-p", 1.0, "Nucleus: keep words of this mass.", lower_bound=0.0, upper_bound=1.0
)
CACHE = flags.DEFINE_bool(
    "cache", False, "Join the head with a cache of the text so far."
)
SEED = flags.DEFINE_integer(
    "seed",
    0,
    "The same seed gives the same text.",
    lower_bound=0,
    upper_bound=2**32 - 1,
)
program.define_compilation_cache()


def main() -> None:
    """Continue the prompts."""
    run = state.load_run(WORKDIR.value)
    prompts = sys.stdin if PROMPT.value == "-" else [PROMPT.value]
    for prompt in prompts:
        _continue(run, prompt.strip())


def _continue(run, prompt):
    asked = run.vocab.split(prompt) if prompt else []
    unknown = [word for word in asked if word not in run.vocab.lookup]
    if unknown:
        message = f"unknown words: {printable(' '.join(unknown))}"
        if run.vocab.unk is None:
            raise ValueError(
                f"{message}; the model's vocabulary has no <unk> for them."
            )
        print(message, file=sys.stderr)
    ids = run.vocab.encode(prompt) if prompt else np.zeros(0, np.int32)
    print(printable(prompt), end="", flush=True)
    words = generate.generate(
        run,
        ids,
        TOKENS.value,
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        cache=CACHE.value,
        seed=SEED.value,
    )
    for text in run.vocab.spell(words):
        print(text if text == "\n" else printable(text), end="", flush=True)
    print()
