"""Distributions, best words and samples of a mixture, never as [T, K, V].

    log P(v) = logsumexp_k( log_prior_k + g(z_kv) - lse_k )

Log-probabilities take two passes: the normalizers, then one write. The best words are
those of the best of each block of words. A sample at temperature 1 needs a single
component: k is drawn from the prior and the word by

    argmax_v( g(z_kv) + noise_v ),    noise_v ~ Gumbel,

which is exact, needs no normalizer and costs what a plain softmax does. Noise and
priors are float32 or better, and the noise has the range that jax calls "high": 32
nats. By default it ends at 15.9, and of the words below 1e-7 too few would be drawn.

In decoding tokens are few and the table is large, so it is streamed: it is read once
for thousands of rows of contexts, in blocks of words, and neither copied nor padded. A
problem within the budget is one block and no loop. The noise is a function of the key,
the token and the word, so no choice of blocks changes what is drawn.

Axes: U words of a unit, J candidates.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, likelihood, shards
from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.arrays import Mixture, Vocabulary
from softbottle.ops.mixture.options import Options, sum_dtype

# Of a block of logits, unless the caller says otherwise.
BUDGET_BYTES = 32 * 2**20
# Words that share a key of the noise; a block of a divided table holds a multiple.
UNIT = 1024
# Rows of contexts that keep the matrix units busy for one reading of the table.
ROWS = 4096


class Words(NamedTuple):
    """A block of the table's rows; `start` is the first one's number."""

    start: int | jax.Array
    local: Vocabulary
    live_W: jax.Array


def log_probs(
    mixture: Mixture,
    vocabulary: Vocabulary,
    lse_TK: jax.Array,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """Log-probabilities [T, V]; -inf on rows beyond the vocabulary."""
    rows = len(vocabulary.table_VE)
    chunks, size = _blocks(mixture.context_TKE, vocabulary, options, UNIT)

    def one_chunk(_, tokens):
        def write(log_p_CV, words):
            log_p_CW = _log_p(*tokens, words, activation, options)
            if log_p_CV is None:
                beyond = ((0, 0), (0, rows - log_p_CW.shape[1]))
                return jnp.pad(log_p_CW, beyond, constant_values=-jnp.inf)
            return jax.lax.dynamic_update_slice_in_dim(
                log_p_CV, log_p_CW, words.start, axis=1
            )

        return (), _over_words(write, vocabulary, options, size)

    return likelihood.over_chunks(one_chunk, (), (mixture, lse_TK), chunks)[1]


def top_k(
    mixture: Mixture,
    vocabulary: Vocabulary,
    lse_TK: jax.Array,
    activation: Activation,
    options: Options,
    k: int,
) -> tuple[jax.Array, jax.Array]:
    """The k most probable words of each token: (log-probabilities, ids), [T, k].

    Of equally probable words the first comes first.
    """
    chunks, size = _blocks(mixture.context_TKE, vocabulary, options, k)

    def one_chunk(_, tokens):
        def merge(best, words):
            log_p_CW = _log_p(*tokens, words, activation, options)
            values_Ck, ids_Ck = _best(log_p_CW, min(k, log_p_CW.shape[1]))
            ids_Ck += words.start
            if best is None:
                return values_Ck, ids_Ck
            # Earlier words first, so that they win ties here as well.
            values_CJ = jnp.concatenate([best[0], values_Ck], axis=1)
            ids_CJ = jnp.concatenate([best[1], ids_Ck], axis=1)
            return _best_of(values_CJ, ids_CJ, k)

        return (), _over_words(merge, vocabulary, options, size)

    return likelihood.over_chunks(one_chunk, (), (mixture, lse_TK), chunks)[1]


def sample(
    mixture: Mixture,
    vocabulary: Vocabulary,
    activation: Activation,
    options: Options,
    key: jax.Array,
) -> jax.Array:
    """One word per token, drawn exactly from the mixture: ids [T]."""
    log_prior_TK, context_TKE = mixture
    prior_key, word_key = jax.random.split(key)
    log_prior_TK = log_prior_TK.astype(sum_dtype(log_prior_TK))
    component_T = jax.random.categorical(prior_key, log_prior_TK, mode="high")
    at = component_T.reshape(-1, *(1,) * (context_TKE.ndim - 1))
    context_T1E = jnp.take_along_axis(context_TKE, at, axis=-2)
    # A score's noise is made of two random numbers.
    chunks, size = _blocks(context_T1E, vocabulary, options, UNIT, arrays=3)
    keys = token_keys(word_key)

    def one_chunk(_, tokens):
        context_C1E, token_C = tokens
        key_C = keys(token_C)

        def race(best, words):
            g_CW = _scores(context_C1E, words, activation, options)[:, 0]
            value_C, id_C = winner(g_CW, key_C, words.start)
            if best is None:
                return value_C, id_C
            ahead_C = value_C > best[0]
            return jnp.maximum(value_C, best[0]), jnp.where(ahead_C, id_C, best[1])

        return (), _over_words(race, vocabulary, options, size)[1]

    tokens = (context_T1E, jnp.arange(context_T1E.shape[0]))
    return likelihood.over_chunks(one_chunk, (), tokens, chunks)[1]


def token_keys(key: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function from the tokens' numbers to their keys."""
    # Other generators draw for a batch of keys what depends on the whole batch.
    key = jax.random.wrap_key_data(
        jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32"
    )
    return functools.partial(jax.vmap(jax.random.fold_in, (None, 0)), key)


