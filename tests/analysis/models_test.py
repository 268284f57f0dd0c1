"""Several models in one report: names, refusals, revisions, memory."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest

from softbottle.analysis import capture as capture_lib
from softbottle.analysis import inspection
from softbottle.analysis.settings import Settings
from softbottle.analysis.sources import opening
from softbottle.analysis.sources.reading import Reading
from tests.analysis.inspection_test import by_title, make_arrays

WORDS, WIDTH = 17, 5


def make_capture(name, seed=0, width=WIDTH, **changes):
    random = np.random.default_rng(seed)
    table_VD = random.normal(size=(WORDS, width)).astype(np.float32)
    states = [random.normal(size=(40, width)).astype(np.float32) for _ in range(2)]
    ids = np.random.default_rng(9).integers(0, WORDS, 41)
    made = capture_lib.Capture.from_states(
        states, table_VD, labels=ids[1:], name=name, ids=ids
    )
    made = dataclasses.replace(made, parameters=1000 * width, facts=(f"of {name}",))
    return dataclasses.replace(made, **changes)


def source(*labels, read=None, kind="pretrained"):
    return opening.Source(
        labels, read or (lambda name, parts: make_capture(name)), kind
    )


def test_a_name_is_the_shortest_that_no_other_has(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "b" / "other"]
    sources = opening.runs(folders)
    sources += opening.gguf([tmp_path / "c" / "other.gguf"], Reading("text"))
    names = opening.distinct(sources)
    assert names == ["a/run", "b/run", "b/other", "other.gguf"]
    assert opening.distinct(opening.runs(folders[1:])) == ["run", "other"]
    with pytest.raises(ValueError, match="different names, got .*run twice"):
        opening.distinct(opening.runs([folders[0], folders[0]]))


def test_revisions_of_a_hub_model_are_a_series_and_others_are_models():
    names = ["a/small@step1,step512", "a/small@step64000", "a/large", "a/small@main"]
    sources = opening.hub(names, Reading("text"))
    assert opening.distinct(sources) == ["small", "large", "small@main"]
    sources = opening.hub([*names, "a/small"], Reading("text"))
    assert opening.distinct(sources) == [
        *("a/small@step1..step64000", "large", "small@main", "a/small")
    ]
    (alone,) = opening.hub(["a/small@step1"], Reading("text"))
    assert opening.distinct([alone]) == ["small@step1"]
    with pytest.raises(ValueError, match="two revisions of step 512"):
        opening.hub(["a/small@step512,stage2-step512"], Reading("text"))


def test_revisions_that_are_compared_are_models_of_their_own():
    sources = opening.checkpoints(["a/small@step1,step512", "b/small"], Reading("text"))
    assert opening.distinct(sources) == ["small@step1", "small@step512", "small"]


@pytest.mark.parametrize(
    "revision, step",
    [
        ("step1000", 1000),
        ("stage1-step3000-tokens13B", 3000),
        ("checkpoint-500", 500),
        ("12000", 12000),
        ("v0.7", None),
        ("main", None),
    ],
)
def test_the_step_is_read_off_a_revision_s_name(revision, step):
    assert opening.step_of(revision) == step


def test_all_checkpoints_of_a_folder(tmp_path):
    for name in ("checkpoint-20", "checkpoint-100", "best", "logs"):
        (tmp_path / "m" / name).mkdir(parents=True)
        if name != "logs":
            (tmp_path / "m" / name / "config.json").write_text("{}")
    found = opening.revisions(f"{tmp_path / 'm'}@*")
    assert sorted(found) == [
        (str(tmp_path / "m"), name)
        for name in ("best", "checkpoint-100", "checkpoint-20")
    ]
    series, best = sorted(opening.hub([f"{tmp_path / 'm'}@*"], Reading("text")))
    assert series.labels[0] == "m" and best.labels[0] == "m@best"
    # A folder of that very name is meant first.
    (tmp_path / "odd@1").mkdir()
    assert opening.revisions(str(tmp_path / "odd@1")) == [
        (f"{tmp_path / 'odd@1'}", None)
    ]
    with pytest.raises(ValueError, match="name the revisions"):
        opening.revisions("a/small@*")
    for name in ("a/small@", "a/small@step1,,step2"):
        with pytest.raises(ValueError, match="names no revision after the @"):
            opening.revisions(name)


def test_a_folder_is_called_by_its_own_name_wherever_one_stands(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path / "m")
    sources = opening.hub([".", "a/other"], Reading("text"))
    assert opening.distinct(sources) == ["m", "other"]


def test_a_model_that_is_refused_is_one_line_and_loses_no_other():
    def refuse(name, parts):
        raise OSError("no such\nmodel")

    sources = [source("good"), source("bad", read=refuse), source("fine")]
    made = inspection.inspect(sources)
    assert made.refused == {"bad": "no such model"}
    assert list(made.shapes) == ["good", "fine"]
    assert set(by_title(made.sections)["Rank"].numbers) == {"good", "fine"}
    left_out = made.sections[-1]
    assert "bad is refused: no such model" in left_out.reading
    assert left_out.numbers["refused"] == made.refused
    with pytest.raises(ValueError, match="no such model no such model"):
        inspection.inspect([source(name, read=refuse) for name in "ab"])
    # Of one source the error is what it is.
    with pytest.raises(OSError, match="no such\nmodel"):
        inspection.inspect(sources[1:2])


def test_what_an_instrument_refuses_of_one_model_is_named_and_the_rest_is_there():
    zero = [np.zeros((40, WIDTH), np.float32)] * 2
    flat = lambda name, parts: make_capture(name, states=zero)  # noqa: E731
    sources = [source("good"), source("flat", read=flat)]
    made = inspection.inspect(sources, ["saturation", "rank"])
    saturation, skipped, rank = made.sections
    assert set(saturation.numbers) == {"good", "good, head"}
    assert "flat: anisotropy needs two or more states" in skipped.reading
    assert set(rank.numbers) == {"good", "flat"}


def test_the_arrays_of_one_model_are_held_at_a_time():
    class Held(np.ndarray):
        """An array that can be watched."""

    most, refs = [], []

    def watched(name, parts):
        gc.collect()
        most.append(sum(ref() is not None for ref in refs))
        made = make_capture(name, seed=ord(name))
        states = [state_ND.view(Held) for state_ND in made.states]
        refs.extend(map(weakref.ref, states))
        tokens = [capture_lib.Tokens(states[-1], made.tokens[0].labels_T)]
        return dataclasses.replace(made, states=states, tokens=tokens)

    # An error in what another test left behind would keep the frames it is raised in.
    gc.collect()
    made = inspection.inspect([source(name, read=watched) for name in "abc"])
    assert list(made.shapes) == ["a", "b", "c"] and len(refs) == 6
    assert most == [0, 0, 0]


def make_series(name, steps, missing=()):
    for step in steps:
        made = make_capture(name, seed=step)
        yield capture_lib.Checkpoint(step, made.table_VE, made.states[-1], 3.0 - step)
    yield from missing


def test_a_series_is_measured_when_the_arrays_of_its_model_are_gone():
    held = []

    class Series:
        def __iter__(self):
            gc.collect()
            held.append(ref() is not None)
            missing = capture_lib.Missing("step9", "it is damaged")
            return make_series("a", (1, 2, 4), [missing])

    class Held(np.ndarray):
        """An array that can be watched."""

    def read(name, parts):
        nonlocal ref
        made = make_capture(name, series=Series())
        states = [made.states[0], made.states[1].view(Held)]
        ref = weakref.ref(states[1])
        tokens = [capture_lib.Tokens(states[1], made.tokens[0].labels_T)]
        return dataclasses.replace(
            made, states=states, tokens=tokens, mixed=None, frozen=None
        )

    ref = None
    made = inspection.inspect([source("a", read=read), source("b")])
    assert held == [False]
    training = by_title(made.sections)["Saturation in training"]
    assert list(training.numbers) == ["a"]
    assert training.numbers["a"]["step_M"].tolist() == [1, 2, 4]
    assert "a, not read: step9: it is damaged." in training.reading
    # Nobody asked for a series of b.
    assert all("training" not in section.reading for section in made.sections[-1:])


def test_arrays_models_and_texts_stand_in_one_report(tmp_path):
    (tmp_path / "book.txt").write_text("a b a c a b " * 20)
    sources = [source("model")]
    sources += opening.files(
        [
            make_arrays(tmp_path / "one.npz"),
            make_arrays(tmp_path / "two.npz", table=None),
        ]
    )
    sources += opening.bare_texts([tmp_path / "book.txt"], 9)
    made = inspection.inspect(sources, settings=Settings(dimensions=2))
    sections = by_title(made.sections)
    assert set(sections["Rank"].numbers) == {"model", "one"}
    assert {"Limits of attention: one", "Limits of attention: two"} <= set(sections)
    names = [figure.name for one in made.sections for figure in one.figures]
    assert len(set(names)) == len(names)
    titles = sections["Dimensions of the text"].numbers
    assert {"book.txt", "text in tokens of model"} <= set(titles)


def test_models_that_read_one_text_share_its_count(monkeypatch):
    from softbottle.analysis.instruments import ngram

    counted = []
    count = ngram.next_word
    monkeypatch.setattr(
        ngram, "next_word", lambda *given: counted.append(1) or count(*given)
    )
    wide = lambda name, parts: make_capture(name, width=7)  # noqa: E731
    made = inspection.inspect([source("a"), source("b", read=wide)], ["ngram"])
    (title,) = made.sections[0].numbers
    assert title == "text in tokens of a, b" and counted == [1]


def test_of_several_files_one_that_is_refused_loses_no_other(tmp_path):
    sizes = {"parameters": np.array([1e7, 1e8, 1e9, 3e9]), "tokens": np.full(4, 3e11)}
    for name, loss in (("good", [3.0, 2.8, 2.5, 2.4]), ("bad", [3.0, 2.8])):
        np.savez(tmp_path / f"{name}.npz", **sizes, loss=np.array(loss))
    paths = [tmp_path / "bad.npz", tmp_path / "good.npz"]
    law, left_out = inspection.inspect(opening.files(paths)).sections
    assert law.title == "Scaling law: good"
    assert "bad: parameters, tokens and loss must be [M]" in left_out.reading
    with pytest.raises(ValueError, match=f"{tmp_path}/bad.npz: parameters, tokens"):
        inspection.inspect(opening.files(paths[:1]))
