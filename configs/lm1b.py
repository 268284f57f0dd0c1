"""One Billion Words: the MoS paper's LSTM at 100,000 words, or a transformer at all.

    python launch/train.py --config configs/lm1b.py:mos --workdir runs/lm1b-mos \
        --config.data.path=data/lm1b
    python launch/train.py --config configs/lm1b.py:mos,modern --distributed \
        --workdir runs/lm1b-modern --config.data.path=data/lm1b \
        --config.mesh.data=-1 --config.mesh.model=4

`data.path` is a folder in the benchmark's own layout, plain or compressed, or a TFDS
data set prepared as array_record. Heads: mos (112,850,364 parameters), softmax
(119,293,600), moc, moss, sigsoftmax. With `modern`: 12 blocks of width 1,024, every one
of the benchmark's 793,471 words, K = 4, sentences packed; 560,895,359 parameters. Up to
32 devices may share a table (mesh.model), with `modern` 128.

Paper, test perplexity: softmax 42.77, MoS 37.10. The widths are the paper's; its
optimiser was not published in full, and the one here is AdamW.
"""

from softbottle.config import Config

MIXTURES = ("mos", "moc", "moss")
HEADS = (*MIXTURES, "softmax", "sigsoftmax")


def get_config(argument: str = "mos") -> Config:
    head, *variants = argument.split(",")
    if head not in HEADS or variants not in ([], ["modern"]):
        raise ValueError(f"{argument!r} is not HEAD[,modern]; heads are {HEADS}.")
    config = Config()
    data, model, optim = config.data, config.model, config.optim
    data.name, data.path = "lm1b", "data/lm1b"
    data.vocab_size, data.lowercase = 100_000, True
    data.rows, data.length = 128, 20
    data.eval_rows, data.test_rows, data.eval_length = 64, 64, 20
    model.layers, model.compute_dtype, model.vocab_multiple = 2, "bfloat16", 32
    model.hidden_dim = model.last_dim = 1024
    model.embed_dim = 900 if head in MIXTURES else 1024
    config.head.name = head
    if head in MIXTURES:
        config.head.components = 7
    optim.name, optim.learning_rate, optim.clip = "adamw", 1e-3, 1.0
    optim.warmup_steps, optim.decay_steps = 1000, 320_000
    config.train.steps, config.train.epochs = 0, 1
    config.train.eval_every = config.train.checkpoint_every = 10_000
    config.train.log_every = 200
    return _modernised(config) if variants else config


def _modernised(config):
    data, model, optim = config.data, config.model, config.optim
    data.vocab_size, data.lowercase, data.unit = 793_471, False, "packed"
    data.rows, data.length = 256, 256
    data.eval_rows, data.test_rows, data.eval_length = 256, 256, 256
    model.backbone, model.layers, model.attention_heads = "transformer", 12, 16
    model.remat = model.scan_layers = True
    model.vocab_multiple = 128
    model.embed_dim = 512 if config.head.name in MIXTURES else 1024
    if config.head.name in MIXTURES:
        config.head.components = 4
    optim.learning_rate, optim.weight_decay = 5e-4, 0.1
    optim.warmup_steps, optim.decay_steps = 500, 12_600
    config.train.eval_every = config.train.checkpoint_every = 1000
    config.train.log_every = 20
    return config
