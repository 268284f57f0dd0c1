"""States of several layers and positions, for heads that read them side by side."""

import functools

import chex
import jax
import numpy as np
import pytest

from softbottle import backbones
from softbottle.config import Config
from tests import tiny

ROWS, LENGTH = 2, 7


def make(backbone, layers, positions, there=3, **rates):
    config = Config()
    model = config.model
    model.backbone, model.layers, model.attention_heads = backbone, there, 2
    model.embed_dim, model.hidden_dim, model.last_dim = 5, 8, 6
    for name, rate in rates.items():
        setattr(config.regularise, name, rate)
    return config, backbones.make(config, None, layers, positions)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("train", "mutable"))
def apply(model, *arguments, **settings):
    """Compiled as one, and once for equal models."""
    return model.apply(*arguments, **settings)


def setup(model):
    """Parameters that numpy draws, and the inputs of a call."""
    shape = jax.ShapeDtypeStruct((ROWS, LENGTH, 5), np.float32)
    embedded_BSE = tiny.draw(shape, seed=1)
    segments_BS = np.ones((ROWS, LENGTH), np.int32)
    inputs = (embedded_BSE, model.initial_carry(ROWS), segments_BS)
    init = functools.partial(model.init, train=False)
    shapes = jax.eval_shape(init, jax.random.key(1), *inputs)
    return tiny.draw(shapes), inputs


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["awd_lstm", "transformer"])
def test_the_layers_below_are_those_that_the_instruments_see(backbone):
    config, wide = make(backbone, 3, 1)
    narrow = backbones.make(config)
    variables, inputs = setup(wide)
    plain, seen = jax.device_get(
        apply(narrow, variables, *inputs, train=False, mutable="intermediates")
    )
    found = jax.device_get(apply(wide, variables, *inputs, train=False))
    assert found.hidden_BSD.shape[-1] == sum(backbones.read_widths(config, 3, 1))
    last, *below = np.split(found.hidden_BSD, (6, 14), axis=-1)
    chex.assert_trees_all_close(last, plain.hidden_BSD, atol=1e-6)
    chex.assert_trees_all_close(found.raw_BSD, plain.raw_BSD, atol=1e-6)
    chex.assert_trees_all_close(found.carry, plain.carry, atol=1e-6)
    if backbone == "awd_lstm":
        expected = seen["intermediates"]["inner_BSH"][::-1]
    else:
        # What enters the last two blocks has left the two below; of root mean square 1.
        entering = seen["intermediates"]["entering_LBSD"][0][:0:-1]
        expected = [
            each / np.sqrt(np.mean(each**2, axis=-1, keepdims=True) + 1e-6)
            for each in entering
        ]
    chex.assert_trees_all_close(below, list(expected), atol=1e-6)


@pytest.mark.slow
def test_the_lower_states_of_an_lstm_are_dropped_as_the_next_layer_gets_them():
    _, wide = make("awd_lstm", 2, 1, there=2, hidden=0.5)
    variables, inputs = setup(wide)
    key = {"dropout": jax.random.key(2)}
    hidden_BSD = apply(wide, variables, *inputs, train=True, rngs=key).hidden_BSD
    gone = np.asarray(hidden_BSD)[:, :, 6:] == 0
    assert gone.any() and not gone.all()
    np.testing.assert_array_equal(gone, np.broadcast_to(gone[:, :1], gone.shape))


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["awd_lstm", "transformer", "window"])
def test_positions_are_newest_first_and_zero_before_their_segment(backbone):
    _, wide = make(backbone, 1, 3, there=1)
    _, narrow = make(backbone, 1, 1, there=1)
    variables, (embedded_BSE, carry, _) = setup(wide)
    segments_BS = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 2, 0, 0]])
    plain_BSD = apply(
        narrow,
        *(variables, embedded_BSE, narrow.initial_carry(ROWS), segments_BS),
        train=False,
    ).hidden_BSD
    plain_BSD = np.asarray(plain_BSD)
    found = apply(wide, variables, embedded_BSE, carry, segments_BS, train=False)
    expected = np.zeros((ROWS, LENGTH, 3, 6), np.float32)
    for row, place, back in np.ndindex(ROWS, LENGTH, 3):
        source = place - back
        if source >= 0 and segments_BS[row, source] == segments_BS[row, place]:
            expected[row, place, back] = plain_BSD[row, source]
    expected_BSD = expected.reshape(ROWS, LENGTH, 18)
    np.testing.assert_allclose(found.hidden_BSD, expected_BSD, atol=1e-6)
    assert found.raw_BSD.shape[-1] == 6


@pytest.mark.slow
def test_parts_of_a_stream_equal_the_whole():
    _, wide = make("awd_lstm", 2, 3, there=2)
    variables, (embedded_BSE, carry, segments_BS) = setup(wide)
    whole = apply(wide, variables, embedded_BSE, carry, segments_BS, train=False)
    parts = []
    # One that is shorter than what is read side by side, and two that are not.
    for piece in (slice(0, 1), slice(1, 4), slice(4, LENGTH)):
        trunk = apply(
            wide,
            *(variables, embedded_BSE[:, piece], carry, segments_BS[:, piece]),
            train=False,
        )
        carry = trunk.carry
        parts.append(trunk.hidden_BSD)
    joined_BSD = np.concatenate(parts, axis=1)
    chex.assert_trees_all_close(joined_BSD, whole.hidden_BSD, atol=1e-6)
    chex.assert_trees_all_close(carry, whole.carry, atol=1e-6)


def test_a_transformer_still_carries_nothing():
    _, wide = make("transformer", 2, 3)
    assert wide.initial_carry(ROWS) == ()


@pytest.mark.parametrize("backbone, there", [("window", 1), ("awd_lstm", 3)])
def test_more_layers_than_there_are_are_refused(backbone, there):
    with pytest.raises(
        ValueError, match=f"reads 4 layers, but the {backbone} has {there}"
    ):
        make(backbone, 4, 1)
