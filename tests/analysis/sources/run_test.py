"""Inner states of our own runs, and the walk along a run's checkpoints."""

import types

import jax
import numpy as np
import pytest

from softbottle import backbones, model
from softbottle import config as config_lib
from softbottle.analysis import inspection
from softbottle.analysis.instruments import attention_layers
from softbottle.analysis.sources import run as source
from softbottle.data import corpus
from softbottle.training import checkpoint, evaluate, state
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_keys")
VOCAB, LENGTH, GAIN = 13, 8, 1.5
IDS = np.random.default_rng(0).integers(0, VOCAB, 3 * LENGTH + 4)


def make_config(backbone, layers):
    return tiny.make_softmax(
        backbone,
        8,
        data__synthetic__words=VOCAB,
        data__synthetic__train_tokens=900,
        data__synthetic__eval_tokens=300,
        data__eval_length=LENGTH,
        model__hidden_dim=12,
        model__layers=layers,
        model__attention_heads=2,
        model__gain=GAIN,
        model__scan_layers=backbone == "transformer",
    )


def make_run(backbone, layers=2):
    return tiny.make_run(make_config(backbone, layers), tiny.make_words(VOCAB))


@pytest.mark.slow
def test_every_layer_of_an_lstm_is_seen_and_its_state_carries_over():
    run = make_run("awd_lstm")
    found = source.inner(run, IDS)
    widths = [one.shape for one in found.states]
    assert widths == [(3 * LENGTH, width) for width in (8, 12, 8)]
    assert found.logits_LWHS is None
    expected_SI = np.asarray(run.params["table_VE"], np.float64)[IDS[: 3 * LENGTH]]
    np.testing.assert_allclose(found.states[0], expected_SI, rtol=1e-6)
    for depth in range(2):
        expected_SI = lstm(expected_SI, run.params["backbone"][f"layer_{depth}"])
        # What the head reads is the last state times the gain.
        np.testing.assert_allclose(
            found.states[depth + 1],
            (GAIN if depth else 1) * expected_SI,
            rtol=1e-4,
            atol=1e-6,
        )


def lstm(inputs_SI, params):
    """One layer, position by position, in float64."""
    p = {name: np.asarray(array, np.float64) for name, array in params.items()}
    size = len(p["recurrent_HG"])
    hidden, cell, outputs = np.zeros(size), np.zeros(size), []
    for x in inputs_SI:
        gates = x @ p["input_IG"] + hidden @ p["recurrent_HG"]
        gates = np.split(gates + p["input_bias_G"] + p["recurrent_bias_G"], 4)
        i, f, o = (1 / (1 + np.exp(-gates[at])) for at in (0, 1, 3))
        cell = f * cell + i * np.tanh(gates[2])
        hidden = o * np.tanh(cell)
        outputs.append(hidden)
    return np.array(outputs)


@pytest.mark.slow
def test_every_layer_of_a_transformer_is_seen_with_its_attention():
    run = make_run("transformer")
    found = source.inner(run, IDS)
    assert [one.shape[1] for one in found.states] == [8, 12, 8]
    assert found.logits_LWHS.shape == (2, 3, 2, LENGTH)
    # What the head reads is what evaluation reads, stretch by stretch.
    ((last_CD, _, _),) = evaluate.states(run.model, run.params, IDS, 1, LENGTH)
    middle = slice(LENGTH, 2 * LENGTH)
    np.testing.assert_allclose(
        found.states[-1], last_CD[: 3 * LENGTH], rtol=1e-4, atol=1e-5
    )
    blocks = run.params["backbone"]["blocks"]
    expected = last_logits(
        found.states[1][middle], jax.tree.map(lambda a: a[1], blocks)
    )
    np.testing.assert_allclose(found.logits_LWHS[1, 1], expected, rtol=1e-3, atol=1e-4)
    attention_layers.measure(found.logits_LWHS, found.states[:2])


