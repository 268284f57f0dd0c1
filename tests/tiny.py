"""The smallest models and runs, and how a test changes them."""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import config as configs
from softbottle import model as models
from softbottle.data import synthetic
from softbottle.data.vocab import Corpus, Vocab
from softbottle.training import checkpoint, state


def make_config(**fields: Any) -> configs.Config:
    """A window model under MoS on a language of 11 words, trained in seconds.

    Args:
        fields: what is to be different, named like train__steps=7.
    """
    config = configs.Config()
    data, language = config.data, config.data.synthetic
    language.words, language.train_tokens, language.eval_tokens = 11, 331, 101
    data.rows, data.length = 4, 5
    data.eval_rows, data.test_rows, data.eval_length = 3, 3, 17
    config.head.name, config.head.components = "mos", 2
    config.model.backbone, config.model.tied = "window", False
    config.model.embed_dim = config.model.hidden_dim = 5
    config.model.context_dim, config.model.last_dim = 3, 7
    config.train.steps, config.train.eval_every = 10, 5
    config.train.checkpoint_every, config.train.log_every = 5, 1
    config = change(config, **fields)
    if config.head.components:
        # Contexts that differ before anything is trained.
        config.head.context = config.head.context or "tanh"
    return config


def make_softmax(backbone: str, width: int, **fields: Any) -> configs.Config:
    """A tied softmax over one layer, `width` everywhere, with a table of size 1."""
    widths = ("embed_dim", "hidden_dim", "last_dim")
    settings = {f"model__{name}": width for name in widths} | {
        "head__name": "softmax",
        "model__backbone": backbone,
        "model__attention_heads": 1,
        "model__table_range": 1.0,
    }
    return change(configs.Config(), **(settings | fields))


def change(config: configs.Config, **fields: Any) -> configs.Config:
    """The config itself, with fields set that are named like train__steps=7."""
    for path, value in fields.items():
        *sections, field = path.split("__")
        setattr(functools.reduce(getattr, sections, config), field, value)
    return config


def draw(shapes: Any, seed: int = 0) -> Any:
    """Arrays of these shapes that numpy draws: nothing is compiled to have them."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (0.4 * random.standard_normal(leaf.shape)).astype(leaf.dtype),
        shapes,
    )


def make_words(count: int) -> Vocab:
    """The end of a line and w1, w2, ..."""
    return Vocab(("<eos>", *(f"w{index}" for index in range(1, count))))


def make_run(
    config: configs.Config, vocab: Vocab, seed: int = 0, scale: float = 1.0
) -> state.Run:
    """A run at its beginning, with random parameters.

    Times a `scale` of 2, what they say depends on more than the last word.
    """
    functions = models.make(configs.validate(config), len(vocab))
    params = jax.jit(functions.init)(jax.random.key(seed))
    if scale != 1.0:
        params = jax.tree.map(
            lambda leaf: jnp.asarray(scale * np.asarray(leaf)), params
        )
    return state.Run(config, vocab, functions, params, 0)


def draw_run(config: configs.Config, vocab: Vocab, seed: int = 0) -> state.Run:
    """A run at its beginning, with parameters that numpy draws.

    They are so large that what they say depends on more than the last word.
    """
    functions = models.make(configs.validate(config), len(vocab))
    shapes = jax.eval_shape(functions.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: 2 * leaf, draw(shapes, seed))
    return state.Run(config, vocab, functions, jax.device_put(params), 0)


def make_narrow_run(
    head: str, components: int, words: int, width: int, **fields: Any
) -> tuple[state.Run, Corpus]:
    """A run whose contexts are `width` wide, on a language of `words`, and its text."""
    settings = {
        "head__name": head,
        "head__components": components if components > 1 else None,
        "data__synthetic__words": words,
        "model__context_dim": width,
        "model__last_dim": width,
        "model__table_range": 1.0,
    }
    config = make_config(**(settings | fields))
    text = synthetic.corpus(config.data.synthetic)
    return make_run(config, text.vocab), text


def write_run(workdir: pathlib.Path, run: state.Run, step: int = 1) -> None:
    """What training leaves, with the run's parameters as the best."""
    state.write_run(workdir, run.config, run.vocab)
    best = checkpoint.Checkpoints(workdir / "best", keep=1)
    best.save(step, run.params, {"step": step, "valid_loss": 1.5})
    best.close()