def _best(log_p_CW, k):
    """The k largest of each row and where they are; the first of equals first."""
    words = log_p_CW.shape[1]
    # For more than 16 XLA's GPU compiler sorts whole rows: short ones cost half.
    if not 16 < k < UNIT < words:
        return jax.lax.top_k(log_p_CW, k)
    by_unit_CNU = _units(log_p_CW)
    values_CNk, at_CNk = jax.lax.top_k(by_unit_CNU, k)
    at_CNk += UNIT * jnp.arange(by_unit_CNU.shape[1], dtype=at_CNk.dtype)[None, :, None]
    together = (len(log_p_CW), by_unit_CNU.shape[1] * k)
    return _best_of(values_CNk.reshape(together), at_CNk.reshape(together), k)


def _best_of(values_CJ, ids_CJ, k):
    """The k largest values and their ids."""
    values_Ck, at_Ck = jax.lax.top_k(values_CJ, k)
    return values_Ck, jnp.take_along_axis(ids_CJ, at_Ck, axis=1)


def _units(array_CW):
    """Words by unit, [C, N, U], the last filled up with -inf."""
    tokens, words = array_CW.shape
    units = -(-words // UNIT)
    beyond = ((0, 0), (0, units * UNIT - words))
    filled_CW = jnp.pad(array_CW, beyond, constant_values=-jnp.inf)
    return filled_CW.reshape(tokens, units, UNIT)


def winner(
    g_CW: jax.Array, key_C: jax.Array, start: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The largest g + noise of each token's words, and that word's id, [C].

    Args:
        g_CW: scores of a block of words.
        key_C: of the tokens; see `token_keys`.
        start: number of the block's first word, a multiple of UNIT.
    """
    g_CNU = _units(g_CW)

    def draw(key, unit):
        key = jax.random.fold_in(key, unit)
        return jax.random.gumbel(key, (UNIT,), g_CW.dtype, mode="high")

    over_units = jax.vmap(draw, (None, 0))
    unit_N = start // UNIT + jnp.arange(g_CNU.shape[1])
    # By unit first: a reduction over few long rows leaves most of a GPU idle.
    score_CNU = g_CNU + jax.vmap(over_units, (0, None))(key_C, unit_N)
    within_CN, best_CN = jnp.argmax(score_CNU, axis=2), jnp.max(score_CNU, axis=2)
    unit_C1 = jnp.argmax(best_CN, axis=1, keepdims=True)
    within_C1 = jnp.take_along_axis(within_CN, unit_C1, axis=1)
    return jnp.max(best_CN, axis=1), start + (unit_C1 * UNIT + within_C1)[:, 0]


def _log_p(mixture, lse_CK, words, activation, options):
    """log P of a block of words, [C, W]."""
    log_prior_CK, context_CKE = mixture
    g_CKW = _scores(context_CKE, words, activation, options)
    return jax.nn.logsumexp(g_CKW + (log_prior_CK - lse_CK)[:, :, None], axis=1)


def _scores(context_CKE, words, activation, options):
    z_CKW = _logits(context_CKE, words, options)
    g_CKW = activation.apply(activation.theta, z_CKW)
    return jnp.where(words.live_W[None, None], g_CKW, -jnp.inf)


def _logits(context_CKE, words, options):
    count = classes.count(context_CKE)
    if count == 1:
        return likelihood.logits(
            context_CKE.reshape(len(context_CKE), *context_CKE.shape[-2:]),
            words.local,
            options,
        )
    # Beginning with the class of the block's first word, so that they come in order.
    context_CNKE = jnp.roll(context_CKE, -(words.start % count), axis=1)
    by_class = classes.of(context_CNKE, words.local, options)
    each = [jnp.moveaxis(likelihood.logits(*one), 2, 0) for one in by_class]
    return jnp.moveaxis(classes.joined(each), 0, 2)


def _blocks(context_TKE, vocabulary, options, least, arrays=1):
    """How many chunks of tokens there are, and words of a block (at least `least`).

    `arrays` of a block's size are held at once.
    """
    table_VE = vocabulary.table_VE
    (tokens, *_, components, _), rows = context_TKE.shape, table_VE.shape[0]
    itemsize = sum_dtype(context_TKE, table_VE).itemsize
    cells = options.block_bytes // (arrays * components * itemsize)
    if tokens * rows <= cells:
        return 1, rows
    least = min(rows, -(-least // UNIT) * UNIT)
    size = max(1, min(max(ROWS // components, cells // rows), cells // least, tokens))
    return -(-tokens // size), min(rows, max(least, cells // size // UNIT * UNIT))


def _over_words(add, vocabulary, options, size):
    """Fold `add(state, words)` over blocks of `size` words; the first has no state."""
    rows = len(vocabulary.table_VE)
    live_V = shards.live_rows(rows, options)

    def words(start, size):
        def cut(array):
            return jax.lax.dynamic_slice_in_dim(array, start, size)

        return Words(start, *jax.tree.map(cut, (vocabulary, live_V)))

    whole, rest = divmod(rows, size)
    state = add(None, words(0, size))
    if whole > 1:
        state = jax.lax.fori_loop(
            1, whole, lambda n, state: add(state, words(n * size, size)), state
        )
    # The last block is shorter, rather than the table longer.
    return add(state, words(whole * size, rest)) if rest else state
