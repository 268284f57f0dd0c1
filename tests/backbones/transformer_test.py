import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle import backbones
from softbottle.backbones import dropout, transformer
from softbottle.config import Config
from tests import tiny

ROWS, LENGTH, DIM = 2, 11, 12


def make_key(seed):
    """The generator that compiles fastest."""
    return jax.random.key(seed, impl="unsafe_rbg")


def make(**fields):
    sizes = {"layers": 2, "attention_heads": 3, "hidden_dim": DIM, "last_dim": DIM}
    return transformer.Transformer(**(sizes | fields))


def embed(dim=DIM):
    size = (ROWS, LENGTH, dim)
    return np.random.default_rng(0).standard_normal(size).astype(np.float32)


ONES = np.ones((ROWS, LENGTH), np.int32)


def shapes_of(model, dim=DIM):
    """Shapes of the parameters, without the cost of drawing them."""
    arguments = (make_key(1), embed(dim), (), ONES)
    return jax.eval_shape(lambda *a: model.init(*a, train=False), *arguments)


@pytest.fixture(scope="module")
def variables():
    return tiny.draw(shapes_of(make()))


@functools.partial(jax.jit, static_argnums=0, static_argnames="train")
def apply(model, *inputs, **settings):
    """Compiled once for equal models."""
    return model.apply(*inputs, **settings)


def run(model, variables, embedded_BSE, segments_BS=ONES, key=None):
    """Apply in training mode if there is a key."""
    rngs = None if key is None else {"dropout": make_key(key)}
    inputs = (variables, embedded_BSE, (), segments_BS)
    return jax.device_get(apply(model, *inputs, train=key is not None, rngs=rngs))


def normalise(values_SD, scale_D):
    return values_SD / np.sqrt(np.mean(values_SD**2, 1, keepdims=True) + 1e-6) * scale_D


def turn(values_SH):
    """Rotary positions as multiplication by exp(i angle)."""
    half = values_SH.shape[1] // 2
    angle_SH = np.outer(np.arange(LENGTH), 10_000.0 ** (-np.arange(half) / half))
    turned = (values_SH[:, :half] + 1j * values_SH[:, half:]) * np.exp(1j * angle_SH)
    return np.concatenate([turned.real, turned.imag], axis=1)


