"""The Hopper kernel in jax's interpreter, on sizes that no tile divides."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import softbottle
from softbottle.ops.mixture import api, hopper_kernel, pallas_gpu
from softbottle.ops.mixture.activations import SIGSOFTMAX, SOFTMAX
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options
from tests import oracle
from tests.ops.mixture.problem import (
    Problem,
    loss_and_gradient,
    make_problem,
    paired,
)

pytestmark = [
    pytest.mark.usefixtures("mixed_dtypes"),
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11),
        reason=f"the kernel needs jax 0.11, this is {jax.__version__}",
    ),
]
ACTIVATIONS = {
    "softmax": (SOFTMAX, {}),
    "sigsoftmax": (SIGSOFTMAX, {"slope": 2.0}),
    "gss": (softbottle.gss(0.5, 1.7).activation({}), {"center": 0.5, "slope": 1.7}),
    "softcap": (softbottle.softcap(4.0).activation({}), {"cap": 4.0}),
}


def rounded(problem):
    """The problem with tables and contexts that bfloat16 holds, as NumPy and as jax."""
    low = {
        name: jnp.asarray(getattr(problem, name), jnp.bfloat16)
        for name in ("context_TKE", "table_VE")
    }
    high = {
        name: np.asarray(getattr(problem, name), np.float32).astype(np.float64)
        for name in ("log_prior_TK", "bias_V", "weights_T")
    }
    exact = problem._replace(
        **high, **{name: np.asarray(a, np.float64) for name, a in low.items()}
    )
    ours = Problem(
        *(
            low.get(name, jnp.asarray(value, jnp.float32))
            if value.dtype.kind == "f"
            else jnp.asarray(value)
            for name, value in exact._asdict().items()
        )
    )
    return exact, ours


def run(problem, activation, **options):
    chosen = Options(implementation="pallas_gpu", **options)

    def loss(*inputs):
        tokens = (problem.labels_T, problem.weights_T)
        return api.loss(*paired(*inputs, *tokens), activation, chosen)

    with hopper_kernel.interpreted():
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*problem[:4])


def relative(ours, exact):
    ours = np.asarray(ours, np.float64)
    return np.linalg.norm(ours - exact) / np.linalg.norm(exact)


def check(result, exact, limit=3e-3):
    loss, bars = result
    exact_loss, exact_bars = exact
    np.testing.assert_allclose(float(loss), exact_loss, rtol=3e-6, atol=1e-4)
    for ours, exact_bar in zip(bars, exact_bars, strict=True):
        assert relative(ours, exact_bar) < limit


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_loss_and_gradient_equal_float64(name):
    activation, formula = ACTIVATIONS[name]
    sizes = {"tokens": 47, "components": 3, "width": 70, "vocab": 301}
    exact, ours = rounded(make_problem(**sizes))
    check(run(ours, activation), loss_and_gradient(exact, **formula))


@pytest.mark.parametrize("name", ["softmax", "softcap"])
def test_padding_rows_get_nothing(name):
    activation, formula = ACTIVATIONS[name]
    sizes = {"tokens": 9, "components": 2, "width": 9, "vocab": 300}
    exact, ours = rounded(make_problem(**sizes))
    labels_T = exact.labels_T % 270
    exact, ours = exact._replace(labels_T=labels_T), ours._replace(labels_T=labels_T)
    result = run(ours, activation, vocab=270)
    check(result, loss_and_gradient(exact, **formula, live=270))
    assert not np.any(np.asarray(result[1][2][270:], np.float32))


def capped(cap):
    return softbottle.softcap(cap).activation({}), {"cap": cap}


@pytest.mark.parametrize(
    ("name", "budget", "again"),
    [("softmax", 2**15, True), ("softmax", 2**30, True)]
    + [(20.0, 2**30, False), (100.0, 2**30, True)],
)
def test_rows_far_above_their_labels_are_done_again(name, budget, again, monkeypatch):
    """One word wins by hundreds of nats in a few tokens, of one tile of rows or two.

    Where scores are bounded, none is too far.
    """
    activation, formula = ACTIVATIONS.get(name) or capped(name)
    called, call = [], hopper_kernel.call

    def counted(activation, options, inputs, *others, **named):
        called.append(inputs.which is not None)
        return call(activation, options, inputs, *others, **named)

    monkeypatch.setattr(hopper_kernel, "call", counted)
    sizes = {"tokens": 100, "components": 2, "width": 16, "vocab": 600}
    problem = make_problem(**sizes)
    problem.table_VE[7] *= 60
    problem.context_TKE[3:] *= 0.1
    exact, ours = rounded(problem)
    score_TKV = exact.context_TKE @ exact.table_VE.T + exact.bias_V
    own_TK1 = np.take_along_axis(score_TKV, exact.labels_T[:, None, None], axis=2)
    far_T = np.any(score_TKV - own_TK1 > pallas_gpu.FAR, axis=(1, 2))
    assert 0 < far_T.sum() < 64 and not far_T[64:].any()
    result = run(ours, activation, budget_bytes=budget)
    check(result, loss_and_gradient(exact, **formula))
    assert any(called) == again and called


def with_argmax(problem, activation, options):
    """The loss, its gradient, and the most probable words."""

    def loss(*inputs):
        tokens = (problem.labels_T, problem.weights_T)
        return api.loss_and_argmax(*paired(*inputs, *tokens), activation, options)

    function = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    with hopper_kernel.interpreted():
        (loss, argmax_T), bars = jax.jit(function)(*problem[:4])
    return (loss, bars), argmax_T


@pytest.mark.parametrize("name", ["softmax", "softcap"])
def test_the_same_pass_finds_the_most_probable_words(name):
    """Some far above their labels, some in the last, partial tile."""
    activation, formula = ACTIVATIONS[name]
    sizes = {"tokens": 140, "components": 1, "width": 20, "vocab": 700}
    problem = make_problem(**sizes)
    problem.table_VE[[7, 650]] *= 30
    exact, ours = rounded(problem)
    score_TV = (exact.context_TKE @ exact.table_VE.T + exact.bias_V)[:, 0]
    own_T = np.take_along_axis(score_TV, exact.labels_T[:, None], axis=1)[:, 0]
    assert np.any(score_TV.max(axis=1) - own_T > pallas_gpu.FAR)
    options = Options(implementation="pallas_gpu", budget_bytes=2**17)
    result, argmax_T = with_argmax(ours, activation, options)
    check(result, loss_and_gradient(exact, **formula))
    if name == "softcap":
        score_TV = 4 * np.tanh(score_TV / 4)
    found_T = np.take_along_axis(score_TV, np.asarray(argmax_T)[:, None], axis=1)[:, 0]
    # Those that differ by less may change places.
    assert np.max(score_TV.max(axis=1) - found_T) < 2**-15 + 1e-5
    assert np.mean(score_TV.argmax(axis=1) == argmax_T) > 0.9
    assert len(np.unique(argmax_T)) > 9


def test_divergences_read_the_logits_of_the_kernel():
    tokens, width, vocab, words = 130, 40, 300, 290
    random = np.random.default_rng(0)
    hidden_TD, table_VE, other_VE = (
        jnp.asarray(0.6 * random.normal(size=(rows, width)), jnp.bfloat16)
        for rows in (tokens, vocab, vocab)
    )
    bias_V = jnp.asarray(random.normal(size=vocab), jnp.float32)
    options = Options(implementation="pallas_gpu", vocab=words, budget_bytes=2**18)
    head = softbottle.softmax()

    def divergence(table_VE, bias_V, hidden_TD):
        student = softbottle.Output(head, {}, table_VE, bias_V, hidden_TD)
        teacher = softbottle.Output(head, {}, other_VE, None, hidden_TD)
        return softbottle.distill(student, teacher, options=options)

    def log_probs(table_VE, bias_V, hidden_TD):
        z_TV = (hidden_TD @ table_VE.T + bias_V)[:, :words]
        return z_TV - np.log(np.sum(np.exp(z_TV), axis=1, keepdims=True))

    inputs = (table_VE, bias_V, hidden_TD)
    with hopper_kernel.interpreted():
        total, bars = jax.jit(jax.value_and_grad(divergence, (0, 1, 2)))(*inputs)
    exact = [np.asarray(each, np.float64) for each in inputs]
    log_p_TV = log_probs(np.asarray(other_VE, np.float64), 0.0, exact[2])
    log_q_TV = log_probs(*exact)
    np.testing.assert_allclose(
        total, np.sum(np.exp(log_p_TV) * (log_p_TV - log_q_TV)), rtol=1e-5
    )
    bar_TV = np.exp(log_q_TV) - np.exp(log_p_TV)
    wanted = (bar_TV.T @ exact[2], bar_TV.sum(axis=0), bar_TV @ exact[0][:words])
    for ours, exact_bar in zip(bars, wanted, strict=True):
        assert relative(ours[: len(exact_bar)], exact_bar) < 5e-3
    assert not np.any(np.asarray(bars[0][words:], np.float32))


def test_smoothing_of_a_mixture_reads_the_logits_of_the_kernel():
    """As plain XLA's, on contexts and a table of the same rounding."""
    problem = make_problem(tokens=21, components=3, width=33, vocab=280)
    _, ours = rounded(problem)
    head = softbottle.mos(3)
    # At the start all components are equal, and the gates without a gradient.
    params = jax.tree.map(
        lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(1), leaf.shape),
        head.init(jax.random.key(0), 33, 33),
    )

    def loss(implementation, params, table_VE, bias_V):
        options = Options(implementation=implementation, compute_dtype=jnp.bfloat16)
        states = (ours.context_TKE[:, 0].astype(jnp.float32), ours.labels_T)
        terms = {"label_smoothing": 0.1, "options": options}
        return head.loss(params, table_VE, bias_V, *states, **terms)

    def value_and_grad(implementation):
        function = jax.value_and_grad(loss, argnums=(1, 2, 3))
        inputs = (params, ours.table_VE, ours.bias_V)
        return jax.jit(function, static_argnums=0)(implementation, *inputs)

    with hopper_kernel.interpreted():
        total, bars = value_and_grad("pallas_gpu")
    exact_total, exact_bars = value_and_grad("blocked")
    np.testing.assert_allclose(total, exact_total, rtol=1e-5)
    pairs = zip(jax.tree.leaves(bars), jax.tree.leaves(exact_bars), strict=True)
    for ours_bar, exact_bar in pairs:
        assert relative(ours_bar, np.asarray(exact_bar, np.float64)) < 1e-2


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_normalisers_and_their_gradient(name):
    activation, *_ = ACTIVATIONS[name]
    sizes = {"tokens": 21, "components": 2, "width": 33, "vocab": 280}
    _, ours = rounded(make_problem(**sizes))

    def nll(implementation, context_TKE, table_VE, bias_V):
        inputs = (ours.log_prior_TK, context_TKE, table_VE, bias_V, ours.labels_T)
        options = Options(implementation=implementation, vocab=275)
        nll_T = api.nll(*paired(*inputs), activation, options)
        return jnp.sum(nll_T**2), nll_T

    def value_and_grad(implementation):
        function = jax.value_and_grad(nll, argnums=(1, 2, 3), has_aux=True)
        return jax.jit(function, static_argnums=0)(implementation, *ours[1:4])

    ours = ours._replace(labels_T=ours.labels_T % 275)
    with hopper_kernel.interpreted():
        (_, nll_T), bars = value_and_grad("pallas_gpu")
    (_, dense_T), dense_bars = value_and_grad("reference")
    np.testing.assert_allclose(nll_T, dense_T, rtol=2e-6, atol=2e-5)
    for bar, dense_bar in zip(bars, dense_bars, strict=True):
        assert relative(bar, np.asarray(dense_bar, np.float64)) < 1e-2


