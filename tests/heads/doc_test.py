import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle

TOKENS, STATE, BELOW, WIDTH, VOCAB = 5, 6, 4, 3, 17
HEADS = {
    "doc": (softbottle.doc(2, 3), (STATE, BELOW)),
    "mfs": (softbottle.mfs(layers=2, positions=2), (STATE, BELOW) * 2),
}
EVERY = pytest.mark.parametrize("name", HEADS)


@functools.cache
def make(name):
    head, widths = HEADS[name]
    rng = np.random.default_rng(0)
    hidden_TD = rng.normal(size=(TOKENS, sum(widths))).astype(np.float32)
    table_VE = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    params = jax.jit(lambda key: head.init_wide(key, widths, WIDTH))(jax.random.key(0))
    return head, params, table_VE, hidden_TD


@EVERY
def test_it_starts_as_the_softmax_of_the_last_layers_state(name):
    head, params, table_VE, hidden_TD = make(name)
    z_TV = hidden_TD[:, :STATE] @ np.asarray(params["project_HE"]) @ table_VE.T
    expected_TV = z_TV - np.log(np.exp(z_TV).sum(axis=1, keepdims=True))
    found_TV = jax.jit(head.log_probs)(params, table_VE, None, hidden_TD)
    np.testing.assert_allclose(found_TV, expected_TV, rtol=1e-5, atol=1e-5)


@EVERY
def test_every_state_reaches_the_loss_once_the_projections_have_moved(name):
    head, params, table_VE, hidden_TD = make(name)
    rng = np.random.default_rng(1)
    params = {
        name: leaf + rng.normal(size=leaf.shape).astype(np.float32)
        for name, leaf in jax.tree.map(np.asarray, params).items()
    }

    def loss(hidden_TD):
        return head.loss(params, table_VE, None, hidden_TD, jnp.arange(TOKENS))

    assert np.all(np.abs(jax.jit(jax.grad(loss))(hidden_TD)) > 0)


@EVERY
def test_states_of_another_width_are_refused_with_the_widths(name):
    head, params, table_VE, hidden_TD = make(name)
    with pytest.raises(ValueError, match="hidden_TD is 6 wide.*(6 . 4|20) wide"):
        head.nll(params, table_VE, None, hidden_TD[:, :STATE], np.arange(TOKENS))


@EVERY
def test_a_width_for_each_state_or_equal_ones(name):
    head, widths = HEADS[name]
    with pytest.raises(ValueError, match="reads 2 layers at . positions, got 3 widths"):
        head.init_wide(jax.random.key(0), (4, 4, 4), WIDTH)
    with pytest.raises(ValueError, match="hidden_dim=7 is not a multiple of the "):
        head.init(jax.random.key(0), 7, WIDTH)
    params = head.init(jax.random.key(0), 4 * len(widths), WIDTH)
    wide = head.init_wide(jax.random.key(0), (4,) * len(widths), WIDTH)
    jax.tree.map(np.testing.assert_array_equal, params, wide)


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: softbottle.doc(0, 2), "components"),
        (lambda: softbottle.doc(2, 1.5), "lower"),
        (lambda: softbottle.mfs(0), "components"),
        (lambda: softbottle.mfs(classes=0), "classes"),
        (lambda: softbottle.mfs(layers=0), "layers"),
        (lambda: softbottle.mfs(positions=-1), "positions"),
    ],
)
def test_numbers_are_positive_integers(make, name):
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1"):
        make()


def test_more_classes_than_words_are_refused():
    with pytest.raises(ValueError, match="classes=4 are more than"):
        softbottle.mfs().check_words(3)
