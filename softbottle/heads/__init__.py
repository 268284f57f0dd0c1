"""Output heads: values with pure methods; needs jax alone. See base.py, table.py."""

from softbottle.heads.base import Head, Mixture
from softbottle.heads.cache import Cached, Memory, cached, given, history
from softbottle.heads.lowrank import lowrank
from softbottle.heads.moc import moc
from softbottle.heads.mos import mos
from softbottle.heads.plif import plif
from softbottle.heads.sigsoftmax import gss, moss, sigsoftmax
from softbottle.heads.softcap import softcap
from softbottle.heads.softmax import softmax
from softbottle.heads.table import HEADS, from_config, settings

__all__ = [
    "HEADS",
    "Cached",
    "Head",
    "Memory",
    "Mixture",
    "cached",
    "from_config",
    "given",
    "gss",
    "history",
    "lowrank",
    "moc",
    "mos",
    "moss",
    "plif",
    "settings",
    "sigsoftmax",
    "softcap",
    "softmax",
]
