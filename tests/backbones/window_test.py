import functools

import chex
import jax
import numpy as np
import pytest

from softbottle import backbones
from softbottle.backbones import dropout, window
from softbottle.config import Config
from tests import tiny

ROWS, LENGTH, ORDER, EMBED = 2, 7, 3, 5


def make(order=ORDER, **fields):
    return window.Window(order, EMBED, hidden_dim=11, last_dim=3, **fields)


def embed(rows=ROWS, length=LENGTH):
    size = (rows, length, EMBED)
    return np.random.default_rng(0).standard_normal(size).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0, static_argnames="train")
def apply(model, *inputs, **settings):
    """Compiled as one, and once for equal models."""
    return model.apply(*inputs, **settings)


def setup(model, segments_BS=None):
    """Parameters that numpy draws, and the inputs of a call."""
    embedded_BSE, carry = embed(), model.initial_carry(ROWS)
    if segments_BS is None:
        segments_BS = np.ones((ROWS, LENGTH), np.int32)
    inputs = (embedded_BSE, carry, segments_BS)
    init = functools.partial(model.init, train=False)
    return tiny.draw(jax.eval_shape(init, jax.random.key(1), *inputs)), inputs


@pytest.mark.slow
def test_states_equal_a_loop_over_positions_and_words():
    model = make()
    segments_BS = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 2, 0, 0]])
    variables, inputs = setup(model, segments_BS)
    inner, outer = (variables["params"][name] for name in ("inner", "outer"))
    embedded_BSE = np.asarray(inputs[0])
    expected_BSD = np.zeros((ROWS, LENGTH, 3))
    for row, position in np.ndindex(ROWS, LENGTH):
        words = []
        for source in range(position - ORDER + 1, position + 1):
            inside = (
                source >= 0 and segments_BS[row, source] == segments_BS[row, position]
            )
            words.append(embedded_BSE[row, source] if inside else np.zeros(EMBED))
        hidden_H = np.tanh(np.concatenate(words) @ inner["kernel"] + inner["bias"])
        expected_BSD[row, position] = hidden_H @ outer["kernel"] + outer["bias"]
    trunk = apply(model, variables, *inputs, train=False)
    chex.assert_trees_all_close(trunk.raw_BSD, expected_BSD.astype("f4"), atol=1e-5)
    chex.assert_trees_all_equal(trunk.hidden_BSD, trunk.raw_BSD)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 3])
def test_parts_of_a_stream_equal_the_whole(order):
    model = make(order)
    variables, (embedded_BSE, carry, segments_BS) = setup(model)
    whole = apply(model, variables, embedded_BSE, carry, segments_BS, train=False)
    parts = []
    # One that is shorter than the window of three words, and two that are not.
    for piece in (slice(0, 1), slice(1, 4), slice(4, LENGTH)):
        trunk = apply(
            *(model, variables, embedded_BSE[:, piece], carry, segments_BS[:, piece]),
            train=False,
        )
        carry = trunk.carry
        parts.append(trunk.raw_BSD)
    raw_BSD = np.concatenate(parts, axis=1)
    chex.assert_trees_all_close(raw_BSD, whole.raw_BSD, atol=1e-6)
    chex.assert_trees_all_equal(carry, whole.carry)


def test_padding_leaves_the_carry_at_the_last_true_word():
    model = make()
    variables, (embedded_BSE, carry, segments_BS) = setup(model)
    padded_BS = np.where(np.arange(LENGTH)[None] < 4, segments_BS, 0)
    padded = apply(model, variables, embedded_BSE, carry, padded_BS, train=False)
    short = apply(
        *(model, variables, embedded_BSE[:, :4], carry, segments_BS[:, :4]), train=False
    )
    chex.assert_trees_all_equal(padded.carry, short.carry)
    chex.assert_trees_all_close(
        np.asarray(padded.raw_BSD)[:, :4], short.raw_BSD, atol=1e-6
    )


def test_output_dropout_is_locked_and_off_in_evaluation():
    model = make(rates=dropout.Rates(output=0.5))
    variables, inputs = setup(model)
    rngs = {"dropout": jax.random.key(2)}
    trunk = apply(model, variables, *inputs, train=True, rngs=rngs)
    ratio_BSD = np.asarray(trunk.hidden_BSD) / np.asarray(trunk.raw_BSD)
    assert set(np.unique(np.round(ratio_BSD, 3))) == {0, 2}
    assert np.max(np.ptp(ratio_BSD, axis=1)) < 1e-5
    still = apply(model, variables, *inputs, train=False)
    chex.assert_trees_all_equal(still.hidden_BSD, trunk.raw_BSD)


def test_the_factory_reads_the_config():
    config = Config()
    config.model.backbone, config.model.order = "window", 2
    config.model.embed_dim, config.model.hidden_dim, config.model.last_dim = 5, 11, 3
    config.regularise.output = 0.25
    assert backbones.make(config) == make(2, rates=dropout.Rates(output=0.25))
    config.model.backbone = "mlp"
    with pytest.raises(ValueError, match="'mlp'"):
        backbones.make(config)
