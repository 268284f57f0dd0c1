"""Language-model output heads beyond the softmax bottleneck.

    head = softbottle.mos(components=15)
    params = head.init(key, hidden_dim=620, context_dim=280)
    loss = head.loss(params, table_VE, bias_V, hidden_TD, labels_T, weights_T)

Importing this package loads jax and nothing heavier; training, data and analysis live
in the submodules.
"""

import importlib
import types

from softbottle import ops
from softbottle.heads import (
    Cached,
    Head,
    Memory,
    Mixture,
    cached,
    doc,
    given,
    gss,
    history,
    log_frequencies,
    lowrank,
    mfs,
    mixtape,
    moc,
    mos,
    moss,
    partition,
    plif,
    sigsoftmax,
    softcap,
    softmax,
)
from softbottle.ops import Options

__version__ = "0.2.0"

__all__ = [
    "Cached",
    "Head",
    "Memory",
    "Mixture",
    "Options",
    "cached",
    "doc",
    "given",
    "gss",
    "history",
    "log_frequencies",
    "lowrank",
    "mfs",
    "mixtape",
    "moc",
    "mos",
    "moss",
    "ops",
    "partition",
    "plif",
    "sigsoftmax",
    "softcap",
    "softmax",
]


def __getattr__(name: str) -> types.ModuleType:
    # Imported at first use: it needs flax, which is no dependency of the core.
    if name == "modules":
        return importlib.import_module("softbottle.modules")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