def test_a_batch_of_problems_under_vmap():
    sizes = {"tokens": 5, "components": 2, "width": 8, "vocab": 40}
    pairs = [rounded(make_problem(**sizes, seed=seed)) for seed in (0, 1)]
    exact, ours = zip(*pairs, strict=True)
    stacked = Problem(*(jnp.stack(pair) for pair in zip(*ours, strict=True)))

    def loss(*inputs):
        options = Options(implementation="pallas_gpu")
        return api.loss(*paired(*inputs), options=options)

    with hopper_kernel.interpreted():
        batched = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
        losses, bars = jax.jit(batched)(*stacked)
    for index, problem in enumerate(exact):
        result = (losses[index], [bar[index] for bar in bars])
        check(result, loss_and_gradient(problem))


def test_it_lowers_for_a_gpu_under_a_split_vocabulary():
    """The interpreter runs one device; types and layouts can be checked without it."""
    _, ours = rounded(make_problem(tokens=8, components=2, width=16, vocab=600))
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=auto)
    specs = (*(P("data"),) * 2, P("model"), P("model"), P("data"), P("data"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P())
    def loss(*inputs):
        options = Options(vocab_axis="model", implementation="pallas_gpu")
        return jax.lax.psum(api.loss(*paired(*inputs), options=options), "data")

    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).trace(*ours)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    # Nothing on the device decides what the host does next.
    assert not re.search(r"stablehlo\.(while|if|case)", text)


