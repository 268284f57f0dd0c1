"""A feed-forward n-gram model: the last few words through one hidden layer.

    h_t = tanh([e_{t-n+1}, ..., e_t] W + b) U + c,

with e = 0 for words before the start of the segment that t belongs to.

Axes: P positions before the batch, H width of the hidden layer.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from softbottle.backbones import base, dropout


class Carry(NamedTuple):
    """The P = order - 1 words before the batch; segment 0 where there is none."""

    embedded_BPE: jax.Array
    segments_BP: jax.Array


class Window(nn.Module):
    """Hidden states that see the last `order` words of their segment.

    Of the rates it reads `output` alone. A stream goes on in the next batch where its
    segment has the same number; positions of segment 0 at the end are padding.
    """

    order: int
    embed_dim: int
    hidden_dim: int
    last_dim: int
    rates: dropout.Rates = dropout.Rates()
    compute_dtype: str = "float32"

    def recurrence(self, rows: int) -> None:
        """None: it has no recurrent layers."""
        del rows

    def initial_carry(self, rows: int) -> Carry:
        """No words before the first."""
        past = self.order - 1
        embedded_BPE = jnp.zeros((rows, past, self.embed_dim), jnp.float32)
        return Carry(embedded_BPE, jnp.zeros((rows, past), jnp.int32))

    @nn.compact
    def __call__(
        self,
        embedded_BSE: jax.Array,
        carry: Carry,
        segments_BS: jax.Array,
        *,
        train: bool,
    ) -> base.Trunk:
        """Run the network; in training the stream "dropout" gives the mask."""
        stream = Carry(
            jnp.concatenate([carry.embedded_BPE, embedded_BSE], axis=1),
            jnp.concatenate([carry.segments_BP, segments_BS], axis=1),
        )
        words = views(stream.embedded_BPE, stream.segments_BP, segments_BS)
        context_BSC = jnp.concatenate(words, axis=-1)
        dtype = self.compute_dtype
        inner_BSH = nn.Dense(self.hidden_dim, dtype=dtype, name="inner")(context_BSC)
        outer = nn.Dense(self.last_dim, dtype=dtype, name="outer")
        raw_BSD = outer(jnp.tanh(inner_BSH))
        raw_BSD = raw_BSD.astype(embedded_BSE.dtype)
        rate = self.rates.output if train else 0.0
        hidden_BSD = base.drop_locked(self, rate, raw_BSD)
        carry = Carry(*last(stream, segments_BS, self.order - 1))
        return base.Trunk(hidden_BSD, raw_BSD, carry)


def views(
    values_BPE: jax.Array, stream_BP: jax.Array, segments_BS: jax.Array
) -> list[jax.Array]:
    """Values at each position and before it, [B, S, E] each, the oldest first.

    Args:
        values_BPE: those of the batch, after those of the positions before it.
        stream_BP: their segments.
        segments_BS: of the batch. A value of another segment is 0.
    """
    length = segments_BS.shape[1]
    found = []
    for start in range(stream_BP.shape[1] - length + 1):
        window = slice(start, start + length)
        same_BS = stream_BP[:, window] == segments_BS
        found.append(jnp.where(same_BS[:, :, None], values_BPE[:, window], 0))
    return found


def last(
    stream: tuple[jax.Array, jax.Array], segments_BS: jax.Array, past: int
) -> tuple[jax.Array, jax.Array]:
    """The last `past` values and segments before each row's padding."""
    values_BPE, stream_BP = stream
    lengths_B = jnp.sum(segments_BS > 0, axis=1)
    index_BP = lengths_B[:, None] + jnp.arange(past)[None]
    return (
        jnp.take_along_axis(values_BPE, index_BP[:, :, None], axis=1),
        jnp.take_along_axis(stream_BP, index_BP, axis=1),
    )
