"""Output heads as pure functions; needs jax alone. See base.py for the contract."""

from softbottle.heads.base import Head, Mixture
from softbottle.heads.cache import Cached, Memory, cached
from softbottle.heads.lowrank import lowrank
from softbottle.heads.moc import moc
from softbottle.heads.mos import mos
from softbottle.heads.plif import plif
from softbottle.heads.sigsoftmax import gss, moss, sigsoftmax
from softbottle.heads.softmax import softmax

__all__ = [
    "Cached",
    "Head",
    "Memory",
    "Mixture",
    "cached",
    "gss",
    "lowrank",
    "moc",
    "mos",
    "moss",
    "plif",
    "sigsoftmax",
    "softmax",
]