def test_what_the_kernel_does_not_take_goes_by_xla():
    _, ours = rounded(make_problem())
    wide = ours._replace(
        context_TKE=ours.context_TKE.astype(jnp.float32),
        table_VE=ours.table_VE.astype(jnp.float32),
    )
    with hopper_kernel.interpreted():
        loss = api.loss(*paired(*wide), options=Options(implementation="pallas_gpu"))
    plain = Options(implementation="blocked")
    assert loss == api.loss(*paired(*wide), options=plain)


@pytest.mark.parametrize("classes", [2, 5])
def test_words_in_classes_equal_one_class_after_the_other(classes):
    sizes = {"tokens": 19, "components": 2, "width": 33, "vocab": 301}
    _, ours = rounded(make_problem(**sizes))
    more = [ours.context_TKE * (1 - n / 4) for n in range(classes)]
    ours = ours._replace(context_TKE=jnp.stack(more, axis=1).astype(jnp.bfloat16))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), tuple(ours[:4]))

    def dense(*inputs):
        options = Options(implementation="reference")
        return api.loss(*paired(*inputs, *ours[4:]), options=options)

    exact = jax.value_and_grad(dense, argnums=(0, 1, 2, 3))(*wide)
    check(run(ours, SOFTMAX), exact)


@pytest.fixture
def hopper():
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip(f"no Hopper GPU: {jax.devices()[0].device_kind}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_auto_takes_the_kernel_and_repeats_its_bits(hopper, name):
    activation, formula = ACTIVATIONS[name]
    sizes = {"tokens": 301, "components": 7, "width": 200, "vocab": 5003}
    exact, ours = rounded(make_problem(**sizes))

    def loss(*inputs):
        return api.loss(*paired(*inputs), activation)

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    once, again = function(*ours), function(*ours)
    check(once, loss_and_gradient(exact, **formula))
    for left, right in zip(jax.tree.leaves(once), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 320, 576, 1024, 4096])
