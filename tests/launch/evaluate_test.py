import dataclasses
import json

import numpy as np
import pytest

from softbottle.data import corpus
from softbottle.training import evaluate, state
from softbottle.training import loop as train
from tests import commands, tiny

SEGMENT, WINDOW = 7, 13
pytestmark = pytest.mark.usefixtures("quick_keys")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run of two steps on a text of its own."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    for name, count in {"train": 127, "valid": 41, "test": 43}.items():
        words = [f"w{word}" for word in random.integers(0, 7, count)]
        (folder / f"{name}.txt").write_text(" ".join(words))
    config = tiny.make_config(
        data__name="text",
        data__path=str(folder),
        data__cache=str(folder / "cache"),
        data__vocab_size=9,
        train__steps=2,
        train__eval_every=2,
    )
    workdir = tmp_path_factory.mktemp("run")
    train.run(config, workdir)
    return workdir


@pytest.fixture(scope="module")
def answers(workdir):
    """(stdout, stderr) of the programs; side by side, for speed."""
    (workdir / "other.txt").write_text("w1 zebra w2\nw3\n")
    flags = {
        "text": ("--text", workdir / "other.txt", "--tokens", 5, "--active", 1),
        "evaluate": ("--split", "test", "--dynamic", "--cache", "--joint")
        + ("--segment", SEGMENT, "--window", WINDOW),
        "generate": ("--prompt", "-", "--tokens", "11", "--top-k", "3")
        + ("--top-p", "0.9", "--temperature", "0.8", "--seed", "5"),
    }
    prompts = dict.fromkeys(flags, "") | {"generate": "w1 zebra w2\n"}
    programs = {name: f"{name}.py" for name in flags}
    programs["text"] = "evaluate.py"
    started = {
        name: commands.start(
            *(programs[name], "--workdir", workdir), *flags[name], typed=prompts[name]
        )
        for name in flags
    }
    found = {}
    for name, program in started.items():
        code, *written = commands.finish(program)
        assert code == 0, written[1][-2000:]
        found[name] = written
    return found


@pytest.mark.slow
def test_an_evaluation_is_told_in_a_table_and_in_one_line(answers, workdir):
    *table, unknown, line = answers["evaluate"][0].splitlines()
    found = json.loads(line)
    ways = ("static", "dynamic", "cache", "joint")
    assert set(found) == {"split", "step", "unknown", *ways}
    assert (found["split"], found["step"]) == ("test", 2)
    assert (unknown, found["unknown"]) == ("0.00% of the words are <unk>.", 0.0)
    assert [row.split()[0] for row in table] == ["way", *ways]
    for row, way in zip(table[1:], ways, strict=True):
        numbers = found[way]
        assert numbers["tokens"] == 43
        assert numbers["perplexity"] == pytest.approx(np.exp(numbers["loss"]))
        assert f"{numbers['perplexity']:.3f}" in row


@pytest.mark.slow
def test_the_numbers_are_those_of_the_model_and_the_flags(answers, workdir):
    found = json.loads(answers["evaluate"][0].splitlines()[-1])
    run = state.load_run(workdir)
    ids = corpus.load(run.config.data).test
    static = evaluate.make_evaluator(run.model)(run.params, ids, 1, 17)
    pointer = evaluate.Pointer(window=WINDOW)
    cache = evaluate.evaluate_with_cache(run.model, run.params, ids, 17, pointer)
    assert found["static"]["loss"] == pytest.approx(static.loss, rel=1e-5)
    assert found["cache"]["loss"] == pytest.approx(cache.loss, rel=1e-5)
    kind = evaluate.Joint(window=WINDOW)
    joint = evaluate.evaluate_with_cache(run.model, run.params, ids, 17, kind)
    assert found["joint"]["loss"] == pytest.approx(joint.loss, rel=1e-5)
    assert found["joint"]["cache_accuracy"] == joint.hits / 43
    # It has learnt a little, and after the first words only.
    assert found["dynamic"]["loss"] != found["static"]["loss"]
    assert found["dynamic"]["loss"] == pytest.approx(static.loss, rel=0.1)


def test_any_text_is_scored_with_its_first_word_and_its_unknown_words_counted(
    answers, workdir
):
    found = json.loads(answers["text"][0].splitlines()[-1])
    run = state.load_run(workdir)
    # Five of the six words and ends, after the end of a line.
    ids = run.vocab.encode("\nw1 zebra w2\nw3\n")[:6]
    # With as many components as asked for.
    one = dataclasses.replace(run.model.head, active=1)
    model = dataclasses.replace(run.model, head=one)
    expected = evaluate.make_evaluator(model)(run.params, ids, 1, 17)
    assert found["static"]["tokens"] == 5 and found["unknown"] == 1 / 5
    assert found["static"]["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert found["text"] == [str(workdir / "other.txt")]
    whole = evaluate.make_evaluator(run.model)(run.params, ids, 1, 17)
    assert found["static"]["loss"] != pytest.approx(whole.loss, rel=1e-4)


def test_a_prompt_from_standard_input_is_continued_and_its_unknown_words_named(
    answers, workdir
):
    output, errors = answers["generate"]
    assert "unknown words: zebra\n" in errors
    assert output.startswith("w1 zebra w2") and output.endswith("\n")
    # The end of a line is printed as such.
    words = output.removesuffix("\n").replace("\n", " <eos> ").split()[3:]
    assert len(words) == 11
    assert set(words) <= set(state.load_run(workdir).vocab.words)


@pytest.mark.slow
def test_what_reads_one_stream_is_refused_where_lines_are_read_apart(tmp_path):
    config = tiny.make_config(data__unit="lines", data__synthetic__words=7)
    tiny.write_run(tmp_path, tiny.make_run(config, tiny.make_words(7)))
    started = {
        way: commands.start("evaluate.py", "--workdir", tmp_path, f"--{way}")
        for way in ("dynamic", "cache")
    }
    # A line longer than the config's 17 positions is read by one's own.
    (tmp_path / "long.txt").write_text("w1 w2 w3 " * 7)
    long = ("--text", tmp_path / "long.txt", "--length", 24)
    lines = commands.start("evaluate.py", "--workdir", tmp_path, *long)
    code, written, errors = commands.finish(lines)
    assert code == 0, errors[-2000:]
    assert json.loads(written.splitlines()[-1])["static"]["tokens"] == 22
    for way, program in started.items():
        code, _, errors = commands.finish(program)
        assert code == 2
        told = f"--{way} reads a text as one stream; this run has data.unit='l"
        assert told in errors
