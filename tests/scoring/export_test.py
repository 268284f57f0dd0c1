import json
import os

import chex
import jax
import ml_dtypes
import numpy as np
import pytest

from softbottle import config as configs
from softbottle.data.vocab import Vocab
from softbottle.scoring import export
from softbottle.training import evaluate, state
from tests import commands, tiny

VOCAB = Vocab(("<eos>", "b", "c", "d", "e", "f", "g"))
PART_BYTES = 101  # odd, so that a number is cut in two


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run whose parameters bfloat16 cannot hold."""
    workdir = tmp_path_factory.mktemp("run")
    config = tiny.make_config(data__lowercase=True)
    tiny.write_run(workdir, tiny.make_run(config, VOCAB, seed=5), step=12)
    return workdir


@pytest.fixture
def exported(workdir, tmp_path, monkeypatch):
    """The run's files, many of them, and how many `write` said there are."""
    monkeypatch.setattr(export, "PART_BYTES", PART_BYTES)
    return tmp_path / "exported", export.write(workdir, tmp_path / "exported")


@pytest.mark.slow
def test_a_run_is_the_same_on_the_other_side_but_for_rounding(
    workdir, exported, tmp_path
):
    export.read(exported[0], tmp_path / "moved")
    there, here = state.load_run(tmp_path / "moved"), state.load_run(workdir)
    expected = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16).astype(np.float32),
        here.params,
    )
    chex.assert_trees_all_equal(there.params, expected)
    chex.assert_trees_all_equal_dtypes(there.params, here.params)
    assert any(
        np.any(np.asarray(leaf) != rounded)
        for leaf, rounded in zip(
            jax.tree.leaves(here.params), jax.tree.leaves(expected), strict=True
        )
    )
    assert there.step == here.step == 12
    assert there.vocab == here.vocab and there.vocab.lowercase
    assert configs.to_dict(there.config) == configs.to_dict(here.config)
    ids = np.random.default_rng(0).integers(0, len(VOCAB), 53).astype(np.int32)
    evaluator = evaluate.make_evaluator(here.model)
    losses = [evaluator(run.params, ids, 1, 13).loss for run in (there, here)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_no_part_is_larger_than_it_may_be(workdir, exported, tmp_path):
    folder, count = exported
    sizes = [path.stat().st_size for path in sorted(folder.glob("*.bin"))]
    numbers = sum(leaf.size for leaf in jax.tree.leaves(state.load_run(workdir).params))
    assert count == len(sizes) > 3
    assert sizes[:-1] == [PART_BYTES] * (count - 1)
    assert sum(sizes) == 2 * numbers


def test_a_part_as_shipped_is_at_most_16_mebibytes():
    assert 0 < export.PART_BYTES <= 16 * 2**20


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    path.write_bytes(raw)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage, message",
    [(flip, "damaged"), (cut, "damaged"), (lambda path: path.unlink(), "missing")],
)
def test_a_damaged_or_missing_part_is_named_and_makes_no_run(
    exported, tmp_path, damage, message
):
    damage(exported[0] / "weights-002.bin")
    with pytest.raises(ValueError, match=f"weights-002.bin is {message}"):
        export.read(exported[0], tmp_path / "moved")
    assert not (tmp_path / "moved").exists()


def test_a_run_that_is_there_already_is_left_alone(workdir, exported):
    with pytest.raises(ValueError, match="holds a run already"):
        export.read(exported[0], workdir)
    assert state.load_run(workdir).step == 12


def contents(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["best/3/weights", "notes.txt", "best/.hidden"])
def test_a_folder_with_anything_in_it_is_left_alone(exported, tmp_path, name):
    path = tmp_path / "thesis" / name
    path.parent.mkdir(parents=True)
    path.write_text("the only copy")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="thesis .*not empty"):
        export.read(exported[0], tmp_path / "thesis")
    assert contents(tmp_path) == before and path.read_text() == "the only copy"


def test_a_file_is_no_folder_for_a_run(exported, tmp_path):
    (tmp_path / "thesis").write_text("the only copy")
    with pytest.raises(ValueError, match="thesis .*not empty"):
        export.read(exported[0], tmp_path / "thesis")
    assert (tmp_path / "thesis").read_text() == "the only copy"


def test_an_empty_folder_becomes_the_run(exported, tmp_path):
    (tmp_path / "moved").mkdir()
    export.read(exported[0], tmp_path / "moved")
    assert state.load_run(tmp_path / "moved").step == 12


