"""The state of a run, and how a finished run is read.

Beside its checkpoints a run's folder holds

    config.json   every setting; written last, so that without it there is no run
    vocab.txt     one word per line
    corpus.json   sha256 of the vocabulary and of the ids of each split
"""

import dataclasses
import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import optax
from jax.sharding import Mesh

from softbottle import config as config_lib
from softbottle import files, model, sharding
from softbottle.data import corpus as corpus_lib
from softbottle.data.vocab import Corpus, Split, Vocab
from softbottle.model import Params
from softbottle.training import checkpoint


@flax.struct.dataclass
class TrainState:
    """All that a step changes."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    carry: Any


class Run(NamedTuple):
    """A trained model: its config, vocabulary, functions and parameters."""

    config: config_lib.Config
    vocab: Vocab
    model: model.Model
    params: Params
    step: int


def write_run(
    workdir: pathlib.Path,
    config: config_lib.Config,
    vocab: Vocab,
    text: Mapping[str, str] | None = None,
) -> None:
    """Write what `load_run` needs beside the checkpoints, or check that it matches.

    A folder without a single complete checkpoint has nothing that would be lost: what a
    start has left there that did not come so far is replaced.

    Args:
        workdir: the run's folder.
        config: its settings.
        vocab: its words.
        text: hashes of its text by split, as `corpus.digest` gives them.

    Raises:
        ValueError: naming the fields on which this config and the stored one differ,
            that the vocabulary is another, or the files of a text that has changed; if
            the settings of a run are gone, or all that it could resume from; if files
            that are not of a run would be replaced.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    digest = dict(text or {}) | {"vocab": vocab.digest}
    path = workdir / "config.json"
    if _has_steps(workdir):
        if not path.exists():
            raise ValueError(
                f"{workdir} holds trained parameters, and config.json, which says with "
                "which settings, is gone: put it back, or use another --workdir."
            )
        # Read as a config, so that a setting younger than the run has its default.
        _check_same(workdir, config, config_lib.to_dict(load_config(workdir)))
        _check_corpus(workdir, config, vocab, digest)
        # The folder is there from a run's first step on, though it may be empty.
        if not (workdir / "checkpoints").is_dir():
            raise ValueError(
                f"{workdir} holds a trained model and no checkpoints to resume from. "
                "To train on from its parameters, use another --workdir with "
                f"--config.train.init_from={workdir}."
            )
    elif not (workdir / "corpus.json").exists():
        _refuse_foreign(path, workdir / "vocab.txt")
    files.replace(workdir / "corpus.json", json.dumps(digest, indent=2))
    vocab.save(workdir / "vocab.txt")
    files.replace(path, json.dumps(config_lib.to_dict(config), indent=2))


def _refuse_foreign(*paths):
    """Raise ValueError if there is one of them, which a run would replace."""
    for path in paths:
        if path.exists():
            raise ValueError(
                f"{path} is not of a run, which has a corpus.json beside it, and a run "
                "would replace it: use another --workdir."
            )


