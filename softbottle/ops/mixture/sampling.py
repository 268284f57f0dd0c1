"""Words drawn from a mixture's own probabilities, never as [T, V].

At temperature 1 a sample needs a single component: k is drawn from the prior and the
word by

    argmax_v( g(z_kv) + noise_v ),    noise_v ~ Gumbel,

which is exact, needs no normalizer and costs what a plain softmax does. Otherwise it is
the argmax of log P(v) / temperature + noise_v, of the mixture's own P and not by
component, over the words that are kept. What is kept is found in this order, which is
that of Hugging Face's transformers (vLLM has min_p before top_p):

    temperature   P(v)^(1/temperature), renormalized; 0 is the most probable word
    top_k         the k most probable words, as `top_k` gives them
    top_p         of these the most probable up to the mass p, the word that reaches it
                  included, and words as probable as that one
    min_p         of these the words of at least min_p times the best one's probability

With `top_k` all of it happens among k candidates. Without it `top_p` is a limit on how
far a word is behind the best one: DIGITS passes over the words find the limit, each
from the masses of the words within some EDGES, to RANGE / EDGES^DIGITS nats = 2^-15.
What is further behind than RANGE has no mass in float32.

Passes over the table (of a problem within the budget its logits are kept instead):

                          one component    a mixture (first the normalizers)
    temperature 1         1                1, of one component
    temperature 0         1                2
    temperature, top_k    1                2
    temperature < 0.1     2                3, unless with top_k
    min_p                 2                3
    top_p                 7                8

Noise and priors are float32 or better, and the noise has the range that jax calls
"high": 32 nats. By default it ends at 15.9, and of the words below 1e-7 too few would
be drawn. It is a function of the key, the token and the word, so neither the choice of
blocks nor the number of shards changes what is drawn, but for the rounding of sums.

Axes: B edges, N units, U words of a unit.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import decode, shards
from softbottle.ops.mixture.arrays import Mixture
from softbottle.ops.mixture.options import Options, sum_dtype

# Of the noise. Others draw for a batch of keys what depends on the whole batch.
GENERATOR = "threefry2x32"
# Below this temperature no word is drawn that float32 tells apart from the best one.
COLDEST = 1e-6
# Below this temperature words are compared by how far they are behind the best one:
# float32 has no digits left for the noise beside a score divided by so little.
COLD = 0.1
# How far behind the best word a nucleus ends, in nats, is found digit by digit.
RANGE, EDGES, DIGITS = 32.0, 16, 5


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is drawn from; the defaults are P itself.

    Attributes:
        temperature: of P(v)^(1/temperature); 0 for the most probable word.
        top_k: how many words are kept; None for all.
        top_p: the mass of the most probable words that are kept; None for all.
        min_p: of the best word's probability, what a word must have; None for nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        """Reject what is no number, or out of range."""
        for name, value in dataclasses.asdict(self).items():
            kind = numbers.Integral if name == "top_k" else numbers.Real
            if value is not None and not isinstance(value, kind):
                noun = "an integer" if name == "top_k" else "a number"
                raise ValueError(
                    f"{name} must be {noun} that is known when compiling, got {value}."
                )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}.")

    @property
    def is_exact(self) -> bool:
        """Whether words are drawn from P itself."""
        return self.temperature == 1 and self.top_k is None and self.keeps_all

    @property
    def keeps_all(self) -> bool:
        """Whether neither `top_p` nor `min_p` leaves a word out."""
        return self.top_p in (None, 1) and self.min_p in (None, 0)

    def check_words(self, words: int) -> None:
        """Raise ValueError if `top_k` exceeds a vocabulary of so many words."""
        if self.top_k is not None and self.top_k > words:
            raise ValueError(
                f"top_k must be between 1 and the vocabulary's {words}, got "
                f"{self.top_k}."
            )


EXACT = Sampling()


def draw(
    fold: decode.Fold, tokens: int, key: jax.Array, sampling: Sampling, options: Options
) -> jax.Array:
    """One word per token: ids [T].

    Args:
        fold: the words, in blocks of at least `top_k`.
        tokens: how many there are.
        key: of jax.random.
        sampling: what is drawn from.
        options: of the words.
    """
    temperature = sampling.temperature
    if temperature < COLDEST:
        return decode.top_k(fold, 1, options)[1][:, 0]
    if sampling.top_k is not None:
        values_Tk, ids_Tk = decode.top_k(fold, sampling.top_k, options)
        score_Tk = _kept(-_depth(values_Tk[:, :1], values_Tk, temperature), sampling)
        at_T = jax.random.categorical(key, score_Tk, mode="high")
        return jnp.take_along_axis(ids_Tk, at_T[:, None], axis=1)[:, 0]
    if sampling.keeps_all and temperature >= COLD:
        sharpened = functools.partial(_sharpened, temperature)
        return race(fold, tokens, key, options, sharpened)
    best_T1, id_T1 = decode.top_k(fold, 1, options)
    limit_T1 = jnp.full_like(best_T1, jnp.inf)
    if sampling.top_p not in (None, 1):
        limit_T1 = _nucleus(fold, best_T1, temperature, sampling.top_p, options)
    if sampling.min_p:
        limit_T1 = jnp.minimum(limit_T1, -math.log(sampling.min_p))

    def score(by_token, place, log_p_CW):
        best_C1, id_C1, limit_C1 = by_token
        depth_CW = _depth(best_C1, log_p_CW, temperature)
        ids_W = place.first + jnp.arange(log_p_CW.shape[1])
        # The best word is kept even if another pass rounds it away from itself.
        kept_CW = (depth_CW <= limit_C1) | (ids_W[None] == id_C1)
        return jnp.where(kept_CW, -depth_CW, -jnp.inf)

    return race(fold, tokens, key, options, score, (best_T1, id_T1, limit_T1))


def _depth(best_C1, log_p_CW, temperature):
    """How far words are behind the best one, in nats."""
    return (best_C1 - log_p_CW) / temperature


def _sharpened(temperature, by_token, place, log_p_CW):
    del by_token, place
    return log_p_CW / temperature


def _kept(score_Tk, sampling):
    """Scores in order, the best one's 0, with -inf for words that are not kept."""
    least_T1 = jnp.full_like(score_Tk[:, :1], -jnp.inf)
    if sampling.top_p not in (None, 1):
        mass_Tk = jnp.exp(score_Tk)
        before_Tk = jnp.cumsum(mass_Tk, axis=1) - mass_Tk
        wanted_T1 = sampling.top_p * jnp.sum(mass_Tk, axis=1, keepdims=True)
        inside_Tk = before_Tk < wanted_T1
        least_T1 = jnp.min(score_Tk, axis=1, keepdims=True, where=inside_Tk, initial=0)
    if sampling.min_p:
        least_T1 = jnp.maximum(least_T1, math.log(sampling.min_p))
    return jnp.where(score_Tk >= least_T1, score_Tk, -jnp.inf)


