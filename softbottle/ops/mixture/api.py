"""The operations everyone calls; here inputs are checked and a path is chosen.

    scores     g(z) of the label and logsumexp_v g(z_v), per token and component
    nll        -log P(label) per token; takes any cotangent
    loss       the weighted sum of nll, with its gradient computed in forward
    log_probs, top_k, sample

`options` are those of options.py. `implementation` is "auto", "blocked" (XLA,
everywhere), "pallas_gpu" (a kernel for Hopper GPUs), "pallas_tpu" (one for TPUs) or
"reference" (dense: for checking). "auto" takes the GPU kernel where it runs and XLA
elsewhere (the TPU kernel has been compiled for TPUs but not timed on one, so it is
taken when asked for), says which in the log, and never changes a number by more than
rounding.

A label that is no word of the vocabulary gives NaN, never a plausible loss; run with
`jax.debug_nans(True)` to be taken to the call. A token of weight 0 may hold any label.
Labels are integers of any kind. float16 is refused: see `check_range`.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import decode, parts
from softbottle.ops.mixture.activations import SOFTMAX, Activation
from softbottle.ops.mixture.options import Options, check_range, sum_dtype

# Each is a module of this package, imported when it is used: Pallas takes a while.
IMPLEMENTATIONS = ("blocked", "pallas_gpu", "pallas_tpu", "reference")


def scores(
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array | None,
    labels_T: jax.Array,
    activation: Activation = SOFTMAX,
    **options,
) -> tuple[jax.Array, jax.Array]:
    """The differentiable primitive: (score [T, K], lse [T, K]).

    score is g(z) of the label and lse the log-normaliser over the vocabulary; both take
    arbitrary cotangents, so losses of other shapes follow by differentiation.
    """
    chosen = Options(**options)
    bias_V = _checked(context_TKE, table_VE, bias_V, chosen)
    _check_tokens(context_TKE, labels_T=labels_T)
    labels_T = parts.word_ids(labels_T=labels_T)
    lse_TK = _lse(context_TKE, table_VE, bias_V, activation, chosen)
    score_TK = parts.target_score(
        context_TKE, table_VE, bias_V, labels_T, activation, chosen
    )
    return score_TK, lse_TK


def nll(
    log_prior_TK: jax.Array,
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array | None,
    labels_T: jax.Array,
    activation: Activation = SOFTMAX,
    **options,
) -> jax.Array:
    """-log P(label) = -logsumexp_k(log_prior + score - lse) of each token, [T]."""
    _check_tokens(context_TKE, log_prior_TK=log_prior_TK)
    score_TK, lse_TK = scores(
        context_TKE, table_VE, bias_V, labels_T, activation, **options
    )
    return -jax.nn.logsumexp(log_prior_TK + score_TK - lse_TK, axis=-1)


def loss(
    log_prior_TK: jax.Array,
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array | None,
    labels_T: jax.Array,
    weights_T: jax.Array,
    activation: Activation = SOFTMAX,
    **options,
) -> jax.Array:
    """sum_t weight[t] nll[t], a scalar whose gradient is computed in forward.

    A token of weight 0 may hold anything, even NaN, and therefore adds nothing to any
    gradient. That by its own weight is 0 as well; by another weight it is nll[t].
    """
    chosen = Options(**options)
    bias_V = _checked(context_TKE, table_VE, bias_V, chosen)
    _check_tokens(
        context_TKE, log_prior_TK=log_prior_TK, labels_T=labels_T, weights_T=weights_T
    )
    labels_T = parts.word_ids(labels_T=labels_T)
    # Padding may hold anything, even NaN; where it is read its weight is 0, and 0 times
    # a finite number is 0.
    real_T = weights_T != 0
    weights_T = weights_T.astype(sum_dtype(context_TKE, table_VE))
    labels_T = jnp.where(real_T, labels_T, 0)
    log_prior_TK = jnp.where(real_T[:, None], log_prior_TK, 0.0)
    context_TKE = jnp.where(real_T[:, None, None], context_TKE, 0.0)
    return _implementation(chosen, context_TKE).loss(
        log_prior_TK,
        context_TKE,
        table_VE,
        bias_V,
        labels_T,
        weights_T,
        activation,
        chosen,
    )


def log_probs(
    log_prior_TK: jax.Array,
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array | None,
    activation: Activation = SOFTMAX,
    **options,
) -> jax.Array:
    """log P(v) of every word, [T, V]; of the local words under `vocab_axis`."""
    chosen = _decoding(options)
    bias_V = _checked(context_TKE, table_VE, bias_V, chosen)
    _check_tokens(context_TKE, log_prior_TK=log_prior_TK)
    lse_TK = _lse(context_TKE, table_VE, bias_V, activation, chosen)
    return decode.log_probs(
        log_prior_TK, context_TKE, table_VE, bias_V, lse_TK, activation, chosen
    )


def top_k(
    log_prior_TK: jax.Array,
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array | None,
    k: int,
    activation: Activation = SOFTMAX,
    **options,
) -> tuple[jax.Array, jax.Array]:
    """The k most probable words of each token: (log-probabilities, ids), [T, k]."""
    chosen = _unsplit(_decoding(options), "top_k")
    bias_V = _checked(context_TKE, table_VE, bias_V, chosen)
    _check_tokens(context_TKE, log_prior_TK=log_prior_TK)
    words = chosen.vocab or table_VE.shape[0]
    if not 1 <= k <= words:
        raise ValueError(f"k must be between 1 and the vocabulary's {words}, got {k}.")
    lse_TK = _lse(context_TKE, table_VE, bias_V, activation, chosen)
    return decode.top_k(
        log_prior_TK, context_TKE, table_VE, bias_V, lse_TK, activation, chosen, k
    )


def sample(
    log_prior_TK: jax.Array,
    context_TKE: jax.Array,
    table_VE: jax.Array,
    bias_V: jax.Array | None,
    key: jax.Array,
    activation: Activation = SOFTMAX,
    **options,
) -> jax.Array:
    """One word a token, drawn exactly: a component, then Gumbel-max over it; [T]."""
    chosen = _unsplit(_decoding(options), "sample")
    bias_V = _checked(context_TKE, table_VE, bias_V, chosen)
    _check_tokens(context_TKE, log_prior_TK=log_prior_TK)
    _implementation(chosen, context_TKE)
    return decode.sample(
        log_prior_TK, context_TKE, table_VE, bias_V, activation, chosen, key
    )


def _implementation(options, context_TKE):
    name = options.implementation
    if name == "auto":
        name = "pallas_gpu" if _is_hopper() else "blocked"
        parts.note(f"The head's implementation is {name}.")
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"no implementation is called {name!r}; there are "
            f"{sorted(IMPLEMENTATIONS)} and 'auto'."
        )
    # A grid of no blocks is nothing that a kernel could be started with.
    name = name if len(context_TKE) else "blocked"
    return importlib.import_module(f"softbottle.ops.mixture.{name}")


def _is_hopper():
    """Whether the default device is what the GPU kernel is for, and jax new enough."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return capability == "9.0" and jax.__version_info__ >= (0, 11)


