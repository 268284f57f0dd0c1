"""Two runs on one text, and the command that compares models."""

import json

import numpy as np
import pytest

from softbottle.analysis import capture, overview, pair
from softbottle.analysis.sources import opening
from softbottle.training import state
from tests import commands, tiny

pytestmark = pytest.mark.usefixtures("quick_keys")
WORDS, WIDTH = 13, 3


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """Runs of random parameters that are evaluated in other rows and stretches."""
    folder = tmp_path_factory.mktemp("runs")
    shapes = {"mos": (3, 17), "softmax": (2, 11)}
    for head, (rows, length) in shapes.items():
        made, _ = tiny.make_narrow_run(
            *(head, 2 if head == "mos" else 1, WORDS, WIDTH),
            data__synthetic__train_tokens=900,
            data__synthetic__eval_tokens=300,
            data__eval_rows=rows,
            data__eval_length=length,
            model__table_range=3.0,
        )
        tiny.write_run(folder / head, made)
    return [folder / "mos", folder / "softmax"]


@pytest.fixture(scope="module")
def sources(workdirs):
    return opening.runs(workdirs, positions=70, in_order=True)


@pytest.fixture(scope="module")
def made(sources):
    return pair.inspect(sources, ["rank"])


@pytest.mark.slow
def test_two_runs_are_compared_on_the_same_tokens(workdirs, sources, made):
    compared, ranked = made.sections
    assert compared.title == "Between two models" and compared.about is not None
    assert compared.numbers["positions"] == 70 and ranked.title == "Rank"
    text = state.load_corpus(workdirs[0], state.load_run(workdirs[0]), "test").test
    for source in sources:
        one = source.read("run", {"tokens", "text"})
        np.testing.assert_array_equal(capture.joined(one.tokens).labels_T, text[1:71])
        assert one.words[0] == "<eos>" and len(one.text.ids) == 900
    with pytest.raises(ValueError, match="needs different names"):
        pair.inspect(sources[:1] * 2)
    with pytest.raises(ValueError, match="telescope"):
        pair.inspect(sources, ["telescope"])


@pytest.mark.slow
def test_a_report_on_two_models_opens_as_others_do(made):
    numbers = made.sections[0].numbers
    screen = overview.opening(made)
    heads, rows = screen.models
    rows = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    for name, model in (("mos", "a"), ("softmax", "b")):
        loss = numbers[f"loss of {model}"]["value"]
        shown = rows[name]["loss (nats)"]
        assert shown.startswith(f"{loss:.3f} (") and rows[name]["width"] == str(WIDTH)
    assert "put the same word first" in screen.verdicts["mos and softmax"]
    (shared, command, _) = overview.header(made, "softbottle analyze", False)
    assert shared.endswith("300 tokens. Read: the first 70, in 1 row.")
    assert overview.title(made) == "mos, softmax"
    assert any(fact.startswith("Model: mos, ") for fact in screen.facts)


def test_a_run_reads_a_text_or_ids_in_the_order_of_their_words(workdirs, tmp_path):
    def read(text=None):
        (source,) = opening.runs(workdirs[:1], text=text, in_order=True)
        return source.read("run", pair.FIELDS)

    words = read().words
    ids = np.random.default_rng(3).integers(1, WORDS, 40)
    (tmp_path / "text.txt").write_text(" ".join(words[at] for at in ids))
    np.save(tmp_path / "ids.npy", ids)
    for name in ("text.txt", "ids.npy"):
        found = read(tmp_path / name)
        labels_T = capture.joined(found.tokens).labels_T
        np.testing.assert_array_equal(labels_T, ids[1:])
        np.testing.assert_array_equal(found.text.ids, ids)
        assert found.facts[-1].startswith(f"Text: {name}, 40 tokens.")
    np.save(tmp_path / "ids.npy", ids + WORDS)
    with pytest.raises(ValueError, match=r"must lie in \[0, 13\)"):
        read(tmp_path / "ids.npy")


@pytest.mark.slow
def test_the_command_compares_two_models_and_refuses_others(workdirs, tmp_path):
    both = [f"--workdir={path}" for path in workdirs]
    out = f"--out={tmp_path / 'out'}"
    commandlines = {
        "pair": ["--compare", *both, out, "--positions=100"],
        "text": ["--compare", both[0], "--hf=nothing", out],
        "three": ["--compare", both[0], "--hf=nothing@step1,step2", out],
    }
    started = {
        name: commands.start("analyze.py", *line) for name, line in commandlines.items()
    }
    answers = {name: commands.finish(program) for name, program in started.items()}
    assert "a is mos, b is softmax; 100 positions" in answers["pair"].output
    numbers = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(numbers) == ["header", "models", "Between two models"]
    assert any(line.startswith("Command: ") for line in numbers["header"])
    reason = "--compare takes one --text, which both models read"
    assert answers["text"].code == 2 and reason in answers["text"].errors
    reason = "--compare takes two of --workdir, --hf and --gguf"
    assert answers["three"].code == 2 and reason in answers["three"].errors
