"""The log-sum-exp of what may all be -inf.

jax.nn.logsumexp gives -inf there as well, and a gradient of NaN.
"""

import jax
import jax.numpy as jnp


def log_sum(array: jax.Array, axis: int = -1) -> jax.Array:
    """log sum exp along an axis; its gradient is 0 where all of it is -inf."""
    top = jnp.max(array, axis=axis, keepdims=True, initial=-jnp.inf)
    top = jax.lax.stop_gradient(top)
    some = ~jnp.isneginf(top)
    top = jnp.where(some, top, 0.0)
    total = jnp.sum(jnp.exp(array - top), axis=axis, keepdims=True)
    log_total = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    return jnp.squeeze(log_total, axis)
