"""Backbones: embedded tokens in, hidden states out."""

from typing import Any

from flax import linen

from softbottle.backbones import awd_lstm, dropout, transformer, window
from softbottle.backbones.base import Trunk
from softbottle.config import BACKBONES, Config
from softbottle.ops.device import Device

__all__ = ["Trunk", "make"]


def make(config: Config, device: Device | None = None) -> linen.Module:
    """The backbone of `config.model`, with the rates of `config.regularise`.

    All of them have the methods

        initial_carry(rows) -> carry
        apply(variables, embedded_BSE, carry, segments_BS, train=..., rngs=...) -> Trunk

    where `rngs` holds "dropout" in training, if any rate is above 0.

    Args:
        config: of a run.
        device: what it will run on; None is jax's first.

    Raises:
        ValueError: if `config.model.backbone` is not one of `config.BACKBONES`.
    """
    model = config.model
    rates = dropout.Rates(
        **{name: getattr(config.regularise, name) for name in dropout.Rates._fields}
    )
    shared: dict[str, Any] = {"rates": rates, "compute_dtype": model.compute_dtype}
    sizes: dict[str, Any] = {
        name: getattr(model, name) for name in ("hidden_dim", "last_dim")
    }
    match model.backbone:
        case "awd_lstm":
            inner = (model.hidden_dim,) * (model.layers - 1)
            widths = (model.embed_dim, *inner, model.last_dim)
            return awd_lstm.AwdLstm(widths, device=device, **shared)
        case "transformer":
            return transformer.Transformer(
                layers=model.layers,
                attention_heads=model.attention_heads,
                remat=model.remat,
                scan_layers=model.scan_layers,
                **sizes,
                **shared,
            )
        case "window":
            return window.Window(model.order, model.embed_dim, **sizes, **shared)
    raise ValueError(
        f"model.backbone must be one of {BACKBONES}, got {model.backbone!r}."
    )
