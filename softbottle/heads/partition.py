"""Partitioned vocabulary: P(v) proportional to exp(context_{v mod n} . w_v + b_v).

Every class of words, v mod n, meets a context of its own (contexts.py), under one
normalizer. A word is still multiplied with one context, so this costs what a softmax
does. The logits of a class span as many dimensions as its contexts, and those of all up
to n times as many: log P has rank up to n d + 1, and one more with a bias, where the
contexts bend. (Linear ones stay in the space of the state and its direction, 2 d.)

With `components` it is a mixture of such softmaxes.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import base, checks, contexts
from softbottle.heads.base import Mixture, Params


@dataclasses.dataclass(frozen=True, repr=False)
class Partition(contexts.Projecting):
    """A softmax with a context for each of `classes` classes of words, or a mixture.

    Attributes:
        classes: n.
        components: K of a mixture; 1 is a single softmax.
        context: how the contexts are made, one of contexts.KINDS.
    """

    name: ClassVar[str] = "partition"
    classes: int
    components: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self._check_positive("classes", "components")

    @property
    def contexts(self) -> int:
        """One for each class and component."""
        return self.classes * self.components

    def check_words(self, words: int) -> None:
        """Raise ValueError unless every class has a word."""
        checks.classes(self.classes, words)

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """The contexts' parameters, and a mixture's `prior_DK`; see `Head.init`."""
        sizes = (self.contexts, hidden_dim, context_dim)
        prior_key, *latent_keys = jax.random.split(key, 3)
        params = contexts.init(self.context, latent_keys, *sizes)
        if self.components > 1:
            params["prior_DK"] = contexts.init_prior(
                self.context, prior_key, self.components, hidden_dim
            )
        return params

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The mixture weights, and contexts [T, n, K, E]; see `Head.mix`."""
        context_TKE = contexts.make(self.context, params, hidden_TD)
        context_TKE = base.masked(context_TKE, latent_mask)
        tokens, _, width = context_TKE.shape
        context = context_TKE.reshape(tokens, self.classes, self.components, width)
        if self.components == 1:
            wide = jnp.promote_types(hidden_TD.dtype, jnp.float32)
            return Mixture(jnp.zeros((tokens, 1), wide), context)
        return Mixture(contexts.log_prior(self.context, params, hidden_TD), context)

    @property
    def products(self) -> int:
        """One for each component: a word meets the context of its class alone."""
        return self.components


@checks.factory
def partition(
    classes: int, components: int = 1, context: str = contexts.DEFAULT
) -> Partition:
    """A softmax whose words v mod `classes` have contexts of their own.

    Args:
        classes: n, at most as many as there are words. Where the table is split over
            devices, each one's rows must be a multiple of it.
        components: K of a mixture of such softmaxes; 1 is a single one.
        context: as of `mos`.

    Raises:
        ValueError: if `classes` or `components` is not a positive integer, or there is
            no such kind of context.
    """
    return Partition(classes, components=components, context=context)
