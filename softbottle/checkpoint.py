"""Checkpoints: orbax behind a sha256 manifest. The only file that knows orbax.

Orbax restores a flipped bit silently and offers a broken newest step as the latest.
So every step folder gets a manifest of its files' hashes as soon as it is complete,
and a step counts only if its manifest agrees with it. On opening, steps that fail are
put aside with a loud warning, and the newest good one is what `restore` gives.

In a job of several processes all write their parts of a step and the first one alone
looks after the folder. Steps hold whole arrays: they restore onto any mesh.
"""

import hashlib
import json
import pathlib
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from softbottle import sharding

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none can be read."""


class Checkpoints:
    """The steps kept in one folder.

    Args:
        folder: made if it does not exist.
        keep: how many of the newest steps are kept; None keeps all.

    Raises:
        CheckpointError: if the folder has steps, and all of them are broken.
    """

    def __init__(self, folder: pathlib.Path, keep: int | None):
        self._folder = folder.absolute()
        if jax.process_index() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            _put_broken_aside(self._folder)
        sharding.wait_for_all(f"{folder.name} is in order")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self._sealing: threading.Thread | None = None
        self._error: BaseException | None = None

    def latest(self) -> int | None:
        """The newest good step, if there is one."""
        return _newest_sealed(self._folder)

    def forget_after(self, step: int) -> None:
        """Delete the steps that are later than this one."""
        for later in _steps(self._folder):
            if later > step:
                self._manager.delete(later)

    def save(self, step: int, tree: Any, host: dict[str, Any]) -> None:
        """Begin to write a step; arrays are copied before this returns.

        Args:
            step: later than any step before it.
            tree: a pytree of arrays.
            host: a small JSON value.

        Raises:
            CheckpointError: if this save, or the one before it, failed.
        """
        self.wait()
        arguments = ocp.args.Composite(
            tree=ocp.args.StandardSave(_without_empty(tree)),
            host=ocp.args.JsonSave(host),
        )
        try:
            begun = self._manager.save(step, args=arguments)
        except (OSError, ValueError) as error:
            raise self._failure(error) from error
        if not begun:
            raise self._failure(f"step {step} is not later than the newest there")
        self._sealing = threading.Thread(target=self._seal, args=(step,))
        self._sealing.start()

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """The newest step: (tree, host), as `read_newest` gives it."""
        return read_newest(self._folder, like)

    def wait(self) -> None:
        """Return when the last save is complete and sealed.

        Raises:
            CheckpointError: if it failed.
        """
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
            sharding.wait_for_all(f"{self._folder.name} is sealed")
        if self._error is not None:
            error, self._error = self._error, None
            raise self._failure(error) from error

    def close(self) -> None:
        """Wait, and let go of the folder."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _seal(self, step):
        try:
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                _write_manifest(self._folder / str(step))
        except BaseException as error:
            # Raised in the caller's thread, by `wait`.
            self._error = error

    def _failure(self, error):
        return CheckpointError(
            f"a checkpoint could not be written to {self._folder}: {error}. Earlier "
            "checkpoints are intact; mend the cause (a full disk?) and start again."
        )


def read_newest(folder: pathlib.Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """The newest complete step of a folder, which is not changed: (tree, host).

    Args:
        folder: of a `Checkpoints`, which another process may be writing to.
        like: a tree of arrays or ShapeDtypeStructs with the shapes, dtypes and
            shardings to restore to.

    Raises:
        CheckpointError: if there is no step, it is damaged, or has other shapes.
    """
    step = _newest_sealed(folder)
    if step is None:
        raise CheckpointError(f"there is no checkpoint in {folder}.")
    return read(folder, step, like)


def read(folder: pathlib.Path, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """One step of a folder, as `read_newest` gives the newest: (tree, host).

    Raises:
        CheckpointError: if the step is not there, is damaged, or has other shapes.
    """
    # One process reads every byte to check it; the rest go by its seal.
    is_right = is_good if jax.process_index() == 0 else is_sealed
    if not is_right(folder / str(step)):
        raise CheckpointError(f"step {step} in {folder} is missing or damaged.")
    abstract = jax.tree.map(_target, _without_empty(like))
    arguments = ocp.args.Composite(
        tree=ocp.args.StandardRestore(abstract), host=ocp.args.JsonRestore()
    )
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            found = reader.restore(folder.absolute() / str(step), args=arguments)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"step {step} in {folder} does not fit this model: {error}"
        ) from error
    tree = jax.tree.map(
        lambda leaf, value: value if leaf.size else jnp.zeros_like(leaf),
        like,
        found["tree"],
    )
    return tree, found["host"]


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


def _put_broken_aside(folder):
    steps = _steps(folder)
    broken = [step for step in steps if not is_good(folder / str(step))]
    # One without a manifest was being written when its process died; a run killed in
    # its very first save starts again. One that disagrees with its manifest is damage.
    sealed = [step for step in broken if is_sealed(folder / str(step))]
    if sealed and len(broken) == len(steps):
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged: steps {steps}. Move the folder "
            "away to start from the beginning."
        )
    for step in broken:
        aside = folder / f"broken-{step}"
        number = 1
        while aside.exists():
            number += 1
            aside = folder / f"broken-{step}-{number}"
        (folder / str(step)).rename(aside)
        warnings.warn(
            f"CHECKPOINT {folder / str(step)} IS INCOMPLETE OR DAMAGED: put aside as "
            f"{aside.name}; an earlier one is used.",
            stacklevel=3,
        )


def _newest_sealed(folder):
    return max(sealed_steps(folder), default=None)


def _steps(folder):
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def _write_manifest(step_folder):
    temporary = step_folder / (MANIFEST + ".tmp")
    temporary.write_text(json.dumps(_hashes(step_folder), indent=1))
    temporary.replace(step_folder / MANIFEST)


def _hashes(step_folder):
    hashes = {}
    for path in sorted(step_folder.rglob("*")):
        if path.is_file() and not path.name.startswith(MANIFEST):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            hashes[path.relative_to(step_folder).as_posix()] = digest
    return hashes
