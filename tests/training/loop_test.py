import json
import os
import pathlib
import shutil
import signal
import threading
import time
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle import config as configs
from softbottle import model, sharding
from softbottle.data import corpus, synthetic
from softbottle.data.batches import Stream
from softbottle.data.vocab import Corpus
from softbottle.training import (
    checkpoint,
    evaluate,
    lock,
    metrics,
    optim,
    programs,
    state,
)
from softbottle.training import loop as train
from softbottle.training import step as step_lib
from tests import commands
from tests.tiny import make_config, make_words

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


pytestmark = pytest.mark.usefixtures("quick_keys")
make_step = step_lib.make_step  # makes one that no other test has traced


@pytest.fixture(autouse=True, scope="module")
def shared_programs():
    """Runs whose programs are the same trace and compile them once."""
    made = {}

    def shared(make, unread):
        """`make`, once for models that differ in settings alone that it does not read.

        Of the text, a program knows no more than the shape of a batch.
        """

        def once(*arguments, **options):
            (known,) = (each for each in arguments if isinstance(each, model.Model))
            settings = configs.to_dict(known.config) | dict.fromkeys(unread)
            shape = [settings["data"][name] for name in ("rows", "length", "variable")]
            more = [known.vocab, shape, repr(arguments[3:]), repr(options)]
            more.append(jax.config.jax_default_prng_impl)
            key = make.__name__ + json.dumps([settings | {"data": more}])
            if key not in made:
                made[key] = make(*arguments, **options)
            return made[key]

        return once

    with pytest.MonkeyPatch.context() as patch:
        for module, name, unread in (
            (step_lib, "make_step", ["train"]),
            (step_lib, "_builder", ["train"]),
            (evaluate, "make_evaluator", ["train", "optim"]),
        ):
            patch.setattr(module, name, shared(getattr(module, name), unread))
        yield


def tiny(**fields):
    """A run of seconds; fields are named like train__steps=7."""
    base = {"regularise__latent": 0.2, "optim__learning_rate": 1e-2}
    return make_config(**(base | fields))


# What compiles fastest, for tests of which no program is that of another test.
SIMPLE = {
    "head__name": "softmax",
    "head__components": None,
    "model__last_dim": 3,
    "regularise__latent": 0.0,
}


def recurrent():
    """The papers' recipe in small: dropout everywhere, NT-ASGD, odd lengths."""
    config = tiny(
        model__backbone="awd_lstm",
        data__variable=True,
        data__max_delta=1,
        optim__name="sgd",
        optim__learning_rate=2.0,
        optim__clip=0.25,
        optim__weight_decay=1e-3,
        optim__averaging="nt",
        regularise__activation=2.0,
        regularise__slowness=1.0,
    )
    for name in ("rows", "input", "output", "latent", "recurrent"):
        setattr(config.regularise, name, 0.3)
    return config


def without_time(summary):
    return {name: value for name, value in summary.items() if name != "seconds"}


def curve(workdir):
    """What a run's metrics say, but for its speed."""
    timed = ("seconds", "tokens_per_second", "step_ms", "start")
    return [
        {name: value for name, value in line.items() if name not in timed}
        for line in metrics.read(workdir)
    ]


def valid_losses(workdir):
    return [line for line in metrics.read(workdir) if "valid_loss" in line]


def final_state(config, workdir):
    functions = model.make(config, config.data.synthetic.words)
    like = step_lib.init_state(config, functions, optim.make(config.optim))
    checkpoints = checkpoint.Checkpoints(workdir / "checkpoints", 2)
    try:
        return checkpoints.restore(like)
    finally:
        checkpoints.close()


