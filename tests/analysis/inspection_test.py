"""All instruments at once, on runs and on arrays."""

import functools
import json

import numpy as np
import pytest

from softbottle import config
from softbottle.analysis import capture, inspection
from softbottle.analysis.instruments import lowrank, scaling
from softbottle.analysis.sources import run
from softbottle.training import metrics
from tests import commands, tiny

pytestmark = pytest.mark.usefixtures("quick_keys")
WORDS, WIDTH = 13, 3


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
    """Runs as training leaves them, of random parameters: training is not looked at."""
    folder = tmp_path_factory.mktemp("runs")
    for head, components in (("mos", 2), ("softmax", 1)):
        made, _ = tiny.make_narrow_run(
            *(head, components, WORDS, WIDTH),
            data__synthetic__train_tokens=900,
            data__synthetic__eval_tokens=300,
            model__table_range=3.0,
        )
        tiny.write_run(folder / head, made)
        start = {"config": config.to_dict(made.config)}
        writer = metrics.Writer(folder / head, 0, start)
        for step in (1, 2):
            perplexity = 9.0 / components / step
            writer.write(step, epoch=0, valid_perplexity=perplexity, averaging=False)
        writer.close()
    return [folder / "mos", folder / "softmax"]


@pytest.fixture(scope="module")
def sections(workdirs):
    return inspection.of_runs(workdirs, positions=200)


def by_title(sections):
    return {section.title: section for section in sections}


@pytest.mark.slow
def test_every_instrument_has_its_section_and_its_picture(sections):
    # These runs have neither a series of checkpoints nor attention.
    *sections, left_out = sections
    assert len(sections) == len(inspection.RUNS) - 2
    assert all(section.figures and section.reading for section in sections)
    absent = {"training": ["mos", "softmax"], "attention": ["mos", "softmax"]}
    absent["argmax"] = ["mos"]
    skipped = left_out.numbers["skipped"]
    assert {name: list(reasons) for name, reasons in skipped.items()} == absent
    assert left_out.title == "Left out" and not left_out.figures
    assert "training (mos: it has no series" in left_out.reading


def test_validations_of_runs_are_put_side_by_side(sections):
    numbers = by_title(sections)["Validation perplexity"].numbers
    assert numbers["mos"] == {"last": 2.25, "best": 2.25}
    assert numbers["softmax"] == {"last": 4.5, "best": 4.5}


def test_the_ranks_are_those_of_the_heads(sections):
    numbers = by_title(sections)["Rank"].numbers
    rank = {name: numbers[name]["ranks"]["ranks"]["float32"] for name in numbers}
    assert rank["softmax"] <= WIDTH + 2 < rank["mos"] <= WORDS


def test_runs_of_one_text_share_its_line(sections):
    (name,) = by_title(sections)["Dimensions of the text"].numbers
    assert name == "text of mos, softmax"


def test_an_instrument_that_was_asked_for_says_why_it_is_skipped(workdirs):
    (section,) = inspection.of_runs(workdirs[:1], ["argmax"], positions=50)
    assert section.title == "argmax" and not section.figures
    assert section.reading.startswith("skipped: mos: there is no single linear map")
    assert section.numbers["skipped"]["mos"] in section.reading


def test_a_run_that_is_left_out_of_a_section_is_named(workdirs):
    top, skipped = inspection.of_runs(workdirs, ["argmax"], positions=50)
    assert list(top.numbers["words"]) == ["softmax"]
    assert list(skipped.numbers["skipped"]) == ["mos"]


def test_every_field_that_an_instrument_needs_has_its_reason():
    bare = capture.Capture("nothing")
    names = list(inspection.INSTRUMENTS)
    (left_out,) = inspection.sections([bare], names)
    assert list(left_out.numbers["skipped"]) == names
    assert all(f"{name} (nothing: " in left_out.reading for name in names)
    skipped = inspection.sections([bare], names, asked=names)
    assert [section.title for section in skipped] == names
    assert all(section.reading.startswith("skipped: ") for section in skipped)


@pytest.mark.slow
def test_heads_of_limited_rank_are_trained_on_request(workdirs, monkeypatch):
    short = lowrank.FROM_SCRATCH._replace(steps=5)
    quick = functools.partial(lowrank.train, training=short)
    monkeypatch.setattr(lowrank, "train", quick)
    (section,) = inspection.of_runs(workdirs[1:], ["lowrank"], positions=200)
    assert list(section.numbers["softmax"]["ranks_R"]) == [1, 2, 3]


