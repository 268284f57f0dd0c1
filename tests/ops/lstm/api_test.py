import dataclasses
import functools
import logging
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.lstm import api as lstm
from tests.ops import devices

SIZES = (5, 7, 11, 3)  # inputs, then three layers
STEPS, ROWS = 13, 3
EVERYWHERE = ("scan", "wavefront")  # gpu_test.py has the third


@pytest.fixture(autouse=True)
def _strict():
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


def make_problem(dtype=np.float32, sizes=SIZES, steps=STEPS, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jax.device_put((0.4 * rng.normal(size=shape)).astype(dtype))

    layers = [
        lstm.Weights(normal(i, 4 * h), normal(h, 4 * h), normal(4 * h), normal(4 * h))
        for i, h in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    carries = [lstm.Carry(normal(rows, h), normal(rows, h)) for h in sizes[1:]]
    masks = [(rng.integers(0, 2, (rows, h)) / 0.7).astype(dtype) for h in sizes[1:-1]]
    return normal(steps, rows, sizes[0]), carries, layers, masks


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_layer(inputs_SBI, carry, weights):
    """Torch's formulas, one row, one position and one gate at a time."""
    size = carry.hidden_BH.shape[1]
    hidden_BH, cell_BH = np.array(carry.hidden_BH), np.array(carry.cell_BH)
    outputs = []
    for inputs_BI in np.asarray(inputs_SBI):
        for row, inputs_I in enumerate(inputs_BI):
            gate = {}
            for order, name in enumerate("ifgo"):
                cut = slice(order * size, (order + 1) * size)
                gate[name] = (
                    inputs_I @ np.asarray(weights.input_IG)[:, cut]
                    + np.asarray(weights.input_bias_G)[cut]
                    + hidden_BH[row] @ np.asarray(weights.recurrent_HG)[:, cut]
                    + np.asarray(weights.recurrent_bias_G)[cut]
                )
            cell_BH[row] *= sigmoid(gate["f"])
            cell_BH[row] += sigmoid(gate["i"]) * np.tanh(gate["g"])
            hidden_BH[row] = sigmoid(gate["o"]) * np.tanh(cell_BH[row])
        outputs.append(hidden_BH.copy())
    return np.stack(outputs), lstm.Carry(hidden_BH, cell_BH)


def plain_stack(inputs_SBI, carries, layers, masks):
    """A scan by the book, for `jax.grad` to differentiate."""
    finals = []
    for index, (carry, weights) in enumerate(zip(carries, layers, strict=True)):

        def step(state, inputs_BI, weights=weights):
            z_BG = inputs_BI @ weights.input_IG + state[0] @ weights.recurrent_HG
            z_BG += (weights.input_bias_G + weights.recurrent_bias_G)[None]
            i, f, g, o = jnp.split(z_BG, 4, axis=1)
            cell_BH = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden_BH = jax.nn.sigmoid(o) * jnp.tanh(cell_BH)
            return lstm.Carry(hidden_BH, cell_BH), hidden_BH

        final, outputs_SBH = jax.lax.scan(step, carry, inputs_SBI)
        finals.append(final)
        inputs_SBI = outputs_SBH
        if index < len(masks):
            inputs_SBI = outputs_SBH * masks[index][None]
    return outputs_SBH, tuple(finals)


def scalar(outputs):
    """Mix every output and every final state into one number, unevenly."""
    leaves = jax.tree.leaves(outputs)
    return sum(jnp.sum(jnp.sin((n + 1) * leaf)) for n, leaf in enumerate(leaves))


def value_and_grads(run, *arguments):
    loss = jax.value_and_grad(lambda *a: scalar(run(*a)), argnums=(0, 1, 2))
    return jax.jit(loss)(*arguments)


@pytest.mark.slow
def test_one_layer_equals_the_formulas_of_pytorch():
    inputs_SBI, (carry, *_), (weights, *_), _ = make_problem()
    chex.assert_trees_all_close(
        jax.jit(lstm.lstm)(inputs_SBI, carry, weights),
        numpy_layer(inputs_SBI, carry, weights),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.slow
def test_both_forms_equal_a_differentiated_scan():
    with jax.enable_x64(True):
        *arguments, masks = make_problem("float64")
        expected = value_and_grads(lambda *a: plain_stack(*a, masks), *arguments)
        for implementation in EVERYWHERE:
            options = {"implementation": implementation, "unroll": 2}
            ours = value_and_grads(
                lambda *a, o=options: lstm.stack(*a, masks, **o), *arguments
            )
            chex.assert_trees_all_close(ours, expected, rtol=1e-10, atol=1e-9)


def plain_rows(lengths, masks, inputs_SBI, carries, layers):
    """Every row on its own, without its padding."""
    rows = []
    for row, length in enumerate(lengths):
        states, factors = jax.tree.map(
            operator.itemgetter(slice(row, row + 1)), (carries, masks)
        )
        part_SBI = inputs_SBI[:length, row][:, None]
        outputs_SBH, finals = plain_stack(part_SBI, states, layers, factors)
        padding = ((0, len(inputs_SBI) - length), (0, 0), (0, 0))
        rows.append((jnp.pad(outputs_SBH, padding), finals))
    outputs_SBH = jnp.concatenate([row[0] for row in rows], axis=1)
    finals = jax.tree.map(lambda *a: jnp.concatenate(a), *[row[1] for row in rows])
    return outputs_SBH, finals


@pytest.mark.slow
def test_padding_changes_neither_state_nor_gradient():
    # In float32, and the first row has none.
    *arguments, masks = make_problem(sizes=SIZES[:3], rows=2)
    lengths = (STEPS, 6)
    valid_SB = np.arange(STEPS)[:, None] < np.array(lengths)[None]
    expected = value_and_grads(lambda *a: plain_rows(lengths, masks, *a), *arguments)
    for implementation in EVERYWHERE:
        ours = value_and_grads(
            lambda *a, i=implementation: lstm.stack(
                *a, masks, valid_SB, implementation=i
            ),
            *arguments,
        )
        chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-4)
        input_bar_SBI = np.asarray(ours[1][0])
        assert not np.any(input_bar_SBI[~valid_SB])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_a_row_of_padding_keeps_its_state_to_the_bit(implementation):
    inputs_SBI, carries, layers, masks = make_problem(sizes=SIZES[:3])
    valid_SB = np.arange(ROWS)[None] != np.ones((STEPS, 1), int)
    run = jax.jit(functools.partial(lstm.stack, implementation=implementation))
    results = run(inputs_SBI, carries, layers, masks, valid_SB)
    outputs_SBH, finals = jax.tree.map(np.asarray, results)
    row = jax.tree.map(lambda leaf: np.asarray(leaf)[1], (finals, tuple(carries)))
    chex.assert_trees_all_equal(*row)
    assert not np.any(outputs_SBH[:, 1])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_two_halves_equal_the_whole(implementation):
    # Of one length, so that one program runs them.
    inputs_SBI, carries, layers, masks = make_problem(sizes=SIZES[:3], steps=14)
    inputs_SBI = np.asarray(inputs_SBI)

    @jax.jit
    def run(inputs_SBI, carries):
        return lstm.stack(
            inputs_SBI, carries, layers, masks, implementation=implementation
        )

    whole_SBH, whole = run(inputs_SBI, tuple(carries))
    first_SBH, middle = run(inputs_SBI[:7], tuple(carries))
    second_SBH, last = run(inputs_SBI[7:], middle)
    halves_SBH = np.concatenate([first_SBH, second_SBH])
    chex.assert_trees_all_close((halves_SBH, last), (whole_SBH, whole), atol=1e-6)


@pytest.mark.slow
def test_bfloat16_products_stay_near_float32_and_keep_every_dtype():
    *arguments, masks = make_problem(sizes=SIZES[:3])
    exact, rounded = (
        value_and_grads(
            lambda *a, d=dtype: lstm.stack(
                *a, masks, implementation="wavefront", compute_dtype=d
            ),
            *arguments,
        )
        for dtype in ("float32", "bfloat16")
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(rounded, exact)
    for ours, theirs in zip(*map(jax.tree.leaves, (rounded, exact)), strict=True):
        error = np.linalg.norm(np.ravel(np.subtract(ours, theirs)))
        assert 0 < error < 0.03 * np.linalg.norm(np.ravel(theirs))


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_weight_gradients_are_not_accumulated_in_the_loop(implementation):
    inputs_SBI, carries, layers, masks = make_problem(sizes=SIZES[:3])

    def run(layers):
        return scalar(
            lstm.stack(
                inputs_SBI, carries, layers, masks, implementation=implementation
            )
        )

    results = [
        variable.aval.shape
        for equation in jax.make_jaxpr(jax.grad(run))(layers).eqns
        if equation.primitive.name == "scan"
        for variable in equation.outvars
    ]
    # States and gates end in [B, H] or [B, G]; a weight would end in [H, G].
    assert {shape[-2] for shape in results} == {ROWS}


@pytest.mark.slow
def test_masked_recurrent_weights_get_masked_gradients():
    inputs_SBI, (carry, *_), (weights, *_), _ = make_problem()
    mask_HG = (np.arange(7 * 28).reshape(7, 28) % 3 == 0).astype(np.float32)

    def run(recurrent_HG):
        dropped = weights._replace(recurrent_HG=recurrent_HG * mask_HG)
        return scalar(lstm.lstm(inputs_SBI, carry, dropped))

    bar_HG = jax.jit(jax.grad(run))(weights.recurrent_HG)
    np.testing.assert_array_equal(np.asarray(bar_HG) != 0, mask_HG != 0)


def test_wrong_arguments_are_named():
    inputs_SBI, carries, layers, masks = make_problem()
    with pytest.raises(ValueError, match="'loop'"):
        lstm.stack(inputs_SBI, carries, layers, implementation="loop")
    with pytest.raises(ValueError, match="take 3 states, got 2"):
        lstm.stack(inputs_SBI, carries[1:], layers)
    with pytest.raises(ValueError, match="take 2 masks, got 1"):
        lstm.stack(inputs_SBI, carries, layers, masks[1:])


@pytest.fixture
def _recent_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


@pytest.mark.parametrize(
    "implementation, sizes, rows, dtype, device, count, chosen",
    [
        ("auto", (960, 960, 620), 12, "bfloat16", devices.H200, 1, "persistent"),
        ("auto", (960, 960, 620), 12, "float32", devices.H200, 1, "wavefront"),
        # Its states fit in two pieces of the batch, and not in more.
        ("auto", (1150, 1150), 20, "bfloat16", devices.H200, 1, "persistent"),
        ("auto", (1150, 1150), 33, "bfloat16", devices.H200, 1, "wavefront"),
        ("auto", (960, 960, 620), 12, "bfloat16", devices.H200, 8, "wavefront"),
        ("auto", (960, 960, 620), 12, "bfloat16", devices.A100, 1, "wavefront"),
        ("auto", (7,), 3, "bfloat16", devices.CPU, 1, "wavefront"),
        # Who asks for the kernels by name says that one device runs them.
        ("persistent", (960,), 12, "bfloat16", devices.H200, 8, "persistent"),
        ("wavefront", (960,), 12, "bfloat16", devices.H200, 1, "wavefront"),
        ("scan", (7,), 3, "float32", devices.CPU, 1, "scan"),
    ],
)
@pytest.mark.usefixtures("_recent_jax")
def test_the_choice_follows_from_its_arguments(
    implementation, sizes, rows, dtype, device, count, chosen
):
    device = dataclasses.replace(device, count=count)
    choice = lstm.choose(implementation, sizes, rows, dtype, device)
    assert choice == chosen


def test_a_choice_that_cannot_run_is_an_error_only_if_it_was_asked_for():
    layers = ((960, 960), 12, "bfloat16", devices.A100)
    with pytest.raises(ValueError, match="'persistent' needs a Hopper GPU, got NVIDIA"):
        lstm.choose("persistent", *layers)
    assert lstm.choose("auto", *layers) == "wavefront"
    with pytest.raises(ValueError, match="'loop'"):
        lstm.choose("loop", *layers)


def test_an_automatic_choice_is_explained_in_the_log_once(caplog):
    with caplog.at_level(logging.INFO, logger="softbottle"):
        for _ in range(2):
            device = dataclasses.replace(devices.CPU, count=97)
            lstm.choose("auto", (7,), 3, "bfloat16", device)
    expected = "LSTM: wavefront (persistent: needs one GPU, got 97 x cpu)."
    assert caplog.messages == [expected]


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_no_device_is_asked_for_where_nothing_depends_on_it(
    implementation, monkeypatch
):
    inputs_SBI, carries, layers, masks = make_problem()

    def refuse():
        raise AssertionError("jax was asked for its devices")

    monkeypatch.setattr(lstm.device_lib, "at_hand", refuse)
    for where in (
        {"implementation": implementation},
        {"implementation": "auto", "device": devices.CPU},
    ):
        stack = functools.partial(lstm.stack, **where)
        jax.eval_shape(stack, inputs_SBI, carries, layers, masks)
