import dataclasses
import importlib.util
import itertools

import jax
import pytest

from softbottle import config as configs
from softbottle import model as models
from tests import ROOT

FOLDER = ROOT / "configs"
MIXTURES = ("mos", "moc", "moss")
PAPERS = (*MIXTURES, "softmax", "sigsoftmax", "gss", "plif")
TEXT = ("moc", "mos", "softmax")
STAGES = ("", ",finetune", ",et", ",et,finetune")
SATURATION = list(
    itertools.product(("softmax", "partition", "mos", "moc"), (32, 64, 128))
)
RECIPES = [head + stage for head, stage in itertools.product(PAPERS, STAGES)]
ARGUMENTS = [
    *(("ptb", argument) for argument in RECIPES),
    *(("wt2", argument) for argument in RECIPES),
    *(("lm1b", head) for head in (*MIXTURES, "softmax", "sigsoftmax")),
    *(("lm1b", f"{head},modern") for head in (*MIXTURES, "softmax", "sigsoftmax")),
    *(("quickstart", head) for head in (*MIXTURES, "softmax", "sigsoftmax")),
    *(("quickstart", f"{head},random") for head in (*MIXTURES, "softmax")),
    *(("templates", objective) for objective in configs.OBJECTIVES),
    *(("books", objective) for objective in configs.OBJECTIVES),
    *(("text", head + tokens) for head in TEXT for tokens in ("", ",subwords")),
    *(("dropin", backbone) for backbone in ("awd_lstm", "transformer")),
    *(("saturation", f"{head},{width}") for head, width in SATURATION),
]


def load(name):
    """A config file, loaded by its path as the launchers do."""
    path = FOLDER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_every_config_file_is_tested_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        name for name, _ in ARGUMENTS
    }


@pytest.mark.parametrize("name", ["ptb", "wt2", "lm1b", "quickstart"])
def test_every_argument_gives_a_config_that_is_valid(name):
    module = load(name)
    heads = set()
    for argument in [argument for file, argument in ARGUMENTS if file == name]:
        config = configs.validate(module.get_config(argument))
        head = argument.split(",")[0]
        assert config.head.name == head
        assert (config.head.components is not None) == (head in MIXTURES)
        heads.add(head)
        assert f"configs/{name}.py" in module.__doc__
    offered = getattr(module, "HEADS", None) or getattr(module, "COMPONENTS", PAPERS)
    assert heads == set(offered)
    assert module.get_config().head.name == "mos"


@pytest.mark.parametrize("head", TEXT)
def test_subwords_of_a_text_change_its_tokens_alone(head):
    module = load("text")
    words = configs.validate(module.get_config(head))
    pieces = configs.validate(module.get_config(f"{head},subwords"))
    lines = configs.differences(pieces, configs.to_dict(words))
    assert {line.split(":")[0] for line in lines} == {
        *("data.subwords", "data.vocab_size")
    }
    assert words.head.name == head and words.data.name == "text"
    assert set(module.COMPONENTS) == set(TEXT)
    assert "configs/text.py" in module.__doc__


@pytest.mark.parametrize("backbone", ["awd_lstm", "transformer"])
def test_a_drop_in_model_is_as_wide_as_its_table(backbone):
    module = load("dropin")
    config = configs.validate(module.get_config(backbone))
    assert config.model.backbone == backbone
    assert config.model.last_dim == configs.context_dim(config)
    assert "configs/dropin.py" in module.__doc__


def test_models_that_may_saturate_differ_in_their_width_and_head_alone():
    module = load("saturation")
    plain = configs.to_dict(module.get_config())
    for head, width in SATURATION:
        config = configs.validate(module.get_config(f"{head},{width}"))
        model = config.model
        widths = model.embed_dim, model.hidden_dim, model.last_dim
        assert widths == (width, width, width) and config.head.name == head
        assert configs.context_dim(config) == width and not model.tied
        lines = configs.differences(config, plain)
        assert {line.split(".")[0] for line in lines} <= {"model", "head"}
        assert (config.head.components == 4) == (head in ("mos", "moc"))
        assert (config.head.classes == 8) == (head == "partition")
        assert models.make(config, 37).head.name == head
    assert set(module.HEADS) == {head for head, _ in SATURATION}
    assert set(module.WIDTHS) == {str(width) for _, width in SATURATION}
    assert "configs/saturation.py" in module.__doc__


@pytest.mark.parametrize("name", ["templates", "books"])
def test_every_objective_has_the_same_model(name):
    module = load(name)
    assert f"configs/{name}.py" in module.__doc__
    plain = configs.to_dict(module.get_config("plain"))
    for objective in configs.OBJECTIVES:
        config = configs.validate(module.get_config(objective))
        assert config.cache.objective == objective
        assert len(configs.differences(config, plain)) == (objective != "plain")
        tuned = configs.validate(module.get_config(f"{objective},finetune"))
        lines = configs.differences(tuned, configs.to_dict(config))
        assert {line.split(".")[0] for line in lines} == {"optim", "train"}


