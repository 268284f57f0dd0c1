import jax
import numpy as np
import pytest

import softbottle


def test_the_bias_predicts_how_frequent_words_are():
    bias_V = softbottle.log_frequencies([7, 0, 2])
    np.testing.assert_allclose(np.exp(bias_V), np.array([8, 1, 3]) / 12, rtol=1e-6)


@pytest.mark.parametrize(
    "head",
    [
        softbottle.softmax(),
        softbottle.mos(2),
        softbottle.sigsoftmax(),
        softbottle.moss(2),
        softbottle.gss(3.0, 4.0),
        softbottle.gss(-5.0, 0.5),
    ],
    ids=repr,
)
def test_a_head_begins_with_the_frequencies_whatever_its_activation(head):
    counts_V = np.array([10**6, 10**4, 700, 3, 0])
    apply, theta = head.activation({}).apply, head.activation({}).theta
    p_V = jax.nn.softmax(apply(theta, head.start_bias(counts_V)))
    expected_V = (counts_V + 1) / (counts_V + 1).sum()
    np.testing.assert_allclose(p_V, expected_V, rtol=2e-5)


@pytest.mark.parametrize("counts", [[[1, 2]], [], 4, ["7"]])
def test_what_is_no_vector_of_numbers_is_refused(counts):
    with pytest.raises(ValueError, match="counts_V must be a vector of numbers"):
        softbottle.log_frequencies(counts)


@pytest.mark.parametrize("wrong", [-1, np.inf, np.nan])
def test_what_is_no_count_is_refused_with_its_value(wrong):
    with pytest.raises(ValueError, match=f"finite and not negative, got {wrong:g}"):
        softbottle.log_frequencies([3.0, wrong])
