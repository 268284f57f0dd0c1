import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import softbottle
from tests import oracle

POINT = oracle.make_inputs("softmax")


@functools.cache
def value_and_bars(head):
    point = oracle.cast(POINT, jnp.float32)
    return jax.jit(jax.value_and_grad(head.loss, argnums=(1, 2, 3)))(*point)


@pytest.mark.slow
@pytest.mark.parametrize(
    "center, slope, twin",
    [(0.0, 1.0, softbottle.softmax()), (0.0, 2.0, softbottle.sigsoftmax())],
)
def test_gss_contains_softmax_and_sigsoftmax(center, slope, twin):
    ours = value_and_bars(softbottle.gss(center, slope))
    oracle.assert_close(ours, value_and_bars(twin), "float32")


def test_gss_of_slope_one_is_softmax_wherever_it_is_centred():
    ours = value_and_bars(softbottle.gss(-1.5, 1.0))
    oracle.assert_close(ours, value_and_bars(softbottle.softmax()), "float32")


@pytest.mark.parametrize("name", ["sigsoftmax", "moss", "gss"])
def test_a_shift_of_all_logits_changes_the_loss(name):
    inputs = oracle.make_inputs(name)
    shifted = inputs._replace(bias_V=inputs.bias_V + 3.0)
    nll = jax.jit(oracle.CASES[name].head.nll)
    ours_T, theirs_T = (
        nll(*oracle.cast(point[:5], jnp.float32)) for point in (shifted, inputs)
    )
    assert np.all(np.abs(np.subtract(ours_T, theirs_T)) > 1e-3)


@pytest.mark.parametrize(
    "center, slope", [(0.0, 0.0), (0.0, -1.0), (float("nan"), 2.0), (0.0, float("inf"))]
)
def test_a_slope_that_is_not_positive_or_finite_is_refused(center, slope):
    wrong = center if center else slope
    with pytest.raises(ValueError, match=f"must be .*, got {wrong!r}"):
        softbottle.gss(center, slope)


def test_gss_refuses_components_that_are_not_positive():
    with pytest.raises(ValueError, match="components .*0"):
        softbottle.gss(0.0, 2.0, components=0)
