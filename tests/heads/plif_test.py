import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from tests import oracle

POINT = oracle.make_inputs("softmax")
UNIT = math.log(math.e - 1)  # softplus of it is 1


@pytest.mark.slow
@pytest.mark.parametrize("knots", [8, (-1.7, -0.4, 0.1, 0.9, 2.6)])
def test_unit_slopes_are_a_softmax(knots):
    head = softbottle.plif(knots, 2.5)
    segments = knots if isinstance(knots, int) else len(knots) - 1
    params = {"slope_N": np.full(segments, UNIT, np.float32)}
    ours_T = jax.jit(head.nll)(params, *oracle.cast(POINT, jnp.float32)[1:5])
    plain_T = oracle.nll("softmax", POINT)
    np.testing.assert_allclose(ours_T, plain_T, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [100, 10_000, 100_000])
def test_the_map_is_exact_in_float32_however_many_segments(segments):
    head = softbottle.plif(segments)
    z = np.linspace(-21, 21, 211)

    @jax.jit
    def run(key, z):
        params = head.init(key, 7, 7)
        activation = head.activation(params)
        return params["slope_N"], activation.apply(activation.theta, z)

    slope_N, ours = run(jax.random.key(0), z.astype(np.float32))
    ours = np.asarray(ours, np.float64)
    knots = np.linspace(-20, 20, segments + 1)
    slopes = np.log1p(np.exp(np.asarray(slope_N, np.float64)))
    values = np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
    exact = np.interp(z, knots, values)
    exact += np.where(z < -20, slopes[0] * (z + 20), 0)
    exact += np.where(z > 20, slopes[-1] * (z - 20), 0)
    exact -= np.interp(0.0, knots, values)
    # A float32 logit of magnitude 20 is itself known to 1e-6.
    np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-4)
    assert np.all(np.diff(ours) > 0)


@pytest.mark.parametrize("knots", [(1.0, 1.0, 2.0), (3.0, 1.0), (0.0, float("nan"))])
def test_knots_out_of_order_are_refused_with_their_values(knots):
    with pytest.raises(ValueError, match="increasing, got .*" + repr(knots[-1])):
        softbottle.plif(knots)


@pytest.mark.parametrize("knots, span", [(1, 20.0), (0, 20.0), (9, 0.0), (9, -2.0)])
def test_too_few_knots_or_no_span_are_refused(knots, span):
    with pytest.raises(ValueError, match=f"got {knots} and {span!r}"):
        softbottle.plif(knots, span)


def test_one_position_is_not_enough():
    with pytest.raises(ValueError, match=r"two positions, got \(1.0,\)"):
        softbottle.plif((1.0,))


def test_components_must_be_positive():
    with pytest.raises(ValueError, match="components .*-1"):
        softbottle.plif(9, components=-1)


def test_slopes_start_around_one():
    slope_N = softbottle.plif(20_000).init(jax.random.key(0), 7, 7)["slope_N"]
    np.testing.assert_allclose(np.mean(slope_N), UNIT, atol=0.03)
    np.testing.assert_allclose(np.std(slope_N), 1.0, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plif", "plif_uneven"])
def test_a_word_with_a_bias_of_minus_infinity_is_as_good_as_none(name):
    inputs = oracle.make_inputs(name)
    gone = np.array([3, 17])
    labels_T = np.where(np.isin(inputs.labels_T, gone), 5, inputs.labels_T)
    bias_V = inputs.bias_V.copy()
    bias_V[gone] = -np.inf
    head = oracle.CASES[name].head

    @jax.jit
    def run(*args):
        def of_tokens(*args):
            return head.nll(*args[:5]) @ args[5]

        bars = (jax.value_and_grad(each, (0, 1, 3)) for each in (head.loss, of_tokens))
        return [step(*args) for step in bars]

    given = inputs._replace(bias_V=bias_V, labels_T=labels_T)
    found = run(*oracle.cast(given, jnp.float32))
    rest = np.setdiff1d(np.arange(37), gone)
    without = inputs._replace(
        table_VE=inputs.table_VE[rest],
        bias_V=inputs.bias_V[rest],
        labels_T=np.searchsorted(rest, labels_T),
    )
    value = np.dot(inputs.weights_T, oracle.nll(name, without))
    slopes, their_VE, _, their_TD = oracle.gradients(name, without, inputs.weights_T)
    for ours, (our_slopes, our_VE, our_TD) in found:
        our_VE = np.asarray(our_VE)
        bars = (ours, our_slopes, our_VE[rest], our_TD)
        oracle.assert_close(bars, (value, slopes, their_VE, their_TD), "float32")
        assert not np.any(our_VE[gone])
