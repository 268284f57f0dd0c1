"""Smoothing, temperature, entropy and the rest, against formulas of dense float64 P."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import softbottle
from softbottle import Options
from tests import oracle
from tests.oracle import CASES, VOCAB

# One softmax, in classes and in pieces; mixtures, and others whose words are bent.
HEADS = ("softmax", "partition", "mixtape", "mos", "partition_mixed", "plif_mixed")
ROWS = 40  # three of them no words
A, TEMPERATURE = 0.15, 0.7
# 40 rows x 4 x 8 bytes x 3 tokens: 11 tokens leave a remainder.
ODD_BUDGET = 3 * 40 * 4 * 8
NAMED = ("nll", "entropy")
pytestmark = pytest.mark.usefixtures("quick_keys")


def make_inputs(name):
    """Inputs of 37 words in a table of 40 rows, one token of which is ignored."""
    inputs = oracle.make_inputs(name, rows=VOCAB)
    random = np.random.default_rng(4)
    more = ROWS - VOCAB
    table_VE = np.concatenate([inputs.table_VE, 5 * random.normal(size=(more, 7))])
    bias_V = np.concatenate([inputs.bias_V, 5 * random.normal(size=more)])
    return inputs, inputs._replace(table_VE=table_VE, bias_V=bias_V)


def smoothed(log_p_TV, labels_T, smoothing, temperature):
    """nll and entropy [T], and their derivatives by log P, [T, V]."""
    scaled_TV = log_p_TV / temperature
    scaled_TV -= np.log(np.exp(scaled_TV).sum(axis=1, keepdims=True))
    p_TV = np.exp(scaled_TV)
    hit_TV = np.eye(VOCAB)[labels_T]
    target_TV = (1 - smoothing) * hit_TV + smoothing / VOCAB
    nll_T = -(target_TV * scaled_TV).sum(axis=1)
    entropy_T = -(p_TV * scaled_TV).sum(axis=1)
    nll_bar_TV = (p_TV - target_TV) / temperature
    entropy_bar_TV = -p_TV * (scaled_TV + entropy_T[:, None]) / temperature
    return {"nll": nll_T, "entropy": entropy_T}, (nll_bar_TV, entropy_bar_TV)


def pulled(name, inputs, bar_TV):
    """d sum_tv bar[t, v] log P[t, v] / d (params, table, bias, hidden)."""
    each = [
        oracle.gradients(
            name, inputs._replace(labels_T=np.full(len(bar_TV), v)), -bar_TV[:, v]
        )
        for v in range(VOCAB)
    ]
    return jax.tree.map(lambda *parts: sum(parts), *each)


def pad(bars):
    """The oracle's gradients with zeros for the rows that are no words."""
    params, table_VE, bias_V, hidden_TD = bars
    more = ROWS - VOCAB
    table_VE = np.pad(table_VE, ((0, more), (0, 0)))
    return params, table_VE, np.pad(bias_V, (0, more)), hidden_TD


@functools.cache
def wanted(name, smoothing, temperature, cotangents_of):
    inputs, _ = make_inputs(name)
    log_p_TV = oracle.log_probs(name, *inputs[:4])
    found, bars_TV = smoothed(log_p_TV, inputs.labels_T, smoothing, temperature)
    chosen = zip(cotangents(), bars_TV, cotangents_of, strict=True)
    bar_TV = sum(bar_T[:, None] * bar_TV for bar_T, bar_TV, used in chosen if used)
    return found, pad(pulled(name, inputs, bar_TV))


def cotangents():
    return np.random.default_rng(5).normal(size=(2, oracle.TOKENS))


def weighted(found):
    """What the cotangents make of nll and entropy, a scalar."""
    pairs = zip(cotangents(), NAMED, strict=True)
    return sum(jnp.sum(bar_T * found[name]) for bar_T, name in pairs)


