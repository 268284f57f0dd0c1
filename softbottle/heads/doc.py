"""DOC: a mixture of softmaxes whose components read two layers.

    P(v) = sum_k prior_k softmax_v(context_k . w_v + b_v)

The first M contexts are projections of the last layer's state h, the other L of the
state g of the layer below; the prior reads h (Takase, Suzuki and Nagata 2018). Contexts
are those of contexts.py: tanh of a projection, as in the paper, or a projection beside
the path h P, which all of them share, so that the head starts as the softmax of h P.

The model puts the two states side by side: the head's state is [h, g]. To keep all
components in use, the paper punishes a prior that is uneven over a batch
(`regularise.balance` in a config).

Axes: H width of h, I of g; M components that read h, L that read g, K = M + L.
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
class DirectOutputConnection(ReadsSeveral):
    """A mixture of softmaxes with components of the last layer and of the one below.

    Attributes:
        components: M, of the last layer.
        lower: L, of the layer below it.
        context: how the contexts are made, one of contexts.KINDS.
    """

    name: ClassVar[str] = "doc"
    components: int
    lower: int

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self._check_positive("components", "lower")

    @property
    def contexts(self) -> int:
        """K = M + L."""
        return self.components + self.lower

    @property
    def layers(self) -> int:
        """The last and the one below."""
        return 2

    def init_states(
        self, key: jax.Array, hidden_dims: Sequence[int], context_dim: int
    ) -> Params:
        """The prior, and projections of either state; see `ReadsSeveral`."""
        last, below = hidden_dims
        prior_key, *keys = jax.random.split(key, 5)
        own = contexts.init_bend(
            self.context, keys[:2], self.components, last, context_dim
        )
        other = contexts.init_bend(
            self.context, keys[2:], self.lower, below, context_dim
        )
        return {
            "prior_HK": contexts.init_prior(
                self.context, prior_key, self.contexts, last
            ),
            **dict(zip(("latent_HME", "latent_bias_ME"), own, strict=True)),
            **dict(zip(("lower_ILE", "lower_bias_LE"), other, strict=True)),
            **contexts.init_path(
                "project_HE", self.context, keys[0], last, context_dim
            ),
        }

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The prior and the contexts, those of the last layer first; see `Head.mix`."""
        width, below = len(params["latent_HME"]), len(params["lower_ILE"])
        if hidden_TD.shape[1] != width + below:
            raise ValueError(
                f"hidden_TD is {hidden_TD.shape[1]} wide, but the head's parameters "
                f"are of states {width} + {below} wide, side by side."
            )
        state_TH, lower_TI = jnp.split(hidden_TD, [width], axis=1)
        read_TH = contexts.read(self.context, state_TH)
        read_TI = contexts.read(self.context, lower_TI)
        own = (read_TH, params["latent_HME"], params["latent_bias_ME"])
        other = (read_TI, params["lower_ILE"], params["lower_bias_LE"])
        bent = [contexts.bend(self.context, *each) for each in (own, other)]
        context_TKE = contexts.beside_path(
            self.context,
            state_TH,
            jnp.concatenate(bent, axis=1),
            params.get("project_HE"),
        )
        log_prior_TK = contexts.log_weights(read_TH, params["prior_HK"])
        return Mixture(log_prior_TK, base.masked(context_TKE, latent_mask))


@checks.factory
def doc(
    components: int, lower: int, context: str = contexts.DEFAULT
) -> DirectOutputConnection:
    """A mixture of softmaxes whose components read the last two layers.

    The states that its methods take are those of the last layer and of the one below it
    side by side, [T, H + I].

    Args:
        components: how many read the last layer.
        lower: how many read the one below it.
        context: as of `mos`.

    Raises:
        ValueError: if `components` or `lower` is not a positive integer, or there is no
            such kind of context.
    """
    return DirectOutputConnection(components, lower, context=context)
