"""Output heads: values with pure methods; needs jax alone. See base.py, table.py."""

from softbottle.heads.base import Head as Head
from softbottle.heads.base import Mixture as Mixture
from softbottle.heads.cache import Cached as Cached
from softbottle.heads.cache import Memory as Memory
from softbottle.heads.cache import cached as cached
from softbottle.heads.cache import given as given
from softbottle.heads.cache import history as history
from softbottle.heads.doc import doc as doc
from softbottle.heads.lowrank import lowrank as lowrank
from softbottle.heads.mfs import mfs as mfs
from softbottle.heads.mixtape import mixtape as mixtape
from softbottle.heads.moc import moc as moc
from softbottle.heads.mos import mos as mos
from softbottle.heads.partition import partition as partition
from softbottle.heads.plif import plif as plif
from softbottle.heads.sigsoftmax import gss as gss
from softbottle.heads.sigsoftmax import moss as moss
from softbottle.heads.sigsoftmax import sigsoftmax as sigsoftmax
from softbottle.heads.softcap import softcap as softcap
from softbottle.heads.softmax import softmax as softmax
from softbottle.heads.start import log_frequencies as log_frequencies
from softbottle.heads.table import HEADS as HEADS
from softbottle.heads.table import from_config as from_config
from softbottle.heads.table import settings as settings
