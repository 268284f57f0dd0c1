"""WikiText-2 (`wiki.*.tokens`) with the AWD-LSTM and MoS recipes.

    python launch/train.py --config configs/wt2.py:mos --workdir runs/wt2-mos \
        --config.data.path=data/wikitext-2
    python launch/train.py --config configs/wt2.py:mos,finetune \
        --workdir runs/wt2-mos-fine --config.train.init_from=runs/wt2-mos \
        --config.data.path=data/wikitext-2

Heads and stages are those of configs/ptb.py.

Papers, valid / test: softmax 69.1 / 66.0; MoS 66.01 / 63.33, finetuned 63.88 / 61.45,
with dynamic evaluation 42.41 / 40.68. What this repository measured, and how long it
took, is in docs/results/wt2.md.
"""

from configs import ptb
from softbottle.config import Config


def get_config(argument: str = "mos") -> Config:
    config = ptb.get_config(argument)
    config.data.name = "wt2"
    config.data.path = "data/wikitext-2"
    config.seed = 1882
    finetune = "finetune" in argument.split(",")
    if config.head.name in ptb.MIXTURES:
        config.data.rows = 15
        config.data.max_delta = 20
        model = config.model
        model.embed_dim = 300
        model.hidden_dim = 1150
        model.last_dim = 650
        config.regularise.input = 0.55
        config.regularise.hidden = 0.2
        config.optim.learning_rate = 20.0 if finetune else 15.0
    else:
        config.data.rows = 80
        config.regularise.input = 0.65
        config.regularise.hidden = 0.2
        config.train.epochs = 750
    if config.head.name == "gss":
        config.head.slope = 3.0
    return config