class Parts:
    """The pieces from which the loop is made, driven by hand."""

    def __init__(self, config):
        self.config = configs.validate(config)
        data = config.data
        corpus = synthetic.corpus(data.synthetic)
        self.model = model.make(config, len(corpus.vocab))
        self.tx = optim.make(config.optim)
        self.step = make_step(config, self.model, self.tx)
        self.stream = Stream(
            corpus.train,
            data.rows,
            data.length,
            variable=data.variable,
            max_delta=data.max_delta,
            seed=config.seed,
        )
        self.widths, self.rates = set(), []

    def start(self):
        state = step_lib.init_state(self.config, self.model, self.tx)
        # As a restored state is: tied to its device. One that is not would be a
        # second signature of the step, and count as a compilation of its own.
        return sharding.committed(state)

    def go(self, state, steps):
        for _ in range(steps):
            batch = self.stream.next()
            self.widths.add(batch.ids_BS.shape[1])
            state, measured = self.step(state, batch, self.stream.fresh)
            length = int(batch.weights_BS.sum(axis=1).max())
            self.rates.append((length, measured["learning_rate"]))
        return state, measured


def test_the_step_is_lowered_while_the_first_state_is_made(tmp_path, monkeypatch):
    make_step, init_state = step_lib.make_step, step_lib.init_state
    lowered = threading.Event()

    class Told:
        """A step that tells when it is lowered."""

        def __init__(self, *arguments):
            self.step = make_step(*arguments)

        def lower(self, *arguments):
            lowered.set()
            return self.step.lower(*arguments)

    def init_last(*arguments):
        assert lowered.wait(60)
        return init_state(*arguments)

    monkeypatch.setattr(step_lib, "make_step", Told)
    monkeypatch.setattr(step_lib, "init_state", init_last)
    train.run(tiny(train__steps=1, train__epochs=None), tmp_path)


