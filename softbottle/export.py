"""A run's weights as bfloat16 in small files, to move a model between machines.

The parameters are laid end to end and cut into parts of at most `PART_BYTES`;
`index.json` holds their names, shapes and the parts' hashes beside the config and the
vocabulary. `read` makes a run of it again, ready for evaluation, generation, analysis
or finetuning.
"""

import hashlib
import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np

from softbottle import checkpoint, model, state
from softbottle import config as config_lib

PART_BYTES = 15 * 2**20


def write(workdir: pathlib.Path | str, folder: pathlib.Path | str) -> int:
    """Write the best parameters of a run; returns the number of parts."""
    workdir, folder = pathlib.Path(workdir), pathlib.Path(folder)
    run = state.load_run(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves(run.params)
    raw = b"".join(
        np.asarray(leaf).astype(ml_dtypes.bfloat16).tobytes() for leaf in leaves
    )
    parts = {}
    for number, start in enumerate(range(0, len(raw), PART_BYTES)):
        part = raw[start : start + PART_BYTES]
        name = f"weights-{number:03d}.bin"
        (folder / name).write_bytes(part)
        parts[name] = hashlib.sha256(part).hexdigest()
    index = {
        "step": run.step,
        "shapes": [list(leaf.shape) for leaf in leaves],
        "parts": parts,
        "config": config_lib.to_dict(run.config),
    }
    (folder / "index.json").write_text(json.dumps(index))
    shutil.copyfile(workdir / "vocab.txt", folder / "vocab.txt")
    return len(parts)


def read(folder: pathlib.Path | str, workdir: pathlib.Path | str) -> None:
    """Make a run of what `write` wrote; its weights are rounded to bfloat16.

    Raises:
        ValueError: if a part is missing or damaged, or `workdir` holds a run already.
    """
    folder, workdir = pathlib.Path(folder), pathlib.Path(workdir)
    if (workdir / "config.json").exists():
        raise ValueError(f"{workdir} holds a run already.")
    index = json.loads((folder / "index.json").read_text())
    raw = b"".join(_part(folder / name, sha) for name, sha in index["parts"].items())
    config = config_lib.validate(config_lib.from_dict(index["config"]))
    vocab = state.Vocab.load(folder / "vocab.txt", config.data.lowercase)
    like = jax.eval_shape(model.make(config, len(vocab)).init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(like)
    flat = np.frombuffer(raw, ml_dtypes.bfloat16).astype(np.float32)
    shapes = [list(leaf.shape) for leaf in leaves]
    if shapes != index["shapes"] or len(flat) != sum(leaf.size for leaf in leaves):
        raise ValueError(f"the weights in {folder} do not fit their own config.")
    ends = np.cumsum([leaf.size for leaf in leaves])
    values = [
        part.reshape(leaf.shape)
        for part, leaf in zip(np.split(flat, ends[:-1]), leaves, strict=True)
    ]
    # The config comes last: without it there is no run, and reading can be repeated.
    shutil.rmtree(workdir / "best", ignore_errors=True)
    best = checkpoint.Checkpoints(workdir / "best", keep=1)
    best.save(index["step"], jax.tree.unflatten(tree, values), {"step": index["step"]})
    best.close()
    state.write_run(workdir, config, vocab)


def _part(path, sha):
    if not path.exists():
        raise ValueError(f"{path} is missing.")
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != sha:
        raise ValueError(f"{path} is damaged: its hash is not the index's.")
    return raw
