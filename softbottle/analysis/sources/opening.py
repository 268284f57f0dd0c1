"""What a report looks into: models, arrays and texts in any combination.

A source is a name and a way to read: nothing is loaded before the report comes to it,
and nothing is kept afterwards, so that one model is in memory at a time.

    name@step1000          a revision of a model on the hub; of a folder, a subfolder
    name@step1,step512     several of them
    folder@*               all of a folder's subfolders that hold a model, such as the
                           checkpoint-500 that the Trainer of transformers writes

Revisions with a number are a series over the training: the model is the last of them,
and the others are read, one at a time, by the instrument that follows a training.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from softbottle.analysis.capture import Capture, Checkpoint, Missing, present
from softbottle.analysis.instruments import predictions
from softbottle.analysis.sources import arrays, hugging_face, run, texts
from softbottle.analysis.sources.reading import Reading, first_line
from softbottle.data.vocab import Split

# What a source that cannot be read, or an instrument that cannot measure it, raises.
REFUSALS = (ValueError, OSError, ImportError, RuntimeError)
_STEP = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d+)|^(\d+)$")


class Source(NamedTuple):
    """Something to look into.

    Attributes:
        labels: what it may be called, the shortest first; a longer one is taken where
            two sources would share a name.
        read: its capture, from its name and the fields of `Capture` to fill.
        kind: "run", "pretrained", "arrays" or "text": which instruments it is for.
    """

    labels: Sequence[str]
    read: Callable[[str, Collection[str]], Capture]
    kind: str


def of_capture(capture: Capture, kind: str = "pretrained") -> Source:
    """A source that is read already."""
    return Source([capture.name], lambda name, parts: capture, kind)


def runs(
    workdirs: Sequence[pathlib.Path | str],
    split: Split = "test",
    positions: int | None = None,
    text: pathlib.Path | str | None = None,
    in_order: bool = False,
) -> list[Source]:
    """Runs, each called by its folder's name.

    Args:
        workdirs: the runs' folders.
        split: the text that is read, "train", "valid" or "test".
        positions: how much of it; None as `run.read`.
        text: a file that is read instead.
        in_order: whether the text is read as one row, as `run.read` does.
    """

    def source(workdir):
        def read(name, parts):
            found = run.read(workdir, parts, split, positions, text, in_order)
            return dataclasses.replace(found, name=name)

        return Source(_labels(pathlib.Path(workdir).resolve()), read, "run")

    return [source(workdir) for workdir in workdirs]


def files(paths: Sequence[pathlib.Path | str]) -> list[Source]:
    """Arrays in .npz files, each called by its file's name."""

    def source(path):
        def read(name, parts):
            del parts
            return dataclasses.replace(arrays.capture(path), name=name)

        return Source(_labels(pathlib.Path(path).resolve(), stem=True), read, "arrays")

    return [source(path) for path in paths]


def bare_texts(
    paths: Sequence[pathlib.Path | str], vocab: int = 10_000
) -> list[Source]:
    """Texts without a model, of one length, each called by its file or folder.

    Raises:
        ValueError: if two share a name, or one is no text.
    """
    return [of_capture(capture, "text") for capture in texts.captures(paths, vocab)]


def gguf(paths: Sequence[pathlib.Path | str], reading: Reading) -> list[Source]:
    """Models in GGUF files, each called by its file's name."""

    def source(path):
        def read(name, parts):
            del parts
            found = hugging_face.from_gguf(path, reading)
            return dataclasses.replace(found, name=name)

        labels = _labels(pathlib.Path(path).resolve(), stem=True)
        return Source(labels, read, "pretrained")

    return [source(path) for path in paths]


def hub(names: Sequence[pathlib.Path | str], reading: Reading) -> list[Source]:
    """Hugging Face models; revisions of one model with a number are a series.

    Raises:
        ValueError: for two revisions of one model with the same number, and for a
            folder without the revisions that were asked for.
    """
    groups: dict[tuple[str, str | None], dict[int, str]] = {}
    for model, revision in (pair for name in names for pair in revisions(str(name))):
        step = None if revision is None else step_of(revision)
        if step is None or revision is None:
            groups[model, revision] = {}
            continue
        by_step = groups.setdefault((model, "*"), {})
        if by_step.setdefault(step, revision) != revision:
            raise ValueError(
                f"{model} has two revisions of step {step:,}: {by_step[step]} and "
                f"{revision}."
            )
    return [
        _series(model, by_step, reading)
        if len(by_step) > 1
        else _checkpoint(model, next(iter(by_step.values()), revision), reading)
        for (model, revision), by_step in groups.items()
    ]


def checkpoints(names: Sequence[pathlib.Path | str], reading: Reading) -> list[Source]:
    """Hugging Face models, where every revision is a model of its own.

    Raises:
        ValueError: as `revisions`.
    """
    return [
        _checkpoint(model, revision, reading)
        for name in names
        for model, revision in revisions(str(name))
    ]


