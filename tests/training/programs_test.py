"""Compiled steps are kept by what they were made from, and taken over."""

import logging
import os
import pathlib

import jax
import numpy as np
import pytest

from softbottle import model as models
from softbottle import sharding
from softbottle.data.batches import Batch
from softbottle.training import optim, programs
from softbottle.training import step as steps
from tests import tiny

VOCAB = 11
SIZES = {"model__last_dim": 8}
pytestmark = pytest.mark.usefixtures("quick_keys")


@pytest.fixture(scope="module")
def made():
    # Of no other test: on a CPU what came out of jax's own cache cannot be kept again.
    return make(**SIZES)


def make(**fields):
    """(config, step, state, batch) of a tiny model."""
    config = tiny.make_config(**fields)
    model, tx = models.make(config, VOCAB), optim.make(config.optim)
    state = sharding.committed(steps.init_state(config, model, tx))
    ids_BS = np.ones((4, 5), np.int32)
    batch = Batch(ids_BS, ids_BS, np.ones((4, 5), np.float32), ids_BS)
    return config, steps.make_step(config, model, tx), state, batch


class Refused:
    """A step that may not be traced."""

    def lower(self, *arguments):
        raise AssertionError("lowered again")


def run(step, state, batch, kept):
    """The program of the batch's width, and what it gives; the state is kept."""
    with steps.compiling(step, state, batch, (5,), kept) as begin:
        take = begin(5).result()
    return take(jax.tree.map(lambda leaf: leaf.copy(), state), batch, True)


def test_a_program_is_taken_over_and_gives_the_same_bits(made, tmp_path):
    config, step, state, batch = made

    def kept(arguments):
        return tmp_path / programs.name(config, VOCAB, arguments)

    first = run(step, state, batch, kept)
    assert len(list(tmp_path.iterdir())) == 1
    again = run(Refused(), state, batch, kept)
    jax.tree.map(np.testing.assert_array_equal, again, first)


@pytest.mark.gpu
def test_the_kernels_of_a_step_are_kept_with_it(tmp_path):
    sizes = {"embed": 64, "hidden": 64, "last": 64, "context": 64}
    fields = {f"model__{name}_dim": size for name, size in sizes.items()}
    fields |= {"model__backbone": "awd_lstm", "model__compute_dtype": "bfloat16"}
    _, step, state, batch = make(**fields)
    first = run(step, state, batch, lambda _: tmp_path / "a")
    program = programs.load(tmp_path / "a")
    assert program is not None and "mosaic_gpu" in program.as_text()
    again = run(Refused(), state, batch, lambda _: tmp_path / "a")
    jax.tree.map(np.testing.assert_array_equal, again, first)


def test_what_is_damaged_is_compiled_and_written_again(made, tmp_path, caplog):
    _, step, state, batch = made
    path = tmp_path / "a"
    first = run(step, state, batch, lambda _: path)
    whole = path.read_bytes()
    for raw in (b"", whole[:-1], whole[:40] + b"\0" + whole[41:]):
        path.write_bytes(raw)
        with caplog.at_level(logging.WARNING, "softbottle"):
            assert programs.load(path) is None
        assert "is not used: the file is damaged" in caplog.text
        caplog.clear()
    again = run(step, state, batch, lambda _: path)
    jax.tree.map(np.testing.assert_array_equal, again, first)
    assert programs.load(path) is not None


def test_the_file_of_another_user_is_not_loaded(made, tmp_path, caplog, monkeypatch):
    _, step, state, batch = made
    run(step, state, batch, lambda _: tmp_path / "a")
    assert programs.load(tmp_path / "a") is not None
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "a").stat().st_uid + 1)
    monkeypatch.setattr(programs, "_read", None)
    with caplog.at_level(logging.WARNING, "softbottle"):
        assert programs.load(tmp_path / "a") is None
    assert "is not used: it is another user's" in caplog.text


def test_a_program_that_cannot_be_kept_is_used(made, tmp_path, caplog):
    _, step, state, batch = made
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO, "softbottle"):
        run(step, state, batch, lambda _: tmp_path / "file" / "a")
    assert "is not kept" in caplog.text


def test_the_name_says_what_the_program_depends_on(made, monkeypatch):
    config, _, state, batch = made
    given = (state, batch, True)
    name = programs.name(config, VOCAB, given)
    assert programs.name(tiny.make_config(**SIZES), VOCAB, given) == name
    assert programs.name(tiny.make_config(seed=7, **SIZES), VOCAB, given) != name
    assert programs.name(config, VOCAB + 1, given) != name
    narrow = jax.tree.map(lambda array: array[:, :3], batch)
    assert programs.name(config, VOCAB, (state, narrow, True)) != name
    with jax.default_matmul_precision("highest"):
        assert programs.name(config, VOCAB, given) != name
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_another=true")
        assert programs.name(config, VOCAB, given) != name
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_source", lambda: "another")
        assert programs.name(config, VOCAB, given) != name


def test_the_folder_keeps_what_was_used_last(made, tmp_path, monkeypatch):
    _, step, state, batch = made
    monkeypatch.setattr(programs, "KEPT", 2)
    for age, name in ((30, "a0"), (20, "b0")):
        run(step, state, batch, lambda _, name=name: tmp_path / name)
        os.utime(tmp_path / name, (0, 1e9 - age))
    assert programs.load(tmp_path / "a0") is not None
    run(step, state, batch, lambda _: tmp_path / "c0")
    assert {path.name for path in tmp_path.iterdir()} == {"a0", "c0"}


@pytest.mark.parametrize(
    ("backend", "cache", "kept"),
    [
        ("gpu", "cache", "cache/steps"),
        ("gpu", None, None),
        ("gpu", "gs://bucket/cache", None),
        ("cpu", "cache", None),
    ],
)
def test_on_a_cpu_and_without_a_cache_nothing_is_kept(
    monkeypatch, backend, cache, kept
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", cache)
    try:
        found = programs.folder()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert found == (None if kept is None else pathlib.Path(kept))
