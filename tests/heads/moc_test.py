import jax
import jax.numpy as jnp
import numpy as np

import softbottle
from tests import oracle

POINT = oracle.make_inputs("moc")


def test_it_is_a_softmax_of_the_mean_context():
    mos, moc = softbottle.mos(oracle.COMPONENTS), softbottle.moc(oracle.COMPONENTS)

    @jax.jit
    def run(point):
        log_prior_TK, context_TKE = mos.mix(point.params, point.hidden_TD)
        mean_TE = jnp.sum(jnp.exp(log_prior_TK)[:, :, None] * context_TKE, axis=1)
        plain = softbottle.softmax()
        plain_T = plain.nll({}, *point[1:3], mean_TE, point.labels_T)
        return moc.nll(*point[:5]), plain_T

    np.testing.assert_allclose(*run(oracle.cast(POINT, jnp.float32)), rtol=1e-5)


def test_it_has_the_parameters_of_a_mixture_of_softmaxes():
    key = jax.random.key(2)
    moc, mos = softbottle.moc(4).init(key, 5, 7), softbottle.mos(4).init(key, 5, 7)
    assert jax.tree.map(jnp.shape, moc) == jax.tree.map(jnp.shape, mos)


def test_a_shift_of_all_logits_changes_nothing():
    point = oracle.cast(POINT, jnp.float32)
    head = oracle.CASES["moc"].head
    shifted = point._replace(bias_V=point.bias_V + 3.0)
    nll = jax.jit(head.nll)
    np.testing.assert_allclose(nll(*shifted[:5]), nll(*point[:5]), rtol=0, atol=1e-5)
