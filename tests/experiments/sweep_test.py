import itertools
import json
import shutil

import pytest

from softbottle.experiments import sweep
from tests import pictures, tiny

pytestmark = pytest.mark.usefixtures("quick_keys", "shared_evaluators")


def make_config():
    return tiny.make_config(train__steps=3)


@pytest.fixture(scope="module", autouse=True)
def pictures_of_runs_left_out():
    with pytest.MonkeyPatch.context() as patch:
        pictures.leave_out(patch)
        yield


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(folder, rows) of a sweep over one head, two widths and one seed."""
    workdir = tmp_path_factory.mktemp("sweep")
    return workdir, sweep.run(make_config(), workdir, ["softmax"], [2, 3], [0])


@pytest.mark.slow
def test_a_sweep_has_a_row_for_every_head_and_width(swept):
    workdir, rows = swept
    assert json.loads((workdir / "sweep.json").read_text()) == rows
    assert [(row["head"], row["width"]) for row in rows] == [
        ("softmax", 2),
        ("softmax", 3),
    ]
    assert {row["language"] for row in rows} == {"11 words, random"}
    for row in rows:
        point = workdir / f"softmax-{row['width']}-0"
        summary = json.loads((point / "summary.json").read_text())
        assert summary["context_dim"] == row["width"]
        assert [row[name] for name in ("kl", "rank", "parameters")] == [
            summary[name] for name in ("kl", "rank", "parameters")
        ]


def test_a_sweep_draws_its_picture(swept):
    picture = (swept[0] / "sweep.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.slow
def test_a_sweep_started_again_trains_only_what_is_missing(swept):
    workdir, rows = swept
    trained = workdir / "softmax-2-0" / "metrics.jsonl"
    lines = trained.read_text()
    for path in (workdir / "sweep.json", workdir / "sweep.png"):
        path.unlink()
    shutil.rmtree(workdir / "softmax-3-0")
    assert sweep.run(make_config(), workdir, ["softmax"], [2, 3], [0]) == rows
    assert trained.read_text() == lines
    assert json.loads((workdir / "sweep.json").read_text()) == rows
    assert (workdir / "sweep.png").exists()


def test_rows_are_means_over_seeds_in_a_markdown_table():
    row = {"head": "mos", "width": 8, "parameters": 12_345, "rank": 63.67}
    table = sweep.table([row | {"kl": 0.12345, "kl_deviation": 0.01}])
    assert table.splitlines()[2] == "| mos | 8 | 12,345 | 0.1235 ± 0.0100 | 64 |"


def test_the_deviation_over_seeds_is_that_of_a_sample(monkeypatch, tmp_path):
    kls = {0: 1.0, 1: 2.0, 2: 6.0}

    def run(config, workdir):
        assert config.seed == config.data.synthetic.seed
        workdir.mkdir(parents=True)
        return {"kl": kls[config.seed], "parameters": 7, "rank": config.seed}

    monkeypatch.setattr(sweep.trial, "run", run)
    (row,) = sweep.run(make_config(), tmp_path, ["softmax"], [3], range(3))
    assert (row["kl"], row["rank"], row["seeds"]) == (3.0, 1.0, 3)
    # ((1 - 3)^2 + (2 - 3)^2 + (6 - 3)^2) / 2 = 7.
    assert row["kl_deviation"] == pytest.approx(7**0.5)


def test_a_mixture_of_softmaxes_is_drawn_beside_a_softmax_of_its_size(
    monkeypatch, tmp_path
):
    def run(config, workdir):
        workdir.mkdir(parents=True)
        rival = {"kl": 2.0, "parameters": 6, "rank": 4}
        mixture = {"kl": 1.0, "parameters": 7, "rank": 9}
        return mixture | (
            {"equal_softmax": rival} if config.train.equal_softmax else {}
        )

    monkeypatch.setattr(sweep.trial, "run", run)
    rows = sweep.run(make_config(), tmp_path, ["moc", "mos"], [3], [0])
    assert [(row["head"], row["kl"]) for row in rows] == [
        *(("moc", 1.0), ("mos", 1.0), (sweep.EQUAL, 2.0))
    ]


def test_each_language_has_a_panel_with_its_heads_named_in_it(swept):
    workdir, rows = swept
    other = [row | {"language": "another", "head": "mos"} for row in rows]
    panels = sweep.draw(rows + other).axes
    assert [axes.get_title() for axes in panels] == ["11 words, random", "another"]
    assert [[text.get_text() for text in axes.texts] for axes in panels] == [
        ["softmax"],
        ["mos"],
    ]


def test_a_line_goes_from_left_to_right(swept):
    rows = [swept[1][0] | {"width": width} for width in (8, 2, 4)]
    (axes,) = sweep.draw(rows).axes
    assert list(axes.lines[0].get_xdata()) == [2, 4, 8]


def test_labels_of_lines_that_end_together_are_apart(swept):
    heads = ("mos", "moc", "softmax")
    rows = [swept[1][0] | {"head": head, "kl": 1.0} for head in heads]
    (axes,) = sweep.draw([*rows, rows[0] | {"head": "moss", "kl": 9.0}]).axes
    heights = sorted(text.xyann[1] for text in axes.texts)
    assert all(b - a > 0.05 for a, b in itertools.pairwise(heights))


def test_what_is_no_sweep_is_not_drawn_beside_one(tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text('[{"head": "mos"}]')
    with pytest.raises(ValueError, match="sweep.json is no sweep.json"):
        sweep.run(make_config(), tmp_path, ["moc"], [3], [0], path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"data__name": "templates"}, "synthetic language, and .* 'templates': sweep"),
        ({}, "head.components must be set: mos has no default"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_is_trained(
    fields, message, monkeypatch, tmp_path
):
    monkeypatch.setattr(sweep.trial, "run", lambda *_: pytest.fail("it trained"))
    config = tiny.make_config(head__name="softmax", head__components=None, **fields)
    with pytest.raises(ValueError, match=message):
        sweep.run(config, tmp_path / "sweep", ["softmax", "mos"], [3], [0])
    assert not (tmp_path / "sweep").exists()


def test_rows_are_replaced_whole(monkeypatch, tmp_path):
    def full_disk(_):
        raise OSError("No space left on device")

    summary = {"kl": 1.0, "parameters": 7, "rank": 3}
    monkeypatch.setattr(sweep.trial, "run", lambda config, workdir: summary)
    monkeypatch.setattr("os.fsync", full_disk)
    (tmp_path / "sweep.json").write_text("of before")
    with pytest.raises(OSError, match="No space"):
        sweep.run(make_config(), tmp_path, ["softmax"], [3], [0])
    assert (tmp_path / "sweep.json").read_text() == "of before"


def test_a_sweep_asked_to_stop_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep.trial, "run", lambda config, workdir: {})
    with pytest.raises(SystemExit, match="asked to stop"):
        sweep.run(make_config(), tmp_path, ["moc"], [3], [0])
