"""How a head with projections makes its contexts from the state.

    tanh       tanh(h W_k + b_k)            as the papers' mixtures have it
    linear     h P + x W_k + b_k            x = h / (4 |h|)
    residual   h P + tanh(x W_k + b_k)

P is the identity where the table is as wide as the state, else a matrix of its own.

A tanh bounds a context, so that the size of the logits is left to the table: on one
that starts small, as most do, the contexts saturate while they learn how frequent words
are, and then learn little more. The other two start with W_k = 0 and b_k = 0, and the
head therefore as the very softmax of h P that it replaces; what tells the contexts
apart is the prior, which starts at random.

They read the state's direction, and so does their prior: a step of Adam moves x W_k by
at most a quarter of the learning rate times the root of the width, whatever the
backbone. By h, whose size is the root of the width behind a transformer's last norm, it
would be the width itself, which saturates tanh and prior within a few steps. The
quarter was chosen by training (docs/results/dropin.md): at length 1 components die at
high rates, at a sixteenth they learn slowly.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from softbottle.heads import base
from softbottle.heads.base import Params

KINDS = ("residual", "linear", "tanh")
DEFAULT = KINDS[0]
# The length of x.
LENGTH = 0.25
# A squared length from which on a state has a direction.
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
    latent_DKE, bias_KE = init_bend(kind, keys, count, hidden_dim, context_dim)
    return {
        "latent_DKE": latent_DKE,
        "latent_bias_KE": bias_KE,
        **init_path("project_DE", kind, keys[0], hidden_dim, context_dim),
    }


def init_bend(
    kind: str,
    keys: Sequence[jax.Array],
    count: int,
    hidden_dim: int,
    context_dim: int,
) -> tuple[jax.Array, jax.Array]:
    """`latent_DKE` and `latent_bias_KE`, as `init` has them: zero beside a path."""
    shape = (hidden_dim, count, context_dim)
    if kind != "tanh":
        return jnp.zeros(shape), jnp.zeros(shape[1:])
    return (
        base.uniform(keys[0], shape, hidden_dim),
        base.uniform(keys[1], shape[1:], hidden_dim),
    )


def init_path(
    name: str, kind: str, key: jax.Array, hidden_dim: int, context_dim: int
) -> Params:
    """P by its name, with as wide a spread as the state's own; empty without one."""
    if kind == "tanh" or hidden_dim == context_dim:
        return {}
    spread = hidden_dim**-0.5
    return {name: spread * jax.random.normal(key, (hidden_dim, context_dim))}


def read(kind: str, hidden_TD: jax.Array) -> jax.Array:
    """What the projections and the prior read: the state, or x of its direction.

    A state of zeros has none: x and its gradient are zeros.
    """
    if kind == "tanh":
        return hidden_TD
    wide_TD = hidden_TD.astype(jnp.promote_types(hidden_TD.dtype, jnp.float32))
    square_T1 = jnp.sum(jnp.square(wide_TD), axis=1, keepdims=True)
    long_T1 = square_T1 > TINY
    scale_T1 = LENGTH * jax.lax.rsqrt(jnp.where(long_T1, square_T1, 1.0))
    read_TD = jnp.where(long_T1, wide_TD * scale_T1, 0.0)
    return read_TD.astype(hidden_TD.dtype)


def init_prior(kind: str, key: jax.Array, count: int, hidden_dim: int) -> jax.Array:
    """A prior's matrix, `prior_DK`: a log-weight spreads by about 0.6 at most."""
    # A state is about as long as the root of its width.
    fan_in = hidden_dim if kind == "tanh" else LENGTH**2
    return base.uniform(key, (hidden_dim, count), fan_in)


def log_prior(kind: str, params: Params, hidden_TD: jax.Array) -> jax.Array:
    """log softmax of what `read` gives times `prior_DK`, float32 or better: [T, K]."""
    return log_weights(read(kind, hidden_TD), params["prior_DK"])


def log_weights(read_TD: jax.Array, prior_DK: jax.Array) -> jax.Array:
    """log softmax of a product, float32 or better: [T, K]."""
    score_TK = jnp.einsum(
        "td,dk->tk",
        read_TD,
        prior_DK.astype(read_TD.dtype),
        preferred_element_type=jnp.promote_types(read_TD.dtype, jnp.float32),
    )
    return jax.nn.log_softmax(score_TK)


def make(kind: str, params: Params, hidden_TD: jax.Array) -> jax.Array:
    """The contexts of every token, [T, K, E], from the parameters of `init`."""
    bent_TKE = bend(
        kind, read(kind, hidden_TD), params["latent_DKE"], params["latent_bias_KE"]
    )
    return beside_path(kind, hidden_TD, bent_TKE, params.get("project_DE"))


def bend(
    kind: str, read_TD: jax.Array, latent_DKE: jax.Array, bias_KE: jax.Array
) -> jax.Array:
    """Projections of what `read` gives, through tanh unless the kind is linear."""
    dtype = read_TD.dtype
    latent_TKE = jnp.einsum("td,dke->tke", read_TD, latent_DKE.astype(dtype))
    latent_TKE = latent_TKE + bias_KE.astype(dtype)[None]
    return latent_TKE if kind == "linear" else jnp.tanh(latent_TKE)


def beside_path(
    kind: str, hidden_TD: jax.Array, bent_TKE: jax.Array, project_DE: jax.Array | None
) -> jax.Array:
    """The contexts, [T, K, E]: what `bend` gives, and h P where the kind has a path."""
    if kind == "tanh":
        return bent_TKE
    if project_DE is not None:
        project_DE = project_DE.astype(hidden_TD.dtype)
        hidden_TD = jnp.einsum("td,de->te", hidden_TD, project_DE)
    return hidden_TD[:, None] + bent_TKE
