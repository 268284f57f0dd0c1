"""The words of a mixture in blocks: distributions and best words, never as [T, K, V].

    log P(v) = logsumexp_k( log_prior_k + g(z_kv) - lse_k )

Log-probabilities take two passes: the normalizers, then one write. The best words are
those of the best of each block of words, and of a split table those of the best of
each shard, found by an exchange of [T, k]. What is drawn is in sampling.py.

In decoding tokens are few and the table is large, so it is streamed: it is read once
for thousands of rows of contexts, in blocks of words, and neither copied nor padded. A
problem within the budget is one block and no loop.

Axes: N units, U words of a unit, J candidates.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.ops.log_sum import log_sum
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


class Place(NamedTuple):
    """The first word of a block: word unit * UNIT + inside."""

    unit: int | jax.Array
    inside: int | jax.Array

    @property
    def first(self) -> int | jax.Array:
        """That word's number."""
        return self.unit * UNIT + self.inside


FIRST = Place(0, 0)


class Fold(Protocol):
    """All words, a block at a time.

    A call gives what `add(state, by_token, place, log_p_CW)` makes of the state of
    every token, from one block of words to the next; the state before the first is
    None. On a split table the words are those of the shard. log P may lack what all
    words of a token share.
    """

    def __call__(
        self,
        add: Callable[[Any, Any, Place, jax.Array], Any],
        by_token: Any = (),
        state: Any = None,
    ) -> Any:
        """Fold `add` over the words.

        Args:
            add: of a chunk of tokens and a block of words.
            by_token: arrays that begin with the tokens, of which `add` gets its own.
            state: before the first block; None, or arrays that begin with the tokens.
        """
        ...


def budgeted(options: Options) -> Options:
    """The options; a GPU's large blocks, which pay in training, would be [T, K, V]."""
    budget_bytes = options.budget_bytes or BUDGET_BYTES
    return dataclasses.replace(options.resolve(), budget_bytes=budget_bytes)


def log_probs(
    mixture: Mixture,
    vocabulary: Vocabulary,
    lse_TK: jax.Array,
    activation: Activation,
    options: Options,
) -> jax.Array:
    """Log-probabilities [T, V]; -inf on rows beyond the vocabulary."""
    rows = len(vocabulary.table_VE)
    components = mixture.log_prior_TK.shape[1]
    chunks, size = _blocks(mixture.context_TKE, vocabulary, options, UNIT, components)

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


