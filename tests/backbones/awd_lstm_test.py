import functools

import chex
import jax
import numpy as np
import pytest

from softbottle import backbones
from softbottle.backbones import awd_lstm, dropout
from softbottle.config import Config
from tests.ops import devices

ROWS, LENGTH, WIDTHS = 3, 11, (5, 7, 7, 2)


def make_key(seed):
    """The generator that compiles fastest."""
    return jax.random.key(seed, impl="unsafe_rbg")


def make(**fields):
    return awd_lstm.AwdLstm(WIDTHS, **({"unroll": 1} | fields))


def embed(seed=0, rows=ROWS, length=LENGTH, dim=WIDTHS[0]):
    size = (rows, length, dim)
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def ones(embedded_BSE):
    return np.ones(embedded_BSE.shape[:2], np.int32)


@pytest.fixture(scope="module")
def variables():
    model, embedded_BSE = make(), embed()
    carry = model.initial_carry(ROWS)
    segments_BS = ones(embedded_BSE)
    init = jax.jit(model.init, static_argnames="train")
    return init(make_key(1), embedded_BSE, carry, segments_BS, train=False)


@functools.partial(jax.jit, static_argnums=0, static_argnames="train")
def apply(model, *inputs, **settings):
    """Compiled once for equal models."""
    return model.apply(*inputs, **settings)


def run(model, variables, embedded_BSE, carry=None, segments_BS=None, key=None):
    """Apply in training mode if there is a key."""
    carry = model.initial_carry(embedded_BSE.shape[0]) if carry is None else carry
    segments_BS = ones(embedded_BSE) if segments_BS is None else segments_BS
    rngs = None if key is None else {"dropout": make_key(key)}
    inputs = (variables, embedded_BSE, carry, segments_BS)
    return jax.device_get(apply(model, *inputs, train=key is not None, rngs=rngs))


