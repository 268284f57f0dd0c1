import math

import chex
import jax
import numpy as np
import pytest

from softbottle import config as configs
from softbottle import model as models
from softbottle import sharding
from softbottle.scoring import dynamic
from softbottle.training import evaluate
from tests import tiny

VOCAB, EMBED, HIDDEN, LAST, ROWS, LENGTH = 11, 3, 5, 4, 3, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
LOSS = {"rel": 1e-5}
TRAIN_WORDS, TEST_WORDS = 41, 31  # 4 batches and 8 segments, the last of each partial
pytestmark = pytest.mark.usefixtures("quick_keys")


def make(backbone="window", **regularise):
    """A softmax over a window of two words, or over an LSTM, that numpy draws."""
    config = tiny.make_softmax(
        backbone,
        LAST,
        model__tied=False,
        model__order=2,
        model__embed_dim=EMBED,
        model__hidden_dim=HIDDEN,
        model__context_dim=LAST,
        **{f"regularise__{name}": value for name, value in regularise.items()},
    )
    functions = models.make(configs.validate(config), VOCAB)
    shapes = jax.eval_shape(functions.init, jax.random.key(0))
    return functions, jax.device_put(tiny.draw(shapes))


@pytest.fixture(scope="module")
def model():
    return make()


def make_ids(count, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


TRAIN, TEST = make_ids(TRAIN_WORDS, 1), make_ids(TEST_WORDS, 2)
STATISTICS = {}


def named(params):
    """The arrays of the window model by short names, in float64."""
    inner, outer = (params["backbone"][name] for name in ("inner", "outer"))
    arrays = {
        "table": params["table_VE"],
        "W": inner["kernel"],
        "b": inner["bias"],
        "U": outer["kernel"],
        "c": outer["bias"],
        "output": params["output_VE"],
        "bias": params["bias_V"],
    }
    return {name: np.asarray(array, np.float64) for name, array in arrays.items()}


def segment(p, words, labels, past):
    """(sum of losses, its gradient, the last word embedded) of a piece of a row.

    The word before the piece, `past`, is what an earlier table made of it and takes no
    part in the gradient.
    """
    grads = {name: np.zeros_like(array) for name, array in p.items()}
    total, before, before_word = 0.0, past, None
    for word, label in zip(words, labels, strict=True):
        x = np.concatenate([before, p["table"][word]])
        a = np.tanh(x @ p["W"] + p["b"])
        h = a @ p["U"] + p["c"]
        z = p["output"] @ h + p["bias"]
        q = np.exp(z) / np.exp(z).sum()
        total -= math.log(q[label])
        z_bar = q - (np.arange(VOCAB) == label)
        grads["output"] += np.outer(z_bar, h)
        grads["bias"] += z_bar
        h_bar = z_bar @ p["output"]
        grads["U"] += np.outer(a, h_bar)
        grads["c"] += h_bar
        inner_bar = (h_bar @ p["U"].T) * (1 - a**2)
        grads["W"] += np.outer(x, inner_bar)
        grads["b"] += inner_bar
        x_bar = inner_bar @ p["W"].T
        grads["table"][word] += x_bar[EMBED:]
        if before_word is not None:
            grads["table"][before_word] += x_bar[:EMBED]
        before, before_word = p["table"][word], word
    return total, grads, before


def statistics(p, ids):
    """sqrt(mean of g^2) over batches of rows read side by side."""
    pairs = list(zip(ids[:-1], ids[1:], strict=True))
    columns = math.ceil(len(pairs) / ROWS)
    rows = [pairs[start : start + columns] for start in range(0, len(pairs), columns)]
    pasts = [np.zeros(EMBED) for _ in rows]
    squares, count = {name: np.zeros_like(array) for name, array in p.items()}, 0
    for first in range(0, columns, LENGTH):
        grads, words = {name: 0.0 for name in p}, 0
        for index, row in enumerate(rows):
            piece = row[first : first + LENGTH]
            if piece:
                _, added, pasts[index] = segment(p, *np.array(piece).T, pasts[index])
                grads = {name: grads[name] + added[name] for name in p}
                words += len(piece)
        squares = {name: squares[name] + (grads[name] / words) ** 2 for name in p}
        count += 1
    return {name: np.sqrt(square / count) for name, square in squares.items()}


def brute(start, train, ids, settings):
    """The losses of the segments, each before the update that it causes."""
    ms = statistics(start, train)
    mean = np.mean([array.mean() for array in ms.values()])
    p, past, losses = dict(start), np.zeros(EMBED), []
    for first in range(0, len(ids) - 1, settings.length):
        labels = ids[first + 1 : first + 1 + settings.length]
        words = ids[first : first + len(labels)]
        total, grads, past = segment(p, words, labels, past)
        losses.append(total)
        for name in p:
            rate = np.minimum(ms[name] / mean, 1 / settings.decay)
            pull = settings.decay * rate * (start[name] - p[name])
            step = grads[name] / len(labels) / (ms[name] + settings.epsilon)
            p[name] = p[name] + pull - settings.learning_rate * step
    return losses


@pytest.fixture
def shared_statistics(monkeypatch):
    """Those of the same parameters on the same batches are computed once."""
    compute = dynamic.root_mean_squares

    def remembered(model, params, train, settings):
        arrays = [train, *map(np.asarray, jax.tree.leaves(params))]
        contents = [array.tobytes() for array in arrays]
        key = (model, settings.length, settings.rows, *contents)
        if key not in STATISTICS:
            STATISTICS[key] = compute(model, params, train, settings)
        return STATISTICS[key]

    monkeypatch.setattr(dynamic, "root_mean_squares", remembered)


@pytest.fixture(scope="module")
def static(model):
    """Static evaluation of some ids."""
    functions, params = model
    evaluator = evaluate.make_evaluator(functions)
    return lambda ids: evaluator(params, ids, 1, LENGTH)


@pytest.mark.slow
def test_the_oracles_gradient_is_that_of_central_differences(model):
    p, past = named(model[1]), np.full(EMBED, 0.3)
    words, labels = TEST[:4], TEST[1:5]
    _, grads, _ = segment(p, words, labels, past)
    random = np.random.default_rng(0)
    for name, array in p.items():
        direction, ends = random.normal(size=array.shape), []
        for sign in (1, -1):
            moved = p | {name: array + sign * 1e-6 * direction}
            ends.append(segment(moved, words, labels, past)[0])
        slope = (ends[0] - ends[1]) / 2e-6
        assert (grads[name] * direction).sum() == pytest.approx(slope, rel=1e-6)


@pytest.mark.slow
def test_statistics_are_root_mean_squares_of_the_gradients_of_batches(model):
    functions, params = model
    settings = dynamic.Settings(length=LENGTH, rows=ROWS)
    found = dynamic.root_mean_squares(functions, params, TRAIN, settings)
    chex.assert_trees_all_equal_shapes(found, params)
    chex.assert_trees_all_close(named(found), statistics(named(params), TRAIN), **CLOSE)


@pytest.mark.usefixtures("shared_statistics")
@pytest.mark.slow
# The pull is that of the rule, or bounded by 1 / decay for almost all parameters.
@pytest.mark.parametrize("decay", [0.05, 0.9])
def test_a_text_is_scored_as_by_the_rms_rule_written_out(model, static, decay):
    functions, params = model
    settings = dynamic.Settings(0.02, decay, 1e-3, LENGTH, ROWS)
    found = dynamic.evaluate(functions, params, TRAIN, TEST, settings)
    losses = brute(named(params), TRAIN, TEST, settings)
    assert len(losses) == 8 and found.count == TEST_WORDS - 1
    assert found.total == pytest.approx(sum(losses), **LOSS)
    # The text is scored otherwise than by a model that learns nothing.
    assert found.total != pytest.approx(static(TEST).total, rel=1e-3)


@pytest.mark.slow
def test_stretches_are_of_one_program_and_cut_nothing(model, monkeypatch, compiled):
    functions, params = model
    # As those of a run that is loaded are.
    params = sharding.committed(params)
    settings = dynamic.Settings(0.02, 0.05, 1e-3, LENGTH, ROWS)
    whole = dynamic.evaluate(functions, params, TRAIN, TEST, settings)
    monkeypatch.setattr(dynamic, "_STRETCH", 3)  # of 8 segments
    compiled.clear()
    found = dynamic.evaluate(functions, params, TRAIN, TEST, settings)
    assert found.count == whole.count
    assert found.total == pytest.approx(whole.total, rel=1e-6)
    for program in ("run", "add"):
        assert sum(program in name for name in compiled) == 1


@pytest.mark.parametrize("table", ["table_VE", "output_VE", "bias_V"])
def test_rows_that_are_no_words_change_no_decay(table):
    random = np.random.default_rng(3)
    scale = {table: random.random((VOCAB, 2)), "head": {"prior_DK": random.random(4)}}
    padded = scale | {table: np.pad(scale[table], ((0, 5), (0, 0)))}
    rates, found = (dynamic._decay_rates(each, 0.1, VOCAB) for each in (scale, padded))
    found[table] = found[table][:VOCAB]
    chex.assert_trees_all_close(found, rates, rtol=1e-6)


@pytest.mark.usefixtures("shared_statistics")
def test_a_segment_is_scored_before_it_is_learnt_from(model, static):
    functions, params = model
    settings = dynamic.Settings(10.0, 0.05, 1e-3, LENGTH, ROWS)
    ids = TEST[: LENGTH + 1]
    found = dynamic.evaluate(functions, params, TRAIN, ids, settings)
    assert found.total == pytest.approx(static(ids).total, **LOSS)


@pytest.mark.usefixtures("shared_statistics")
@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_without_a_learning_rate_it_is_static_evaluation(model, static, decay):
    functions, params = model
    settings = dynamic.Settings(0.0, decay, 1e-3, LENGTH, ROWS)
    found = dynamic.evaluate(functions, params, TRAIN, TEST, settings)
    assert found.count == static(TEST).count
    assert found.total == pytest.approx(static(TEST).total, **LOSS)


@pytest.mark.slow
def test_no_dropout_and_no_weight_drop_has_a_part_in_it():
    names = ("rows", "input", "hidden", "output", "latent", "recurrent")
    settings = dynamic.Settings(0.02, 0.05, 1e-3, LENGTH, ROWS)
    found = []
    for rates in ({}, {name: 0.5 for name in names}):
        functions, params = make("awd_lstm", **rates)
        found.append(dynamic.evaluate(functions, params, TRAIN, TEST, settings))
    assert found[0] == found[1]


def test_settings_in_sums_become_settings_in_means():
    config = configs.Config()
    config.head.components, config.model.layers = 2, 3
    functions = models.make(configs.validate(config), VOCAB)
    params = jax.eval_shape(functions.init, jax.random.key(0))
    assert len(jax.tree.leaves(params)) == 17
    ptb = np.zeros(929_589, np.int32)
    found = dynamic.from_sums(0.002, 0.075, 0.001, ptb, params)
    assert f"{found.learning_rate:.2e}" == "4.64e-05"
    assert f"{found.epsilon:.2e}" == "2.32e-05"
    assert f"{found.decay:.4f}" == "0.0044"
    assert (found.length, found.rows) == (5, 100)
