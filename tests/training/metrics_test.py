import importlib.util
import json
import math
import resource
import signal

import pytest

from softbottle.training import metrics

START = {"config": {"seed": 3}}


def write(workdir, *steps, resume_from=0):
    writer = metrics.Writer(workdir, resume_from, START)
    for step in steps:
        writer.write(step, loss=0.5 * step, epoch=1)
    writer.close()


def steps_of(workdir):
    return [line["step"] for line in metrics.read(workdir)]


class Number:
    """A number on a device, where it is from some time on; reading it waits."""

    def __init__(self, value, clock, done):
        self.value, self.clock, self.done = value, clock, done

    def is_ready(self):
        return self.clock[0] >= self.done

    def __float__(self):
        self.clock[0] = max(self.clock[0], self.done)
        return float(self.value)


def measured(total=6.0, count=3.0, grad_norm=0.1, *, clock=None, done=0.0):
    values = {
        "total": total,
        "count": count,
        "penalty": 0.0,
        "grad_norm": grad_norm,
        "learning_rate": 0.01,
    }
    clock = clock or [0.0]
    return {name: Number(value, clock, done) for name, value in values.items()}


@pytest.fixture
def make_report(tmp_path):
    reports = []

    def make(every=1, seconds=0.0):
        writer = metrics.Writer(tmp_path, 0, START)
        progress = metrics.Progress(10, 0, "test")
        reports.append(metrics.Report(writer, progress, every, seconds))
        return reports[-1]

    yield make
    for report in reports:
        report.close()


def position(batches):
    return {"epoch": 2, "offset": 5 * batches, "batches": batches}


def test_every_line_is_an_object_with_its_step_and_the_first_is_the_start(tmp_path):
    write(tmp_path, 1, 2)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == [
        {"step": 0, "start": START},
        {"step": 1, "loss": 0.5, "epoch": 1},
        {"step": 2, "loss": 1.0, "epoch": 1},
    ]
    assert metrics.read(str(tmp_path)) == lines


def test_a_resumed_run_drops_what_lies_beyond_its_step(tmp_path):
    write(tmp_path, 1, 2, 3, 4)
    write(tmp_path, 3, resume_from=2)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_a_run_that_begins_again_tells_its_own_settings(tmp_path):
    write(tmp_path, 1, 2)
    metrics.Writer(tmp_path, 0, {"config": "another"}).close()
    assert metrics.read(tmp_path) == [{"step": 0, "start": {"config": "another"}}]


@pytest.mark.parametrize("half", ['{"step": 3, "lo', "{", '{"step": 3, "loss": 0.5'])
def test_half_a_line_at_the_end_is_dropped(tmp_path, half):
    write(tmp_path, 1, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    assert steps_of(tmp_path) == [0, 1, 2]
    write(tmp_path, 3, resume_from=2)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_half_a_first_line_means_a_new_start(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "sta')
    write(tmp_path, 1)
    assert steps_of(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe\n", b"\0\0\n", b"[1]\n", b'{"loss": 1.0}\n', b'{"step": "x"}\n']
)
def test_damaged_lines_are_named_and_the_others_kept(tmp_path, bad):
    write(tmp_path, 1, 2, 3)
    path = tmp_path / "metrics.jsonl"
    first, second, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, bad, *others]))
    with pytest.warns(UserWarning, match=r"1 of its lines .*\(lines 2\)"):
        assert steps_of(tmp_path) == [0, 2, 3]
    with pytest.warns(UserWarning, match="damaged"):
        write(tmp_path, 4, resume_from=3)
    assert steps_of(tmp_path) == [0, 2, 3, 4]


def test_a_damaged_first_line_is_written_again(tmp_path):
    write(tmp_path, 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"?" + path.read_bytes())
    with pytest.warns(UserWarning, match="lines 1"):
        write(tmp_path, 3, resume_from=2)
    assert metrics.read(tmp_path)[0] == {"step": 0, "start": START}
    assert steps_of(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_file_that_was_cut_short_or_deleted_is_told(tmp_path, left):
    write(tmp_path, 1, 2, 3, 4)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:left]))
    with pytest.warns(UserWarning, match="no line of step 4.* resumes from step 5"):
        metrics.Writer(tmp_path, 5, START, logged=4).close()
    assert metrics.read(tmp_path)[0] == {"step": 0, "start": START}


def test_without_a_terminal_progress_is_a_plain_line_now_and_then(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: clock[0])
    progress = metrics.Progress(1000, 100, "mos")
    for step in range(101, 500):
        clock[0] += 1.0
        progress.advance(step)
    progress.say("a line")
    progress.close()
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "mos: step 160 of 1,000, 14:00 left"
    assert len(told) == 399 // 60 + 1
    assert told[-1] == "a line"


