"""Runs along their training: rows, what they decide, and the picture."""

import json

import numpy as np
import pytest

from softbottle.experiments import rows as rows_lib
from softbottle.experiments.saturation import report
from softbottle.experiments.saturation import run as saturation
from softbottle.training import evaluate, loop, state
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_keys", "shared_evaluators")

STEPS = [1, 2, 4, *range(10, 410, 10)]
PASS = 100


def bent(low, end=400, floor=4.0):
    """A curve that falls to its lowest step, and rises after it where it does."""
    x = np.log1p(np.arange(1, end + 1))
    at = np.log1p(low)
    return floor + 0.5 * np.maximum(at - x, 0) + 0.3 * np.maximum(x - at, 0)


def make_row(head="softmax()", width=32, seed=0, low=400, training=400, end=400):
    """A run whose held-out and training loss are lowest at steps of their own."""
    steps = [step for step in STEPS if step <= end]
    noise = np.random.default_rng(seed).normal(0, 1e-3, (7, len(steps)))
    at = np.array(steps) - 1
    curves = {name: list(1 + noise[i]) for i, name in enumerate(saturation.CURVES)}
    curves |= {"step": steps, "loss": list(bent(low)[at] + noise[0])}
    return {
        **{"head": head, "width": width, "seed": seed, "steps_per_pass": PASS},
        **{"fingerprint": "0", "split": "test", "text": "0"},
        "positions": {"loss": 900, "states": 512},
        "curves": curves,
        "training": [[step, bent(training)[step - 1]] for step in range(5, end + 1, 5)],
    }


def decide(*rows):
    return report.decisions(saturation.courses(rows))


def test_a_training_loss_is_the_mean_since_the_checkpoint_before():
    row = make_row()
    row["training"] = [[6, 3.0], [10, 5.0], [12, 1.0], [500, 9.0]]
    (course,) = saturation.courses([row])
    assert course.training_M[3] == 4.0 and course.training_M[4] == 1.0
    assert np.isnan(course.training_M[[0, 1, 2, 5, -1]]).all()
    assert course.pass_M[-1] == 4.0


def test_runs_of_a_width_are_cut_to_the_shortest():
    rows = [make_row(end=200), make_row(seed=1), make_row(width=64)]
    ends = [course.step_M[-1] for course in saturation.courses(rows)]
    assert ends == [200, 200, 400]


def test_a_cure_needs_a_softmax_that_turns_and_two_seeds_of_each():
    softmax = [make_row(seed=seed, low=150, training=150) for seed in (0, 1)]
    flat = [make_row("mos(4)", seed=seed) for seed in (0, 1)]
    turning = make_row("mos(4)", seed=1, low=150, training=150)
    own, cured = decide(*softmax, *flat)[::-1]
    assert own == (
        "Width 32, `softmax()`: the held-out loss turns in 2 of 2 seeds, the training "
        "loss with it in 2."
    )
    assert cured.endswith("turns in 0 of 2 seeds: a cure, the softmax turns in all.")
    assert "undecided" in decide(*softmax, flat[0], turning)[0]
    assert "one seed decides nothing" in decide(*softmax, flat[0])[0]
    steady = [make_row(seed=seed) for seed in (0, 1)]
    assert "nothing to cure" in decide(*steady, *flat)[0]
    # Another width's softmax is no rival.
    assert "cure" not in decide(*softmax, make_row("mos(4)", width=64))[-1]


def test_a_last_checkpoint_right_behind_another_has_the_training_loss_before_it():
    row = make_row()
    last, before = row["curves"]["step"][-1], row["curves"]["step"][-2]
    row["training"] = [[at, loss] for at, loss in row["training"] if at <= before]
    (course,) = saturation.courses([row])
    assert course.step_M[-1] == last and np.isnan(course.training_M[-1])
    cells = report.table([course]).splitlines()[-1].split(" | ")
    assert float(cells[8]) == pytest.approx(course.training_M[-2], abs=1e-4)


