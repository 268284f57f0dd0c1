"""A run's weights as bfloat16 in small files, to move a model between machines.

The parameters are laid end to end and cut into parts of at most `PART_BYTES`;
`index.json` holds their shapes and the parts' sizes and hashes beside the config, and
the hash of the vocabulary in `vocab.txt`. `read` makes a run of it again, ready for
evaluation, generation, analysis or finetuning.

The files may come from anyone: only plain files of the folder are opened, and only
once their sizes are what the index and the model's own shapes ask for.
"""

import hashlib
import json
import math
import pathlib
import shutil
import stat
import uuid
from typing import Any

import jax
import ml_dtypes
import numpy as np

from softbottle import config as config_lib
from softbottle import files, model
from softbottle.data.vocab import Vocab
from softbottle.training import checkpoint, readme, state

PART_BYTES = 15 * 2**20

_INDEX, _VOCAB, _PART = "index.json", "vocab.txt", "weights-{:03d}.bin"
_INDEX_BYTES = 2**24  # more than any model's shapes and parts need
_ENTRIES = {"step": int, "shapes": list, "parts": dict, "config": dict}
_YOUNGER = {
    "bytes": dict,
    "vocab": str,
    "text": dict,
}  # files of the first version have none
_ENTRIES |= _YOUNGER
# Version of the files, stored in the index; 0 said none.
FORMAT = 1


def write(workdir: pathlib.Path | str, folder: pathlib.Path | str) -> int:
    """Write the best parameters of a run; returns the number of parts."""
    workdir, folder = pathlib.Path(workdir), pathlib.Path(folder)
    run = state.load_run(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves(run.params)
    raw = b"".join(
        np.asarray(leaf).astype(ml_dtypes.bfloat16).tobytes() for leaf in leaves
    )
    parts, sizes = {}, {}
    for number, start in enumerate(range(0, len(raw), PART_BYTES)):
        part, name = raw[start : start + PART_BYTES], _PART.format(number)
        files.replace(folder / name, part)
        parts[name], sizes[name] = hashlib.sha256(part).hexdigest(), len(part)
    run.vocab.save(folder / _VOCAB)
    index = {
        "format": FORMAT,
        "step": run.step,
        "shapes": [list(leaf.shape) for leaf in leaves],
        "parts": parts,
        "bytes": sizes,
        "vocab": run.vocab.digest,
        "text": state.text_digest(workdir),
        "config": config_lib.to_dict(run.config),
    }
    files.replace(folder / _INDEX, json.dumps(index))
    return len(parts)


def read(folder: pathlib.Path | str, workdir: pathlib.Path | str) -> None:
    """Make a run of what `write` wrote; its weights are rounded to bfloat16.

    The run is made in a folder of its own beside `workdir` and renamed when it is
    complete: whatever happens, reading can be repeated and nothing else is touched.

    Raises:
        ValueError: if a file is missing, damaged or no plain file, the index is not
            what `write` writes, or there is anything in `workdir`.
    """
    folder, workdir = pathlib.Path(folder), pathlib.Path(workdir).resolve()
    if (workdir / "config.json").exists():
        raise ValueError(f"{workdir} holds a run already.")
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise ValueError(
            f"{workdir} is there and is not empty; name a folder that is not there."
        )
    index = _index(folder)
    config = _config(folder, index)
    vocab = _vocab(folder, index, config.data)
    like = jax.eval_shape(model.make(config, len(vocab)).init, jax.random.key(0))
    params = _params(folder, index, like)
    partial = workdir.with_name(f"{workdir.name}.partial-{uuid.uuid4().hex}")
    try:
        state.write_run(partial, config, vocab, index.get("text"))
        best = checkpoint.Checkpoints(partial / "best", keep=1)
        best.save(index["step"], params, {"step": index["step"]})
        best.close()
        readme.write(partial, workdir, resumes=False)
        partial.rename(workdir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _index(folder: pathlib.Path) -> dict[str, Any]:
    """The index, whose entries are of the types that `write` gives them."""
    path = _plain(folder / _INDEX)
    if path.stat().st_size > _INDEX_BYTES:
        raise ValueError(f"{path} has more than {_INDEX_BYTES:,} bytes: no index has.")
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    index = index if isinstance(index, dict) else {}
    version = index.get("format", 0)
    if not isinstance(version, int) or version > FORMAT:
        raise ValueError(
            f"{path} is of format {str(version)[:40]}, and this version of softbottle "
            f"reads formats up to {FORMAT}: install a newer one."
        )
    for name, kind in _ENTRIES.items():
        value = index.get(name)
        if type(value) is not kind and (name in index or name not in _YOUNGER):
            raise ValueError(
                f"{path} must have {name!r}, a JSON {kind.__name__}; got "
                f"{str(value)[:40]!r}."
            )
    if not 0 <= index["step"] < 2**31:
        raise ValueError(f"{path} has the step {index['step']}; it must be below 2^31.")
    names = [_PART.format(number) for number in range(len(index["parts"]))]
    if list(index["parts"]) != names or list(index.get("bytes", names)) != names:
        raise ValueError(
            f"{path} must name the parts {_PART.format(0)}, {_PART.format(1)}, ... in "
            f"this order, got {str(list(index['parts']))[:80]}."
        )
    return index


def _config(folder, index):
    try:
        config = config_lib.from_dict(index["config"])
        # The softmaxes that were trained beside the run are not among the files.
        config.train.equal_softmax = config.train.same_width_softmax = False
        return config_lib.validate(config, trained=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the config in {folder / _INDEX}: {error}") from error


def _vocab(folder, index, data):
    vocab = Vocab.load(_plain(folder / _VOCAB), data.lowercase, data.subwords)
    if vocab.digest != index.get("vocab", vocab.digest):
        raise ValueError(f"{folder / _VOCAB} is damaged: its hash is not the index's.")
    return vocab


def _params(folder, index, like):
    """The parameters; nothing is read before all sizes are right."""
    leaves, tree = jax.tree.flatten(like)
    paths = {name: _plain(folder / name) for name in index["parts"]}
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    for name, size in index.get("bytes", sizes).items():
        if sizes[name] != size:
            raise ValueError(
                f"{paths[name]} is damaged: it has {sizes[name]:,} bytes, and by the "
                f"index {str(size)[:40]}."
            )
    needed = 2 * sum(math.prod(leaf.shape) for leaf in leaves)
    shapes = [list(leaf.shape) for leaf in leaves]
    if shapes != index["shapes"] or sum(sizes.values()) != needed:
        raise ValueError(f"the weights in {folder} do not fit their own config.")
    raw = b"".join(_part(paths[name], sha) for name, sha in index["parts"].items())
    flat = np.frombuffer(raw, ml_dtypes.bfloat16).astype(np.float32)
    ends = np.cumsum([leaf.size for leaf in leaves])
    values = [
        part.reshape(leaf.shape)
        for part, leaf in zip(np.split(flat, ends[:-1]), leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, values)


def _part(path, sha):
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != sha:
        raise ValueError(f"{path} is damaged: its hash is not the index's.")
    return raw


def _plain(path):
    """The path, if it is a file: no device, no pipe, no link to one elsewhere."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing.") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is no plain file (a link, a pipe, a device?).")
    return path
