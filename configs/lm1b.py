"""One Billion Words: the MoS paper's LSTM at 100,000 words, or a transformer at all.

    python launch/train.py --config configs/lm1b.py:mos --workdir runs/lm1b-mos \
        --config.data.path=data/lm1b
    python launch/train.py --config configs/lm1b.py:mos,modern --distributed \
        --workdir runs/lm1b-modern --config.data.path=data/lm1b \
        --config.mesh.data=none --config.mesh.model=4

`data.path` is a folder in the benchmark's own layout, plain or compressed, or a TFDS
data set prepared as array_record. Heads: mos (112,850,364 parameters), softmax
(119,293,600), moc, moss, sigsoftmax. With `modern`: 12 blocks of width 1,024, every one
of the benchmark's 793,471 words, K = 4, sentences packed; 560,895,359 parameters. Up to
32 devices may be vocabulary parallel (mesh.model), with `modern` 128.

Paper, test perplexity: softmax 42.77, MoS 37.10. The widths are the paper's; its
optimizer was not published in full, and the one here is AdamW. A bias that AdamW has to
learn from zero costs units of the state (docs/results/frontier-zero.md): it starts at
the words' log-frequencies. The softmax reads 8 times the LSTM's state, which is worth
6% (docs/results/frontier.md); mixtures, which project it, read it as it is.
"""

from softbottle.config import Config

MIXTURES = ("mos", "moc", "moss")
HEADS = (*MIXTURES, "softmax", "sigsoftmax")


def get_config(argument: str = "mos") -> Config:
    head, *variants = argument.split(",")
    if head not in HEADS or variants not in ([], ["modern"]):
        raise ValueError(f"{argument!r} is not HEAD[,modern]; heads are {HEADS}.")
    config = Config()
    data = config.data
    model = config.model
    optim = config.optim
    data.name = "lm1b"
    data.path = "data/lm1b"
    data.vocab_size = 100_000
    data.lowercase = True
    data.rows = 128
    data.length = 20
    data.eval_rows = 64
    data.test_rows = 64
    data.eval_length = 20
    model.layers = 2
    model.compute_dtype = "bfloat16"
    model.vocab_multiple = 32
    model.bias_start = "frequency"
    model.hidden_dim = 1024
    model.last_dim = 1024
    model.embed_dim = 900 if head in MIXTURES else 1024
    model.gain = 8.0 if head == "softmax" else 1.0
    config.head.name = head
    if head in MIXTURES:
        config.head.components = 7
        config.head.context = "tanh"
    optim.name = "adamw"
    optim.learning_rate = 1e-3
    optim.clip = 1.0
    optim.warmup_steps = 1000
    optim.decay_steps = 320_000
    config.train.steps = None
    config.train.epochs = 1
    config.train.eval_every = 10_000
    config.train.checkpoint_every = 10_000
    config.train.log_every = 200
    return _modernized(config) if variants else config


def _modernized(config):
    data = config.data
    model = config.model
    optim = config.optim
    data.vocab_size = 793_471
    data.lowercase = False
    data.unit = "packed"
    data.rows = 256
    data.length = 256
    data.eval_rows = 256
    data.test_rows = 256
    data.eval_length = 256
    model.backbone = "transformer"
    model.gain = 1.0  # its last norm has a factor of its own
    model.layers = 12
    model.attention_heads = 16
    model.remat = True
    model.scan_layers = True
    model.vocab_multiple = 128
    model.embed_dim = 512 if config.head.name in MIXTURES else 1024
    if config.head.name in MIXTURES:
        config.head.components = 4
    optim.learning_rate = 5e-4
    optim.table_learning_rate = 2e-3  # docs/results/frontier.md
    optim.weight_decay = 0.1
    optim.warmup_steps = 500
    optim.decay_steps = 12_600
    config.train.eval_every = 1000
    config.train.checkpoint_every = 1000
    config.train.log_every = 20
    return config
