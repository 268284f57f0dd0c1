"""Frequent words by the Hopper kernel, in jax's interpreter and on a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import softbottle
from softbottle.ops.mixture import gated, gated_gpu, gated_kernel, hopper_kernel
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops.mixture.gated_problem import (
    dense,
    exact_step,
    make_problem,
    make_step,
    paired,
)

pytestmark = [
    pytest.mark.usefixtures("mixed_dtypes"),
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11),
        reason=f"the kernel needs jax 0.11, this is {jax.__version__}",
    ),
]
# No tile divides these, and there are two tiles of tokens and of words.
SIZES = {2: (140, 72, 150), 4: (70, 72, 150)}


def rounded(components, sizes=None):
    """A problem in bfloat16, and the same numbers in float64."""
    context, *rest = make_problem(components, *(sizes or SIZES[components]))
    ours = oracle.cast((context / 8, *rest), jnp.bfloat16)
    return ours, tuple(np.asarray(array, np.float64) for array in ours)


def exact(wide):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, exact_step(*wide))


def options(**settings):
    return Options(compute_dtype=jnp.bfloat16, implementation="pallas_gpu", **settings)


def interpreted(function, *inputs):
    with hopper_kernel.interpreted():
        return jax.tree.map(np.asarray, jax.jit(function)(*inputs))


def check(found, wanted, limit=4e-3):
    assert abs(found[0] - wanted[0]) < 1e-4 * max(1.0, abs(wanted[0]))
    for bar, wanted_bar in zip(found[1], wanted[1], strict=True):
        error = np.linalg.norm(np.asarray(bar, np.float64) - wanted_bar)
        assert error < limit * np.linalg.norm(wanted_bar)


@pytest.mark.slow
@pytest.mark.parametrize("components", gated_kernel.COMPONENTS)
@pytest.mark.parametrize("budget", [2**30, 100_000])
def test_scores_and_gradients_are_those_of_the_dense_logits(components, budget):
    ours, wide = rounded(components)
    found = interpreted(make_step(options(budget_bytes=budget)), *ours)
    check(found, exact(wide))


@pytest.mark.slow
def test_references_that_are_far_too_low_are_found_again():
    ours, wide = rounded(4)
    # A word that is no label is 200 nats ahead of all.
    assert len(ours[0]) < 120
    ours = (*ours[:4], ours[4].at[120].set(200), *ours[5:])
    wide[4][120] = 200
    # What its gates add to its own normalizer is most of it.
    check(interpreted(make_step(options()), *ours), exact(wide))


@pytest.mark.slow
def test_normalizers_alone_are_those_of_the_dense_logits():
    ours, wide = rounded(4)
    labels_T = np.arange(len(ours[0]))

    def run(*arrays):
        return gated.scores(*paired(arrays), labels_T, options())

    score_T1, lse_T1 = interpreted(run, *ours)
    with jax.enable_x64(True):
        logit_TS = np.asarray(dense(*wide))
    np.testing.assert_allclose(score_T1[:, 0], logit_TS[labels_T, labels_T], atol=1e-5)
    wanted_T = np.log(np.sum(np.exp(logit_TS), axis=1))
    np.testing.assert_allclose(lse_T1[:, 0], wanted_T, atol=1e-5)


def sure_problem(ahead):
    """Arrays whose label, word 77, is so many nats ahead; -log P and its gradients."""
    ours, wide = rounded(4)
    ours = (*ours[:4], ours[4].at[77].set(ahead), *ours[5:])
    wide[4][77] = ahead

    def loss(*arrays):
        logit_TS = dense(*arrays)
        return jnp.sum(jax.nn.logsumexp(logit_TS, axis=1) - logit_TS[:, 77])

    with jax.enable_x64(True):
        wanted = jax.jit(jax.value_and_grad(loss, tuple(range(7))))(*wide)
        return ours, jax.tree.map(np.asarray, wanted)


def sure_step(*arrays):
    def loss(*arrays):
        labels_T = np.full(len(arrays[0]), 77)
        score_T1, lse_T1 = gated.scores(*paired(arrays), labels_T, options())
        return jnp.sum(lse_T1 - score_T1)

    return jax.value_and_grad(loss, tuple(range(7)))(*arrays)


def between(array):
    """float32 numbers that bfloat16 rounds to those of an array."""
    return array.astype(jnp.float32) * (1 + 2.0**-10)


@pytest.mark.slow
@pytest.mark.parametrize("ahead, probability", [(8, 0.87), (12, 0.997)])
def test_labels_that_are_nearly_sure(ahead, probability):
    """What a label adds to the normalizer and its own score nearly cancel."""
    ours, wanted = sure_problem(ahead)
    assert np.exp(-wanted[0] / len(ours[0])) > probability
    check(interpreted(sure_step, *ours), wanted)


@pytest.mark.slow
def test_labels_score_what_the_products_read_of_wider_arrays():
    """XLA for GPUs leaves out a cast and one back; a rounding that says so stays."""
    ours, wanted = sure_problem(12)
    # What products read: contexts, features, table and vectors.
    wider = tuple(
        between(array) if place in (0, 1, 3, 5) else array.astype(jnp.float32)
        for place, array in enumerate(ours)
    )
    for place in (0, 1, 3, 5):
        np.testing.assert_array_equal(wider[place].astype(jnp.bfloat16), ours[place])
    check(interpreted(sure_step, *wider), wanted)
    # Traced anew: what is interpreted does not lower for a GPU.
    traced = jax.jit(lambda *arrays: sure_step(*arrays)).trace(*wider)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The labels' rows, and the contexts that meet them.
    for shape in ("70x72", "70x4x72"):
        assert re.search(rf"reduce_precision .*tensor<{shape}xf32>", text)


@pytest.mark.slow
def test_ruled_out_words_and_cotangents_of_zero_make_nothing_nan():
    ours, _ = rounded(4)
    labels_T = np.arange(len(ours[0]), dtype=np.int32)
    ruled_out = (*ours[:4], jnp.full_like(ours[4], -jnp.inf), *ours[5:])

    def loss(weight_T, *arrays):
        score_T1, lse_T1 = gated.scores(*paired(arrays), labels_T, options())
        # As much as these words have of a normalizer: nothing.
        both_T1 = jnp.logaddexp(jnp.maximum(lse_T1, -1e30), 0.0)
        return jnp.sum(weight_T * both_T1[:, 0]) + 0 * jnp.sum(
            jnp.maximum(score_T1, -1e30)
        )

    weight_T = jnp.where(jnp.arange(len(labels_T)) % 2 == 0, 1.0, 0.0)
    step = jax.value_and_grad(loss, tuple(range(8)))
    value, bars = interpreted(step, weight_T, *ruled_out)
    assert value == 0
    assert all(np.all(np.isfinite(bar)) for bar in bars)
    assert not np.any(bars[1]) and not np.any(bars[4])


@pytest.mark.slow
def test_under_vmap_each_element_has_its_own():
    ours, _ = rounded(4)
    labels_2T = np.stack([np.arange(len(ours[0])), np.full(len(ours[0]), 5)])

    def loss(arrays, labels_T):
        score_T1, lse_T1 = gated.scores(*paired(arrays), labels_T, options())
        return jnp.sum(lse_T1 - score_T1)

    def together(arrays):
        return jnp.sum(jax.vmap(loss, (None, 0))(arrays, labels_2T))

    def apart(arrays):
        return sum(loss(arrays, labels_T) for labels_T in labels_2T)

    ours = oracle.cast(ours, jnp.float32)
    value, bars = interpreted(jax.value_and_grad(together), ours)
    wanted, wanted_bars = interpreted(jax.value_and_grad(apart), ours)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for bar, wanted_bar in zip(bars, wanted_bars, strict=True):
        np.testing.assert_allclose(bar, wanted_bar, atol=1e-4 * np.abs(bar).max())


@pytest.mark.parametrize("split", [False, True])
def test_a_head_of_few_gates_takes_the_kernel_and_waits_for_nothing(split):
    head = softbottle.mixtape(4, frequent=200)
    tokens, words, width = 16, 1200, 64
    params = jax.eval_shape(lambda key: head.init(key, width, width), jax.random.key(0))
    low, shape = jnp.bfloat16, jax.ShapeDtypeStruct
    inputs = (
        params,
        shape((words, width), low),
        shape((words,), jnp.float32),
        shape((tokens, width), low),
        shape((tokens,), jnp.int32),
    )
    axis = "model" if split else None

    def loss(*inputs):
        chosen = Options(implementation="pallas_gpu", vocab_axis=axis)
        return head.loss(*inputs, options=chosen)

    if split:
        mesh = jax.make_mesh((4,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
        specs = (P(), P(axis), P(axis), P(), P())
        loss = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # The frequent words' three and the rare ones' three.
    assert len(re.findall("custom_call @mosaic_gpu", text)) == 6
    assert not re.search(r"stablehlo\.(while|if|case)", text)


@pytest.mark.parametrize(
    "components, gate_dim, dtype, reason",
    [
        (8, 3, jnp.bfloat16, "8 components, not 2 or 4"),
        (4, 24, jnp.bfloat16, "gate_dim is 24, above 23"),
        (4, 23, jnp.bfloat16, None),
        (4, 3, jnp.float32, "products are in float32"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(components, gate_dim, dtype, reason):
    context, _, level = make_problem(components)[:3]
    feature = np.zeros((*level.shape, gate_dim))
    tokens = gated.Tokens(context, feature, level)
    found = gated_gpu.refusal(tokens, jnp.dtype(dtype))
    assert (found is None) if reason is None else reason in found


def test_what_the_kernel_does_not_take_goes_by_xla():
    arrays = oracle.cast(make_problem(), jnp.float32)
    labels_T = np.zeros(len(arrays[0]), np.int32)
    found = [
        gated.scores(*paired(arrays), labels_T, Options(implementation=name))
        for name in ("pallas_gpu", "blocked")
    ]
    oracle.assert_close(*found, "float32")


def test_columns_are_groups_of_tokens_and_back():
    array_CKX = np.arange(70 * 4 * 3, dtype=np.float32).reshape(70, 4, 3)
    columns_RX = gated_gpu.by_group(array_CKX, 4)
    assert columns_RX.shape == (2 * gated_kernel.BLOCK_COLUMNS, 3)
    np.testing.assert_array_equal(gated_gpu.by_token(columns_RX, 4)[:70], array_CKX)
    # The second group's tokens of the third component follow one another.
    np.testing.assert_array_equal(columns_RX[64 + 32 : 64 + 48], array_CKX[16:32, 2])


@pytest.mark.gpu
@pytest.mark.parametrize("components", gated_kernel.COMPONENTS)
def test_on_a_hopper_gpu_it_is_the_kernel_and_repeats_its_bits(components):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip(f"no Hopper GPU: {jax.devices()[0].device_kind}")
    ours, wide = rounded(components, (1300, 320, 5003))
    step = make_step(Options(compute_dtype=jnp.bfloat16))
    once, *again = (jax.tree.map(np.asarray, step(*ours)) for _ in range(6))
    check(once, exact(wide))
    for other in again:
        jax.tree.map(np.testing.assert_array_equal, other, once)


@pytest.mark.gpu
def test_on_a_hopper_gpu_labels_score_what_the_products_read_of_wider_arrays():
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip(f"no Hopper GPU: {jax.devices()[0].device_kind}")
    ours, wanted = sure_problem(12)
    wider = tuple(
        between(array) if place in (0, 1, 3, 5) else array.astype(jnp.float32)
        for place, array in enumerate(ours)
    )
    check(jax.jit(sure_step)(*wider), wanted)
