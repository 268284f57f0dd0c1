import dataclasses
import re

import pytest
from absl import flags
from ml_collections import config_flags

import softbottle
from softbottle import config as configs
from softbottle import heads
from softbottle.training import loop
from tests import ROOT, oracle, tiny

NOT_OF_THE_HEAD = {"name", "budget_mib", "implementation"}


def config_head(**settings):
    head = configs.Head()
    for name, value in settings.items():
        setattr(head, name, value)
    return head


def test_every_head_is_exported_and_has_its_line_in_the_contract():
    cases = {type(case.head) for case in oracle.CASES.values()}
    assert cases == set(heads.HEADS.values())
    for name in heads.HEADS:
        assert name in softbottle.__all__


def test_what_a_config_sets_is_what_heads_have():
    fields = {field.name for field in dataclasses.fields(configs.Head)}
    every = {name for head in heads.HEADS for name in heads.settings(head)}
    assert fields - NOT_OF_THE_HEAD == every


@pytest.mark.parametrize(
    "settings, head",
    [
        ({"name": "softmax"}, softbottle.softmax()),
        ({"name": "mos", "components": 3}, softbottle.mos(3)),
        ({"name": "gss", "center": -1.5, "slope": 2}, softbottle.gss(-1.5, 2.0)),
        (
            {"name": "gss", "center": 0.0, "slope": 2.0, "components": 3},
            softbottle.gss(0.0, 2.0, 3),
        ),
        ({"name": "plif"}, softbottle.plif(100_000)),
        ({"name": "plif", "knots": 9, "span": 2.5}, softbottle.plif(9, 2.5)),
        ({"name": "lowrank", "rank": 4}, softbottle.lowrank(4)),
        ({"name": "softcap", "cap": 20.0}, softbottle.softcap(20.0)),
        ({"components": 3, "context": "tanh"}, softbottle.mos(3, "tanh")),
        ({"components": 3, "active": 2}, softbottle.mos(3, active=2)),
        (
            {"name": "partition", "classes": 4, "components": 2},
            softbottle.partition(4, 2),
        ),
        (
            {"name": "mixtape", "frequent": 9, "gate_dim": 3},
            softbottle.mixtape(frequent=9, gate_dim=3),
        ),
        ({"name": "doc", "components": 3, "lower": 2}, softbottle.doc(3, 2)),
        ({"name": "mfs", "layers": 2}, softbottle.mfs(layers=2)),
    ],
)
def test_a_config_gives_the_head_with_its_settings(settings, head):
    assert heads.from_config(config_head(**settings)) == head


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": "mosaic"}, "head.name must be one of ('softmax', "),
        (
            {"name": "softmax", "components": 3},
            "softmax, which has []; head.components=none takes it back",
        ),
        ({"center": -1.5}, "head.center=-1.5 is not a setting of mos"),
        ({"center": -1.5}, "which has ['components', 'context', 'active', 'draw'];"),
        (
            {"name": "gss", "cap": 9.0},
            "which has ['center', 'slope', 'components', 'context'];",
        ),
        ({"name": "lowrank"}, "head.rank must be set: lowrank has no default"),
        ({"name": "mos"}, "head.components must be set: mos has no default"),
        ({"name": "moc"}, "head.components must be set: moc has no default"),
        ({"name": "moss"}, "head.components must be set: moss has no default"),
        ({"name": "gss", "slope": 2.0}, "head.center must be set: gss has no default"),
        ({"name": "gss", "center": 0.0}, "head.slope must be set: gss has no default"),
        ({"name": "mos", "components": -3}, "head.components must be an integer >= 1"),
        ({"name": "softcap", "cap": -1.0}, "head.cap must be positive, got"),
        (
            {"name": "gss", "center": 0.0, "slope": 2.0, "context": "tanh"},
            "head.context='tanh' is for a mixture",
        ),
        (
            {"name": "moc", "components": 3, "context": "cosh"},
            "head.context must be one of ('residual'",
        ),
        ({"components": 3, "active": 4}, "head.active must be at most components=3"),
        ({"components": 3, "draw": True}, "head.draw is for a mixture some of which"),
        ({"name": "mixtape"}, "head.frequent must be set: mixtape has no default"),
        (
            {"name": "mixtape", "frequent": 9, "components": 6},
            "head.components must be 2, 4, 8 or another power of two, got 6",
        ),
        ({"name": "partition"}, "head.classes must be set: partition has no default"),
    ],
)
def test_what_a_head_does_not_take_is_refused_with_what_it_does(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        heads.from_config(config_head(**settings))


def test_a_setting_is_set_on_the_command_line():
    words = ["program", f"--config={ROOT / 'configs' / 'quickstart.py'}:softmax"]
    words += ["--config.head.name=gss", "--config.head.center=-1.5"]
    words += ["--config.head.slope=2"]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=words)
    values(words)
    assert heads.from_config(values.config.head) == softbottle.gss(-1.5, 2.0)


def test_a_run_whose_head_is_refused_writes_nothing(tmp_path):
    config = tiny.make_config(head__cap=3.0)
    with pytest.raises(ValueError, match="head.cap=3.0 is not a setting of mos"):
        loop.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "head, message",
    [
        ({"name": "partition", "classes": 12}, r"head.classes=12 .* 11 words"),
        (
            {"name": "mixtape", "components": 4, "frequent": 11},
            r"head.frequent=11 .* 11",
        ),
    ],
    ids=["partition", "mixtape"],
)
def test_a_head_that_does_not_fit_the_words_writes_no_settings(head, message, tmp_path):
    fields = {f"head__{name}": value for name, value in head.items()}
    with pytest.raises(ValueError, match=message):
        loop.run(tiny.make_config(**fields), tmp_path / "run")
    # With others the same folder can be started.
    assert not (tmp_path / "run" / "config.json").exists()


def test_heads_answer_what_models_and_planners_ask():
    answers = {
        repr(head): (head.contexts, head.products, head.projects, head.is_linear)
        for head in (
            softbottle.softmax(),
            softbottle.lowrank(4),
            softbottle.mos(3),
            softbottle.moc(3),
            softbottle.gss(0.0, 2.0),
            softbottle.gss(0.0, 2.0, 3),
            softbottle.mos(3, active=2),
            softbottle.partition(4, 2),
            softbottle.mixtape(4, frequent=9),
        )
    }
    assert list(answers.values()) == [
        (1, 1, False, True),
        (1, 1, True, True),
        (3, 3, True, False),
        (3, 1, True, False),
        (1, 1, False, False),
        (3, 3, True, False),
        (3, 2, True, False),
        (8, 2, True, False),
        (4, 1, True, False),
    ]
