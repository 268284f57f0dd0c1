"""Checkpoints: orbax behind a sha256 manifest. The only file that knows orbax.

Orbax restores a flipped bit silently and offers a broken newest step as the latest.
So every step folder gets a manifest of its files' hashes as soon as it is complete
(it is sealed), and a step counts only if its manifest agrees with it. Steps that are
no longer wanted are deleted after the next one is sealed, so that a process may be
killed at any time and leaves a sealed step behind. On opening, damaged steps are put
aside with a loud warning, steps that were never sealed are deleted, and the newest
good one is what `restore` gives.

In a job of several processes all write their parts of a step and the first one alone
looks after the folder. Steps hold global arrays: they restore onto any mesh.
"""

import json
import os
import pathlib
import shutil
import threading
import warnings
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from softbottle import distributed, files

MANIFEST = "manifest.json"
# Version of what a step holds, stored with it; 0 said none.
FORMAT = 1
# How many damaged steps of a folder are kept for whoever wants to look into them.
BROKEN_KEPT = 2
# A pytree of arrays, or of their shapes.
Tree = TypeVar("Tree")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read."""


class Checkpoints:
    """The steps kept in one folder.

    Only one save is under way in a process at any time, whichever folder it is for:
    orbax's barriers between the processes of a job are shared by all its managers.

    Args:
        folder: made if it does not exist.
        keep: how many of the newest steps are kept; None keeps all.
        required: whether a run cannot go on without one of these steps. If not, a
            folder in which all are damaged is one in which there are none.

    Raises:
        CheckpointError: if steps are required, there are some, and all are broken.
    """

    _saving: ClassVar["Checkpoints | None"] = None

    def __init__(self, folder: pathlib.Path, keep: int | None, required: bool = True):
        self._folder, self._keep = folder.absolute(), keep
        if jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            _put_in_order(self._folder, required)
        distributed.barrier(f"{folder.name} is in order")
        # Orbax would delete the step before while the new one is not yet sealed.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._sealing: threading.Thread | None = None
        self._error: BaseException | None = None

    def latest(self) -> int | None:
        """The newest good step, if there is one."""
        return _newest_sealed(self._folder)

    def forget_after(self, step: int) -> None:
        """Delete the steps that are later than this one."""
        if jax.process_index() == 0:
            for later in _steps(self._folder):
                if later > step:
                    _delete(self._folder / str(later))
        distributed.barrier(f"{self._folder.name} is rewound")
        self._manager.reload()

    def save(
        self,
        step: int,
        tree: Any,
        host: dict[str, Any],
        needed_at: int | None = None,
    ) -> None:
        """Begin to write a step; arrays are copied before this returns.

        Args:
            step: later than any step before it.
            tree: a pytree of arrays.
            host: a small JSON value.
            needed_at: a step that a run may go back to: the newest one here that is
                no later than that is kept beside the `keep` newest of all.

        Raises:
            CheckpointError: if this save, or the one before it, failed.
        """
        if Checkpoints._saving is not None:
            Checkpoints._saving.wait()
        arguments = ocp.args.Composite(
            tree=ocp.args.StandardSave(_without_empty(tree)),
            host=ocp.args.JsonSave({"format": FORMAT, **host}),
        )
        try:
            begun = self._manager.save(step, args=arguments)
        except (OSError, ValueError) as error:
            raise self._failure(error) from error
        if not begun:
            raise self._failure(f"step {step} is not later than the newest there")
        self._sealing = threading.Thread(target=self._seal, args=(step, needed_at))
        self._sealing.start()
        Checkpoints._saving = self

    def restore(self, like: Tree) -> tuple[Tree, dict[str, Any]]:
        """The newest step: (tree, host), as `read_newest` gives it."""
        return read_newest(self._folder, like)

    def wait(self) -> None:
        """Return when the last save is complete and sealed.

        Raises:
            CheckpointError: if it failed.
        """
        if self._sealing is not None:
            self._sealing.join()
            self._sealing, Checkpoints._saving = None, None
            distributed.barrier(f"{self._folder.name} is sealed")
        if self._error is not None:
            error, self._error = self._error, None
            raise self._failure(error) from error

    def close(self) -> None:
        """Wait, and let go of the folder.

        Raises:
            CheckpointError: if the last save failed.
        """
        try:
            self.wait()
        finally:
            try:
                self._manager.close()
            except (OSError, ValueError) as error:
                # Orbax tells of the same failure again, in words of its own.
                raise self._failure(error) from error

    def _seal(self, step, needed_at):
        try:
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                _write_manifest(self._folder / str(step))
                self._prune(needed_at)
        except BaseException as error:
            # Raised in the caller's thread, by `wait`.
            self._error = error

    def _prune(self, needed_at):
        if self._keep is None:
            return
        sealed = sealed_steps(self._folder)
        retained = sealed[-self._keep :]
        if needed_at is not None:
            retained += [step for step in sealed if step <= needed_at][-1:]
        for step in set(sealed) - set(retained):
            _delete(self._folder / str(step))

    def _failure(self, error):
        newest = self.latest()
        safe = "none is complete" if newest is None else f"step {newest} is intact"
        return CheckpointError(
            f"a checkpoint could not be written to {self._folder}: {error}. Mend the "
            f"cause (a full disk?) and start again: {safe}."
        )


def read_newest(folder: pathlib.Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """The newest complete step of a folder, which is not changed: (tree, host).

    Args:
        folder: of a `Checkpoints`, which another process may be writing to.
        like: a tree of arrays or ShapeDtypeStructs with the shapes, dtypes and
            shardings to restore to.

    Raises:
        CheckpointError: if there is no step, it is damaged, or has other shapes.
    """
    while (step := _newest_sealed(folder)) is not None:
        try:
            return read(folder, step, like)
        except CheckpointError:
            # The run may have sealed a newer one, and deleted this one, meanwhile.
            if _newest_sealed(folder) in (step, None):
                raise
    raise CheckpointError(f"there is no checkpoint in {folder}.")


def read_host(folder: pathlib.Path, step: int) -> dict[str, Any]:
    """The small JSON value that was saved with a step.

    Raises:
        CheckpointError: if a later version wrote it.
    """
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        arguments = ocp.args.Composite(host=ocp.args.JsonRestore())
        host = reader.restore(folder.absolute() / str(step), args=arguments)["host"]
    version = host.pop("format", 0)
    if version > FORMAT:
        raise CheckpointError(
            f"step {step} in {folder} is of format {version}, and this version of "
            f"softbottle reads formats up to {FORMAT}: install a newer one."
        )
    return host


def read(folder: pathlib.Path, step: int, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """One step of a folder, as `read_newest` gives the newest: (tree, host).

    Raises:
        CheckpointError: if the step is not there, is damaged, or has other shapes.
    """
    # One process reads every byte to check it; the rest go by its seal.
    is_right = is_good if jax.process_index() == 0 else is_sealed
    if not is_right(folder / str(step)):
        raise CheckpointError(f"step {step} in {folder} is missing or damaged.")
    host = read_host(folder, step)
    abstract = jax.tree.map(_target, _without_empty(like))
    arguments = ocp.args.Composite(tree=ocp.args.StandardRestore(abstract))
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            restored = reader.restore(folder.absolute() / str(step), args=arguments)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"step {step} in {folder} does not fit this model: {error}"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"step {step} in {folder} cannot be read: {error}"
        ) from error
    tree = jax.tree.map(
        lambda leaf, value: (
            value
            if leaf.size
            else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        ),
        like,
        restored["tree"],
    )
    return tree, host


def sealed_steps(folder: pathlib.Path) -> list[int]:
    """The complete steps of a folder, rising; none where there is no folder."""
    return [step for step in _steps(folder) if is_sealed(folder / str(step))]


def is_sealed(step_folder: pathlib.Path) -> bool:
    """Whether a step is complete: its manifest is the last thing to be written."""
    return (step_folder / MANIFEST).exists()


def is_good(step_folder: pathlib.Path) -> bool:
    """Whether a step's files are all there and have the hashes of its manifest."""
    manifest = step_folder / MANIFEST
    try:
        expected = json.loads(manifest.read_text())
        return expected == _hashes(step_folder)
    except (OSError, ValueError):
        return False


