"""How a head with projections makes its contexts from the state.

    tanh       tanh(h W_k + b_k)            as the papers' mixtures have it
    linear     h P + x W_k + b_k            x = h / |h|
    residual   h P + tanh(x W_k + b_k)

P is the identity where the table is as wide as the state, else a matrix of its own.

A tanh bounds a context, so that the size of the logits is left to the table: on one
that starts small, as most do, the contexts saturate while they learn how frequent words
are, and then learn little more. The other two start with W_k = 0 and b_k = 0, and the
head therefore as the very softmax of h P that it replaces; what tells the contexts
apart is the prior, which starts at random.

They read the state's direction x, and so does their prior: a step of Adam moves x W_k
by at most the learning rate times the root of the width, whatever the backbone. By h,
whose size is the root of the width behind a transformer's last norm, it would be the
width itself, which saturates tanh and prior within a few steps.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from softbottle.heads import base
from softbottle.heads.base import Params

KINDS = ("residual", "linear", "tanh")
DEFAULT = KINDS[0]
# Added to a squared length: a state of zeros has no direction.
TINY = 1e-12


@dataclasses.dataclass(frozen=True, repr=False)
class Projecting(base.Head):
    """A head whose contexts are projections of the state.

    Attributes:
        context: how they are made, one of KINDS.
    """

    context: str = dataclasses.field(default=DEFAULT, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings."""
        check(self.context)

    @property
    def projects(self) -> bool:
        """Each context is a projection of the state."""
        return True


def check(kind: str) -> None:
    """Raise ValueError unless there is such a kind."""
    if kind not in KINDS:
        raise ValueError(f"context must be one of {KINDS}, got {kind!r}.")


def init(
    kind: str,
    keys: Sequence[jax.Array],
    count: int,
    hidden_dim: int,
    context_dim: int,
) -> Params:
    """`latent_DKE`, `latent_bias_KE` and, for a P of its own, `project_DE`.

    Args:
        kind: of KINDS.
        keys: two of jax.random, of the matrices and of the biases.
        count: K, contexts per token.
        hidden_dim: D, width of the states.
        context_dim: E, width of the vocabulary table.
    """
    shape = (hidden_dim, count, context_dim)
    if kind == "tanh":
        return {
            "latent_DKE": base.uniform(keys[0], shape, hidden_dim),
            "latent_bias_KE": base.uniform(keys[1], shape[1:], hidden_dim),
        }
    params = {"latent_DKE": jnp.zeros(shape), "latent_bias_KE": jnp.zeros(shape[1:])}
    if hidden_dim != context_dim:
        # As wide a spread as the state's own: the logits are those of a softmax.
        normal_DE = jax.random.normal(keys[0], (hidden_dim, context_dim))
        params["project_DE"] = hidden_dim**-0.5 * normal_DE
    return params


def read(kind: str, hidden_TD: jax.Array) -> jax.Array:
    """What the projections and the prior read: the state, or its direction."""
    if kind == "tanh":
        return hidden_TD
    wide_TD = hidden_TD.astype(jnp.promote_types(hidden_TD.dtype, jnp.float32))
    square_T1 = jnp.sum(jnp.square(wide_TD), axis=1, keepdims=True)
    return (wide_TD * jax.lax.rsqrt(square_T1 + TINY)).astype(hidden_TD.dtype)


def init_prior(kind: str, key: jax.Array, count: int, hidden_dim: int) -> jax.Array:
    """A prior's matrix, `prior_DK`: a log-weight spreads by about 0.6 at most."""
    # A state is about as long as the root of its width, a direction has length 1.
    fan_in = hidden_dim if kind == "tanh" else 1
    return base.uniform(key, (hidden_dim, count), fan_in)


def log_prior(kind: str, params: Params, hidden_TD: jax.Array) -> jax.Array:
    """log softmax of what `read` gives times `prior_DK`, float32 or better: [T, K]."""
    read_TD = read(kind, hidden_TD)
    score_TK = jnp.einsum(
        "td,dk->tk",
        read_TD,
        params["prior_DK"].astype(read_TD.dtype),
        preferred_element_type=jnp.promote_types(read_TD.dtype, jnp.float32),
    )
    return jax.nn.log_softmax(score_TK)


def make(kind: str, params: Params, hidden_TD: jax.Array) -> jax.Array:
    """The contexts of every token, [T, K, E], from the parameters of `init`."""
    dtype = hidden_TD.dtype
    latent_TKE = jnp.einsum(
        "td,dke->tke", read(kind, hidden_TD), params["latent_DKE"].astype(dtype)
    )
    latent_TKE = latent_TKE + params["latent_bias_KE"].astype(dtype)[None]
    bent_TKE = latent_TKE if kind == "linear" else jnp.tanh(latent_TKE)
    if kind == "tanh":
        return bent_TKE
    if "project_DE" in params:
        project_DE = params["project_DE"].astype(dtype)
        hidden_TD = jnp.einsum("td,de->te", hidden_TD, project_DE)
    return hidden_TD[:, None] + bent_TKE
