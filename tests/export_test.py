import chex
import jax
import ml_dtypes
import numpy as np
import pytest

from softbottle import config as configs
from softbottle import evaluate, export, state
from softbottle.data.vocab import Vocab
from tests import tiny

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
