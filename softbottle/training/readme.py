"""README.txt of a run's folder: what is in it, and what can be done with it."""

import pathlib
import shlex

from softbottle import files

_TEXT = """\
A run of softbottle: a language model, how it was trained and what came of it.

In this folder, as far as the run has come and its settings ask for it:

    summary.json    the result; written last, so without it the run has not ended
    config.json     every setting (`softbottle train --helpfull` says what they mean)
    metrics.jsonl   losses, validations and speed, one JSON object per line
    valid.png       the validations as a curve
    quickstart.png  beside the truth, where the language is the built-in one
    comparison.png  beside the softmaxes below
    events/         the metrics for TensorBoard, if that is installed
    best/           the parameters of the best validation: what the commands below read
    checkpoints/    the newest states: what the run resumes from
    series/         parameters along the training (train.series)
    equal_softmax/, same_width_softmax/
                    runs of their own: a softmax of as many parameters, and one as wide
    profile/        a trace of some steps (train.profile_steps)
    vocab.txt       the words, one per line
    corpus.json     hashes of the words and of the text
    lock            which process trains here

What to do next, from the folder in which the run was started:

{train}
    softbottle evaluate --workdir {workdir} --split test
        its perplexity; --dynamic and --cache add other ways to score
    softbottle generate --workdir {workdir} --tokens 50
        text from it
    softbottle analyze --workdir {workdir} --out {report}
        where its output layer is a bottleneck; --workdir again compares runs
    softbottle export --workdir {workdir} --folder {exported}
        its parameters in small files, for another machine
"""
_RESUME = """\
    softbottle train --config {config}
        resumes it if it was interrupted; --config.train.steps=N trains to step N"""
_TRAIN_ON = """\
    softbottle train --config {config} --workdir {onward} \\
        --config.train.init_from={workdir}
        trains on from its parameters, in a folder of its own: it has no checkpoints"""


def write(folder: pathlib.Path, workdir: pathlib.Path, resumes: bool = True) -> None:
    """Write README.txt to a folder that is, or is going to be, that of a run.

    One that is there already stays: it has the path of the run's first start.

    Args:
        folder: where it goes.
        workdir: the run's folder, as the commands name it.
        resumes: whether it has, or will have, checkpoints.
    """
    path = folder / "README.txt"
    if not path.exists():
        paths = {
            "workdir": workdir,
            "config": workdir / "config.json",
            "report": workdir / "report",
            "exported": workdir / "exported",
            "onward": workdir.with_name(f"{workdir.name}-on"),
        }
        quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
        train = (_RESUME if resumes else _TRAIN_ON).format(**quoted)
        files.replace(path, _TEXT.format(train=train, **quoted))
