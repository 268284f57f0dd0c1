import pytest

from tests import commands

QUICKSTART = "configs/quickstart.py"
COMMANDS = {
    "help": ("train.py", "--help"),
    "field": ("train.py", "--config", QUICKSTART, "--config.head.componentz=3"),
    "arm": ("frontier.py", "--config", QUICKSTART, "--arms=softmax,mos-7"),
    "table": ("reproduce.py", "ptbb"),
    "table's head": ("reproduce.py", "ptb", "--heads=mos,mso"),
    "setting": ("reproduce.py", "--table=ptb", "--set=train.epochs"),
    "sweep field": ("sweep.py", "--config.modle.order=3"),
    "type": ("train.py", "--config", QUICKSTART, "--config.head.components=many"),
    "head": ("train.py", "--config", f"{QUICKSTART}:sofmax"),
    "seed": ("train.py", "--config", QUICKSTART, f"--config.seed={2**70}"),
    "nan": ("train.py", "--config", QUICKSTART, "--config.optim.clip=nan"),
    "config": ("train.py", "--config", "configs/nothing.py"),
    "argument": ("train.py", "--config", QUICKSTART, "more"),
    "share": ("evaluate.py", "--share=2"),
    "theta": ("evaluate.py", "--theta=nan"),
    "rows": ("evaluate.py", "--rows=-1"),
    "temperature": ("generate.py", "--temperature=-1"),
    "no run": ("evaluate.py",),
    "no prompt": ("generate.py",),
    "no folder": ("export.py",),
    "shown": ("evaluate.py", "--traceback"),
    "value": ("train.py", "--config", QUICKSTART, "--config.optim.name=sgdd"),
    "swept": ("sweep.py", "--config", QUICKSTART, "--components=1", "--widths=4"),
    "rates": ("frontier.py", "--config", QUICKSTART, "--learning_rates=0.1,nan"),
    "pair": ("analyze.py", "--compare", "--out=report"),
    "minutes": ("retrofit.py", "--states=states", "--minutes=nan"),
    "no python": ("train.py", "--config=README.md"),
    "no get_config": ("train.py", "--config=launch/train.py"),
    "unread split": ("evaluate.py", "--text=a.txt", "--split=valid"),
    "unread sharpness": ("evaluate.py", "--joint", "--window=9", "--theta=0.5"),
    "unread text": ("retrofit.py", "--states=states", "--heldout=a.txt"),
    "unread freeze": ("retrofit.py", "--unfreeze", "--freeze=table"),
    "unread rates": ("sweep.py", "--config", QUICKSTART, "--rates=1e-3"),
    "unread window": ("analyze.py", "--window=64", "--out=report"),
    "unread keep": ("frontier.py", "--draw", "--keep"),
    "unread positions": ("saturation.py", "--positions=64"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """(exit code, stdout, stderr) of every command; started side by side, for speed."""
    workdir = tmp_path_factory.mktemp("launch")
    started = {
        name: commands.start(*command, "--workdir", workdir / name.replace(" ", "-"))
        for name, command in COMMANDS.items()
    }
    found = {name: commands.finish(process) for name, process in started.items()}
    assert list(workdir.iterdir()) == [], "a refused command left something behind"
    return found


def refused(answer):
    """The one line that a command that was refused leaves, with status 2."""
    code, _, errors = answer
    assert code == 2, errors
    (line,) = errors.splitlines()
    return line


REASONS = {
    "rates": "--learning_rates=0.1,nan: must be numbers with commas between them",
    "swept": "--components is swept alone, not with --widths",
    "pair": "--compare takes two of --workdir, --hf and --gguf",
    "minutes": "--minutes must be finite",
    "no python": "; a config is a Python file",
    "no get_config": "--config: the file has no function get_config",
    "unread split": "--split would not be read with --text",
    "unread sharpness": "--theta would not be read without --cache",
    "unread text": "--heldout would not be read without a model: states are as they",
    "unread freeze": "--freeze would not be read with --unfreeze, which trains all",
    "unread rates": "--rates would not be read without --objectives",
    "unread window": "--window would not be read without --hf or --gguf",
    "unread keep": "--keep would not be read with --draw",
    "unread positions": "--positions would not be read without --run",
    "seed": "seed must be below 2**32, got 1180591620717411303424",
    "nan": "optim.clip must be finite, got nan",
    "config": "configs/nothing.py",
    "argument": "not understood: more",
    "share": "--share=2",
    "theta": "--theta must be finite",
    "rows": "--rows=-1",
    "temperature": "--temperature=-1",
    "arm": "no arm is called 'mos-7'; there are softmax, softmax-half, ",
    "table": "should be one of <ptb|wt2|ranks|time|lm1b>",
    "table's head": "no head is called 'mso' here; there are softmax, moc, ",
    "setting": "--set takes SECTION.FIELD=VALUE, got 'train.epochs'",
    "no run": "no-run holds no run: there is no config.json in it",
    "no prompt": "no-prompt holds no run",
    "no folder": "--folder is needed: launch/export.py --help has examples",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_is_one_line_with_its_reason(answers, name):
    assert REASONS[name] in refused(answers[name])


def test_a_traceback_is_shown_when_asked_for(answers):
    code, _, errors = answers["shown"]
    assert code == 2
    assert errors.startswith("Traceback") and "load_run" in errors
    assert "holds no run" in errors.splitlines()[-1]


def test_help_tells_what_the_program_does_and_takes(answers):
    _, output, errors = answers["help"]
    assert "Traceback" not in errors
    assert "--workdir" in output and "--config" in output
    assert "python launch/train.py --config quickstart" in output


def test_an_unknown_field_is_answered_with_the_fields_there_are(answers):
    errors = refused(answers["field"])
    assert "Head has no field 'componentz'" in errors and "'components'" in errors
    assert "Traceback" not in errors


def test_an_unknown_section_is_answered_with_the_sections_there_are(answers):
    errors = refused(answers["sweep field"])
    assert "Config has no field 'modle'" in errors and "'model'" in errors
    assert "Traceback" not in errors


def test_a_value_of_the_wrong_type_is_named_with_its_field(answers):
    errors = refused(answers["type"])
    assert "config.head.components" in errors and "many" in errors


def test_an_unknown_head_is_answered_with_the_heads_there_are(answers):
    errors = refused(answers["head"])
    assert "'sofmax' is not HEAD" in errors and "'sigsoftmax'" in errors


def test_a_value_that_is_no_choice_is_answered_with_the_choices(answers):
    errors = refused(answers["value"])
    assert "optim.name must be one of ('adamw', 'sgd'), got 'sgdd'" in errors
