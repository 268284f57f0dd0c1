"""The settings of a model with another head: what a head is compared with.

`with_head` keeps what the other head has as well and sets the table's width,
`replace_head` has the given settings alone, `equal_softmax` is the widest softmax of no
more parameters.
"""

import bisect
from collections.abc import Mapping
from typing import Any

import jax

from softbottle import config as config_lib
from softbottle import heads, model


def with_head(config: config_lib.Config, name: str, width: int) -> config_lib.Config:
    """The same settings with another head and another width of the output table.

    Of the head's settings those stay that the other has as well; the penalty on uneven
    components goes where it has none. A head that reads the state as its context gets a
    last layer of that width.

    Raises:
        ValueError: if there is no such head, or it needs a setting that is not set.
    """
    values, own = config_lib.to_dict(config), heads.settings(name)
    for setting in heads.settings(config.head.name):
        if setting not in own:
            values["head"][setting] = None
    values["head"] |= {"name": name}
    if "components" not in own:
        values["regularise"] |= {"balance": 0.0}
    values["model"] |= {"context_dim": width}
    if config.model.tied:
        values["model"] |= {"embed_dim": width}
    variant = config_lib.from_dict(values)
    if not heads.from_config(variant.head).projects:
        variant.model.last_dim = width
    return variant


def replace_head(
    config: config_lib.Config, settings: Mapping[str, Any]
) -> config_lib.Config:
    """The same settings with a head of these alone; all others have its defaults.

    How the loss is computed stays: `budget_mib` and `implementation`.

    Raises:
        ValueError: for a setting that no head has.
    """
    values = config_lib.to_dict(config)
    for name in values["head"]:
        if name not in ("budget_mib", "implementation"):
            values["head"][name] = None
    values["head"] |= settings
    return config_lib.from_dict(values)


def equal_softmax(
    config: config_lib.Config, vocab: int, parameters: int
) -> config_lib.Config:
    """The same settings with the widest softmax of at most this many parameters."""

    def size(width):
        init = model.make(with_head(config, "softmax", width), vocab).init
        params = jax.eval_shape(init, jax.random.key(0))
        return model.count_parameters(params, vocab)

    most = 1
    while size(most) <= parameters:
        most *= 2
    width = max(1, bisect.bisect_right(range(most), parameters, lo=1, key=size) - 1)
    rival = with_head(config, "softmax", width)
    rival.train.equal_softmax = False
    return rival
