import contextlib
import json
import math
import signal

import jax
import pytest

from configs import lm1b, ptb
from softbottle import model as models
from softbottle.analysis import curves
from softbottle.cli import configs as config_files
from softbottle.experiments.reproduce import plan as plan_lib
from softbottle.experiments.reproduce import plot, published, report
from softbottle.experiments.reproduce import run as reproduce
from softbottle.experiments.reproduce import stage as stage_lib
from softbottle.experiments.reproduce.plan import Grid, Plan, Unit
from softbottle.experiments.reproduce.tables import HEADS, TABLES
from softbottle.training import lock, metrics, state, stopping
from tests import pictures, tiny

pytestmark = pytest.mark.usefixtures("quick_keys", "shared_evaluators")

# Three epochs of 17 steps, averaged from the second on.
SCALE = 0.006
GRID = Grid("ptb", ["mos"], [3], SCALE)
STAGES = [stage.name for stage in TABLES["ptb"].stages]
# Of a row; they are not the same twice.
CLOCKS = ("elapsed", "seconds", "step_ms")


def load(value):
    """A tiny config in the place of one that comes with softbottle."""
    _, _, argument = value.partition(":")
    _, *stages = argument.split(",")
    fields = {
        **{"train__steps": None, "train__eval_every": None, "train__epochs": 9},
        **{"optim__name": "sgd", "optim__learning_rate": 0.5},
        **{"train__checkpoint_every": 99, "train__log_every": 10},
        **{"optim__averaging": "now" if "finetune" in stages else "et", "seed": 7},
    }
    return tiny.make_config(**fields)


def in_this_process(task, outcome, seconds):
    """What `supervise` does, without a process."""
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in signals]
    try:
        stage_lib.run(task, outcome)
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    return 0


def no_stage(*arguments):
    raise AssertionError("a stage was started")


