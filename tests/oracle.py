"""Dense float64 NumPy oracle of every head, written from the papers' formulas.

Nothing here comes from the package: probabilities are formed directly as
sum_k prior_k f(z_k) / sum_v f(z_kv), with f = exp(g) as each paper writes it, and the
logarithm is taken at the end. Gradients are worked out by hand from the probabilities;
tests/heads/contract_test.py checks them against central differences of the values.
"""

import functools
import math
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
    kind: str  # alone, projected, mixed, averaged, partitioned, gated or faceted
    positive: Callable  # (params, z) -> f(z) > 0
    slope: Callable  # (params, z) -> g'(z), g = log f
    hidden_dims: tuple[int, ...]  # of the states that are side by side

    @property
    def hidden_dim(self):
        """The width of what the head reads."""
        return sum(self.hidden_dims)

    @property
    def context(self):
        """The kind of a mixture's contexts."""
        return getattr(self.head, "context", None)

    @property
    def components(self):
        """Contexts that a latent mask has."""
        return self.head.contexts


class Inputs(NamedTuple):
    """What a head is called with, in the order of its arguments."""

    params: Any
    table_VE: Any
    bias_V: Any
    hidden_TD: Any
    labels_T: Any
    weights_T: Any


class Parts(NamedTuple):
    """What a head makes of the states; words v mod N are a class of their own."""

    prior_TK: np.ndarray
    context_TNKE: np.ndarray
    all_prior_TK: np.ndarray  # before components are averaged or left out
    all_context_TKE: np.ndarray  # before the mask, and so on
    bent_TKE: np.ndarray | None  # tanh(h W + b)
    active_Tk: np.ndarray | None  # the components that are not left out


def read(case, hidden_TD):
    """What projections and prior read: a direction, or for tanh the state."""
    if case.context in (None, "tanh"):
        return hidden_TD
    return hidden_TD / length(hidden_TD) / 4


def length(hidden_TD):
    """Of each state, [T, 1]; of one of zeros infinity: it has no direction."""
    length_T1 = np.linalg.norm(hidden_TD, axis=1, keepdims=True)
    return np.where(length_T1 > 1e-6, length_T1, np.inf)


def unread(case, hidden_TD, read_bar_TD):
    """The gradient by a state from that by what is read of it."""
    if case.context in (None, "tanh"):
        return read_bar_TD
    length_T1 = length(hidden_TD)
    read_TD = hidden_TD / length_T1
    along_T1 = (read_TD * read_bar_TD).sum(axis=1, keepdims=True)
    return (read_bar_TD - along_T1 * read_TD) / length_T1 / 4


def gelu(z):
    """z Phi(z) and its derivative, Phi of the normal distribution."""
    below = (1 + np.vectorize(math.erf)(z / math.sqrt(2))) / 2
    return z * below, below + z * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


class Reading(NamedTuple):
    """What a head reads, in terms of one state and the parameters of `mos`.

    A head that reads several states is one that reads them side by side with parts of
    its matrices zero.
    """

    state_TH: np.ndarray  # on the path past the projections
    read_TD: np.ndarray
    params: dict


def reading(case, params, hidden_TD):
    """How a case's head reads its states."""
    if "lower_ILE" in params:
        first, second = np.split(hidden_TD, [len(params["latent_HME"])], axis=1)
        read_TD = np.concatenate([read(case, first), read(case, second)], axis=1)
        (_, own, width), lower = params["latent_HME"].shape, params["lower_ILE"]
        latent_DKE = np.zeros((read_TD.shape[1], own + lower.shape[1], width))
        latent_DKE[: first.shape[1], :own] = params["latent_HME"]
        latent_DKE[first.shape[1] :, own:] = lower
        biases = (params["latent_bias_ME"], params["lower_bias_LE"])
        prior_HK = params["prior_HK"]
        none_IK = np.zeros((second.shape[1], prior_HK.shape[1]))
        equal = {
            "prior_DK": np.concatenate([prior_HK, none_IK]),
            "latent_DKE": latent_DKE,
            "latent_bias_KE": np.concatenate(biases),
        }
    elif "inner_DF" in params:
        inner_TF = hidden_TD @ params["inner_DF"] + params["inner_bias_F"]
        first = hidden_TD[:, : case.hidden_dims[0]]
        query_TQ = np.concatenate([first, gelu(inner_TF)[0]], axis=1)
        read_TD = read(case, query_TQ)
        equal = {
            "prior_DK": params["prior_QK"],
            "latent_DKE": params["latent_QCE"],
            "latent_bias_KE": params["latent_bias_CE"],
        }
    else:
        return Reading(hidden_TD, read(case, hidden_TD), params)
    if "project_HE" in params:
        equal["project_DE"] = params["project_HE"]
    return Reading(first, read_TD, equal)


