import contextlib
import errno
import gc
import pathlib
import resource
import shutil
import signal
import threading
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from softbottle.training import checkpoint
from softbottle.training.checkpoint import CheckpointError, Checkpoints

EARLY, LATE = 3, 7


def make_tree(seed):
    random = np.random.default_rng(seed)
    return {
        "table": jnp.asarray(random.standard_normal((13, 5)), jnp.float32),
        "half": jnp.asarray(random.standard_normal(7), jnp.bfloat16),
        "none": jnp.zeros((4, 0, 3)),
        "nested": [jnp.asarray(seed, jnp.int32), jnp.asarray(True)],
    }


def host_of(step):
    return {"position": {"epoch": step}, "best": float("inf"), "losses": [0.1, step]}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with two good steps; copied before it is damaged."""
    folder = tmp_path_factory.mktemp("steps") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    for step in (EARLY, LATE):
        checkpoints.save(step, make_tree(step), host_of(step))
    checkpoints.close()
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    return pathlib.Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


@pytest.fixture
def collected():
    """What the test left behind is destroyed, without a look at all there was before.

    In a process that has run many tests that would take seconds.
    """
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


def restore(folder, like=None):
    checkpoints = Checkpoints(folder, keep=2)
    try:
        return checkpoints.latest(), *checkpoints.restore(like or make_tree(0))
    finally:
        checkpoints.close()


def assert_restores(folder, step):
    found, tree, host = restore(folder)
    assert found == step
    assert host == host_of(step)
    chex.assert_trees_all_equal_shapes_and_dtypes(tree, make_tree(step))
    chex.assert_trees_all_equal(tree, make_tree(step))


def files_of(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 16
    path.write_bytes(bytes(raw))


DAMAGE = {"truncated": truncate, "missing": pathlib.Path.unlink, "flipped": flip}


def test_what_was_saved_is_restored_bit_for_bit(two_steps):
    assert_restores(two_steps, LATE)


def test_shapes_alone_say_what_to_restore(two_steps):
    like = jax.eval_shape(lambda: make_tree(0))
    _, tree, _ = restore(two_steps, like)
    chex.assert_trees_all_equal(tree, make_tree(LATE))


def test_any_step_can_be_read_and_a_missing_one_is_an_error(two_steps):
    assert checkpoint.sealed_steps(two_steps) == [EARLY, LATE]
    tree, host = checkpoint.read(two_steps, EARLY, make_tree(0))
    chex.assert_trees_all_equal(tree, make_tree(EARLY))
    assert host == host_of(EARLY)
    with pytest.raises(CheckpointError, match="step 4 in .* is missing"):
        checkpoint.read(two_steps, 4, make_tree(0))
    assert checkpoint.sealed_steps(two_steps / "none") == []


def test_only_the_newest_steps_are_kept(folder):
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save(11, make_tree(11), host_of(11))
    checkpoints.close()
    assert sorted(path.name for path in folder.iterdir()) == ["11", "7"]
    assert_restores(folder, 11)


def test_keep_none_keeps_all(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=None)
    for step in (1, 2, 4):
        checkpoints.save(step, make_tree(step), {})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "4"]


def test_arrays_may_be_overwritten_as_soon_as_save_returns(tmp_path):
    overwrite = jax.jit(lambda array: array * 0 - 1, donate_argnums=0)
    array = jnp.arange(2.0**21)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"array": array}, {})
    for _ in range(4):
        array = overwrite(array)
    jax.block_until_ready(array)
    checkpoints.wait()
    tree, _ = checkpoints.restore({"array": jnp.zeros(2**21)})
    checkpoints.close()
    np.testing.assert_array_equal(tree["array"], np.arange(2.0**21, dtype="f4"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_of_a_step_is_noticed(folder, damage):
    step_folder = folder / str(LATE)
    assert checkpoint.is_good(step_folder)
    paths = [path for path in files_of(step_folder) if path.stat().st_size]
    assert len(paths) > 5
    for path in paths:
        whole = path.read_bytes()
        DAMAGE[damage](path)
        assert not checkpoint.is_good(step_folder), path
        path.write_bytes(whole)
    assert checkpoint.is_good(step_folder)


def test_a_file_that_does_not_belong_to_a_step_is_noticed(folder):
    (folder / str(LATE) / "tree" / "more").write_text("?")
    assert not checkpoint.is_good(folder / str(LATE))


KINDS = [
    (kind, damage)
    for kind in ("data", "host", "metadata", "manifest")
    for damage in DAMAGE
    # Without a manifest it was never sealed: see the test of unsealed steps.
    if (kind, damage) != ("manifest", "missing")
]


@pytest.mark.parametrize("kind, damage", KINDS)
def test_a_damaged_newest_step_is_put_aside_and_the_one_before_restored(
    folder, kind, damage
):
    step_folder = folder / str(LATE)
    if kind == "data":
        victim = max(files_of(step_folder / "tree"), key=lambda f: f.stat().st_size)
    elif kind == "host":
        victim = max(files_of(step_folder / "host"), key=lambda f: f.stat().st_size)
    elif kind == "metadata":
        victim = step_folder / "tree" / "_METADATA"
    else:
        victim = step_folder / checkpoint.MANIFEST
    DAMAGE[damage](victim)
    with pytest.warns(UserWarning, match=f"{LATE} IS DAMAGED.*broken-7"):
        assert_restores(folder, EARLY)
    assert not step_folder.exists()
    assert (folder / f"broken-{LATE}").is_dir()
    # It is said once, and the step can be written again.
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save(LATE, make_tree(LATE), host_of(LATE))
    checkpoints.close()
    assert_restores(folder, LATE)


def test_a_step_broken_twice_is_put_aside_twice(folder):
    for expected in ("broken-7", "broken-7-2"):
        flip(folder / str(LATE) / "tree" / "_METADATA")
        with pytest.warns(UserWarning, match=expected):
            checkpoints = Checkpoints(folder, keep=2)
        checkpoints.save(LATE, make_tree(LATE), host_of(LATE))
        checkpoints.close()
        assert (folder / expected).is_dir()
    assert_restores(folder, LATE)


def test_of_many_damaged_steps_only_the_newest_two_are_kept(folder):
    for _ in range(4):
        flip(folder / str(LATE) / "tree" / "_METADATA")
        with pytest.warns(UserWarning, match="IS DAMAGED"):
            checkpoints = Checkpoints(folder, keep=2)
        checkpoints.save(LATE, make_tree(LATE), host_of(LATE))
        checkpoints.close()
    assert len(list(folder.glob("broken-*"))) == checkpoint.BROKEN_KEPT == 2
    assert_restores(folder, LATE)


def test_a_newest_step_that_was_never_sealed_is_deleted_with_a_warning(folder):
    (folder / str(LATE) / checkpoint.MANIFEST).unlink()
    with pytest.warns(UserWarning, match=f"{LATE} IS INCOMPLETE"):
        assert_restores(folder, EARLY)
    assert [path.name for path in folder.iterdir()] == [str(EARLY)]


def test_an_older_step_whose_deletion_was_cut_short_is_deleted_in_silence(folder):
    (folder / str(EARLY) / checkpoint.MANIFEST).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_restores(folder, LATE)
    assert [path.name for path in folder.iterdir()] == [str(LATE)]


def test_a_process_that_dies_before_the_seal_leaves_the_step_before(
    folder, tmp_path, monkeypatch
):
    left, seal = tmp_path / "left", checkpoint._write_manifest

    def copy_and_seal(step_folder):
        # What a process that is killed now leaves, and what a reader sees now.
        shutil.copytree(folder, left)
        seal(step_folder)

    checkpoints = Checkpoints(folder, keep=1)
    monkeypatch.setattr(checkpoint, "_write_manifest", copy_and_seal)
    checkpoints.save(11, make_tree(11), host_of(11))
    checkpoints.close()
    monkeypatch.undo()
    tree, _ = checkpoint.read_newest(left, make_tree(0))
    chex.assert_trees_all_equal(tree, make_tree(LATE))
    with pytest.warns(UserWarning, match="11 IS INCOMPLETE"):
        assert_restores(left, LATE)
    assert_restores(folder, 11)


def test_a_step_that_the_run_may_go_back_to_is_kept_beside_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (2, 4, 6, 8):
        checkpoints.save(step, make_tree(step), {}, needed_at=5)
    checkpoints.wait()
    assert checkpoint.sealed_steps(tmp_path) == [4, 8]
    checkpoints.forget_after(5)
    assert checkpoints.latest() == 4
    # The manager has forgotten too, so that the step can be written again.
    checkpoints.save(8, make_tree(8), {}, needed_at=8)
    checkpoints.close()
    assert checkpoint.sealed_steps(tmp_path) == [8]


def test_one_save_at_a_time_over_all_folders(tmp_path, monkeypatch):
    latest, best = (Checkpoints(tmp_path / name, keep=1) for name in ("a", "b"))
    finish, begun = ocp.CheckpointManager.wait_until_finished, threading.Event()
    sealed_before = []

    def finish_late(manager):
        if threading.current_thread() is not threading.main_thread():
            begun.wait(5)
        finish(manager)

    save = ocp.CheckpointManager.save

    def watch(manager, *arguments, **named):
        sealed_before.append(latest.latest())
        return save(manager, *arguments, **named)

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", finish_late)
    monkeypatch.setattr(ocp.CheckpointManager, "save", watch)
    latest.save(1, make_tree(1), {})
    threading.Timer(0.3, begun.set).start()
    best.save(1, make_tree(1), {})
    latest.close()
    best.close()
    assert sealed_before == [None, 1]


def test_a_reader_goes_on_to_the_step_that_took_the_place_of_its_own(
    folder, monkeypatch
):
    is_good = checkpoint.is_good

    def changed_meanwhile(step_folder):
        monkeypatch.setattr(checkpoint, "is_good", is_good)
        checkpoints = Checkpoints(folder, keep=1)
        checkpoints.save(11, make_tree(11), host_of(11))
        checkpoints.close()
        return is_good(step_folder)

    monkeypatch.setattr(checkpoint, "is_good", changed_meanwhile)
    tree, host = checkpoint.read_newest(folder, make_tree(0))
    assert host == host_of(11)
    chex.assert_trees_all_equal(tree, make_tree(11))


def test_a_step_of_a_later_version_is_refused(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    checkpoints = Checkpoints(folder, keep=2)
    checkpoints.save(11, make_tree(11), host_of(11))
    checkpoints.close()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="11 in .* format 99.* install a newer"):
        checkpoint.read_newest(folder, make_tree(0))


def test_the_host_value_of_a_step_is_read_without_its_arrays(two_steps):
    assert checkpoint.read_host(two_steps, EARLY) == host_of(EARLY)


def test_what_a_killed_save_left_behind_is_ignored(folder):
    (folder / "9.orbax-checkpoint-tmp" / "tree").mkdir(parents=True)
    assert_restores(folder, LATE)


def test_an_unsealed_first_step_means_a_fresh_start(folder):
    shutil.rmtree(folder / str(LATE))
    (folder / str(EARLY) / checkpoint.MANIFEST).unlink()
    with pytest.warns(UserWarning, match="INCOMPLETE"):
        checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.latest() is None
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoints.restore(make_tree(0))
    checkpoints.close()


@pytest.mark.parametrize("unsealed", [False, True])
def test_if_nothing_good_is_left_it_is_an_error_and_nothing_is_moved(folder, unsealed):
    flip(folder / str(EARLY) / "tree" / "_METADATA")
    if unsealed:
        (folder / str(LATE) / checkpoint.MANIFEST).unlink()
    else:
        truncate(folder / str(LATE) / "tree" / "_METADATA")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .*steps \[3, 7\]"):
        Checkpoints(folder, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["3", "7"]


def test_damaged_steps_that_are_not_required_stop_nobody(folder):
    for step in (EARLY, LATE):
        flip(folder / str(step) / "tree" / "_METADATA")
    with pytest.warns(UserWarning, match="IS DAMAGED"):
        checkpoints = Checkpoints(folder, keep=1, required=False)
    assert checkpoints.latest() is None
    checkpoints.save(LATE, make_tree(LATE), host_of(LATE))
    checkpoints.close()
    assert_restores(folder, LATE)
    assert {path.name for path in folder.glob("broken-*")} == {"broken-3", "broken-7"}


@pytest.mark.slow
# What orbax leaves behind when it gives up is its own affair.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(
    "change",
    [
        {"table": jnp.zeros((13, 6))},
        {"more": jnp.zeros(3)},
        {"nested": [jnp.zeros((), jnp.int32)]},
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_tree_of_other_shapes_is_an_error_that_names_the_step(folder, change):
    with pytest.raises(CheckpointError, match=f"step {LATE} in .* does not fit"):
        restore(folder, make_tree(0) | change)
    gc.collect()  # orbax's own reads were cut off, and say so when they are let go


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_that_names_the_folder(folder, monkeypatch):
    checkpoints = Checkpoints(folder, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full_disk)
        with pytest.raises(CheckpointError, match=f"{folder}.*No space left"):
            checkpoints.save(11, make_tree(11), host_of(11))
    checkpoints.close()
    assert_restores(folder, LATE)


@pytest.mark.parametrize("when", ["wait", "save", "close"])
def test_a_disk_that_fills_in_the_background_is_noticed_next(folder, monkeypatch, when):
    checkpoints = Checkpoints(folder, keep=2)
    finish = ocp.CheckpointManager.wait_until_finished

    def fail_in_the_background(manager):
        finish(manager)
        if threading.current_thread() is not threading.main_thread():
            full_disk()

    with monkeypatch.context() as patch:
        patch.setattr(
            ocp.CheckpointManager, "wait_until_finished", fail_in_the_background
        )
        checkpoints.save(11, make_tree(11), host_of(11))
        arguments = (13, make_tree(13), {}) if when == "save" else ()
        with pytest.raises(CheckpointError, match=f"{folder}.*No space left"):
            getattr(checkpoints, when)(*arguments)
    checkpoints.close()
    # Never sealed, so it does not count.
    with pytest.warns(UserWarning, match="11 IS INCOMPLETE"):
        assert_restores(folder, LATE)


@pytest.mark.slow
# What orbax leaves behind when it gives up is its own affair.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("when", ["wait", "close"])
def test_a_disk_that_is_really_full_is_told_with_what_is_safe(folder, when):
    checkpoints = Checkpoints(folder, keep=2)
    large = jnp.asarray(np.random.default_rng(0).standard_normal(2**20), jnp.float32)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # A limit on a file's size fails as a full disk does, at the same places.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
        with pytest.raises(CheckpointError, match=f"{folder}.*step {LATE} is intact"):
            checkpoints.save(11, make_tree(11) | {"large": large}, host_of(11))
            getattr(checkpoints, when)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    with contextlib.suppress(CheckpointError):
        checkpoints.close()
    assert_restores(folder, LATE)


def test_a_step_older_than_the_newest_is_refused_by_its_number(folder):
    checkpoints = Checkpoints(folder, keep=2)
    with pytest.raises((CheckpointError, ValueError), match=f"step {EARLY + 1}"):
        checkpoints.save(EARLY + 1, make_tree(99), {})
        checkpoints.wait()
    checkpoints.close()
    assert_restores(folder, LATE)
