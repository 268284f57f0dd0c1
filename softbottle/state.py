"""The state of a run, and the one door through which a finished run is read."""

import json
import pathlib
from typing import Any, NamedTuple

import flax.struct
import jax
from jax.sharding import Mesh

from softbottle import checkpoint, model, sharding
from softbottle import config as config_lib
from softbottle.data.vocab import Vocab


@flax.struct.dataclass
class TrainState:
    """All that a step changes."""

    step: jax.Array
    params: Any
    opt_state: Any
    carry: Any


class Run(NamedTuple):
    """A trained model: its config, vocabulary, functions and parameters."""

    config: config_lib.Config
    vocab: Vocab
    model: model.Model
    params: Any
    step: int


def write_run(workdir: pathlib.Path, config: config_lib.Config, vocab: Vocab) -> None:
    """Write what `load_run` needs beside the checkpoints, or check that it matches.

    Raises:
        ValueError: naming the fields on which this config and the stored one differ,
            or that the vocabulary is another.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / "config.json"
    if path.exists():
        # Read as a config, so that a setting younger than the run has its default.
        stored = config_lib.to_dict(config_lib.from_dict(json.loads(path.read_text())))
        _check_same(workdir, config, stored)
        if Vocab.load(workdir / "vocab.txt").digest != vocab.digest:
            raise ValueError(
                f"the corpus's vocabulary ({len(vocab):,} words) is not the one that "
                f"the run in {workdir} was trained with."
            )
    vocab.save(workdir / "vocab.txt")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(config_lib.to_dict(config), indent=2))
    temporary.replace(path)


def load_run(
    workdir: pathlib.Path | str,
    compute_dtype: str | None = None,
    mesh: Mesh | None = None,
) -> Run:
    """The model of a run with its best parameters.

    Args:
        workdir: the run's folder.
        compute_dtype: of the model's products; None takes that of its training.
        mesh: where the parameters go; None is the first device.

    Raises:
        ValueError: if the folder holds no run.
    """
    workdir = pathlib.Path(workdir)
    path = workdir / "config.json"
    if not path.exists():
        raise ValueError(f"{workdir} holds no run: there is no config.json in it.")
    config = config_lib.from_dict(json.loads(path.read_text()))
    config.model.compute_dtype = compute_dtype or config.model.compute_dtype
    config = config_lib.validate(config)
    vocab = Vocab.load(workdir / "vocab.txt", config.data.lowercase)
    functions = model.make(config, len(vocab), mesh)
    like = jax.eval_shape(functions.init, jax.random.key(0))
    if mesh is not None:
        like = sharding.placed(like, sharding.place(mesh, like))
    params, host = checkpoint.read_newest(workdir / "best", like)
    return Run(config, vocab, functions, params, host["step"])


def check_same_model(run: Run, config: config_lib.Config, vocab: Vocab) -> None:
    """Raise unless a run's parameters mean the same under another config.

    Raises:
        ValueError: naming the fields that differ, or the vocabulary.
    """
    if run.vocab.digest != vocab.digest:
        raise ValueError(
            f"the run to start from knows {len(run.vocab):,} words that are not the "
            f"{len(vocab):,} of this corpus."
        )
    how = ("model.compute_dtype", "model.remat", "model.scan_layers", "head.budget_mib")
    different = [
        line
        for line in config_lib.differences(config, config_lib.to_dict(run.config))
        if line.startswith(("model.", "head."))
        and not line.startswith((*how, "head.implementation"))
    ]
    if different:
        raise ValueError(
            "the run to start from is another model; " + "; ".join(different)
        )


def _check_same(workdir, config, stored):
    """How long a run is and what it prints may change; what it computes may not."""
    free = ("train.", "mesh.", "data.path", "data.cache")
    different = [
        line
        for line in config_lib.differences(config, stored)
        if not line.startswith(free)
    ]
    if different:
        raise ValueError(
            f"the run in {workdir} was started with other settings; "
            + "; ".join(different)
            + ". Use another --workdir, or these settings."
        )
