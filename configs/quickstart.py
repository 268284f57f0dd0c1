"""See the softmax bottleneck on a laptop, on a language made on the spot.

    python launch/train.py --config configs/quickstart.py
    python launch/train.py --config configs/quickstart.py:softmax
    python launch/train.py --config configs/quickstart.py:mos,random

Heads: mos (default), softmax, moc, sigsoftmax, moss. All see the same text through the
same width d = 4; a softmax of that width can give its log-probabilities rank 6, and
the language has rank 512. Its 512 words have two readings each, which a mixture can
tell apart. Beside mos two softmaxes are trained: one of the same width, and one with as
many parameters.

`random` is the other language: 64 words without any structure, d = 8. There a softmax
with as many parameters as mos does better than mos.

docs/results/quickstart.md has the numbers to expect, and how both were chosen.
"""

from softbottle.config import Config

HEADS = ("mos", "softmax", "moc", "sigsoftmax", "moss")
MIXTURES = ("mos", "moc", "moss")


def get_config(argument: str = "mos") -> Config:
    head, *languages = argument.split(",")
    if head not in HEADS or languages not in ([], ["random"]):
        raise ValueError(
            f"{argument!r} is not HEAD[,random]; heads are {sorted(HEADS)}."
        )
    config = Config()
    config.data.synthetic.eval_tokens = 100_000
    config.data.length = 32
    config.data.eval_rows = 100
    config.data.test_rows = 100
    config.head.name = head
    config.model.backbone = "window"
    config.model.tied = False
    config.model.embed_dim = 64
    config.model.hidden_dim = 64
    config.model.table_range = 1.0
    config.optim.warmup_steps = 50
    if languages:
        _random(config)
    else:
        _readings(config)
    if head not in MIXTURES:
        # A mixture's contexts are projections of a state that may be wider than they
        # are; a single softmax reads the state itself.
        config.head.components = config.head.context = None
        config.model.last_dim = config.model.context_dim
    config.optim.decay_steps = config.train.steps
    config.train.eval_every = 1000
    config.train.checkpoint_every = 1000
    config.train.log_every = 200
    config.train.equal_softmax = config.train.same_width_softmax = head == "mos"
    return config


def _readings(config):
    """Words with two readings: see data/synthetic.py."""
    config.data.synthetic.words = 512
    config.data.synthetic.readings = 2
    config.data.synthetic.rank = 4
    config.data.synthetic.spread = 4.0
    config.data.synthetic.train_tokens = 1_100_000
    config.data.rows = 16
    config.head.components = 3
    config.model.context_dim = 4
    config.model.last_dim = 16
    config.optim.learning_rate = 3e-2
    config.train.steps = 2000


def _random(config):
    """Words without structure, and the settings that mos likes best on them."""
    config.data.synthetic.words = 64
    config.data.synthetic.train_tokens = 2_000_000
    config.data.rows = 32
    config.head.components = 8
    config.head.context = "tanh"
    config.model.context_dim = 8
    config.model.last_dim = 64
    config.optim.learning_rate = 1e-2
    config.train.steps = 2000
