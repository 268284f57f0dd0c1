"""The ordinary softmax head: P(v) proportional to exp(h . w_v + b_v)."""

import dataclasses
from typing import ClassVar

import jax

from softbottle.heads import base, checks
from softbottle.heads.base import Mixture, Params


@dataclasses.dataclass(frozen=True, repr=False)
class Single(base.Head):
    """A head of one component that reads the hidden state as its context."""

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """No parameters; see `Head.init`."""
        del key
        self.check_widths(hidden_dim, context_dim)
        return {}

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The state as the only context; see `Head.mix`."""
        del params
        return base.single(hidden_TD, latent_mask)


@dataclasses.dataclass(frozen=True, repr=False)
class Softmax(Single):
    """An ordinary softmax; it has no parameters beside the model's table and bias.

    The matrix of its log-probabilities over contexts has rank at most d + 1, or d + 2
    with an output bias, however many contexts and words there are.
    """

    name: ClassVar[str] = "softmax"
    is_linear: ClassVar[bool] = True


@checks.factory
def softmax() -> Softmax:
    """An ordinary softmax; it has no parameters beside the model's table and bias."""
    return Softmax()
