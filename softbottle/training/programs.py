"""Compiled steps that a later process takes over without tracing them again.

jax's own cache is asked by the lowered program, and to trace and lower PTB's step takes
5 s for each of its four widths. A program is kept here by what it was made from: this
package's source, the versions of what it calls, the device, every setting, and the
shapes of its arguments. What cannot be read is compiled.

Loading runs what is in a file, so that only the user's own files are loaded.
"""

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import pickle
import sys
from typing import Any

import jax
from jax.experimental import serialize_executable

import softbottle
from softbottle import config as config_lib
from softbottle import files

KEPT = 64  # files, of 1.4 MB each for PTB's step
_CALLED = ("jax", "jaxlib", "flax", "optax", "numpy")


def folder() -> pathlib.Path | None:
    """Where programs of this process are kept; None where they are not.

    In jax's compilation cache, if there is one in a file system. On a CPU compiling is
    quick, and a program may hold instructions that another machine with the same folder
    has not.
    """
    cache = jax.config.values["jax_compilation_cache_dir"]
    if not cache or "://" in cache or jax.default_backend() == "cpu":
        return None
    return pathlib.Path(cache) / "steps"


def name(config: config_lib.Config, vocab: int, arguments: Any) -> str:
    """The file of a step: a hash of all that its program depends on.

    Args:
        config: of the run.
        vocab: how many words the model has.
        arguments: of the step, as arrays or their shapes.
    """
    device = jax.devices()[0]
    leaves, structure = jax.tree.flatten(arguments)
    given = {
        "source": _source(),
        "versions": {each: importlib.metadata.version(each) for each in _CALLED},
        "python": sys.version,
        "device": [device.device_kind, device.client.platform_version],
        "flags": os.environ.get("XLA_FLAGS", ""),
        "jax": {key: repr(value) for key, value in sorted(jax.config.values.items())},
        "config": config_lib.to_dict(config),
        "vocab": vocab,
        "structure": str(structure),
        "arguments": [repr(jax.typeof(leaf)) for leaf in leaves],
    }
    text = json.dumps(given, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: pathlib.Path) -> jax.stages.Compiled | None:
    """The program of a file, for the first device; None if none can be read."""
    try:
        if path.stat().st_uid != os.geteuid():
            raise ValueError("it is another user's")
        raw = path.read_bytes()
        digest, raw = raw[:32], raw[32:]
        if hashlib.sha256(raw).digest() != digest:
            raise ValueError("the file is damaged")
        program = _read(raw)
        os.utime(path)
    except FileNotFoundError:
        return None
    except Exception as error:
        # Whatever jax finds wrong with it: it is compiled, and written again.
        logging.getLogger("softbottle").warning("%s is not used: %s", path, error)
        return None
    return program


def save(path: pathlib.Path, program: jax.stages.Compiled) -> None:
    """Keep a program that can be read again, beside those that were used last."""
    try:
        raw = pickle.dumps(serialize_executable.serialize(program))
        # Not all can that came out of jax's own cache.
        _read(raw)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(path, hashlib.sha256(raw).digest() + raw)
        kept = path.parent.iterdir()
        for old in sorted(kept, key=lambda each: each.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except Exception as error:
        # The run has its program: this costs time at the next start, nothing else.
        logging.getLogger("softbottle").info("%s is not kept: %s", path, error)


def _read(raw):
    program, taken, given = pickle.loads(raw)
    return serialize_executable.deserialize_and_load(
        program, taken, given, execution_devices=jax.devices()[:1]
    )


@functools.cache
def _source():
    """A hash of this package's files."""
    root = pathlib.Path(softbottle.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)} {files.sha256(path)}\n".encode())
    return found.hexdigest()
