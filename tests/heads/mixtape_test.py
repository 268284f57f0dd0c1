"""What is Mixtape's own; the contract has the rest."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import softbottle
from softbottle import Options
from softbottle.heads import contexts
from tests import oracle

pytestmark = pytest.mark.usefixtures("quick_keys")
WIDTH, WORDS, FREQUENT = 7, 37, 9


def point(name="mixtape", rows=WORDS):
    return oracle.cast(oracle.make_inputs(name, rows=rows), jnp.float32)


@pytest.mark.parametrize("name", ["mixtape", "mixtape_tanh"])
def test_gates_that_all_words_share_give_a_softmax_of_the_mean_context(name):
    inputs, head = point(name), oracle.CASES[name].head
    shared = {
        key: np.zeros_like(leaf) if key.startswith("gate_word") else leaf
        for key, leaf in inputs.params.items()
    }

    @jax.jit
    def run(params):
        mean_TE = jnp.squeeze(head.mix(params, inputs.hidden_TD).context_TKE, axis=1)
        plain = softbottle.softmax()
        return (
            head.log_probs(params, *inputs[1:4]),
            plain.log_probs({}, *inputs[1:3], mean_TE),
        )

    log_p_TV, plain_TV = run(shared)
    np.testing.assert_allclose(log_p_TV, plain_TV, atol=2e-5)
    own_TV, _ = run(inputs.params)
    assert np.max(np.abs(np.subtract(own_TV, plain_TV))) > 0.1


# What gates read of a state is the same beside any residual path.
@pytest.mark.parametrize("kind", ["tanh", "residual"])
def test_gates_start_near_one_half_and_apart(kind):
    head = softbottle.mixtape(4, kind, frequent=200)
    hidden_TD = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)

    @jax.jit
    def run(key, hidden_TD):
        params = head.init(key, 64, 32)
        return params["gate_word_SG"], head._tokens(params, hidden_TD, None)

    word_SG, tokens = run(jax.random.key(0), hidden_TD)
    own_TJS = np.einsum("tjg,sg->tjs", tokens.feature_TJG, word_SG)
    assert 0.1 < np.std(own_TJS) < 0.6
    assert 0.3 < np.std(tokens.level_TJ) < 0.9
    gates = oracle.sigmoid(own_TJS + np.asarray(tokens.level_TJ)[:, :, None])
    assert 0.4 < np.mean(gates) < 0.6 and np.min(gates) > 0.02


@pytest.mark.parametrize("kind", contexts.KINDS)
def test_every_context_and_gate_learns_from_the_first_step_or_the_second(kind):
    inputs = point()
    head = softbottle.mixtape(4, kind, frequent=FREQUENT)
    params = head.init(jax.random.key(0), oracle.HIDDEN, WIDTH)
    gradient = jax.jit(jax.grad(head.loss))
    bars = gradient(params, *inputs[1:])
    bar_KDE = np.moveaxis(np.asarray(bars["latent_DKE"]), 1, 0)
    norm = np.linalg.norm(bar_KDE[0])
    for one in range(4):
        for other in range(one):
            assert np.linalg.norm(bar_KDE[one] - bar_KDE[other]) > 0.05 * norm
    # Contexts that start equal leave nothing to choose between at the first.
    moved = {
        key: np.subtract(leaf, 0.1 * np.asarray(bars[key]))
        for key, leaf in params.items()
    }
    bars = gradient(moved, *inputs[1:])
    assert all(np.any(bar) for bar in bars.values())


def test_a_label_that_is_no_word_gives_nan_and_others_their_own():
    inputs, head = point(), oracle.CASES["mixtape"].head
    labels_T = np.array(inputs.labels_T)
    labels_T[:4] = [-1, WORDS, 2**31 - 1, -(2**31)]

    @jax.jit
    def run(*args):
        return head.nll(*args), head.loss(*args, jnp.ones(len(labels_T)))

    nll_T, loss = run(*inputs[:4], labels_T)
    np.testing.assert_array_equal(np.isnan(nll_T), np.arange(len(nll_T)) < 4)
    assert np.isnan(loss)


@pytest.mark.slow
def test_ruled_out_frequent_words_make_nothing_nan():
    exact, inputs = oracle.make_inputs("mixtape", rows=WORDS), point()
    head, labels_T = oracle.CASES["mixtape"].head, np.full(oracle.TOKENS, WORDS - 1)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(read, bias_V):
        params, table_VE, hidden_TD = read
        tokens = (params, table_VE, bias_V, hidden_TD, labels_T)
        entropy_T = head.measure(*tokens, ("entropy",))["entropy"]
        return head.loss(*tokens) + jnp.sum(entropy_T), entropy_T

    def ruled_out(by):
        bias_V = np.array(inputs.bias_V)
        bias_V[:FREQUENT] = by
        return bias_V

    read = (inputs.params, inputs.table_VE, inputs.hidden_TD)
    # In float32 a word that is 200 nats behind has no probability.
    (near, _), near_bars = run(read, ruled_out(-200.0))
    (total, entropy_T), bars = run(read, ruled_out(-np.inf))
    np.testing.assert_allclose(total, near, rtol=1e-6)
    chex.assert_trees_all_close(bars, near_bars, atol=1e-5)
    near_V = ruled_out(-200.0)
    log_p_TV = oracle.log_probs("mixtape", *exact[:2], near_V, exact.hidden_TD)
    expected_T = -np.sum(np.exp(log_p_TV) * log_p_TV, axis=1)
    np.testing.assert_allclose(entropy_T, expected_T, rtol=1e-5)


def test_the_best_words_are_of_both_pieces():
    inputs, head = point(), oracle.CASES["mixtape"].head
    counts = (1, FREQUENT, FREQUENT + 1, WORDS - FREQUENT + 1, WORDS)

    @jax.jit
    def run(*args):
        return head.log_probs(*args), [head.top_k(*args, k) for k in counts]

    log_p_TV, best = run(*inputs[:4])
    order_TV = np.argsort(-np.asarray(log_p_TV), axis=1, kind="stable")
    sorted_TV = np.take_along_axis(np.asarray(log_p_TV), order_TV, axis=1)
    for k, (values_Tk, ids_Tk) in zip(counts, best, strict=True):
        np.testing.assert_array_equal(ids_Tk, order_TV[:, :k])
        np.testing.assert_allclose(values_Tk, sorted_TV[:, :k], atol=1e-5)


def test_split_log_probs_are_those_of_the_local_words():
    inputs, head = point(rows=40), oracle.CASES["mixtape"].head
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    specs = (P(), P("model"), P("model"), P())
    split = jax.shard_map(
        functools.partial(
            head.log_probs, options=Options(vocab=WORDS, vocab_axis="model")
        ),
        mesh=mesh,
        in_specs=specs,
        out_specs=P(None, "model"),
    )
    whole = functools.partial(head.log_probs, options=Options(vocab=WORDS))
    whole_TV = np.asarray(jax.jit(whole)(*inputs[:4]))
    np.testing.assert_allclose(jax.jit(split)(*inputs[:4]), whole_TV, atol=1e-5)
    assert np.all(np.isneginf(whole_TV[:, WORDS:]))


@pytest.mark.parametrize(
    "options, message",
    [
        (Options(vocab=FREQUENT), "frequent=9 must be less than .* 9 words"),
        (Options(vocab=WORDS + 1), "vocab=38 exceeds the table's 37 rows"),
    ],
)
def test_a_vocabulary_without_rare_words_is_refused(options, message):
    inputs, head = point(), oracle.CASES["mixtape"].head
    with pytest.raises(ValueError, match=message):
        head.loss(*inputs, options=options)
    with pytest.raises(ValueError, match=message):
        head.log_probs(*inputs[:4], options=options)


def test_frequent_words_that_one_device_does_not_have_are_refused():
    inputs, head = point(rows=40), oracle.CASES["mixtape"].head
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Auto,))
    specs = (P(), P("model"), P("model"), P(), P(), P())
    loss = functools.partial(head.loss, options=Options(vocab_axis="model"))
    split = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    with pytest.raises(ValueError, match="frequent=9 must be at most the 5 rows"):
        jax.jit(split)(*inputs)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"components": 3, "frequent": 5}, "components must be 2, 4, 8 or another"),
        ({"components": 1, "frequent": 5}, "components must be 2, 4, 8 or another"),
        ({"frequent": 0}, "frequent must be an integer >= 1"),
        ({"frequent": 5, "gate_dim": 0}, "gate_dim must be an integer >= 1"),
        ({"frequent": 5, "context": "cosh"}, "context must be one of"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        softbottle.mixtape(**settings)
