"""How tokens are cut into chunks; what is made of them is tested with the heads."""

import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.mixture import likelihood, reductions


@pytest.mark.parametrize(
    ("count", "most", "multiple", "chunks"),
    [
        (8192, 1365, 128, (8, 128)),  # seven would be of 1,280, and fill the last less
        (2560, 671, 128, (4, 128)),
        (1000, 1000, 128, (1, 1)),
        (11, 4, 1, (3, 1)),
        (5, 1, 1, (5, 1)),
    ],
)
def test_chunks_fit_the_budget_and_the_matrix_units(count, most, multiple, chunks):
    assert reductions.chunking(count, most, multiple) == chunks

    def sizes(carry, tokens):
        assert len(tokens) <= most and len(tokens) % chunks[1] == 0
        return carry + jnp.sum(tokens), tokens + 1

    numbers_T = jnp.arange(count)
    total, next_T = likelihood.over_chunks(sizes, 0, numbers_T, *chunks)
    np.testing.assert_array_equal(next_T, numbers_T + 1)
    assert total == count * (count - 1) // 2
