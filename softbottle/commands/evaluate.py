"""Perplexity of a trained model: static, dynamic, or with a cache.

    softbottle evaluate --workdir runs/ptb-mos --split test
    softbottle evaluate --workdir runs/ptb-mos --split test --dynamic --cache
    softbottle evaluate --workdir runs/lm1b-mos --text heldout/,story.txt.gz

--text is any text, in the run's vocabulary; out-of-vocabulary words are `<unk>`, and
their share is printed beside the perplexity, which they make look better.
--cache is the neural cache, mixed in with --share; --joint the cache under the head's
own normalisers, which config.cache trains for. Beside their perplexity stands how often
the cache by itself would have been right.

Prints a table, and one JSON line with the same numbers.
"""

import dataclasses
import json
import time
from typing import Literal, cast

from softbottle.cli import program
from softbottle.cli.program import app, flags
from softbottle.data import corpus, lines
from softbottle.data.vocab import UNK, Split
from softbottle.scoring import dynamic
from softbottle.training import evaluate, state

WORKDIR = flags.DEFINE_string("workdir", None, "The run.", required=True)
SPLIT = flags.DEFINE_enum("split", "test", ["train", "valid", "test"], "Which text.")
PATH = flags.DEFINE_string("path", None, "Where the corpus is, if not as in training.")
TEXT = flags.DEFINE_list("text", [], "Files or folders to score instead of a split.")
TOKENS = flags.DEFINE_integer(
    "tokens", 0, "Score only the first so many of the text; 0: all.", lower_bound=0
)
ROWS = flags.DEFINE_integer(
    "rows", 0, "Rows read side by side; 0: the config's.", lower_bound=0
)
LENGTH = flags.DEFINE_integer(
    "length", 0, "Positions read at a time; 0: the config's.", lower_bound=0
)
DTYPE = flags.DEFINE_enum(
    "compute_dtype", "float32", ["float32", "bfloat16"], "Of the model's GEMMs."
)
ACTIVE = flags.DEFINE_integer(
    "active",
    None,
    "A mixture's components per token, if not as in training; all: its number of them.",
    lower_bound=1,
)
DYNAMIC = flags.DEFINE_bool(
    "dynamic", False, "Also score while learning from the text."
)
LEARNING_RATE = program.define_float(
    "learning_rate", 5e-5, "Dynamic: step size.", lower_bound=0.0
)
DECAY = program.define_float(
    "decay", 0.002, "Dynamic: pull to the trained weights.", lower_bound=0.0
)
EPSILON = program.define_float(
    "epsilon", 2e-5, "Dynamic: added to the statistics.", lower_bound=0.0
)
SEGMENT = flags.DEFINE_integer(
    "segment", 5, "Dynamic: words between updates.", lower_bound=1
)
SUMS = flags.DEFINE_bool(
    "sums", False, "Dynamic: the three numbers are in the MoS code's older convention."
)
CACHE = flags.DEFINE_bool("cache", False, "Also score with the neural cache.")
JOINT = flags.DEFINE_bool("joint", False, "Also score with the joint cache.")
WINDOW = flags.DEFINE_integer("window", 500, "Caches: states they hold.", lower_bound=1)
THETA = program.define_float("theta", 1.0, "Cache: sharpness.", lower_bound=0.0)
SHARE = program.define_float(
    "share",
    0.1,
    "Cache: its share of the mixture (lambda).",
    lower_bound=0.0,
    upper_bound=1.0,
)
program.define_compilation_cache()


