"""Language-model output heads beyond the softmax bottleneck.

    head = softbottle.mos(components=15)
    params = head.init(key, hidden_dim=620, context_dim=280)
    loss = head.loss(params, table_VE, bias_V, hidden_TD, labels_T, weights_T)

Importing this package loads nothing; the first use of a name loads jax and the heads.
Training, data and analysis live in the submodules.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from softbottle import ops
    from softbottle.analysis.capture import Capture
    from softbottle.heads.base import Head, Mixture
    from softbottle.heads.cache import Cached, Memory, cached, given, history
    from softbottle.heads.distillation import AllWords, Output, TopWords, distill
    from softbottle.heads.doc import doc
    from softbottle.heads.lowrank import lowrank
    from softbottle.heads.mfs import mfs
    from softbottle.heads.mixtape import mixtape
    from softbottle.heads.moc import moc
    from softbottle.heads.mos import mos
    from softbottle.heads.partition import partition
    from softbottle.heads.plif import plif
    from softbottle.heads.sigsoftmax import gss, moss, sigsoftmax
    from softbottle.heads.softcap import softcap
    from softbottle.heads.softmax import softmax
    from softbottle.heads.start import log_frequencies
    from softbottle.ops import Options

__version__ = "0.2.0"

__all__ = [
    "AllWords",
    "Cached",
    "Capture",
    "Head",
    "Memory",
    "Mixture",
    "Options",
    "Output",
    "TopWords",
    "cached",
    "distill",
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

# Where a name that is no head's comes from; the rest is of softbottle.heads.
_OWNERS = {"Capture": "softbottle.analysis.capture", "Options": "softbottle.ops"}


def __getattr__(name: str) -> typing.Any:
    # At first use: `softbottle --help` does not wait for jax, and `modules` needs flax,
    # which is no dependency of the core.
    if name in ("heads", "modules", "ops"):
        return importlib.import_module(f"softbottle.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    owner = importlib.import_module(_OWNERS.get(name, "softbottle.heads"))
    value = globals()[name] = getattr(owner, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "modules"})
