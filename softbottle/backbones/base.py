"""What every backbone gives back, and how it drops."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax

from softbottle.backbones import dropout


class Trunk(NamedTuple):
    """Hidden states of a batch, and what the next batch of the same rows needs.

    `raw_BSD` is the state before output dropout, `hidden_BSD` after it; they are the
    same array where there is none. `lower` has states of the layers below, the nearest
    first, where they were asked for. All have the dtype of the embedded tokens.
    """

    hidden_BSD: jax.Array
    raw_BSD: jax.Array
    carry: Any
    lower: tuple[jax.Array, ...] = ()


def drop_locked(module: nn.Module, rate: float, values_BSD: jax.Array) -> jax.Array:
    """Locked dropout drawn from the module's stream "dropout", unless the rate is 0."""
    if not rate:
        return values_BSD
    rows, _, dim = values_BSD.shape
    mask_B1D = dropout.locked(module.make_rng("dropout"), rate, rows, dim)
    return dropout.masked(values_BSD, mask_B1D)
