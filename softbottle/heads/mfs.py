"""Multi-facet softmax: a mixture, one component of which is partitioned.

    P(v) = prior_1 softmax_v(f_{v mod n} . w_v + b_v)
           + sum_{k = 2..K} prior_k softmax_v(f_{n + k - 1} . w_v + b_v)

with n + K - 1 facets, the contexts of contexts.py, and a prior that all read

    q = [h ; GELU(s A + a)],

where h is the last layer's state at the token and s those of the last layers at the
token and at the positions before it, side by side (Chang and McCallum 2022: n = 4,
K = 3, three layers, three positions, facets linear in q). The facets have the path h P
beside them, so that the head starts as the softmax of h P.

The model puts the states side by side, h first: the head's state is s. A word meets one
facet of the partitioned component and one of each other: K products with the table.

Axes: H width of h, F of the hidden layer, Q = H + F, N classes, C = N + K - 1 facets.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import base, checks, contexts
from softbottle.heads.base import Mixture, Params
from softbottle.heads.several import ReadsSeveral


@dataclasses.dataclass(frozen=True, repr=False)
class MultiFacet(ReadsSeveral):
    """A mixture of a partitioned softmax and plain ones that read several states.

    Attributes:
        components: K.
        classes: n, of the partitioned component.
        layers: how many of the last layers are read.
        positions: how many positions are, the token's own included.
        context: how the facets are made, one of contexts.KINDS.
    """

    name: ClassVar[str] = "mfs"
    components: int = 3
    classes: int = dataclasses.field(default=4, kw_only=True)
    layers: int = dataclasses.field(default=3, kw_only=True)
    positions: int = dataclasses.field(default=3, kw_only=True)
    context: str = dataclasses.field(default="linear", kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self._check_positive("components", "classes", "layers", "positions")

    @property
    def contexts(self) -> int:
        """The facets: one for each class, and one for each other component."""
        return self.classes + self.components - 1

    @property
    def products(self) -> int:
        """One for each component: a word meets the facet of its class alone."""
        return self.components

    def check_words(self, words: int) -> None:
        """Raise ValueError unless every class has a word."""
        checks.classes(self.classes, words)

    def init_states(
        self, key: jax.Array, hidden_dims: Sequence[int], context_dim: int
    ) -> Params:
        """The hidden layer, prior and facets; see `ReadsSeveral`."""
        last, total = hidden_dims[0], sum(hidden_dims)
        inner_key, prior_key, path_key, *keys = jax.random.split(key, 5)
        width = 2 * last
        latent_QCE, bias_CE = contexts.init_bend(
            self.context, keys, self.contexts, width, context_dim
        )
        return {
            "inner_DF": base.uniform(inner_key, (total, last), total),
            "inner_bias_F": jnp.zeros(last),
            "prior_QK": contexts.init_prior(
                self.context, prior_key, self.components, width
            ),
            "latent_QCE": latent_QCE,
            "latent_bias_CE": bias_CE,
            **contexts.init_path(
                "project_HE", self.context, path_key, last, context_dim
            ),
        }

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The mixture weights, and contexts [T, N, K, E]; see `Head.mix`."""
        dtype = hidden_TD.dtype
        inner_TF = jnp.einsum("td,df->tf", hidden_TD, params["inner_DF"].astype(dtype))
        inner_TF = inner_TF + params["inner_bias_F"].astype(dtype)[None]
        width = len(params["latent_QCE"]) - inner_TF.shape[1]
        state_TH = hidden_TD[:, :width]
        query_TQ = jnp.concatenate(
            [state_TH, jax.nn.gelu(inner_TF, approximate=False)], axis=1
        )
        read_TQ = contexts.read(self.context, query_TQ)
        latent = (params["latent_QCE"], params["latent_bias_CE"])
        facet_TCE = contexts.beside_path(
            self.context,
            state_TH,
            contexts.bend(self.context, read_TQ, *latent),
            params.get("project_HE"),
        )
        facet_TCE = base.masked(facet_TCE, latent_mask)
        by_class_TNE, plain_TKE = jnp.split(facet_TCE, [self.classes], axis=1)
        shape = (len(facet_TCE), self.classes, *plain_TKE.shape[1:])
        plain_TNKE = jnp.broadcast_to(plain_TKE[:, None], shape)
        context_TNKE = jnp.concatenate([by_class_TNE[:, :, None], plain_TNKE], axis=2)
        return Mixture(contexts.log_weights(read_TQ, params["prior_QK"]), context_TNKE)


@checks.factory
def mfs(
    components: int = 3,
    *,
    classes: int = 4,
    layers: int = 3,
    positions: int = 3,
    context: str = "linear",
) -> MultiFacet:
    """A mixture of one partitioned softmax and plain ones, of several layers' states.

    The states that its methods take have those of the last `layers` layers, the last
    first, at the token and then at each position before it, side by side.

    Args:
        components: K.
        classes: n, as of `partition`, of the first component.
        layers: how many layers are read.
        positions: how many positions are, the token's own included.
        context: as of `mos`.

    Raises:
        ValueError: if a number is not a positive integer, or there is no such kind of
            context.
    """
    return MultiFacet(
        components,
        classes=classes,
        layers=layers,
        positions=positions,
        context=context,
    )
