"""See the softmax bottleneck on a laptop, on a language made on the spot.

    python launch/train.py --config configs/quickstart.py
    python launch/train.py --config configs/quickstart.py:softmax

Heads: mos (default), softmax, moc, sigsoftmax, moss. All see the same text through the
same width d = 8; a softmax of that width can give its log-probabilities rank 10, and
the language has rank 64.
"""

from softbottle.config import Config

COMPONENTS = {"softmax": 1, "sigsoftmax": 1, "moc": 8, "mos": 8, "moss": 8}


def get_config(head: str = "mos") -> Config:
    if head not in COMPONENTS:
        raise ValueError(f"no head {head!r} here; there are {sorted(COMPONENTS)}.")
    config = Config()
    config.data.rows = 32
    config.data.length = 32
    config.data.synthetic.words = 64
    config.data.synthetic.train_tokens = 2_000_000
    config.data.synthetic.eval_tokens = 100_000
    config.data.eval_rows = 100
    config.data.test_rows = 100
    config.head.name = head
    if COMPONENTS[head] > 1:
        config.head.components = COMPONENTS[head]
        # What the settings were chosen with: docs/results/quickstart.md.
        config.head.context = "tanh"
    config.model.backbone = "window"
    config.model.tied = False
    config.model.embed_dim = 64
    config.model.hidden_dim = 64
    config.model.context_dim = 8
    # A mixture's contexts are projections of a state that may be wider than they are;
    # a single softmax reads the state itself.
    config.model.last_dim = 64 if COMPONENTS[head] > 1 else 8
    config.model.table_range = 1.0
    config.optim.learning_rate = 1e-2
    config.optim.warmup_steps = 50
    config.optim.decay_steps = 2000
    config.train.steps = 2000
    config.train.eval_every = 1000
    config.train.checkpoint_every = 500
    config.train.log_every = 100
    config.train.equal_softmax = head == "mos"
    return config
