import json
import math
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from matplotlib.path import Path

from configs import lm1b
from softbottle import config as configs
from softbottle import model as models
from softbottle import sharding
from softbottle.data import corpus as corpora
from softbottle.data import frequency, lines
from softbottle.drawing import Figure
from softbottle.experiments import processes
from softbottle.experiments import rows as rows_lib
from softbottle.experiments.frontier import plot, report, trial
from softbottle.experiments.frontier import run as frontier
from softbottle.experiments.frontier.arms import ARMS, Arm, Key, Variants
from softbottle.training import evaluate, lock, loop, metrics, state
from tests import commands, tiny

pytestmark = pytest.mark.usefixtures("quick_keys", "shared_evaluators")

TEXT = {"train": "hash"}
PAIR = ("softmax", "mos-7-tanh")


def make_config(**fields):
    return tiny.make_config(**({"train__steps": None} | fields))


def in_this_process(values, folder, vocab, seconds):
    """What `supervise` does, without a process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        trial.train(values, folder, vocab)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def no_run(*arguments):
    raise AssertionError("a run was started")


def make_outcome(loss=4.0, **fields):
    """Made-up numbers of a finished run."""
    deciles = [{"words": 1, "tokens": 1, "loss": loss + 0.1 * d} for d in range(10)]
    outcome = {
        **{"seconds": 10.0, "step_ms": 1.0, "elapsed": 20.0, "peak_bytes": 2**30},
        **{"valid_loss": loss, "valid_perplexity": math.exp(loss)},
        **{"test_loss": loss, "test_perplexity": math.exp(loss)},
        **{"validations": [[8, loss + 1], [16, loss]], "deciles": deciles},
        **{"device": "cpu", "jax": "0"},
    }
    return outcome | fields


def make_row(arm, rate=0.002, seed=0, loss=4.0, **fields):
    """A row of made-up numbers."""
    row = {
        **{"arm": arm, "head": f"{arm}()", "learning_rate": rate, "seed": seed},
        **{"parameters": 1000, "steps": 16, "flop": 1e9, "fingerprint": "x"},
    }
    return row | make_outcome(loss, **fields)


@pytest.fixture
def undrawn(monkeypatch):
    """The pictures are empty, which takes no time."""
    for name in ("draw", "cover"):
        monkeypatch.setattr(plot, name, lambda rows: Figure(figsize=(1, 1)))


@pytest.fixture
def started(monkeypatch, undrawn):
    """The names of the runs that were started, none of which is trained."""
    names = []

    def supervise(values, folder, vocab, seconds):
        names.append(folder.name)
        folder.mkdir()
        (folder / "outcome.json").write_text(json.dumps(make_outcome()))
        return 0

    monkeypatch.setattr(trial, "supervise", supervise)
    return names


@pytest.fixture
def shared_shapes(monkeypatch):
    """Those of equal models are found once, and not by every arm and search again."""
    known, find = {}, Variants._shapes

    def remembered(variants, config):
        key = models.make(config, variants._vocab)
        if key not in known:
            known[key] = find(variants, config)
        return known[key]

    monkeypatch.setattr(Variants, "_shapes", remembered)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """(folder, rows) of a softmax and a mixture at one rate; the runs are kept."""
    workdir = tmp_path_factory.mktemp("frontier")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "supervise", in_this_process)
        patch.setattr(plot, "cover", lambda rows: Figure(figsize=(1, 1)))
        grid = frontier.Grid(PAIR, [0.01])
        return workdir, frontier.run(make_config(), workdir, grid, keep=True)


@pytest.mark.slow
def test_a_finished_run_is_a_row(compared):
    workdir, rows = compared
    assert frontier.read(workdir) == rows
    assert [(row["arm"], row["learning_rate"], row["seed"]) for row in rows] == [
        *(("softmax", 0.01, 0), ("mos-7-tanh", 0.01, 0))
    ]
    for row, head in zip(rows, ("softmax()", "mos(components=7"), strict=True):
        folder = workdir / f"{row['arm']}-0.01-0"
        summary = json.loads((folder / "summary.json").read_text())
        assert row["head"].startswith(head)
        for name in ("parameters", "steps", "test_perplexity", "valid_perplexity"):
            assert row[name] == pytest.approx(summary[name], rel=1e-6)
        assert row["steps"] == 17  # 331 ids in 4 rows of 5
        assert row["seconds"] == pytest.approx(17 * row["step_ms"] / 1e3, abs=1e-3)
        assert row["validations"][-1] == [17, row["valid_loss"]]
        assert row["elapsed"] > 0 and row["peak_bytes"] is None
        trained = [line["loss"] for line in metrics.read(folder) if "loss" in line]
        assert row["train_loss"] == pytest.approx(np.mean(trained[-2:]))
    config = json.loads((workdir / "softmax-0.01-0" / "config.json").read_text())
    optim = config["optim"]
    assert (optim["warmup_steps"], optim["decay_steps"]) == (0, 16)


def test_a_frontier_has_a_table_and_a_picture(compared):
    workdir, _ = compared
    text = (workdir / "frontier.md").read_text()
    assert text.startswith("# The frontier\n") and "| mos-7-tanh | `mos(" in text
    assert (workdir / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_rows_alone_are_enough_to_resume(compared, tmp_path, monkeypatch, undrawn):
    workdir, rows = compared
    shutil.copy(workdir / "frontier.jsonl", tmp_path)
    monkeypatch.setattr(trial, "supervise", no_run)
    grid = frontier.Grid(PAIR, [0.01])
    assert frontier.run(make_config(), tmp_path, grid) == rows
    assert (tmp_path / "frontier.md").exists()


def test_no_minutes_start_nothing_and_name_what_is_missing(
    compared, tmp_path, monkeypatch, undrawn, capsys
):
    shutil.copy(compared[0] / "frontier.jsonl", tmp_path)
    monkeypatch.setattr(trial, "supervise", no_run)
    grid = frontier.Grid((*PAIR, "softcap"), [0.01, 0.02])
    frontier.run(make_config(), tmp_path, grid, minutes=0)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "missing: rate 0.01, seed 0: softcap",
        "missing: rate 0.02, seed 0: softmax, mos-7-tanh, softcap",
    ]
    heading = (tmp_path / "frontier.md").read_text().splitlines()[0]
    assert heading == "# The frontier: partial, without softcap"


def test_rows_of_other_settings_are_refused(compared, tmp_path, monkeypatch, undrawn):
    shutil.copy(compared[0] / "frontier.jsonl", tmp_path)
    monkeypatch.setattr(trial, "supervise", no_run)
    grid = frontier.Grid(PAIR, [0.01])
    for fields in ({"data__rows": 5}, {"data__synthetic__seed": 3}):
        with pytest.raises(ValueError, match="softmax-0.01-0 of other settings"):
            frontier.run(make_config(**fields), tmp_path, grid)
    # Where the text lies and how often a run reports are no other run.
    same = make_config(train__log_every=3, data__cache="elsewhere")
    frontier.run(same, tmp_path, grid)


def test_rows_that_are_not_asked_for_are_of_the_same_settings_as_well(
    compared, tmp_path, started
):
    shutil.copy(compared[0] / "frontier.jsonl", tmp_path)
    grid = frontier.Grid(["softcap"], [0.02])
    with pytest.raises(ValueError, match="softmax-0.01-0 of other settings"):
        frontier.run(make_config(data__synthetic__seed=3), tmp_path, grid)
    assert not started


def test_a_run_in_both_of_two_joined_files_is_one_seed(tmp_path):
    rows = [make_row("softmax", seed=seed) for seed in (0, 1, 0)]
    rows.append(make_row("softmax", fingerprint="of another text"))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "frontier.jsonl").write_text(text)
    found = [(row["seed"], row["fingerprint"]) for row in frontier.read(tmp_path)]
    assert found == [(0, "x"), (1, "x"), (0, "of another text")]


def test_one_process_is_at_work_in_a_workdir(tmp_path, started):
    grid = frontier.Grid(["softmax"], [0.01])
    with lock.Lock(tmp_path), pytest.raises(lock.LockedError, match="in use"):
        frontier.run(make_config(), tmp_path, grid)
    frontier.run(make_config(), tmp_path, grid)
    assert started == ["softmax-0.01-0"]


def test_a_refused_run_ends_the_program_with_the_reason(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise ValueError("was started with other settings")

    monkeypatch.setattr(trial, "supervise", in_this_process)
    monkeypatch.setattr(trial, "_outcome", refuse)
    grid = frontier.Grid(["softmax", "softcap"], [0.01])
    with pytest.raises(ValueError, match="softmax-0.01-0: was started with other"):
        frontier.run(make_config(), tmp_path, grid)
    assert not frontier.read(tmp_path)


def test_deciles_add_up_to_the_loss_of_the_text(compared):
    workdir, rows = compared
    for row in rows:
        run = state.load_run(workdir / f"{row['arm']}-0.01-0")
        text, data = corpora.load(run.config.data), run.config.data
        whole = evaluate.make_evaluator(run.model)(
            run.params, text.test, data.test_rows, data.eval_length
        )
        deciles = row["deciles"]
        assert sum(decile["tokens"] for decile in deciles) == whole.count == 100
        total = sum(d["tokens"] * (d["loss"] or 0.0) for d in deciles)
        assert total / whole.count == pytest.approx(whole.loss, rel=1e-6)
        assert row["test_loss"] == pytest.approx(whole.loss, rel=1e-6)


def test_deciles_of_lines_of_their_own_add_up_too():
    config = make_config(data__unit="packed", train__steps=1)
    text = corpora.load(config.data)
    run, cut = tiny.make_run(config, text.vocab), lines.cut(config.data, text.vocab)
    decile_V = frequency.deciles(text.train, len(text.vocab))
    rows = trial.loss_by_decile(run, text.test, 3, decile_V)
    whole = evaluate.make_evaluator(run.model, cut=cut)(run.params, text.test, 3, 17)
    assert sum(row["tokens"] for row in rows) == whole.count
    total = sum(row["tokens"] * (row["loss"] or 0.0) for row in rows)
    assert total == pytest.approx(whole.total, rel=1e-6)


def test_every_decile_has_a_tenth_of_the_tokens():
    # Of 1,000 tokens word 3 has 100, words 0 to 2 have 50 each, 150 words have 5.
    counts = [50, 50, 50, 100, *150 * [5], 0]
    ids = [word for word, count in enumerate(counts) for _ in range(count)]
    decile_V = frequency.deciles(np.array(ids), len(counts))
    assert decile_V[3] == 0 and list(decile_V[:3]) == [1, 1, 2]
    assert decile_V[-1] == 9
    for decile in (0, *range(3, 10)):
        mine = sum(c for c, d in zip(counts, decile_V, strict=True) if d == decile)
        assert mine == 100


@pytest.mark.slow
def test_a_run_that_loses_its_loss_is_a_row_and_the_next_one_follows(
    tmp_path, monkeypatch, started
):
    without_training = trial.supervise

    def supervise(values, folder, *rest):
        diverges = values["optim"]["learning_rate"] > 1
        return (in_this_process if diverges else without_training)(
            values, folder, *rest
        )

    monkeypatch.setattr(trial, "supervise", supervise)
    grid = frontier.Grid(["softmax"], [1e30, 0.01])
    failed, row = frontier.run(make_config(), tmp_path, grid)
    assert failed["failed"].startswith("step ") and "valid_loss" not in failed
    assert started == ["softmax-0.01-0"] and row["valid_loss"] == 4.0
    text = (tmp_path / "frontier.md").read_text()
    assert "- softmax, rate 1e+30, seed 0: step " in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("frontier-cover.png", "frontier.jsonl", "frontier.md", "frontier.png"),
        "lock",
    ]


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: 3 bytes", "other"])
def test_only_a_lack_of_memory_is_an_outcome(tmp_path, monkeypatch, error):
    def run(*arguments, **keywords):
        raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(loop, "run", run)
    config = Variants(make_config(), 11, 17, TEXT).make("softmax", 0.01, 0).config
    task = (configs.to_dict(config), tmp_path, 11, None)
    if error == "other":
        with pytest.raises(jax.errors.JaxRuntimeError):
            in_this_process(*task)
        assert trial.outcome(tmp_path) is None
    else:
        in_this_process(*task)
        assert "out of memory" in trial.outcome(tmp_path)["failed"]


def test_a_model_beyond_the_memory_is_an_outcome(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "device_memory", lambda mesh: 100)
    config = Variants(make_config(), 11, 17, TEXT).make("softmax", 0.01, 0).config
    in_this_process(configs.to_dict(config), tmp_path, 11, None)
    assert "does not fit" in trial.outcome(tmp_path)["failed"]


def test_a_quotient_of_rates_is_the_setting_of_its_name(tmp_path, started):
    config = make_config(optim__learning_rate=3e-3, optim__table_learning_rate=9e-3)
    grid = frontier.Grid(["softmax"], [0.01])
    (row,) = frontier.run(config, tmp_path, grid)
    assert frontier.run(config, tmp_path, grid._replace(table_rates=[3.0])) == [row]
    assert started == ["softmax-0.01-0-table-3"] and row["table_rate"] == 3


def test_rows_are_of_one_start_and_of_so_many_devices(tmp_path, started):
    config, grid = make_config(), frontier.Grid(["softmax"], [0.01])
    frontier.run(config, tmp_path, grid)
    config.mesh.data = 4
    with pytest.raises(ValueError, match="of other settings"):
        frontier.run(config, tmp_path, grid)
    config.train.init_from = "runs/other"
    with pytest.raises(ValueError, match="train.init_from is 'runs/other'"):
        frontier.run(config, tmp_path / "new", grid)
    assert started == ["softmax-0.01-0"] and not (tmp_path / "new").exists()


def test_a_process_that_dies_has_no_row_and_the_next_one_follows(
    tmp_path, monkeypatch, started, capsys
):
    without_training = trial.supervise

    def supervise(values, folder, *rest):
        if folder.name == "softmax-0.01-0":
            return -signal.SIGSEGV
        return without_training(values, folder, *rest)

    monkeypatch.setattr(trial, "supervise", supervise)
    told = "softmax-0.01-0 ended with status -11; the next start tries again"
    with pytest.raises(metrics.UnfinishedError, match=told):
        frontier.run(make_config(), tmp_path, frontier.Grid(PAIR, [0.01]))
    assert [row["arm"] for row in frontier.read(tmp_path)] == ["mos-7-tanh"]
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "missing: rate 0.01, seed 0: softmax (ended with status -11)"


@pytest.mark.parametrize("status", [0, -signal.SIGTERM])
def test_a_run_asked_to_stop_ends_the_program(tmp_path, monkeypatch, capsys, status):
    monkeypatch.setattr(trial, "supervise", lambda *task: status)
    assert frontier.run(make_config(), tmp_path, frontier.Grid(PAIR, [0.01])) == []
    assert "missing: rate 0.01, seed 0: softmax, mos-7-tanh" in capsys.readouterr().out


def test_only_runs_that_should_end_in_time_are_started(tmp_path, started):
    config, grid = make_config(), frontier.Grid((*PAIR, "softcap"), [0.01, 0.02])
    text = corpora.load(config.data)
    digest = corpora.digest(text)
    variant = Variants(config, len(text.vocab), 17, digest).make("softmax", 0.01, 0)
    # The mixture has several times the flop, so it is taken to need several times 40 s.
    row = frontier._row(Key("softmax", 0.01, 0), variant, make_outcome(), 40.0)
    (tmp_path / "frontier.jsonl").write_text(json.dumps(row) + "\n")
    frontier.run(config, tmp_path, grid, minutes=1)
    assert started == ["softcap-0.01-0", "softmax-0.02-0", "softcap-0.02-0"]


def test_rounds_begin_with_the_first_question_and_end_with_more_seeds():
    arms = ("sigsoftmax", "softmax", "moc-7-tanh", "mos-7-tanh", "mos-2-tanh")
    grid = frontier.Grid(arms, [0.002, 0.004], [0, 5])
    rows = [make_row("softmax", 0.002, loss=4.1), make_row("softmax", 0.004, loss=4.0)]
    keys = frontier.plan(grid, rows)
    first = ["softmax", "moc-7-tanh", "mos-7-tanh"]
    rest = ["sigsoftmax", "mos-2-tanh"]
    assert [(key.arm, key.rate) for key in keys if key.seed == 0] == [
        *((arm, 0.002) for arm in first + rest),
        *((arm, 0.004) for arm in first + rest),
    ]
    assert keys[10:] == [
        Key("softmax", 0.004, 5),
        Key("moc-7-tanh", 0.002, 5),
        Key("mos-7-tanh", 0.002, 5),
    ]
    assert frontier.missing(grid, rows) == [
        key for key in keys if key.arm != "softmax" or key.seed == 5
    ]


def test_gains_are_tried_like_rates():
    grid = frontier.Grid(PAIR, [0.002, 0.004], [0, 5], [1.0, 4.0])
    rows = [
        make_row("softmax", 0.004, loss=4.0, gain=4.0),
        make_row("softmax", 0.004, loss=4.1),  # of before there was a gain
        make_row("mos-7-tanh", 0.004, loss=4.2, gain=4.0),
    ]
    keys = frontier.plan(grid, rows)
    assert keys[:8] == [
        Key(arm, rate, 0, gain)
        for rate in (0.002, 0.004)
        for gain in (1, 4)
        for arm in PAIR
    ]
    assert keys[8:] == [Key("softmax", 0.004, 5, 4), Key("mos-7-tanh", 0.004, 5, 4)]
    assert [*map(str, keys[4:7])] == [
        *("softmax-0.004-0", "mos-7-tanh-0.004-0", "softmax-0.004-0-gain-4")
    ]
    assert len(frontier.missing(grid, rows)) == len(keys) - 3
    softmax, _ = report.points(rows)
    assert softmax.setting == (0.004, 4, 1) and len(softmax.runs) == 1
    # Without gains those of the rows are asked for, as where a frontier is drawn.
    assert frontier.plan(grid._replace(gains=None), rows) == keys


def test_gains_have_a_table_and_a_picture_of_their_own(tmp_path):
    tried = {1.0: (4.2, 4.4), 4.0: (4.0,), 0.5: (4.5,)}
    rows = [
        make_row("softmax", 0.004, seed, loss, gain=gain)
        for gain, losses in tried.items()
        for seed, loss in enumerate(losses)
    ]
    rows += [
        make_row("softmax", 0.002, loss=4.3, gain=2.0),  # of another rate
        make_row("softmax", 0.004, gain=8.0) | {"failed": "step 3"},
        make_row("moc-7-tanh", 0.004, loss=4.1),
    ]
    (perplexity,) = report.by_setting(rows, "gain").values()
    assert list(perplexity) == [0.5, 1, 4]
    assert perplexity[1] == math.exp(4.2)  # on the seed that all values have
    report.write_table(tmp_path, rows, {})
    text = (tmp_path / "frontier.md").read_text()
    assert "| arm | 0.5 | 1 | 4 |" in text
    assert "| softmax | 90.02 | 66.69 | 54.60 |" in text
    (axes,) = plot.by_setting(rows, "gain").axes
    (line,) = (line for line in axes.lines if line.get_label() == "softmax")
    assert list(line.get_ydata()) == list(perplexity.values())
    rows += [make_row("moc-7-tanh", 0.004, loss=4.2, gain=2.0)]
    (axes,) = plot.by_setting(rows, "gain").axes
    gaps = {line.get_label(): list(np.isnan(line.get_ydata())) for line in axes.lines}
    assert gaps["softmax"] == [False, False, True, False]
    assert gaps["moc-7-tanh"] == [True, False, False, True]
    assert plot.by_setting(rows[-2:-1], "gain") is None
    assert plot.by_setting(rows, "table_rate") is None


def test_a_gain_is_the_config_s_unless_it_is_asked_for(tmp_path, started):
    config, grid = make_config(), frontier.Grid(["softmax"], [0.01])
    config.model.gain = 2.0
    (row,) = frontier.run(config, tmp_path, grid)
    assert started == ["softmax-0.01-0-gain-2"] and row["gain"] == 2
    both = frontier.run(config, tmp_path, grid._replace(gains=[1.0, 2.0]))
    assert started[1:] == ["softmax-0.01-0"] and len(both) == 2
    prints = {other["fingerprint"] for other in both}
    assert len(prints) == 2 and row["fingerprint"] in prints


def test_a_gain_is_what_the_run_has():
    variants = Variants(make_config(), 11, 17, TEXT)
    assert variants.make("softmax", 0.01, 0, 4.0).config.model.gain == 4
    assert variants.make("softmax", 0.01, 0).config.model.gain == 1


def test_rates_of_the_tables_are_tried_like_gains():
    grid = frontier.Grid(["softmax"], [0.004], [0, 5], [1.0, 8.0], [1.0, 2.0])
    rows = [
        make_row("softmax", 0.004, loss=4.2),  # of before there was such a rate
        make_row("softmax", 0.004, loss=4.1, table_rate=2.0),
        make_row("softmax", 0.004, loss=4.0, gain=8.0, table_rate=2.0),
    ]
    keys = frontier.plan(grid, rows)
    assert [*map(str, keys)] == [
        *("softmax-0.004-0", "softmax-0.004-0-table-2", "softmax-0.004-0-gain-8"),
        *("softmax-0.004-0-gain-8-table-2", "softmax-0.004-5-gain-8-table-2"),
    ]
    assert [*map(str, frontier.missing(grid, rows))] == [str(keys[2]), str(keys[4])]
    # Without both, what the rows have tried, and not every gain with every rate.
    names = [
        *map(str, frontier.plan(grid._replace(gains=None, table_rates=None), rows))
    ]
    assert names == [str(keys[place]) for place in (0, 1, 3, 4)]
    found = report.by_setting(rows, "table_rate")
    assert found == {"softmax": {1: math.exp(4.2), 2: math.exp(4.1)}}


def test_a_rate_of_the_tables_is_the_config_s_unless_it_is_asked_for(tmp_path, started):
    config, grid = make_config(), frontier.Grid(["softmax"], [0.01])
    config.optim.learning_rate, config.optim.table_learning_rate = 0.002, 0.008
    (row,) = frontier.run(config, tmp_path, grid)
    assert started == ["softmax-0.01-0-table-4"] and row["table_rate"] == 4
    both = frontier.run(config, tmp_path, grid._replace(table_rates=[1.0, 4.0]))
    assert started[1:] == ["softmax-0.01-0"] and len(both) == 2


def test_a_rate_of_the_tables_is_a_multiple_of_the_others():
    variants = Variants(make_config(), 11, 17, TEXT)
    one, four = (variants.make("softmax", 0.01, 0, 1.0, over) for over in (1.0, 4.0))
    assert one.config.optim.table_learning_rate is None
    assert four.config.optim.table_learning_rate == 0.04
    assert one.fingerprint == variants.make("softmax", 0.01, 0).fingerprint
    assert one.fingerprint != four.fingerprint


def test_the_best_setting_is_that_of_the_validation_not_of_the_test():
    rows = [
        make_row("softmax", 0.002, loss=4.0, test_loss=4.2, test_perplexity=66.0),
        make_row("softmax", 0.004, loss=4.1, test_loss=3.9, test_perplexity=49.0),
        make_row("softmax", 0.008, loss=1.0) | {"failed": "step 3"},
    ]
    assert report.best_setting(rows, "softmax") == (0.002, 1, 1)
    (point,) = report.points(rows)
    assert (point.setting.rate, point.perplexity) == (0.002, 66.0)
    assert report.best_setting(rows, "mos-7-tanh") is None


def test_rates_are_compared_on_the_seeds_that_both_have():
    rows = [make_row("softmax", 0.002, 0, 4.0), make_row("softmax", 0.004, 0, 4.01)]
    rows += [make_row("softmax", 0.002, seed, 4.5) for seed in (1, 2)]
    assert report.best_setting(rows, "softmax") == (0.002, 1, 1)
    (point,) = report.points(rows)
    assert point.mean("valid_loss") == pytest.approx((4.0 + 4.5 + 4.5) / 3)


def test_a_setting_without_the_common_seed_leaves_the_others_order_as_it_is():
    rows = [make_row("softmax", 0.004, seed, 4.1 + 0.15 * seed) for seed in range(3)]
    rows.append(make_row("softmax", 0.002, 0, 4.15))
    assert report.best_setting(rows, "softmax") == (0.004, 1, 1)
    rows.append(make_row("softmax", 0.016, 1, 5.0))
    assert report.best_setting(rows, "softmax") == (0.004, 1, 1)


def test_the_gain_is_a_share_of_that_of_the_mixture():
    rows = [
        make_row("softmax", loss=4.0),
        make_row("mos-7-tanh", loss=3.8, seconds=40.0, peak_bytes=None),
        make_row("moc-7-tanh", loss=3.85, seconds=11.0, train_loss=math.log(50)),
    ]
    text = report.table(report.points(rows)).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text[2:]]
    assert [(row[0], row[8], row[10], *row[12:]) for row in cells] == [
        ("mos-7-tanh", "", "4.00", "", "100%"),
        ("moc-7-tanh", "50.00", "1.10", "1.00", "75%"),
        ("softmax", "", "1.00", "1.00", "0%"),
    ]
    worse = [rows[0], make_row("mos-7-tanh", loss=4.1)]
    assert "%" not in report.table(report.points(worse))
    advice = report.recommendations(report.points(rows))
    best = [line.split("|")[2].strip() for line in advice.splitlines()[2:]]
    assert best == ["softmax", *3 * ["moc-7-tanh"], "mos-7-tanh"]


def test_runs_beside_others_have_no_time_of_their_own(tmp_path, started):
    grid = frontier.Grid(["softmax"], [0.01])
    (row,) = frontier.run(make_config(), tmp_path, grid, untimed=True)
    assert row["seconds"] is None and row["step_ms"] is None
    assert row["elapsed"] > 0 and row["valid_loss"] == 4.0
    text = (tmp_path / "frontier.md").read_text()
    assert "nan" not in text and "Which head" not in text


def test_an_untimed_run_takes_as_long_as_the_arms_others():
    rows = [
        *(make_row("softmax", seed=0), make_row("softmax", seed=1, seconds=None)),
        make_row("moc-7-tanh", 0.002, loss=3.9, seconds=12.0),
        make_row("moc-7-tanh", 0.004, loss=3.8, seconds=None),
        make_row("mos-7-tanh", loss=3.7, seconds=None),
    ]
    points = report.points(rows)
    assert [point.mean("seconds") for point in points[:2]] == [10.0, 12.0]
    cells = [line.split("|") for line in report.table(points).splitlines()[2:]]
    assert [(row[1].strip(), row[10].strip(), row[11].strip()) for row in cells] == [
        *(("mos-7-tanh", "", ""), ("moc-7-tanh", "12", "1.20")),
        ("softmax", "10", "1.00"),
    ]
    *timed, whatever = [
        [cell.strip() for cell in line.split("|")[2:5]]
        for line in report.recommendations(points).splitlines()[2:]
    ]
    assert {arm for arm, *_ in timed} == {"softmax", "moc-7-tanh"}
    assert whatever == ["mos-7-tanh", "", f"{math.exp(3.7):.2f}"]


@pytest.mark.slow
def test_points_without_memory_and_many_points_are_drawn():
    arms = [*ARMS][:27:3]  # one more than are named
    many = [make_row(arm, loss=4 + 0.01 * n) for n, arm in enumerate(arms)]
    unknown = make_row("moc-7-tanh", peak_bytes=None, seconds=None)
    figures = [plot.draw([unknown]), plot.draw(many)]
    for figure in figures:
        figure.draw_without_rendering()
    shown = [[text.get_text() for text in figure.axes[0].texts] for figure in figures]
    numbers = {text.partition(" ")[0] for text in shown[1]}
    assert shown[0] == ["not measured"]
    assert numbers == {str(place + 1) for place in range(len(many))}


@pytest.mark.slow
def test_of_many_points_the_cover_names_those_on_the_line_and_every_head():
    arms = [*ARMS][:9]
    many = [make_row(arm, loss=4.0, seconds=10.0) for arm in arms]
    many[3] |= make_row(arms[3], loss=3.9, seconds=5.0)
    figure = plot.cover(many)
    for axes in figure.axes:
        assert [text.get_text() for text in axes.texts if text.get_text()] == [arms[3]]
    (legend,) = figure.legends
    heads = [text.get_text() for text in legend.get_texts()]
    assert sorted(heads) == sorted(
        {
            "softmax" if arm.startswith("softmax") else ARMS[arm].head["name"]
            for arm in arms
        }
    )


def test_arms_without_a_time_are_not_on_the_cover_of_those_with_one():
    timed = [make_row("softmax"), make_row("mos-7-tanh", loss=3.9)]
    figure = plot.cover([*timed, make_row("moc-7-tanh", loss=3.8, seconds=None)])
    for axes in figure.axes:
        assert {text.get_text() for text in axes.texts} == {"softmax", "mos-7-tanh"}


@pytest.mark.slow
def test_what_there_is_is_drawn_without_asking_for_more(tmp_path, capsys, undrawn):
    rows_lib.write(
        tmp_path / "frontier.jsonl", [make_row("softmax"), make_row("moc-7-tanh")]
    )
    frontier.report(tmp_path, None)
    assert "missing" not in capsys.readouterr().out
    text = (tmp_path / "frontier.md").read_text()
    assert text.startswith("# The frontier\n") and "Missing" not in text


def test_missing_runs_are_told_by_setting():
    keys = [Key("softmax", 0.01, 0), Key("softcap", 0.01, 0), Key("softcap", 0.01, 1)]
    keys.append(Key("softmax", 0.01, 0, gain=8.0, table_rate=0.5))
    reasons = dict.fromkeys(keys, "") | {keys[1]: "ended with status 1"}
    assert report.gaps(reasons) == [
        "rate 0.01, seed 0: softmax, softcap (ended with status 1)",
        "rate 0.01, seed 1: softcap",
        "rate 0.01, gain 8, tables at 0.5 times, seed 0: softmax",
    ]


def test_no_name_lies_on_the_line_of_the_frontier():
    figure = Figure(figsize=(5, 4))
    axes = figure.subplots()
    steps = [(1.0, 4.0), (2.0, 3.0), (9.0, 2.8), (9.5, 2.5)]
    corners = [(1, 4), (2, 4), (2, 3), (9, 3), (9, 2.8), (9.5, 2.8), (9.5, 2.5)]
    axes.plot(*zip(*corners, strict=True))
    figure.draw_without_rendering()
    points = [(place, "a name", "black") for place in steps]
    plot.name_points(axes, points, steps)
    line = axes.transData.transform_path(Path(corners))
    for text in axes.texts:
        assert not line.intersects_bbox(text.get_window_extent(), filled=False)


@pytest.mark.slow
def test_a_line_spans_the_seeds_of_a_point():
    rows = [make_row("softmax", seed=seed, loss=4 + 0.1 * seed) for seed in range(3)]
    axes = plot.cover(rows).axes[0]
    (segment,) = axes.collections[0].get_segments()
    seeds = [row["test_perplexity"] for row in rows]
    assert list(segment[:, 1]) == [min(seeds), max(seeds)]


@pytest.mark.slow
def test_a_point_far_above_the_softmax_is_at_the_edge_with_its_value():
    rows = [make_row("softmax", loss=4), make_row("softmax-half", loss=4.5)]
    axes = plot.cover(rows).axes[0]
    highest = rows[0]["test_perplexity"] * 1.05
    places = {line.get_marker(): line.get_ydata() for line in axes.get_lines()}
    assert list(places["o"]) == [rows[0]["test_perplexity"]]
    assert list(places["^"]) == [pytest.approx(highest)]
    names = [text.get_text() for text in axes.texts]
    assert f"softmax-half ({rows[1]['test_perplexity']:.1f})" in names
    # The line joins points where they are.
    (line,) = (line for line in axes.get_lines() if line.get_marker() == "None")
    assert max(line.get_ydata()) == rows[0]["test_perplexity"]


def test_an_unknown_arm_is_answered_with_the_arms_there_are(tmp_path):
    with pytest.raises(ValueError, match="no arm is called 'mos-7'; there are softmax"):
        frontier.run(make_config(), tmp_path / "new", frontier.Grid(["mos-7"]))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("head", [{"name": "no"}, {"name": "softmax", "facets": 4}])
def test_an_arm_that_cannot_be_made_is_named_before_any_is_trained(
    tmp_path, monkeypatch, head
):
    monkeypatch.setitem(ARMS, "partition-4", Arm(head))
    monkeypatch.setattr(trial, "supervise", no_run)
    grid = frontier.Grid(["softmax", "partition-4"])
    with pytest.raises(ValueError, match="the arm partition-4 cannot be made: .*'"):
        frontier.run(make_config(), tmp_path / "new", grid)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("vocab, frequent", [(100_000, 10_000), (61, 6), (5, 1)])
def test_frequent_words_are_a_share_of_the_vocabulary(vocab, frequent):
    variant = Variants(make_config(), vocab, 10, TEXT).make("mixtape-4", 0.002, 0)
    assert variant.head == f"mixtape(components=4, frequent={frequent})"


def test_the_optimizer_must_have_a_decay(tmp_path):
    config = make_config(optim__name="sgd")
    with pytest.raises(ValueError, match="optim.name='sgd' does not do"):
        frontier.run(config, tmp_path, frontier.Grid(PAIR))


@pytest.mark.slow
@pytest.mark.usefixtures("shared_shapes")
def test_on_one_billion_words_the_arms_are_those_of_the_documented_runs():
    config = lm1b.get_config("mos")
    config.data.rows = 256
    variants = Variants(config, 100_000, 5428, TEXT)
    softmax, mixture = (variants.make(arm, 0.004, 0) for arm in PAIR)
    assert (softmax.parameters, mixture.parameters) == (119_293_600, 112_850_364)
    optim, train = mixture.config.optim, mixture.config.train
    assert (optim.warmup_steps, optim.decay_steps) == (271, 5427)
    assert (train.steps, train.eval_every, train.checkpoint_every) == (5428, 679, 5428)
    model = softmax.config.model
    assert (model.embed_dim, model.hidden_dim, model.last_dim) == (1024, 1024, 1024)
    half = variants.make("softmax-half", 0.004, 0).config.model
    assert (half.embed_dim, half.hidden_dim, half.last_dim) == (512, 1024, 512)
    trunk = variants.make("softmax-time-trunk", 0.004, 0).config.model
    assert (trunk.embed_dim, trunk.hidden_dim, trunk.last_dim) == (1024, 6400, 1024)


def step_time(variant):
    """In flop, those of an LSTM 2.6 times: how much longer they take than a GEMM's."""
    config = variant.config
    flop = variant.flop / variant.steps
    if config.model.backbone != "awd_lstm":
        return flop
    model, widths = config.model, (config.model.hidden_dim, config.model.last_dim)
    inputs = (model.embed_dim, model.hidden_dim)
    pairs = zip(inputs, widths, strict=True)
    trunk = sum(4 * width * (read + width + 2) for read, width in pairs)
    return flop + 1.6 * 6 * config.data.rows * config.data.length * trunk