def reading_gradients(case, params, hidden_TD, bars, read_bar_TD, state_bar_TH):
    """Gradients by the head's parameters and states, from those by a `Reading`."""
    if "project_DE" in bars and "project_HE" in params:
        bars["project_HE"] = bars.pop("project_DE")
    if "lower_ILE" in params:
        width, own = params["latent_HME"].shape[:2]
        latent_DKE, bias_KE = bars.pop("latent_DKE"), bars.pop("latent_bias_KE")
        bars |= {
            "prior_HK": bars.pop("prior_DK")[:width],
            "latent_HME": latent_DKE[:width, :own],
            "latent_bias_ME": bias_KE[:own],
            "lower_ILE": latent_DKE[width:, own:],
            "lower_bias_LE": bias_KE[own:],
        }
        parts = zip(
            np.split(hidden_TD, [width], axis=1),
            np.split(read_bar_TD, [width], axis=1),
            strict=True,
        )
        first, second = (unread(case, *part) for part in parts)
        return bars, np.concatenate([first + state_bar_TH, second], axis=1)
    if "inner_DF" in params:
        width = case.hidden_dims[0]
        inner_TF = hidden_TD @ params["inner_DF"] + params["inner_bias_F"]
        value_TF, slope_TF = gelu(inner_TF)
        query_TQ = np.concatenate([hidden_TD[:, :width], value_TF], axis=1)
        first, second = np.split(unread(case, query_TQ, read_bar_TD), [width], axis=1)
        inner_bar_TF = second * slope_TF
        hidden_bar_TD = inner_bar_TF @ params["inner_DF"].T
        hidden_bar_TD[:, :width] += first + state_bar_TH
        bars |= {
            "inner_DF": hidden_TD.T @ inner_bar_TF,
            "inner_bias_F": inner_bar_TF.sum(axis=0),
            "prior_QK": bars.pop("prior_DK"),
            "latent_QCE": bars.pop("latent_DKE"),
            "latent_bias_CE": bars.pop("latent_bias_KE"),
        }
        return bars, hidden_bar_TD
    return bars, unread(case, hidden_TD, read_bar_TD) + state_bar_TH


