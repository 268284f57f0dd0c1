import functools
import importlib.util
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from softbottle.ops.mixture import blocked, options, pallas_tpu
from softbottle.ops.mixture.activations import (
    SIGSOFTMAX,
    SOFTMAX,
    Activation,
    generalized,
    piecewise_even,
    segments,
)
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops.mixture.problem import make_problem, paired

GSS = Activation(generalized, (-1.5, 2.5))
AUTO = jax.sharding.AxisType.Auto
ACTIVATIONS = {
    "mos": SOFTMAX,
    "moss": SIGSOFTMAX,
    "gss_mixed": GSS,
    "softcap": oracle.CASES["softcap"].head.activation({}),
}
# (tokens, components, width, rows of the table)
SHAPES = {
    "bf16, d=280": ((840, 15, 280, 10_000), jnp.bfloat16),
    "float32, d=280": ((840, 15, 280, 10_000), jnp.float32),
    "bf16, d=1024": ((2560, 10, 1024, 100_000), jnp.bfloat16),
    "float32, d=1024": ((1024, 10, 1024, 100_000), jnp.float32),
    "bf16, d=4096": ((4096, 1, 4096, 128_256), jnp.bfloat16),
    "float32, d=4099": ((5, 3, 4099, 1337), jnp.float32),
}