def blocks(
    mixture: Mixture,
    vocabulary: Vocabulary,
    lse_TK: jax.Array | None,
    activation: Activation,
    options: Options,
    *,
    first: int = 0,
    least: int = 1,
    beside: int = 0,
) -> Fold:
    """The words of a mixture.

    Args:
        mixture: of the tokens.
        vocabulary: the words; of a shard, its own.
        lse_TK: the log-normalizers. None for scores instead of log-probabilities, of
            one component.
        activation: g.
        options: of `budgeted`.
        first: the number of the (whole) table's first row.
        least: words that a block has at least, unless it has all.
        beside: arrays of [tokens, words] that are held beside a block's scores.
    """
    context_TKE, rows = mixture.context_TKE, len(vocabulary.table_VE)
    arrays = context_TKE.shape[-2] + beside
    chunks, size = _blocks(context_TKE, vocabulary, options, least, arrays)
    unit, inside = _first_place(rows, first, options)

    def log_p(tokens, words):
        place = Place(unit + words.start // UNIT, inside)
        return place, _log_p(*tokens, words, activation, options)

    if (chunks, size) == (1, rows):
        words = Words(0, vocabulary, shards.live_rows(rows, options))
        place, log_p_TV = log_p((mixture, lse_TK), words)
        return whole(log_p_TV, place)

    def fold(add, by_token=(), state=None):
        def one_chunk(_, inputs):
            tokens, by_token, state = inputs

            def step(state, words):
                return add(state, by_token, *log_p(tokens, words))

            return (), _over_words(step, vocabulary, options, size, state)

        inputs = ((mixture, lse_TK), by_token, state)
        return likelihood.over_chunks(one_chunk, (), inputs, chunks)[1]

    return fold


def whole(log_p_TV: jax.Array, place: Place = FIRST) -> Fold:
    """One block of words, whose log-probabilities are at hand."""

    def fold(add, by_token=(), state=None):
        return add(state, by_token, place, log_p_TV)

    return fold


def check_best(k: int, words: int) -> None:
    """Raise ValueError unless so many words can be the best of so many."""
    whole = isinstance(k, int | np.integer) and not isinstance(k, bool)
    if not whole or not 1 <= k <= words:
        raise ValueError(
            f"k must be an integer between 1 and the vocabulary's {words}, got {k!r}."
        )


def top_k(fold: Fold, k: int, options: Options) -> tuple[jax.Array, jax.Array]:
    """The k most probable words of each token: (log-probabilities, ids), [T, k].

    Of equally probable words the first comes first. Blocks have at least k words.
    """

    def merge(best, _, place, log_p_CW):
        values_Ck, ids_Ck = _best(log_p_CW, min(k, log_p_CW.shape[1]))
        ids_Ck += place.first
        if best is None:
            return values_Ck, ids_Ck
        # Earlier words first, so that they win ties here as well.
        values_CJ = jnp.concatenate([best[0], values_Ck], axis=1)
        ids_CJ = jnp.concatenate([best[1], ids_Ck], axis=1)
        return _best_of(values_CJ, ids_CJ, min(k, values_CJ.shape[1]))

    values_Tk, ids_Tk = fold(merge)
    if options.vocab_axis is None:
        return values_Tk, ids_Tk
    values_TJ, ids_TJ = (
        shards.gathered(each_Tk, options) for each_Tk in (values_Tk, ids_Tk)
    )
    return _best_of(values_TJ, ids_TJ, k)


def _best(log_p_CW, k):
    """The k largest of each row and where they are; the first of equals first."""
    words = log_p_CW.shape[1]
    if k == 1:
        at_C1 = jnp.argmax(log_p_CW, axis=1, keepdims=True).astype(jnp.int32)
        return jnp.max(log_p_CW, axis=1, keepdims=True), at_C1
    # For more than 16 XLA's GPU compiler sorts whole rows: short ones cost half.
    if not 16 < k < UNIT < words:
        return jax.lax.top_k(log_p_CW, k)
    by_unit_CNU = units(log_p_CW)
    values_CNk, at_CNk = jax.lax.top_k(by_unit_CNU, k)
    at_CNk += UNIT * jnp.arange(by_unit_CNU.shape[1], dtype=at_CNk.dtype)[None, :, None]
    together = (len(log_p_CW), by_unit_CNU.shape[1] * k)
    return _best_of(values_CNk.reshape(together), at_CNk.reshape(together), k)


def _best_of(values_CJ, ids_CJ, k):
    """The k largest values and their ids."""
    values_Ck, at_Ck = jax.lax.top_k(values_CJ, k)
    return values_Ck, jnp.take_along_axis(ids_CJ, at_Ck, axis=1)


def units(array_CW):
    """Words by unit, [C, N, U], the last filled up with -inf."""
    tokens, words = array_CW.shape
    units = -(-words // UNIT)
    beyond = ((0, 0), (0, units * UNIT - words))
    filled_CW = jnp.pad(array_CW, beyond, constant_values=-jnp.inf)
    return filled_CW.reshape(tokens, units, UNIT)


def _first_place(rows, first, options):
    """The place of a table's first row, of which `inside` is known to be 0 if it is."""
    if options.vocab_axis is None:
        return Place(*divmod(first, UNIT))
    if rows % UNIT == 0 and first % UNIT == 0:
        shard = jax.lax.axis_index(options.vocab_axis)
        return Place(first // UNIT + shard * (rows // UNIT), 0)
    return Place(*jnp.divmod(first + shards.first_row(rows, options), UNIT))


def _log_p(mixture, lse_CK, words, activation, options):
    """log P of a block of words, [C, W]; without normalizers the scores."""
    log_prior_CK, context_CKE = mixture
    g_CKW = _scores(context_CKE, words, activation, options)
    if lse_CK is None:
        return g_CKW[:, 0]
    return log_sum(g_CKW + (log_prior_CK - lse_CK)[:, :, None], axis=1)


def _scores(context_CKE, words, activation, options):
    z_CKW = _logits(context_CKE, words, options)
    g_CKW = activation.apply(activation.theta, z_CKW)
    return jnp.where(words.live_W[None, None], g_CKW, -jnp.inf)


def _logits(context_CKE, words, options):
    count = classes.count(context_CKE)
    read = likelihood.as_read(words.local, context_CKE, options)
    if count == 1:
        return likelihood.logits(
            context_CKE.reshape(len(context_CKE), *context_CKE.shape[-2:]),
            read,
            options,
        )
    # Beginning with the class of the block's first word, so that they come in order.
    context_CNKE = jnp.roll(context_CKE, -(words.start % count), axis=1)
    by_class = classes.of(context_CNKE, read, options)
    each = [jnp.moveaxis(likelihood.logits(*one), 2, 0) for one in by_class]
    return jnp.moveaxis(classes.joined(each), 0, 2)


def _blocks(context_TKE, vocabulary, options, least, arrays):
    """How many chunks of tokens there are, and words of a block (at least `least`).

    `arrays` of [tokens, words] are held at once.
    """
    table_VE = vocabulary.table_VE
    (tokens, *_, components, _), rows = context_TKE.shape, table_VE.shape[0]
    cells = options.block_bytes // (arrays * sum_dtype(context_TKE, table_VE).itemsize)
    if tokens * rows <= cells:
        return 1, rows
    least = min(rows, -(-least // UNIT) * UNIT)
    size = max(1, min(max(ROWS // components, cells // rows), cells // least, tokens))
    return -(-tokens // size), min(rows, max(least, cells // size // UNIT * UNIT))


def _over_words(add, vocabulary, options, size, state=None):
    """Fold `add(state, words)` over blocks of `size` words."""
    rows = len(vocabulary.table_VE)
    live_V = shards.live_rows(rows, options)

    def words(start, size):
        def cut(array):
            return jax.lax.dynamic_slice_in_dim(array, start, size)

        return Words(start, *jax.tree.map(cut, (vocabulary, live_V)))

    whole, rest = divmod(rows, size)
    # Outside of the loop: of None it makes what the loop carries.
    state = add(state, words(0, size))
    if whole > 1:
        state = jax.lax.fori_loop(
            1, whole, lambda n, state: add(state, words(n * size, size)), state
        )
    # The last block is shorter, rather than the table longer.
    return add(state, words(whole * size, rest)) if rest else state
