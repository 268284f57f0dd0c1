"""What an implementation of the mixture likelihood is.

Each is a module of this package that ends in an `IMPLEMENTATION`. All equal
reference.py to rounding; a test compares them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.arrays import (
    Elsewhere,
    Mixture,
    Scores,
    Targets,
    Vocabulary,
)
from softbottle.ops.mixture.options import Options

# An array, or what stands for one when only its shape and dtype are asked.
Shaped = jax.Array | jax.ShapeDtypeStruct


class Choice(NamedTuple):
    """What computes a loss, and how many tokens at a time."""

    implementation: str
    block_tokens: int


class Implementation(NamedTuple):
    """The functions of an implementation; their options are resolved.

    Attributes:
        lse: (context_TKE, vocabulary, activation, options) -> the log-normalizers
            [T, K] of every token and component over the local rows of the table. It
            takes any cotangent.
        loss: (mixture, vocabulary, targets, activation, options, elsewhere) -> the
            weighted sum of the tokens' negative log-likelihoods. Padding has been
            cleared.
        loss_and_argmax: as `loss`, of one component and without words elsewhere, -> the
            loss and the most probable word of each token [T]; None where it would take
            a pass of its own.
        choice: (context_TKE, table_VE, activation, options) -> what computes `loss` on
            arrays of these shapes, which an implementation may leave to another.
        scores: (context_TKE, vocabulary, labels_T, activation, options) -> `Scores`,
            which take any cotangents, without entropies.
        entropies: as `scores`, of an activation without parameters, with entropies.
        logits_and_lse: (context_RE, table_PE, bias_P, options) -> float32 logits [R, P]
            and their log-sum-exp [R] in one pass, of bfloat16 inputs, without a
            gradient; None where XLA computes the one from the other.
    """

    lse: Callable[[jax.Array, Vocabulary, Activation, Options], jax.Array]
    loss: Callable[
        [Mixture, Vocabulary, Targets, Activation, Options, Elsewhere | None], jax.Array
    ]
    loss_and_argmax: Callable[
        [Mixture, Vocabulary, Targets, Activation, Options],
        tuple[jax.Array, jax.Array] | None,
    ]
    choice: Callable[[Shaped, Shaped, Activation, Options], Choice]
    scores: Callable[[jax.Array, Vocabulary, jax.Array, Activation, Options], Scores]
    entropies: Callable[[jax.Array, Vocabulary, jax.Array, Activation, Options], Scores]
    logits_and_lse: (
        Callable[
            [jax.Array, jax.Array, jax.Array, Options], tuple[jax.Array, jax.Array]
        ]
        | None
    ) = None
