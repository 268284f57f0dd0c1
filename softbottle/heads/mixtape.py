"""Mixtape: P(v) = softmax_v( sum_k weight_vk (context_k . w_v) + b_v ).

The K contexts (contexts.py) are mixed before the softmax, but by weights of the word's
own: K - 1 gates in a binary tree (ops/mixture/gated.py), of which gate j has

    l_vj = y_v . tanh(x U_j + a_j) + x . u_j + c_vj     for the S most frequent words
    l_vj = x . u_j                                      for all others,

with x the state or, beside a residual path, its direction. One normalizer is over all
words, where a mixture of softmaxes has K. The words are sorted by frequency: the first
S rows of the table are the frequent ones.

The weights of rare words do not depend on the word, so that their logits are those of
one context, sum_k weight_k context_k, at the cost of a softmax. Only frequent words
meet all contexts: 1 + (K - 1) S / V products with the table in all. The logits of the
rare words have rank d and those of the frequent ones are free: log P has rank up to
S + d + 1, and one more with a bias.

Axes: S frequent words, J = K - 1 gates, G width of a gate's feature.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import base, checks, contexts, pieces
from softbottle.heads.base import Mixture, Params
from softbottle.heads.predictions import States
from softbottle.ops.mixture import gated, gated_tree, shards
from softbottle.ops.mixture.arrays import Vocabulary
from softbottle.ops.mixture.options import Options


@dataclasses.dataclass(frozen=True, repr=False)
class Mixtape(contexts.Projecting):
    """A softmax whose frequent words weight `components` contexts by their own gates.

    Attributes:
        components: K, a power of two.
        frequent: S, words with gates of their own: the first rows of the table.
        gate_dim: G, width of what a word's gates are a product of.
        context: how the contexts are made, one of contexts.KINDS.
    """

    name: ClassVar[str] = "mixtape"
    mixes_all: ClassVar[bool] = False
    components: int = 4
    # No default would fit vocabularies of all sizes.
    frequent: int = dataclasses.field(kw_only=True)
    gate_dim: int = dataclasses.field(default=16, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self._check_positive("components", "frequent", "gate_dim")
        if self.components < 2 or self.components & (self.components - 1):
            raise ValueError(
                f"components must be 2, 4, 8 or another power of two, got "
                f"{self.components}: the gates are a binary tree."
            )

    @property
    def contexts(self) -> int:
        """K."""
        return self.components

    def check_words(self, words: int) -> None:
        """Raise ValueError unless some words are rare."""
        if self.frequent >= words:
            raise ValueError(
                f"frequent={self.frequent} must be less than the vocabulary's {words} "
                "words."
            )

    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """The parameters of contexts and gates; see `Head.init`.

        The gates start near 1/2, about 0.6 apart in l by the token and 0.3 by the word:
        contexts that start equal differ by what the gates send back to them.

            gate_state_DJ       u, as a mixture's prior
            gate_DJG            U, the same
            gate_bias_JG        a, zeros
            gate_word_SG        y, uniform in plus or minus G^-1/2
            gate_word_bias_SJ   c, zeros
        """
        matrix_key, state_key, word_key, *latent_keys = jax.random.split(key, 5)
        gates, dim = self.components - 1, self.gate_dim
        params = contexts.init(
            self.context, latent_keys, self.components, hidden_dim, context_dim
        )
        flat_DX = contexts.init_prior(self.context, matrix_key, gates * dim, hidden_dim)
        return params | {
            "gate_DJG": flat_DX.reshape(hidden_dim, gates, dim),
            "gate_bias_JG": jnp.zeros((gates, dim)),
            "gate_state_DJ": contexts.init_prior(
                self.context, state_key, gates, hidden_dim
            ),
            "gate_word_SG": base.uniform(word_key, (self.frequent, dim), dim),
            "gate_word_bias_SJ": jnp.zeros((self.frequent, gates)),
        }

    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The one context of the rare words; frequent ones have others of their own."""
        return self._mean(self._tokens(params, hidden_TD, latent_mask))

    def predictions(
        self, params: Params, words: Vocabulary, states: States, options: Options
    ) -> pieces.Pieces:
        """Frequent words and rare ones apart; see `Head.predictions`."""
        rows = len(words.table_VE)
        if options.vocab_axis is None and options.vocab and options.vocab > rows:
            raise ValueError(f"vocab={options.vocab} exceeds the table's {rows} rows.")
        self.check_words(shards.word_count(rows, options))
        first, rare, start, options = pieces.split(words, self.frequent, options)
        tokens = self._tokens(params, states.hidden_TD, states.latent_mask)
        gates = (params["gate_word_SG"], params["gate_word_bias_SJ"])
        frequent = gated.Words(first, *gates)
        mean = self._mean(tokens)
        return pieces.Pieces(tokens, frequent, mean, rare, start, options)

    @property
    def products(self) -> int:
        """One: that of the rare words, which are most. Frequent ones have K."""
        return 1

    def _tokens(self, params, hidden_TD, latent_mask):
        """The contexts, masked, and what the gates read."""
        context_TKE = contexts.make(self.context, params, hidden_TD)
        read_TD = contexts.read(self.context, hidden_TD)
        dtype = read_TD.dtype
        wide = jnp.promote_types(dtype, jnp.float32)

        def times(formula, name):
            matrix = params[name].astype(dtype)
            return jnp.einsum(formula, read_TD, matrix, preferred_element_type=wide)

        bias_JG = params["gate_bias_JG"].astype(wide)
        feature_TJG = jnp.tanh(times("td,djg->tjg", "gate_DJG") + bias_JG[None])
        return gated.Tokens(
            base.masked(context_TKE, latent_mask),
            feature_TJG.astype(dtype),
            times("td,dj->tj", "gate_state_DJ"),
        )

    def _mean(self, tokens):
        """The contexts' mean by the gates that rare words share, the only component."""
        context_TKE, _, level_TJ = tokens
        gates = list(jax.nn.sigmoid(level_TJ).T)
        parts = gated_tree.spread(gates, jnp.ones_like(gates[0]))
        weight_TK = jnp.stack(parts[len(gates) :], axis=1)
        wide_TKE = context_TKE.astype(level_TJ.dtype)
        # As a product it would have a matrix unit's precision.
        mean_TE = jnp.sum(weight_TK[:, :, None] * wide_TKE, axis=1)
        return base.single(mean_TE.astype(context_TKE.dtype), None)


@checks.factory
def mixtape(
    components: int = 4,
    context: str = contexts.DEFAULT,
    *,
    frequent: int,
    gate_dim: int = 16,
) -> Mixtape:
    """A softmax whose frequent words weight `components` contexts by their own gates.

    Args:
        components: K, a power of two.
        context: as of `mos`.
        frequent: S, words with gates of their own, the first rows of the table: it has
            to be sorted by frequency. A tenth of the vocabulary costs 0.3 products with
            the table beside the softmax's one, for K = 4. Where the table is split
            over devices, the first one has to have them all.
        gate_dim: G, width of what a word's gates are a product of.

    Raises:
        ValueError: if `components` is no power of two above 1, `frequent` or `gate_dim`
            is not a positive integer, or there is no such kind of context.
    """
    return Mixtape(components, frequent=frequent, gate_dim=gate_dim, context=context)