def revisions(name: str) -> list[tuple[str, str | None]]:
    """Model and revision of each checkpoint that a name of the hub stands for.

    Raises:
        ValueError: if `*` is asked for of a name that is no folder of models, or no
            revision is named.
    """
    model, separator, asked = name.rpartition("@")
    if not separator or not model or pathlib.Path(name).is_dir():
        return [(name, None)]
    if asked != "*":
        named = asked.split(",")
        if not all(named):
            raise ValueError(f"{name} names no revision after the @, or an empty one.")
        return [(model, revision) for revision in named]
    folders = pathlib.Path(model).glob("*/config.json")
    stored = sorted(folder.parent.name for folder in folders)
    if not stored:
        raise ValueError(
            f"{name}: no folder {model} with models in subfolders such as "
            "checkpoint-500; of a model on the hub, name the revisions."
        )
    return [(model, revision) for revision in stored]


def step_of(revision: str) -> int | None:
    """The step that a revision is named after; None if it is named otherwise."""
    found = _STEP.search(revision)
    return int(found[1] or found[2]) if found else None


def distinct(sources: Sequence[Source]) -> list[str]:
    """A name for each source, the shortest that no other has.

    Raises:
        ValueError: if one of them is given twice.
    """
    lengths = [0] * len(sources)
    while True:
        names = [
            source.labels[length]
            for source, length in zip(sources, lengths, strict=True)
        ]
        shared = [at for at, name in enumerate(names) if names.count(name) > 1]
        if not shared:
            return names
        longer = [at for at in shared if lengths[at] + 1 < len(sources[at].labels)]
        if not longer:
            raise ValueError(
                f"what is compared needs different names, got {names[shared[0]]} twice."
            )
        for at in longer:
            lengths[at] += 1


@dataclasses.dataclass(frozen=True, eq=False)
class Revisions:
    """The checkpoints of a pretrained model, read as they are iterated over.

    Attributes:
        model: its folder or its name on the hub.
        by_step: the revisions.
        reading: how the text is read.
        last: the latest that could be read.
        refused: by revision, why later ones could not.
    """

    model: str
    by_step: dict[int, str]
    reading: Reading
    last: Checkpoint
    refused: dict[str, str]

    def __iter__(self) -> Iterator[Checkpoint | Missing]:
        """Each checkpoint in the order of the steps, or why there is none."""
        for step, revision in sorted(self.by_step.items()):
            if step == self.last.step:
                yield self.last
            elif revision in self.refused:
                yield Missing(revision, self.refused[revision])
            else:
                yield self._read(step, revision)

    def _read(self, step, revision):
        try:
            found = hugging_face.from_hf(self.model, self.reading, revision)
        except REFUSALS as error:
            return Missing(revision, first_line(error))
        return _point(step, found)


def _checkpoint(model, revision, reading):
    def read(name, parts):
        del parts
        found = hugging_face.from_hf(model, reading, revision)
        return dataclasses.replace(found, name=name)

    labels = _model_labels(model)
    if revision is not None:
        labels = [f"{label}@{revision}" for label in labels]
    return Source(labels, read, "pretrained")


def _series(model, by_step, reading):
    """The latest revision that can be read, with all of them as its series."""

    def read(name, parts):
        del parts
        refused = {}
        for step, revision in sorted(by_step.items(), reverse=True):
            try:
                found = hugging_face.from_hf(model, reading, revision)
            except REFUSALS as error:
                refused[revision] = first_line(error)
                continue
            last = _point(step, found)
            fact = (
                f"Checkpoint: {revision}, the last that was read of {len(by_step):,}; "
                "the section on training has the others."
            )
            return dataclasses.replace(
                found,
                name=name,
                series=Revisions(model, by_step, reading, last, refused),
                facts=(*found.facts, fact),
            )
        raise ValueError("; ".join(f"{key}: {why}" for key, why in refused.items()))

    steps = sorted(by_step)
    labels = _model_labels(model)
    both = f"{labels[-1]}@{by_step[steps[0]]}..{by_step[steps[-1]]}"
    return Source([*labels, both], read, "pretrained")


def _point(step, capture):
    """A capture as a point of a series."""
    table_VE = present("table_VE", capture.table_VE)
    last_ND = present("states", capture.states)[-1]
    return Checkpoint(step, table_VE, last_ND, predictions.loss(capture))


def _model_labels(model):
    """Labels of a folder, or of a name on the hub."""
    path = pathlib.Path(model)
    return _labels(path.resolve() if path.is_dir() else path)


def _labels(path, stem=False):
    """A path's last part, its last two and so on; `stem` leaves its ending out."""
    parts = [part for part in path.parts if part != path.anchor] or [str(path)]
    longer = ["/".join(parts[-count:]) for count in range(1, len(parts))]
    longer.append(str(path))
    return [path.stem, *longer] if stem and path.stem != parts[-1] else longer