def test_widths_are_compiled_in_the_order_of_their_first_use(tmp_path, monkeypatch):
    class Compiled(Exception):
        pass

    def refuse(step, state, batch, widths, kept):
        raise Compiled(batch, widths)

    monkeypatch.setattr(step_lib, "compiling", refuse)
    config = tiny(
        data__variable=True, data__length=70, data__synthetic__train_tokens=20_000
    )
    with pytest.raises(Compiled) as refused:
        train.run(config, tmp_path)
    batch, widths = refused.value.args
    ids = synthetic.corpus(config.data.synthetic).train
    stream = Stream(ids, config.data.rows, 70, variable=True, seed=config.seed)
    batches = [stream.next() for _ in range(40)]
    chex.assert_trees_all_equal(batch, batches[0])
    used = dict.fromkeys(each.ids_BS.shape[1] for each in batches)
    assert widths == (*used, *(each for each in stream.widths if each not in used))
    assert list(widths) not in (sorted(widths), sorted(widths, reverse=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(config, workdir, summary) of an undisturbed run; copy it before changing it."""
    workdir = tmp_path_factory.mktemp("finished")
    config = tiny(train__series=True)
    return config, workdir, train.run(config, workdir)


@pytest.fixture
def copied(finished, tmp_path):
    return pathlib.Path(shutil.copytree(finished[1], tmp_path / "run"))


@pytest.mark.slow
def test_a_run_leaves_a_summary_and_metrics(finished):
    _, workdir, summary = finished
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert {"test_perplexity", "parameters", "steps", "seconds"} <= set(summary)
    lines = metrics.read(workdir)
    assert all("step" in line for line in lines)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    assert [line["step"] for line in lines if "valid_loss" in line] == [5, 10]


@pytest.mark.parametrize("more", [{"kl": 0.5}, {}, None])
def test_what_is_done_at_the_end_is_handed_in(finished, copied, more):
    seen = []

    def at_end(ended):
        seen.append(ended)
        return more

    summary = train.run(tiny(train__series=True), copied, at_end)
    (ended,) = seen
    assert (ended.workdir, ended.run.step) == (copied, 10)
    assert ended.summary["test_perplexity"] == finished[2]["test_perplexity"]
    if more is None:
        assert summary == {}
    else:
        assert without_time(summary) == without_time(finished[2]) | more
        assert json.loads((copied / "summary.json").read_text()) == summary


def test_a_series_holds_the_powers_of_two_and_the_last_step(finished):
    steps = sorted(int(path.name) for path in (finished[1] / "series").iterdir())
    assert steps == [1, 2, 4, 8, finished[2]["steps"]]


def test_a_series_is_evenly_spaced_after_its_start():
    found = [step for step in range(1, 5001) if train.in_series(step, 1000)]
    assert found == [*(2**power for power in range(10)), *range(1000, 5001, 1000)]
    assert [step for step in range(1, 14) if train.in_series(step, 5)] == [
        1,
        2,
        4,
        5,
        10,
    ]


def test_the_best_parameters_are_those_of_the_best_validation(finished):
    _, workdir, summary = finished
    best = min(valid_losses(workdir), key=lambda line: line["valid_loss"])
    assert state.load_run(workdir).step == best["step"]
    assert summary["valid_perplexity"] == pytest.approx(best["valid_perplexity"])


def test_a_finished_run_started_again_only_sums_itself_up(finished, copied):
    config, workdir, summary = finished
    again = train.run(tiny(train__series=True), copied)
    assert without_time(again) == without_time(summary)
    assert curve(copied) == curve(workdir)


@pytest.mark.slow
def test_a_run_resumed_from_before_a_damaged_step_is_bit_for_bit_the_same(
    finished, copied
):
    config, workdir, summary = finished
    victim = copied / "checkpoints" / "10" / "tree" / "_METADATA"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="10 IS DAMAGED"):
        assert final_state(config, copied)[0].step == 5
    again = train.run(tiny(train__series=True), copied)
    assert without_time(again) == without_time(summary)
    assert curve(copied) == curve(workdir)
    (ours, our_host), (theirs, their_host) = (
        final_state(config, folder) for folder in (copied, workdir)
    )
    assert ours.step == 10
    chex.assert_trees_all_equal(ours, theirs)
    for host in (our_host, their_host):
        del host["history"]["seconds"]
    assert our_host == their_host


@pytest.mark.slow
def test_a_second_run_takes_over_the_compiled_step_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "folder", lambda: tmp_path / "steps")
    # Of no other test: on a CPU what came out of jax's own cache cannot be kept again.
    config = tiny(**SIMPLE, optim__name="sgd")
    train.run(config, tmp_path / "first")
    assert list((tmp_path / "steps").iterdir())
    monkeypatch.setattr(programs, "save", None)
    train.run(config, tmp_path / "second")
    assert curve(tmp_path / "second") == curve(tmp_path / "first")
    (ours, _), (theirs, _) = (
        final_state(config, tmp_path / name) for name in ("first", "second")
    )
    chex.assert_trees_all_equal(ours, theirs)


def test_parameters_that_are_not_those_of_the_best_validation_are_not_tested(
    finished, copied, monkeypatch
):
    """What is read wrongly is told, and read again by the next start."""
    (copied / "summary.json").unlink()
    load_run = state.load_run

    def misread(*args, **options):
        run = load_run(*args, **options)
        return run._replace(params=jax.tree.map(lambda leaf: leaf * 3, run.params))

    with monkeypatch.context() as patch:
        patch.setattr(state, "load_run", misread)
        with pytest.raises(
            checkpoint.CheckpointError, match="validation loss of .* when they"
        ):
            train.run(tiny(train__series=True), copied)
    assert not (copied / "summary.json").exists()
    again = train.run(tiny(train__series=True), copied)
    assert without_time(again) == without_time(finished[2])


def test_a_run_whose_best_parameters_were_not_sealed_comes_to_an_end(copied):
    for manifest in (copied / "best").glob("*/manifest.json"):
        manifest.unlink()
    with pytest.warns(UserWarning, match="INCOMPLETE"):
        assert train.run(tiny(train__series=True), copied)["test_perplexity"] > 1


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 16
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("folder", ["best", "series"])
def test_damage_beside_the_checkpoints_stops_no_run(finished, copied, folder):
    for step_folder in (copied / folder).iterdir():
        flip(step_folder / "tree" / "_METADATA")
    with pytest.warns(UserWarning, match=f"{folder}/.* IS DAMAGED"):
        again = train.run(tiny(train__series=True), copied)
    assert without_time(again) == without_time(finished[2])
    assert curve(copied) == curve(finished[1])


@pytest.mark.slow
def test_the_best_before_the_last_checkpoint_outlives_later_ones(tmp_path, monkeypatch):
    """Killed between a better validation and its checkpoint, a run has its best."""
    fields = {
        "train__eval_every": 1,
        "train__checkpoint_every": 4,
        "optim__learning_rate": 1e-2,
        "train__steps": 8,
    }
    add = metrics.Report.add

    def crash(report, step, *arguments):
        if step == 8:
            raise Crash
        add(report, step, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(metrics.Report, "add", crash)
        train.run(tiny(**fields), tmp_path)
    losses = [line["valid_loss"] for line in valid_losses(tmp_path)]
    best_of = [1 + int(np.argmin(losses[:count])) for count in (4, 7)]
    assert best_of[0] < best_of[1], "the case needs a better validation after step 4"
    assert checkpoint.sealed_steps(tmp_path / "best") == best_of
    # A run that resumes from step 4 and ends there has the best of its first four.
    fields["train__steps"] = 4
    summary = train.run(tiny(**fields), tmp_path)
    assert summary["valid_perplexity"] == pytest.approx(np.exp(min(losses[:4])))


DAMAGE_TO_METRICS = {
    "deleted": (lambda raw: None, "deleted or cut short"),
    "cut": (lambda raw: raw[: len(raw) // 3], "deleted or cut short"),
    "not UTF-8": (lambda raw: b"\xff\n" + raw.replace(b"valid", b"\xe9"), "lines 1, "),
}


@pytest.mark.parametrize("damage", DAMAGE_TO_METRICS)
def test_a_run_whose_metrics_are_damaged_finishes_and_says_so(copied, damage, capsys):
    change, message = DAMAGE_TO_METRICS[damage]
    path = copied / "metrics.jsonl"
    raw = change(path.read_bytes())
    path.unlink()
    if raw is not None:
        path.write_bytes(raw)
    with pytest.warns(UserWarning, match=message):
        summary = train.run(tiny(train__series=True), copied)
    assert summary["test_perplexity"] > 1
    # The first line, printed and written, says how a step is computed.
    start, printed = metrics.read(copied)[0]["start"], capsys.readouterr().err
    assert start["choices"]["implementation"] == "blocked"
    assert printed.splitlines()[0].startswith("1 x cpu: loss by blocked, ")


def test_a_run_that_goes_on_is_not_finished(copied, monkeypatch):
    config = tiny(train__series=True, train__steps=15)
    add = metrics.Report.add

    def stop(report, step, *arguments):
        assert not (copied / "summary.json").exists()
        os.kill(os.getpid(), signal.SIGTERM)
        add(report, step, *arguments)

    assert (copied / "summary.json").exists()
    monkeypatch.setattr(metrics.Report, "add", stop)
    assert train.run(config, copied) == {}
    assert not (copied / "summary.json").exists()


def test_asked_to_stop_in_the_last_validation_it_does_and_then_goes_on(
    copied, monkeypatch
):
    config = tiny(train__series=True, train__steps=15)
    finish = metrics.Report.finish

    def stop(report):
        os.kill(os.getpid(), signal.SIGTERM)
        finish(report)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Report, "finish", stop)
        assert train.run(config, copied) == {}
    assert checkpoint.sealed_steps(copied / "checkpoints")[-1] == 15
    assert train.run(config, copied)["steps"] == 15


@pytest.mark.slow
def test_the_last_validation_has_one_line_however_often_the_run_ends(
    copied, monkeypatch
):
    """Also where the last checkpoint, of the same step, was saved before it."""
    config = tiny(train__series=True, train__steps=15, train__eval_every=50)
    evaluated = metrics.Report.evaluated

    def crash(*arguments):
        evaluated(*arguments)
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(metrics.Report, "evaluated", crash)
        train.run(config, copied)
    before = curve(copied)
    assert [line["step"] for line in valid_losses(copied)] == [5, 10, 15]
    for _ in range(2):
        train.run(config, copied)
        assert curve(copied) == before


@pytest.mark.slow
def test_the_last_validation_is_not_done_again_where_it_may_be_rounded_otherwise(
    copied, monkeypatch
):
    """It was saved as the best after the checkpoint of the same step."""
    config = tiny(train__series=True, train__steps=15, train__eval_every=50)
    summary = train.run(config, copied)
    assert checkpoint.sealed_steps(copied / "best") == [15]
    loss = evaluate.Evaluation.loss.fget
    lower = property(lambda evaluation: (1 - 1e-6) * loss(evaluation))
    monkeypatch.setattr(evaluate.Evaluation, "loss", lower)
    again = train.run(config, copied)
    assert again["valid_perplexity"] == summary["valid_perplexity"]


def test_stopped_after_its_last_step_a_run_has_a_line_of_it(copied, monkeypatch):
    config = tiny(train__series=True, train__steps=15, train__log_every=50)
    add = metrics.Report.add

    def stop(report, step, *arguments):
        if step == 15:
            os.kill(os.getpid(), signal.SIGTERM)
        add(report, step, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Report, "add", stop)
        assert train.run(config, copied) == {}
    assert train.run(config, copied)["steps"] == 15
    assert [line["step"] for line in metrics.read(copied) if "loss" in line][-2:] == [
        10,
        15,
    ]


def test_a_second_trainer_is_refused_and_changes_nothing(copied):
    def content():
        paths = [path for path in copied.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in paths if path.name != "lock"}

    before = content()
    with lock.Lock(copied), pytest.raises(lock.LockedError, match="is in use: process"):
        train.run(tiny(train__series=True, train__steps=15), copied)
    assert content() == before


def test_a_run_stops_before_it_writes_into_a_folder_that_was_taken(copied, monkeypatch):
    def taken(_):
        raise lock.LockedError("taken")

    monkeypatch.setattr(lock.Lock, "check", taken)
    newest = checkpoint.sealed_steps(copied / "checkpoints")
    with pytest.raises(lock.LockedError, match="taken"):
        train.run(tiny(train__series=True, train__steps=15), copied)
    assert checkpoint.sealed_steps(copied / "checkpoints") == newest


def test_a_damaged_vocabulary_of_a_run_is_written_anew(finished, copied):
    whole = (copied / "vocab.txt").read_bytes()
    (copied / "vocab.txt").write_bytes(b"")
    with pytest.warns(UserWarning, match="vocab.txt was damaged"):
        again = train.run(tiny(train__series=True), copied)
    assert (copied / "vocab.txt").read_bytes() == whole
    assert without_time(again) == without_time(finished[2])


def test_a_resume_on_another_text_is_an_error_that_names_the_file(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    # As many words as the tiny language has: the same programs.
    for name in ("train", "valid", "test"):
        (text / f"{name}.txt").write_text("a b c d e f g h i j " * 20)
    fields = {
        "data__name": "text",
        "data__path": str(text),
        "data__cache": str(tmp_path / "cache"),
        "train__steps": 1,
    }
    train.run(tiny(**fields), tmp_path / "run")
    (text / "valid.txt").write_text("a c b d e f g h i j " * 20)
    fields["train__steps"] = 2
    with pytest.raises(ValueError, match=r"another text: valid changed .*valid\.txt"):
        train.run(tiny(**fields), tmp_path / "run")


def test_a_start_that_fails_does_not_bind_the_next_to_its_settings(tmp_path):
    with pytest.raises(ValueError, match=r"does not fit: .* GiB per device"):
        train.run(tiny(head__components=10**9), tmp_path)
    assert not (tmp_path / "config.json").exists()
    # Found only when the run is written; as a lack of memory in its first step is.
    with pytest.raises(ValueError, match="nowhere holds no run"):
        train.run(tiny(train__init_from="nowhere", data__test_rows=2), tmp_path)
    assert state.load_config(tmp_path).data.test_rows == 2
    assert train.run(tiny(train__steps=1), tmp_path)["steps"] == 1
    assert state.load_config(tmp_path).data.test_rows == 3
    assert metrics.read(tmp_path)[0]["start"]["config"]["data"]["test_rows"] == 3
    assert f"--workdir {tmp_path}" in (tmp_path / "README.txt").read_text()


@pytest.mark.parametrize(
    "split, ids, unit, message",
    [
        ("test", [1, 2, 3, 1, 0], "lines", "test text .*eval_length=4: a line needs 5"),
        ("valid", [2], "stream", "valid text is one word long"),
        ("train", [1, 2, 0], "lines", "1 lines are too few for 2 rows"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, split, ids, unit, message
):
    texts = dict.fromkeys(("train", "valid", "test"), [1, 2, 0, 2, 3, 0]) | {split: ids}
    arrays = {name: np.array(text, np.int32) for name, text in texts.items()}
    text = Corpus(**arrays, vocab=make_words(4))
    monkeypatch.setattr(corpus, "load", lambda data: text)
    config = tiny(data__unit=unit, data__rows=2, data__eval_length=4)
    with pytest.raises(ValueError, match=message):
        train.run(config, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_run_resumed_from_before_its_best_step_may_find_another_best(copied):
    assert state.load_run(copied).step == 10
    shutil.rmtree(copied / "checkpoints" / "10")
    summary = train.run(tiny(train__series=True, train__eval_every=2), copied)
    assert summary["steps"] == 10
    steps = [line["step"] for line in valid_losses(copied)]
    assert steps == [5, 6, 8, 10]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"head__components": 3}, "head.components: 3 here, 2 there"),
        ({"optim__learning_rate": 0.5}, "optim.learning_rate: 0.5 here, 0.01 there"),
        ({"data__rows": 2}, "data.rows: 2 here, 4 there"),
    ],
)
def test_other_settings_than_those_of_the_run_are_named(finished, fields, message):
    with pytest.raises(ValueError, match=message):
        train.run(tiny(**fields), finished[1])


def test_another_vocabulary_than_that_of_the_run_is_an_error(finished, copied):
    words = (copied / "vocab.txt").read_text().replace("w3\n", "three\n")
    (copied / "vocab.txt").write_text(words)
    # As in a folder of a version that kept no hashes: its vocab.txt is all there is.
    (copied / "corpus.json").unlink()
    with pytest.raises(ValueError, match="vocabulary"):
        train.run(tiny(train__series=True), copied)


@pytest.mark.slow
def test_finetuning_starts_from_the_best_parameters_of_another_run(finished, tmp_path):
    config = tiny(
        optim__name="sgd",
        optim__learning_rate=1e-30,
        optim__averaging="now",
        train__init_from=str(finished[1]),
        train__steps=1,
    )
    summary = train.run(config, tmp_path)
    chex.assert_trees_all_equal(
        state.load_run(tmp_path).params, state.load_run(finished[1]).params
    )
    assert summary["test_perplexity"] == finished[2]["test_perplexity"]
    assert [line["averaging"] for line in valid_losses(tmp_path)] == [True]


def first(condition, losses, patience):
    """The index of the first loss that meets the authors' condition."""
    for index, loss in enumerate(losses):
        if condition(losses[:index], loss, patience):
            return index
    return None


@pytest.mark.slow
def test_averaging_begins_and_a_run_stops_by_the_rule_of_the_authors(tmp_path):
    config = tiny(
        **SIMPLE,
        optim__learning_rate=0.3,
        optim__averaging="nt",
        optim__patience=1,
        train__stop_patience=4,
        train__eval_every=1,
        train__steps=60,
        train__checkpoint_every=50,
    )
    summary = train.run(config, tmp_path)
    lines = valid_losses(tmp_path)
    losses = [line["valid_loss"] for line in lines]

    def rule(logs, val_loss, n):
        return len(logs) > n and val_loss > min(logs[:-n])

    stop, switch = first(rule, losses, 4), first(rule, losses, 1)
    assert summary["steps"] == len(losses) == stop + 1 < 60
    assert switch + 1 < stop
    averaging = [line["averaging"] for line in lines]
    assert averaging == [False] * (switch + 1) + [True] * (stop - switch)
    assert train.run(tiny_again(config), tmp_path)["steps"] == summary["steps"]
    patient = tiny_again(config)
    patient.train.steps, patient.train.stop_patience = summary["steps"] + 2, None
    assert train.run(patient, tmp_path)["steps"] == summary["steps"] + 2


def tiny_again(config):
    """The same settings, not yet frozen."""
    return configs.from_dict(configs.to_dict(config))


@pytest.mark.slow
def test_recurrent_training_in_two_parts_is_bit_for_bit_that_in_one(tmp_path):
    parts = Parts(recurrent())

    def begin_to_average(state):
        return state.replace(opt_state=optim.start_averaging(state.opt_state))

    middle, _ = parts.go(parts.start(), 3)
    middle, _ = parts.go(begin_to_average(middle), 2)
    checkpoints = checkpoint.Checkpoints(tmp_path, 1)
    checkpoints.save(5, middle, {"position": parts.stream.position})
    whole, measured = parts.go(middle, 15)
    checkpoints.wait()
    restored, host = checkpoints.restore(parts.start())
    checkpoints.close()
    parts.stream.seek(json.loads(json.dumps(host["position"])))
    again, measured_again = parts.go(restored, 15)
    assert int(again.step) == int(whole.step) == 20
    assert optim.is_averaging(whole.opt_state)
    chex.assert_trees_all_equal((again, measured_again), (whole, measured))
    assert any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(whole.carry))
    # The learning rate follows the true length, whatever the padded one is.
    assert len({length for length, _ in parts.rates}) > 1
    for length, rate in parts.rates:
        assert float(rate) == pytest.approx(2.0 * length / 5, rel=1e-5)
    # One compilation for each width that was met, and none for the restored state.
    assert len(parts.widths) > 1
    assert parts.step._cache_size() == len(parts.widths)


def test_a_step_is_traced_once_for_batches_of_one_width(monkeypatch):
    parts = Parts(tiny())
    loss = chex.assert_max_traces(parts.model.loss, n=1)
    monkeypatch.setattr(type(parts.model), "loss", lambda _, *inputs: loss(*inputs))
    parts.step = make_step(parts.config, parts.model, parts.tx)
    origin = parts.stream.position
    first = parts.go(parts.start(), 25)
    assert parts.stream.epoch > 0
    # The same seed gives the same numbers.
    parts.stream.seek(origin)
    chex.assert_trees_all_equal(parts.go(parts.start(), 25), first)
    # Another step of the same seed draws other masks.
    losses = set()
    for index in (0, 1):
        parts.stream.seek(origin)
        start = parts.start()
        _, measured = parts.go(start.replace(step=start.step + index), 1)
        losses.add(float(measured["total"]))
    assert len(losses) == 2


@pytest.mark.slow
def test_accumulation_takes_the_same_step_and_keeps_the_states_of_all_rows():
    results = []
    for accumulate in (1, 2):
        parts = Parts(
            tiny(
                **SIMPLE,
                model__order=3,  # a state of the two words before
                regularise__activation=2.0,
                regularise__slowness=1.0,
                optim__name="sgd",
                optim__accumulate=accumulate,
            )
        )
        results.append(parts.go(parts.start(), 2))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(results[0][0].carry))
    chex.assert_trees_all_close(*results, **CLOSE)


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run_and_spares_the_checkpoint(tmp_path):
    config = tiny(
        **SIMPLE,
        optim__name="sgd",
        optim__learning_rate=1e30,
        train__checkpoint_every=1,
        train__eval_every=50,
    )
    with pytest.raises(metrics.NonFiniteLossError, match="'offset'") as caught:
        train.run(config, tmp_path)
    restored, host = final_state(config, tmp_path)
    assert f"step {restored.step + 1}:" in str(caught.value)
    assert f"position {host['position']}" in str(caught.value)
    logged = [line["step"] for line in metrics.read(tmp_path) if "loss" in line]
    assert logged == list(range(1, int(restored.step) + 1))