def numpy_states(params, hidden_SD):
    """One row of one segment, head by head and position by position."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    blocks = params["blocks"]
    for layer in range(blocks["query_LDNH"].shape[0]):
        p = {name.split("_L")[0]: leaf[layer] for name, leaf in blocks.items()}
        x_SD, change_SD = normalise(hidden_SD, p["attention_scale"]), 0
        for head in range(p["query"].shape[1]):
            query_SH, key_SH = (turn(x_SD @ p[n][:, head]) for n in ("query", "key"))
            value_SH = x_SD @ p["value"][:, head]
            for position in range(LENGTH):
                seen = slice(0, position + 1)
                score = np.exp(
                    key_SH[seen] @ query_SH[position] / query_SH.shape[1] ** 0.5
                )
                mixed_H = score / score.sum() @ value_SH[seen]
                one_hot_S1 = np.eye(LENGTH)[:, [position]]
                change_SD = change_SD + one_hot_S1 * (mixed_H @ p["out"][head])
        hidden_SD = hidden_SD + change_SD
        x_SD = normalise(hidden_SD, p["inner_scale"])
        gate_SF = x_SD @ p["gate"]
        gated_SF = gate_SF / (1 + np.exp(-gate_SF)) * (x_SD @ p["up"])
        hidden_SD = hidden_SD + gated_SF @ p["down"]
    return normalise(hidden_SD, params["last_scale_D"])


def test_states_equal_a_loop_over_heads_and_positions(variables):
    raw_BSD = run(make(), variables, embed()).raw_BSD
    rows = [numpy_states(variables["params"], np.asarray(row)) for row in embed()]
    chex.assert_trees_all_close(raw_BSD, np.stack(rows).astype("f4"), atol=1e-5)


def test_later_words_leave_earlier_states_alone(variables):
    embedded_BSD = embed()
    changed_BSD = embedded_BSD.copy()
    changed_BSD[:, 6] += 1.0
    before = run(make(), variables, embedded_BSD).raw_BSD
    after = run(make(), variables, changed_BSD).raw_BSD
    chex.assert_trees_all_equal(before[:, :6], after[:, :6])
    assert np.all(np.max(np.abs(before[:, 6:] - after[:, 6:]), axis=-1) > 1e-4)


@pytest.mark.slow
def test_segments_do_not_see_each_other(variables):
    segments_BS = np.repeat([[1, 2, 0]], [4, 5, 2], axis=1) * ONES
    packed = run(make(), variables, embed(), segments_BS).raw_BSD
    first = run(make(), variables, embed()[:, :4], ONES[:, :4]).raw_BSD
    second = run(make(), variables, embed()[:, 4:9], ONES[:, :5]).raw_BSD
    chex.assert_trees_all_close(packed[:, :4], first, atol=1e-5)
    # Rotary positions are relative, so it does not matter where a segment begins.
    chex.assert_trees_all_close(packed[:, 4:9], second, atol=1e-5)
    assert np.all(np.isfinite(packed))


@pytest.mark.slow
def test_scanned_and_recomputed_layers_give_the_same_numbers(variables):
    def value_and_grads(**fields):
        model = make(rates=dropout.Rates(hidden=0.3), **fields)

        def loss(variables):
            inputs, rngs = (variables, embed(), (), ONES), {"dropout": make_key(4)}
            return jnp.sum(apply(model, *inputs, train=True, rngs=rngs)[0] ** 2)

        return jax.jit(jax.value_and_grad(loss))(variables)

    plain = value_and_grads()
    both = value_and_grads(scan_layers=True, remat=True)
    chex.assert_trees_all_close(both, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_blocks_start_with_variance_one_over_fan_in():
    arguments = (make_key(1), embed(), (), ONES)
    init = jax.jit(make().init, static_argnames="train")
    params = init(*arguments, train=False)["params"]
    for name, fan_in in (("query_LDNH", DIM), ("down_LFD", 32 * 2 * 2)):
        deviation = np.std(np.asarray(params["blocks"][name]))
        assert abs(deviation * np.sqrt(fan_in) - 1) < 0.15


def test_ends_are_projected_only_where_widths_differ(variables):
    assert set(variables["params"]) == {"blocks", "last_scale_D"}
    model = make(last_dim=5)
    wider = shapes_of(model, dim=7)
    assert wider["params"]["project_in_ED"].shape == (7, DIM)
    assert wider["params"]["project_out_ED"].shape == (DIM, 5)
    trunk = jax.eval_shape(
        lambda *a: model.apply(*a, (), ONES, train=False), wider, embed(7)
    )
    assert trunk.hidden_BSD.shape == (ROWS, LENGTH, 5)


def test_blocks_have_the_expected_parameters(variables):
    inner = 32  # 8/3 of 12
    per_layer = 4 * DIM * DIM + 3 * DIM * inner + 2 * DIM
    count = sum(leaf.size for leaf in jax.tree.leaves(variables))
    assert count == 2 * per_layer + DIM


@pytest.mark.slow
def test_dropout_acts_in_training_only(variables):
    model = make(rates=dropout.Rates(hidden=0.3, output=0.5))
    still = run(model, variables, embed())
    chex.assert_trees_all_equal(still, run(make(), variables, embed()))
    first, other = (run(model, variables, embed(), key=key) for key in (1, 2))
    assert np.max(np.abs(first.raw_BSD - still.raw_BSD)) > 1e-2
    assert np.max(np.abs(first.raw_BSD - other.raw_BSD)) > 1e-2
    assert 0.25 < np.mean(np.asarray(first.hidden_BSD) == 0) < 0.75


def test_bfloat16_activations_stay_near_float32(variables):
    rounded = run(make(compute_dtype="bfloat16"), variables, embed())
    exact = run(make(), variables, embed())
    chex.assert_trees_all_equal_shapes_and_dtypes(rounded, exact)
    chex.assert_trees_all_close(rounded.raw_BSD, exact.raw_BSD, atol=0.1)


def test_the_factory_reads_the_config():
    config = Config()
    model = config.model
    model.backbone, model.layers, model.attention_heads = "transformer", 2, 3
    model.hidden_dim, model.last_dim, model.remat = DIM, DIM, True
    assert backbones.make(config) == make(remat=True)
    with pytest.raises(ValueError, match="attention_heads=5"):
        shapes_of(make(attention_heads=5))