@pytest.fixture
def interpreted():
    with pltpu.force_tpu_interpret_mode():
        yield


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 128 rows and 128 words, and a width in pieces of 32."""
    monkeypatch.setattr(pallas_tpu, "WHOLE_ROWS", ())
    monkeypatch.setattr(pallas_tpu, "SPLIT_ROWS", (128, 128, 128))


def make_inputs(tokens=11, components=3, width=7, rows=37, scale=1.0):
    """Context, table, bias and a cotangent of the log-normalisers, in float64."""
    rng = np.random.default_rng(0)
    shapes = (tokens, components, width), (rows, width), (rows,), (tokens, components)
    context_TKE, *rest = (rng.normal(size=shape) for shape in shapes)
    return scale * context_TKE, *rest


def dense(name, inputs, vocab=None):
    """Log-normalisers and the gradients of context, table and bias, in float64."""
    context_TKE, table_VE, bias_V, bar_TK = inputs
    case = oracle.CASES[name]
    z_TKV = context_TKE @ table_VE.T + bias_V
    f_TKV = case.positive(None, z_TKV)
    f_TKV[:, :, vocab or len(bias_V) :] = 0
    total_TK1 = f_TKV.sum(axis=2, keepdims=True)
    z_bar_TKV = bar_TK[:, :, None] * f_TKV / total_TK1 * case.slope(None, z_TKV)
    bars = (
        z_bar_TKV @ table_VE,
        np.einsum("tkv,tke->ve", z_bar_TKV, context_TKE),
        z_bar_TKV.sum(axis=(0, 1)),
    )
    return np.log(total_TK1[:, :, 0]), bars


def lse(module, activation, context_TKE, table_VE, bias_V, **choices):
    function, resolved = module.IMPLEMENTATION.lse, Options(**choices).resolve()
    return function(context_TKE, Vocabulary(table_VE, bias_V), activation, resolved)


def value_and_bars(activation, **choices):
    @jax.jit
    def run(context_TKE, table_VE, bias_V, bar_TK):
        def function(*args):
            return lse(pallas_tpu, activation, *args, **choices)

        lse_TK, pull = jax.vjp(function, context_TKE, table_VE, bias_V)
        return lse_TK, pull(bar_TK)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gss_mixed", "softcap"])
def test_normalisers_and_gradients_equal_the_oracle(name, interpreted):
    inputs = make_inputs()
    ours = value_and_bars(ACTIVATIONS[name])(*oracle.cast(inputs, jnp.float32))
    oracle.assert_close(ours, dense(name, inputs), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [None, 29, 128])
def test_blocks_of_every_axis_add_up(vocab, interpreted, small_blocks):
    # 141 rows, 331 words and a width of 37 are two, three and two blocks, none whole;
    # a vocabulary of 29 leaves two blocks of words dead.
    inputs = make_inputs(tokens=47, width=37, rows=331, scale=0.3)
    step = value_and_bars(SIGSOFTMAX, vocab=vocab)
    ours = step(*oracle.cast(inputs, jnp.float32))
    oracle.assert_close(ours, dense("moss", inputs, vocab), "float32")


@pytest.mark.slow
def test_logits_of_hundreds_neither_overflow_nor_vanish(interpreted):
    step, small = value_and_bars(SOFTMAX), make_inputs()
    ours = step(*oracle.cast(small, jnp.float32))
    oracle.assert_close(ours, dense("mos", small), "float32")
    for low, high in ((-200, -199), (-200, 200)):
        # In eighths, so that float32 holds the logits themselves exactly, and
        # cotangents of one sign: an lse near 200 is known to 1e-5, which a difference
        # would magnify.
        inputs = [np.round(8 * array) / 8 for array in small]
        inputs[3] = np.abs(inputs[3])
        inputs[2][:] = np.round(8 * np.linspace(low, high, 37)) / 8
        ours = step(*oracle.cast(inputs, jnp.float32))
        oracle.assert_close(ours, dense("mos", inputs), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("compute", [None, jnp.bfloat16])
def test_bfloat16_products_are_summed_in_float32(compute, interpreted, mixed_dtypes):
    inputs = oracle.cast(make_inputs(width=300), jnp.bfloat16)
    given = inputs if compute is None else oracle.cast(inputs, jnp.float32)
    exact = jax.tree.map(lambda array: np.asarray(array, np.float64), inputs)

    def function(*args):
        return lse(pallas_tpu, SOFTMAX, *args, compute_dtype=compute)

    lse_TK, pull = jax.vjp(jax.jit(function), *given[:3])
    expected_TK, expected_bars = dense("mos", exact)
    oracle.assert_close(lse_TK, expected_TK, "float32")
    bars = pull(given[3].astype(jnp.float32))
    for ours, theirs, array in zip(bars, expected_bars, given[:3], strict=True):
        assert ours.dtype == array.dtype
        error = np.abs(np.asarray(ours, np.float64) - theirs).max()
        assert error < 0.01 * np.abs(theirs).max()


@pytest.mark.slow
def test_a_traced_theta_has_a_gradient(interpreted):
    context_TKE, table_VE, bias_V = oracle.cast(make_inputs()[:3], jnp.float32)

    def total(implementation, center, slope):
        activation = Activation(generalized, params=(center, slope))
        inputs = (context_TKE, table_VE, bias_V)
        return jnp.sum(lse(implementation, activation, *inputs, vocab=31))

    # A center among the logits that matter: far below them its derivative is a small
    # difference of sums, and float32 would say little about it.
    point = jnp.float32(5.0), jnp.float32(1.5)
    ours, theirs = (
        jax.jit(jax.grad(functools.partial(total, module), (0, 1)))(*point)
        for module in (pallas_tpu, blocked)
    )
    oracle.assert_close(ours, theirs, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("batched", ["contexts", "contexts, centers"])
def test_a_batch_is_what_its_elements_are(batched, interpreted):
    contexts = [make_inputs(scale=s)[0] for s in (0.5, 1.0)]
    table_VE, bias_V = oracle.cast(make_inputs()[1:3], jnp.float32)

    def one(context_TKE, center):
        activation = Activation(generalized, params=(center, 2.5))
        return lse(pallas_tpu, activation, context_TKE, table_VE, bias_V, vocab=31)

    centers = [-1.5, 0.5] if "centers" in batched else [-1.5, -1.5]
    axes = (0, 0) if "centers" in batched else (0, None)
    point = (
        np.stack(contexts),
        np.array(centers if "centers" in batched else centers[0]),
    )
    ours_BTK = jax.jit(jax.vmap(one, axes))(*oracle.cast(point, jnp.float32))
    exact = []
    for context_TKE, center in zip(contexts, centers, strict=True):
        z_TKV = (context_TKE @ make_inputs()[1].T + make_inputs()[2])[:, :, :31]
        f_TKV = oracle.generalized(center, 2.5)[0](None, z_TKV)
        exact.append(np.log(f_TKV.sum(axis=2)))
    oracle.assert_close(ours_BTK, np.stack(exact), "float32")


@pytest.mark.slow
def test_a_table_split_over_devices_gives_loss_and_gradient(interpreted):
    # Of four shards of 10 rows the last holds one word and nine rows of padding.
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO, AUTO))
    problem = make_problem(tokens=8)
    rows = ((0, 40 - 37), (0, 0))
    problem = problem._replace(
        table_VE=np.pad(problem.table_VE, rows),
        bias_V=np.pad(problem.bias_V, rows[0]),
        labels_T=problem.labels_T % 31,
    )

    def loss(module, vocab_axis, theta, *inputs):
        choices = Options(vocab=31, vocab_axis=vocab_axis).resolve()
        activation = Activation(generalized, params=theta)
        return module.IMPLEMENTATION.loss(*paired(*inputs), activation, choices)

    def local(*inputs):
        return jax.lax.psum(loss(pallas_tpu, "model", *inputs), "data")

    data, model = P("data"), P("model")
    specs = (P(), data, data, model, model, data, data)
    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())

    def value_and_gradient(total, dtype):
        inputs = oracle.cast(((-1.5, 2.5), *problem), dtype)
        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4)))(*inputs)

    ours = value_and_gradient(split, jnp.float32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        whole = functools.partial(loss, blocked, None)
        theirs = value_and_gradient(whole, jnp.float64)
    oracle.assert_close(ours, theirs, "float32")


def test_piecewise_activations_take_the_xla_path_and_say_so_once(caplog):
    inputs = oracle.cast(make_inputs()[:3], jnp.float32)
    knots_N1 = jnp.linspace(-2.5, 2.5, 6)
    plif = Activation(
        piecewise_even, params=segments(knots_N1, jnp.linspace(0.5, 1.5, 5))
    )
    options.note.cache_clear()

    @jax.jit
    def run(*inputs):
        modules = (blocked, pallas_tpu, pallas_tpu)
        return [lse(module, plif, *inputs) for module in modules]

    with caplog.at_level(logging.INFO):
        theirs_TK, *ours = run(*inputs)
    assert caplog.text.count("piecewise_even") == 1
    oracle.assert_close(ours, [theirs_TK, theirs_TK], "float32")


def test_other_dtypes_are_refused():
    inputs = oracle.cast(make_inputs()[:3], jnp.float32)
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        lse(pallas_tpu, SOFTMAX, *inputs, compute_dtype=jnp.float16)


def test_no_other_platform_runs_it_unless_told_to_interpret():
    inputs = oracle.cast(make_inputs()[:3], jnp.float32)
    with pytest.raises(ValueError, match="interpret mode"):
        lse(pallas_tpu, SOFTMAX, *inputs)


def lowered(shape, dtype, activation, sharding=None):
    tokens, components, width, rows = shape
    inputs = [
        jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
        for sizes in ((tokens, components, width), (rows, width), (rows,))
    ]

    def function(*args):
        return lse(pallas_tpu, activation, *args)

    return jax.jit(function).trace(*inputs).lower(lowering_platforms=("tpu",))


# An activation sees float32 tiles of 128 words, whatever the shapes are.
@pytest.mark.parametrize(
    "case, name",
    [
        *((case, "gss_mixed") for case in SHAPES),
        *(("bf16, d=280", name) for name in ACTIVATIONS if name != "gss_mixed"),
    ],
)
def test_it_lowers_for_tpu_anywhere(case, name):
    text = lowered(*SHAPES[case], ACTIVATIONS[name]).as_text()
    assert "tpu_custom_call" in text


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_the_tpu_compiler_finds_room_for_its_blocks(topology, case, optimised):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu, which is not installed here")
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    sharding = NamedSharding(Mesh(devices[:1], ("one",)), P())
    shape, dtype = SHAPES[case]
    compiled = lowered(shape, dtype, GSS, sharding).compile()
    tokens, components, width, _ = shape
    contexts = 4 * tokens * (components + 15) * (width + 127)
    assert compiled.memory_analysis().temp_size_in_bytes < contexts