def test_every_row_is_right_when_blocks_do_several_tiles(hopper, width):
    """Many tiles a block, and rows looked at one by one.

    A ring that is refilled too early spoils few rows, which no norm shows.
    """
    context_RE, table_VE = (
        jax.random.normal(jax.random.key(seed), (rows, width), jnp.bfloat16)
        for seed, rows in enumerate((1024, 20_224))
    )
    table_VE *= jnp.asarray(3 * width**-0.5, jnp.bfloat16)
    z_RV = np.asarray(context_RE, np.float64) @ np.asarray(table_VE, np.float64).T
    lse_R = np.log(np.sum(np.exp(z_RV), axis=1))
    bias_V, near_R = jnp.zeros(20_224), jnp.full(1024, 5.0)
    first = jax.jit(pallas_gpu.ROUTE.first, static_argnums=(5, 6, 7, 8))
    options = Options().resolve()
    tables = (context_RE[None], table_VE[None], bias_V[None])
    inputs = (*tables, near_R, None, SOFTMAX, options)
    for peaks in (False, True, False):
        e_1RV, total_1R, ref_1R, peak = first(*inputs, peaks, False)
        if peaks:
            found_R = np.take_along_axis(z_RV, np.asarray(peak.place).T, axis=1)[:, 0]
            np.testing.assert_allclose(found_R, z_RV.max(axis=1), atol=1e-4)
            np.testing.assert_allclose(peak.score[0], z_RV.max(axis=1), atol=1e-4)
        np.testing.assert_array_equal(ref_1R[0], near_R)
        np.testing.assert_allclose(5.0 + np.log(total_1R[0]), lse_R, atol=1e-4)
        ours_R1 = pallas_gpu.IMPLEMENTATION.lse(
            context_RE[:, None], Vocabulary(table_VE, bias_V), SOFTMAX, options
        )
        np.testing.assert_allclose(ours_R1[:, 0], lse_R, atol=1e-4)
    exact_RV = np.exp(z_RV - 5.0)
    assert np.max(np.abs(np.asarray(e_1RV[0], np.float64) / exact_RV - 1)) < 5e-3
    # References far below the largest score: rows of some tiles are done again.
    far_R = near_R.at[200:204].set(-200.0)
    e_1RV, total_1R, ref_1R, peak = first(*tables, far_R, *inputs[4:], True, False)
    np.testing.assert_allclose(peak.score[0], z_RV.max(axis=1), atol=1e-4)
    np.testing.assert_allclose(ref_1R[0] + np.log(total_1R[0]), lse_R, atol=1e-4)
    again_R = np.asarray(ref_1R[0]) != np.asarray(near_R)
    np.testing.assert_array_equal(np.flatnonzero(again_R), np.arange(128, 256))
    exact_RV = np.exp(z_RV - np.asarray(ref_1R[0], np.float64)[:, None])
    # Of the largest entries: the smallest of bfloat16 are 0 beside normalizers.
    close_RV = np.isclose(np.asarray(e_1RV[0], np.float64), exact_RV, 5e-3, 1e-30)
    assert np.all(close_RV)