# The settings of the MoS code's README and argument defaults, column by column.
SHARED = {
    "data.length": 70,
    "data.variable": True,
    "data.eval_rows": 10,
    "data.test_rows": 1,
    "data.eval_length": 70,
    "model.backbone": "awd_lstm",
    "model.layers": 3,
    "model.tied": True,
    "model.table_range": 0.1,
    "regularise.output": 0.4,
    "regularise.rows": 0.1,
    "regularise.recurrent": 0.5,
    "regularise.activation": 2,
    "regularise.slowness": 1,
    "optim.name": "sgd",
    "optim.weight_decay": 1.2e-6,
    "optim.clip": 0.25,
    "optim.averaging": "nt",
    "optim.patience": 5,
    "train.steps": None,
    "train.eval_every": None,
}
NAMES = (
    *("model.embed_dim", "model.hidden_dim", "model.last_dim", "head.components"),
    *("data.rows", "optim.learning_rate", "regularise.input", "regularise.hidden"),
    *("regularise.latent", "seed", "train.epochs"),
)
TABLE = {
    ("ptb", "mos"): (280, 960, 620, 15, 12, 20, 0.4, 0.225, 0.29, 28, 1000),
    ("wt2", "mos"): (300, 1150, 650, 15, 15, 15, 0.55, 0.2, 0.29, 1882, 1000),
    ("ptb", "softmax"): (400, 1150, 400, None, 20, 30, 0.4, 0.25, 0, 141, 500),
    ("wt2", "softmax"): (400, 1150, 400, None, 80, 30, 0.65, 0.2, 0, 1882, 750),
}
FINETUNE_RATES = {
    ("ptb", "mos"): 25,
    ("wt2", "mos"): 20,
    ("ptb", "softmax"): 30,
    ("wt2", "softmax"): 30,
}
MAX_DELTA = {"ptb": 40, "wt2": 20}


@pytest.mark.parametrize("name, head", TABLE)
def test_a_recipe_has_the_settings_of_the_papers(name, head):
    config = load(name).get_config(head)
    expected = SHARED | dict(zip(NAMES, TABLE[name, head], strict=True))
    assert {path: read(config, path) for path in expected} == expected
    assert config.data.name == name
    if head == "mos":
        assert config.data.max_delta == MAX_DELTA[name]


@pytest.mark.parametrize("name, head", TABLE)
def test_a_stage_changes_the_optimiser_and_nothing_that_the_model_is(name, head):
    module = load(name)
    plain = configs.to_dict(module.get_config(head))
    changed = {
        "finetune": {
            "optim.averaging": "now",
            "optim.learning_rate": FINETUNE_RATES[name, head],
            "train.stop_patience": 5,
        },
        "et": {"optim.averaging": "et", "optim.switch_epoch": 200},
    }
    for stage, expected in changed.items():
        config = module.get_config(f"{head},{stage}")
        assert {path: read(config, path) for path in expected} == expected
        lines = configs.differences(config, plain)
        assert {line.split(":")[0] for line in lines} <= set(expected)


@pytest.mark.parametrize(
    "name, argument, choice",
    [
        ("ptb", "sofmax", "'softmax'"),
        ("ptb", "mos,finetun", "'finetune'"),
        ("ptb", "", "'mos'"),
        ("wt2", "mos,", "'et'"),
        ("wt2", "finetune", "'moss'"),
        ("lm1b", "gss", "'sigsoftmax'"),
        ("lm1b", "mos,moderm", "modern"),
        ("quickstart", "mos,finetune", "'moc'"),
        ("templates", "trim", "'trime'"),
        ("templates", "trime,finetun", "'plain'"),
        ("books", "histaling", "'histalign'"),
        ("text", "moc,subword", "'softmax'"),
        ("saturation", "softmax", "'64'"),
        ("saturation", "mos,48", "'128'"),
    ],
)
def test_an_unknown_head_or_stage_is_refused_with_those_there_are(
    name, argument, choice
):
    with pytest.raises(ValueError) as caught:
        load(name).get_config(argument)
    assert repr(argument) in str(caught.value) and choice in str(caught.value)


@pytest.mark.parametrize(
    "name, head, vocab, expected",
    [
        ("ptb", "mos", 10_000, 21_500_620),
        ("ptb", "softmax", 10_000, 24_221_600),
        ("wt2", "mos", 33_278, 34_909_528),
        ("wt2", "softmax", 33_278, 33_556_078),
        ("lm1b", "softmax", 100_000, 119_293_600),
        ("lm1b", "mos", 100_000, 112_850_364),
    ],
)
def test_a_config_has_exactly_the_papers_parameters(name, head, vocab, expected):
    config = configs.validate(load(name).get_config(head))
    model = models.make(config, vocab)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert models.count_parameters(params, vocab) == expected
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == expected


def test_only_bounded_states_are_multiplied():
    gains = {
        (name, argument): config.model.gain
        for name, argument in ARGUMENTS
        if (config := load(name).get_config(argument)).model.gain != 1
    }
    assert gains == {("lm1b", "softmax"): 8} | {
        ("text", head + tokens): 4 for head in TEXT for tokens in ("", ",subwords")
    }
    for name, argument in gains:
        assert load(name).get_config(argument).model.backbone == "awd_lstm"


def test_lm1b_keeps_the_words_and_drops_nothing_as_the_paper_does():
    config = load("lm1b").get_config()
    assert (config.data.vocab_size, config.data.lowercase) == (100_000, True)
    rates = dataclasses.asdict(config.regularise)
    assert set(rates.values()) == {0.0}
    assert config.model.layers == 2 and config.model.tied
    assert config.model.bias_start == "frequency"
