"""Mixture of Softmaxes: P(v) = sum_k prior_k softmax_v(context_k . w_v + b_v).

Each component sees a context of its own (contexts.py, which has the prior too). The
log-probabilities are a log-sum-exp of K rank-d matrices, and a log-sum-exp of low-rank
matrices is not low-rank.

With `active` = k, a token meets the table with k of its K contexts. All K are made,
which is cheap: D E multiplications each, against E V for a product with the table. The
k of largest prior are taken; or in training, with `draw`, the k - 1 of largest prior
and one of the others, drawn by its prior and weighted with that of all others. The mean
of P over the draws is the whole mixture, so that every component goes on learning.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import base, checks, contexts
from softbottle.heads.base import Mixture, Params


@dataclasses.dataclass(frozen=True, repr=False)
class Mixed(contexts.Projecting):
    """A head whose contexts are mixed by a learned prior.

    Attributes:
        components: K.
        context: how the contexts are made, one of contexts.KINDS.
    """

    components: int

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self._check_positive("components")

    @property
    def contexts(self) -> int:
        """K."""
        return self.components

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """`prior_DK` and the contexts' parameters; see `Head.init`."""
        return init_latent(key, self.context, self.components, hidden_dim, context_dim)

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The prior and the contexts; see `Head.mix`."""
        return mix_latent(self.context, params, hidden_TD, latent_mask)

    def log_prior(self, params: Params, hidden_TD: jax.Array) -> jax.Array:
        """That of all K, however many are active or averaged; see `Head.log_prior`."""
        return contexts.log_prior(self.context, params, hidden_TD)


@dataclasses.dataclass(frozen=True, repr=False)
class MixtureOfSoftmaxes(Mixed):
    """A mixture of `components` softmaxes over one shared vocabulary table.

    Attributes:
        components: K; 1 gives an ordinary softmax of one context.
        context: how the contexts are made, one of contexts.KINDS.
        active: k, components that a token meets the table with: those of largest prior,
            which is normalized over them. None is all. The parameters are the same for
            every k, so that a model may be trained with one and evaluated with another.
        draw: whether `loss`, given a key, draws one of the active components.
    """

    name: ClassVar[str] = "mos"
    active: int | None = dataclasses.field(default=None, kw_only=True)
    draw: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.active is None:
            if self.draw:
                raise ValueError("draw is for a mixture some of which is active.")
            return
        self._check_positive("active")
        if self.active > self.components:
            raise ValueError(
                f"active must be at most components={self.components}, got "
                f"{self.active}."
            )

    @property
    def products(self) -> int:
        """One for each component that is active."""
        return self.active or self.components

    @property
    def draws(self) -> bool:
        """Whether `loss` draws one of the active components."""
        return self.draw

    def components_of(self, params: Params, hidden_TD: jax.Array) -> jax.Array | None:
        """The active ones, those of largest prior first; see `Head.components_of`."""
        if self.active is None:
            return None
        return jax.lax.top_k(self.log_prior(params, hidden_TD), self.active)[1]

    def mix(
        self,
        params: Params,
        hidden_TD: jax.Array,
        latent_mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> Mixture:
        """The prior and the contexts, of the active ones; see `Head.mix`."""
        log_prior_TK, context_TKE = super().mix(params, hidden_TD, latent_mask)
        if self.active is None:
            return Mixture(log_prior_TK, context_TKE)
        if key is None:
            log_prior_Tk, place_Tk = jax.lax.top_k(log_prior_TK, self.active)
            log_prior_Tk = jax.nn.log_softmax(log_prior_Tk)
        else:
            log_prior_Tk, place_Tk = _drawn(log_prior_TK, self.active, key)
        context_TkE = jnp.take_along_axis(context_TKE, place_Tk[:, :, None], axis=1)
        return Mixture(log_prior_Tk, context_TkE)


@checks.factory
def mos(
    components: int,
    context: str = contexts.DEFAULT,
    *,
    active: int | None = None,
    draw: bool = False,
) -> MixtureOfSoftmaxes:
    """A mixture of `components` softmaxes over one shared vocabulary table.

    Args:
        components: K; 1 gives an ordinary softmax of one context.
        context: "residual", h P + tanh(x W_k + b_k) with x = h / (4 |h|); "linear",
            h P + x W_k + b_k; or "tanh", tanh(h W_k + b_k), as the paper has it.
        active: k, components that a token meets the table with; None is all.
        draw: whether `loss`, given a key, draws one of them.

    Raises:
        ValueError: if `components` is not a positive integer, `active` not one of at
            most `components`, `draw` is without it, or there is no such kind of
            context.
    """
    return MixtureOfSoftmaxes(components, context=context, active=active, draw=draw)


@dataclasses.dataclass(frozen=True, repr=False)
class PlainOrMixed(base.Head):
    """A head with a g of its own, plain or mixed.

    Attributes:
        components: K of a mixture with the projections of a mixture of softmaxes; None
            for a single component that reads the hidden state as its context.
        context: how a mixture's contexts are made, one of contexts.KINDS; a single
            component takes no other than the default.
    """

    components: int | None = dataclasses.field(default=None, kw_only=True)
    context: str = dataclasses.field(default=contexts.DEFAULT, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings."""
        contexts.check(self.context)
        if self.components is not None:
            self._check_positive("components")
        elif self.context != contexts.DEFAULT:
            raise ValueError(
                f"context={self.context!r} is for a mixture, and components is not set."
            )

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
        return init_latent(key, self.context, self.components, hidden_dim, context_dim)

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """As a mixture of softmaxes, or the state itself; see `Head.mix`."""
        if self.components is None:
            return base.single(hidden_TD, latent_mask)
        return mix_latent(self.context, params, hidden_TD, latent_mask)


def init_latent(
    key: jax.Array, kind: str, components: int, hidden_dim: int, context_dim: int
) -> Params:
    """Parameters of the prior and of the contexts."""
    prior_key, *latent_keys = jax.random.split(key, 3)
    prior_DK = contexts.init_prior(kind, prior_key, components, hidden_dim)
    latent = contexts.init(kind, latent_keys, components, hidden_dim, context_dim)
    return {"prior_DK": prior_DK, **latent}


def mix_latent(
    kind: str,
    params: Params,
    hidden_TD: jax.Array,
    latent_mask: jax.Array | None = None,
) -> Mixture:
    """The prior and the contexts, the latter masked last."""
    context_TKE = contexts.make(kind, params, hidden_TD)
    log_prior_TK = contexts.log_prior(kind, params, hidden_TD)
    return Mixture(log_prior_TK, base.masked(context_TKE, latent_mask))


def _drawn(log_prior_TK, active, key):
    """The prior and the places of the k - 1 largest and of one drawn from the rest."""
    log_top_Tk, top_Tk = jax.lax.top_k(log_prior_TK, active - 1)
    place_K = jnp.arange(log_prior_TK.shape[1])
    taken_TK = jnp.any(top_Tk[:, :, None] == place_K[None, None], axis=1)
    rest_TK = jnp.where(taken_TK, -jnp.inf, log_prior_TK)
    drawn_T = jax.random.categorical(key, rest_TK)
    log_rest_T = jax.nn.logsumexp(rest_TK, axis=1)
    return (
        jnp.concatenate([log_top_Tk, log_rest_T[:, None]], axis=1),
        jnp.concatenate([top_Tk, drawn_T[:, None].astype(top_Tk.dtype)], axis=1),
    )
