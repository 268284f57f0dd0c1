r"""Compile a training step for machines that are not here, and say what it takes.

    softbottle compile --config lm1b:mos --topology v5e:16x16 \
        --config.mesh.data=none --config.mesh.model=4 --tokens-per-chip 2048
    softbottle compile --config lm1b:mos --topology h200

The whole step is compiled by that machine's own compiler, from shapes alone: it takes
minutes, no data and none of the hardware. Memory is the compiler's word; the time is
arithmetic on makers' figures and was not measured anywhere.
"""

import json
import pathlib

from softbottle.bench import plan
from softbottle.cli import program
from softbottle.cli.program import app, flags

CONFIG = program.define_config()
TOPOLOGY = flags.DEFINE_string("topology", None, "v5e:16x16, v5p:4x4x4, v6e:8x8, h200.")
VOCAB = flags.DEFINE_integer("vocab", 0, "Words; 0: the config's data.vocab_size.")
TOKENS = flags.DEFINE_integer("tokens-per-chip", 2048, "Of a batch.", lower_bound=1)
LARGEST = flags.DEFINE_bool(
    "largest", True, "Compile larger batches, too, to find the largest that fits."
)
JSON = flags.DEFINE_string("json", None, "Where the numbers go as well.")


def main() -> None:
    """Compile what the flags say and print what it takes."""
    missing = [flag.name for flag in (CONFIG, TOPOLOGY) if flag.value is None]
    if missing:
        raise app.UsageError(f"needed: {', '.join(f'--{name}' for name in missing)}")
    vocab = VOCAB.value or CONFIG.value.data.vocab_size or 0
    if vocab < 2:
        raise app.UsageError("--vocab is needed: the config does not say how many")

    def measure(tokens):
        print(f"compiling a step of {tokens:,} tokens per chip", flush=True)
        return plan.measure(CONFIG.value, TOPOLOGY.value, vocab, tokens)

    result = measure(TOKENS.value)
    print(plan.render(result), flush=True)
    _write(result)
    if LARGEST.value:
        largest = plan.largest(measure, result)
        print(plan.render_largest(largest))
        _write(result | {"largest": largest})


def _write(result):
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(result, indent=2))
