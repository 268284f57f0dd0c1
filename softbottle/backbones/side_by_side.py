"""States of several layers and positions side by side, for a head that reads them all.

    hidden_t = [g_t, g_{t-1}, ...]   with g_t = [last layer's state at t, those below]

and 0 for positions before the start of the segment. Where the backbone has a carry, a
segment goes on in the next batch; else nothing before the batch is seen.

Axes: P positions before the batch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from softbottle.backbones import base, window


class Carry(NamedTuple):
    """The backbone's own, and the states before the batch with their segments."""

    inner: Any
    hidden_BPD: jax.Array
    segments_BP: jax.Array


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """A backbone, with the methods of one, whose `hidden_BSD` is wider.

    `raw_BSD` stays that of the last layer.

    Attributes:
        backbone: whose last layers are read: its `lower` says how many.
        width: of the states of all these layers.
        positions: how many are read, the token's own included.
    """

    backbone: Any
    width: int
    positions: int

    def recurrence(self, rows: int) -> str | None:
        """That of the backbone."""
        return self.backbone.recurrence(rows)

    def initial_carry(self, rows: int) -> Any:
        """The state before any text."""
        inner = self.backbone.initial_carry(rows)
        past = self.positions - 1
        if not past or not jax.tree.leaves(inner):
            return inner
        hidden_BPD = jnp.zeros((rows, past, self.width), self.backbone.compute_dtype)
        return Carry(inner, hidden_BPD, jnp.zeros((rows, past), jnp.int32))

    def init(self, key: jax.Array, *arguments: Any, **keywords: Any) -> Any:
        """The variables of the backbone."""
        embedded_BSE, carry, segments_BS = arguments
        inner = carry.inner if isinstance(carry, Carry) else carry
        return self.backbone.init(key, embedded_BSE, inner, segments_BS, **keywords)

    def apply(
        self,
        variables: Any,
        embedded_BSE: jax.Array,
        carry: Any,
        segments_BS: jax.Array,
        **keywords: Any,
    ) -> Any:
        """The backbone's Trunk with wider states, or what `mutable` makes of it."""
        inner = carry.inner if isinstance(carry, Carry) else carry
        result = self.backbone.apply(
            variables, embedded_BSE, inner, segments_BS, **keywords
        )
        if isinstance(result, base.Trunk):
            return self._widened(result, carry, segments_BS)
        trunk, collected = result
        return self._widened(trunk, carry, segments_BS), collected

    def _widened(self, trunk, carry, segments_BS):
        hidden_BSD = jnp.concatenate([trunk.hidden_BSD, *trunk.lower], axis=-1)
        past = self.positions - 1
        if not past:
            return trunk._replace(hidden_BSD=hidden_BSD)
        if isinstance(carry, Carry):
            before = (carry.hidden_BPD, carry.segments_BP)
        else:
            rows = len(hidden_BSD)
            before = (
                jnp.zeros((rows, past, self.width), hidden_BSD.dtype),
                jnp.zeros((rows, past), segments_BS.dtype),
            )
        stream = (
            jnp.concatenate([before[0], hidden_BSD], axis=1),
            jnp.concatenate([before[1], segments_BS], axis=1),
        )
        after = trunk.carry
        if isinstance(carry, Carry):
            after = Carry(after, *window.last(stream, segments_BS, past))
        newest_first = reversed(window.views(*stream, segments_BS))
        wide_BSD = jnp.concatenate(list(newest_first), axis=-1)
        return trunk._replace(hidden_BSD=wide_BSD, carry=after)