@pytest.mark.slow
@pytest.mark.usefixtures("shared_shapes")
@pytest.mark.parametrize("backbone", ["awd_lstm", "transformer", "window"])
def test_rivals_have_the_mixtures_parameters_and_its_cost(backbone):
    # An LSTM of one layer has no inner width.
    layers = 2 if backbone == "awd_lstm" else 1
    config = make_config(model__backbone=backbone, model__layers=layers)
    config.model.attention_heads = 1
    sizes = {"embed_dim": 24, "hidden_dim": 24, "last_dim": 24, "context_dim": 20}
    for name, size in sizes.items():
        setattr(config.model, name, size)
    variants = Variants(config, 5003, 10, TEXT)
    mixture = variants.make(PAIR[1], 0.01, 0)
    rivals = [("softmax", "softmax-time"), ("softmax-projected",) * 2]
    # What is matched is the trunk, and a head's part in it is that of any backbone.
    for arm, rival in rivals if backbone == "awd_lstm" else rivals[:1]:
        plain = variants.make(arm, 0.01, 0)
        trunk = variants.make(f"{rival}-trunk", 0.01, 0)
        assert step_time(trunk) == pytest.approx(step_time(mixture), rel=0.03)
        assert trunk.config.model.hidden_dim > plain.config.model.hidden_dim
        passes = variants.make(f"{rival}-passes", 0.01, 0)
        assert passes.steps == 10 * round(mixture.flop / plain.flop) > 10
        assert passes.config.optim.decay_steps == passes.steps - 1
        assert trunk.head == passes.head == plain.head
    if backbone == "window":  # parameters are those of any backbone
        equal = variants.make("softmax-parameters", 0.01, 0)
        assert 0.9 * mixture.parameters < equal.parameters <= mixture.parameters