def test_what_is_learnt_by_heart_is_told_from_saturation():
    (said,) = decide(make_row(low=150, training=400))
    assert said.endswith("turns in 1 of 1 seeds, the training loss with it in 0.")
    softmax = [make_row(seed=seed, low=150, training=400) for seed in (0, 1)]
    flat = [make_row("mos(4)", seed=seed) for seed in (0, 1)]
    assert decide(*softmax, *flat)[0].endswith("by overfitting: no saturation.")


def test_the_report_has_a_line_per_run_and_a_picture(tmp_path):
    for row in (make_row(low=150), make_row("mos(4)", seed=1), make_row(low=150)):
        saturation.add(tmp_path, row)
    assert len(rows_lib.read(tmp_path / saturation.FILE, saturation.key)) == 2
    text = report.write(tmp_path)
    measured, _, *lines = text.splitlines()
    assert "Losses of 900 tokens of the split test, states of the first 512" in measured
    assert [line.split(" | ")[1] for line in lines[2:4]] == ["`mos(4)`", "`softmax()`"]
    assert {line.count("|") for line in lines[:4]} == {lines[0].count("|")}
    turned = float(lines[3].split(" | ")[9].split()[0])
    assert turned == pytest.approx(1.5, abs=0.1)
    assert lines[2].split(" | ")[9] == "no"
    assert (tmp_path / "saturation.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no rows"):
        report.write(tmp_path / "none")


def test_a_run_of_other_settings_does_not_replace_one(tmp_path):
    old = make_row()
    del old["fingerprint"], old["text"]  # as it was written before
    rows_lib.write(tmp_path / saturation.FILE, [old])
    saturation.add(tmp_path, make_row())
    with pytest.raises(ValueError, match=r"saturation\.jsonl has .* of other settings"):
        saturation.add(tmp_path, make_row() | {"fingerprint": "1"})


@pytest.mark.parametrize(
    "other",
    [{"split": "valid"}, {"text": "1"}, {"positions": {"loss": 900, "states": 99}}],
)
def test_runs_that_were_measured_otherwise_are_not_put_beside_each_other(
    tmp_path, other
):
    saturation.add(tmp_path, make_row())
    for row in (make_row(), make_row("mos(4)")):
        with pytest.raises(ValueError, match=f"of another {[*other][0]}, .* instead"):
            saturation.add(tmp_path, row | other)
    assert rows_lib.read(tmp_path / saturation.FILE, saturation.key) == [make_row()]


@pytest.mark.slow
def test_a_run_is_measured_at_its_checkpoints(tmp_path, monkeypatch):
    config = tiny.make_config(train__series=True, train__series_every=3)
    loop.run(config, tmp_path / "run")
    measured = []
    measure = saturation.turns.measure
    with monkeypatch.context() as patch:
        patch.setattr(
            saturation.turns,
            "measure",
            lambda series: measured.append(measure(series)) or measured[0],
        )
        row = saturation.measure(tmp_path / "run", positions=50)
    row = json.loads(json.dumps(row))
    assert saturation.key(row).width == 3 and "mos(components=2" in row["head"]
    assert row["curves"]["step"] == [1, 2, 3, 6, 9, 10]
    assert row["positions"] == {"loss": 100, "states": 50}
    # The curves have no part in what tells runs apart.
    monkeypatch.setattr(saturation.turns, "measure", lambda series: measured[0])
    marks = {
        saturation.measure(tmp_path / "run", split)["fingerprint"]
        for split in ("test", "valid")
    }
    assert len(marks) == 2 and row["fingerprint"] in marks
    assert row["steps_per_pass"] == 17  # 331 words in 4 rows of 82, by fives
    assert [step for step, _ in row["training"]] == [*range(1, 11)]
    # The last checkpoint is the best here, and all of the text is scored.
    run = state.load_run(tmp_path / "run", "float32")
    test = state.load_corpus(tmp_path / "run", run, "test").test
    score = evaluate.make_evaluator(run.model)
    assert run.step == 10 and row["validations"][-1][0] == 10
    expected = score(run.params, test, 1, config.data.eval_length).loss
    assert row["curves"]["loss"][-1] == pytest.approx(expected, abs=2e-6)
    tiny.write_run(tmp_path / "plain", run)
    with pytest.raises(ValueError, match=r"plain has no series of .*train\.series"):
        saturation.measure(tmp_path / "plain")
