"""Lines with two right answers, and a small transformer with a cache of the line.

    python launch/train.py --config configs/templates.py:plain
    python launch/train.py --config configs/templates.py:histalign,finetune \
        --config.train.init_from=runs/templates-plain

Objectives: plain (no cache in training), trime (the likelihood with the cache) and
histalign (the same, and the ranking loss), from scratch or, with `finetune`, from
another run. All are tested with and without the cache and with the cache alone.

On a CPU a run of 2,000 steps takes one to three minutes, of which finetuning has 300.
docs/results/templates.md has the accuracies to expect.
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
    data.name = "templates"
    data.unit = "answers"
    data.rows = 64
    data.length = 20
    data.eval_rows = 100
    data.test_rows = 100
    data.eval_length = 20
    config.head.name = "softmax"
    model.backbone = "transformer"
    model.layers = 2
    model.attention_heads = 4
    model.embed_dim = 32
    model.hidden_dim = 32
    model.last_dim = 32
    model.table_range = 0.5
    config.cache.objective = objective
    optim.learning_rate = 3e-3
    optim.clip = 1.0
    optim.warmup_steps = 100
    config.train.steps = 2000
    config.train.eval_every = 500
    config.train.log_every = 200
    config.train.checkpoint_every = 1000
    if stages:
        optim.learning_rate = 3e-4
        optim.warmup_steps = 20
        config.train.steps = 300
        config.train.eval_every = 300
    optim.decay_steps = config.train.steps
    return config
