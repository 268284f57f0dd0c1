"""Small transformers that are trained long: do they saturate, and does a head help?

    python launch/train.py --config configs/saturation.py:softmax,64 \
        --workdir runs/saturation/softmax-64-0 --config.data.path=data/books
    python launch/train.py --config configs/saturation.py:partition,64 \
        --workdir runs/saturation/partition-64-0 --config.data.path=data/books
    python launch/saturation.py --workdir runs/saturation \
        --run runs/saturation/softmax-64-0 --run runs/saturation/partition-64-0

The argument is HEAD,WIDTH: softmax, partition (8 classes), mos or moc (4 components);
states and both tables have the width. The text is that of configs/books.py, 1,696 steps
per pass, and `train.series` stores the parameters every 170 steps.

The learning rate is constant after its warm-up. A decay lowers the loss by itself and
so hides a late rise, and the models whose loss was seen to rise late had one that fell
to a tenth only. With a constant rate a run of two passes is also the start of a run of
four. Nothing is dropped and nothing decays, so that what the states and the table do is
the loss's doing; input and output tables are apart, as in those models.

No model turned in 7 to 28 passes on an H200: docs/results/saturation.md.
"""

from softbottle.config import Config

HEADS = ("softmax", "partition", "mos", "moc")
WIDTHS = ("32", "64", "128")


def get_config(argument: str = "softmax,64") -> Config:
    head, _, width = argument.partition(",")
    if head not in HEADS or width not in WIDTHS:
        raise ValueError(
            f"{argument!r} is not HEAD,WIDTH; heads are {HEADS}, widths {WIDTHS}."
        )
    config = Config()
    data = config.data
    model = config.model
    optim = config.optim
    train = config.train
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
    config.head.name = head
    if head in ("mos", "moc"):
        config.head.components = 4
    if head == "partition":
        config.head.classes = 8
    model.backbone = "transformer"
    model.layers = 4
    model.attention_heads = 2 if width == "32" else 4
    model.embed_dim = int(width)
    model.hidden_dim = int(width)
    model.last_dim = int(width)
    model.tied = False
    model.compute_dtype = "bfloat16"
    optim.learning_rate = 1e-3
    optim.warmup_steps = 200
    optim.clip = 1.0
    train.steps = None
    train.epochs = 4
    train.series = True
    train.series_every = 170
    train.checkpoint_every = 10_000
    train.log_every = 50
    return config
