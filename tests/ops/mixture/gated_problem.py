"""Words with gates of their own: a small problem, and its truth from dense logits."""

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.ops.mixture import gated
from softbottle.ops.mixture.arrays import Vocabulary

TOKENS, WIDTH, FREQUENT, FEATURE = 11, 7, 13, 3


def make_problem(components=4, tokens=TOKENS, width=WIDTH, frequent=FREQUENT):
    rng = np.random.default_rng(3)
    gates = components - 1
    shapes = (
        (tokens, components, width),
        (tokens, gates, FEATURE),
        (tokens, gates),
        (frequent, width),
        (frequent,),
        (frequent, FEATURE),
        (frequent, gates),
    )
    return tuple(rng.normal(size=shape) for shape in shapes)


def paired(arrays):
    table_SE, bias_S, *rest = arrays[3:]
    return gated.Tokens(*arrays[:3]), gated.Words(Vocabulary(table_SE, bias_S), *rest)


@jax.jit
def dense(context, feature, level, table, bias, vector, offset):
    """The logits [T, S], each component's weight written as its path in the tree."""
    gates = jnp.einsum("tjg,sg->tsj", feature, vector)
    gates = 1 / (1 + jnp.exp(-gates - level[:, None] - offset[None]))
    components = context.shape[1]
    total = bias[None]
    for k in range(components):
        weight, gate, low, high = 1.0, 0, 0, components
        while high - low > 1:
            middle = (low + high) // 2
            left = k < middle
            weight = weight * (gates[..., gate] if left else 1 - gates[..., gate])
            gate = 2 * gate + (1 if left else 2)
            low, high = (low, middle) if left else (middle, high)
        total = total + weight * (context[:, k] @ table.T)
    return total


def weighted(pair):
    cotangent_2T = np.random.default_rng(1).normal(size=(2, len(pair[0])))
    return sum(jnp.vdot(c, x) for c, x in zip(cotangent_2T, pair, strict=True))


@jax.jit
def exact_step(*arrays):
    def total(*arrays):
        logit_TS = dense(*arrays)
        tokens, frequent = logit_TS.shape
        score_T = logit_TS[jnp.arange(tokens), jnp.arange(tokens) % frequent]
        return weighted((score_T, jax.nn.logsumexp(logit_TS, axis=1)))

    return jax.value_and_grad(total, tuple(range(7)))(*arrays)


def make_step(options):
    def total(*arrays):
        labels_T = np.arange(len(arrays[0]), dtype=np.int32) % len(arrays[3])
        return weighted(gated.scores(*paired(arrays), labels_T, options))

    return jax.jit(jax.value_and_grad(total, tuple(range(7))))
