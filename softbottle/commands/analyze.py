r"""See the bottleneck in trained models, in arrays from anywhere, or in bare text.

    softbottle analyze --workdir runs/quickstart \
        --workdir runs/quickstart-softmax --out runs/report
    softbottle analyze --hf NAME_OR_FOLDER --text book.txt --out report
    softbottle analyze --gguf model.gguf --text book.txt --out report
    softbottle analyze --arrays states.npz --out report
    softbottle analyze --text german --text french --order 3 --out report
    softbottle analyze --compare --workdir runs/mos --workdir runs/softmax --out report
    softbottle analyze --compare --hf small --hf large --text book.txt --out report

Writes report.html (one file, made to be looked at), report.json and a PNG per figure.
Nothing is downloaded unless --hf names a model that is no folder.
"""

import pathlib
from typing import cast

from softbottle.analysis import inspection, pair, report
from softbottle.analysis.instruments import rank
from softbottle.analysis.settings import Precision, Settings
from softbottle.analysis.sources import hugging_face
from softbottle.analysis.sources.reading import Reading
from softbottle.cli import program
from softbottle.cli.program import app, flags

WORKDIRS = flags.DEFINE_multi_string("workdir", [], "A run; give several to compare.")
ARRAYS = flags.DEFINE_string(
    "arrays",
    None,
    "An .npz with hidden [N, D] and table [V, D], maybe bias and labels, and/or with "
    "attention logits [R, L] and values [L, D], and/or with parameters, tokens and "
    "loss [M] of trained models, maybe names and which are fitted: their scaling law.",
)
HF = flags.DEFINE_multi_string(
    "hf", [], "A Hugging Face causal language model: a folder, or a name on the hub."
)
GGUF = flags.DEFINE_multi_string(
    "gguf", [], "A pretrained model in a GGUF file that transformers can read."
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
    "How the predictions of two models differ, token by token: two of --workdir, --hf "
    "and --gguf that have one vocabulary. Both read --text, or two runs their --split. "
    "Further sections are those of --instruments.",
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
    models = [WORKDIRS.value, ARRAYS.value, *HF.value, *GGUF.value]
    if COMPARE.value:
        _check_pair()
    elif sum(map(bool, models)) > 1 or not (any(models) or TEXTS.value):
        raise app.UsageError("give one of --workdir, --arrays, --hf, --gguf, or --text")
    asked = INSTRUMENTS.value or None
    if asked:
        inspection.check(asked)
    precision = cast(Precision, PRECISION.value)
    settings = Settings(ORDER.value, DIMENSIONS.value, precision)
    title, header, sections = _sections(asked, settings)
    report.write(OUT.value, title, sections, header)
    for line in header:
        print(line)
    for section in sections:
        print(f"{section.title}: {section.reading}")
    print(f"wrote {OUT.value}/report.html")


def _sections(asked, settings):
    if COMPARE.value:
        return _compared(asked or (), settings)
    if ARRAYS.value:
        sections = inspection.of_arrays(ARRAYS.value, asked, settings)
        return pathlib.Path(ARRAYS.value).name, (), sections
    if HF.value or GGUF.value:
        return _pretrained(asked, settings)
    if TEXTS.value:
        return _title(TEXTS), (), inspection.of_texts(TEXTS.value, asked, settings)
    read = SPLIT.value, POSITIONS.value
    sections = inspection.of_runs(WORKDIRS.value, asked, *read, settings)
    return _title(WORKDIRS), (), sections


def _title(paths):
    return ", ".join(pathlib.Path(path).name for path in paths.value)


def _pretrained(asked, settings):
    if len(TEXTS.value) != 1:
        raise app.UsageError("a pretrained model needs one --text to read")
    reading = Reading(TEXTS.value[0], POSITIONS.value, WINDOW.value, FROZEN.value)
    if HF.value:
        capture = hugging_face.from_hf(HF.value[0], reading)
    else:
        capture = hugging_face.from_gguf(GGUF.value[0], reading)
    sections = inspection.of_pretrained(capture, asked, settings)
    return capture.name, capture.facts, sections


def _check_pair():
    count = len(WORKDIRS.value) + len(HF.value) + len(GGUF.value)
    if count != 2 or ARRAYS.value:
        raise app.UsageError("--compare takes two of --workdir, --hf and --gguf")
    if len(TEXTS.value) > 1 or not (TEXTS.value or len(WORKDIRS.value) == 2):
        raise app.UsageError("--compare takes one --text, which both models read")


def _compared(asked, settings):
    text = TEXTS.value[0] if TEXTS.value else None
    read = SPLIT.value, POSITIONS.value, text
    captures = [pair.of_run(workdir, asked, *read) for workdir in WORKDIRS.value]
    if text is not None:
        reading = Reading(text, POSITIONS.value, WINDOW.value, FROZEN.value)
        captures += [hugging_face.from_hf(name, reading) for name in HF.value]
        captures += [hugging_face.from_gguf(path, reading) for path in GGUF.value]
    sections = pair.sections(captures, asked, settings)
    header = [fact for capture in captures for fact in capture.facts]
    return " and ".join(capture.name for capture in captures), header, sections
