"""Sentences of public-domain books, and a small transformer with a cache of each.

    python launch/train.py --config configs/books.py:plain --config.data.path=data/books
    python launch/train.py --config configs/books.py:trime --config.data.path=data/books
    python launch/train.py --config configs/books.py:histalign \
        --config.data.path=data/books
    python launch/continuation.py --workdir runs/books-plain \
        --workdir runs/books-trime --workdir runs/books-histalign --out runs/continued

`data.path` is a folder of shuffled sentences in the layout of One Billion Words. Each
is a text of its own, so the cache is of the sentence alone. Objectives are those of
configs/templates.py; with `finetune` (`:trime,finetune`) a run has 500 steps from
another, `train.init_from`, instead of 3,000 (49 million words) from scratch. On an H200
1,500 steps took half a minute and gave 65 to 77 (docs/results/books.md).
"""

from softbottle.config import OBJECTIVES, Config


def get_config(argument: str = "histalign") -> Config:
    objective, *stages = argument.split(",")
    if objective not in OBJECTIVES or stages not in ([], ["finetune"]):
        raise ValueError(
            f"{argument!r} is not OBJECTIVE[,finetune]; objectives are {OBJECTIVES}."
        )
    config = Config()
    data = config.data
    model = config.model
    optim = config.optim
    data.name = "lm1b"
    data.path = "data/books"
    data.unit = "packed"
    data.vocab_size = 20_000
    data.lowercase = True
    data.rows = 64
    data.length = 256
    data.eval_rows = 64
    data.test_rows = 64
    data.eval_length = 256
    config.head.name = "softmax"
    model.backbone = "transformer"
    model.layers = 6
    model.attention_heads = 4
    model.embed_dim = 256
    model.hidden_dim = 256
    model.last_dim = 256
    model.compute_dtype = "bfloat16"
    config.cache.objective = objective
    optim.learning_rate = 1e-3
    optim.clip = 1.0
    optim.weight_decay = 0.01
    optim.warmup_steps = 200
    config.train.steps = 3000
    config.train.checkpoint_every = 3000
    config.train.eval_every = 1000
    config.train.log_every = 100
    if stages:
        optim.learning_rate = 2e-4
        optim.warmup_steps = 50
        config.train.steps = 500
        config.train.eval_every = 500
    optim.decay_steps = config.train.steps
    return config
