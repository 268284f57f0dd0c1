import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from softbottle.ops.mixture import activations
from tests import oracle

KNOTS = np.array([-1.7, -0.4, 0.1, 0.9, 2.6])
SLOPES = np.array([0.3, 1.7, 0.2, 2.0])
Z = np.linspace(-6, 6, 101)


def check(apply, theta, positive, slope):
    """Value and derivative of g against log f and its derivative."""
    each = jax.vmap(jax.value_and_grad(lambda one: apply(theta, one)))
    ours, bar = jax.jit(each)(Z.astype(np.float32))
    exact = np.log(positive({}, Z))
    oracle.assert_close(ours, exact, "float32")
    oracle.assert_close(bar, slope({}, Z), "float32")


def test_identity_is_the_logarithm_of_exp():
    check(activations.identity, (), lambda p, z: np.exp(z), lambda p, z: 1 + 0 * z)


def test_add_log_sigmoid_is_the_logarithm_of_exp_times_sigmoid():
    check(
        activations.add_log_sigmoid,
        (),
        lambda p, z: np.exp(z) * oracle.sigmoid(z),
        lambda p, z: 2 - oracle.sigmoid(z),
    )


@pytest.mark.parametrize("center, slope", [(0.0, 1.0), (-1.5, 2.5), (2.0, 0.5)])
def test_generalized_is_the_published_formula(center, slope):
    positive, derivative = oracle.generalized(center, slope)
    check(activations.generalized, (center, slope), positive, derivative)


@pytest.mark.parametrize(
    "apply, even", [("piecewise", False), ("piecewise_even", True)]
)
def test_piecewise_maps_interpolate_and_go_on_beyond_the_knots(apply, even):
    knots = np.linspace(-1.7, 2.3, 5) if even else KNOTS

    @jax.jit
    def run(knots, slopes, z):
        return getattr(activations, apply)(activations.segments(knots, slopes), z)

    ours = run(*oracle.cast((knots, SLOPES, Z), jnp.float32))
    exact = oracle.overlaps(knots, Z) @ SLOPES
    exact -= (oracle.overlaps(knots, knots) @ SLOPES)[2]  # 0 at the middle knot
    oracle.assert_close(ours, exact, "float32")


FIXED = {
    "softmax": softbottle.softmax(),
    "sigsoftmax": softbottle.sigsoftmax(),
    "gss": softbottle.gss(-1.5, 2.5),
    "softcap": softbottle.softcap(4.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("head", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize("shape", [(-1,), (-1, 4)], ids=["rows", "words"])
def test_the_form_in_base_2_has_the_same_value_and_slope(head, shape):
    activation = head.activation({})

    @jax.jit
    def run(z):
        apply = functools.partial(activation.apply, activation.theta)
        g, slope = jax.jvp(apply, (z,), (jnp.ones_like(z),))
        z2 = z * (activations.LOG2_E * activation.unit)
        ahead2, slope2 = activation.base2(activation.theta, z2, 0.75)
        g2 = ahead2 + 0.75
        slope2 = jnp.ones_like(z) if slope2 is None else slope2
        return g, slope, g2, slope2 * activation.slope_unit

    # Words of a row may be computed together: small ones, far ones and what is no word.
    far = [-1e4, 1e4, activations.DEAD]
    z = np.random.default_rng(0).permutation(np.tile([*Z, *far], 4)).astype(np.float32)
    g, slope, g2, slope2 = (np.ravel(array) for array in run(z.reshape(shape)))
    live = z > activations.DEAD / 2
    ours = g2[live] / activations.LOG2_E
    np.testing.assert_allclose(ours, g[live], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope2[live], slope[live], rtol=1e-5, atol=1e-6)
    # A row that is no word gets nothing, even beside the least of words.
    assert np.all(np.exp(g[~live]) == 0)
    assert np.all(np.exp2(g2[~live] - g2[live].min()) == 0)
    assert np.all(np.isfinite(slope2[~live]))


def test_a_constant_of_numpy_is_no_parameter():
    activation = activations.Activation(activations.generalized, (np.float32(0.5), 2))
    assert activation.theta == (0.5, 2.0) and activation.params == ()


@pytest.mark.parametrize("z", [-1e4, 1e4, -88.0, 88.0])
def test_values_and_slopes_are_finite_far_out(z):
    for apply, theta in (
        (activations.add_log_sigmoid, ()),
        (activations.generalized, (-1.5, 2.5)),
    ):
        value, slope = jax.value_and_grad(lambda x, f=apply, t=theta: f(t, x))(z)
        assert np.isfinite(value) and np.isfinite(slope)
