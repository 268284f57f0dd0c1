"""Words in blocks: classes v mod N, each with contexts of its own.

The log-normalizer over a vocabulary is the log-sum-exp of those over any blocks of it,
whoever computes them. A mesh shard is such a block (shards.py), and so is the class of
the words v = n mod N: words are usually sorted by frequency, so that neighbors land in
different classes and every class has words of all frequencies.

A class is a vocabulary like any other: its words are rows n, n + N, ... of the table,
and word v is its word v // N, on a shard as well if the shard's rows are a multiple of
N.

Axes: N classes of words.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import shards
from softbottle.ops.mixture.activations import DEAD, Activation
from softbottle.ops.mixture.arrays import Scores, Vocabulary
from softbottle.ops.mixture.implementation import Shaped
from softbottle.ops.mixture.options import Options


def count(context: Shaped) -> int:
    """N, 1 for contexts [T, K, E]."""
    return 1 if len(context.shape) == 3 else context.shape[1]


def of(
    context: jax.Array, vocabulary: Vocabulary, options: Options
) -> list[tuple[jax.Array, Vocabulary, Options]]:
    """Contexts [T, K, E], words and options of every class."""
    if len(context.shape) == 3:
        return [(context, vocabulary, options)]
    classes, rows = count(context), len(vocabulary.table_VE)
    return [
        (
            context[:, n],
            jax.tree.map(lambda array, n=n: array[n::classes], vocabulary),
            _own_options(options, rows, n, classes),
        )
        for n in range(classes)
    ]


def _own_options(options: Options, rows: int, n: int, classes: int) -> Options:
    """The options for class n of a local table of so many rows."""
    if classes == 1:
        return options
    words = shards.word_count(rows, options)
    return dataclasses.replace(options, vocab=-(-(words - n) // classes))


def check(context: Shaped, table_VE: Shaped, options: Options) -> None:
    """Raise ValueError unless every class has a word, and the same rows of a shard."""
    classes, rows = count(context), table_VE.shape[0]
    words = shards.word_count(rows, options)
    if classes > words:
        raise ValueError(f"{classes} classes are more than the {words} words.")
    if options.vocab_axis is not None and rows % classes:
        raise ValueError(
            f"{classes} classes of words do not divide the {rows} rows of a shard; "
            "make the table's rows a multiple of both (model.vocab_multiple)."
        )


def of_label(context: jax.Array, labels_T: jax.Array) -> jax.Array:
    """The contexts that a token's label meets, [T, K, E]."""
    if len(context.shape) == 3:
        return context
    class_T111 = (labels_T % count(context))[:, None, None, None]
    return jnp.take_along_axis(context, class_T111, axis=1)[:, 0]


def lse(
    of_class: Callable[[jax.Array, Vocabulary, Activation, Options], jax.Array],
    context: jax.Array,
    vocabulary: Vocabulary,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """Log-normalizers [T, K] over the local rows from those over each class."""
    each = [
        of_class(context_TKE, words, activation, own)
        for context_TKE, words, own in of(context, vocabulary, options)
    ]
    return joint_lse(each)


def scores(
    of_class: Callable[..., Scores],
    context: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation,
    options: Options,
) -> Scores:
    """The label's score and log-normalizers over the local rows, as `lse` has these."""
    classes, each = count(context), []
    for n, (context_TKE, words, own) in enumerate(of(context, vocabulary, options)):
        own_T = labels_T
        if classes > 1:
            own_T = jnp.where(labels_T % classes == n, labels_T // classes, -1)
        each.append(of_class(context_TKE, words, own_T, activation, own))
    own_TK = sum(found.own_TK for found in each)
    return Scores(own_TK, joint_lse([found.lse_TK for found in each]))


def joint_lse(each: Sequence[jax.Array]) -> jax.Array:
    """Log-normalizers over all classes from those over each, [T, K]."""
    if len(each) == 1:
        return each[0]
    # Of a shard without a word that has a probability all are -inf, whose log-sum-exp
    # has no derivative.
    return jax.nn.logsumexp(jnp.maximum(jnp.stack(each), DEAD), axis=0)


def split(rows_V: jax.Array, classes: int, size: int, fill: float = 0.0) -> jax.Array:
    """Rows of the table by class, [N, size, ...], filled up."""
    most = -(-len(rows_V) // classes)
    filled = _filled(rows_V, most * classes, fill)
    by_class = jnp.moveaxis(filled.reshape(most, classes, *rows_V.shape[1:]), 1, 0)
    return _filled(by_class, size, fill, axis=1)


def unsplit(by_class: jax.Array, rows: int) -> jax.Array:
    """The first rows of the table from what `split` gives."""
    most = -(-rows // len(by_class))
    stacked = jnp.moveaxis(by_class[:, :most], 0, 1)
    return stacked.reshape(most * len(by_class), *stacked.shape[2:])[:rows]


def joined(by_class: Sequence[jax.Array]) -> jax.Array:
    """Rows in the order of the table from those of every class."""
    most = len(by_class[0])
    stacked = jnp.stack([_filled(array, most, 0) for array in by_class])
    return unsplit(stacked, sum(map(len, by_class)))


def of_class(array_NC: jax.Array, labels_C: jax.Array) -> jax.Array:
    """Of an array by class and token, what is of the class of each token's label."""
    if len(array_NC) == 1:
        return array_NC[0]
    return array_NC[labels_C % len(array_NC), jnp.arange(len(labels_C))]


def _filled(array, size, fill, axis=0):
    beyond = [(0, 0)] * array.ndim
    beyond[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, beyond, constant_values=fill)
