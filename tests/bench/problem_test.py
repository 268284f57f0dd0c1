import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from softbottle.bench import head, measure, problem, recurrence

CASE = problem.Case("odd", tokens=11, components=3, dim=23, vocab=509)


def by_numpy(count, stream, width):
    counter_X = np.arange(count, dtype=np.int32)
    value_X = problem.uniform(counter_X, stream, lambda x: x.astype(np.float32))
    return (value_X * np.float32(width)).astype(ml_dtypes.bfloat16)


def bits(array):
    return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize("width", [1.0, problem.half_width(280)])
def test_numbers_are_the_same_bits_in_numpy_and_jax(width):
    ours_X = measure.uniform(10_007, problem.TABLE, width)
    np.testing.assert_array_equal(bits(ours_X), bits(by_numpy(10_007, 1, width)))


def test_numbers_are_the_same_bits_in_torch():
    torch = pytest.importorskip("torch")
    from softbottle.bench import peers

    theirs, labels_T = peers.make_inputs(CASE)
    ours, our_labels_T = head.make_inputs(CASE)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(
            np.asarray(mine, np.float32), other.detach().to(torch.float32).numpy()
        )
    np.testing.assert_array_equal(our_labels_T, labels_T.numpy())


def test_torch_agrees_with_jax_on_the_truth_about_an_lstm():
    pytest.importorskip("torch")
    from softbottle.bench import peers

    stack = problem.STACKS["tiny"]
    theirs = peers.lstm_truth(problem.stack_arrays(stack, peers.uniform))
    ours = recurrence.truth(problem.stack_arrays(stack, measure.uniform))
    (_, outputs_SBH), (inputs_bar_SBI, _) = ours
    np.testing.assert_allclose(outputs_SBH, theirs[0].numpy(), atol=1e-14)
    np.testing.assert_allclose(inputs_bar_SBI, theirs[1].numpy(), atol=1e-14)


def test_the_hash_leaves_no_trace_of_its_counter():
    value_X = by_numpy(2**16, problem.CONTEXT, 1.0).astype(np.float64)
    other_X = by_numpy(2**16, problem.TABLE, 1.0).astype(np.float64)
    assert -1 <= value_X.min() < -0.99 and 0.99 < value_X.max() <= 1
    assert abs(value_X.mean()) < 0.01 and abs(value_X.var() - 1 / 3) < 0.01
    for pair in ((value_X[1:], value_X[:-1]), (value_X, other_X)):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.02


def test_a_case_looks_like_a_language_model_before_its_softmax():
    case = CASE._replace(tokens=64, dim=256)
    (log_prior_TK, context_TKE, table_VE, bias_V), labels_T = head.make_inputs(case)
    np.testing.assert_allclose(np.exp(log_prior_TK).sum(axis=1), 1, rtol=1e-6)
    z = jnp.einsum("tke,ve->tkv", context_TKE, table_VE)
    assert 2 < float(jnp.std(z.astype(jnp.float32))) < 3
    assert context_TKE.dtype == table_VE.dtype == jnp.bfloat16
    np.testing.assert_array_equal(bias_V.astype(jnp.bfloat16).astype(float), bias_V)
    assert labels_T.min() >= 0 and labels_T.max() < case.vocab
    assert len(set(labels_T.tolist())) > 48


def test_flop_counts_are_those_of_the_products():
    assert problem.CASES["ptb"].product_flop == 2 * 840 * 15 * 280 * 10_000
    stack = problem.Stack("s", rows=2, positions=3, widths=(5, 7))
    assert stack.product_flop == 2 * 2 * 3 * 4 * (5 * 7 + 7 * 7)
    assert jax.tree.leaves(problem.stack_arrays(stack, by_numpy))[0].shape == (3, 2, 5)