@pytest.mark.parametrize(
    "widths, head_and_table, total",
    [
        ((280, 960, 960, 620), 10_000 * 281 + 620 * 15 * 281 + 15 * 280, 21_500_620),
        ((300, 1150, 1150, 650), 33_278 * 301 + 650 * 15 * 301 + 15 * 300, 34_909_528),
        ((400, 1150, 1150, 400), 10_000 * 401, 24_221_600),
        ((400, 1150, 1150, 400), 33_278 * 401, 33_556_078),
        ((1024, 1024, 1024), 100_000 * 1025, 119_293_600),
        ((900, 1024, 1024), 100_000 * 901 + 1024 * 7 * 901 + 7 * 900, 112_850_364),
    ],
    ids=["ptb mos", "wt2 mos", "ptb awd", "wt2 awd", "lm1b softmax", "lm1b mos"],
)
def test_layers_have_the_papers_parameter_counts(widths, head_and_table, total):
    config = Config()
    config.model.embed_dim, *inner, config.model.last_dim = widths
    config.model.hidden_dim, config.model.layers = inner[0], len(widths) - 1
    model = backbones.make(config)
    assert model.widths == widths
    embedded_BSE = embed(rows=1, length=1, dim=widths[0])
    variables = jax.eval_shape(
        lambda key: model.init(
            *(key, embedded_BSE, model.initial_carry(1), ones(embedded_BSE)),
            train=False,
        ),
        make_key(0),
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    assert count == total - head_and_table


@pytest.mark.slow
def test_parameters_start_uniform_within_one_over_root_of_the_width(variables):
    for index, size in enumerate(WIDTHS[1:]):
        layer = variables["params"][f"layer_{index}"]
        assert set(layer) == set(awd_lstm.lstm.Weights._fields)
        values = np.concatenate([np.ravel(leaf) for leaf in layer.values()])
        assert np.max(np.abs(values)) <= size**-0.5
        assert abs(np.std(values) * np.sqrt(3 * size) - 1) < 0.25


def test_evaluation_drops_nothing(variables):
    model = make(rates=dropout.Rates(0.5, 0.5, 0.5, 0.5))
    chex.assert_trees_all_equal(
        run(model, variables, embed()), run(make(), variables, embed())
    )
    trunk = run(model, variables, embed())
    chex.assert_trees_all_equal(trunk.hidden_BSD, trunk.raw_BSD)


@pytest.mark.slow
def test_weight_drop_acts_in_training_with_one_mask_a_call(variables):
    model = make(rates=dropout.Rates(recurrent=0.5))
    still = run(model, variables, embed())
    first, again, other = (run(model, variables, embed(), key=k) for k in (1, 1, 2))
    chex.assert_trees_all_equal(first, again)
    # The first position of a zero state does not touch the recurrent weights.
    chex.assert_trees_all_close(first.raw_BSD[:, 0], still.raw_BSD[:, 0], atol=1e-6)
    assert np.max(np.abs(first.raw_BSD - still.raw_BSD)) > 1e-3
    assert np.max(np.abs(first.raw_BSD - other.raw_BSD)) > 1e-3
    # Equal rows stay equal: the mask belongs to the weights, not to a row.
    twins_BSE = np.broadcast_to(embed(rows=1), (ROWS, LENGTH, WIDTHS[0]))
    raw_BSD = run(model, variables, twins_BSE, key=1).raw_BSD
    chex.assert_trees_all_close(raw_BSD[0], raw_BSD[1], atol=1e-6)


@pytest.mark.slow
def test_weight_drop_masks_the_gradient_of_every_layer(variables):
    model = make(rates=dropout.Rates(recurrent=0.5))

    @jax.jit
    @jax.grad
    def gradient(variables):
        embedded_BSE = embed()
        return model.apply(
            *(variables, embedded_BSE, model.initial_carry(ROWS), ones(embedded_BSE)),
            train=True,
            rngs={"dropout": make_key(5)},
        ).raw_BSD.sum()

    for bars in gradient(variables)["params"].values():
        assert 0.2 < np.mean(np.asarray(bars["recurrent_HG"]) == 0) < 0.8
        assert np.all(np.asarray(bars["input_IG"]) != 0)


@pytest.mark.slow
def test_output_dropout_is_locked_over_time_and_drawn_for_every_row(variables):
    rows = 41
    model = make(rates=dropout.Rates(output=0.5))
    trunk = run(model, variables, embed(rows=rows), key=1)
    ratio_BSD = trunk.hidden_BSD / trunk.raw_BSD
    assert np.all(np.isclose(ratio_BSD, 0) | np.isclose(ratio_BSD, 2))
    assert np.max(np.ptp(ratio_BSD, axis=1)) < 1e-5
    assert 0.25 < np.mean(ratio_BSD == 0) < 0.75
    assert np.max(np.ptp(ratio_BSD, axis=0)) > 1


@pytest.mark.parametrize("rates", [dropout.Rates(input=0.5), dropout.Rates(hidden=0.5)])
def test_locked_dropout_of_inputs_and_layers_differs_between_rows(variables, rates):
    model = make(rates=rates)
    twins_BSE = np.broadcast_to(embed(rows=1), (ROWS, LENGTH, WIDTHS[0]))
    trunk = run(model, variables, twins_BSE, key=1)
    assert np.max(np.abs(trunk.raw_BSD[0] - trunk.raw_BSD[1])) > 1e-3
    chex.assert_trees_all_equal(trunk.hidden_BSD, trunk.raw_BSD)


@pytest.mark.slow
def test_two_halves_of_a_stream_equal_the_whole(variables):
    model, embedded_BSE = make(), embed()
    whole = run(model, variables, embedded_BSE)
    first = run(model, variables, embedded_BSE[:, :4])
    second = run(model, variables, embedded_BSE[:, 4:], first.carry)
    halves_BSD = np.concatenate([first.raw_BSD, second.raw_BSD], axis=1)
    chex.assert_trees_all_close(halves_BSD, whole.raw_BSD, atol=1e-6)
    chex.assert_trees_all_close(second.carry, whole.carry, atol=1e-6)


def test_padding_at_the_end_changes_nothing(variables):
    model, embedded_BSE = make(), embed()
    segments_BS = ones(embedded_BSE)
    segments_BS[:, 6:] = 0
    short = run(model, variables, embedded_BSE[:, :6])
    padded = run(model, variables, embedded_BSE, segments_BS=segments_BS)
    chex.assert_trees_all_close(padded.carry, short.carry, atol=1e-6)
    chex.assert_trees_all_close(padded.raw_BSD[:, :6], short.raw_BSD, atol=1e-6)
    assert not np.any(padded.raw_BSD[:, 6:])


@pytest.mark.slow
def test_scan_and_wavefront_agree_under_all_dropout(variables):
    rates = dropout.Rates(0.2, 0.3, 0.4, 0.5)
    trunks = [
        run(make(rates=rates, implementation=name), variables, embed(), key=1)
        for name in ("scan", "wavefront")
    ]
    chex.assert_trees_all_close(*trunks, atol=1e-6)


def test_the_recurrence_is_chosen_for_the_device_that_is_given(variables):
    fields = {"compute_dtype": "bfloat16", "device": devices.A100}
    with pytest.raises(ValueError, match="needs a Hopper GPU, got NVIDIA A100"):
        run(make(implementation="persistent", **fields), variables, embed())
    trunks = [
        run(make(implementation=name, **fields), variables, embed())
        for name in ("auto", "wavefront")
    ]
    chex.assert_trees_all_equal(*trunks)


def test_bfloat16_products_leave_float32_states(variables):
    trunk = run(make(compute_dtype="bfloat16"), variables, embed())
    exact = run(make(), variables, embed())
    chex.assert_trees_all_equal_shapes_and_dtypes(trunk, exact)
    chex.assert_trees_all_close(trunk, exact, atol=0.02)
