"""A decoder-only transformer: pre-norm blocks, rotary positions, gated units.

    x <- x + Attention(RMSNorm(x)),    x <- x + (SiLU(y W_gate) * (y W_up)) W_down

with y = RMSNorm(x). A position attends to itself and to earlier positions of its own
segment. The parameters of all the blocks are stacked along a first axis L, so that
one compiled block may serve all layers (`scan_layers`), and a checkpoint does not
depend on that choice. Where the collection "intermediates" is mutable, it takes what
enters each block and the attention logits of the last position.

Axes: H width of an attention head, F of the feed-forward layer.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from softbottle.backbones import base, dropout

_EPSILON = 1e-6
_ROTARY_BASE = 10_000.0


class Transformer(nn.Module):
    """Blocks of width `hidden_dim`; projections at the ends where widths differ.

    The states of the `lower` layers below the last are what leaves their blocks, behind
    an RMSNorm without a scale.
    """

    layers: int
    attention_heads: int
    hidden_dim: int
    last_dim: int
    remat: bool = False
    scan_layers: bool = False
    rates: dropout.Rates = dropout.Rates()
    compute_dtype: str = "float32"
    lower: int = 0

    def recurrence(self, rows: int) -> None:
        """None: it has no recurrent layers."""
        del rows

    def initial_carry(self, rows: int) -> tuple[()]:
        """Nothing: a batch holds all that its positions see."""
        del rows
        return ()

    @nn.compact
    def __call__(
        self,
        embedded_BSE: jax.Array,
        carry: tuple[()],
        segments_BS: jax.Array,
        *,
        train: bool,
    ) -> base.Trunk:
        """Run the blocks; in training the stream "dropout" gives the masks."""
        rates = self.rates if train else dropout.Rates()
        inputs_BSE = base.drop_locked(self, rates.input, embedded_BSE)
        hidden_BSD = self._project("project_in", inputs_BSE, self.hidden_dim)
        hidden_BSD, lower = self._blocks(hidden_BSD, segments_BS, rates.hidden)
        scale_D = self.param("last_scale_D", nn.initializers.ones, (self.hidden_dim,))
        hidden_BSD = _normalise(hidden_BSD, scale_D)
        raw_BSD = self._project("project_out", hidden_BSD, self.last_dim)
        raw_BSD = raw_BSD.astype(embedded_BSE.dtype)
        hidden_BSD = base.drop_locked(self, rates.output, raw_BSD)
        ones_D, dtype = jnp.ones(self.hidden_dim), embedded_BSE.dtype
        lower = tuple(_normalise(each, ones_D).astype(dtype) for each in lower)
        return base.Trunk(hidden_BSD, raw_BSD, carry, lower)

    def _project(self, name, values_BSE, width):
        values_BSE = values_BSE.astype(self.compute_dtype)
        if values_BSE.shape[-1] == width:
            return values_BSE
        shape = (values_BSE.shape[-1], width)
        weight_ED = self.param(f"{name}_ED", nn.initializers.lecun_normal(), shape)
        return _product("bse,ed->bsd", values_BSE, weight_ED)

    def _blocks(self, hidden_BSD, segments_BS, rate):
        """A scan over the stacked blocks, unrolled unless `scan_layers` is set.

        Returns what leaves the last block, and what enters the last `lower` ones.
        """
        if self.hidden_dim % (2 * self.attention_heads):
            raise ValueError(
                f"model.hidden_dim={self.hidden_dim} is not a multiple of twice "
                f"model.attention_heads={self.attention_heads}: rotary positions turn "
                "pairs of dimensions."
            )
        params = self.param(
            "blocks", _init_blocks, self.layers, self.hidden_dim, self.attention_heads
        )
        keys_L = None
        if rate:
            keys_L = jax.random.split(self.make_rng("dropout"), self.layers)
        block = functools.partial(_block, segments_BS=segments_BS, rate=rate)
        if self.remat:
            block = jax.checkpoint(block, prevent_cse=not self.scan_layers)
        seen = self.is_mutable_collection("intermediates")

        def step(hidden_BSD, layer):
            kept = (
                hidden_BSD if seen or self.lower else None,
                _last_logits(hidden_BSD, layer[0]) if seen else None,
            )
            return block(hidden_BSD, *layer), kept

        hidden_BSD, (entering_LBSD, logits_LBNS) = lax.scan(
            step,
            hidden_BSD,
            (params, keys_L),
            length=self.layers,
            unroll=1 if self.scan_layers else self.layers,
        )
        if seen:
            self.sow("intermediates", "entering_LBSD", entering_LBSD)
            self.sow("intermediates", "logits_LBNS", logits_LBNS)
        lower = range(self.layers - 1, self.layers - 1 - self.lower, -1)
        return hidden_BSD, [entering_LBSD[layer] for layer in lower]


def _init_blocks(key, layers, dim, heads):
    """Normal with variance 1 / fan-in; what enters the residual sum is scaled down."""
    inner = -(-8 * dim // 24) * 8  # 8/3 of the width, up to a multiple of 8
    size = dim // heads
    shallow = (2 * layers) ** -0.5
    shapes = {
        "query_LDNH": ((dim, heads, size), dim**-0.5),
        "key_LDNH": ((dim, heads, size), dim**-0.5),
        "value_LDNH": ((dim, heads, size), dim**-0.5),
        "out_LNHD": ((heads, size, dim), shallow * dim**-0.5),
        "gate_LDF": ((dim, inner), dim**-0.5),
        "up_LDF": ((dim, inner), dim**-0.5),
        "down_LFD": ((inner, dim), shallow * inner**-0.5),
    }
    keys = jax.random.split(key, len(shapes))
    params = {
        name: deviation * jax.random.normal(key, (layers, *shape), jnp.float32)
        for key, (name, (shape, deviation)) in zip(keys, shapes.items(), strict=True)
    }
    ones_LD = jnp.ones((layers, dim), jnp.float32)
    return params | {"attention_scale_LD": ones_LD, "inner_scale_LD": ones_LD}


def _block(hidden_BSD, params, key, *, segments_BS, rate):
    """One layer; the leading L of the parameters' names is gone inside the scan."""
    keys = (None, None) if key is None else jax.random.split(key)
    for function, scale, key in (
        (_attend, "attention_scale_LD", keys[0]),
        (_transform, "inner_scale_LD", keys[1]),
    ):
        change_BSD = function(
            _normalise(hidden_BSD, params[scale]), params, segments_BS
        )
        mask_BSD = dropout.elements(key, rate, *change_BSD.shape)
        hidden_BSD += dropout.masked(change_BSD, mask_BSD)
    return hidden_BSD