def main() -> None:
    """Evaluate what the flags say."""
    _check_flags()
    dtype = cast(Literal["float32", "bfloat16"], DTYPE.value)
    run = _with_active(state.load_run(WORKDIR.value, dtype))
    _check_unit(run.config.data.unit)
    trained_on = None
    if TEXT.value:
        ids = corpus.read(TEXT.value, run.vocab)
    else:
        split = cast(Split, SPLIT.value)
        used: set[Split] = {split, "train"} if DYNAMIC.value else {split}
        trained_on = state.load_corpus(WORKDIR.value, run, *used, path=PATH.value)
        ids = trained_on.splits[split]
    if 0 < TOKENS.value < len(ids) - 1:
        ids = ids[: TOKENS.value + 1]
        if run.config.data.unit != "stream":
            ids = lines.whole(ids, run.vocab.eos)
    unk = run.vocab.unk
    unknown = 0.0 if unk is None else float((ids[1:] == unk).mean())
    results = {}
    for name, score in _ways(run, trained_on, ids).items():
        start = time.perf_counter()
        result = score()
        results[name] = {
            "perplexity": result.perplexity,
            "loss": result.loss,
            "tokens": result.count,
            "seconds": round(time.perf_counter() - start, 2),
        }
        if result.hits is not None:
            results[name]["cache_accuracy"] = result.hits / result.count
    print(
        f"{'way':10} {'perplexity':>10} {'nats':>8} {'tokens':>10} {'seconds':>8} "
        f"{'cache right':>11}"
    )
    for name, row in results.items():
        print(
            f"{name:10} {row['perplexity']:10.3f} {row['loss']:8.4f} "
            f"{row['tokens']:10,} {row['seconds']:8.1f} "
            + (f"{row['cache_accuracy']:11.2%}" if "cache_accuracy" in row else "")
        )
    print(f"{unknown:.2%} of the words are {UNK}.")
    which = {"text": TEXT.value} if TEXT.value else {"split": SPLIT.value}
    print(json.dumps({**which, "step": run.step, "unknown": unknown, **results}))


def _check_flags():
    """Refuse what is not read in the ways of scoring that are asked for."""
    if TEXT.value and (DYNAMIC.value or PATH.value):
        raise app.UsageError("--dynamic and --path go with a split, not with --text")
    if TEXT.value:
        program.refuse_unread("with --text", SPLIT)
    if not DYNAMIC.value:
        learning = (LEARNING_RATE, DECAY, EPSILON, SEGMENT, SUMS)
        program.refuse_unread("without --dynamic", *learning)
    if not (CACHE.value or JOINT.value):
        program.refuse_unread("without --cache or --joint", WINDOW)
    if not CACHE.value:
        program.refuse_unread("without --cache", THETA, SHARE)


def _check_unit(unit):
    """Refuse what reads a text as one stream where the run reads its lines apart."""
    for name, asked in {"dynamic": DYNAMIC.value, "cache": CACHE.value}.items():
        if asked and unit != "stream":
            raise ValueError(
                f"--{name} reads a text as one stream; this run has data.unit={unit!r}."
            )


def _with_active(run):
    """The run, its head with as many active components as the flag says."""
    head = run.model.head
    if ACTIVE.value is None:
        return run
    if "active" not in head.settings():
        raise ValueError(f"--active is for mixtures of softmaxes, not for {head!r}.")
    chosen = dataclasses.replace(head, active=ACTIVE.value)
    return run._replace(model=dataclasses.replace(run.model, head=chosen))


def _ways(run, text, ids):
    data = run.config.data
    rows = ROWS.value or (data.test_rows if SPLIT.value == "test" else data.eval_rows)
    length = LENGTH.value or data.eval_length
    cut = lines.cut(data, run.vocab)
    static = evaluate.make_evaluator(run.model, cut=cut)
    ways = {"static": lambda: static(run.params, ids, rows, length)}
    if DYNAMIC.value:
        settings = _dynamic_settings(run, text)
        ways["dynamic"] = lambda: dynamic.evaluate(
            run.model, run.params, text.train, ids, settings
        )
    if CACHE.value:
        pointer = evaluate.Pointer(WINDOW.value, THETA.value, SHARE.value)
        ways["cache"] = lambda: evaluate.evaluate_with_cache(
            run.model, run.params, ids, length, pointer
        )
    if JOINT.value and cut is not None:
        # A line's cache is the line's own history.
        joint = evaluate.make_evaluator(run.model, cached=True, cut=cut)
        ways["joint"] = lambda: joint(run.params, ids, rows, length)
    elif JOINT.value:
        ways["joint"] = lambda: evaluate.evaluate_with_cache(
            run.model,
            run.params,
            ids,
            length,
            evaluate.Joint(WINDOW.value),
        )
    return ways


def _dynamic_settings(run, text):
    numbers = (LEARNING_RATE.value, DECAY.value, EPSILON.value)
    if SUMS.value:
        return dynamic.from_sums(*numbers, text.train, run.params, SEGMENT.value)
    return dynamic.Settings(*numbers, SEGMENT.value)
