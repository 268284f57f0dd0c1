"""A cache of states and words joined to any head under the head's own normalizers.

    P(v) = sum_k prior_k (exp g(z_kv) + C_v) / (exp(lse_k) + C),
    C_v  = sum_{m : word_m = v} exp(h . h_m / sqrt(d)),       C = sum_v C_v;

ops/cache/api.py derives it. The cache has no parameters. It is the history of the same
text (`history`: the states before, each with the word that followed it) or any other
memory of states and words (`given`: an encoder's). Neither the loss nor its gradient
holds an array over tokens and vocabulary, or scatters over the vocabulary.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle.heads.base import Head, Params
from softbottle.ops.cache import api as cache
from softbottle.ops.cache import ranking
from softbottle.ops.log_sum import log_sum
from softbottle.ops.mixture import decode, shards
from softbottle.ops.mixture.arrays import without_padding
from softbottle.ops.mixture.likelihood import word_ids
from softbottle.ops.mixture.options import DEFAULTS, Options, check_range
from softbottle.ops.mixture.sampling import Sampling, draw


class Memory(NamedTuple):
    """States, the words that they stand for, and which of them a position sees.

    A word that is no word of the vocabulary makes what a cached head says of the
    positions that see it NaN, and what it draws -1; elsewhere it may be anything.
    """

    states_BMD: jax.Array
    words_BM: jax.Array
    visible_BSM: jax.Array


@dataclasses.dataclass(frozen=True, repr=False)
class Cached:
    """A head with a cache, a value as the head is.

    The arrays are those of the head's own methods with rows B and positions S apart,
    `params`, `table_VE` and `bias_V` as there. `latent_mask` broadcasts to the contexts
    [B S, K, E].

    Attributes:
        head: whose normalizers the cache shares.
    """

    head: Head

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"cached({self.head!r})"

    def loss(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_BSD: jax.Array,
        labels_BS: jax.Array,
        weights_BS: jax.Array,
        memory: Memory,
        *,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """sum weight nll over all positions, a scalar.

        A position without weight may hold any state and label, but what the memory
        shows to others has to be a word. The gradient by a weight of 0 is 0.

        Args:
            params: of the head's `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_BSD: the states.
            labels_BS: the words that follow.
            weights_BS: of the positions; 0 is padding.
            memory: what the positions see.
            latent_mask: factors of the contexts; None for none.
            options: how it is computed.

        Raises:
            ValueError: if shapes do not go together, an array is float16, or labels or
                words are not integers.
        """
        # Padding may see a word in the memory that is none, of which even a gradient
        # of 0 would be NaN.
        visible_BSM = memory.visible_BSM & (weights_BS != 0)[:, :, None]
        nll_BS = self.nll(
            params,
            table_VE,
            bias_V,
            *without_padding(weights_BS, (hidden_BSD, labels_BS)),
            memory._replace(visible_BSM=visible_BSM),
            latent_mask=latent_mask,
            options=options,
        )
        return jnp.sum(without_padding(weights_BS, weights_BS * nll_BS))

    def nll(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_BSD: jax.Array,
        labels_BS: jax.Array,
        memory: Memory,
        *,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """-log P(label) of each position, [B, S]; takes any cotangent.

        Arguments and errors are those of `loss`, without weights.
        """
        _check_range(params, hidden_BSD, memory)
        log_prior_TK, score_TK, lse_TK = self.head.scores(
            params,
            table_VE,
            bias_V,
            _flat(hidden_BSD),
            _flat(labels_BS),
            latent_mask=latent_mask,
            options=options,
        )
        target_BS, cache_BS = cache.masses(
            hidden_BSD,
            memory.states_BMD,
            _words(memory),
            word_ids(labels_BS=labels_BS),
            memory.visible_BSM,
            _scale(hidden_BSD),
        )
        cache_BS = _where_words(cache_BS, memory, table_VE, options)
        log_p_T = cache.join(
            log_prior_TK, score_TK, lse_TK, _flat(target_BS), _flat(cache_BS)
        )
        return -log_p_T.reshape(labels_BS.shape)

    def log_probs(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_BSD: jax.Array,
        memory: Memory,
        *,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """Log P(v) of every word, [B, S, V].

        Arguments are those of `loss`, without labels and weights.

        Raises:
            ValueError: as `loss`; with `vocab_axis`, because the whole table is read.
        """
        if options.vocab_axis is not None:
            raise ValueError(
                "log_probs beside a cache reads the whole table; it was called with "
                f"vocab_axis={options.vocab_axis!r}."
            )
        output = (params, table_VE, bias_V)
        log_prior_TK, gate_T, _ = self._opened(
            output, hidden_BSD, memory, latent_mask, options
        )
        log_p_TV = self.head.log_probs(
            *output,
            _flat(hidden_BSD),
            latent_mask=latent_mask,
            log_prior_TK=log_prior_TK,
            options=options,
        )
        alone_BSV = cache_log_probs(hidden_BSD, memory, len(table_VE))
        gated_TV = gate_T[:, None] + _flat(alone_BSV)
        both_TV2 = jnp.stack([log_p_TV, gated_TV], axis=-1)
        return log_sum(both_TV2).reshape(alone_BSV.shape)

    def sample(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_BSD: jax.Array,
        memory: Memory,
        key: jax.Array,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """One word per position, drawn exactly, [B, S]; -1 where P is NaN.

        Arguments are those of `loss`, without labels and weights, a key of jax.random,
        and those of `Head.sample`; unless these are left out, `log_probs` is held.

        Raises:
            ValueError: as `loss` and `Head.sample`; if one of its arguments is given
                with `vocab_axis`, because `log_probs` reads the whole table.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p)
        output, memory = (params, table_VE, bias_V), _with_entry(memory)
        if not sampling.is_exact:
            sampling.check_words(shards.word_count(len(table_VE), options))
            log_p_BSV = self.log_probs(
                *(params, table_VE, bias_V, hidden_BSD, memory),
                latent_mask=latent_mask,
                options=options,
            )
            log_p_TV = _flat(log_p_BSV)
            whole = decode.whole(log_p_TV)
            word_T = draw(whole, len(log_p_TV), key, sampling, options)
            word_T = jnp.where(jnp.isnan(log_p_TV[:, 0]), -1, word_T)
            return word_T.reshape(log_p_BSV.shape[:2])
        log_prior_TK, gate_T, score_BSM = self._opened(
            output, hidden_BSD, memory, latent_mask, options
        )
        gate_key, entry_key, word_key = jax.random.split(key, 3)
        # The default's noise is too coarse for gates and entries below 1e-7.
        opens_T = jax.random.bernoulli(gate_key, jnp.exp(gate_T), mode="high")
        entry_BS = jax.random.categorical(entry_key, score_BSM, mode="high")
        cached_BS = jnp.take_along_axis(_words(memory), entry_BS, axis=1)
        word_T = self.head.sample(
            *output,
            _flat(hidden_BSD),
            word_key,
            latent_mask=latent_mask,
            log_prior_TK=log_prior_TK,
            options=options,
        )
        chosen_T = jnp.where(opens_T, _flat(cached_BS).astype(word_T.dtype), word_T)
        return jnp.where(jnp.isnan(gate_T), -1, chosen_T).reshape(entry_BS.shape)

    def _opened(self, output, hidden_BSD, memory, latent_mask, options):
        """The joint's own weights of the components, the gate, and the scores."""
        _check_range(output[0], hidden_BSD, memory)
        hidden_TD = _flat(hidden_BSD)
        log_prior_TK, _, lse_TK = self.head.scores(
            *output,
            hidden_TD,
            jnp.zeros(len(hidden_TD), jnp.int32),
            latent_mask=latent_mask,
            options=options,
        )
        score_BSM = similarities(hidden_BSD, memory)
        cache_BS = jax.nn.logsumexp(score_BSM, axis=-1)
        cache_BS = _where_words(cache_BS, memory, output[1], options)
        log_prior_TK, gate_T = cache.gates(log_prior_TK, lse_TK, _flat(cache_BS))
        return log_prior_TK, gate_T, score_BSM


