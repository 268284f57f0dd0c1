"""What a head computes of checked arrays, compiled as a whole.

Called by themselves these are one program each, forward, and one more backward. As
single operations they would be a hundred, each compiled when a new user first takes a
gradient. Inside `jax.jit` they are a part of what is compiled there.

What the programs depend on comes first and is hashed; the arrays follow.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from softbottle.heads import objective
from softbottle.heads.predictions import Predictions
from softbottle.ops.mixture.arrays import Targets, without_padding
from softbottle.ops.mixture.likelihood import times
from softbottle.ops.mixture.options import Options

# params, table_VE and bias_V, as of `Head.loss`.
Output = tuple[dict[str, jax.Array], jax.Array, jax.Array | None]
# The states, the labels as word ids, and a number by token or None.
Tokens = tuple[jax.Array, jax.Array, Any]


class Predicting(Protocol):
    """A head, of which only this is called."""

    def predict(
        self,
        output: Output,
        hidden_TD: jax.Array,
        latent_mask: jax.Array | None,
        options: Options,
        key: jax.Array | None = None,
    ) -> Predictions:
        """See `Head`."""
        ...


@functools.partial(jax.jit, static_argnums=range(5))
def loss(
    head: Predicting,
    terms: objective.Terms,
    options: Options,
    reduction: str,
    argmax: bool,
    output: Output,
    tokens: Tokens,
    latent_mask: jax.Array | None,
    key: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`Head.loss`, and the most probable words [T] if they are asked for.

    Args:
        head: whose loss it is.
        terms: of the loss.
        options: resolved.
        reduction: as of `Head.loss`.
        argmax: whether the words are asked for.
        output: parameters, table and bias.
        tokens: with their weights.
        latent_mask: as of `Head.loss`.
        key: as of `Head.loss`.
    """
    hidden_TD, labels_T, weights_T = tokens
    # A padding token's state may be anything; masked here, it cannot reach the head's
    # own parameters either.
    hidden_TD, weights_T = without_padding(weights_T, (hidden_TD, weights_T))
    predictions = head.predict(output, hidden_TD, latent_mask, options, key)
    # A label of no weight may be no word.
    labels_T = without_padding(weights_T, labels_T)
    argmax_T = None
    if reduction == "none":
        wanted = (labels_T, terms, ("nll",), options)
        nll_T = objective.measure(predictions, *wanted)["nll"]
        value = times(weights_T.astype(nll_T.dtype), nll_T)
    else:
        targets = Targets(labels_T, weights_T)
        total, argmax_T = objective.loss(predictions, targets, terms, options, argmax)
        value = objective.reduced(total, weights_T, reduction)
    if argmax and argmax_T is None:
        argmax_T = _argmax(head, output, hidden_TD, latent_mask, options, key)
    return value, argmax_T


@functools.partial(jax.jit, static_argnums=range(4))
def measure(
    head: Predicting,
    terms: objective.Terms,
    options: Options,
    names: tuple[str, ...],
    output: Output,
    tokens: Tokens,
    latent_mask: jax.Array | None,
) -> dict[str, jax.Array]:
    """`Head.measure`.

    Args:
        head: of which it is asked.
        terms: of the loss.
        options: resolved.
        names: of what is wanted.
        output: parameters, table and bias.
        tokens: with 1 for those that are kept and else 0; None keeps all.
        latent_mask: as of `Head.measure`.
    """
    hidden_TD, labels_T, kept_T = tokens
    if kept_T is not None:
        hidden_TD, labels_T = without_padding(kept_T, (hidden_TD, labels_T))
    predictions = head.predict(output, hidden_TD, latent_mask, options)
    found = {}
    if {"argmax", "accuracy"} & set(names):
        argmax_T = _argmax(head, output, hidden_TD, latent_mask, options)
        accuracy_T = (argmax_T == labels_T).astype(jnp.float32)
        best = {"argmax": argmax_T, "accuracy": accuracy_T}
        found = {name: best[name] for name in best if name in names}
    others = [name for name in names if name not in found]
    if others:
        found |= objective.measure(predictions, labels_T, terms, others, options)
    return found if kept_T is None else without_padding(kept_T, found)


def _argmax(head, output, hidden_TD, latent_mask, options, key=None):
    """The most probable words, in a pass of their own without gradients."""
    frozen = jax.lax.stop_gradient((output, hidden_TD, latent_mask))
    return head.predict(*frozen, options, key).argmax()
