"""What Mixtape says of every token: words in two pieces under one normalizer.

    lse = logaddexp(lse of the frequent words, lse of the rare ones)

The rare words are the operation of one context, which is told what the frequent ones
add to its normalizers (`Elsewhere`) and gives back the gradients of that; the frequent
words, whose logits are of all contexts, are ops/mixture/gated.py. Where the table is
split over devices, the first shard sends the frequent words to all others and keeps
their rows among its rare ones, with no probability.

Axes: S frequent words, J gates, G width of a gate's feature.
"""

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from softbottle import ops
from softbottle.heads.predictions import log_probs_of_some
from softbottle.ops.mixture import (
    decode,
    gated,
    likelihood,
    reductions,
    shards,
    word_scores,
)
from softbottle.ops.mixture.activations import DEAD, SOFTMAX
from softbottle.ops.mixture.arrays import Elsewhere, Mixture, Targets, Vocabulary
from softbottle.ops.mixture.likelihood import word_ids
from softbottle.ops.mixture.options import Options, sum_dtype
from softbottle.ops.mixture.sampling import Sampling, draw


class Pieces(NamedTuple):
    """The predictions of words in two pieces, under one normalizer.

    Attributes:
        tokens: what the frequent words' gates and logits are made of.
        frequent: the words with gates of their own.
        mixture: the one context of the rare words.
        rare: those words. Of a split table that is still the whole, in which the
            frequent words have no probability.
        start: the word of the first row of `rare`.
        options: of the rare words' operations.
    """

    tokens: gated.Tokens
    frequent: gated.Words
    mixture: Mixture
    rare: Vocabulary
    start: int
    options: Options

    @property
    def size(self) -> int:
        """S."""
        return len(self.frequent.vector_SG)

    @property
    def plain(self) -> bool:
        """One softmax, whatever its logits are made of."""
        return True

    def tempered(self, temperature: float) -> Self:
        """See `Predictions`."""

        def cooled(words):
            return words._replace(bias_V=words.bias_V / temperature)

        frequent = self.frequent
        context_TKE = self.tokens.context_TKE / temperature
        mean_TKE = self.mixture.context_TKE / temperature
        return self._replace(
            tokens=self.tokens._replace(context_TKE=context_TKE),
            frequent=frequent._replace(vocabulary=cooled(frequent.vocabulary)),
            mixture=self.mixture._replace(context_TKE=mean_TKE),
            rare=cooled(self.rare),
        )

    def mean_score(self) -> jax.Array:
        """See `Predictions`."""
        own_T = gated.total(self.tokens, self.frequent, self.options)
        words = shards.word_count(len(self.rare.table_VE), self.options)
        rare = self._without_frequent()
        rare_T1 = likelihood.mean_logit(self.mixture.context_TKE, rare, self.options)
        count = words + self.size if self.start else words
        return (own_T + words * rare_T1[:, 0]) / count

    def source(self) -> reductions.Source:
        """See `Predictions`."""
        options = self.options.resolve()
        wide = sum_dtype(self.tokens.context_TKE, self.rare.table_VE)
        context_TKE = self.mixture.context_TKE
        shared = (
            jax.tree.map(lambda array: array.astype(wide), self.frequent),
            word_scores.words_of(context_TKE, self.rare, options),
        )

        def scores(shared, tokens):
            frequent, rare = shared
            gates, mixture = tokens
            # Finite, as those of the rare words: 0 times a log-probability is 0.
            own_CS = jnp.maximum(gated.logits(gates, frequent, options), DEAD)
            z_CKV = word_scores.scores(mixture.context_TKE, rare)
            rare_CV = word_scores.live(z_CKV[:, 0], options)
            score_CV = self._joined(own_CS, rare_CV)
            return score_CV, word_scores.joint_lse(score_CV, options)

        def log_probs(shared, tokens):
            score_CV, lse_C = scores(shared, tokens)
            return score_CV - lse_C[:, None]

        row_bytes = (len(self.rare.table_VE) + self.size) * wide.itemsize
        tokens = (self.tokens, self.mixture)
        sizes = (4 * row_bytes, 0, row_bytes)
        return reductions.Source(tokens, shared, log_probs, *sizes, scores)

    def loss(self, targets: Targets) -> jax.Array:
        """See `Predictions`; the frequent words' gradient is not taken in forward."""
        local_T, elsewhere = self._elsewhere(targets.labels_T)
        targets = targets._replace(labels_T=local_T)
        return ops.loss(
            *(self.mixture, self.rare, targets),
            options=self.options,
            elsewhere=elsewhere,
        )

    def loss_and_argmax(self, targets: Targets) -> None:
        """See `Predictions`: the frequent words have a pass of their own."""
        del targets

    def scores(self, labels_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Predictions`; one component, the whole softmax."""
        local_T, elsewhere = self._elsewhere(labels_T)
        score_T1, lse_T1 = ops.scores(
            *(self.mixture.context_TKE, self.rare, local_T),
            options=self.options,
            elsewhere=elsewhere,
        )
        return self.mixture.log_prior_TK, score_T1, lse_T1

    def scores_and_entropy(self, labels_T: jax.Array) -> None:
        """See `Predictions`: that of the frequent words is no operation's."""
        del labels_T

    def log_probs_of(self, words_TM: jax.Array) -> jax.Array:
        """See `Predictions`."""

        def score(words_T):
            local_T, owned_T = self._local(words_T)
            context_T1E = self.mixture.context_TKE
            rare_T1 = ops.label_score(
                context_T1E, self.rare, local_T, options=self.options
            )
            own_T1 = gated.label_score(
                self.tokens, self.frequent, words_T, self.options
            )
            return jnp.where(owned_T[:, None], own_T1, rare_T1)

        log_prior_TK = self.mixture.log_prior_TK
        return log_probs_of_some(words_TM, log_prior_TK, score, self.scores)

    def log_probs(self, log_prior_TK: jax.Array | None) -> jax.Array:
        """See `Predictions`."""
        _, lse_T1 = self._masses()
        if log_prior_TK is not None:
            lse_T1 = lse_T1 - log_prior_TK
        own_TS = gated.logits(self.tokens, self.frequent, self.options) - lse_T1
        rare_TV = ops.log_probs(
            self.mixture, self.rare, options=self.options, lse_TK=lse_T1
        )
        return self._joined(own_TS, rare_TV)

    def top_k(self, k: int) -> tuple[jax.Array, jax.Array]:
        """See `Predictions`."""
        decode.check_best(k, self._words)
        _, lse_T1 = self._masses()
        logit_Tk, ids_Tk = decode.top_k(self._blocks(least=k), k, self.options)
        return logit_Tk - lse_T1, ids_Tk

    def argmax(self) -> jax.Array:
        """See `Predictions`."""
        return self.top_k(1)[1][:, 0]

    def sample(
        self, key: jax.Array, log_prior_TK: jax.Array | None, sampling: Sampling
    ) -> jax.Array:
        """See `Predictions`: by default the piece by its mass, then the word in it."""
        del log_prior_TK  # of one component
        if not sampling.is_exact:
            sampling.check_words(self._words)
            fold = self._blocks(least=sampling.top_k or 1, beside=2)
            tokens = len(self.tokens.context_TKE)
            return draw(fold, tokens, key, sampling, self.options)
        own_T1, lse_T1 = self._masses()
        piece_key, frequent_key, rare_key = jax.random.split(key, 3)
        # The default's noise is too coarse for masses below 1e-7.
        chosen_T = jax.random.bernoulli(
            piece_key, jnp.exp(own_T1 - lse_T1)[:, 0], mode="high"
        )
        first_T = gated.sample(self.tokens, self.frequent, frequent_key, self.options)
        later_T = ops.sample(
            *(self.mixture, self.rare, rare_key),
            options=self.options,
            first=self.start - self.size,
        )
        return jnp.where(chosen_T, first_T, later_T + self.size)

    def _joined(self, own_TS, rare_TV):
        """What is said of frequent and of rare words, in the order of the words."""
        if self.start:
            return jnp.concatenate([own_TS, rare_TV], axis=1)
        rows = rare_TV.shape[1]
        own_TV = jnp.pad(own_TS, ((0, 0), (0, rows - self.size)))
        own_V = frequent_rows(self.size, rows, self.options)
        return jnp.where(own_V[None], own_TV, rare_TV)

    def _without_frequent(self):
        """The rare words; of a split table with rows of zeros for the others."""
        if self.start:
            return self.rare
        own_V = frequent_rows(self.size, len(self.rare.table_VE), self.options)
        return Vocabulary(
            jnp.where(own_V[:, None], 0.0, self.rare.table_VE),
            jnp.where(own_V, 0.0, self.rare.bias_V),
        )

    @property
    def _words(self):
        """How many words there are."""
        rows = len(self.rare.table_VE)
        return self.start + shards.word_count(rows, self.options)

    def _blocks(self, **sizes):
        """The logits of all words."""
        options = decode.budgeted(self.options)
        frequent = gated.blocks(self.tokens, self.frequent, options)
        words = (self.mixture, self.rare, None, SOFTMAX, options)
        rare = decode.blocks(*words, first=self.start, **sizes)

        def fold(add, by_token=(), state=None):
            return rare(add, by_token, frequent(add, by_token, state))

        return fold

    def _elsewhere(self, labels_T):
        """Labels among the rare words, and what the frequent ones add."""
        labels_T = word_ids(labels_T=labels_T)
        local_T, owned_T = self._local(labels_T)
        both_T1 = gated.scores(self.tokens, self.frequent, labels_T, self.options)
        return local_T, Elsewhere(*both_T1, owned_T)

    def _local(self, words_T):
        """Words among the rare ones, and which of them are frequent instead."""
        owned_T = (words_T >= 0) & (words_T < self.size)
        return jnp.where(owned_T, self.size, words_T) - self.start, owned_T

    def _masses(self):
        """Log-normalizers of the frequent words and of all, [T, 1] each."""
        tokens = len(self.tokens.context_TKE)
        anything_T = jnp.full(tokens, self.size - self.start, jnp.int32)
        _, own_T1 = gated.scores(self.tokens, self.frequent, anything_T, self.options)
        context_T1E = self.mixture.context_TKE
        rare_T1 = ops.lse(context_T1E, self.rare, options=self.options)
        return own_T1, jnp.logaddexp(own_T1, rare_T1)


def split(
    words: Vocabulary, count: int, options: Options
) -> tuple[Vocabulary, Vocabulary, int, Options]:
    """The two pieces of a vocabulary.

    Args:
        words: table and bias; of a table that is split over devices, a shard.
        count: S, fewer than there are words.
        options: of the whole.

    Returns:
        The frequent words, the rare ones, the word of the first row of these, and their
        options, as `Pieces` has them.

    Raises:
        ValueError: if the first shard of a split table has not all frequent words.
    """
    rows = len(words.table_VE)
    if options.vocab_axis is None:
        first, rare = (
            jax.tree.map(lambda array, part=part: array[part], words)
            for part in (slice(count), slice(count, None))
        )
        vocab = shards.word_count(rows, options)
        return first, rare, count, dataclasses.replace(options, vocab=vocab - count)
    if count > rows:
        raise ValueError(
            f"frequent={count} must be at most the {rows} rows of a shard: the "
            "first device has these words."
        )
    own_V = frequent_rows(count, rows, options)

    def from_first(array):
        shape = (count, *(1,) * (array.ndim - 1))
        part = jnp.where(own_V[:count].reshape(shape), array[:count], 0.0)
        return jax.lax.psum(part, options.vocab_axis)

    rare = words._replace(bias_V=jnp.where(own_V, DEAD, words.bias_V))
    return jax.tree.map(from_first, words), rare, 0, options


def frequent_rows(count: int, rows: int, options: Options) -> jax.Array:
    """Which of the local table rows are among the first `count` words, [V]."""
    return jnp.arange(rows) + shards.first_row(rows, options) < count
