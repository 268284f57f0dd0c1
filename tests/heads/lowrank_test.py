import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from tests import oracle

POINT = oracle.make_inputs("lowrank")


@pytest.mark.slow
def test_it_is_a_softmax_of_the_projected_state():
    params, table_VE, bias_V, hidden_TD, labels_T, _ = oracle.cast(POINT, jnp.float32)
    ours_T = softbottle.lowrank(7).nll(params, table_VE, bias_V, hidden_TD, labels_T)
    narrow_TE = hidden_TD @ params["project_DE"]
    plain_T = softbottle.softmax().nll({}, table_VE, bias_V, narrow_TE, labels_T)
    np.testing.assert_allclose(ours_T, plain_T, rtol=1e-5)


@pytest.mark.parametrize("rank", [0, -2, 1.5])
def test_the_rank_must_be_a_positive_integer(rank):
    with pytest.raises(ValueError, match=f"rank .*{rank!r}"):
        softbottle.lowrank(rank)


def test_a_table_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"lowrank\(4\) .*context_dim=7"):
        softbottle.lowrank(4).init(jax.random.key(0), 5, 7)
