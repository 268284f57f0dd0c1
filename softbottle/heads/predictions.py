"""What a head says of every token, from which its methods answer.

A mixture that meets the whole vocabulary is `OfMixture`. A head that treats some words
in another way has predictions of its own (pieces.py).
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from softbottle import ops
from softbottle.ops.mixture import likelihood, reductions
from softbottle.ops.mixture.activations import Activation, divided, identity
from softbottle.ops.mixture.arrays import Mixture, Targets, Vocabulary
from softbottle.ops.mixture.options import Options
from softbottle.ops.mixture.sampling import Sampling


class States(NamedTuple):
    """What a head reads of the tokens; see `Head.loss`."""

    hidden_TD: jax.Array
    latent_mask: jax.Array | None
    key: jax.Array | None


class Predictions(Protocol):
    """What a head says of every token; the methods are those of `Head`.

    Predictions that are one softmax (`plain`) have closed forms of what others have to
    form their log-probabilities for.
    """

    @property
    def plain(self) -> bool:
        """Whether P(v) is proportional to exp of logits, one for each word."""
        ...

    def tempered(self, temperature: float) -> Self:
        """Those of a plain one with its logits divided by the temperature."""
        ...

    def mean_score(self) -> jax.Array:
        """The mean logit of a plain one over all words, [T]."""
        ...

    def source(self) -> reductions.Source:
        """Log-probabilities for reductions over all words."""
        ...

    def loss(self, targets: Targets) -> jax.Array:
        """The weighted sum of -log P(label), and of what else the targets ask for."""
        ...

    def loss_and_argmax(self, targets: Targets) -> tuple[jax.Array, jax.Array] | None:
        """`loss` and `argmax` in one pass, or None where they take two."""
        ...

    def scores(self, labels_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """log_prior_TK, score_TK and lse_TK."""
        ...

    def scores_and_entropy(
        self, labels_T: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array] | None:
        """The scores and the entropy [T], or None where no operation has it."""
        ...

    def log_probs_of(self, words_TM: jax.Array) -> jax.Array:
        """Log P of some words of each token, [T, M]."""
        ...

    def log_probs(self, log_prior_TK: jax.Array | None) -> jax.Array:
        """Log P of every word, by the given prior if there is one."""
        ...

    def top_k(self, k: int) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities and ids of the best words."""
        ...

    def argmax(self) -> jax.Array:
        """The most probable word, [T]."""
        ...

    def sample(
        self, key: jax.Array, log_prior_TK: jax.Array | None, sampling: Sampling
    ) -> jax.Array:
        """One word per token, by the given prior if there is one."""
        ...


def log_probs_of_some(
    words_TM: jax.Array,
    log_prior_TK: jax.Array,
    score: Callable[[jax.Array], jax.Array],
    scores: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]],
) -> jax.Array:
    """Log P of some words of each token, [T, M], from scores of one.

    Only one word of a token can be nearly sure, whose score and normalizer need one
    gradient.

    Args:
        words_TM: the words.
        log_prior_TK: the mixture's.
        score: those of one word per token [T] alone, [T, K].
        scores: the same, as `Predictions.scores`.
    """
    score_TMK = jax.vmap(score, in_axes=1, out_axes=1)(words_TM)
    likely_T = _likeliest(words_TM, log_prior_TK, score_TMK)
    _, own_TK, lse_TK = scores(likely_T)
    is_likely_TM1 = (words_TM == likely_T[:, None])[:, :, None]
    score_TMK = jnp.where(is_likely_TM1, own_TK[:, None], score_TMK)

    def log_p(score_TK):
        return -likelihood.nll(log_prior_TK, score_TK, lse_TK)

    return jax.vmap(log_p, in_axes=1, out_axes=1)(score_TMK)