def test_a_validation_that_is_no_number_stops_the_run(tmp_path):
    config = tiny(
        **SIMPLE,
        optim__name="sgd",
        optim__learning_rate=1e30,
        train__steps=1,
    )
    with pytest.raises(metrics.NonFiniteLossError):
        train.run(config, tmp_path)
    assert all(np.isfinite(line["valid_loss"]) for line in valid_losses(tmp_path))


class Crash(Exception):
    pass


@pytest.mark.slow
def test_the_lines_of_a_resumed_run_are_means_over_the_same_steps(
    finished, tmp_path, monkeypatch
):
    fields = {
        "train__log_every": 3,
        "train__checkpoint_every": 2,
        "train__eval_every": 50,
        "train__steps": 6,
    }
    add = metrics.Report.add

    def crash(report, step, *arguments):
        if step == 5:
            raise Crash
        add(report, step, *arguments)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(metrics.Report, "add", crash)
        train.run(tiny(**fields), tmp_path)
    train.run(tiny(**fields), tmp_path)
    # All steps have as many tokens, so the mean over tokens is that of the steps.
    losses = [line["loss"] for line in metrics.read(finished[1]) if "loss" in line]
    expected = [(3, np.mean(losses[:3])), (6, np.mean(losses[3:6]))]
    found = [
        (line["step"], line["loss"])
        for line in metrics.read(tmp_path)
        if "loss" in line
    ]
    assert [step for step, _ in found] == [3, 6]
    assert dict(found) == pytest.approx(dict(expected), rel=1e-6)