def test_by_default_a_run_is_read_for_twice_the_rank_of_its_head(workdirs, monkeypatch):
    for least, positions in ((4, 2 * (WIDTH + 2)), (30, 30)):
        monkeypatch.setattr(run, "POSITIONS", least)
        (section,) = inspection.of_runs(workdirs[1:], ["rank"])
        assert section.numbers["softmax"]["ranks"]["shape"] == (positions, WORDS)


def test_unknown_instruments_and_equal_names_are_errors(workdirs, tmp_path):
    with pytest.raises(ValueError, match="telescope"):
        inspection.of_runs(workdirs, ["telescope"])
    with pytest.raises(ValueError, match="different names"):
        inspection.of_runs([workdirs[0], workdirs[0]], ["rank"])
    with pytest.raises(ValueError, match="no run"):
        inspection.of_runs([tmp_path], ["rank"])


def make_arrays(path, **changes):
    random = np.random.default_rng(0)
    arrays = {
        "hidden": random.normal(size=(40, 5)),
        "table": random.normal(size=(17, 5)),
        "bias": random.normal(size=17),
        "labels": random.integers(0, 17, 40),
        "logits": random.normal(size=(9, 31)),
        "values": random.normal(size=(31, 6)),
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    arrays["labels"] = arrays["labels"].astype(int)
    kept = {k: v for k, v in (arrays | changes).items() if v is not None}
    np.savez(path, **kept)
    return path


def test_arrays_from_anywhere_give_the_rank_of_a_softmax(tmp_path):
    sections = inspection.of_arrays(make_arrays(tmp_path / "states.npz"))
    numbers = by_title(sections)["Rank"].numbers["states"]
    assert numbers["ranks"]["ranks"]["float32"] == numbers["bound"] == 7
    assert len(sections) == 4


def test_other_instruments_read_arrays_on_request(tmp_path):
    path = make_arrays(tmp_path / "states.npz", logits=None)
    (section,) = inspection.of_arrays(path, ["argmax"])
    assert section.numbers["words"]["states"]["tried"] == 17


def test_losses_of_models_are_put_beside_the_law_of_the_larger_ones(tmp_path):
    law = scaling.Law(100.0, 0.3)
    parameters = np.array([1e7, 3e7, 1e9, 3e9])
    tokens = np.full(4, 3e11)
    loss = law.loss(parameters, tokens)
    loss[0] *= 1.07
    models = {"parameters": parameters, "tokens": tokens, "loss": loss}
    np.savez(tmp_path / "m.npz", **models, names=["a", "b", "c", "d"])
    (section,) = inspection.of_arrays(tmp_path / "m.npz")
    found = section.numbers
    assert found["alpha"] == pytest.approx(0.3) and found["a"] == pytest.approx(100)
    assert found["gaps"] == pytest.approx({"a": 0.07, "b": 0, "c": 0, "d": 0}, abs=1e-6)
    np.savez(tmp_path / "n.npz", **models, fitted=[True, True])
    with pytest.raises(ValueError, match="4 models need .* 4 and 2"):
        inspection.of_arrays(tmp_path / "n.npz")


def test_bad_arrays_are_errors_that_say_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="needs hidden and table"):
        inspection.of_arrays(make_arrays(tmp_path / "a.npz", table=None, logits=None))
    with pytest.raises(ValueError, match=r"\(17, 4\)"):
        inspection.of_arrays(make_arrays(tmp_path / "b.npz", table=np.ones((17, 4))))
    (tmp_path / "d.npz").write_text("no arrays")
    with pytest.raises(ValueError, match="d.npz is no .npz file"):
        inspection.of_arrays(tmp_path / "d.npz")
    with pytest.raises(ValueError, match=r"there is no file .*none.npz"):
        inspection.of_arrays(tmp_path / "none.npz")
    poisoned = np.ones((40, 5))
    poisoned[3, 2] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        inspection.of_arrays(make_arrays(tmp_path / "c.npz", hidden=poisoned))


@pytest.mark.slow
def test_the_command_writes_the_report(workdirs, tmp_path):
    # The positions of the other tests, whose compiled programs it finds.
    flags = [f"--workdir={workdirs[1]}", f"--out={tmp_path / 'out'}", "--positions=200"]
    assert "report.html" in commands.run("analyze.py", *flags)
    assert "Rank" in json.loads((tmp_path / "out" / "report.json").read_text())