@pytest.mark.parametrize("tiles", [[], [0], [1, 3], [0, 1, 4], [0, 1, 2, 3, 4]])
def test_tiles_with_a_row_too_far_are_counted_and_named(tiles):
    total_R = np.ones(5 * hopper_kernel.BLOCK_ROWS, np.float32)
    for row, tile in enumerate(tiles):
        total_R[tile * hopper_kernel.BLOCK_ROWS + row] = (np.inf, np.nan)[row % 2]
    far_R, which = jax.jit(pallas_gpu.far_tiles, static_argnums=1)(
        total_R, hopper_kernel.BLOCK_ROWS
    )
    assert which.count_I[-1] == len(tiles)
    assert which.tile_I[: len(tiles)].tolist() == tiles
    assert (
        np.unique(np.flatnonzero(far_R) // hopper_kernel.BLOCK_ROWS).tolist() == tiles
    )


@pytest.mark.gpu
def test_logits_and_normalizers_of_the_kernel(hopper):
    random = np.random.default_rng(0)
    rows, width, vocab = 1100, 200, 20_003
    context_RE, table_PE, bias_P = (
        random.normal(size=shape) for shape in ((rows, width), (vocab, width), (vocab,))
    )
    inputs = oracle.cast((context_RE, 0.2 * table_PE), jnp.bfloat16)
    inputs = (*inputs, jnp.asarray(bias_P, jnp.float32))
    function = jax.jit(pallas_gpu.IMPLEMENTATION.logits_and_lse, static_argnums=3)
    once, again = (function(*inputs, Options().resolve()) for _ in range(2))
    context_RE, table_PE, bias_P = (np.asarray(each, np.float64) for each in inputs)
    z_RP = context_RE @ table_PE.T + bias_P
    np.testing.assert_allclose(once[0], z_RP, atol=2e-4)
    lse_R = np.log(np.sum(np.exp(z_RP), axis=1))
    np.testing.assert_allclose(once[1], lse_R, atol=1e-4)
    for left, right in zip(once, again, strict=True):
        np.testing.assert_array_equal(left, right)