def history(
    hidden_BSD: jax.Array, words_BS: jax.Array, segments_BS: jax.Array
) -> Memory:
    """The strict past of each position in its own segment; segment 0 is padding.

    A state that is not finite is not remembered: only what is predicted from it is NaN,
    so that a position without weight may hold anything.

    Args:
        hidden_BSD: the states; padding may hold anything.
        words_BS: the word that follows each, a row's labels.
        segments_BS: which text of the row a position belongs to.
    """
    held_BS = (segments_BS > 0) & jnp.all(jnp.isfinite(hidden_BSD), axis=-1)
    states_BSD = jnp.where(held_BS[:, :, None], hidden_BSD, 0.0)
    return Memory(states_BSD, words_BS, cache.past(segments_BS) & held_BS[:, None])


def given(
    states_BMD: jax.Array, words_BM: jax.Array, seen_BM: jax.Array, positions: int
) -> Memory:
    """A memory that all positions of a row see alike, where `seen_BM` says so."""
    rows, entries = words_BM.shape
    visible_BSM = jnp.broadcast_to(seen_BM[:, None], (rows, positions, entries))
    states_BMD = jnp.where(seen_BM[:, :, None], states_BMD, 0.0)
    return Memory(states_BMD, words_BM, visible_BSM)


def cached(head: Head) -> Cached:
    """The head joined with a cache; an empty one changes nothing.

    Raises:
        ValueError: unless it is a head.
    """
    if not isinstance(head, Head):
        raise ValueError(
            f"head must be a head, for example softbottle.mos(4), got {head!r}."
        )
    return Cached(head)


