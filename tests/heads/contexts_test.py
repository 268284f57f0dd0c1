"""Heads with a residual path start as the softmax that they replace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle.heads import contexts
from tests import oracle

pytestmark = pytest.mark.usefixtures("quick_keys")
WIDTH = oracle.CONTEXT


def point(hidden_dim):
    rng = np.random.default_rng(2)
    table_VE, bias_V = rng.normal(size=(37, WIDTH)), rng.normal(size=37)
    hidden_TD = rng.normal(size=(11, hidden_dim))
    return oracle.cast((table_VE, bias_V, hidden_TD), jnp.float32)


def compare(head, plain, hidden_dim):
    """What a head says before it is trained, and `plain` of its projection."""

    @jax.jit
    def run(key, *arrays):
        params = head.init(key, hidden_dim, WIDTH)
        shared = {name: params[name] for name in ("project_DE",) if name in params}
        return head.log_probs(params, *arrays), plain.log_probs(shared, *arrays)

    return run(jax.random.key(0), *point(hidden_dim))


@pytest.mark.parametrize(
    "make, kind",
    [
        (softbottle.mos, "residual"),
        (softbottle.mos, "linear"),
        (softbottle.moc, "linear"),
        (softbottle.moss, "residual"),
        (softbottle.partition, "linear"),
    ],
    ids=lambda made: getattr(made, "__name__", made),
)
def test_it_starts_as_the_softmax_it_replaces(make, kind):
    head = make(3, context=kind)
    plain = softbottle.sigsoftmax() if head.name == "moss" else softbottle.softmax()
    np.testing.assert_allclose(*compare(head, plain, WIDTH), atol=1e-5)
    shapes = jax.eval_shape(lambda key: head.init(key, WIDTH, WIDTH), jax.random.key(0))
    assert "project_DE" not in shapes


@pytest.mark.parametrize("kind", ["residual", "linear"])
def test_a_state_of_another_width_is_projected_as_by_a_low_rank_softmax(kind):
    head, plain = softbottle.mos(3, kind), softbottle.lowrank(WIDTH)
    np.testing.assert_allclose(*compare(head, plain, 5), atol=1e-5)


@pytest.mark.parametrize("kind", contexts.KINDS)
def test_every_context_learns_something_of_its_own_from_the_first_step(kind):
    table_VE, bias_V, hidden_TD = point(WIDTH)
    head = softbottle.mos(3, kind)
    labels_T = np.arange(11) % 37

    def loss(params):
        return head.loss(params, table_VE, bias_V, hidden_TD, labels_T)

    @jax.jit
    def run(key):
        return jax.grad(loss)(head.init(key, WIDTH, WIDTH))["latent_DKE"]

    bar_KDE = np.moveaxis(np.asarray(run(jax.random.key(0))), 1, 0)
    norm = np.linalg.norm(bar_KDE[0])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.linalg.norm(bar_KDE[one] - bar_KDE[other]) > 0.05 * norm


def test_active_components_are_those_of_largest_prior():
    arrays = point(5)
    full, active = softbottle.mos(4, "tanh"), softbottle.mos(4, "tanh", active=2)

    @jax.jit
    def run(key, hidden_TD):
        params = full.init(key, 5, WIDTH)
        return [head.mix(params, hidden_TD) for head in (full, active)]

    mixtures = run(jax.random.key(3), arrays[2])
    (log_prior_TK, context_TKE), some = jax.tree.map(np.asarray, mixtures)
    order_T2 = np.argsort(-log_prior_TK, axis=1)[:, :2]
    prior_T2 = np.take_along_axis(np.exp(log_prior_TK), order_T2, axis=1)
    np.testing.assert_allclose(
        np.exp(some.log_prior_TK), prior_T2 / prior_T2.sum(1, keepdims=True), rtol=1e-5
    )
    chosen = np.take_along_axis(context_TKE, order_T2[:, :, None], axis=1)
    np.testing.assert_array_equal(some.context_TKE, chosen)
    params = full.init(jax.random.key(3), 5, WIDTH)
    hidden_TD = jnp.asarray(arrays[2])
    np.testing.assert_array_equal(active.components_of(params, hidden_TD), order_T2)
    assert full.components_of(params, hidden_TD) is None


def test_a_state_of_zeros_has_no_direction_and_a_gradient_like_others():
    table_VE, bias_V, hidden_TD = point(WIDTH)
    head = softbottle.mos(3)
    hidden_TD = jnp.asarray(hidden_TD).at[0].set(0.0)

    @jax.jit
    def run(key, hidden_TD):
        params = head.init(key, WIDTH, WIDTH)
        drawn = jax.random.normal(key, params["latent_DKE"].shape)
        params |= {"latent_DKE": drawn}
        labels_T = jnp.arange(len(hidden_TD))
        step = jax.grad(
            lambda hidden_TD: head.loss(params, *output, hidden_TD, labels_T)
        )
        return step(hidden_TD)

    output = table_VE, bias_V
    norm_T = np.linalg.norm(run(jax.random.key(0), hidden_TD), axis=1)
    assert 0 < norm_T[0] < 3 * norm_T[1:].max()


def test_all_components_active_are_the_whole_mixture():
    arrays = point(5)
    full, active = softbottle.mos(3), softbottle.mos(3, active=3)
    params = oracle.cast(oracle.parameters("moss"), jnp.float32)

    @jax.jit
    def run(*arrays):
        return [head.log_probs(params, *arrays) for head in (active, full)]

    np.testing.assert_allclose(*run(*arrays), atol=1e-5)


def test_the_mean_over_draws_is_the_whole_mixture():
    table_VE, bias_V, hidden_TD = point(5)
    full, head = (
        softbottle.mos(5, "tanh"),
        softbottle.mos(5, "tanh", active=2, draw=True),
    )
    draws = 4000

    @jax.jit
    def run(init_key, key, hidden_1D):
        params = full.init(init_key, 5, WIDTH)
        mixture = head.mix(params, jnp.repeat(hidden_1D, draws, axis=0), key=key)
        vocabulary = softbottle.ops.Vocabulary(table_VE, bias_V)
        p_TV = jnp.exp(softbottle.ops.log_probs(mixture, vocabulary))
        exact_1V = jnp.exp(full.log_probs(params, table_VE, bias_V, hidden_1D))
        return mixture, p_TV, full.mix(params, hidden_1D), exact_1V

    results = run(jax.random.key(3), jax.random.key(0), hidden_TD[:1])
    mixture, p_TV, whole, (exact_V,) = jax.tree.map(np.asarray, results)
    np.testing.assert_allclose(np.exp(mixture.log_prior_TK).sum(axis=1), 1, rtol=1e-5)
    error_V = np.std(p_TV, axis=0) / np.sqrt(draws)
    assert np.all(np.abs(np.mean(p_TV, axis=0) - exact_V) < 5 * error_V)
    # The component of largest prior is always there, every other one at times.
    best = whole.context_TKE[0, np.argmax(whole.log_prior_TK[0])]
    first_TE, drawn_TE = mixture.context_TKE[:, 0], mixture.context_TKE[:, 1]
    np.testing.assert_allclose(first_TE, np.tile(best, (draws, 1)), atol=1e-6)
    assert len(np.unique(np.round(drawn_TE, 4), axis=0)) == 4


def test_a_loss_draws_by_its_key_and_nothing_without_one():
    table_VE, bias_V, hidden_TD = point(5)
    head = softbottle.mos(5, "tanh", active=2, draw=True)
    params = head.init(jax.random.key(3), 5, WIDTH)
    arguments = (params, table_VE, bias_V, hidden_TD, np.arange(11))
    loss = jax.jit(head.loss)
    losses = {float(loss(*arguments, key=jax.random.key(n))) for n in range(4)}
    assert len(losses) == 4
    best = jax.jit(softbottle.mos(5, "tanh", active=2).loss)(*arguments)
    assert loss(*arguments) == best and float(best) not in losses
