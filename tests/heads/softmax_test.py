import jax
import jax.numpy as jnp
import numpy as np

import softbottle
from tests import oracle

POINT = oracle.make_inputs("softmax")


def test_it_has_no_parameters_of_its_own():
    assert softbottle.softmax().init(jax.random.key(0), 7, 7) == {}


def test_a_shift_of_all_logits_changes_nothing():
    point = oracle.cast(POINT, jnp.float32)
    head = softbottle.softmax()
    shifted = point._replace(bias_V=point.bias_V + 3.0)
    nll = jax.jit(head.nll)
    np.testing.assert_allclose(nll(*shifted[:5]), nll(*point[:5]), rtol=0, atol=1e-5)


def test_it_is_jax_log_softmax():
    @jax.jit
    def run(point):
        logits_TV = point.hidden_TD @ point.table_VE.T + point.bias_V[None]
        ours_TV = softbottle.softmax().log_probs(*point[:4])
        return ours_TV, jax.nn.log_softmax(logits_TV)

    np.testing.assert_allclose(*run(oracle.cast(POINT, jnp.float32)), atol=2e-5)
