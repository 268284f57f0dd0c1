"""The tree of gates against the products of its paths, and against jax's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle.ops.mixture import gated_tree


def make(components):
    rng = np.random.default_rng(2)
    gates = rng.uniform(size=(components - 1, 5)).astype(np.float32)
    return gates, rng.normal(size=(components, 5)).astype(np.float32)


def test_four_values_have_the_weights_of_the_paper():
    gates, values = make(4)
    g0, g1, g2 = gates
    weights = [g0 * g1, g0 * (1 - g1), (1 - g0) * g2, (1 - g0) * (1 - g2)]
    found = gated_tree.spread(list(gates), np.ones_like(g0))[3:]
    np.testing.assert_allclose(found, weights, rtol=1e-5)
    mean = gated_tree.nodes(list(gates), list(values))[0]
    np.testing.assert_allclose(mean, sum(weights * values), rtol=1e-5)


@pytest.mark.parametrize("components", [2, 4, 8])
def test_gradients_are_those_of_jax(components):
    gates, values = make(components)
    levels = np.log(gates / (1 - gates))

    def mean(levels, values):
        gates = [jax.nn.sigmoid(level) for level in levels]
        return gated_tree.nodes(gates, list(values))[0]

    bar = np.arange(1.0, 6.0, dtype=np.float32)
    wanted = jax.vjp(mean, levels, values)[1](bar)
    found = gated_tree.nodes(list(gates), list(values))
    ours = gated_tree.pull(list(gates), found, bar)
    for each, wanted_each in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(jnp.stack(each), wanted_each, rtol=2e-4, atol=1e-6)