def test_a_backbone_without_an_inner_width_has_no_larger_trunk():
    config = make_config(model__backbone="awd_lstm", model__layers=1)
    with pytest.raises(ValueError, match="softmax-time-trunk cannot be made: .*hidden"):
        Variants(config, 53, 10, TEXT).make("softmax-time-trunk", 0.01, 0)


@pytest.mark.slow
def test_the_command_asked_to_stop_saves_its_run_and_says_what_is_missing(tmp_path):
    flags = ("--config", "configs/quickstart.py", "--workdir", tmp_path)
    flags += ("--arms", "softmax", "--learning_rates", "0.01")
    flags += ("--config.train.log_every=5", "--config.data.synthetic.eval_tokens=5000")
    flags += ("--config.data.synthetic.train_tokens=500_000",)  # 976 steps
    program = commands.start_fresh("frontier.py", *flags)
    metrics = tmp_path / "softmax-0.01-0" / "metrics.jsonl"
    while program.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") > 1:
            break
        time.sleep(0.02)
    program.terminate()
    answer = commands.finish_fresh(program)
    assert answer.code == 0, answer.errors
    assert "missing: rate 0.01, seed 0: softmax" in answer.output
    assert "asked to stop: saved at step" in answer.errors
    assert list((metrics.parent / "checkpoints").iterdir())


def test_a_run_that_is_refused_does_not_have_the_outcome_of_an_earlier_one(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(processes, "supervise", lambda *arguments: 1)
    (tmp_path / "outcome.json").write_text(json.dumps(make_outcome()))
    assert trial.supervise({}, tmp_path, 11, None) == 1
    assert trial.outcome(tmp_path) is None


@pytest.mark.slow
def test_a_run_in_a_process_of_its_own_has_an_outcome(tmp_path):
    config = Variants(make_config(), 11, 17, TEXT).make("softmax", 0.01, 0).config
    assert trial.supervise(configs.to_dict(config), tmp_path, 11, None) == 0
    assert trial.outcome(tmp_path)["validations"][-1][0] == 17