def _target(leaf):
    """What to restore a leaf to; without a sharding of its own, the first device."""
    struct = ocp.utils.to_shape_dtype_struct(leaf)
    if isinstance(struct, jax.ShapeDtypeStruct) and struct.sharding is None:
        # Else orbax takes the devices of the run that wrote it, which may be gone.
        device = jax.local_devices()[0]
        return struct.update(sharding=jax.sharding.SingleDeviceSharding(device))
    return struct


def _without_empty(tree):
    """The tree with a number for each array of no elements, which orbax refuses."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else np.zeros(1), tree)


def _put_in_order(folder, required):
    """Leave good steps alone in a folder; see the top of this file."""
    steps = _steps(folder)
    broken = [step for step in steps if not is_good(folder / str(step))]
    damaged = [step for step in broken if is_sealed(folder / str(step))]
    if required and damaged and len(broken) == len(steps):
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged: steps {steps}. Move the folder "
            "away to start from the beginning."
        )
    rest = "an earlier one is used" if len(broken) < len(steps) else "there is no other"
    for step in broken:
        if step in damaged:
            _put_aside(folder, step, rest)
            continue
        # An older one was being deleted when its process died; that loses nothing.
        if step == steps[-1]:
            warnings.warn(
                f"CHECKPOINT {folder / str(step)} IS INCOMPLETE: its process died "
                f"while it was written. It is deleted; {rest}.",
                stacklevel=4,
            )
        _delete(folder / str(step))
    asides = sorted(folder.glob("broken-*"), key=lambda path: path.stat().st_mtime_ns)
    for path in asides[:-BROKEN_KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def _put_aside(folder, step, rest):
    aside = folder / f"broken-{step}"
    number = 1
    while aside.exists():
        number += 1
        aside = folder / f"broken-{step}-{number}"
    (folder / str(step)).rename(aside)
    os.utime(aside)
    warnings.warn(
        f"CHECKPOINT {folder / str(step)} IS DAMAGED: put aside as {aside.name}; "
        f"{rest}.",
        stacklevel=5,
    )


def _delete(step_folder):
    """Delete a step; killed half-way through, it leaves one that is not sealed."""
    (step_folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(step_folder, ignore_errors=True)


def _newest_sealed(folder):
    return max(sealed_steps(folder), default=None)


def _steps(folder):
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def _write_manifest(step_folder):
    manifest = json.dumps(_hashes(step_folder), indent=1)
    files.replace(step_folder / MANIFEST, manifest)


def _hashes(step_folder):
    return {
        path.relative_to(step_folder).as_posix(): files.sha256(path)
        for path in sorted(step_folder.rglob("*"))
        if path.is_file() and not path.name.startswith(MANIFEST)
    }
