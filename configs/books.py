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
    data, model, optim = config.data, config.model, config.optim
    data.name, data.path, data.unit = "lm1b", "data/books", "packed"
    data.vocab_size, data.lowercase = 20_000, True
    data.rows, data.length = 64, 256
    data.eval_rows, data.test_rows, data.eval_length = 64, 64, 256
    config.head.name = "softmax"
    model.backbone, model.layers, model.attention_heads = "transformer", 6, 4
    model.embed_dim = model.hidden_dim = model.last_dim = 256
    model.compute_dtype = "bfloat16"
    config.cache.objective = objective
    optim.learning_rate, optim.clip, optim.weight_decay = 1e-3, 1.0, 0.01
    optim.warmup_steps = 200
    config.train.steps = config.train.checkpoint_every = 3000
    config.train.eval_every, config.train.log_every = 1000, 100
    if stages:
        optim.learning_rate, optim.warmup_steps = 2e-4, 50
        config.train.steps = config.train.eval_every = 500
    optim.decay_steps = config.train.steps
    return config
