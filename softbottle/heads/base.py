"""What a head is: three pure functions, from which everything else is derived once.

    init(key, hidden_dim, context_dim) -> params
    mix(params, hidden_TD, latent_mask) -> Mixture(log_prior_TK, context_TKE)
    activation(params) -> Activation

The model owns the vocabulary table and its bias and hands them to every call, because
the same table usually embeds the input, may be split over devices and is where the
memory goes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import ops
from softbottle.ops.mixture.activations import SOFTMAX, Activation
from softbottle.ops.mixture.options import check_range


class Mixture(NamedTuple):
    """Mixture weights and component contexts of every token."""

    log_prior_TK: jax.Array
    context_TKE: jax.Array


class Head(NamedTuple):
    """An output layer as pure functions; hashable, so it may be a static argument.

    Every call after `init`, `mix` and `activation` takes `(params, table_VE, bias_V,
    hidden_TD, ...)`, a keyword `latent_mask` that broadcasts to the contexts [T, K, E],
    and the options of ops/mixture/options.py. Labels are integers of any kind; floating
    arrays are bfloat16, float32 or float64.
    """

    init: Callable[..., Any]
    mix: Callable[..., Mixture]
    activation: Callable[[Any], Activation]
    loss: Callable[..., jax.Array]
    nll: Callable[..., jax.Array]
    log_probs: Callable[..., jax.Array]
    top_k: Callable[..., tuple[jax.Array, jax.Array]]
    sample: Callable[..., jax.Array]


def softmax_activation(params: Any) -> Activation:
    """g(z) = z, whatever the parameters."""
    del params
    return SOFTMAX


def mixture_head(
    init: Callable[..., Any],
    mix: Callable[..., Mixture],
    activation: Callable[[Any], Activation] = softmax_activation,
) -> Head:
    """A head from its three functions."""

    def parts(params, hidden_TD, latent_mask):
        if hidden_TD.ndim != 2:
            raise ValueError(
                f"hidden_TD must be [tokens, width], got the shape {hidden_TD.shape}; "
                "flatten rows and positions first."
            )
        check_range(params=params, hidden_TD=hidden_TD)
        return *mix(params, hidden_TD, latent_mask), activation(params)

    def loss(
        params,
        table_VE,
        bias_V,
        hidden_TD,
        labels_T,
        weights_T,
        *,
        latent_mask=None,
        **options,
    ):
        """sum_t weight[t] nll[t]; the gradient is computed in forward.

        A token of weight 0 may hold anything, even NaN, and therefore adds nothing to
        any gradient. That by its own weight is 0 as well; by another weight it is
        nll[t].
        """
        if weights_T.shape != hidden_TD.shape[:1]:
            raise ValueError(
                f"weights_T must have a weight for each of the {hidden_TD.shape[0]} "
                f"tokens of hidden_TD {hidden_TD.shape}, got {weights_T.shape}."
            )
        # A padding token's state may be anything; masked here, it cannot reach the
        # head's own parameters either.
        hidden_TD = jnp.where((weights_T != 0)[:, None], hidden_TD, 0.0)
        log_prior_TK, context_TKE, g = parts(params, hidden_TD, latent_mask)
        tokens = (labels_T, weights_T)
        return ops.loss(
            log_prior_TK, context_TKE, table_VE, bias_V, *tokens, g, **options
        )

    def nll(
        params, table_VE, bias_V, hidden_TD, labels_T, *, latent_mask=None, **options
    ):
        """-log P(label) of each token, [T]; takes any cotangent."""
        log_prior_TK, context_TKE, g = parts(params, hidden_TD, latent_mask)
        return ops.nll(
            log_prior_TK, context_TKE, table_VE, bias_V, labels_T, g, **options
        )

    def log_probs(params, table_VE, bias_V, hidden_TD, *, latent_mask=None, **options):
        """log P(v) of every word, [T, V]."""
        log_prior_TK, context_TKE, g = parts(params, hidden_TD, latent_mask)
        return ops.log_probs(log_prior_TK, context_TKE, table_VE, bias_V, g, **options)

    def top_k(params, table_VE, bias_V, hidden_TD, k, *, latent_mask=None, **options):
        """(log-probabilities, ids) of the k most probable words, [T, k]."""
        log_prior_TK, context_TKE, g = parts(params, hidden_TD, latent_mask)
        return ops.top_k(log_prior_TK, context_TKE, table_VE, bias_V, k, g, **options)

    def sample(
        params, table_VE, bias_V, hidden_TD, key, *, latent_mask=None, **options
    ):
        """One word a token, drawn exactly, [T]."""
        log_prior_TK, context_TKE, g = parts(params, hidden_TD, latent_mask)
        return ops.sample(
            log_prior_TK, context_TKE, table_VE, bias_V, key, g, **options
        )

    return Head(init, mix, activation, loss, nll, log_probs, top_k, sample)


def single(hidden_TD: jax.Array, latent_mask: jax.Array | None) -> Mixture:
    """One component whose context is the hidden state itself."""
    context_T1E = masked(hidden_TD[:, None, :], latent_mask)
    return Mixture(jnp.zeros(context_T1E.shape[:2], context_T1E.dtype), context_T1E)


def masked(context_TKE: jax.Array, latent_mask: jax.Array | None) -> jax.Array:
    """The contexts times a dropout mask, if there is one."""
    if latent_mask is None:
        return context_TKE
    return context_TKE * jnp.broadcast_to(
        latent_mask.astype(context_TKE.dtype), context_TKE.shape
    )


def uniform(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Uniform in plus or minus 1/sqrt(fan_in), as PyTorch's Linear starts."""
    bound = fan_in**-0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def check_components(components: int) -> None:
    """Raise unless the number of components is a positive integer."""
    if not isinstance(components, int | np.integer) or components < 1:
        raise ValueError(f"components must be an integer >= 1, got {components!r}.")


def check_same_width(name: str, hidden_dim: int, context_dim: int) -> None:
    """Raise unless the hidden state can be the context."""
    if hidden_dim != context_dim:
        raise ValueError(
            f"{name} reads the hidden state as the context, so hidden_dim="
            f"{hidden_dim} must equal context_dim={context_dim}."
        )