def mixture(name, params, hidden_TD, mask=None):
    """Prior and contexts of a case's head, and the steps to them."""
    case, bent_TKE = CASES[name], None
    state_TE, read_TD, own = reading(case, params, hidden_TD)
    prior_TK = np.ones((len(hidden_TD), 1))
    if "prior_DK" in own:
        weight_TK = np.exp(read_TD @ own["prior_DK"])
        prior_TK = weight_TK / weight_TK.sum(axis=1, keepdims=True)
    if "project_DE" in own:
        state_TE = state_TE @ own["project_DE"]
    context_TKE = state_TE[:, None]
    if "latent_DKE" in own:
        latent_TKE = np.einsum("td,dke->tke", read_TD, own["latent_DKE"])
        latent_TKE = latent_TKE + own["latent_bias_KE"]
        bent_TKE = latent_TKE if case.context == "linear" else np.tanh(latent_TKE)
        context_TKE = bent_TKE
        if case.context != "tanh":
            context_TKE = state_TE[:, None] + bent_TKE
    dropped_TKE = context_TKE if mask is None else context_TKE * mask
    unchanged = (prior_TK, context_TKE, bent_TKE)
    if case.kind == "averaged":
        mean_TE = (prior_TK[:, :, None] * dropped_TKE).sum(axis=1)
        one_T1 = np.ones_like(prior_TK[:, :1])
        return Parts(one_T1, mean_TE[:, None, None], *unchanged, None)
    if case.kind == "gated":
        weight_TK = gates(case, params, hidden_TD, 0).weight_TVK[:, 0]
        mean_TE = (weight_TK[:, :, None] * dropped_TKE).sum(axis=1)
        return Parts(prior_TK, mean_TE[:, None, None], *unchanged, None)
    if case.kind == "partitioned":
        shape = (len(hidden_TD), case.head.classes, case.head.components, -1)
        return Parts(prior_TK, dropped_TKE.reshape(shape), *unchanged, None)
    if case.kind == "faceted":
        # Facets of the classes, then one for each component that all classes share.
        count = case.head.classes
        classes = [
            np.concatenate([dropped_TKE[:, n : n + 1], dropped_TKE[:, count:]], axis=1)
            for n in range(count)
        ]
        return Parts(prior_TK, np.stack(classes, axis=1), *unchanged, None)
    active_Tk = None
    if getattr(case.head, "active", None):
        active_Tk = np.argsort(-prior_TK, axis=1)[:, : case.head.active]
        prior_TK = np.take_along_axis(prior_TK, active_Tk, axis=1)
        prior_TK = prior_TK / prior_TK.sum(axis=1, keepdims=True)
        dropped_TKE = np.take_along_axis(dropped_TKE, active_Tk[:, :, None], axis=1)
    return Parts(prior_TK, dropped_TKE[:, None], *unchanged, active_Tk)


class Gates(NamedTuple):
    """Gates of every token and word, and what they are made of."""

    feature_TJG: np.ndarray
    gate_TVJ: np.ndarray
    weight_TVK: np.ndarray  # of the contexts
    slope_TVKJ: np.ndarray  # of the weights by the gates


def gates(case, params, hidden_TD, frequent, words=1):
    """The gates of `words` words, the first `frequent` of which have their own."""
    read_TD = read(case, hidden_TD)
    feature_TJG = np.einsum("td,djg->tjg", read_TD, params["gate_DJG"])
    feature_TJG = np.tanh(feature_TJG + params["gate_bias_JG"])
    level_TVJ = np.repeat((read_TD @ params["gate_state_DJ"])[:, None], words, axis=1)
    for word in range(frequent):
        level_TVJ[:, word] += feature_TJG @ params["gate_word_SG"][word]
        level_TVJ[:, word] += params["gate_word_bias_SJ"][word]
    gate_TVJ = sigmoid(level_TVJ)
    # The factors of each context's weight: a gate, and whether it counts as 1 - gate.
    paths = {
        2: [[(0, 0)], [(0, 1)]],
        4: [[(0, 0), (1, 0)], [(0, 0), (1, 1)], [(0, 1), (2, 0)], [(0, 1), (2, 1)]],
    }[case.head.components]
    weight_TVK = np.ones((*gate_TVJ.shape[:2], len(paths)))
    slope_TVKJ = np.zeros((*weight_TVK.shape, gate_TVJ.shape[2]))
    for k, path in enumerate(paths):
        for gate, other in path:
            factor_TV = gate_TVJ[:, :, gate]
            weight_TVK[:, :, k] *= 1 - factor_TV if other else factor_TV
        for gate, other in path:
            factor_TV = gate_TVJ[:, :, gate]
            own_TV = factor_TV - 1 if other else factor_TV
            slope_TVKJ[:, :, k, gate] = weight_TVK[:, :, k] / own_TV
    return Gates(feature_TJG, gate_TVJ, weight_TVK, slope_TVKJ)


def sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))


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
        "mos": (softbottle.mos(k, "tanh"), "mixed", *plain),
        "mos_active": (softbottle.mos(k, "linear", active=2), "mixed", *plain),
        "moc": (softbottle.moc(k, "residual"), "averaged", *plain),
        "partition": (softbottle.partition(4), "partitioned", *plain),
        "partition_mixed": (softbottle.partition(5, 2, "tanh"), "partitioned", *plain),
        "sigsoftmax": (softbottle.sigsoftmax(), "alone", *sig),
        "moss": (softbottle.moss(k, "residual"), "mixed", *sig),
        "gss": (softbottle.gss(-1.5, 2.5), "alone", *bent),
        "gss_mixed": (softbottle.gss(-1.5, 2.5, k, "linear"), "mixed", *bent),
        "plif": (softbottle.plif(EVEN_SEGMENTS, SPAN), "alone", *even),
        "plif_uneven": (softbottle.plif(UNEVEN_KNOTS), "alone", *uneven),
        "plif_mixed": (
            softbottle.plif(UNEVEN_KNOTS, components=k, context="tanh"),
            "mixed",
            *uneven,
        ),
        "lowrank": (softbottle.lowrank(CONTEXT), "projected", *plain),
        "softcap": (softbottle.softcap(4.0), "alone", *capped(4.0)),
        "mixtape": (softbottle.mixtape(frequent=9, gate_dim=3), "gated", *plain),
        "mixtape_tanh": (
            softbottle.mixtape(2, "tanh", frequent=29, gate_dim=4),
            "gated",
            *plain,
        ),
        "doc": (softbottle.doc(2, 3), "mixed", *plain),
        "doc_tanh": (softbottle.doc(2, 1, "tanh"), "mixed", *plain),
        "mfs": (softbottle.mfs(layers=2, positions=2), "faceted", *plain),
    }


def _widths(head, kind):
    """Those of the states that a head reads; layers below the last are narrower."""
    last = CONTEXT if kind == "alone" else HIDDEN
    return (last, *(HIDDEN - 1,) * (head.layers - 1)) * head.positions


CASES = {
    name: Case(
        head,
        kind,
        positive,
        slope,
        _widths(head, kind),
    )
    for name, (head, kind, positive, slope) in _cases().items()
}
NAMES = tuple(CASES)
# One of each kind of activation and of mixture, where the head's own file is no factor.
FEW = ("softmax", "moss", "plif_mixed", "moc")


@functools.cache
def parameters(name, seed=0):
    """Parameters of a head as float64 NumPy arrays, as `init` makes them.

    Those that start at zero, where mistakes would not show, are random.
    """
    case = CASES[name]
    # The same numbers whichever test asks first: draws in float64 are others, and so
    # are those of another generator.
    with jax.enable_x64(False):
        key = jax.random.key(seed, impl="threefry2x32")
        params = case.head.init_wide(key, case.hidden_dims, CONTEXT)
    rng = np.random.default_rng(seed)

    def moved(leaf):
        leaf = np.asarray(leaf, np.float64)
        return leaf if np.any(leaf) else rng.normal(size=leaf.shape) / 2

    return jax.tree.map(moved, params)


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
        array = np.asarray(leaf)
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        # jnp.asarray would compile a program for every shape.
        return jax.device_put(array.astype(dtype) if floating else array)

    return jax.tree.map(convert, tree)


def probabilities(name, params, table_VE, bias_V, hidden_TD, mask=None):
    """P(v) of every word, [T, V], and the parts it is made of."""
    case, parts = CASES[name], mixture(name, params, hidden_TD, mask)
    prior_TK, context_TNKE = parts[:2]
    class_V = np.arange(len(table_VE)) % context_TNKE.shape[1]
    z_TKV = np.einsum("tvke,ve->tkv", context_TNKE[:, class_V], table_VE)
    if case.kind == "gated":
        sizes = (case.head.frequent, len(table_VE))
        weight_TVK = gates(case, params, hidden_TD, *sizes).weight_TVK
        dropped_TKE = parts.all_context_TKE * (1.0 if mask is None else mask)
        each_TKV = dropped_TKE @ table_VE.T
        z_TKV = np.einsum("tvk,tkv->tv", weight_TVK, each_TKV)[:, None]
    if bias_V is not None:
        z_TKV = z_TKV + bias_V
    f_TKV = case.positive(params, z_TKV)
    component_TKV = f_TKV / f_TKV.sum(axis=2, keepdims=True)
    p_TV = (prior_TK[:, :, None] * component_TKV).sum(axis=1)
    return p_TV, (parts, class_V, z_TKV, component_TKV)


