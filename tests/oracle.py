"""Dense float64 NumPy oracle of every head, written from the papers' formulas.

Nothing here comes from the package: probabilities are formed directly as
sum_k prior_k f(z_k) / sum_v f(z_kv), with f = exp(g) as each paper writes it, and the
logarithm is taken at the end. Gradients are worked out by hand from the probabilities;
tests/heads/contract_test.py checks them against central differences of the values.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import softbottle

TOKENS, HIDDEN, COMPONENTS, CONTEXT, VOCAB = 11, 5, 3, 7, 37
EVEN_SEGMENTS, SPAN = 7, 2.5
EVEN_KNOTS = np.linspace(-SPAN, SPAN, EVEN_SEGMENTS + 1)
UNEVEN_KNOTS = (-1.7, -0.4, 0.1, 0.9, 2.6)

# Written once: relative to the largest entry of each array.
RTOL = {"float64": 1e-11, "float32": 1e-5}


class Case(NamedTuple):
    """A head, and how the oracle computes the same thing."""

    head: softbottle.Head
    kind: str  # alone, projected, mixed or averaged
    positive: Callable  # (params, z) -> f(z) > 0
    slope: Callable  # (params, z) -> g'(z), g = log f
    hidden_dim: int
    components: int


class Inputs(NamedTuple):
    """What a head is called with, in the order of its arguments."""

    params: Any
    table_VE: Any
    bias_V: Any
    hidden_TD: Any
    labels_T: Any
    weights_T: Any


def mixture(kind, params, hidden_TD, mask=None):
    """Prior [T, K] and contexts [T, K, E], and both before tanh and mean."""
    if kind in ("alone", "projected"):
        context_TE = (
            hidden_TD @ params["project_DE"] if kind == "projected" else hidden_TD
        )
        context_TKE = context_TE[:, None, :]
        prior_TK = np.ones((len(hidden_TD), 1))
    else:
        weight_TK = np.exp(hidden_TD @ params["prior_DK"])
        prior_TK = weight_TK / weight_TK.sum(axis=1, keepdims=True)
        contexts = [
            np.tanh(hidden_TD @ params["latent_DKE"][:, k] + bias_E[None])
            for k, bias_E in enumerate(params["latent_bias_KE"])
        ]
        context_TKE = np.stack(contexts, axis=1)
    dropped_TKE = context_TKE if mask is None else context_TKE * mask
    if kind != "averaged":
        return prior_TK, dropped_TKE, prior_TK, context_TKE
    mean_TE = (prior_TK[:, :, None] * dropped_TKE).sum(axis=1)
    return np.ones_like(prior_TK[:, :1]), mean_TE[:, None], prior_TK, context_TKE


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def generalized(center, k):
    """GSS: softmax of k (z - c) + c - (k - 1) softplus(z - c)."""

    def positive(params, z):
        del params
        return np.exp(k * (z - center) + center) / (1 + np.exp(z - center)) ** (k - 1)

    return positive, lambda params, z: k - (k - 1) * sigmoid(z - center)


def capped(cap):
    """Soft-capped logits: exp(cap tanh(z / cap))."""

    def positive(params, z):
        del params
        return np.exp(cap * np.tanh(z / cap))

    return positive, lambda params, z: 1 / np.cosh(z / cap) ** 2


def overlaps(knots, z):
    """d g(z) / d slope of each segment of a piecewise-linear map, [..., N]."""
    lengths_N = np.diff(knots)
    low_N, high_N = np.zeros_like(lengths_N), lengths_N.copy()
    low_N[0], high_N[-1] = -np.inf, np.inf  # the outer segments go on
    return np.clip(z[..., None] - knots[:-1], low_N, high_N)


def piecewise(knots):
    """PLIF: the slope of segment n is softplus(w_n)."""
    knots = np.asarray(knots, np.float64)

    def positive(params, z):
        return np.exp(overlaps(knots, z) @ np.log1p(np.exp(params["slope_N"])))

    def slope(params, z):
        index = np.searchsorted(knots[1:-1], z, side="right")
        return np.log1p(np.exp(params["slope_N"]))[index]

    return positive, slope


def _cases():
    k = COMPONENTS
    plain = (lambda params, z: np.exp(z)), (lambda params, z: np.ones_like(z))
    sig = (
        lambda params, z: np.exp(z) * sigmoid(z),
        lambda params, z: 2 - sigmoid(z),
    )
    even, uneven = piecewise(EVEN_KNOTS), piecewise(UNEVEN_KNOTS)
    bent = generalized(-1.5, 2.5)
    return {
        "softmax": (softbottle.softmax(), "alone", *plain),
        "mos": (softbottle.mos(k), "mixed", *plain),
        "moc": (softbottle.moc(k), "averaged", *plain),
        "sigsoftmax": (softbottle.sigsoftmax(), "alone", *sig),
        "moss": (softbottle.moss(k), "mixed", *sig),
        "gss": (softbottle.gss(-1.5, 2.5), "alone", *bent),
        "gss_mixed": (softbottle.gss(-1.5, 2.5, k), "mixed", *bent),
        "plif": (softbottle.plif(EVEN_SEGMENTS, SPAN), "alone", *even),
        "plif_uneven": (softbottle.plif(UNEVEN_KNOTS), "alone", *uneven),
        "plif_mixed": (softbottle.plif(UNEVEN_KNOTS, components=k), "mixed", *uneven),
        "lowrank": (softbottle.lowrank(CONTEXT), "projected", *plain),
        "softcap": (softbottle.softcap(4.0), "alone", *capped(4.0)),
    }


CASES = {
    name: Case(
        head,
        kind,
        positive,
        slope,
        CONTEXT if kind == "alone" else HIDDEN,
        COMPONENTS if kind in ("mixed", "averaged") else 1,
    )
    for name, (head, kind, positive, slope) in _cases().items()
}
NAMES = tuple(CASES)
# One of each kind of activation and of mixture, where the head's own file is no factor.
FEW = ("softmax", "moss", "plif_mixed", "moc")


@functools.cache
def parameters(name, seed=0):
    """Parameters of a head as float64 NumPy arrays, as `init` makes them."""
    case = CASES[name]
    # The same numbers whichever test asks first: draws in float64 are others.
    with jax.enable_x64(False):
        params = case.head.init(jax.random.key(seed), case.hidden_dim, CONTEXT)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def make_inputs(name, tokens=TOKENS, rows=VOCAB, seed=0, scale=1.0):
    """Float64 NumPy inputs; every third token is padding of weight 0."""
    rng = np.random.default_rng(seed)
    weights_T = rng.uniform(0.5, 1.5, tokens)
    weights_T[2::3] = 0.0
    return Inputs(
        parameters(name, seed),
        rng.normal(size=(rows, CONTEXT)),
        rng.normal(size=rows),
        scale * rng.normal(size=(tokens, CASES[name].hidden_dim)),
        rng.integers(0, rows, tokens).astype(np.int32),
        weights_T,
    )


def cast(tree, dtype):
    """Floating leaves of a tree as jax arrays of `dtype`."""

    def convert(leaf):
        floating = np.issubdtype(np.asarray(leaf).dtype, np.floating)
        return jnp.asarray(leaf, dtype if floating else None)

    return jax.tree.map(convert, tree)


def probabilities(name, params, table_VE, bias_V, hidden_TD, mask=None):
    """P(v) of every word, [T, V], and the parts it is made of."""
    case = CASES[name]
    prior_TK, context_TKE, *_ = mixture(case.kind, params, hidden_TD, mask)
    z_TKV = context_TKE @ table_VE.T
    if bias_V is not None:
        z_TKV = z_TKV + bias_V
    f_TKV = case.positive(params, z_TKV)
    component_TKV = f_TKV / f_TKV.sum(axis=2, keepdims=True)
    p_TV = (prior_TK[:, :, None] * component_TKV).sum(axis=1)
    return p_TV, (prior_TK, context_TKE, z_TKV, component_TKV)


def log_probs(name, *args, **kwargs):
    return np.log(probabilities(name, *args, **kwargs)[0])


def nll(name, inputs, mask=None):
    log_p_TV = log_probs(name, *inputs[:4], mask=mask)
    return -log_p_TV[np.arange(len(log_p_TV)), inputs.labels_T]


def gradients(name, inputs, cotangent_T, mask=None):
    """d sum_t cotangent[t] nll[t] / d (params, table, bias, hidden)."""
    case, params = CASES[name], inputs.params
    p_TV, parts = probabilities(name, *inputs[:4], mask=mask)
    prior_TK, context_TKE, z_TKV, component_TKV = parts
    hit_TV = np.eye(p_TV.shape[1])[inputs.labels_T]
    label_T = (p_TV * hit_TV).sum(axis=1)
    likelihood_TK = (component_TKV * hit_TV[:, None]).sum(axis=2)
    posterior_TK = prior_TK * likelihood_TK / label_T[:, None]
    g_bar_TKV = cotangent_T[:, None, None] * posterior_TK[:, :, None]
    g_bar_TKV = g_bar_TKV * (component_TKV - hit_TV[:, None])
    z_bar_TKV = g_bar_TKV * case.slope(params, z_TKV)
    context_bar_TKE = z_bar_TKV @ inputs.table_VE
    prior_bar_TK = -cotangent_T[:, None] * likelihood_TK / label_T[:, None]
    bars, hidden_bar_TD = _mixture_gradients(
        case.kind, params, inputs.hidden_TD, mask, prior_bar_TK, context_bar_TKE
    )
    if "slope_N" in params:
        knots = EVEN_KNOTS if name == "plif" else np.asarray(UNEVEN_KNOTS)
        each_N = np.einsum("tkv,tkvn->n", g_bar_TKV, overlaps(knots, z_TKV))
        bars["slope_N"] = each_N * sigmoid(params["slope_N"])
    table_bar_VE = np.einsum("tkv,tke->ve", z_bar_TKV, context_TKE)
    return bars, table_bar_VE, z_bar_TKV.sum(axis=(0, 1)), hidden_bar_TD


def _mixture_gradients(kind, params, hidden_TD, mask, prior_bar_TK, context_bar_TKE):
    _, _, prior_TK, latent_TKE = mixture(kind, params, hidden_TD, mask)
    mask_TKE = np.broadcast_to(1.0 if mask is None else mask, latent_TKE.shape)
    if kind == "averaged":
        mean_bar_TE = context_bar_TKE[:, 0]
        prior_bar_TK = ((latent_TKE * mask_TKE) * mean_bar_TE[:, None]).sum(axis=2)
        context_bar_TKE = prior_TK[:, :, None] * mean_bar_TE[:, None]
    context_bar_TKE = context_bar_TKE * mask_TKE
    if kind == "alone":
        return {}, context_bar_TKE[:, 0]
    if kind == "projected":
        bars = {"project_DE": hidden_TD.T @ context_bar_TKE[:, 0]}
        return bars, context_bar_TKE[:, 0] @ params["project_DE"].T
    mean_T1 = (prior_TK * prior_bar_TK).sum(axis=1, keepdims=True)
    score_bar_TK = prior_TK * (prior_bar_TK - mean_T1)
    latent_bar_TKE = context_bar_TKE * (1 - latent_TKE**2)
    bars = {
        "prior_DK": hidden_TD.T @ score_bar_TK,
        "latent_DKE": np.einsum("td,tke->dke", hidden_TD, latent_bar_TKE),
        "latent_bias_KE": latent_bar_TKE.sum(axis=0),
    }
    hidden_bar_TD = score_bar_TK @ params["prior_DK"].T
    hidden_bar_TD += np.einsum("tke,dke->td", latent_bar_TKE, params["latent_DKE"])
    return bars, hidden_bar_TD


def assert_close(actual, expected, dtype, message=""):
    """Every leaf within RTOL[dtype] of the largest entry of the expected leaf."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected), message
    for ours, theirs in zip(actual, expected, strict=True):
        theirs = np.asarray(theirs, np.float64)
        assert ours.shape == theirs.shape, message
        assert ours.dtype == jnp.dtype(dtype), message
        tolerance = RTOL[jnp.dtype(dtype).name] * max(np.abs(theirs).max(), 1e-3)
        np.testing.assert_allclose(
            np.asarray(ours, np.float64),
            theirs,
            rtol=0,
            atol=tolerance,
            err_msg=message,
        )