def test_a_full_disk_is_told_with_what_is_safe(tmp_path):
    writer = metrics.Writer(tmp_path, 0, START)
    length = (tmp_path / "metrics.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        # A limit on a file's size fails as a full disk does, at the same place.
        resource.setrlimit(resource.RLIMIT_FSIZE, (length + 10, before[1]))
        with pytest.raises(
            metrics.WriteError, match="step 7: .*metrics.jsonl could not"
        ):
            writer.write(7, loss=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    writer.close()
    # Half a line is there, and the next start drops it.
    write(tmp_path, 7, resume_from=6)
    assert steps_of(tmp_path) == [0, 7]


def test_a_folder_without_metrics_has_no_lines(tmp_path):
    assert metrics.read(tmp_path) == []


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard"
)
def test_event_files_hold_the_numbers(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    def found():
        events = event_accumulator.EventAccumulator(str(tmp_path / "events"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss")]

    write(tmp_path, 1, 2, 3)
    assert found() == [(1, 0.5), (2, 1.0), (3, 1.5)]
    # What a killed process wrote beyond its last checkpoint is not shown twice.
    write(tmp_path, 2, resume_from=1)
    assert found() == [(1, 0.5), (2, 1.0)]
    write(tmp_path, 1)
    assert found() == [(1, 0.5)]


def test_metrics_are_read_when_the_device_has_them(make_report, tmp_path):
    report, clock = make_report(), [0.0]
    for step in (1, 2, 3):
        report.add(step, position(step), measured(clock=clock, done=step))
    assert steps_of(tmp_path) == [0]
    clock[0] = 2.5
    report.add(4, position(4), measured(clock=clock, done=4))
    assert steps_of(tmp_path) == [0, 1, 2]
    assert clock == [2.5]
    for _ in range(2):
        report.settle()
        assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
        assert clock == [4]


def test_the_host_runs_ahead_of_the_device_and_then_waits(make_report, tmp_path):
    report, clock = make_report(), [0.0]
    for step in range(1, metrics.AHEAD + 4):
        report.add(step, position(step), measured(clock=clock, done=10 * step))
        waited = max(0, step - metrics.AHEAD)
        assert clock == [10 * waited]
        assert steps_of(tmp_path)[-1] == waited


@pytest.mark.parametrize("validated", [False, True])
def test_a_line_is_the_mean_over_the_tokens_since_the_last_one(
    make_report, tmp_path, validated
):
    report = make_report(every=2)
    for step, (total, count) in enumerate([(6, 3), (1, 1), (8, 2)], start=1):
        report.add(step, position(step), measured(total, count))
    if validated:  # at the end of an epoch that is the last
        report.settle()
    report.finish()
    report.finish()
    losses = [
        (line["step"], line["loss"])
        for line in metrics.read(tmp_path)
        if "loss" in line
    ]
    assert losses == [(2, 7 / 4), (3, 4.0)]
    line = metrics.read(tmp_path)[1]
    assert line["perplexity"] == pytest.approx(math.exp(7 / 4))
    assert {"grad_norm", "learning_rate", "tokens_per_second", "step_ms"} <= set(line)


def test_what_is_done_between_steps_is_not_the_steps_time(
    make_report, tmp_path, monkeypatch
):
    clock, done = [0.0], 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    report = make_report(every=4)
    for step in range(1, 9):
        done = max(done, clock[0]) + 0.5
        report.add(step, position(step), measured(1, 3, clock=clock, done=done))
        if step in (2, 3, 7):
            report.settle()
            clock[0] += 100  # a validation
            report.evaluated(step, 0, 1.0, False)
            clock[0] += 10  # a checkpoint
    report.finish()
    lines = [line for line in metrics.read(tmp_path) if "step_ms" in line]
    times = [(line["step"], line["step_ms"]) for line in lines]
    assert times == [(4, 500.0), (8, 500.0)]
    assert [line["tokens_per_second"] for line in lines] == [6.0, 6.0]


@pytest.mark.parametrize(
    "bad", [{"total": math.nan}, {"total": math.inf}, {"grad_norm": math.nan}]
)
def test_what_is_not_finite_is_an_error_with_its_step_and_batch(make_report, bad):
    report = make_report()
    report.add(4, position(4), measured())
    report.add(5, position(5), measured(**bad, done=1.0))
    with pytest.raises(
        metrics.NonFiniteLossError, match=r"step 5: .*nan|inf.*'offset': 25"
    ) as caught:
        report.settle()
    assert "'offset': 25, 'batches': 5" in str(caught.value)


def test_seconds_go_on_from_earlier_stretches(make_report):
    assert make_report(seconds=100.0).seconds >= 100


def test_perplexity_overflows_to_infinity():
    assert metrics.perplexity(math.log(7)) == pytest.approx(7)
    assert metrics.perplexity(1e4) == math.inf


def test_a_line_is_json_that_any_reader_takes_even_at_an_infinite_perplexity(
    make_report, tmp_path
):
    make_report().evaluated(5, 1, 1e4, False)

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
