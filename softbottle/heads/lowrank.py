"""The rank-constrained head: P(v) = softmax_v( (A B h)_v + b_v ), rank at most r.

A is the model's output table, r wide, and B projects the hidden state onto r
dimensions. It is how the saturation study asks how many dimensions a model needs.
"""

import jax
import jax.numpy as jnp

from softbottle.heads import base


def lowrank(rank: int) -> base.Head:
    """A softmax through `rank` dimensions; its table is `rank` wide.

    Raises:
        ValueError: if `rank` is not a positive integer, and in `init` if the table's
            width differs from it.
    """
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be an integer >= 1, got {rank!r}.")

    def init(key, hidden_dim, context_dim):
        if context_dim != rank:
            raise ValueError(
                f"lowrank({rank}) needs a table of that width, got context_dim="
                f"{context_dim}."
            )
        bound = hidden_dim**-0.5
        return {"project_DE": bound * jax.random.normal(key, (hidden_dim, rank))}

    def mix(params, hidden_TD, latent_mask=None):
        project_DE = params["project_DE"].astype(hidden_TD.dtype)
        return base.single(jnp.einsum("td,de->te", hidden_TD, project_DE), latent_mask)

    return base.mixture_head(init, mix)
