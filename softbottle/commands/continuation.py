r"""Continue the lines of a text with several models, and compare the continuations.

    softbottle continuation --workdir runs/books-plain \
        --workdir runs/books-trime --workdir runs/books-histalign --out runs/continued

Every model continues them without and with its cache. Beside the perplexity of the
whole text stand the diversity of what was generated, and its coherence with the prompt
as judged by each of the models, or by those that --judge names. Makes continuation.md
(the table), continuation.json (every number) and samples.json in --out.
"""

import dataclasses
import json
import pathlib
from typing import cast

from softbottle import files
from softbottle.cli import program
from softbottle.cli.program import flags
from softbottle.data.vocab import Split
from softbottle.experiments import continuation
from softbottle.training import state

WORKDIRS = flags.DEFINE_multi_string("workdir", None, "A run.", required=True)
JUDGES = flags.DEFINE_multi_string("judge", [], "A run that judges; default: all.")
OUT = flags.DEFINE_string("out", None, "Where the results go.", required=True)
SPLIT = flags.DEFINE_enum("split", "test", ["train", "valid", "test"], "Which text.")
PATH = flags.DEFINE_string("path", None, "Where the corpus is, if not as in training.")
PROMPTS = flags.DEFINE_integer("prompts", 500, "Lines to continue.", lower_bound=2)
PROMPT_WORDS = flags.DEFINE_integer("prompt_words", 16, "Of each.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", 32, "Words to generate at most.", lower_bound=1)
TEMPERATURE = program.define_float(
    "temperature", 1.0, "Below 1 sharpens.", lower_bound=1e-6
)
TOP_P = program.define_float(
    "top_p", 0.95, "Nucleus: keep words of this mass.", lower_bound=0.0, upper_bound=1.0
)
SEEDS = program.define_numbers("seeds", [0, 1, 42], "Of the drawing.", int)
program.define_compilation_cache()


def main() -> None:
    """Continue and compare what the flags say."""
    settings = continuation.Settings(
        PROMPTS.value,
        PROMPT_WORDS.value,
        TOKENS.value,
        TEMPERATURE.value,
        TOP_P.value,
        tuple(SEEDS.value),
    )
    runs = _loaded(WORKDIRS.value)
    judges = _loaded(JUDGES.value) or runs
    split, run = cast(Split, SPLIT.value), next(iter(runs.values()))
    text = state.load_corpus(WORKDIRS.value[0], run, split, path=PATH.value)
    rows, samples = continuation.compare(runs, judges, text.splits[split], settings)
    out = pathlib.Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    result = {"settings": dataclasses.asdict(settings), "rows": rows}
    files.replace(out / "continuation.json", json.dumps(result, indent=2))
    files.replace(out / "samples.json", json.dumps(samples, indent=2))
    files.replace(out / "continuation.md", continuation.table(rows) + "\n")
    print(continuation.table(rows))


def _loaded(workdirs):
    names = [pathlib.Path(workdir).resolve().name for workdir in workdirs]
    if len(set(names)) < len(names):
        raise ValueError(f"the runs need folders of different names, got {names}.")
    return dict(zip(names, map(state.load_run, workdirs), strict=True))
