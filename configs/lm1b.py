"""One Billion Words at 100,000 lower-cased words, with the MoS paper's LSTM.

    python launch/train.py --config configs/lm1b.py:mos --workdir runs/lm1b-mos \
        --config.data.path=data/lm1b

`data.path` is a folder in the benchmark's own layout, plain or compressed, or a TFDS
data set prepared as array_record. Heads: mos (112,850,364 parameters), softmax
(119,293,600), moc, moss, sigsoftmax.

Paper, test perplexity: softmax 42.77, MoS 37.10. The widths are the paper's; its
optimiser was not published in full, and the one here is AdamW.
"""

from softbottle.config import Config

MIXTURES = ("mos", "moc", "moss")
HEADS = (*MIXTURES, "softmax", "sigsoftmax")


def get_config(head: str = "mos") -> Config:
    if head not in HEADS:
        raise ValueError(f"no head {head!r} here; there are {HEADS}.")
    config = Config()
    data, model, optim = config.data, config.model, config.optim
    data.name, data.path = "lm1b", "data/lm1b"
    data.vocab_size, data.lowercase = 100_000, True
    data.rows, data.length = 128, 20
    data.eval_rows, data.test_rows, data.eval_length = 64, 64, 20
    model.layers, model.compute_dtype = 2, "bfloat16"
    model.hidden_dim = model.last_dim = 1024
    model.embed_dim = 900 if head in MIXTURES else 1024
    config.head.name = head
    config.head.components = 7 if head in MIXTURES else 1
    optim.name, optim.learning_rate, optim.clip = "adamw", 1e-3, 1.0
    optim.warmup_steps, optim.decay_steps = 1000, 320_000
    config.train.steps, config.train.epochs = 0, 1
    config.train.eval_every = config.train.checkpoint_every = 10_000
    config.train.log_every = 200
    return config