def log_probs(name, *args, **kwargs):
    return np.log(probabilities(name, *args, **kwargs)[0])


def nll(name, inputs, mask=None):
    log_p_TV = log_probs(name, *inputs[:4], mask=mask)
    return -log_p_TV[np.arange(len(log_p_TV)), inputs.labels_T]


def gradients(name, inputs, cotangent_T, mask=None):
    """d sum_t cotangent[t] nll[t] / d (params, table, bias, hidden)."""
    case, params = CASES[name], inputs.params
    p_TV, parts = probabilities(name, *inputs[:4], mask=mask)
    parts, class_V, z_TKV, component_TKV = parts
    prior_TK, context_TNKE = parts[:2]
    hit_TV = np.eye(p_TV.shape[1])[inputs.labels_T]
    label_T = (p_TV * hit_TV).sum(axis=1)
    likelihood_TK = (component_TKV * hit_TV[:, None]).sum(axis=2)
    posterior_TK = prior_TK * likelihood_TK / label_T[:, None]
    g_bar_TKV = cotangent_T[:, None, None] * posterior_TK[:, :, None]
    g_bar_TKV = g_bar_TKV * (component_TKV - hit_TV[:, None])
    z_bar_TKV = g_bar_TKV * case.slope(params, z_TKV)
    if case.kind == "gated":
        return _gated_gradients(case, inputs, mask, parts, z_bar_TKV[:, 0])
    context_bar_TNKE = np.zeros_like(context_TNKE)
    for word, row_E in enumerate(inputs.table_VE):
        context_bar_TNKE[:, class_V[word]] += z_bar_TKV[:, :, word, None] * row_E
    prior_bar_TK = -cotangent_T[:, None] * likelihood_TK / label_T[:, None]
    bars, hidden_bar_TD = _mixture_gradients(
        case, params, inputs.hidden_TD, mask, parts, prior_bar_TK, context_bar_TNKE
    )
    if "slope_N" in params:
        knots = EVEN_KNOTS if name == "plif" else np.asarray(UNEVEN_KNOTS)
        each_N = np.einsum("tkv,tkvn->n", g_bar_TKV, overlaps(knots, z_TKV))
        bars["slope_N"] = each_N * sigmoid(params["slope_N"])
    table_bar_VE = np.einsum("tkv,tvke->ve", z_bar_TKV, context_TNKE[:, class_V])
    return bars, table_bar_VE, z_bar_TKV.sum(axis=(0, 1)), hidden_bar_TD


def _gated_gradients(case, inputs, mask, parts, z_bar_TV):
    params, table_VE, _, hidden_TD = inputs[:4]
    frequent = case.head.frequent
    own = gates(case, params, hidden_TD, frequent, len(table_VE))
    dropped_TKE = parts.all_context_TKE * (1.0 if mask is None else mask)
    weight_bar_TVK = z_bar_TV[:, :, None] * np.einsum(
        "tke,ve->tvk", dropped_TKE, table_VE
    )
    weighted_TVK = z_bar_TV[:, :, None] * own.weight_TVK
    context_bar_TKE = np.einsum("tvk,ve->tke", weighted_TVK, table_VE)
    table_bar_VE = np.einsum("tvk,tke->ve", weighted_TVK, dropped_TKE)
    gate_bar_TVJ = np.einsum("tvk,tvkj->tvj", weight_bar_TVK, own.slope_TVKJ)
    level_bar_TVJ = gate_bar_TVJ * own.gate_TVJ * (1 - own.gate_TVJ)
    state_bar_TJ = level_bar_TVJ.sum(axis=1)
    own_bar_TSJ = level_bar_TVJ[:, :frequent]
    inner_bar_TJG = np.einsum("tsj,sg->tjg", own_bar_TSJ, params["gate_word_SG"])
    inner_bar_TJG = inner_bar_TJG * (1 - own.feature_TJG**2)
    read_TD = read(case, hidden_TD)
    read_bar_TD = state_bar_TJ @ params["gate_state_DJ"].T
    read_bar_TD += np.einsum("tjg,djg->td", inner_bar_TJG, params["gate_DJG"])
    bars, hidden_bar_TD = _mixture_gradients(
        case,
        params,
        hidden_TD,
        mask,
        parts,
        np.zeros_like(parts.prior_TK),
        context_bar_TKE[:, None],
        read_bar_TD,
    )
    bars |= {
        "gate_DJG": np.einsum("td,tjg->djg", read_TD, inner_bar_TJG),
        "gate_bias_JG": inner_bar_TJG.sum(axis=0),
        "gate_state_DJ": read_TD.T @ state_bar_TJ,
        "gate_word_SG": np.einsum("tsj,tjg->sg", own_bar_TSJ, own.feature_TJG),
        "gate_word_bias_SJ": own_bar_TSJ.sum(axis=0),
    }
    return bars, table_bar_VE, z_bar_TV.sum(axis=0), hidden_bar_TD


