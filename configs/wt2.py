"""WikiText-2 (`wiki.*.tokens`) with the AWD-LSTM and MoS recipes.

    python launch/train.py --config configs/wt2.py:mos --workdir runs/wt2-mos \
        --config.data.path=data/wikitext-2
    python launch/train.py --config configs/wt2.py:mos,finetune \
        --workdir runs/wt2-mos-fine --config.train.init_from=runs/wt2-mos \
        --config.data.path=data/wikitext-2

Heads and stages are those of configs/ptb.py.

Papers, valid / test: softmax 69.1 / 66.0; MoS 66.01 / 63.33, finetuned 63.88 / 61.45,
with dynamic evaluation 42.41 / 40.68. What this repository measured, and how long it
took, is in BUILD_NOTES.md.
"""

import importlib.util
import pathlib

from softbottle.config import Config


def get_config(argument: str = "mos") -> Config:
    ptb = _sibling("ptb")
    config = ptb.get_config(argument)
    config.data.name, config.data.path = "wt2", "data/wikitext-2"
    config.seed = 1882
    finetune = "finetune" in argument.split(",")
    if config.head.name in ptb.MIXTURES:
        config.data.rows, config.data.max_delta = 15, 20
        model = config.model
        model.embed_dim, model.hidden_dim, model.last_dim = 300, 1150, 650
        config.regularise.input, config.regularise.hidden = 0.55, 0.2
        config.optim.learning_rate = 20.0 if finetune else 15.0
    else:
        config.data.rows = 80
        config.regularise.input, config.regularise.hidden = 0.65, 0.2
        config.train.epochs = 750
    if config.head.name == "gss":
        config.head.slope = 3.0
    return config


def _sibling(name):
    """Another file of this folder; config files are loaded by path, not as modules."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"{name}_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
