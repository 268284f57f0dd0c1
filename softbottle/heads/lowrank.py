"""The rank-constrained head: P(v) = softmax_v( (A B h)_v + b_v ), rank at most r.

A is the model's output table, r wide, and B projects the hidden state onto r
dimensions. It is how the saturation study asks how many dimensions a model needs.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import base, checks
from softbottle.heads.base import Mixture, Params


@dataclasses.dataclass(frozen=True, repr=False)
class LowRank(base.Head):
    """A softmax through `rank` dimensions.

    Attributes:
        rank: r, width of the table as well.
    """

    name: ClassVar[str] = "lowrank"
    is_linear: ClassVar[bool] = True
    rank: int

    def __post_init__(self) -> None:
        """Check the settings."""
        self._check_positive("rank")

    @property
    def projects(self) -> bool:
        """The context is a projection of the state."""
        return True

    def check_widths(self, hidden_dim: int, context_dim: int) -> None:
        """Raise ValueError unless the table is `rank` wide."""
        if context_dim != self.rank:
            raise ValueError(
                f"lowrank({self.rank}) needs a table of that width, got context_dim="
                f"{context_dim}."
            )

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """`project_DE`; see `Head.init`."""
        self.check_widths(hidden_dim, context_dim)
        bound = hidden_dim**-0.5
        return {"project_DE": bound * jax.random.normal(key, (hidden_dim, self.rank))}

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The projected state as the only context; see `Head.mix`."""
        project_DE = params["project_DE"].astype(hidden_TD.dtype)
        return base.single(jnp.einsum("td,de->te", hidden_TD, project_DE), latent_mask)


@checks.factory
def lowrank(rank: int) -> LowRank:
    """A softmax through `rank` dimensions; its table is `rank` wide.

    Raises:
        ValueError: if `rank` is not a positive integer, and in `init` if the table's
            width differs from it.
    """
    return LowRank(rank)