def _mixture_gradients(
    case, params, hidden_TD, mask, parts, prior_bar_TK, context_bar_TNKE, read_bar_TD=0
):
    prior_TK, latent_TKE = parts.all_prior_TK, parts.all_context_TKE
    mask_TKE = np.broadcast_to(1.0 if mask is None else mask, latent_TKE.shape)
    chosen_TK, context_bar_TKE = parts.prior_TK, context_bar_TNKE[:, 0]
    if case.kind == "averaged":
        mean_bar_TE = context_bar_TKE[:, 0]
        prior_bar_TK = ((latent_TKE * mask_TKE) * mean_bar_TE[:, None]).sum(axis=2)
        context_bar_TKE = prior_TK[:, :, None] * mean_bar_TE[:, None]
        chosen_TK = prior_TK
    if case.kind == "partitioned":
        context_bar_TKE = context_bar_TNKE.reshape(latent_TKE.shape)
    if case.kind == "faceted":
        shared_bar_TKE = context_bar_TNKE[:, :, 1:].sum(axis=1)
        parts_bar = [context_bar_TNKE[:, :, 0], shared_bar_TKE]
        context_bar_TKE = np.concatenate(parts_bar, axis=1)
    mean_T1 = (chosen_TK * prior_bar_TK).sum(axis=1, keepdims=True)
    score_bar_TK = chosen_TK * (prior_bar_TK - mean_T1)
    if parts.active_Tk is not None:
        place = (np.arange(len(prior_TK))[:, None], parts.active_Tk)
        all_score_TK, all_bar_TKE = np.zeros_like(prior_TK), np.zeros_like(latent_TKE)
        all_score_TK[place], all_bar_TKE[place] = score_bar_TK, context_bar_TKE
        score_bar_TK, context_bar_TKE = all_score_TK, all_bar_TKE
    context_bar_TKE = context_bar_TKE * mask_TKE
    state_TH, read_TD, own = reading(case, params, hidden_TD)
    bars, read_bar_TD = {}, read_bar_TD + np.zeros_like(read_TD)
    if "prior_DK" in own:
        bars["prior_DK"] = read_TD.T @ score_bar_TK
        read_bar_TD = read_bar_TD + score_bar_TK @ own["prior_DK"].T
    if parts.bent_TKE is not None:
        slope_TKE = 1 if case.context == "linear" else 1 - parts.bent_TKE**2
        bent_bar_TKE = context_bar_TKE * slope_TKE
        bars["latent_DKE"] = np.einsum("td,tke->dke", read_TD, bent_bar_TKE)
        bars["latent_bias_KE"] = bent_bar_TKE.sum(axis=0)
        read_bar_TD = read_bar_TD + np.einsum(
            "tke,dke->td", bent_bar_TKE, own["latent_DKE"]
        )
    state_bar_TE = context_bar_TKE.sum(axis=1)
    if case.context == "tanh":
        state_bar_TE = np.zeros_like(state_TH)
    elif "project_DE" in own:
        bars["project_DE"] = state_TH.T @ state_bar_TE
        state_bar_TE = state_bar_TE @ own["project_DE"].T
    return reading_gradients(case, params, hidden_TD, bars, read_bar_TD, state_bar_TE)


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
