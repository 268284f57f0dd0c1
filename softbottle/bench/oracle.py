"""The mixture loss and its gradient in float64, and how far a variant may be from it.

    z = H W' + b,   lse = logsumexp_v z,   nll = -logsumexp_k(log_prior + z_y - lse),
    dz = weight r (softmax(z) - [v == y]),   dH = dz W,   dW = dz' H,   db = sum dz

with r the posterior of a component. It is written out by hand, shares nothing with the
operations, and runs on NumPy, jax and torch arrays alike, so that every child checks
its own variants where they run.

Axes: R rows of a GEMM, components of a chunk of tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from softbottle.bench.problem import Array

BLOCK_BYTES = 2**31
INPUTS = ("log_prior", "context", "table", "bias")


class Expected(NamedTuple):
    """Per-token losses and the gradients of their mean, in the order of INPUTS."""

    nll_T: Array
    bars: tuple[Array, Array, Array, Array]


class Limits(NamedTuple):
    """How far the mean loss (nats) and a gradient (relative norm) may be off."""

    loss: float
    gradient: float


OURS = Limits(1e-4, 3e-3)
# Peers round logits and probabilities to bfloat16, and the MoS authors' code adds 1e-8
# to every probability. Their errors are shown, and only nonsense is refused.
PEERS = Limits(5e-1, 5e-1)


def block(
    xp: Any,
    log_prior_CK: Array,
    context_CKE: Array,
    table_VE: Array,
    bias_V: Array,
    words_V: Array,
    labels_C: Array,
    weight: float,
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    """Losses of a chunk of tokens and weight times the gradients of their sum."""
    tokens, components, dim = context_CKE.shape
    rows_RE = context_CKE.reshape(tokens * components, dim)
    labels_R = xp.broadcast_to(labels_C[:, None], (tokens, components)).reshape(-1)
    hit_RV = labels_R[:, None] == words_V[None]
    z_RV = rows_RE @ table_VE.T + bias_V[None]
    top_R = xp.amax(z_RV, 1)
    e_RV = xp.exp(z_RV - top_R[:, None])
    total_R = e_RV.sum(1)
    score_R = xp.where(hit_RV, z_RV, 0.0).sum(1)
    log_p_CK = (score_R - top_R - xp.log(total_R)).reshape(tokens, components)
    joint_CK = log_prior_CK + log_p_CK
    best_C = xp.amax(joint_CK, 1)
    nll_C = -best_C - xp.log(xp.exp(joint_CK - best_C[:, None]).sum(1))
    posterior_CK = weight * xp.exp(joint_CK + nll_C[:, None])
    p_RV = e_RV / total_R[:, None]
    z_bar_RV = xp.where(hit_RV, p_RV - 1.0, p_RV) * posterior_CK.reshape(-1)[:, None]
    context_bar_CKE = (z_bar_RV @ table_VE).reshape(tokens, components, dim)
    bars = (-posterior_CK, context_bar_CKE, z_bar_RV.T @ rows_RE, z_bar_RV.sum(0))
    return nll_C, bars


def log_probs(
    xp: Any, log_prior_TK: Array, context_TKE: Array, table_VE: Array, bias_V: Array
) -> Array:
    """log P(v) of every word of float64 inputs, [T, V], one component at a time."""
    p_TV = 0.0
    for k in range(log_prior_TK.shape[1]):
        z_TV = context_TKE[:, k] @ table_VE.T + bias_V[None]
        e_TV = xp.exp(z_TV - xp.amax(z_TV, 1)[:, None])
        prior_T = xp.exp(log_prior_TK[:, k])
        p_TV += (prior_T / e_TV.sum(1))[:, None] * e_TV
    return xp.log(p_TV)


def expected(
    xp: Any,
    inputs: tuple[Array, Array, Array, Array],
    labels_T: Array,
    words_V: Array,
    wide: Callable[[Array], Array],
    compiled: Callable[..., tuple[Array, tuple[Array, Array, Array, Array]]],
) -> Expected:
    """Losses and gradients of the mean loss, a chunk of tokens at a time.

    Args:
        xp: numpy, jax.numpy or torch.
        inputs: arrays in the order of INPUTS, of any dtype.
        words_V: 0, 1, ... on the inputs' device.
        wide: converts an array to float64.
        compiled: `block` without its first argument, compiled or not.
    """
    log_prior_TK, context_TKE, table_VE, bias_V = inputs
    tokens, components = log_prior_TK.shape
    vocab = table_VE.shape[0]
    size = _chunk(tokens, 8 * components * vocab)
    table_VE, bias_V = wide(table_VE), wide(bias_V)
    by_token, sums = [], (0.0, 0.0)
    for start in range(0, tokens, size):
        chunk = slice(start, start + size)
        prior_CK, context_CKE = wide(log_prior_TK[chunk]), wide(context_TKE[chunk])
        nll_C, bars = compiled(
            prior_CK,
            context_CKE,
            table_VE,
            bias_V,
            words_V,
            labels_T[chunk],
            1 / tokens,
        )
        by_token.append((nll_C, bars[0], bars[1]))
        sums = (sums[0] + bars[2], sums[1] + bars[3])
    nll_T, prior_bar_TK, context_bar_TKE = (
        xp.concatenate(parts) for parts in zip(*by_token, strict=True)
    )
    return Expected(nll_T, (prior_bar_TK, context_bar_TKE, *sums))


def pairs(bars: Sequence[Array], wanted: Expected) -> list[tuple[str, Array, Array]]:
    """Name, gradient and its truth for each input; only the bias may be missing."""
    count = max(len(bars), len(INPUTS) - 1)
    return list(zip(INPUTS[:count], bars, wanted.bars[:count], strict=True))


def verdict(row: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The row, or what is wrong with it instead of a time."""
    checks = [("loss_error", limits.loss)] if "loss_error" in row else []
    checks += [(name, limits.gradient) for name in row if name.startswith("error_")]
    checks += [("error", limits.gradient)] if "error" in row else []
    # Written so that a NaN is beyond every limit.
    wrong = [
        f"{name} {row[name]:.1e} > {limit:.0e}"
        for name, limit in checks
        if not row[name] <= limit
    ]
    if not wrong:
        return row | {"status": "ok"}
    reason = row.get("reason", ", ".join(wrong))
    return row | {"status": "wrong", "reason": f"wrong: {reason}"}


def _chunk(tokens, bytes_per_token):
    """The largest divisor of `tokens` whose float64 block fits BLOCK_BYTES."""
    most = max(1, BLOCK_BYTES // bytes_per_token)
    return max(n for n in range(1, tokens + 1) if tokens % n == 0 and n <= most)
