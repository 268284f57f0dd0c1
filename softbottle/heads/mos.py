"""Mixture of Softmaxes: P(v) = sum_k prior_k softmax_v(context_k . w_v + b_v).

Each component sees its own context tanh(W_k h + b_k) and the mixture weights are
softmax(U h). The log-probabilities are a log-sum-exp of K rank-d matrices, and a
log-sum-exp of low-rank matrices is not low-rank.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import base
from softbottle.heads.base import Mixture, Params


@dataclasses.dataclass(frozen=True, repr=False)
class MixtureOfSoftmaxes(base.Head):
    """A mixture of `components` softmaxes over one shared vocabulary table.

    Attributes:
        components: K; 1 gives an ordinary softmax with a tanh projection.
    """

    name: ClassVar[str] = "mos"
    components: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        components = base.positive_integer("components", self.components)
        object.__setattr__(self, "components", components)

    @property
    def contexts(self) -> int:
        """K."""
        return self.components

    @property
    def projects(self) -> bool:
        """Each context is a projection of the state."""
        return True

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """`prior_DK`, `latent_DKE` and `latent_bias_KE`; see `Head.init`."""
        return init_latent(key, self.components, hidden_dim, context_dim)

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """log softmax(h U) and tanh(h W_k + b_k); see `Head.mix`."""
        return mix_latent(params, hidden_TD, latent_mask)


def mos(components: int) -> MixtureOfSoftmaxes:
    """A mixture of `components` softmaxes over one shared vocabulary table.

    Args:
        components: K; 1 gives an ordinary softmax with a tanh projection.

    Raises:
        ValueError: if `components` is not a positive integer.
    """
    return MixtureOfSoftmaxes(components)


@dataclasses.dataclass(frozen=True, repr=False)
class PlainOrMixed(base.Head):
    """A head with a g of its own, plain or mixed.

    Attributes:
        components: K of a mixture with the projections of a mixture of softmaxes; None
            for a single component that reads the hidden state as its context.
    """

    components: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.components is not None:
            components = base.positive_integer("components", self.components)
            object.__setattr__(self, "components", components)

    @property
    def contexts(self) -> int:
        """K, or 1."""
        return self.components or 1

    @property
    def projects(self) -> bool:
        """The contexts of a mixture are projections of the state."""
        return self.components is not None

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """Those of a mixture of softmaxes, or none; see `Head.init`."""
        self.check_widths(hidden_dim, context_dim)
        if self.components is None:
            return {}
        return init_latent(key, self.components, hidden_dim, context_dim)

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """As a mixture of softmaxes, or the state itself; see `Head.mix`."""
        if self.components is None:
            return base.single(hidden_TD, latent_mask)
        return mix_latent(params, hidden_TD, latent_mask)


def init_latent(
    key: jax.Array, components: int, hidden_dim: int, context_dim: int
) -> Params:
    """Parameters of the prior and of the contexts, started as PyTorch's Linear."""
    prior_key, latent_key, bias_key = jax.random.split(key, 3)
    latent_shape = (hidden_dim, components, context_dim)
    return {
        "prior_DK": base.uniform(prior_key, (hidden_dim, components), hidden_dim),
        "latent_DKE": base.uniform(latent_key, latent_shape, hidden_dim),
        "latent_bias_KE": base.uniform(bias_key, latent_shape[1:], hidden_dim),
    }


def mix_latent(
    params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
) -> Mixture:
    """log softmax(h U) and tanh(h W_k + b_k), the latter masked after the tanh."""
    wide = jnp.promote_types(hidden_TD.dtype, jnp.float32)
    prior_TK = jnp.einsum(
        "td,dk->tk",
        hidden_TD,
        params["prior_DK"].astype(hidden_TD.dtype),
        preferred_element_type=wide,
    )
    latent_TKE = jnp.einsum(
        "td,dke->tke", hidden_TD, params["latent_DKE"].astype(hidden_TD.dtype)
    )
    bias_KE = params["latent_bias_KE"].astype(hidden_TD.dtype)
    context_TKE = jnp.tanh(latent_TKE + bias_KE[None])
    return Mixture(jax.nn.log_softmax(prior_TK), base.masked(context_TKE, latent_mask))