def measured(name, options, padded):
    """Jitted: nll and entropy, and their gradients under cotangents."""
    head = CASES[name].head

    def run(*inputs):
        def scalar(*args):
            found = head.measure(
                *args,
                inputs[4],
                NAMED,
                label_smoothing=A,
                temperature=TEMPERATURE,
                options=options,
            )
            return weighted(found), found

        bars, found = jax.grad(scalar, (0, 1, 2, 3), has_aux=True)(*inputs[:4])
        return found, bars

    return jax.jit(run)(*oracle.cast(padded[:5], jnp.float64))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["softmax", "mixtape", "partition_mixed", "plif_mixed"]
)
def test_values_and_gradients_are_those_of_the_formulas(name, float64):
    _, padded = make_inputs(name)
    options = Options(vocab=VOCAB, budget_bytes=ODD_BUDGET, implementation="blocked")
    ours = measured(name, options, padded)
    oracle.assert_close(ours, wanted(name, A, TEMPERATURE, (True, True)), "float64")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HEADS if name != "partition_mixed"])
def test_the_sum_is_that_of_the_tokens(name, float64):
    """By the closed forms beside the fused loss, or by the reductions.

    The most probable words come with it, or in a pass of their own.
    """
    inputs, padded = make_inputs(name)
    options = Options(vocab=VOCAB, implementation="blocked")

    def loss(*inputs):
        terms = {"label_smoothing": A, "temperature": TEMPERATURE}
        weights_T = cotangents()[0]
        loss = CASES[name].head.loss_and_argmax
        return loss(*inputs, weights_T, **terms, options=options)

    @jax.jit
    def run(*inputs):
        by = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)
        alone = loss(*inputs) if name in ("softmax", "mixtape", "mos") else None
        return by(*inputs), alone

    ((total, argmax_T), bars), alone = run(*oracle.cast(padded[:5], jnp.float64))
    log_p_TV = oracle.log_probs(name, *inputs[:4])
    np.testing.assert_array_equal(argmax_T, np.argmax(log_p_TV, axis=1))
    if alone is not None:
        # Asked for alone, without a gradient, they are the same.
        np.testing.assert_allclose(alone[0], total, rtol=1e-9)
        np.testing.assert_array_equal(alone[1], argmax_T)
    found, exact = wanted(name, A, TEMPERATURE, (True, False))
    oracle.assert_close(total, np.sum(cotangents()[0] * found["nll"]), "float64")
    oracle.assert_close(bars, exact, "float64")


@pytest.mark.parametrize("name", ["partition", "mixtape", "mos"])
def test_a_split_vocabulary_gives_the_same(name, float64):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    options = Options(vocab=VOCAB, vocab_axis="model", implementation="blocked")
    _, padded = make_inputs(name)
    head = CASES[name].head

    def scalar(*inputs):
        found = head.measure(
            *inputs, NAMED, label_smoothing=A, temperature=TEMPERATURE, options=options
        )
        return weighted(found), found

    split = jax.shard_map(
        scalar,
        mesh=mesh,
        in_specs=(P(), P("model"), P("model"), P(), P()),
        out_specs=P(),
    )
    inputs = oracle.cast(padded[:5], jnp.float64)
    by = jax.jit(jax.grad(split, (0, 1, 2, 3), has_aux=True))
    gradient, found = by(*inputs)
    exact = wanted(name, A, TEMPERATURE, (True, True))
    oracle.assert_close((found, gradient), exact, "float64")


@pytest.mark.parametrize("name", ["partition", "mos"])
def test_the_sum_of_a_split_vocabulary_and_split_tokens(name, float64):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    options = Options(vocab=VOCAB, vocab_axis="model", implementation="blocked")
    inputs, padded = make_inputs(name)
    head = CASES[name].head

    def loss(*inputs):
        terms = {"label_smoothing": A, "options": options}
        total, argmax_T = head.loss_and_argmax(*inputs, **terms)
        return jax.lax.psum(total, "data"), argmax_T

    specs = (P(), P("model"), P("model"), P("data"), P("data"), P("data"))
    out_specs = (P(), P("data"))
    split = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=out_specs)
    # An even number of tokens; the last one has no weight.
    padded = padded._replace(
        hidden_TD=np.pad(padded.hidden_TD, ((0, 1), (0, 0)), constant_values=np.nan),
        labels_T=np.pad(padded.labels_T, (0, 1), constant_values=-1),
        weights_T=np.pad(cotangents()[0], (0, 1)),
    )
    given = oracle.cast(padded, jnp.float64)
    bars, argmax_T = jax.jit(jax.grad(split, (0, 1, 2, 3), has_aux=True))(*given)
    log_p_TV = oracle.log_probs(name, *inputs[:4])
    np.testing.assert_array_equal(argmax_T[:-1], np.argmax(log_p_TV, axis=1))
    _, exact = wanted(name, A, 1.0, (True, False))
    oracle.assert_close((*bars[:3], bars[3][:-1]), exact, "float64")
    assert not np.any(bars[3][-1])


