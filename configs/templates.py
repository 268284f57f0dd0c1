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
    data, model, optim = config.data, config.model, config.optim
    data.name, data.unit = "templates", "answers"
    data.rows, data.length = 64, 20
    data.eval_rows, data.test_rows, data.eval_length = 100, 100, 20
    config.head.name = "softmax"
    model.backbone, model.layers, model.attention_heads = "transformer", 2, 4
    model.embed_dim = model.hidden_dim = model.last_dim = 32
    model.table_range = 0.5
    config.cache.objective = objective
    optim.learning_rate, optim.clip = 3e-3, 1.0
    optim.warmup_steps = 100
    config.train.steps = 2000
    config.train.eval_every, config.train.log_every = 500, 200
    config.train.checkpoint_every = 1000
    if stages:
        optim.learning_rate, optim.warmup_steps = 3e-4, 20
        config.train.steps = config.train.eval_every = 300
    optim.decay_steps = config.train.steps
    return config