def _lse(context_TKE, table_VE, bias_V, activation, options):
    local_TK = _implementation(options, context_TKE).lse(
        context_TKE, table_VE, bias_V, activation, options
    )
    return parts.over_shards(local_TK, options)


def _decoding(options):
    """The options; a GPU's large blocks, which pay in training, would be [T, K, V]."""
    chosen = Options(**options)
    budget_bytes = chosen.budget_bytes or decode.BUDGET_BYTES
    return dataclasses.replace(chosen, budget_bytes=budget_bytes)


def _unsplit(options, name):
    if options.vocab_axis is not None:
        raise ValueError(
            f"{name} reads the whole table; it was called with vocab_axis="
            f"{options.vocab_axis!r}."
        )
    return options


def _checked(context_TKE, table_VE, bias_V, options):
    """Check the arrays that every operation shares; a missing bias is zero."""
    check_range(context_TKE=context_TKE, table_VE=table_VE, bias_V=bias_V)
    for name, array, rank in (
        ("context_TKE", context_TKE, 3),
        ("table_VE", table_VE, 2),
        ("bias_V", bias_V, 1),
    ):
        if array is not None and array.ndim != rank:
            raise ValueError(
                f"{name} must have {rank} axes, got the shape {array.shape}."
            )
    rows, width = table_VE.shape
    if context_TKE.shape[-1] != width:
        raise ValueError(
            f"the context is {context_TKE.shape[-1]} wide and the table {width}; "
            f"got context_TKE {context_TKE.shape} and table_VE {table_VE.shape}."
        )
    if bias_V is not None and bias_V.shape[0] != rows:
        raise ValueError(f"bias_V has {bias_V.shape[0]} entries for {rows} rows.")
    if options.vocab_axis is None and options.vocab and options.vocab > rows:
        raise ValueError(f"vocab={options.vocab} exceeds the table's {rows} rows.")
    return jnp.zeros(rows, table_VE.dtype) if bias_V is None else bias_V


def _check_tokens(context_TKE, **arrays):
    check_range(log_prior_TK=arrays.get("log_prior_TK"))
    tokens, components = context_TKE.shape[:2]
    for name, array in arrays.items():
        expected = (tokens, components) if name.endswith("TK") else (tokens,)
        if array.shape != expected:
            raise ValueError(
                f"{name} must have the shape {expected} to go with context_TKE "
                f"{context_TKE.shape}, got {array.shape}."
            )