CONFIG = """
from softbottle import config as configs

def get_config():
    return configs.from_dict({values!r})
"""


class Launched:
    """launch/train.py in a process of its own."""

    def __init__(self, config_file, workdir):
        self.workdir = workdir
        self.log = workdir.with_suffix(".log")
        flags = ["--config", config_file]
        if config_file.parent != workdir:
            flags += ["--workdir", workdir]
        self.program = commands.start("train.py", *flags, log=self.log)
        self.process = self.program.process

    def end(self, expected=0):
        assert self.program.wait() == expected, self.log.read_text()[-2000:]

    def reach(self, step):
        """Wait until the metrics hold a step."""
        deadline = time.monotonic() + commands.SECONDS
        while time.monotonic() < deadline and self.process.is_alive():
            if (self.workdir / "metrics.jsonl").exists():
                lines = metrics.read(self.workdir)
                if lines and lines[-1]["step"] >= step:
                    return
            time.sleep(0.005)
        self.process.kill()
        raise AssertionError(f"never reached: {self.log.read_text()[-2000:]}")


@pytest.mark.slow
def test_a_run_that_was_stopped_and_then_killed_ends_like_an_undisturbed_one(tmp_path):
    config = tiny(
        **SIMPLE,
        train__steps=270,
        train__eval_every=50,
        train__checkpoint_every=40,
        optim__averaging="nt",
        optim__patience=1,
    )
    config_file = tmp_path / "config.py"
    config_file.write_text(CONFIG.format(values=configs.to_dict(config)))
    stopped = Launched(config_file, tmp_path / "disturbed")
    stopped.reach(30)
    os.kill(stopped.process.pid, signal.SIGINT)
    stopped.end()
    workdir = stopped.workdir
    told = stopped.log.read_text()
    assert not (workdir / "summary.json").exists()
    saved = max(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert f"{workdir}: a new run" in told and "saving; interrupt again" in told
    assert f"asked to stop: saved at step {saved}; " in told
    assert metrics.read(workdir)[-1]["step"] == saved < 270
    killed = Launched(workdir / "config.json", workdir)
    killed.reach(saved + 20)
    with pytest.raises(lock.LockedError, match=f"process {killed.process.pid} on host"):
        train.run(tiny_again(config), workdir)
    assert f"{workdir}: resumed from step {saved}\n" in killed.log.read_text()
    killed.process.kill()
    killed.end(expected=-signal.SIGKILL)
    assert not (workdir / "summary.json").exists()
    with warnings.catch_warnings(), jax.default_prng_impl("threefry2x32"):
        # The generator of the processes; a checkpoint may be half written.
        warnings.filterwarnings("ignore", message=".*IS INCOMPLETE")
        ours, theirs = (
            train.run(tiny_again(config), folder)
            for folder in (workdir, tmp_path / "undisturbed")
        )
    assert curve(workdir) == curve(tmp_path / "undisturbed")
    assert without_time(ours) == without_time(theirs)
    assert json.loads((workdir / "summary.json").read_text()) == ours
