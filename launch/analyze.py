"""See the bottleneck in trained models, or in arrays from anywhere.

    python launch/analyze.py --workdir runs/quickstart \
        --workdir runs/quickstart-softmax --out runs/report
    python launch/analyze.py --arrays states.npz --out report

Writes report.html (one file, made to be looked at), report.json and a PNG a figure.
"""

import pathlib

from absl import app, flags, logging

from softbottle.analysis import inspection, report

WORKDIRS = flags.DEFINE_multi_string("workdir", [], "A run; give several to compare.")
ARRAYS = flags.DEFINE_string(
    "arrays",
    None,
    "An .npz with hidden [N, D] and table [V, D], maybe bias and labels, and/or with "
    "attention logits [R, L] and values [L, D].",
)
OUT = flags.DEFINE_string("out", None, "Where the report goes.", required=True)
INSTRUMENTS = flags.DEFINE_list(
    "instruments",
    list(inspection.QUICK),
    f"Which instruments, in what order, of {', '.join(inspection.INSTRUMENTS)}.",
)
SPLIT = flags.DEFINE_enum("split", "test", ["train", "valid", "test"], "Which text.")
POSITIONS = flags.DEFINE_integer("positions", 8192, "How much of it.", lower_bound=2)
ORDER = flags.DEFINE_integer("order", 2, "Of the text's n-grams.", lower_bound=2)


def main(arguments: list[str]) -> None:
    """Analyse what the flags say."""
    if len(arguments) > 1:
        raise app.UsageError(f"not understood: {arguments[1:]}")
    if bool(WORKDIRS.value) == bool(ARRAYS.value):
        raise app.UsageError("give either --workdir or --arrays")
    logging.set_verbosity(logging.WARNING)
    if ARRAYS.value:
        title = pathlib.Path(ARRAYS.value).name
        sections = inspection.of_arrays(ARRAYS.value)
    else:
        title = ", ".join(pathlib.Path(workdir).name for workdir in WORKDIRS.value)
        sections = inspection.of_runs(
            WORKDIRS.value,
            INSTRUMENTS.value,
            SPLIT.value,
            POSITIONS.value,
            ORDER.value,
        )
    report.write(OUT.value, title, sections)
    for section in sections:
        print(f"{section.title}: {section.reading}")
    print(f"wrote {OUT.value}/report.html")


if __name__ == "__main__":
    app.run(main)
