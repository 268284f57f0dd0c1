"""The one list of heads, and how a config chooses from it.

A new head is a file of this package, a line here and a line in the contract test. Its
fields are its settings; those that a config may set are fields of `config.Head` too.
"""

import dataclasses

from softbottle import config as config_lib
from softbottle.heads.base import Head
from softbottle.heads.doc import DirectOutputConnection
from softbottle.heads.lowrank import LowRank
from softbottle.heads.mfs import MultiFacet
from softbottle.heads.mixtape import Mixtape
from softbottle.heads.moc import MixtureOfContexts
from softbottle.heads.mos import MixtureOfSoftmaxes
from softbottle.heads.partition import Partition
from softbottle.heads.plif import PiecewiseLinear
from softbottle.heads.sigsoftmax import (
    GeneralizedSigsoftmax,
    MixtureOfSigsoftmaxes,
    Sigsoftmax,
)
from softbottle.heads.softcap import Softcap
from softbottle.heads.softmax import Softmax

HEADS: dict[str, type[Head]] = {
    head.name: head
    for head in (
        Softmax,
        MixtureOfContexts,
        MixtureOfSoftmaxes,
        Sigsoftmax,
        MixtureOfSigsoftmaxes,
        GeneralizedSigsoftmax,
        PiecewiseLinear,
        LowRank,
        Softcap,
        Partition,
        Mixtape,
        DirectOutputConnection,
        MultiFacet,
    )
}


def settings(name: str) -> list[str]:
    """The settings of a head, in the order of its call.

    Raises:
        ValueError: if there is no such head, with those that there are.
    """
    if name not in HEADS:
        raise ValueError(f"head.name must be one of {tuple(HEADS)}, got {name!r}.")
    return HEADS[name].settings()


def from_config(config: config_lib.Head) -> Head:
    """The head that a config names, with the settings that are not None.

    Raises:
        ValueError: naming the field if there is no such head, a setting is not one of
            the head's, is out of its range, or has no default and is not set.
    """
    own = settings(config.name)
    every = {setting for name in HEADS for setting in settings(name)}
    values = {
        name: value
        for name in sorted(every)
        if (value := getattr(config, name)) is not None
    }
    for name, value in values.items():
        if name not in own:
            raise ValueError(
                f"head.{name}={value!r} is not a setting of {config.name}, which has "
                f"{own}; head.{name}=none takes it back."
            )
    for field in dataclasses.fields(HEADS[config.name]):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ValueError(
                f"head.{field.name} must be set: {config.name} has no default for it."
            )
    try:
        return HEADS[config.name](**values)
    except ValueError as error:
        raise ValueError(f"head.{error}") from error
