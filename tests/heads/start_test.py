import numpy as np
import pytest

import softbottle


def test_the_bias_predicts_how_frequent_words_are():
    bias_V = softbottle.log_frequencies([7, 0, 2])
    np.testing.assert_allclose(np.exp(bias_V), np.array([8, 1, 3]) / 12, rtol=1e-6)


@pytest.mark.parametrize("counts", [[[1, 2]], [], [3, -1], 4])
def test_what_are_no_counts_is_refused(counts):
    with pytest.raises(ValueError, match="counts_V must be a vector of counts"):
        softbottle.log_frequencies(counts)