@pytest.fixture(scope="module", autouse=True)
def without_processes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_lib, "supervise", in_this_process)
        patch.setattr(curves, "write", lambda workdir, title: None)
        # The tests of figures paint them; a page has its own after every stage.
        pictures.leave_unpainted(patch)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(workdir, rows) of a whole table of one head."""
    workdir = tmp_path_factory.mktemp("ptb")
    return workdir, reproduce.run(GRID, workdir, load)


@pytest.fixture
def stubs(monkeypatch):
    """Outcomes, or exit statuses, by folder or measure; and the tasks that came."""
    answers, tasks = {}, []

    def supervise(task, outcome, seconds):
        tasks.append(task["measure"] or task["folder"].rpartition("/")[2])
        answer = answers.get(tasks[-1], {})
        if isinstance(answer, dict):
            outcome.write_text(json.dumps(make_outcome() | answer))
            return 0
        return answer

    monkeypatch.setattr(stage_lib, "supervise", supervise)
    monkeypatch.setattr(reproduce, "_best_step", lambda plan, unit: 1)
    return answers, tasks


def make_outcome():
    """Made-up numbers that serve every stage."""
    return {
        **{"steps": 51, "epochs": 3, "parameters": 99, "valid_perplexity": 4.0},
        **{"step_ms": 1.0, "elapsed": 6.0, "device": "cpu", "jax": "0"},
        **{"valid": 4.0, "test": 5.0, "rank": 6, "step": 51},
    }


def stopping_at(monkeypatch, step):
    """The next run is asked to stop after a step."""
    asked = [step]

    @contextlib.contextmanager
    def watch():
        yield lambda now: bool(asked) and now == asked[0] and bool(asked.pop())

    monkeypatch.setattr(stopping, "watch", watch)


def without_clocks(rows):
    return {
        unit: {name: value for name, value in row.items() if name not in CLOCKS}
        for unit, row in rows.items()
    }


@pytest.mark.slow
def test_every_stage_of_a_table_leaves_its_numbers(undisturbed):
    workdir, rows = undisturbed
    assert [*rows] == [Unit("mos", 3, stage) for stage in STAGES]
    assert reproduce.read(workdir) == rows
    by_stage = {unit.stage: row for unit, row in rows.items()}
    train, fine = by_stage["train"], by_stage["finetune"]
    assert (train["epochs"], train["steps"], len(train["validations"])) == (3, 51, 3)
    assert fine["validations"] != train["validations"]
    config = json.loads(
        (workdir / "mos-seed3" / "finetune" / "config.json").read_text()
    )
    assert config["train"]["init_from"] == str(workdir / "mos-seed3" / "train")
    for stage in ("static", "fine-static"):
        row = by_stage[stage]
        trained = by_stage["train" if stage == "static" else "finetune"]
        assert row["test"] == pytest.approx(trained["test_perplexity"], rel=1e-5)
        assert row["valid"] == pytest.approx(trained["valid_perplexity"], rel=1e-5)
    others = [by_stage[f"fine-{way}"]["test"] for way in ("dynamic", "cache")]
    assert len({*others, by_stage["fine-static"]["test"]}) == 3
    ranked = by_stage["fine-rank"]
    assert ranked["shape"] == [100, 11] and 1 < ranked["rank"] <= 11


@pytest.mark.parametrize(
    "measure, settings, splits",
    [
        *(("static", {}, {"valid", "test"}), ("cache", {"pointer": ()}, {"test"})),
        ("dynamic", {"sums": ()}, {"train", "test"}),
        ("rank", {"positions": 9}, {"test"}),
    ],
)
def test_every_text_that_is_read_is_that_of_the_training(
    undisturbed, monkeypatch, measure, settings, splits
):
    def changed(folder, run, *checked):
        assert set(checked) == splits
        raise ValueError("the text changed")

    monkeypatch.setattr(state, "load_corpus", changed)
    task = {"folder": undisturbed[0] / "mos-seed3" / "train"}
    with pytest.raises(ValueError, match="the text changed"):
        stage_lib._MEASURES[measure](task, **settings)


def test_the_page_has_our_numbers_beside_the_published_ones(undisturbed):
    workdir, rows = undisturbed
    text = (workdir / "ptb.md").read_text()
    assert text.startswith("# Penn Treebank\n")
    command = "softbottle reproduce ptb --heads mos --seeds 3 --scale 0.006"
    assert f"    {command}\n" in text and "**At 0.006 of the recipe**" in text
    static = rows[Unit("mos", 3, "static")]["test"]
    line = f"| mos | not finetuned, static, test | {static:.2f} | 1 | 55.97 [1]; "
    assert line in text
    assert "- [1] Yang et al. 2018 (arXiv:1711.03953)\n" in text
    assert "| mos-seed3 | train | 3 of 3 | epoch 1 | 0.5 | 51 | " in text
    assert "are 0.002, 0.075, 0.001 for mixtures" in text
    assert "cut short at" not in text and "## Left" not in text


def test_what_is_done_is_not_done_again(undisturbed, monkeypatch, capsys):
    workdir, rows = undisturbed
    monkeypatch.setattr(stage_lib, "supervise", no_stage)
    assert reproduce.run(GRID, workdir, load) == rows
    assert "left:" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_table_that_was_stopped_ends_with_the_same_numbers(
    undisturbed, tmp_path, monkeypatch, capsys
):
    stopping_at(monkeypatch, 20)
    rows = reproduce.run(GRID, tmp_path, load)
    train = Unit("mos", 3, "train")
    assert [*rows] == [train] and rows[train]["begun"]
    *_, queue, hint = capsys.readouterr().out.splitlines()
    assert queue == "left: " + ", ".join(f"mos-seed3 {stage}" for stage in STAGES)
    assert hint == "with --as_is, of what was cut short: mos-seed3 static"
    page = (tmp_path / "ptb.md").read_text()
    assert page.startswith("# Penn Treebank: partial\n")
    assert "- mos-seed3 train: cut short at step 20, after 1 of 3 epochs, valid" in page

    rows = reproduce.run(GRID, tmp_path, load, as_is=True)
    assert "--as_is" not in capsys.readouterr().out
    static = rows[Unit("mos", 3, "static")]
    assert not static["complete"] and len(rows) == 2
    page = (tmp_path / "ptb.md").read_text()
    assert (
        f"| {static['test']:.2f} | 1 | 55.97 [1]; 54.91 ± 0.26 [2] | seed 3: " in page
    )
    assert "- mos-seed3 static: measured where the training was cut short, and" in page

    stopping_at(monkeypatch, 18)  # the first training is past it, the second is not
    rows = reproduce.run(GRID, tmp_path, load)
    assert "begun" in rows[Unit("mos", 3, "finetune")]
    rows = reproduce.run(GRID, tmp_path, load)
    assert without_clocks(rows) == without_clocks(undisturbed[1])


def test_no_minutes_start_nothing_and_say_what_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stage_lib, "supervise", no_stage)
    grid = Grid("lm1b", ["mos", "moc"])
    assert reproduce.run(grid, tmp_path, load, minutes=0) == {}
    assert capsys.readouterr().out.splitlines()[-1] == (
        "left: mos-seed7 train, mos-seed7 static, moc-seed7 train, moc-seed7 static"
    )


@pytest.mark.parametrize(
    "other", [GRID._replace(scale=0.01), GRID._replace(changes={"data.rows": 5})]
)
def test_a_workdir_of_other_settings_is_refused(undisturbed, monkeypatch, other):
    workdir, _ = undisturbed
    monkeypatch.setattr(stage_lib, "supervise", no_stage)
    with pytest.raises(
        ValueError, match="has mos-seed3 train of other settings or of ano"
    ):
        reproduce.run(other, workdir, load)


def test_settings_bind_what_was_only_begun(tmp_path, stubs):
    stubs[0]["train"] = 0  # asked to stop
    reproduce.run(GRID, tmp_path, load)
    with pytest.raises(ValueError, match="has mos-seed3 train of other settings"):
        reproduce.run(GRID._replace(scale=0.01), tmp_path, load)


def test_an_unknown_head_is_answered_with_the_heads_there_are(tmp_path):
    for table, head in (("ptb", "mso"), ("wt2", "softmax-340"), ("time", "mos-280")):
        named = f"no head is called '{head}' here; there are softmax,"
        with pytest.raises(ValueError, match=named):
            reproduce.run(Grid(table, [head]), tmp_path / "new", load)
    assert not (tmp_path / "new").exists()


def test_heads_that_learn_at_half_the_rate_do_so_by_sgd_alone(tmp_path, monkeypatch):
    text = {"text": "x"}, 100
    monkeypatch.setattr(Plan, "_text", lambda plan, config: text)
    found = {}
    for table, recipe in (("ptb", 20.0), ("wt2", 15.0), ("lm1b", 1e-3)):
        grid = Grid(table, ["mos-3", "mos-5", "moc-residual", "partition-4"])
        plan = Plan(grid, tmp_path, config_files.load)
        for unit in plan.units:
            if unit.stage == "train":
                rate = plan.config(unit).optim.learning_rate
                found[table, unit.head] = rate / recipe
    halved = {f"{unit[0]} {unit[1]}" for unit, share in found.items() if share == 0.5}
    assert halved == {
        f"{table} {head}"
        for table in ("ptb", "wt2")
        for head in ("mos-3", "moc-residual", "partition-4")
    }
    assert {share for share in found.values() if share != 0.5} == {1.0}


def test_settings_that_were_given_come_before_the_factor(tmp_path):
    changes = {"optim.learning_rate": 0.25}
    grid = Grid("ranks", ["mos-3"], changes=changes)
    plan = Plan(grid, tmp_path, load)
    assert plan.config(plan.units[0]).optim.learning_rate == 0.25


@pytest.mark.parametrize("scale", [0.0, 1.5])
def test_a_scale_is_a_share(tmp_path, scale):
    with pytest.raises(ValueError, match=f"at most 1, got {scale}"):
        reproduce.run(GRID._replace(scale=scale), tmp_path / "new", load)


def test_a_setting_that_there_is_not_is_named(tmp_path):
    grid = GRID._replace(changes={"train.epoch": 3})
    with pytest.raises(
        ValueError, match="mos-seed3 train cannot be made: Train has no fie"
    ):
        reproduce.run(grid, tmp_path / "new", load)


@pytest.mark.parametrize("name", ["seed", "train.init_from"])
def test_what_every_unit_has_its_own_of_is_not_set_for_all(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} is not set for all runs: "):
        Plan(GRID._replace(changes={name: 3}), tmp_path, load)


def test_heads_and_seeds_come_one_after_the_other_each_with_all_stages(tmp_path, stubs):
    grid = Grid("ranks", ["softmax", "mos"], [1, 2])
    rows = reproduce.run(grid, tmp_path, load)
    heads = [("softmax", 1), ("mos", 1), ("softmax", 2), ("mos", 2)]
    stages = ("train", "static", "rank")
    assert [*rows] == [Unit(*run, stage) for run in heads for stage in stages]
    assert stubs[1] == 4 * [*stages]


def test_tables_of_processes_that_shared_a_device_can_be_joined(
    tmp_path, stubs, monkeypatch
):
    heads, lines = ("softmax", "mos"), []
    for head in heads:
        rows = reproduce.run(Grid("ranks", [head]), tmp_path / head, load, untimed=True)
        assert rows[Unit(head, 7, "train")]["step_ms"] is None
        lines.append((tmp_path / head / "reproduce.jsonl").read_text())
    (tmp_path / "reproduce.jsonl").write_text("".join(lines))
    monkeypatch.setattr(stage_lib, "supervise", no_stage)
    reproduce.run(Grid("ranks", heads), tmp_path, load)
    page = (tmp_path / "ranks.md").read_text()
    assert page.startswith("# Ranks of log P on Penn Treebank\n")
    for head in heads:
        assert f"| {head} | not finetuned, static, test | 5.00 | 1 |" in page
    assert page.count("| 0.5 | 51 | 99 | 4.00 |  |  |") == 2


def test_a_table_of_times_is_timed(tmp_path):
    with pytest.raises(ValueError, match="table 'time' is of times; leave out"):
        reproduce.run(Grid("time"), tmp_path / "new", load, untimed=True)
    assert not (tmp_path / "new").exists()


def test_without_seeds_every_head_has_that_of_its_recipe(tmp_path):
    def recipe(value):
        return tiny.change(load(value), seed=141 if ":softmax" in value else 28)

    units = Plan(Grid("lm1b", ["softmax", "mos-3"]), tmp_path, recipe).units
    assert [str(unit) for unit in units[1:3]] == [
        *("softmax-seed141 static", "mos-3-seed28 train")
    ]


def test_a_line_has_mean_deviation_and_number_of_seeds(tmp_path, stubs):
    grid = Grid("ptb", ["mos"], [1, 2, 3])
    plan = Plan(grid, tmp_path, load)
    rows = {
        Unit("mos", seed, "static"): {"seed": seed, "test": test, "complete": True}
        for seed, test in ((1, 55.0), (2, 56.0))
    }
    cut = {"seed": 3, "test": 99.0, "complete": False, "progress": "cut short"}
    rows[Unit("mos", 3, "static")] = cut
    lines = report.numbers(plan, rows).splitlines()
    (line,) = (line for line in lines if "not finetuned, static, test" in line)
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[2:4] == ["55.50 ± 0.71", "2"] and cells[5] == ""
    del rows[Unit("mos", 1, "static")], rows[Unit("mos", 2, "static")]
    lines = report.numbers(plan, rows).splitlines()
    assert "| 99.00 | 1 | " in lines[3] and lines[3].endswith("| seed 3: cut short |")


def test_mixtures_are_drawn_by_components_beside_the_published_ones(tmp_path):
    heads = ["softmax", "mos-3", "mos-5", "mos-10", "mos-20", "mos-280"]
    plan = Plan(Grid("ranks", heads, [1, 2], 0.5), tmp_path, load)
    rows = {
        Unit(head, seed, "static"): {"test": 60.0 + seed + place, "complete": True}
        for place, head in enumerate(heads)
        for seed in (1, 2)
    }
    rows[Unit("mos-20", 2, "static")]["complete"] = False
    rows[Unit("mos-10", 1, "rank")] = {"rank": 9_417, "complete": True}
    (panel,) = plot.panels(plan, rows)
    assert panel.title.endswith("ours at 0.5 of the epochs")
    assert panel.ours == {
        "ours, rate 0.5": [(5, 63.0), (5, 64.0), (10, 64.0), (10, 65.0), (20, 65.0)],
        "ours, rate 0.25": [(3, 62.0), (3, 63.0)],
    }
    assert panel.levels == {"softmax": 61.5, "mos-280": 66.5}
    yang = [(3, 58.62), (5, 57.36), (10, 56.33), (20, 56.17)]
    assert panel.published[published.YANG] == yang
    figure = plot.draw([panel])
    (axes,) = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    means = [[5, 63.5], [10, 64.5], [20, 65]]
    assert drawn["ours, rate 0.5"] == means and drawn["ours, rate 0.25"] == [[3, 62.5]]
    assert drawn["softmax"] == [[3, 61.5], [20, 61.5]]
    assert drawn["Yang et al. 2018"] == [list(point) for point in yang]
    figure.png()


@pytest.mark.parametrize(
    "epochs, along, label", [(4, [1, 2, 3, 4], "epoch"), (0, None, "thousand steps")]
)
def test_trainings_are_drawn_side_by_side(tmp_path, epochs, along, label):
    plan = Plan(Grid("ptb", ["mos", "softmax"], [1, 2]), tmp_path, load)
    row = {"steps": 400, "epochs": epochs}
    losses = [[100, 3.0], [200, 2.0], [300, 1.0], [400, 1.5]]
    rows = {
        # A loss whose perplexity is beyond all numbers is not drawn.
        Unit("mos", 1, "train"): row | {"validations": [[50, 1e3], *losses]},
        Unit("mos", 2, "train"): row | {"validations": losses[1:]},
        Unit("softmax", 1, "train"): row | {"validations": losses[:1]},
        Unit("softmax", 2, "train"): {"begun": True},
        Unit("mos", 1, "finetune"): row | {"validations": losses[2:]},
    }
    figure = plot.curves(plan, rows)
    train, fine = figure.axes
    assert (train.get_title(), fine.get_title()) == ("train", "finetune")
    first, second = train.lines
    last = f"{math.exp(1.5):.2f}"
    assert first.get_label() == f"mos-seed1: {last}"
    assert second.get_label() == f"mos-seed2: {last}"
    assert fine.lines[0].get_label() == f"mos: {last}"
    assert [*first.get_xdata()] == pytest.approx(along or [0.1, 0.2, 0.3, 0.4])
    assert [*first.get_ydata()] == pytest.approx([math.exp(y) for _, y in losses])
    assert train.get_xlabel() == label
    figure.png()
    assert plot.curves(plan, {Unit("mos", 1, "train"): row}) is None


def test_a_training_that_is_not_ended_is_drawn_as_far_as_it_came(tmp_path):
    plan = Plan(Grid("ptb", ["mos"], [1]), tmp_path, load)
    unit = Unit("mos", 1, "finetune")
    lines = [{"step": 0, "start": {}}, {"step": 90, "loss": 9.0}]
    for epoch, loss in ((1, 2.0), (2, 1.0)):
        lines.append({"step": 100 * epoch, "epoch": epoch, "valid_loss": loss})
    plan.folder(unit).mkdir(parents=True)
    path = plan.folder(unit) / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axes,) = plot.curves(plan, {unit: {"begun": True}}).axes
    (drawn,) = axes.lines
    assert drawn.get_label() == f"mos, not ended: {math.e:.2f}"
    assert drawn.get_xydata().tolist() == [[1, math.exp(2)], [2, math.e]]


def test_a_page_has_a_picture_where_there_is_something_to_draw(tmp_path, stubs):
    for heads, lines in ((["mos-5"], 0), (["mos-5", "mos-10", "softmax"], 1)):
        workdir = tmp_path / heads[-1]
        reproduce.run(Grid("ranks", heads), workdir, load)
        page = (workdir / "ranks.md").read_text()
        assert page.count("](ranks.png)\n") == lines
        assert (workdir / "ranks.png").exists() == bool(lines)


def test_a_stage_that_failed_is_told_and_the_next_head_follows(tmp_path, stubs, capsys):
    stubs[0]["finetune"] = {"failed": "step 3: loss nan"}
    reproduce.run(Grid("ptb", ["mos", "moc"], [1]), tmp_path, load)
    page = (tmp_path / "ptb.md").read_text()
    assert (
        "- mos-seed1 finetune: step 3: loss nan\n- moc-seed1 finetune: step 3" in page
    )
    assert "- mos-seed1 fine-static: finetune failed\n" in page
    assert stubs[1] == 2 * ["train", "static", "finetune"]


def test_a_run_that_failed_before_its_first_validation_is_not_trained_again(
    tmp_path, stubs, monkeypatch
):
    stubs[0]["train"] = {"failed": "out of memory"}
    monkeypatch.setattr(reproduce, "_best_step", lambda plan, unit: None)
    for _ in range(2):
        reproduce.run(Grid("lm1b", ["mos"], [1]), tmp_path, load)
    assert stubs[1] == ["train"]
    assert "- mos-seed1 static: train failed\n" in (tmp_path / "lm1b.md").read_text()


def test_a_process_that_dies_is_told_and_tried_again_the_next_time(tmp_path, stubs):
    grid = Grid("lm1b", ["mos", "moc"], [1])
    stubs[0]["train"] = -signal.SIGSEGV
    told = "mos-seed1 train ended with status -11, moc-seed1 train ended"
    with pytest.raises(metrics.UnfinishedError, match=told):
        reproduce.run(grid, tmp_path, load)
    page = (tmp_path / "lm1b.md").read_text()
    assert "- mos-seed1 train: ended with status -11\n- mos-seed1 static\n" in page
    del stubs[0]["train"]
    assert len(reproduce.run(grid, tmp_path, load)) == 4


def test_what_a_stage_refuses_ends_the_command(tmp_path, stubs):
    stubs[0]["static"] = {"refused": "the test text is another"}
    with pytest.raises(ValueError, match="mos-seed1 static: the test text is another"):
        reproduce.run(Grid("lm1b", ["mos"], [1]), tmp_path, load)


def test_a_run_that_is_gone_is_trained_again_where_it_is_needed(
    tmp_path, stubs, monkeypatch
):
    stubs[0]["static"] = 1
    grid = Grid("lm1b", ["mos"], [1])
    with pytest.raises(metrics.UnfinishedError, match="static ended with status 1"):
        reproduce.run(grid, tmp_path, load)
    monkeypatch.setattr(reproduce, "_best_step", lambda plan, unit: None)
    plan, rows = Plan(grid, tmp_path, load), reproduce.read(tmp_path)
    assert [unit.stage for unit in reproduce.left(plan, rows)] == ["train", "static"]
    # Not for ever, if it does not come back.
    reproduce.run(grid, tmp_path, load)
    assert stubs[1] == ["train", "static", "train"]


def test_what_a_run_that_is_gone_started_from_is_trained_again_as_well(
    tmp_path, stubs, monkeypatch
):
    stubs[0]["cache"] = 1
    grid = Grid("ptb", ["mos"], [1])
    with pytest.raises(metrics.UnfinishedError, match="fine-cache ended with status 1"):
        reproduce.run(grid, tmp_path, load)
    plan, rows = Plan(grid, tmp_path, load), reproduce.read(tmp_path)
    assert [unit.stage for unit in reproduce.left(plan, rows)] == ["fine-cache"]
    monkeypatch.setattr(reproduce, "_best_step", lambda plan, unit: None)
    assert [unit.stage for unit in reproduce.left(plan, rows)] == [
        *("train", "finetune", "fine-cache")
    ]


def test_two_commands_do_not_work_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_lib, "supervise", no_stage)
    with (
        lock.Lock(tmp_path),
        pytest.raises(lock.LockedError, match=str(tmp_path)),
    ):
        reproduce.run(GRID, tmp_path, load)


def test_tables_that_share_a_folder_share_what_they_train(tmp_path, stubs):
    reproduce.run(Grid("ptb", ["mos"], [1]), tmp_path, load)
    del stubs[1][:]
    rows = reproduce.run(Grid("ranks", ["mos"], [1]), tmp_path, load)
    assert stubs[1] == ["rank"] and len(rows) == 8


def test_a_share_of_a_recipe_switches_and_decays_at_that_share(tmp_path):
    def recipe(value):
        config = load(value)
        config.optim.averaging, config.optim.name = "none", "adamw"
        config.optim.warmup_steps, config.optim.decay_steps = 10, 50
        return config

    config = Plan(GRID, tmp_path, load).config(Unit("mos", 3, "train"))
    assert (config.train.epochs, config.optim.switch_epoch) == (3, 1)
    grid = Grid("lm1b", ["mos"], [1], 0.4)
    config = Plan(grid, tmp_path, recipe).config(Unit("mos", 1, "train"))
    assert (config.train.steps, config.train.epochs) == (round(0.4 * 9 * 17), None)
    assert (config.optim.warmup_steps, config.optim.decay_steps) == (4, 20)
    # Both are 3 when rounded.
    few = Grid("lm1b", ["mos"], [1], 0.06, {"optim.warmup_steps": 45})
    config = Plan(few, tmp_path, recipe).config(Unit("mos", 1, "train"))
    assert (config.optim.warmup_steps, config.optim.decay_steps) == (2, 3)


@pytest.mark.slow
def test_steps_are_timed_on_the_same_rows(tmp_path, monkeypatch):
    timed = TABLES["time"]
    table = timed._replace(stages=timed.stages[:1], words={"ptb": 13})
    monkeypatch.setitem(TABLES, "time", table)
    monkeypatch.setattr(stage_lib, "_TIMING", 0.01)

    def recipe(value):
        return tiny.change(load(value), data__rows=4 if ":mos" in value else 9)

    (row,) = reproduce.run(Grid("time", ["softmax"]), tmp_path, recipe).values()
    assert row["tokens"] == 4 * 5 and row["head_ms"] > 0 and row["step_ms"] > 0
    page = (tmp_path / "time.md").read_text()
    beside = f"{row['step_ms']:.2f} | 1 | 55 s per epoch [1] |"
    assert f"| softmax | ptb, ms per step | {beside}" in page
    assert f"| ptb | softmax | 2 | 20 | {row['step_ms']:.3f} | " in page
    assert "| 1.00 | 0.00 |\n" in page


def test_published_values_are_of_heads_and_lines_that_there_are():
    lines = {}
    for table in TABLES.values():
        lines.setdefault(table.published, set()).update(
            line.key for line in table.lines
        )
    for data, (rows, place) in published._SETS.items():
        for source, head, keys, *values in rows:
            assert head in HEADS and set(keys.split()) <= lines[data], (source, head)
            assert len(keys.split()) == len(values[place].split()), (source, head)
    found = published.find("wt2", "mos", "rank")
    assert found == [("15,734 ± 188", published.STUDY)]


@pytest.mark.parametrize("head", HEADS)
def test_every_head_can_be_made_of_the_recipe(head):
    for stage in TABLES["ptb"].stages:
        if stage.config is not None:
            _, _, argument = stage.config.partition(":")
            config = ptb.get_config(argument.format(head=HEADS[head].argument))
            changed = plan_lib.changed(config, HEADS[head].changes)
            models.make_head(changed)
    # Those of Parthiban et al.
    known = {"mos-280": 17_535_200, "softmax-340": 17_560_880, "mos-3": 19_406_620}
    if head in known:
        init = models.make(changed, 10_000).init
        shapes = jax.eval_shape(init, jax.random.key(0))
        assert models.count_parameters(shapes, 10_000) == known[head]


def test_configs_of_the_tables_are_those_that_come_with_softbottle():
    for name in TABLES:
        for stage in TABLES[name].stages:
            if stage.config is not None:
                loaded = config_files.load(stage.config.format(head="moc"))
                assert loaded.head.name == "moc" and loaded.data.name in stage.config
    assert config_files.load("lm1b:softmax") == lm1b.get_config("softmax")