def last_logits(states_SD, params):
    """Attention logits [N, S] of the last position, in float64 and complex numbers."""
    p = {name: np.asarray(array, np.float64) for name, array in params.items()}
    rms_S1 = np.sqrt(np.mean(states_SD**2, axis=1, keepdims=True) + 1e-6)
    y_SD = states_SD / rms_S1 * p["attention_scale_LD"]
    turned = []
    for name in ("query_LDNH", "key_LDNH"):
        x_SNH = np.einsum("sd,dnh->snh", y_SD, p[name])
        half = x_SNH.shape[-1] // 2
        z_SNH = x_SNH[..., :half] + 1j * x_SNH[..., half:]
        angle_SH = np.arange(len(y_SD))[:, None] * 1e4 ** (-np.arange(half) / half)
        turned.append(z_SNH * np.exp(1j * angle_SH)[:, None])
    query_SNH, key_SNH = turned
    logits_NS = np.einsum("nh,snh->ns", query_SNH[-1].conj(), key_SNH).real
    return logits_NS / np.sqrt(2 * half)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run as training leaves it, of other random parameters at each step."""
    path = tmp_path_factory.mktemp("runs") / "series"
    config = config_lib.validate(make_config("window", layers=1))
    vocab = corpus.load(config.data).vocab
    state.write_run(path, config, vocab)
    init = jax.jit(model.make(config, VOCAB).init)
    for folder, steps in (("series", (1, 2, 4)), ("best", (2,))):
        kept = checkpoint.Checkpoints(path / folder, None)
        for step in steps:
            kept.save(step, init(jax.random.key(step)), {"step": step})
        kept.close()
    return path


@pytest.mark.slow
def test_the_walk_meets_every_checkpoint_of_the_series_in_order(workdir):
    assert source.steps(workdir) == [1, 2, 4]
    run = state.load_run(workdir, "float32")
    series = source.Series(workdir, run, IDS, source.make_reader(run))
    found = list(series)
    assert [step for step, *_ in series] == [1, 2, 4]  # it may be walked again
    assert [step for step, *_ in found] == [1, 2, 4]
    tables = [table_VE for _, table_VE, _, _ in found]
    assert not np.allclose(tables[0], tables[1])
    _, table_VE, states_ND, loss = found[1]
    assert run.step == 2
    np.testing.assert_array_equal(table_VE, run.model.output(run.params)[1][:VOCAB])
    np.testing.assert_array_equal(states_ND, source.inner(run, IDS).states[-1])
    score = evaluate.make_evaluator(run.model)
    assert loss == pytest.approx(score(run.params, IDS, 1, LENGTH).loss, rel=1e-6)


def test_a_walk_along_the_series_traces_the_trunk_once(workdir, monkeypatch):
    run, traced = state.load_run(workdir, "float32"), []
    backbone = backbones.make(run.config)

    def apply(*arguments, **settings):
        if settings.get("mutable"):  # and not the model's own call
            traced.append(arguments)
        return backbone.apply(*arguments, **settings)

    counted = types.SimpleNamespace(
        apply=apply, init=backbone.init, initial_carry=backbone.initial_carry
    )
    monkeypatch.setattr(model, "make_backbone", lambda *settings: counted)
    parts = {"states", "series"}
    found = source.read(workdir, parts, positions=3 * LENGTH)
    assert len(list(found.series)) == 3
    assert len(traced) == 1


@pytest.mark.slow
def test_a_line_that_is_packed_beside_another_is_read_by_itself():
    config = make_config("transformer", layers=2)
    config.data.unit = "packed"
    config.data.eval_rows = 1
    run = tiny.make_run(config, tiny.make_words(VOCAB))
    eos = run.vocab.eos
    words = [id for id in range(VOCAB) if id != eos]
    ids = np.array([eos, *words[:3], eos, *words[3:6], eos])
    together, alone = source.inner(run, ids), source.inner(run, ids[4:])
    assert len(together.states[-1]) == LENGTH
    np.testing.assert_allclose(
        together.states[-1][4:], alone.states[-1], rtol=1e-4, atol=1e-5
    )
    (tokens,) = source.capture("run", run, ids, {"tokens"}).tokens
    np.testing.assert_allclose(
        tokens.hidden_TD[4:], alone.states[-1], rtol=1e-4, atol=1e-5
    )
    stream = tiny.make_run(make_config("transformer", 2), tiny.make_words(VOCAB))
    joined = source.inner(stream, ids).states[-1]
    assert abs(joined[4:] - alone.states[-1]).max() > 1e-3


@pytest.mark.parametrize("unit", ["stream", "packed", "lines", "answers"])
def test_a_run_of_single_lines_says_that_it_is_read_as_one_stream(unit):
    config = tiny.make_config(data__unit=unit)
    made = types.SimpleNamespace(head=None)
    run = state.Run(config, tiny.make_words(VOCAB), made, {}, 0)
    told = " ".join(source._facts("run", run, (VOCAB, 3)))
    said = f"as one stream, in its validation by {unit}" in told
    assert said == (unit in ("lines", "answers"))


def test_only_the_parts_that_are_asked_for_are_read(workdir):
    found = source.read(workdir, {"tokens"}, positions=50)
    assert sum(len(block.labels_T) for block in found.tokens) == 50
    for name in ("states", "mixed", "frozen", "text", "validations", "series"):
        assert getattr(found, name) is None


def test_the_report_has_the_run_s_curves_and_its_inner_layers(workdir):
    instruments = ["saturation", "training", "attention"]
    found = inspection.of_runs([workdir], instruments, positions=50)
    layers, curves, skipped = found
    assert skipped.reading == (
        "skipped: series: no attention logits of its layers are known."
    )
    assert len(layers.numbers["series"]["anisotropy_L"]) == 2
    assert curves.numbers["series"]["step_M"].tolist() == [1, 2, 4]
    assert "3 checkpoints are too few" in curves.reading


def test_a_run_without_a_series_has_no_steps(tmp_path):
    assert source.steps(tmp_path) == []
    with pytest.raises(ValueError, match="two words"):
        source.inner(make_run("window"), IDS[:1])
