"""TFDS builders for local copies of PTB, WikiText-2 and LM1B, without TensorFlow.

    from softbottle.data import builders

    builder = builders.PtbLocal(data_dir=where, file_format="array_record")
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=folder_of_the_files)
    )
    sentences = tfds.data_source("ptb_local", data_dir=where, split="train")

Importing this file registers `ptb_local`, `wikitext2_local` and `lm1b_local`. A record
is one line, {"text": ...}. PTB and WikiText-2 keep the order of their lines, which a
language model reads across; LM1B has the keys, records and (hashed) order of the
official `lm1b` builder, which needs TensorFlow to unpack the archive. This is the only
file that imports tensorflow_datasets, and preparing is TFDS's speed: about 10,000
lines per second, 50 minutes for the whole of LM1B.
"""

import fnmatch
import io
import pathlib
import tarfile
from collections.abc import Callable, Iterator

import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2

from softbottle.data.vocab import Chunk, Split

LM1B_ARCHIVE = "1-billion-word-language-modeling-benchmark-r13output.tar.gz"

_LM1B_MEMBERS = {
    "train": "training-monolingual.tokenized.shuffled/news.en-*",
    "test": "heldout-monolingual.tokenized.shuffled/news.en.heldout-*",
}
# What TFDS calls the splits, and what the files do.
_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
_RECORDS = 1 << 16


# mypy does not see the keyword of a base class that comes without types.
class _Lines(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Lines of the files {train,valid,test} of the manual folder, in their order."""

    VERSION = tfds.core.Version("1.0.0")
    FILE: str  # what the files are called; {} is the split

    def _info(self):
        return _info(self, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {
            split: self._generate_examples(
                dl_manager.manual_dir / self.FILE.format(name)
            )
            for split, name in _SPLITS.items()
        }

    def _generate_examples(self, path):
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            for index, line in enumerate(file):
                yield index, {"text": line.strip()}


class PtbLocal(_Lines):
    """Penn Treebank in Mikolov's preprocessing, from local files."""

    FILE = "ptb.{}.txt"
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put ptb.{train,valid,test}.txt in the folder."


class Wikitext2Local(_Lines):
    """WikiText-2 in words, from local files; empty lines are empty records."""

    FILE = "wiki.{}.tokens"
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Put wiki.{train,valid,test}.tokens in the folder."


class Lm1bLocal(tfds.core.GeneratorBasedBuilder):
    """One Billion Words, streamed from the benchmark's archive."""

    VERSION = tfds.core.Version("1.1.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = f"Put {LM1B_ARCHIVE} in the folder."

    def _info(self):
        return _info(self, disable_shuffling=False)

    def _split_generators(self, dl_manager):
        archive = dl_manager.manual_dir / LM1B_ARCHIVE
        return {
            split: self._generate_examples(archive, pattern)
            for split, pattern in _LM1B_MEMBERS.items()
        }

    def _generate_examples(self, archive, pattern):
        folder = LM1B_ARCHIVE.removesuffix(".tar.gz")
        # A stream is read once from front to back, and nothing is unpacked.
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                name = member.name.removeprefix("./")
                if fnmatch.fnmatchcase(name, f"{folder}/{pattern}"):
                    text = io.BytesIO(members.extractfile(member).read())
                    yield from _shard_examples(pathlib.PurePosixPath(name).name, text)


def source(
    folder: pathlib.Path, split: Split
) -> tuple[list[pathlib.Path], Callable[[], Iterator[Chunk]]]:
    """The files and the text of a split of a prepared LM1B data set.

    The data set has no validation split: `valid` is the first half of its `test`
    records and `test` the second half.

    Args:
        folder: the data set's folder (.../lm1b/1.1.0) or one above it.
        split: train, valid or test.

    Raises:
        ValueError: if `folder` has several data sets under it, or one in a format
            other than array_record.
    """
    folders = [path.parent for path in folder.glob("**/dataset_info.json")]
    if len(folders) != 1:
        raise ValueError(f"{folder} must hold one data set; it has {sorted(folders)}.")
    builder = tfds.builder_from_directory(folders[0])
    if builder.info.file_format.value != "array_record":
        raise ValueError(
            f"{folders[0]} is in format {builder.info.file_format.value}; prepare it "
            'with file_format="array_record".'
        )
    stored = "train" if split == "train" else "test"
    count = builder.info.splits[stored].num_examples
    start = count // 2 if split == "test" else 0
    stop = count // 2 if split == "valid" else count
    files = [pathlib.Path(p) for p in builder.info.splits[stored].filepaths]
    return files, lambda: _record_chunks(builder, stored, start, stop)


def _info(builder, disable_shuffling):
    return tfds.core.DatasetInfo(
        builder=builder,
        features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        supervised_keys=("text", "text"),
        disable_shuffling=disable_shuffling,
    )


def _shard_examples(name, text):
    """The official builder's keys and records for one shard."""
    # Text mode, since the official builder's lines also end at a carriage return.
    for index, line in enumerate(io.TextIOWrapper(text, encoding="utf-8-sig")):
        yield f"{name}_{index}", {"text": line.strip()}


def _record_chunks(builder, split, start, stop):
    # Records are parsed here: TFDS's own way reads 13,000 of them per second.
    records = builder.as_data_source(
        split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
    )
    record_bytes = builder.info.splits[split].num_bytes / len(records)
    for first in range(start, stop, _RECORDS):
        numbers = range(first, min(first + _RECORDS, stop))
        lines = [_text(raw) for raw in records.__getitems__(numbers)]
        raw = b"".join(line + b"\n" for line in lines)
        progress = round(record_bytes * len(numbers))
        yield Chunk(raw, f"{builder.data_path} {split}", first + 1, progress)


def _text(raw):
    example = tf_example_pb2.Example.FromString(raw)
    return example.features.feature["text"].bytes_list.value[0]