def load_config(workdir: pathlib.Path) -> config_lib.Config:
    """The settings of a run, as they were before they were validated.

    Raises:
        ValueError: if the folder holds no run, or they are damaged.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise ValueError(f"{workdir} holds no run: there is no config.json in it.")
    return config_lib.from_dict(_json(path))


def load_run(
    workdir: pathlib.Path | str,
    compute_dtype: Literal["float32", "bfloat16"] | None = None,
    mesh: Mesh | None = None,
) -> Run:
    """The model of a run with its best parameters.

    Args:
        workdir: the run's folder.
        compute_dtype: of the model's products; None takes that of its training.
        mesh: where the parameters go; None is the first device.

    Raises:
        ValueError: if the folder holds no run, or a damaged one.
        checkpoint.CheckpointError: if it holds no good parameters.
    """
    workdir = pathlib.Path(workdir)
    config = load_config(workdir)
    config.model.compute_dtype = compute_dtype or config.model.compute_dtype
    config = config_lib.validate(config, trained=True)
    vocab = _stored_vocab(workdir, config.data)
    functions = model.make(config, len(vocab), mesh)
    like = jax.eval_shape(functions.init, jax.random.key(0))
    if mesh is not None:
        like = sharding.with_shardings(like, sharding.shardings(mesh, like))
    params, host = checkpoint.read_newest(workdir / "best", like)
    return Run(config, vocab, functions, params, host["step"])


def load_corpus(
    workdir: pathlib.Path | str, run: Run, *splits: Split, path: str | None = None
) -> Corpus:
    """The corpus of a run, checked to have the run's words and its text of splits.

    Args:
        workdir: the run's folder; of one that was written before runs kept hashes of
            their text, only the words are compared.
        run: what `load_run` gave of it.
        splits: which texts are to be used.
        path: where the corpus is, if not where it was in training.

    Raises:
        ValueError: if words or text are others, naming the files.
    """
    data = dataclasses.replace(run.config.data, path=path or run.config.data.path)
    data = with_own_words(pathlib.Path(workdir), data)
    corpus = corpus_lib.load(data)
    digest, stored = corpus_lib.digest(corpus), text_digest(pathlib.Path(workdir))
    if digest["vocab"] != run.vocab.digest:
        raise ValueError(
            f"the corpus in {data.path!r} has {len(corpus.vocab):,} words that are not "
            f"the {len(run.vocab):,} of the run in {workdir}."
        )
    for split in splits:
        if stored.get(split, digest[split]) != digest[split]:
            names = ", ".join(map(str, corpus_lib.files(data).get(split, [data.name])))
            raise ValueError(
                f"the {split} text is not the one that the run in {workdir} has: "
                f"{names} changed since it was trained."
            )
    return corpus


def with_own_words(workdir: pathlib.Path, data: config_lib.Data) -> config_lib.Data:
    """Where the file of `data.vocab_file` is gone, the words of a trained model."""
    kept = workdir / "vocab.txt"
    if data.vocab_file is None or not kept.exists() or not _has_steps(workdir):
        return data
    if pathlib.Path(data.vocab_file).expanduser().exists():
        return data
    return dataclasses.replace(data, vocab_file=str(kept))


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
    # How it computes, and the settings of a start that is not taken.
    free = ("compute_dtype", "remat", "scan_layers", "bias_start", "table_range")
    how = (*(f"model.{name}" for name in free), "head.budget_mib")
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


def _stored_vocab(workdir, data):
    """The words of a run, checked to be those that it was trained with."""
    vocab = Vocab.load(workdir / "vocab.txt", data.lowercase, data.subwords)
    if text_digest(workdir).get("vocab", vocab.digest) != vocab.digest:
        raise ValueError(
            f"{workdir / 'vocab.txt'} is damaged: it is not the vocabulary that the "
            "run was trained with. Started again, its training writes it anew."
        )
    return vocab


def text_digest(workdir: pathlib.Path) -> dict[str, str]:
    """The hashes of a run's words and text; none if it was written before they were.

    Raises:
        ValueError: if they are damaged.
    """
    path = workdir / "corpus.json"
    return _json(path) if path.exists() else {}


def _has_steps(workdir):
    """Whether there is a complete checkpoint of any kind."""
    kinds = ("checkpoints", "best", "series")
    return any(checkpoint.sealed_steps(workdir / kind) for kind in kinds)


def _json(path):
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object.")
    return value


def _check_corpus(workdir, config, vocab, digest):
    """Raise unless words and text are the run's; a damaged vocab.txt may be mended."""
    stored = text_digest(workdir)
    try:
        on_disk = Vocab.load(workdir / "vocab.txt").digest
    except (OSError, ValueError):
        on_disk = None
    if stored.get("vocab", on_disk) != digest["vocab"]:
        raise ValueError(
            f"the corpus's vocabulary ({len(vocab):,} words) is not the one that "
            f"the run in {workdir} was trained with."
        )
    if on_disk != digest["vocab"]:
        warnings.warn(
            f"{workdir / 'vocab.txt'} was damaged; it is written anew.", stacklevel=4
        )
    if not stored:
        warnings.warn(
            f"{workdir} has no corpus.json: whether the text is that of the run was "
            "not checked. It is written anew.",
            stacklevel=4,
        )
    changed = [
        name for name in digest if stored.get(name, digest[name]) != digest[name]
    ]
    if changed:
        paths = corpus_lib.files(config.data)
        names = [str(path) for name in changed for path in paths.get(name, [])]
        raise ValueError(
            f"the run in {workdir} was trained on another text: {', '.join(changed)} "
            f"changed ({', '.join(names) or config.data.name}). Give the text it was "
            "started with, or another --workdir."
        )


def _check_same(workdir, config, stored):
    """How long a run is and what it prints may change; what it computes may not."""
    # The words themselves are compared, wherever their file lies.
    free = ("train.", "mesh.", "data.path", "data.cache", "data.vocab_file")
    other_start = _names(config.train.init_from) != _names(stored["train"]["init_from"])
    different = [
        line
        for line in config_lib.differences(config, stored)
        if not line.startswith(free)
        or (other_start and line.startswith("train.init_from"))
    ]
    if different:
        raise ValueError(
            f"the run in {workdir} was started with other settings; "
            + "; ".join(different)
            + ". Use another --workdir, or these settings."
        )


def _names(init_from):
    """The last two names of a path, which stay when several runs are moved together."""
    return pathlib.PurePath(init_from or "").parts[-2:]