@pytest.mark.parametrize("name", ["softmax", "mixtape", "partition_mixed"])
def test_the_rest_is_asked_for_by_name(name):
    inputs, padded = make_inputs(name)
    head, options = CASES[name].head, Options(vocab=VOCAB)
    given = oracle.cast(padded[:5], jnp.float32)
    names = ("argmax", "accuracy", "lse", "responsibilities", "z_loss", "nll")

    @jax.jit
    def run(*given):
        found = head.measure(*given, names, z_loss=0.3, options=options)
        return found, head.scores(*given, options=options)

    found, scores = run(*given)
    assert set(found) == set(names)
    p_TV = np.exp(oracle.log_probs(name, *inputs[:4]))
    best_T = np.argmax(p_TV, axis=1)
    np.testing.assert_array_equal(found["argmax"], best_T)
    np.testing.assert_array_equal(found["accuracy"], best_T == inputs.labels_T)
    log_prior_TK, score_TK, lse_TK = map(np.asarray, scores)
    np.testing.assert_allclose(found["lse"], lse_TK, rtol=1e-6)
    joint_TK = np.exp(log_prior_TK + score_TK - lse_TK)
    each_TK = joint_TK / joint_TK.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found["responsibilities"], each_TK, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(
        found["z_loss"], 0.3 * np.mean(lse_TK**2, axis=1), rtol=1e-5
    )
    nll_T = oracle.nll(name, inputs)
    np.testing.assert_allclose(found["nll"], nll_T + found["z_loss"], rtol=1e-5)


@pytest.mark.parametrize("head", [softbottle.softmax(), softbottle.mos(2)], ids=repr)
def test_large_logits_and_ignored_tokens(head):
    """Logits of 1e4: P is 1 and 0; what is ignored may be NaN."""
    params = jax.jit(head.init, static_argnums=(1, 2))(jax.random.key(0), 4, 4)
    table_VE = 1e4 * np.eye(6, 4, dtype=np.float32)
    hidden_TD = np.eye(4, dtype=np.float32)
    hidden_TD[2] = np.nan
    labels_T = np.array([0, 1, -100, 3], np.int32)

    def total(table_VE, hidden_TD):
        found = head.measure(
            *(params, table_VE, None, hidden_TD, labels_T, NAMED),
            ignore_label=-100,
            label_smoothing=0.5,
        )
        return jnp.sum(found["nll"]) + jnp.sum(found["entropy"]), found

    by = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    (_, found), bars = by(table_VE, hidden_TD)
    # Five of six words are 1e4 nats away, and half of the loss is their mean.
    exact = 0.5 * 1e4 * 5 / 6 * np.asarray([1, 1, 0, 1])
    np.testing.assert_allclose(found["nll"], exact, rtol=1e-5)
    np.testing.assert_allclose(found["entropy"], 0.0, atol=1e-6)
    assert all(np.all(np.isfinite(bar)) for bar in bars)
    np.testing.assert_array_equal(bars[1][2], 0.0)


@pytest.mark.parametrize("name", ["softmax", "mos"])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_gradient_by_a_weight_is_the_loss_of_its_token(name, reduction, float64):
    """And 0 where the weight is 0; no tokens have no loss."""
    _, padded = make_inputs(name)
    *inputs, weights_T = oracle.cast(padded, jnp.float64)
    head, options = CASES[name].head, Options(vocab=VOCAB)
    terms = {"label_smoothing": A, "reduction": reduction, "options": options}

    @jax.jit
    def run(hidden_TD, labels_T, weights_T):
        def total(*tokens):
            return jnp.sum(head.loss(*inputs[:3], *tokens, **terms))

        few = (hidden_TD[:0], labels_T[:0], weights_T[:0])
        return jax.grad(total, 2)(hidden_TD, labels_T, weights_T), total(*few)

    bar_T, nothing = run(*inputs[3:], weights_T)
    nll_T = wanted(name, A, 1.0, (True, False))[0]["nll"]
    exact_T = np.where(np.asarray(weights_T) == 0, 0.0, nll_T)
    np.testing.assert_allclose(bar_T, exact_T, rtol=1e-9, atol=1e-12)
    assert nothing == 0