def _sums(arrays):
    """Sums over the words of several [C, N, U], in one pass that stores none: [C, B].

    By unit first, as in `winner`, and for the rounding.
    """
    arrays = tuple(arrays)
    zero = jnp.zeros((), arrays[0].dtype)

    def add(left, right):
        return tuple(map(jnp.add, left, right))

    sums = jax.lax.reduce(arrays, (zero,) * len(arrays), add, (2,))
    return jnp.sum(jnp.stack(sums, axis=1), axis=2)


def _nucleus(fold, best_T1, temperature, top_p, options):
    """How far behind the best word the most probable words of mass `top_p` reach."""

    def masses(edge_TB):
        """Of the words that are less than so far behind, [T, B]."""

        def add(sum_CB, by_token, place, log_p_CW):
            del place
            best_C1, edge_CB = by_token
            log_p_CNU = decode.units(log_p_CW)
            depth_CNU = _depth(best_C1[:, :, None], log_p_CNU, temperature)
            mass_CNU = jnp.exp(-depth_CNU)
            block_CB = _sums(
                jnp.where(depth_CNU < edge_C[:, None, None], mass_CNU, 0.0)
                for edge_C in jnp.unstack(edge_CB, axis=1)
            )
            return block_CB if sum_CB is None else sum_CB + block_CB

        return shards.total(fold(add, (best_T1, edge_TB)), options)

    def next_digit(limit_T1, width):
        step_B = width * jnp.arange(1, EDGES).astype(best_T1.dtype)
        beyond_T1 = jnp.full_like(limit_T1, jnp.inf)
        edge_TB = jnp.concatenate([limit_T1 + step_B[None], beyond_T1], axis=1)
        mass_TB = masses(edge_TB)
        short_TB = mass_TB[:, :-1] < top_p * mass_TB[:, -1:]
        digit_T1 = jnp.sum(short_TB, axis=1, keepdims=True).astype(best_T1.dtype)
        return limit_T1 + width * digit_T1, None

    widths = RANGE * EDGES ** -(1.0 + jnp.arange(DIGITS).astype(best_T1.dtype))
    limit_T1, best_T1 = shards.varying_together(jnp.zeros_like(best_T1), best_T1)
    limit_T1, _ = jax.lax.scan(next_digit, limit_T1, widths)
    # The last word is between this limit and the next; it stays in either's rounding.
    return limit_T1 + 2 * widths[-1]


