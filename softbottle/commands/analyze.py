r"""See the bottleneck in trained models, in arrays from anywhere, or in bare text.

    softbottle analyze --workdir runs/quickstart --out runs/report
    softbottle analyze --hf NAME_OR_FOLDER --text book.txt --out report
    softbottle analyze --arrays states.npz --out report
    softbottle analyze --text german --text french --order 3 --out report
    softbottle analyze --hf small --hf large@step64,step512 --gguf other.gguf \
        --workdir runs/text --text book.txt --out report
    softbottle analyze --compare --workdir runs/mos --workdir runs/softmax --out report

Models stand side by side in one report, and one that cannot be read is named in it.
Writes report.html (one file, made to be looked at), report.json and a PNG per figure.
Nothing is downloaded unless --hf names a model that is no folder.
"""

import shlex
import sys
from typing import cast

from softbottle.analysis import inspection, overview, pair, report
from softbottle.analysis.instruments import rank
from softbottle.analysis.settings import Precision, Settings
from softbottle.analysis.sources import opening
from softbottle.analysis.sources.reading import Reading
from softbottle.cli import program
from softbottle.cli.program import app, flags

WORKDIRS = flags.DEFINE_multi_string(
    "workdir", [], "A run; several stand side by side."
)
ARRAYS = flags.DEFINE_multi_string(
    "arrays",
    [],
    "An .npz with hidden [N, D] and table [V, D], maybe bias and labels; or attention "
    "logits [R, L] and values [L, D]; or parameters, tokens and loss [M] of trained "
    "models, maybe names and which are fitted: their scaling law.",
)
HF = flags.DEFINE_multi_string(
    "hf",
    [],
    "A Hugging Face causal language model: a folder, or a name on the hub. Revisions "
    "after @ (of a folder, subfolders, * for all) are a series over its training.",
)
GGUF = flags.DEFINE_multi_string(
    "gguf", [], "A model in a GGUF file that transformers can read."
)
TEXTS = flags.DEFINE_multi_string(
    "text",
    [],
    "What a pretrained model reads: text, or ids in a .npy file. Without a model: "
    "files or folders whose n-grams are compared.",
)
COMPARE = flags.DEFINE_bool(
    "compare",
    False,
    "How the predictions of two models differ, which read one --text, or two runs "
    "their --split. Further sections are those of --instruments.",
)
OUT = flags.DEFINE_string("out", None, "Where the report goes.", required=True)
INSTRUMENTS = flags.DEFINE_list(
    "instruments",
    None,
    "Which instruments, in what order; by default all but those that train. One that "
    f"cannot run says why. There are {', '.join(inspection.INSTRUMENTS)}.",
)
SPLIT = flags.DEFINE_enum("split", "test", ["train", "valid", "test"], "Which text.")
POSITIONS = flags.DEFINE_integer(
    "positions",
    None,
    "How much of it: 8192 for runs, else 2048, and for a model of width d at least "
    "2 (d + 2), so that the rank is not the sample's.",
    lower_bound=2,
)
WINDOW = flags.DEFINE_integer(
    "window", 512, "Tokens that a pretrained model reads at a time.", lower_bound=8
)
FROZEN = flags.DEFINE_integer(
    "frozen",
    0,
    "How many of a pretrained model's states the instrument lowrank trains heads on, "
    "if more than --positions.",
)
ORDER = flags.DEFINE_integer("order", 2, "Of the text's n-grams.", lower_bound=2)
DIMENSIONS = flags.DEFINE_integer(
    "dimensions",
    None,
    "Of the n-grams' matrix: 512, or twice the width of a pretrained model.",
    lower_bound=1,
)
PRECISION = flags.DEFINE_enum(
    "precision", "float32", rank.PRECISIONS, "Of the log-probabilities, for their rank."
)
program.define_compilation_cache()


def main() -> None:
    """Analyze what the flags say."""
    _check_flags()
    asked = INSTRUMENTS.value or None
    if asked:
        inspection.check(asked)
    precision = cast(Precision, PRECISION.value)
    settings = Settings(ORDER.value, DIMENSIONS.value, precision)
    if COMPARE.value:
        made = pair.inspect(_pair(), asked or (), settings)
    else:
        made = inspection.inspect(_sources(), asked, settings)
    command = shlex.join(["softbottle", "analyze", *sys.argv[1:]])
    header = overview.header(made, command, bool(HF.value or GGUF.value))
    screen = overview.opening(made)
    title = overview.title(made)
    report.write(OUT.value, title, made.sections, header, screen)
    for line in (*header, *screen.facts):
        print(line)
    for name, verdict in screen.verdicts.items():
        print(f"{name} {verdict}")
    for section in made.sections:
        print(f"{section.title}: {section.reading}")
    print(f"wrote {OUT.value}/report.html")


def _check_flags():
    """Refuse what is read of no source that is given."""
    if not (HF.value or GGUF.value):
        program.refuse_unread("without --hf or --gguf", WINDOW, FROZEN)
        if not WORKDIRS.value:
            program.refuse_unread("without a model", POSITIONS)
    if not WORKDIRS.value:
        program.refuse_unread("without --workdir", SPLIT)
    elif COMPARE.value and TEXTS.value:
        program.refuse_unread("with --text, which both models read", SPLIT)


def _sources():
    """All that the flags name, in the order of this file."""
    pretrained = HF.value or GGUF.value
    if not (WORKDIRS.value or ARRAYS.value or pretrained or TEXTS.value):
        raise app.UsageError("give --workdir, --arrays, --hf, --gguf or --text")
    if pretrained and len(TEXTS.value) != 1:
        raise app.UsageError("pretrained models need one --text to read")
    sources = opening.runs(WORKDIRS.value, SPLIT.value, POSITIONS.value)
    if pretrained:
        sources += opening.hub(HF.value, _reading())
        sources += opening.gguf(GGUF.value, _reading())
    elif TEXTS.value:
        sources += opening.bare_texts(TEXTS.value)
    return sources + opening.files(ARRAYS.value)


def _pair():
    """Two models that read the same tokens."""
    revisions = [each for name in HF.value for each in opening.revisions(name)]
    count = len(WORKDIRS.value) + len(revisions) + len(GGUF.value)
    if count != 2 or ARRAYS.value:
        raise app.UsageError("--compare takes two of --workdir, --hf and --gguf")
    if len(TEXTS.value) > 1 or not (TEXTS.value or len(WORKDIRS.value) == 2):
        raise app.UsageError("--compare takes one --text, which both models read")
    text = TEXTS.value[0] if TEXTS.value else None
    read = SPLIT.value, POSITIONS.value, text
    sources = opening.runs(WORKDIRS.value, *read, in_order=True)
    if text is not None:
        sources += opening.checkpoints(HF.value, _reading())
        sources += opening.gguf(GGUF.value, _reading())
    return sources


def _reading():
    return Reading(TEXTS.value[0], POSITIONS.value, WINDOW.value, FROZEN.value)
