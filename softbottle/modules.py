"""Heads as modules, for models written in flax.linen or flax.nnx.

They own the table and the bias, take hidden states of any leading shape and hand
everything else to the head. For tied embeddings, or a vocabulary-parallel table, call
the head's pure functions yourself.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from softbottle.heads import Head
from softbottle.ops.mixture.options import DEFAULTS, Options


class _Calls:
    """What both modules answer, through a method of their own, `_call`."""

    def _call(
        self, name: str, hidden_TD: jax.Array, *arguments: Any, **named: Any
    ) -> jax.Array:
        """The head's method of that name, with the module's own parameters."""
        raise NotImplementedError

    def __call__(
        self,
        hidden: jax.Array,
        labels: jax.Array,
        weights: jax.Array | None = None,
        **terms: Any,
    ) -> jax.Array:
        """The weighted sum of the tokens' negative log-likelihoods, a scalar.

        `terms` are those of `Head.loss`: `label_smoothing`, `ignore_label` and so on.
        """
        return _loss(self._call, "loss", hidden, labels, weights, terms)

    def loss_and_argmax(
        self,
        hidden: jax.Array,
        labels: jax.Array,
        weights: jax.Array | None = None,
        **terms: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """The loss, and the most probable word for each label, in their shape."""
        both = _loss(self._call, "loss_and_argmax", hidden, labels, weights, terms)
        return both[0], both[1].reshape(labels.shape)

    def nll(self, hidden: jax.Array, labels: jax.Array, **terms: Any) -> jax.Array:
        """-log P(label), in the shape of the labels; `terms` as of `Head.nll`."""
        _check_shapes(hidden, labels=labels)
        return _by_token(self._call, "nll", hidden, labels.reshape(-1), **terms)

    def log_probs(self, hidden: jax.Array) -> jax.Array:
        """Log P(v) of every word, on a new last axis."""
        return _by_token(self._call, "log_probs", hidden)

    def sample(self, hidden: jax.Array, key: jax.Array, **sampling: Any) -> jax.Array:
        """One word for each hidden state.

        `sampling` as of `Head.sample`: `temperature`, `top_k` and so on.
        """
        return _by_token(self._call, "sample", hidden, key, **sampling)


class LinenHead(_Calls, nn.Module):
    """An output head as a linen module.

    >>> head = LinenHead(softbottle.mos(components=8), vocab=100, context_dim=16)
    >>> hidden, labels = jnp.ones((2, 5, 32)), jnp.zeros((2, 5), jnp.int32)
    >>> variables = head.init(jax.random.key(0), hidden, labels)
    >>> loss = head.apply(variables, hidden, labels) / labels.size
    >>> next_ids = head.apply(variables, hidden, jax.random.key(1), method="sample")

    Attributes:
        head: any of softbottle's heads.
        vocab: how many words there are.
        context_dim: width of the table.
        bias: whether words have a bias.
        options: how its operations are computed.
        bias_init: what the bias starts at. The words' log-frequencies are better than
            zeros: `constant(head.start_bias(counts))` of jax's initializers.
    """

    head: Head
    vocab: int
    context_dim: int
    bias: bool = True
    options: Options = DEFAULTS
    bias_init: nn.initializers.Initializer = nn.initializers.zeros

    @nn.compact
    def _call(
        self, name: str, hidden_TD: jax.Array, *arguments: Any, **named: Any
    ) -> jax.Array:
        start = nn.initializers.normal(self.context_dim**-0.5)
        table_VE = self.param("table_VE", start, (self.vocab, self.context_dim))
        bias_V = None
        if self.bias:
            bias_V = self.param("bias_V", self.bias_init, (self.vocab,))
        width = hidden_TD.shape[-1]
        params = self.param("head", self.head.init, width, self.context_dim)
        function = getattr(self.head, name)
        output, named = (params, table_VE, bias_V), {"options": self.options} | named
        return function(*output, hidden_TD, *arguments, **named)


class NnxHead(_Calls, nnx.Module):
    """An output head as an nnx module.

    >>> head = NnxHead(softbottle.mos(components=8), 32, vocab=100, context_dim=16,
    ...                rngs=nnx.Rngs(0))
    >>> hidden, labels = jnp.ones((2, 5, 32)), jnp.zeros((2, 5), jnp.int32)
    >>> loss = head(hidden, labels) / labels.size
    >>> next_ids = head.sample(hidden, jax.random.key(1))

    Args:
        head: any of softbottle's heads.
        hidden_dim: width of the states it will read.
        vocab: how many words there are.
        context_dim: width of the table.
        bias: whether words have a bias.
        rngs: `rngs.params()` starts the parameters.
        options: how its operations are computed.
        bias_init: what the bias starts at, as of `LinenHead`.
    """

    def __init__(
        self,
        head: Head,
        hidden_dim: int,
        *,
        vocab: int,
        context_dim: int,
        bias: bool = True,
        rngs: nnx.Rngs,
        options: Options = DEFAULTS,
        bias_init: nnx.Initializer = nn.initializers.zeros,
    ):
        scale = context_dim**-0.5
        table_VE = scale * jax.random.normal(rngs.params(), (vocab, context_dim))
        self.head, self.options = head, options
        self.table_VE = nnx.Param(table_VE)
        params = head.init(rngs.params(), hidden_dim, context_dim)
        self.params = nnx.Dict({name: nnx.Param(leaf) for name, leaf in params.items()})
        self.bias_V = nnx.Param(bias_init(rngs.params(), (vocab,))) if bias else None

    def _call(
        self, name: str, hidden_TD: jax.Array, *arguments: Any, **named: Any
    ) -> jax.Array:
        params = {name: leaf[...] for name, leaf in self.params.items()}
        bias_V = None if self.bias_V is None else self.bias_V[...]
        function = getattr(self.head, name)
        output = (params, self.table_VE[...], bias_V)
        named = {"options": self.options} | named
        return function(*output, hidden_TD, *arguments, **named)


def _loss(call, name, hidden, labels, weights, terms):
    if terms.get("reduction") == "none":
        raise ValueError("reduction='none' is `nll`, times the weights.")
    weights = jnp.ones(labels.shape) if weights is None else weights
    _check_shapes(hidden, labels=labels, weights=weights)
    return call(name, _flat(hidden), labels.reshape(-1), weights.reshape(-1), **terms)


def _by_token(call, name, hidden, *arguments, **named):
    result = call(name, _flat(hidden), *arguments, **named)
    return result.reshape(*hidden.shape[:-1], *result.shape[1:])


def _check_shapes(hidden, **by_token):
    """Raise ValueError unless these have the states' leading axes."""
    for name, array in by_token.items():
        if array.shape != hidden.shape[:-1]:
            raise ValueError(
                f"{name} must have the shape {hidden.shape[:-1]} of the states "
                f"{hidden.shape} before their width, got {array.shape}."
            )


def _flat(hidden):
    return hidden.reshape(-1, hidden.shape[-1])