def one_component(mixture: Mixture, key: jax.Array) -> Mixture:
    """A component of each token, drawn from the prior."""
    log_prior_TK, context_TKE = mixture
    log_prior_TK = log_prior_TK.astype(sum_dtype(log_prior_TK))
    component_T = jax.random.categorical(key, log_prior_TK, mode="high")
    at = component_T.reshape(-1, *(1,) * (context_TKE.ndim - 1))
    context_T1E = jnp.take_along_axis(context_TKE, at, axis=-2)
    return Mixture(jnp.zeros_like(log_prior_TK[:, :1]), context_T1E)


def race(
    fold: decode.Fold,
    tokens: int,
    key: jax.Array,
    options: Options,
    score: Callable[[Any, decode.Place, jax.Array], jax.Array] | None = None,
    by_token: Any = (),
) -> jax.Array:
    """One word per token, by Gumbel-max over all words: ids [T].

    Args:
        fold: the words; a block's noise takes two arrays beside its scores.
        tokens: how many there are.
        key: of jax.random.
        options: of the words.
        score: of a block, `score(by_token, place, log_p_CW)`; None for log P itself.
        by_token: what `score` reads of the tokens.
    """
    key_T2 = jax.random.key_data(token_keys(key)(jnp.arange(tokens)))

    def add(best, inputs, place, log_p_CW):
        key_C2, by_token = inputs
        if score is not None:
            log_p_CW = score(by_token, place, log_p_CW)
        key_C = jax.random.wrap_key_data(key_C2, impl=GENERATOR)
        value_C, id_C = winner(log_p_CW, key_C, place)
        if best is None:
            return value_C, id_C
        ahead_C = value_C > best[0]
        return jnp.maximum(value_C, best[0]), jnp.where(ahead_C, id_C, best[1])

    value_T, id_T = fold(add, (key_T2, by_token))
    if options.vocab_axis is None:
        return id_T
    value_TJ, id_TJ = (
        shards.gathered(each_T[:, None], options) for each_T in (value_T, id_T)
    )
    ahead_T1 = jnp.argmax(value_TJ, axis=1, keepdims=True)
    return jnp.take_along_axis(id_TJ, ahead_T1, axis=1)[:, 0]


def token_keys(key: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function from the tokens' numbers to their keys."""
    key = jax.random.wrap_key_data(
        jax.random.bits(key, (2,), jnp.uint32), impl=GENERATOR
    )
    return functools.partial(jax.vmap(jax.random.fold_in, (None, 0)), key)


def winner(
    g_CW: jax.Array, key_C: jax.Array, place: decode.Place
) -> tuple[jax.Array, jax.Array]:
    """The largest g + noise of each token's words, and that word's id, [C].

    Args:
        g_CW: scores of a block of words.
        key_C: of the tokens; see `token_keys`.
        place: of the block.
    """
    unit, inside = place
    if not (isinstance(inside, int) and inside == 0):
        beyond = ((0, 0), (0, decode.UNIT))
        g_CW = jnp.pad(g_CW, beyond, constant_values=-jnp.inf)
        g_CW = jnp.roll(g_CW, inside, axis=1)
    g_CNU = decode.units(g_CW)

    def draw(key, unit):
        key = jax.random.fold_in(key, unit)
        return jax.random.gumbel(key, (decode.UNIT,), g_CW.dtype, mode="high")

    over_units = jax.vmap(draw, (None, 0))
    unit_N = unit + jnp.arange(g_CNU.shape[1])
    # By unit first: a reduction over few long rows leaves most of a GPU idle.
    score_CNU = g_CNU + jax.vmap(over_units, (0, None))(key_C, unit_N)
    within_CN, best_CN = jnp.argmax(score_CNU, axis=2), jnp.max(score_CNU, axis=2)
    unit_C1 = jnp.argmax(best_CN, axis=1, keepdims=True)
    within_C1 = jnp.take_along_axis(within_CN, unit_C1, axis=1)
    place_C1 = (unit + unit_C1) * decode.UNIT + within_C1
    return jnp.max(best_CN, axis=1), place_C1[:, 0]
