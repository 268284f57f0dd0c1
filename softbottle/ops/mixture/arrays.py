"""The arrays that travel together through the operations."""

from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


class Mixture(NamedTuple):
    """Mixture weights and component contexts of every token.

    Words may be in classes, word v in class v mod N, each with contexts of its own:
    then there is an axis more, [T, N, K, E]. classes.py has the rest of it.
    """

    log_prior_TK: jax.Array
    context_TKE: jax.Array


class Vocabulary(NamedTuple):
    """A row and a logit of its own for each word."""

    table_VE: jax.Array
    bias_V: jax.Array

    @classmethod
    def of(cls, table_VE: jax.Array, bias_V: jax.Array | None) -> Self:
        """The pair; without a bias it is zero."""
        if bias_V is None:
            bias_V = jnp.zeros(len(table_VE), table_VE.dtype)
        return cls(table_VE, bias_V)


class Targets(NamedTuple):
    """The words that follow, and what each counts.

    Attributes:
        labels_T: the words.
        weights_T: of the tokens; one of weight 0 is padding.
        z_weights_T: of the squares of the tokens' log-normalizers, averaged over the
            components, which the loss adds; None for none.
        score_weights_T: of the label's scores, summed over the components, which the
            loss adds; None for none.
    """

    labels_T: jax.Array
    weights_T: jax.Array
    z_weights_T: jax.Array | None = None
    score_weights_T: jax.Array | None = None


class Elsewhere(NamedTuple):
    """What words outside the table add to each token: they share its normalizers.

    Attributes:
        score_TK: the label's score, read where the label is one of them.
        lse_TK: the log-sum-exp of their scores.
        owned_T: whether the label is one of them; the table's own label, which then
            may be any word of it, is not read.
    """

    score_TK: jax.Array
    lse_TK: jax.Array
    owned_T: jax.Array


class Scores(NamedTuple):
    """What an implementation says of each token and component, [T, K] all.

    The three have one gradient: where a label is nearly sure, what it adds to the
    normalizer and its own score nearly cancel, and would not if each were rounded.

    Attributes:
        own_TK: g(z) of the label, 0 where none of the local rows is it; None if there
            are no labels.
        lse_TK: the log-normalizers over the local rows.
        entropy_TK: the entropy over the local rows; None unless it is asked for.
    """

    own_TK: Any
    lse_TK: jax.Array
    entropy_TK: Any = None


def without_padding(weights: jax.Array, tree: Tree) -> Tree:
    """The tree with zeros where the weight is 0, and no gradient there.

    Padding may hold anything, even NaN. Cleared before it is read it cannot reach a
    result or a gradient: its weight is 0, and 0 times a finite number is 0.

    Args:
        weights: of the tokens, of any leading axes.
        tree: arrays that begin with the axes of the weights.
    """

    def clear(array):
        array = jnp.asarray(array)
        trailing = (1,) * (array.ndim - weights.ndim)
        kept = (weights != 0).reshape(*weights.shape, *trailing)
        return jnp.where(kept, array, jnp.zeros((), array.dtype))

    return jax.tree.map(clear, tree)
