"""A binary tree of K - 1 gates over K values, and its derivatives.

Gate n weights its left branch with gamma_n and its right one with 1 - gamma_n; the
branches of gate n are those of the gates 2 n + 1 and 2 n + 2.
"""

from collections.abc import Sequence

import jax


def nodes(gates: Sequence[jax.Array], values: Sequence[jax.Array]) -> list[jax.Array]:
    """The means at every gate, the root's first, then the values."""
    found = [*gates, *values]
    for n in reversed(range(len(gates))):
        left, right = found[2 * n + 1], found[2 * n + 2]
        found[n] = right + gates[n] * (left - right)
    return found


def spread(gates: Sequence[jax.Array], whole: jax.Array) -> list[jax.Array]:
    """What every gate has of the root's, then what every value has.

    Of 1 the values have their weights in the root's mean.
    """
    parts = [whole]
    for n, gate in enumerate(gates):
        left = gate * parts[n]
        parts += [left, parts[n] - left]
    return parts


def pull(
    gates: Sequence[jax.Array], found: Sequence[jax.Array], bar: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Gradients by the gates' levels and by the values, from that by the root's mean.

    Args:
        gates: gamma.
        found: what `nodes` gives.
        bar: the gradient by the mean.
    """
    bars = spread(gates, bar)
    levels = [
        (1 - gate) * bars[2 * n + 1] * (found[2 * n + 1] - found[2 * n + 2])
        for n, gate in enumerate(gates)
    ]
    return levels, bars[len(gates) :]