def _likeliest(words_TM, log_prior_TK, score_TMK):
    """Of some words of each token the one that may be nearly sure, [T].

    That is the best of these in the components that have nearly all of the prior.
    """
    log_prior_TK, score_TMK = jax.lax.stop_gradient((log_prior_TK, score_TMK))
    score_TMK = jnp.where(jnp.isnan(score_TMK), -jnp.inf, score_TMK)
    best_T1K = jnp.max(score_TMK, axis=1, keepdims=True)
    behind_TMK = jnp.where(score_TMK == best_T1K, 0.0, score_TMK - best_T1K)
    share_TM = jnp.sum(jnp.exp(log_prior_TK[:, None] + behind_TMK), axis=2)
    place_T1 = jnp.argmax(share_TM, axis=1, keepdims=True)
    return jnp.take_along_axis(words_TM, place_T1, axis=1)[:, 0]


class OfMixture(NamedTuple):
    """The predictions of a mixture that meets the whole vocabulary."""

    mixture: Mixture
    words: Vocabulary
    activation: Activation
    options: Options

    @property
    def plain(self) -> bool:
        """See `Predictions`."""
        one = self.mixture.context_TKE.shape[-2] == 1
        return one and self.activation.apply is identity

    def tempered(self, temperature: float) -> Self:
        """See `Predictions`."""
        return self._replace(activation=divided(temperature))

    def mean_score(self) -> jax.Array:
        """See `Predictions`."""
        tokens = (self.mixture.context_TKE, self.words)
        mean_T1 = likelihood.mean_logit(*tokens, self.options)
        return self.activation.apply(self.activation.theta, mean_T1)[:, 0]

    def source(self) -> reductions.Source:
        """See `Predictions`."""
        return ops.source(self.mixture, self.words, self.activation, self.options)

    def loss(self, targets: Targets) -> jax.Array:
        """See `Predictions`."""
        return ops.loss(
            self.mixture, self.words, targets, self.activation, self.options
        )

    def loss_and_argmax(self, targets: Targets) -> tuple[jax.Array, jax.Array] | None:
        """See `Predictions`."""
        return ops.loss_and_argmax(
            self.mixture, self.words, targets, self.activation, self.options
        )

    def scores(self, labels_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Predictions`."""
        log_prior_TK, context_TKE = self.mixture
        tokens = (context_TKE, self.words, labels_T)
        return log_prior_TK, *ops.scores(*tokens, self.activation, self.options)

    def scores_and_entropy(
        self, labels_T: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array] | None:
        """See `Predictions`; of one component, without classes of words."""
        log_prior_TK, context_TKE = self.mixture
        if context_TKE.shape[1:-1] != (1,) or self.activation.params:
            return None
        how = (self.activation, self.options)
        score_TK, lse_TK, entropy_TK = ops.scores_and_entropies(
            context_TKE, self.words, labels_T, *how
        )
        return (log_prior_TK, score_TK, lse_TK), entropy_TK[:, 0]

    def log_probs_of(self, words_TM: jax.Array) -> jax.Array:
        """See `Predictions`."""
        log_prior_TK, context_TKE = self.mixture
        how = (self.activation, self.options)

        def score(words_T):
            return ops.label_score(context_TKE, self.words, words_T, *how)

        return log_probs_of_some(words_TM, log_prior_TK, score, self.scores)

    def log_probs(self, log_prior_TK: jax.Array | None) -> jax.Array:
        """See `Predictions`."""
        mixture = self._with(log_prior_TK)
        return ops.log_probs(mixture, self.words, self.activation, self.options)

    def top_k(self, k: int) -> tuple[jax.Array, jax.Array]:
        """See `Predictions`."""
        return ops.top_k(self.mixture, self.words, k, self.activation, self.options)

    def argmax(self) -> jax.Array:
        """See `Predictions`."""
        return ops.argmax(self.mixture, self.words, self.activation, self.options)

    def sample(
        self, key: jax.Array, log_prior_TK: jax.Array | None, sampling: Sampling
    ) -> jax.Array:
        """See `Predictions`."""
        how = (self.activation, self.options, sampling)
        return ops.sample(self._with(log_prior_TK), self.words, key, *how)

    def _with(self, log_prior_TK):
        if log_prior_TK is None:
            return self.mixture
        return self.mixture._replace(log_prior_TK=log_prior_TK)
