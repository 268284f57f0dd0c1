import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from tests import oracle

POINT = oracle.make_inputs("lowrank")


@pytest.mark.slow
def test_it_is_a_softmax_of_the_projected_state():
    @jax.jit
    def run(params, table_VE, bias_V, hidden_TD, labels_T):
        output = (table_VE, bias_V)
        narrow_TE = hidden_TD @ params["project_DE"]
        return (
            softbottle.lowrank(7).nll(params, *output, hidden_TD, labels_T),
            softbottle.softmax().nll({}, *output, narrow_TE, labels_T),
        )

    ours_T, plain_T = run(*oracle.cast(POINT[:5], jnp.float32))
    np.testing.assert_allclose(ours_T, plain_T, rtol=1e-5)


@pytest.mark.parametrize("rank", [0, -2, 1.5])
def test_the_rank_must_be_a_positive_integer(rank):
    with pytest.raises(ValueError, match=f"rank .*{rank!r}"):
        softbottle.lowrank(rank)


def test_a_table_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"lowrank\(4\) .*context_dim=7"):
        softbottle.lowrank(4).init(jax.random.key(0), 5, 7)
