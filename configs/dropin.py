"""A small language model of words, for launch/dropin.py.

    python launch/dropin.py --config configs/dropin.py --workdir runs/dropin \
        --config.data.path=data/wikitext-2

Backbones: awd_lstm (default; one layer of 256) and transformer (two of 256).
"""

from softbottle.config import Config


def get_config(backbone: str = "awd_lstm") -> Config:
    if backbone not in ("awd_lstm", "transformer"):
        raise ValueError(f"no backbone {backbone!r} here: awd_lstm or transformer.")
    config = Config()
    config.data.name = "wt2"
    config.data.path = "data/wikitext-2"
    config.data.vocab_size = 20_000
    config.data.rows = 20
    config.data.length = 35
    config.data.eval_rows = 20
    config.data.eval_length = 70
    config.model.backbone = backbone
    config.model.compute_dtype = "bfloat16"
    config.model.embed_dim = 256
    config.model.hidden_dim = 256
    config.model.last_dim = 256
    config.model.layers = 1 if backbone == "awd_lstm" else 2
    config.optim.clip = 1.0
    config.train.steps = 1000
    return config
