"""Heads with a residual path start as the softmax that they replace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle.heads import contexts
from tests import oracle

WIDTH = oracle.CONTEXT
HEADS = (softbottle.mos, softbottle.moc, softbottle.moss, softbottle.partition)


def point(hidden_dim):
    rng = np.random.default_rng(2)
    table_VE, bias_V = rng.normal(size=(37, WIDTH)), rng.normal(size=37)
    hidden_TD = rng.normal(size=(11, hidden_dim))
    return oracle.cast((table_VE, bias_V, hidden_TD), jnp.float32)


@pytest.mark.parametrize("kind", ["residual", "linear"])
@pytest.mark.parametrize("make", HEADS, ids=lambda make: make.__name__)
def test_it_starts_as_the_softmax_it_replaces(make, kind):
    arrays = point(WIDTH)
    head = make(3, context=kind)
    params = head.init(jax.random.key(0), WIDTH, WIDTH)
    plain = softbottle.sigsoftmax() if head.name == "moss" else softbottle.softmax()
    assert "project_DE" not in params
    np.testing.assert_allclose(
        head.log_probs(params, *arrays), plain.log_probs({}, *arrays), atol=1e-5
    )


@pytest.mark.parametrize("kind", ["residual", "linear"])
def test_a_state_of_another_width_is_projected_as_by_a_low_rank_softmax(kind):
    arrays = point(5)
    head = softbottle.mos(3, kind)
    params = head.init(jax.random.key(0), 5, WIDTH)
    projected = {"project_DE": params["project_DE"]}
    plain_TV = softbottle.lowrank(WIDTH).log_probs(projected, *arrays)
    np.testing.assert_allclose(head.log_probs(params, *arrays), plain_TV, atol=1e-5)


@pytest.mark.parametrize("kind", contexts.KINDS)
def test_every_context_learns_something_of_its_own_from_the_first_step(kind):
    table_VE, bias_V, hidden_TD = point(WIDTH)
    head = softbottle.mos(3, kind)
    params = head.init(jax.random.key(0), WIDTH, WIDTH)
    labels_T = jnp.arange(11) % 37

    def loss(params):
        weights_T = jnp.ones(11)
        return head.loss(params, table_VE, bias_V, hidden_TD, labels_T, weights_T)

    bar_KDE = jnp.moveaxis(jax.jit(jax.grad(loss))(params)["latent_DKE"], 1, 0)
    norm = jnp.linalg.norm(bar_KDE[0])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert jnp.linalg.norm(bar_KDE[one] - bar_KDE[other]) > 0.05 * norm


def test_active_components_are_those_of_largest_prior():
    arrays = point(5)
    full, active = softbottle.mos(4, "tanh"), softbottle.mos(4, "tanh", active=2)
    params = full.init(jax.random.key(3), 5, WIDTH)
    (log_prior_TK, context_TKE), some = (
        head.mix(params, arrays[2]) for head in (full, active)
    )
    order_T2 = np.argsort(-log_prior_TK, axis=1)[:, :2]
    prior_T2 = np.take_along_axis(np.exp(log_prior_TK), order_T2, axis=1)
    np.testing.assert_allclose(
        np.exp(some.log_prior_TK), prior_T2 / prior_T2.sum(1, keepdims=True), rtol=1e-5
    )
    chosen = np.take_along_axis(context_TKE, order_T2[:, :, None], axis=1)
    np.testing.assert_array_equal(some.context_TKE, chosen)


def test_all_components_active_are_the_whole_mixture():
    arrays = point(5)
    full, active = softbottle.mos(3), softbottle.mos(3, active=3)
    params = oracle.cast(oracle.parameters("moss"), jnp.float32)
    np.testing.assert_allclose(
        active.log_probs(params, *arrays), full.log_probs(params, *arrays), atol=1e-5
    )


def test_the_mean_over_draws_is_the_whole_mixture():
    table_VE, bias_V, hidden_TD = point(5)
    full, head = (
        softbottle.mos(5, "tanh"),
        softbottle.mos(5, "tanh", active=2, draw=True),
    )
    params = full.init(jax.random.key(3), 5, WIDTH)
    draws = 4000
    hidden_TD = jnp.repeat(hidden_TD[:1], draws, axis=0)
    mixture = head.mix(params, hidden_TD, key=jax.random.key(0))
    np.testing.assert_allclose(jnp.exp(mixture.log_prior_TK).sum(axis=1), 1, rtol=1e-5)
    vocabulary = softbottle.ops.Vocabulary(table_VE, bias_V)
    p_TV = jnp.exp(jax.jit(softbottle.ops.log_probs)(mixture, vocabulary))
    log_probs = jax.jit(full.log_probs)
    exact_V = jnp.exp(log_probs(params, table_VE, bias_V, hidden_TD[:1]))[0]
    error_V = jnp.std(p_TV, axis=0) / np.sqrt(draws)
    assert jnp.all(jnp.abs(jnp.mean(p_TV, axis=0) - exact_V) < 5 * error_V)
    # The component of largest prior is always there, every other one at times.
    one = full.mix(params, hidden_TD[:1])
    best = one.context_TKE[0, jnp.argmax(one.log_prior_TK[0])]
    first_TE, drawn_TE = mixture.context_TKE[:, 0], mixture.context_TKE[:, 1]
    np.testing.assert_allclose(first_TE, jnp.tile(best, (draws, 1)), atol=1e-6)
    assert len(np.unique(np.round(drawn_TE, 4), axis=0)) == 4


def test_a_loss_draws_by_its_key_and_nothing_without_one():
    table_VE, bias_V, hidden_TD = point(5)
    head = softbottle.mos(5, "tanh", active=2, draw=True)
    params = head.init(jax.random.key(3), 5, WIDTH)
    arguments = (params, table_VE, bias_V, hidden_TD, jnp.arange(11), jnp.ones(11))
    losses = {float(head.loss(*arguments, key=jax.random.key(n))) for n in range(4)}
    assert len(losses) == 4
    best = softbottle.mos(5, "tanh", active=2).loss(*arguments)
    assert head.loss(*arguments) == best and float(best) not in losses
