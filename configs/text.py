"""A small model of your own text, trained on a laptop in minutes.

    python launch/train.py --config configs/text.py --config.data.path=book.txt
    python launch/train.py --config configs/text.py:mos,subwords \
        --config.data.path=folder
    python launch/evaluate.py --workdir runs/text --text another.txt
    python launch/generate.py --workdir runs/text --prompt "It was"

`data.path` is a text file, plain, .gz or .xz, or a folder of them: the first 90% train,
5% validate and 5% test. A folder with train.txt, valid.txt and test.txt is taken as it
is split.

Heads: moc (default), mos, softmax. A mixture of contexts costs as much time as a
softmax; mos costs four times as much in the output layer. Tokens are the 10,000 most
frequent words, between white space, or with `subwords` 4,000 pieces of words (byte pair
encoding, learned from the text; pip install -e ".[subwords]"), so that no word is out
of vocabulary.

An LSTM of two layers, 1,500 steps of 512 tokens: 5 to 12 minutes of one core;
docs/howto/text.md has perplexities.
"""

from softbottle.config import Config

COMPONENTS = {"moc": 4, "mos": 4, "softmax": None}


def get_config(argument: str = "moc") -> Config:
    head, *tokens = argument.split(",")
    if head not in COMPONENTS or tokens not in ([], ["subwords"]):
        raise ValueError(
            f"{argument!r} is not HEAD[,subwords]; heads are {sorted(COMPONENTS)}."
        )
    config = Config()
    data = config.data
    model = config.model
    regularise = config.regularise
    data.name = "text"
    data.subwords = bool(tokens)
    data.vocab_size = 4_000 if tokens else 10_000
    data.rows = 16
    data.length = 32
    data.eval_rows = 16
    data.test_rows = 16
    config.head.name = head
    config.head.components = COMPONENTS[head]
    model.backbone = "awd_lstm"
    model.embed_dim = 128
    model.hidden_dim = 256
    model.last_dim = 128
    model.layers = 2
    model.bias_start = "frequency"
    model.gain = 4.0  # for an LSTM's states: docs/results/frontier.md
    regularise.input = 0.2
    regularise.hidden = 0.2
    regularise.output = 0.2
    regularise.latent = 0.2 if COMPONENTS[head] else 0.0
    config.optim.learning_rate = 3e-3
    config.optim.table_learning_rate = 1.2e-2  # docs/howto/text.md
    config.optim.warmup_steps = 100
    config.optim.decay_steps = 1500
    config.optim.clip = 1.0
    config.train.steps = 1500
    config.train.eval_every = 250
    config.train.checkpoint_every = 500
    config.train.log_every = 100
    return config