@pytest.mark.slow
def test_several_models_and_checkpoints():
    """Under vmap and remat, sums and tokens are what the formulas say of each."""
    head, options = CASES["mos"].head, Options(vocab=VOCAB, budget_bytes=ODD_BUDGET)
    plain, padded = make_inputs("mos")
    inputs = oracle.cast(padded, jnp.float32)
    tables = np.stack([padded.table_VE, 0.5 * padded.table_VE])

    def total(table_VE):
        arrays = (inputs.params, table_VE, *inputs[2:5])
        found = head.measure(*arrays, NAMED, temperature=TEMPERATURE, options=options)
        loss = head.loss(*arrays, label_smoothing=A, options=options)
        return loss + weighted(found)

    several = jax.jit(jax.vmap(jax.value_and_grad(jax.checkpoint(total))))
    values, bars = map(np.asarray, several(tables.astype(np.float32)))
    for table_VE, value, bar_VE in zip(tables, values, bars, strict=True):
        one = plain._replace(table_VE=table_VE[:VOCAB])
        log_p_TV = oracle.log_probs("mos", *one[:4])
        loss, (loss_bar_TV, _) = smoothed(log_p_TV, one.labels_T, A, 1.0)
        cooled, bars_TV = smoothed(log_p_TV, one.labels_T, 0.0, TEMPERATURE)
        exact = np.sum(loss["nll"])
        for bar_T, name, cooled_TV in zip(cotangents(), NAMED, bars_TV, strict=True):
            exact += np.sum(bar_T * cooled[name])
            loss_bar_TV += bar_T[:, None] * cooled_TV
        exact_VE = pad(pulled("mos", one, loss_bar_TV))[1]
        np.testing.assert_allclose(value, exact, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(bar_VE, exact_VE, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing must be at least 0 and below 1"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number above 0"),
        ({"temperature": 2.0, "z_loss": 0.1}, "give one of the two"),
        ({"temperature": jnp.ones(())}, "numbers that are known when compiling"),
        ({"names": ("entropie",)}, "names must be some of"),
        ({"names": "entropy"}, "names must be some of"),
    ],
)
def test_what_cannot_be_is_refused(terms, message):
    inputs = ({}, jnp.ones((4, 3)), None, jnp.ones((2, 3)), jnp.arange(2))
    with pytest.raises(ValueError, match=message):
        softbottle.softmax().measure(*inputs, **({"names": ("nll",)} | terms))


@pytest.mark.parametrize("terms", [{"label_smoothing": 0.1}, {"z_loss": 0.01}])
def test_narrow_weights_do_not_round_the_terms(terms):
    """Neither 0.1 nor 0.01 is a number of bfloat16."""
    hidden_TD = jnp.ones((2, 3))
    output = ({}, jnp.arange(12.0).reshape(4, 3), None, hidden_TD, jnp.arange(2))
    loss = jax.jit(functools.partial(softbottle.softmax().loss, **terms))
    narrow, wide = (loss(*output, jnp.ones(2, d)) for d in (jnp.bfloat16, jnp.float32))
    np.testing.assert_allclose(narrow, wide, rtol=1e-6)


def test_the_mean_counts_narrow_weights_in_wide_sums():
    """257 is no number of bfloat16."""
    output = (
        {},
        jnp.ones((7, 2)),
        None,
        jnp.zeros((257, 2)),
        jnp.zeros(257, jnp.int32),
    )
    weights_T = jnp.ones(257, jnp.bfloat16)
    loss = functools.partial(softbottle.softmax().loss, reduction="mean")
    mean = jax.jit(loss)(*output, weights_T)
    np.testing.assert_allclose(mean, np.log(7), rtol=1e-6)