def _attend(hidden_BSD, params, segments_BS):
    query_BSNH, key_BSNH, value_BSNH = (
        _product("bsd,dnh->bsnh", hidden_BSD, params[name])
        for name in ("query_LDNH", "key_LDNH", "value_LDNH")
    )
    positions_S = jnp.arange(segments_BS.shape[1])
    causal_1SS = (positions_S[:, None] >= positions_S[None, :])[None]
    # Padding, segment 0, attends to padding: finite, and read by nobody.
    visible_BSS = causal_1SS & (segments_BS[:, :, None] == segments_BS[:, None, :])
    mixed_BSNH = jax.nn.dot_product_attention(
        _rotate(query_BSNH), _rotate(key_BSNH), value_BSNH, mask=visible_BSS[:, None]
    )
    return _product("bsnh,nhd->bsd", mixed_BSNH, params["out_LNHD"])


def _last_logits(hidden_BSD, params):
    """Attention logits [B, N, S] of the last position, in rows of one segment."""
    hidden_BSD = _normalise(hidden_BSD, params["attention_scale_LD"])
    query_BSNH, key_BSNH = (
        _rotate(_product("bsd,dnh->bsnh", hidden_BSD, params[name]))
        for name in ("query_LDNH", "key_LDNH")
    )
    logits_BNS = jnp.einsum("bnh,bsnh->bns", query_BSNH[:, -1], key_BSNH)
    return logits_BNS * query_BSNH.shape[-1] ** -0.5


def _transform(hidden_BSD, params, segments_BS):
    del segments_BS
    gate_BSF = _product("bsd,df->bsf", hidden_BSD, params["gate_LDF"])
    up_BSF = _product("bsd,df->bsf", hidden_BSD, params["up_LDF"])
    return _product("bsf,fd->bsd", jax.nn.silu(gate_BSF) * up_BSF, params["down_LFD"])


def _rotate(values_BSNH):
    """Turn each pair (x_i, x_{i + H/2}) by position * base^(-2 i / H)."""
    length, size = values_BSNH.shape[1], values_BSNH.shape[3]
    rate_H = _ROTARY_BASE ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angle_SH = jnp.arange(length, dtype=jnp.float32)[:, None] * rate_H[None]
    cos, sin = jnp.cos(angle_SH)[None, :, None], jnp.sin(angle_SH)[None, :, None]
    left, right = jnp.split(values_BSNH.astype(jnp.float32), 2, axis=-1)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(values_BSNH.dtype)


def _normalise(hidden_BSD, scale_D):
    """RMSNorm in float32."""
    wide_BSD = hidden_BSD.astype(jnp.float32)
    mean_BS1 = jnp.mean(wide_BSD**2, axis=-1, keepdims=True)
    normal_BSD = wide_BSD * lax.rsqrt(mean_BS1 + _EPSILON) * scale_D[None, None]
    return normal_BSD.astype(hidden_BSD.dtype)


def _product(axes, values, weight):
    """An einsum in the dtype of the activations."""
    return jnp.einsum(axes, values, weight.astype(values.dtype))