def test_a_read_that_was_interrupted_leaves_no_run_and_can_be_repeated(
    exported, tmp_path, monkeypatch
):
    before = contents(tmp_path)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(state, "write_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export.read(exported[0], tmp_path / "moved")
    assert contents(tmp_path) == before
    monkeypatch.undo()
    # What a killed process would have left.
    (tmp_path / "moved.partial-0" / "best").mkdir(parents=True)
    export.read(exported[0], tmp_path / "moved")
    assert state.load_run(tmp_path / "moved").step == 12
    assert (tmp_path / "moved.partial-0" / "best").is_dir()


def change(folder, **changes):
    """The index with other values; one that is None is left out."""
    path = folder / "index.json"
    index = json.loads(path.read_text()) | changes
    index = {name: value for name, value in index.items() if value is not None}
    path.write_text(json.dumps(index))


def test_a_run_of_files_is_trained_on_without_the_softmaxes_beside_it(
    exported, tmp_path
):
    # With `train.init_from`, as the README of the run says, they would be refused.
    index = json.loads((exported[0] / "index.json").read_text())
    beside = {"equal_softmax": True, "same_width_softmax": True}
    index["config"]["train"] |= beside
    change(exported[0], config=index["config"])
    export.read(exported[0], tmp_path / "moved")
    train = state.load_config(tmp_path / "moved").train
    assert not any(getattr(train, name) for name in beside)
    command = f"--config.train.init_from={tmp_path / 'moved'}"
    assert command in (tmp_path / "moved" / "README.txt").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "../secret.bin",
        "/dev/zero",
        "sub/weights-000.bin",
        "weights-000.bin/..",
        "weights-000.bin\n",
        "weights-007.bin",
        "",
        ".",
    ],
)
def test_parts_are_the_folder_s_own_files(exported, tmp_path, name):
    (tmp_path / "secret.bin").write_bytes(b"secret")
    index = json.loads((exported[0] / "index.json").read_text())
    shas = list(index["parts"].values())
    names = [name, *list(index["parts"])[1:]]
    change(exported[0], parts=dict(zip(names, shas, strict=True)))
    with pytest.raises(ValueError, match="index.json .*weights-000.bin"):
        export.read(exported[0], tmp_path / "moved")
    assert not (tmp_path / "moved").exists()


def make_fifo(path):
    os.mkfifo(path)


def make_link(path):
    path.symlink_to("/dev/zero")


def make_link_to_a_file(path):
    path.with_name("other").write_bytes(b"other")
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize("make", [make_fifo, make_link, make_link_to_a_file, os.mkdir])
@pytest.mark.parametrize("name", ["weights-001.bin", "vocab.txt", "index.json"])
def test_only_plain_files_are_opened(exported, tmp_path, make, name):
    (exported[0] / name).unlink()
    make(exported[0] / name)
    with pytest.raises(ValueError, match=f"{name} is no plain file"):
        export.read(exported[0], tmp_path / "moved")


def test_sizes_are_compared_before_anything_is_read(exported, tmp_path, monkeypatch):
    with (exported[0] / "weights-001.bin").open("ab") as file:
        file.truncate(2**40)  # a sparse file: it takes no room on the disk
    with pytest.raises(ValueError, match="weights-001.bin is damaged: it has 1,099,"):
        export.read(exported[0], tmp_path / "moved")
    change(exported[0], bytes=None)
    with pytest.raises(ValueError, match="do not fit"):
        export.read(exported[0], tmp_path / "moved")


def test_files_written_before_the_index_had_sizes_are_read(exported, tmp_path):
    change(exported[0], bytes=None, vocab=None)
    export.read(exported[0], tmp_path / "moved")
    assert state.load_run(tmp_path / "moved").step == 12


def test_another_vocabulary_is_an_error(exported, tmp_path):
    VOCAB.__class__((*VOCAB.words[:-1], "x")).save(exported[0] / "vocab.txt")
    with pytest.raises(ValueError, match="vocab.txt is damaged"):
        export.read(exported[0], tmp_path / "moved")


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[]", b"3", b"[" * 10**5])
def test_an_index_that_is_none_is_one_error(exported, tmp_path, raw):
    (exported[0] / "index.json").write_bytes(raw)
    with pytest.raises(ValueError, match="index.json"):
        export.read(exported[0], tmp_path / "moved")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": None},
        {"step": "12"},
        {"step": -1},
        {"step": True},
        {"step": 2**70},
        {"shapes": None},
        {"shapes": 3},
        {"shapes": [["a"]]},
        {"shapes": [[2**62, 2**62]]},
        {"parts": None},
        {"parts": []},
        {"parts": {}},
        {"parts": {"weights-000.bin": 5}},
        {"bytes": [1]},
        {"bytes": {}},
        {"vocab": 3},
        {"config": None},
        {"config": 7},
        {"config": {"head": 3}},
        {"config": {"head": {"components": "many"}}},
        {"config": {"telescope": 1}},
    ],
)
def test_a_malformed_index_is_one_error_that_names_it(exported, tmp_path, changes):
    index = json.loads((exported[0] / "index.json").read_text()) | changes
    kept = {
        name: v for name, v in index.items() if name not in changes or v is not None
    }
    (exported[0] / "index.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="exported"):
        export.read(exported[0], tmp_path / "moved")
    assert not (tmp_path / "moved").exists()


def test_a_folder_without_an_index_is_named(tmp_path):
    with pytest.raises(ValueError, match="index.json is missing"):
        export.read(tmp_path, tmp_path / "moved")


@pytest.mark.slow
def test_the_command_refuses_in_one_line(tmp_path):
    flags = ["--read", f"--workdir={tmp_path / 'moved'}", f"--folder={tmp_path}"]
    answer = commands.finish(commands.start("export.py", *flags))
    assert answer.code == 2
    assert answer.errors.splitlines()[-1].endswith("index.json is missing.")
    assert "Traceback" not in answer.errors
