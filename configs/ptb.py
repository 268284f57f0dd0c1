"""Penn Treebank (Mikolov's files) with the AWD-LSTM and MoS recipes.

    python launch/train.py --config configs/ptb.py:mos --workdir runs/ptb-mos \
        --config.data.path=data/ptb
    python launch/train.py --config configs/ptb.py:mos,finetune \
        --workdir runs/ptb-mos-fine --config.train.init_from=runs/ptb-mos \
        --config.data.path=data/ptb
    python launch/evaluate.py --workdir runs/ptb-mos-fine --split test --dynamic \
        --sums --learning_rate 0.002 --decay 0.075 --epsilon 0.001

Heads: mos, moc, moss (the MoS paper's widths), softmax, sigsoftmax, gss, plif (the
AWD-LSTM's). Stages: finetune; `et` switches to averaging at epoch 200 instead of by the
non-monotone trigger, which is about one perplexity better.

Papers, valid / test: softmax 60.7 / 58.8; MoS 58.08 / 55.97, finetuned 56.54 / 54.44,
with dynamic evaluation 48.33 / 47.69. What this repository measured, and how long it
took, is in docs/results/ptb.md.
"""

from softbottle.config import Config

MIXTURES = ("mos", "moc", "moss")
HEADS = (*MIXTURES, "softmax", "sigsoftmax", "gss", "plif")
STAGES = ("finetune", "et")


def get_config(argument: str = "mos") -> Config:
    head, *stages = argument.split(",")
    if head not in HEADS or not set(stages) <= set(STAGES):
        raise ValueError(
            f"{argument!r} is not HEAD[,STAGE]; heads are {HEADS}, stages {STAGES}."
        )
    config = Config()
    config.data.name = "ptb"
    config.data.path = "data/ptb"
    config.data.length = 70
    config.data.variable = True
    config.data.max_delta = 40
    config.model.layers = 3
    config.model.compute_dtype = "bfloat16"
    config.head.name = head
    regularise = config.regularise
    regularise.rows = 0.1
    regularise.input = 0.4
    regularise.recurrent = 0.5
    regularise.output = 0.4
    regularise.activation = 2.0
    regularise.slowness = 1.0
    optim = config.optim
    optim.name = "sgd"
    optim.clip = 0.25
    optim.weight_decay = 1.2e-6
    optim.averaging = "nt"
    optim.patience = 5
    config.train.steps = None
    config.train.log_every = 200
    config.train.checkpoint_every = 5000
    (_mixture if head in MIXTURES else _single)(config)
    if head == "gss":
        config.head.center = -1.5
        config.head.slope = 2.5
    if head == "plif":
        optim.slope_learning_rate = 0.02
    if "et" in stages:
        optim.averaging = "et"
        optim.switch_epoch = 200
    if "finetune" in stages:
        optim.averaging = "now"
        config.train.stop_patience = 5
        optim.learning_rate = 25.0 if head in MIXTURES else 30.0
    return config


def _mixture(config):
    """The MoS paper's settings."""
    config.data.rows = 12
    config.head.components = 15
    config.head.context = "tanh"
    model = config.model
    model.embed_dim = 280
    model.hidden_dim = 960
    model.last_dim = 620
    config.regularise.hidden = 0.225
    config.regularise.latent = 0.29
    config.optim.learning_rate = 20.0
    config.train.epochs = 1000
    config.seed = 28


def _single(config):
    """The AWD-LSTM's settings."""
    config.data.rows = 20
    model = config.model
    model.embed_dim = 400
    model.hidden_dim = 1150
    model.last_dim = 400
    config.regularise.hidden = 0.25
    config.optim.learning_rate = 30.0
    config.train.epochs = 500
    config.seed = 141
