from softbottle import config as configs
from softbottle import sections
from softbottle.cli import fields
from tests import ROOT


def test_the_page_of_settings_is_up_to_date():
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == fields.markdown(), (
        "config.py has changed: python -m softbottle.cli.fields > docs/config.md"
    )


def test_every_setting_is_there_with_its_default_and_a_meaning():
    found = {field.name: field for group in fields.groups() for field in group.fields}
    expected = {name: value for name, _, value in sections.leaves(configs.Config())}
    assert {name: field.default for name, field in found.items()} == {
        name: str(value) for name, value in expected.items()
    }
    assert [name for name, field in found.items() if not field.meaning] == []


def test_a_meaning_is_the_comment_beside_the_field_or_above_it():
    found = {field.name: field for group in fields.groups() for field in group.fields}
    assert found["data.rows"].meaning == "rows of a training batch"
    assert found["train.keep"].meaning.startswith("newest checkpoints")
    assert found["regularise.rows"].meaning.startswith("whole rows")


def test_what_a_setting_may_be_is_told():
    found = {field.name: field for group in fields.groups() for field in group.fields}
    assert found["data.vocab_size"].allowed == "int >= 3 or None"
    assert found["optim.clip"].allowed == "float > 0 or None"
    assert found["regularise.rows"].allowed == "float in [0, 1)"
    assert found["optim.name"].allowed == "adamw, sgd"
    assert found["model.tied"].allowed == "bool"
    assert "mixtape" in found["head.name"].allowed


def test_lines_for_a_terminal_are_narrow_and_read_like_flags():
    lines = fields.lines(96)
    assert max(map(len, lines)) <= 96
    place = lines.index("  --config.optim.clip=none")
    assert lines[place + 1].startswith("      gradient clipping")
