"""Backbones: embedded tokens in, hidden states out."""

from typing import Any

from softbottle.backbones import awd_lstm, dropout, transformer, window
from softbottle.backbones.base import Trunk
from softbottle.backbones.side_by_side import SideBySide
from softbottle.config import BACKBONES, Config
from softbottle.ops.device import Device

__all__ = ["Trunk", "check_layers", "make", "read_widths"]


def make(
    config: Config,
    device: Device | None = None,
    layers: int = 1,
    positions: int = 1,
) -> Any:
    """The backbone of `config.model`, with the rates of `config.regularise`.

    All of them have the methods

        initial_carry(rows) -> carry
        apply(variables, embedded_BSE, carry, segments_BS, train=..., rngs=...) -> Trunk
        recurrence(rows) -> how the recurrent layers are computed, or None

    where `rngs` holds "dropout" in training, if any rate is above 0.

    Args:
        config: of a run.
        device: what it will run on; None is jax's first.
        layers: how many of the last ones have their states in `hidden_BSD`.
        positions: how many positions have, the token's own included.

    Raises:
        ValueError: if `config.model.backbone` is not one of `config.BACKBONES`, or has
            fewer layers.
    """
    check_layers(config, layers)
    narrow = _narrow(config, device, layers - 1)
    if layers == positions == 1:
        return narrow
    return SideBySide(narrow, sum(read_widths(config, layers, 1)), positions)


def check_layers(config: Config, layers: int) -> None:
    """Raise ValueError if the backbone has fewer layers than a head reads."""
    model = config.model
    there = 1 if model.backbone == "window" else model.layers
    if layers > there:
        raise ValueError(
            f"the head reads {layers} layers, but the {model.backbone} has {there} "
            "(model.layers)."
        )


def read_widths(config: Config, layers: int, positions: int) -> tuple[int, ...]:
    """The widths of the states side by side: see side_by_side.py."""
    model = config.model
    return (model.last_dim, *(model.hidden_dim,) * (layers - 1)) * positions


def _narrow(config: Config, device: Device | None, lower: int) -> Any:
    """The linen module, whose `lower` layers give their states beside the last."""
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
            return awd_lstm.AwdLstm(widths, device=device, lower=lower, **shared)
        case "transformer":
            return transformer.Transformer(
                layers=model.layers,
                attention_heads=model.attention_heads,
                remat=model.remat,
                scan_layers=model.scan_layers,
                lower=lower,
                **sizes,
                **shared,
            )
        case "window":
            return window.Window(model.order, model.embed_dim, **sizes, **shared)
    raise ValueError(
        f"model.backbone must be one of {BACKBONES}, got {model.backbone!r}."
    )