def similarities(hidden_BSD: jax.Array, memory: Memory) -> jax.Array:
    """h . h_m / sqrt(d), -inf for what a position does not see: [B, S, M]."""
    return cache.similarities(
        hidden_BSD, memory.states_BMD, memory.visible_BSM, _scale(hidden_BSD)
    )


def cache_log_probs(hidden_BSD: jax.Array, memory: Memory, rows: int) -> jax.Array:
    """log(C_v / C): the cache by itself, [B, S, V]; -inf where it is empty."""
    spread = functools.partial(cache.log_probs, vocab=rows)
    return jax.vmap(spread)(similarities(hidden_BSD, memory), _words(memory))


def best_words(hidden_BSD: jax.Array, memory: Memory) -> jax.Array:
    """The word to which the cache gives most, [B, S]; -1 where it is empty."""
    memory = _with_entry(memory)
    return jax.vmap(cache.best_word)(similarities(hidden_BSD, memory), _words(memory))


def ranking_loss(
    table_VE: jax.Array,
    hidden_BSD: jax.Array,
    labels_BS: jax.Array,
    weights_BS: jax.Array,
    memory: Memory,
    margin: float,
) -> jax.Array:
    """HistAlign's ranking (ops/cache/ranking.py): the mean over positions with a pair.

    Entries are ordered by the cosine of their word's row of the table with the label's.
    Positions without weight, and those whose memory does not hold the label, or holds
    nothing else, are left out of the mean; it is 0 if none is left.
    """
    tokens = (hidden_BSD, word_ids(labels_BS=labels_BS))
    hidden_BSD, labels_BS = without_padding(weights_BS, tokens)
    words_BM = _words(memory)
    direction_BSE = _directions(table_VE, labels_BS)
    cosine_BSM = jnp.einsum(
        "bse,bme->bsm", direction_BSE, _directions(table_VE, words_BM)
    )
    mean_BS, paired_BS = ranking.hinge(
        similarities(hidden_BSD, memory),
        cosine_BSM,
        labels_BS[:, :, None] == words_BM[:, None, :],
        memory.visible_BSM,
        margin,
    )
    paired_BS &= weights_BS != 0
    total = jnp.sum(jnp.where(paired_BS, mean_BS, 0.0))
    return total / jnp.maximum(jnp.sum(paired_BS), 1).astype(total.dtype)


def _check_range(params, hidden_BSD, memory):
    check_range(params=params, hidden_BSD=hidden_BSD, states_BMD=memory.states_BMD)


def _with_entry(memory):
    """The memory; of one without entries, which has no best, one that nobody sees."""
    if memory.words_BM.shape[1]:
        return memory
    states_BMD, words_BM, visible_BSM = memory
    return Memory(
        jnp.pad(states_BMD, ((0, 0), (0, 1), (0, 0))),
        jnp.pad(words_BM, ((0, 0), (0, 1))),
        jnp.pad(visible_BSM, ((0, 0), (0, 0), (0, 1))),
    )


def _words(memory):
    return word_ids(words_BM=memory.words_BM)


def _where_words(mass_BS, memory, table_VE, options):
    """The cache's log-mass, NaN at positions that see a word that is none."""
    words_BM = _words(memory)
    vocab = shards.word_count(len(table_VE), options)
    strange_BM = (words_BM < 0) | (words_BM >= vocab)
    seen_BS = jnp.any(memory.visible_BSM & strange_BM[:, None], axis=-1)
    return jnp.where(seen_BS, jnp.nan, mass_BS)


def _directions(table_VE, words_BS):
    # Padding may hold a word that is none.
    rows_BSE = jax.lax.stop_gradient(table_VE).at[words_BS].get(mode="clip")
    square_BS1 = jnp.sum(jnp.square(rows_BSE), axis=-1, keepdims=True)
    return rows_BSE * jax.lax.rsqrt(square_BS1 + 1e-12)


def _scale(hidden_BSD):
    return hidden_BSD.shape[-1] ** -0.5


def _flat(array_BS):
    return array_BS.reshape(-1, *array_BS.shape[2:])
