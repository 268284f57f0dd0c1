import io
import json
import pathlib
import tarfile

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.datasets.lm1b import lm1b_dataset_builder as official

from softbottle import config
from softbottle.data import builders, corpus

TRAIN = "training-monolingual.tokenized.shuffled/news.en-{:05}-of-00100"
HELDOUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05}-of-00050"


class OfficialLm1b(official.Builder):
    """The official builder, given an unpacked archive as it would unpack it."""

    name = "official_lm1b"
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Unpack the archive."

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
        )

    def _split_generators(self, dl_manager):
        files = {
            "train": dl_manager.manual_dir.glob(official._TRAIN_FILE_FORMAT),
            "test": dl_manager.manual_dir.glob(official._HELDOUT_FILE_FORMAT),
        }
        return {n: self._generate_examples(sorted(f)) for n, f in files.items()}


def shards():
    """The members of a miniature archive, some of them strange."""
    texts = {}
    for number in (1, 2, 3):
        lines = [f" sentence {number} {index} caf\u00e9 ." for index in range(41)]
        texts[TRAIN.format(number)] = "\n".join(lines) + "\n"
    for number in (0, 1):
        lines = [f"held {number} {index} ." for index in range(13)]
        texts[HELDOUT.format(number)] = "\n".join(lines)
    texts[TRAIN.format(1)] += "one\rtwo\r\n\nnext\u0085line \u00a0\n"
    return texts | {"README": "not a shard\n", "training-monolingual/news.en-9": "x\n"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A folder with the archive in it, packed and unpacked."""
    folder = tmp_path_factory.mktemp("archive")
    top = builders.LM1B_ARCHIVE.removesuffix(".tar.gz")
    with tarfile.open(folder / builders.LM1B_ARCHIVE, "w:gz") as members:
        for name, text in shards().items():
            raw = text.encode()
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(raw)
            members.addfile(member, io.BytesIO(raw))
            path = folder / top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
    return folder


@pytest.fixture(scope="module")
def prepared(archive, tmp_path_factory):
    return prepare(builders.Lm1bLocal, archive, tmp_path_factory.mktemp("ours"))


def prepare(builder, manual_dir, data_dir):
    made = builder(data_dir=data_dir, file_format="array_record")
    options = tfds.download.DownloadConfig(manual_dir=manual_dir)
    made.download_and_prepare(download_config=options)
    return made


def lines(builder, split):
    return [record["text"].decode() for record in builder.as_data_source(split)]


def test_lm1b_has_the_records_and_the_order_of_the_official_builder(
    archive, prepared, tmp_path
):
    theirs = prepare(OfficialLm1b, archive, tmp_path)
    for split, count in (("train", 3 * 41 + 4), ("test", 26)):
        assert lines(prepared, split) == lines(theirs, split)
        assert len(lines(prepared, split)) == count


def test_lm1b_has_the_keys_of_the_official_builder(archive, prepared):
    ours = prepared._generate_examples(
        archive / builders.LM1B_ARCHIVE, "training-monolingual.tokenized.shuffled/*"
    )
    files = sorted(archive.glob(official._TRAIN_FILE_FORMAT))
    theirs = official.Builder._generate_examples(None, files)
    assert list(ours) == list(theirs)


def test_lm1b_order_is_shuffled(prepared):
    assert lines(prepared, "train") != sorted(lines(prepared, "train"))


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_prepared_lm1b_is_a_corpus(prepared, tmp_path, above):
    folder = pathlib.Path(prepared.data_path)
    data = config.Data()
    data.name, data.cache = "lm1b", str(tmp_path)
    data.path = str([folder, *folder.parents][above])
    made = corpus.load(data)
    heldout = lines(prepared, "test")
    expected = {
        "train": lines(prepared, "train"),
        "valid": heldout[:13],
        "test": heldout[13:],
    }
    for name, sentences in expected.items():
        words = [word for line in sentences for word in [*line.split(), "<eos>"]]
        assert made.vocab.decode(getattr(made, name)) == words


def test_long_data_sets_are_read_in_parts(prepared, monkeypatch):
    folder = pathlib.Path(prepared.data_path)
    monkeypatch.setattr(builders, "_RECORDS", 5)
    _, chunks = builders.source(folder, "test")
    parts = list(chunks())
    assert [part.raw.count(b"\n") for part in parts] == [5, 5, 3]
    assert b"".join(part.raw for part in parts).decode().splitlines() == lines(
        prepared, "test[13:]"
    )


def test_other_formats_are_refused(prepared, tmp_path):
    for path in pathlib.Path(prepared.data_path).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    info = json.loads((tmp_path / "dataset_info.json").read_text())
    info["fileFormat"] = "tfrecord"
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="is in format tfrecord"):
        builders.source(tmp_path, "train")


@pytest.mark.parametrize(
    "builder, name, pattern",
    [
        (builders.PtbLocal, "ptb_local", "ptb.{}.txt"),
        (builders.Wikitext2Local, "wikitext2_local", "wiki.{}.tokens"),
    ],
)
def test_local_files_keep_the_order_of_their_lines(tmp_path, builder, name, pattern):
    texts = {
        "train": [f"line {index} caf\u00e9" for index in range(300)],
        "valid": ["", "= Title =", "", "text"],
        "test": ["only <unk>"],
    }
    for split, content in texts.items():
        raw = "".join(f" {line} \n" for line in content)
        (tmp_path / pattern.format(split)).write_bytes(raw.encode())
    prepare(builder, tmp_path, tmp_path / "made")
    made = tfds.builder(name, data_dir=tmp_path / "made")
    assert set(made.info.splits) == {"train", "validation", "test"}
    for split, stored in (
        ("train", "train"),
        ("valid", "validation"),
        ("test", "test"),
    ):
        assert lines(made, stored) == texts[split]


def test_missing_local_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="ptb.train.txt"):
        prepare(builders.PtbLocal, tmp_path, tmp_path / "made")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    raw = b"\xef\xbb\xbfa b\nc\n"
    (tmp_path / "ptb.train.txt").write_bytes(raw)
    expected = [{"text": "a b"}, {"text": "c"}]
    for examples in (
        builders.PtbLocal._generate_examples(None, tmp_path / "ptb.train.txt"),
        builders._shard_examples("shard", io.BytesIO(raw)),
    ):
        assert [example for _, example in examples] == expected
