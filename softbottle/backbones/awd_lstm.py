"""The AWD-LSTM: LSTM layers with locked dropout and dropped recurrent weights.

With m a mask that is drawn once a row and kept over time, and M one that is drawn
once a call for every hidden-to-hidden weight,

    raw_0 = embedded,    raw_l = LSTM_l(m_{l-1} * raw_{l-1};  W_x, M_l * W_h),

and the states that the head reads are m_n * raw_n. In evaluation every mask is 1.
Where the collection "intermediates" is mutable, it takes the raw_l below the last.

Axes: H units of a layer, G = 4 H gates.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from softbottle.backbones import base, dropout
from softbottle.ops import device as device_lib
from softbottle.ops.device import Device
from softbottle.ops.lstm import api as lstm


class AwdLstm(nn.Module):
    """LSTM layers of widths[0] -> widths[1] -> ... -> widths[-1].

    The rows are contiguous streams: the state runs through segments and on into the
    next batch. Positions of segment 0 are padding at the end of a row; they leave the
    state alone and give 0.

    Attributes:
        widths: of the embedded tokens and of each layer.
        rates: of dropout, in training.
        compute_dtype: as of ops/lstm/api.py:stack, like what follows.
        implementation: "auto" decides anew for each number of rows, since evaluation
            may have others than training.
        unroll: steps of the loop that are compiled as one.
        device: what "auto" decides for; None is jax's first.
        lower: how many layers below the last give their states as well, dropped as the
            next layer gets them.
    """

    widths: tuple[int, ...]
    rates: dropout.Rates = dropout.Rates()
    compute_dtype: str = "float32"
    implementation: str = "auto"
    unroll: int = 4
    device: Device | None = None
    lower: int = 0

    def recurrence(self, rows: int) -> str:
        """How the layers run over a batch of so many rows; see ops/lstm/api.py."""
        device = device_lib.at_hand() if self.device is None else self.device
        name, dtype = self.implementation, self.compute_dtype
        return lstm.choose(name, self.widths[1:], rows, dtype, device)

    def initial_carry(self, rows: int) -> tuple[lstm.Carry, ...]:
        """Zero states of every layer."""
        zeros = [jnp.zeros((rows, size), jnp.float32) for size in self.widths[1:]]
        return tuple(lstm.Carry(zeros_BH, zeros_BH) for zeros_BH in zeros)

    @nn.compact
    def __call__(
        self,
        embedded_BSE: jax.Array,
        carry: tuple[lstm.Carry, ...],
        segments_BS: jax.Array,
        *,
        train: bool,
    ) -> base.Trunk:
        """Run the layers; in training the stream "dropout" gives the masks."""
        rates = self.rates if train else dropout.Rates()
        rows = embedded_BSE.shape[0]
        inputs_BSE = base.drop_locked(self, rates.input, embedded_BSE)
        masks = self._masks(rates, rows) if rates.hidden else None
        layers = [self._layer(index, rates) for index in range(len(self.widths) - 1)]
        inputs_SBE, valid_SB = inputs_BSE.transpose(1, 0, 2), segments_BS.T > 0
        if self.is_mutable_collection("intermediates"):
            for depth in range(1, len(layers)):
                below = (carry[:depth], layers[:depth], masks and masks[: depth - 1])
                inner_SBH, _ = lstm.stack(inputs_SBE, *below, valid_SB)
                self.sow("intermediates", "inner_BSH", inner_SBH.transpose(1, 0, 2))
        raw_SBD, carry, lower = self._run(inputs_SBE, carry, layers, masks, valid_SB)
        raw_BSD = raw_SBD.transpose(1, 0, 2)
        hidden_BSD = base.drop_locked(self, rates.output, raw_BSD)
        return base.Trunk(hidden_BSD, raw_BSD, carry, lower)

    def _run(self, inputs_SBE, carry, layers, masks, valid_SB):
        """All layers at once, up to those whose states are wanted one by one."""
        start, carries, lower = 0, (), []
        for end in range(len(layers) - self.lower, len(layers) + 1):
            part = slice(start, end)
            raw_SBD, after = lstm.stack(
                inputs_SBE,
                carry[part],
                layers[part],
                masks and masks[start : end - 1],
                valid_SB,
                implementation=self.implementation,
                compute_dtype=self.compute_dtype,
                unroll=self.unroll,
                device=self.device,
            )
            carries += after
            if end < len(layers):
                mask_BH = None if masks is None else masks[end - 1][None]
                inputs_SBE = dropout.masked(raw_SBD, mask_BH)
                lower.insert(0, inputs_SBE.transpose(1, 0, 2))
            start = end
        return raw_SBD, carries, tuple(lower)

    def _masks(self, rates, rows):
        """Factors [B, H] on what every layer but the last gives."""
        return [
            dropout.locked(self.make_rng("dropout"), rates.hidden, rows, size)[:, 0]
            for size in self.widths[1:-1]
        ]

    def _layer(self, index, rates):
        inputs, size = self.widths[index : index + 2]
        named = self.param(f"layer_{index}", _init_layer, inputs, size)
        weights = lstm.Weights(**named)
        if not rates.recurrent:
            return weights
        key, shape = self.make_rng("dropout"), weights.recurrent_HG.shape
        mask_HG = dropout.elements(key, rates.recurrent, *shape)
        return weights._replace(
            recurrent_HG=dropout.masked(weights.recurrent_HG, mask_HG)
        )


def _init_layer(key, inputs, size):
    """PyTorch's start: every parameter uniform in plus or minus 1 / sqrt(H)."""
    shapes = {
        "input_IG": (inputs, 4 * size),
        "recurrent_HG": (size, 4 * size),
        "input_bias_G": (4 * size,),
        "recurrent_bias_G": (4 * size,),
    }
    bound = 1 / math.sqrt(size)
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
