"""Heads that read several states of a token, which the model puts side by side."""

import abc
import dataclasses
from collections.abc import Sequence

import jax

from softbottle.heads import contexts
from softbottle.heads.base import Params


@dataclasses.dataclass(frozen=True, repr=False)
class ReadsSeveral(contexts.Projecting, abc.ABC):
    """A head with `layers` times `positions` states, the last layer's own first."""

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """`init_wide` of states that are equally wide; see `Head.init`."""
        count = self.layers * self.positions
        if hidden_dim % count:
            raise ValueError(
                f"hidden_dim={hidden_dim} is not a multiple of the {count} states that "
                f"{self!r} reads side by side; init_wide takes their widths."
            )
        return self.init_wide(key, (hidden_dim // count,) * count, context_dim)

    def init_wide(
        self, key: jax.Array, hidden_dims: Sequence[int], context_dim: int
    ) -> Params:
        """The parameters for states of these widths; see `Head.init_wide`."""
        if len(hidden_dims) != self.layers * self.positions:
            raise ValueError(
                f"{self!r} reads {self.layers} layers at {self.positions} positions, "
                f"got {len(hidden_dims)} widths."
            )
        return self.init_states(key, hidden_dims, context_dim)

    @abc.abstractmethod
    def init_states(
        self, key: jax.Array, hidden_dims: Sequence[int], context_dim: int
    ) -> Params:
        """As `init_wide`, of as many widths as there are states."""
