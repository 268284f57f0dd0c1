"""What a vocabulary's bias may start from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def log_frequencies(counts_V: Any) -> jax.Array:
    """The bias with which a softmax begins by predicting how frequent words are.

    log((count + 1) / (all counts + words)): a state of zero then predicts every word
    about as often as the text has it, and contexts need not learn that first. So it is
    with mixtures; `Head.start_bias` also serves heads whose g is not the identity.

    Args:
        counts_V: how often each word is in the training text.

    Returns:
        bias_V, float32.

    Raises:
        ValueError: unless the counts are a vector of numbers that are not negative.
    """
    counts = np.asarray(counts_V)
    if counts.ndim != 1 or not counts.size or counts.dtype.kind not in "biuf":
        raise ValueError(
            f"counts_V must be a vector of numbers, got the shape {counts.shape} and "
            f"the dtype {counts.dtype}."
        )
    counts = counts.astype(np.float64)
    if not np.all(np.isfinite(counts) & (counts >= 0)):
        wrong = counts[~(np.isfinite(counts) & (counts >= 0))][0]
        raise ValueError(f"counts_V must be finite and not negative, got {wrong:g}.")
    return jnp.asarray(np.log((counts + 1) / (counts.sum() + counts.size)), jnp.float32)
