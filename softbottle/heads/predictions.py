"""What a head says of every token, from which its methods answer.

A mixture that meets the whole vocabulary is `OfMixture`. A head that treats some words
in another way has predictions of its own (mixtape.py).
"""

from typing import NamedTuple, Protocol

import jax

from softbottle import ops
from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.arrays import Mixture, Targets, Vocabulary
from softbottle.ops.mixture.options import Options
from softbottle.ops.mixture.sampling import Sampling


class States(NamedTuple):
    """What a head reads of the tokens; see `Head.loss`."""

    hidden_TD: jax.Array
    latent_mask: jax.Array | None
    key: jax.Array | None


class Predictions(Protocol):
    """What a head says of every token; the methods are those of `Head`."""

    def loss(self, targets: Targets) -> jax.Array:
        """The weighted sum of -log P(label), and of what else the targets ask for."""
        ...

    def scores(self, labels_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """log_prior_TK, score_TK and lse_TK."""
        ...

    def log_probs(self, log_prior_TK: jax.Array | None) -> jax.Array:
        """Log P of every word, by the given prior if there is one."""
        ...

    def top_k(self, k: int) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities and ids of the best words."""
        ...

    def sample(
        self, key: jax.Array, log_prior_TK: jax.Array | None, sampling: Sampling
    ) -> jax.Array:
        """One word per token, by the given prior if there is one."""
        ...


class OfMixture(NamedTuple):
    """The predictions of a mixture that meets the whole vocabulary."""

    mixture: Mixture
    words: Vocabulary
    activation: Activation
    options: Options

    def loss(self, targets: Targets) -> jax.Array:
        """See `Predictions`."""
        return ops.loss(
            self.mixture, self.words, targets, self.activation, self.options
        )

    def scores(self, labels_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `Predictions`."""
        log_prior_TK, context_TKE = self.mixture
        tokens = (context_TKE, self.words, labels_T)
        return log_prior_TK, *ops.scores(*tokens, self.activation, self.options)

    def log_probs(self, log_prior_TK: jax.Array | None) -> jax.Array:
        """See `Predictions`."""
        mixture = self._with(log_prior_TK)
        return ops.log_probs(mixture, self.words, self.activation, self.options)

    def top_k(self, k: int) -> tuple[jax.Array, jax.Array]:
        """See `Predictions`."""
        return ops.top_k(self.mixture, self.words, k, self.activation, self.options)

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
