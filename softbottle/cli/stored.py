"""A config file whose argument is the config.json of a run.

`--config runs/ptb-mos/config.json` stands for this file with that argument.
"""

import pathlib

from softbottle.config import Config
from softbottle.training import state


def get_config(path: str) -> Config:
    """The settings that a run was started with."""
    return state.load_config(pathlib.Path(path).parent)
