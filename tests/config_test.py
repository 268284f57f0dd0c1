import functools
import json

import pytest

import softbottle
from softbottle import config as configs
from softbottle import heads
from softbottle.config import Config


def changed(path, value):
    config = Config()
    *sections, field = path.split(".")
    target = config
    for name in sections:
        target = getattr(target, name)
    setattr(target, field, value)
    return config


def test_the_defaults_are_valid():
    assert configs.validate(Config()) is not None


@pytest.mark.parametrize("path", ["head.componentz", "trian", "data.synthetic.wordz"])
def test_an_unknown_field_is_refused_with_the_fields_there_are(path):
    with pytest.raises(ValueError, match=rf"no field '{path.split('.')[-1]}'; it has"):
        changed(path, 3)


def test_reading_an_unknown_field_names_the_fields_there_are():
    with pytest.raises(AttributeError, match="'componentz'; it has .*'components'"):
        Config().head.componentz  # noqa: B018


@pytest.mark.parametrize(
    "path, value, expected",
    [
        ("head.components", "3", "int or None"),
        ("head.components", 3.0, "int or None"),
        ("head.components", True, "int or None"),
        ("head.name", 3, "str"),
        ("optim.learning_rate", "1e-3", "float"),
        ("model.tied", 1, "bool"),
        ("head", {"name": "mos"}, "Head"),
        ("seed", None, "int"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_both_types(path, value, expected):
    field = path.split(".")[-1]
    with pytest.raises(
        ValueError, match=rf"\.{field} must be {expected}, got"
    ) as error:
        changed(path, value)
    assert repr(value) in str(error.value)


def test_an_integer_is_taken_for_a_float():
    config = changed("optim.learning_rate", 1)
    assert type(config.optim.learning_rate) is float


@pytest.mark.parametrize(
    "path, value",
    [
        ("data.name", "enwik8"),
        ("model.backbone", "rnn"),
        ("model.compute_dtype", "float16"),
        ("optim.name", "lion"),
        ("optim.averaging", "swa"),
    ],
)
def test_a_choice_that_is_not_offered_is_refused_with_those_that_are(path, value):
    with pytest.raises(ValueError, match=rf"{path} must be one of \(.*got '{value}'"):
        configs.validate(changed(path, value))


@pytest.mark.parametrize(
    "path, value",
    [
        ("head.components", 0),
        ("data.rows", 0),
        ("optim.learning_rate", 0.0),
        ("optim.learning_rate", float("nan")),
        ("train.steps", -1),
        ("seed", -1),
        ("optim.weight_decay", -0.1),
        ("regularise.output", 1.0),
        ("regularise.latent", -0.1),
        ("data.synthetic.words", 3),
        ("data.synthetic.spread", 0.0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(path, value):
    with pytest.raises(ValueError, match=path) as error:
        configs.validate(changed(path, value))
    assert repr(value) in str(error.value)


def test_the_centre_of_gss_may_be_negative():
    assert configs.validate(changed("head.center", -1.5)).head.center == -1.5


def test_a_run_without_steps_and_epochs_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        configs.validate(changed("train.steps", None))


@pytest.mark.parametrize(
    "path", ["train.steps", "model.context_dim", "data.vocab_size", "mesh.data"]
)
def test_what_can_be_unset_is_none_and_never_zero(path):
    with pytest.raises(ValueError, match=f"{path} must be .*got 0"):
        configs.validate(changed(path, 0))
    config = changed("train.epochs", 1)
    configs.unset(config, path)
    *sections, field = path.split(".")
    section = functools.reduce(getattr, sections, configs.validate(config))
    assert getattr(section, field) is None


def test_what_cannot_be_unset_says_so():
    with pytest.raises(ValueError, match="Data.rows must be int, got None"):
        configs.unset(Config(), "data.rows")


def test_a_tied_table_has_one_width():
    config = changed("model.context_dim", 9)
    with pytest.raises(ValueError, match="context_dim=9 .*embed_dim=8"):
        configs.validate(config)
    config.model.tied = False
    assert configs.context_dim(configs.validate(config)) == 9


def test_what_earlier_versions_wrote_for_not_set_is_not_set():
    stored = configs.to_dict(Config())
    del stored["format"]
    stored["head"] |= {"components": 1, "center": 0.0, "slope": 1.0, "span": 20.0}
    stored["head"] |= {"knots": 100_000, "rank": 0, "budget_mib": 0}
    for name in ("cap", "context", "active", "draw", "classes", "lower", "layers"):
        del stored["head"][name]
    config = Config()
    config.head.components, config.head.context = 1, "tanh"
    assert configs.from_dict(stored) == config


@pytest.mark.parametrize(
    "name, components, context",
    [("mos", None, "tanh"), ("moss", 2, "tanh"), ("gss", 3, "tanh")]
    + [("gss", None, None), ("softmax", None, None)],
)
def test_mixtures_of_earlier_versions_have_tanh_contexts(name, components, context):
    stored = configs.to_dict(Config()) | {"format": 1}
    del stored["head"]["context"]
    stored["head"] |= {"name": name, "components": components}
    assert configs.from_dict(stored).head.context == context


@pytest.mark.parametrize("name", ["mos", "partition", "mixtape"])
def test_contexts_that_have_changed_since_are_not_read_as_others(name):
    stored = configs.to_dict(Config()) | {"format": 2}
    stored["head"] |= {"name": name}
    with pytest.raises(ValueError, match=r"format 2, whose residual contexts read h /"):
        configs.from_dict(stored)
    stored["head"] |= {"context": "tanh"}
    assert configs.from_dict(stored).head.context == "tanh"


@pytest.mark.parametrize("warmup", [5, 6])
def test_a_warm_up_ends_before_the_decay(warmup):
    config = changed("optim.decay_steps", 5)
    config.optim.warmup_steps = warmup
    expected = rf"optim\.warmup_steps={warmup} must be below optim\.decay_steps=5"
    with pytest.raises(ValueError, match=expected):
        configs.validate(config)
    config.optim.warmup_steps = 4
    configs.validate(config)


@pytest.mark.parametrize("path", ["optim.warmup_steps", "optim.decay_steps"])
def test_sgd_has_no_schedule_and_ignored_one_in_earlier_versions(path):
    config = changed(path, 7)
    config.optim.name = "sgd"
    with pytest.raises(ValueError, match=rf"{path}=7 .*optim\.name='sgd' has none"):
        configs.validate(config)
    stored = configs.to_dict(config)
    assert configs.from_dict(stored) == config
    read = configs.validate(configs.from_dict(stored | {"format": 3}))
    assert (read.optim.warmup_steps, read.optim.decay_steps) == (0, None)


@pytest.mark.parametrize(
    "settings, meant",
    [
        ({"name": "mos"}, softbottle.mos(1)),
        ({"name": "moc", "components": 3}, softbottle.moc(3)),
        ({"name": "moss", "context": "linear"}, softbottle.moss(1, "linear")),
        ({"name": "gss", "center": -1.5}, softbottle.gss(-1.5, 1.0)),
        ({"name": "gss", "slope": 2.5}, softbottle.gss(0.0, 2.5)),
    ],
)
def test_what_a_head_had_by_default_before_is_read_as_that(settings, meant):
    stored = configs.to_dict(Config()) | {"format": 3}
    stored["head"] |= settings
    assert heads.from_config(configs.from_dict(stored).head) == meant


def test_a_language_stored_before_there_were_readings_is_the_random_one():
    stored = configs.to_dict(changed("data.synthetic.words", 5))
    for name in ("readings", "rank"):
        del stored["data"]["synthetic"][name]
    del stored["train"]["same_width_softmax"]
    language = configs.from_dict(stored).data.synthetic
    assert (language.words, language.readings) == (5, None)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, "set data.vocab_size"),
        ({"vocab_size": 300, "vocab_file": "words.txt"}, "not data.vocab_file"),
    ],
)
def test_subwords_are_learned_and_have_a_number(fields, expected):
    config = changed("data.subwords", True)
    for name, value in fields.items():
        setattr(config.data, name, value)
    with pytest.raises(ValueError, match=expected):
        configs.validate(config)


def test_mixtape_wants_words_by_frequency_and_subwords_are_not():
    config = changed("data.subwords", True)
    config.data.name, config.data.path = "text", "book.txt"
    config.data.vocab_size, config.head.name = 300, "mixtape"
    with pytest.raises(ValueError, match="sorted by frequency, and data.subwords"):
        configs.validate(config)
    config.data.subwords = False
    configs.validate(config)
    config.data.vocab_size = None
    with pytest.raises(ValueError, match="without data.vocab_size they are in the"):
        configs.validate(config)


@pytest.mark.parametrize(
    "field, value",
    [("path", "book.txt"), ("vocab_size", 300), ("vocab_file", "words.txt")],
)
def test_a_text_that_nobody_would_read_is_refused(field, value):
    config = changed(f"data.{field}", value)
    with pytest.raises(
        ValueError, match=f"'synthetic' is made.*data.{field}={value!r}"
    ):
        configs.validate(config)


@pytest.mark.parametrize(
    "name, value, backbone",
    [
        ("model.remat", True, "awd_lstm"),
        ("model.scan_layers", True, "window"),
        ("regularise.recurrent", 0.5, "transformer"),
        ("regularise.hidden", 0.2, "window"),
        ("optim.slope_learning_rate", 0.1, "awd_lstm"),
    ],
)
def test_a_setting_that_another_backbone_or_head_reads_is_refused(
    name, value, backbone
):
    config = changed(name, value)
    config.model.backbone = backbone
    with pytest.raises(ValueError, match=f"{name}={value} is of .* not read it"):
        configs.validate(config)
    # A model that was trained so is one all the same.
    configs.validate(config, trained=True)


def test_a_last_rate_is_that_of_a_decay():
    with pytest.raises(ValueError, match=r"optim.end_factor=0.5 .*decay_steps"):
        configs.validate(changed("optim.end_factor", 0.5))


def test_rows_are_a_multiple_of_the_accumulated_parts():
    with pytest.raises(ValueError, match="data.rows=32 .*optim.accumulate=5"):
        configs.validate(changed("optim.accumulate", 5))


@pytest.mark.parametrize(
    "path", ["seed", "head.components", "train.steps", "data.synthetic.words"]
)
def test_a_validated_config_is_frozen(path):
    config = configs.validate(Config())
    *sections, field = path.split(".")
    target = config
    for name in sections:
        target = getattr(target, name)
    with pytest.raises(ValueError, match=f"frozen.*{field}"):
        setattr(target, field, 5)


def test_validating_freezes_a_copy():
    config = Config()
    frozen = configs.validate(config)
    config.head.components = 2
    assert (config.head.components, frozen.head.components) == (2, None)


def test_settings_of_a_later_version_are_refused():
    stored = configs.to_dict(Config())
    assert stored["format"] == configs.FORMAT
    with pytest.raises(ValueError, match=r"format 99, .*up to \d+: install a newer"):
        configs.from_dict(stored | {"format": 99})


def test_settings_of_the_first_version_had_other_words_for_not_set():
    stored = configs.to_dict(Config())
    del stored["format"]
    stored["train"] |= {"steps": 0, "epochs": 3, "init_from": "", "eval_every": 0}
    stored["data"] |= {"path": "", "vocab_size": 0}
    stored["mesh"]["data"] = -1
    config = configs.validate(configs.from_dict(stored))
    assert (config.train.steps, config.train.epochs) == (None, 3)
    assert config.train.init_from is config.train.eval_every is None
    assert config.data.path is config.data.vocab_size is config.mesh.data is None


def test_a_config_survives_the_way_through_json():
    config = changed("head.components", 7)
    config.data.synthetic.words = 64
    stored = json.loads(json.dumps(configs.to_dict(config)))
    assert configs.from_dict(stored) == config
    assert configs.from_dict(stored) != Config()
    assert configs.differences(config, stored) == []


def test_a_stored_field_that_does_not_exist_is_refused():
    stored = configs.to_dict(Config())
    stored["head"]["componentz"] = 3
    with pytest.raises(ValueError, match="componentz"):
        configs.from_dict(stored)


def test_a_stored_section_that_does_not_exist_is_refused():
    with pytest.raises((ValueError, AttributeError), match="heads"):
        configs.from_dict({"heads": {"name": "mos"}})


def test_differences_name_the_field_and_both_values():
    stored = configs.to_dict(Config())
    stored["head"]["components"] = 15
    del stored["seed"]
    lines = configs.differences(Config(), stored)
    assert lines == [
        "head.components: null here, 15 there",
        "seed: 0 here, null there",
    ]
