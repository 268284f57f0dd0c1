import jax
import jax.numpy as jnp
import numpy as np

import softbottle
from tests import oracle

INPUTS = oracle.make_inputs("mos")


def test_one_component_is_a_softmax_of_the_tanh_context():
    head = softbottle.mos(1, "tanh")
    params = head.init(jax.random.key(1), oracle.HIDDEN, oracle.CONTEXT)

    @jax.jit
    def run(params, point):
        latent_TE = point.hidden_TD @ params["latent_DKE"][:, 0]
        context_TE = jnp.tanh(latent_TE + params["latent_bias_KE"])
        plain = softbottle.softmax()
        plain_T = plain.nll({}, *point[1:3], context_TE, point.labels_T)
        return head.nll(params, *point[1:5]), plain_T

    results = run(params, oracle.cast(INPUTS, jnp.float32))
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_the_order_of_the_components_does_not_matter():
    order = [2, 0, 1]
    params = {
        "prior_DK": INPUTS.params["prior_DK"][:, order],
        "latent_DKE": INPUTS.params["latent_DKE"][:, order],
        "latent_bias_KE": INPUTS.params["latent_bias_KE"][order],
    }
    moved, point = oracle.cast((INPUTS._replace(params=params), INPUTS), jnp.float32)
    nll = jax.jit(oracle.CASES["mos"].head.nll)
    np.testing.assert_allclose(nll(*moved[:5]), nll(*point[:5]), rtol=1e-5)


def test_a_shift_of_all_logits_changes_nothing():
    point = oracle.cast(INPUTS, jnp.float32)
    head = oracle.CASES["mos"].head
    shifted = point._replace(bias_V=point.bias_V + 3.0)
    nll = jax.jit(head.nll)
    np.testing.assert_allclose(nll(*shifted[:5]), nll(*point[:5]), rtol=0, atol=1e-5)


def test_the_paper_counts_of_parameters_come_out():
    def init(key):
        return softbottle.mos(15, "tanh").init(key, 620, 280)

    shapes = jax.eval_shape(init, jax.random.key(0))
    count = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    # The prior has no bias, the latent projection has one.
    assert count == 620 * 15 + 620 * 15 * 280 + 15 * 280


def test_parameters_start_uniform_within_one_over_the_root_of_the_width():
    params = softbottle.mos(3, "tanh").init(jax.random.key(0), 400, 7)
    for leaf in jax.tree.leaves(params):
        assert np.abs(leaf).max() <= 400**-0.5
    assert np.abs(params["latent_DKE"]).max() > 0.99 * 400**-0.5
