"""What a head is: settings, and pure methods from which everything else is derived.

    init(key, hidden_dim, context_dim) -> params
    mix(params, hidden_TD, latent_mask) -> Mixture(log_prior_TK, context_TKE)
    activation(params) -> Activation

A head is a frozen dataclass: equal settings make equal heads, which may be static
arguments of `jax.jit`. Parameters are arguments of every call. So are the vocabulary
table and its bias, which the model owns, because the same table usually embeds the
input, may be split over devices and is where the memory goes.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from softbottle.heads import checks, compiled, objective
from softbottle.heads.predictions import OfMixture, Predictions, States
from softbottle.heads.start import log_frequencies
from softbottle.ops.mixture import shards
from softbottle.ops.mixture.activations import SOFTMAX, Activation
from softbottle.ops.mixture.arrays import (
    Mixture,
    Vocabulary,
)
from softbottle.ops.mixture.likelihood import word_ids
from softbottle.ops.mixture.options import DEFAULTS, Options, check_range
from softbottle.ops.mixture.sampling import Sampling

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, repr=False)
class Head(abc.ABC):
    """An output layer: P(v) = sum_k prior_k exp(g(z_kv) - lse_k), a value.

    A subclass adds its settings as fields, checks them in `__post_init__` and has
    `init` and `mix`, and `activation` if its g is not the identity. Its fields are what
    `config.head` may set.

    Floating arrays are bfloat16, float32 or float64. How a method computes is said by
    its `Options` (softbottle.Options). Gradients are those of reverse mode (`jax.grad`,
    `jax.vjp`); forward mode (`jax.jvp`) is refused by jax, as for every `custom_vjp`.

    Attributes:
        name: in `softbottle` and in `config.head.name`.
        is_linear: whether words are ranked by one linear map of the context, which is
            itself a linear map of the state.
        mixes_all: whether `mix` has the contexts of all words.
    """

    name: ClassVar[str]
    is_linear: ClassVar[bool] = False
    mixes_all: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        """Whether `loss` draws something if it is given a key."""
        return False

    def __repr__(self) -> str:
        """The call that makes this head; options at their defaults are left out."""
        usual = {f.name: f.default for f in dataclasses.fields(self) if f.kw_only}
        values = {name: getattr(self, name) for name in self.settings()}
        settings = (
            f"{name}={value!r}"
            for name, value in values.items()
            if name not in usual or value != usual[name]
        )
        return f"{self.name}({', '.join(settings)})"

    def _check_positive(self, *names: str) -> None:
        """Make these settings ints, or raise ValueError unless all are above 0."""
        for name in names:
            value = checks.positive_integer(name, getattr(self, name))
            object.__setattr__(self, name, value)

    @classmethod
    def settings(cls) -> list[str]:
        """The names of the settings, in the order of the call."""
        fields = sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only))
        return [field.name for field in fields]

    @property
    def contexts(self) -> int:
        """K, contexts per token that a latent mask has, before any are averaged."""
        return 1

    @property
    def products(self) -> int:
        """Products of a context with the table per token, which a step's cost has."""
        return self.contexts

    @property
    def projects(self) -> bool:
        """Whether the contexts are projections of the state, whose width is free."""
        return False

    @property
    def layers(self) -> int:
        """How many of the last layers have their states in what the head reads."""
        return 1

    @property
    def positions(self) -> int:
        """How many positions have, the token's own and those just before it."""
        return 1

    def check_widths(self, hidden_dim: int, context_dim: int) -> None:
        """Raise ValueError unless such a state and such a table go together."""
        if not self.projects and hidden_dim != context_dim:
            raise ValueError(
                f"{self.name} reads the hidden state as the context, so hidden_dim="
                f"{hidden_dim} must equal context_dim={context_dim}."
            )

    def check_words(self, words: int) -> None:
        """Raise ValueError unless the head fits a vocabulary of so many words."""
        del words

    @abc.abstractmethod
    def init(self, key: jax.Array, hidden_dim: int, context_dim: int) -> Params:
        """The parameters that a training starts from.

        Args:
            key: of jax.random.
            hidden_dim: D, width of the states: where the head reads several, of all of
                them side by side, which then are equally wide.
            context_dim: E, width of the vocabulary table.

        Returns:
            Arrays by name; empty if the head has none beside the table and the bias.

        Raises:
            ValueError: if the widths do not go together.
        """

    def init_wide(
        self, key: jax.Array, hidden_dims: Sequence[int], context_dim: int
    ) -> Params:
        """`init`, for states that are side by side in what the head reads.

        Args:
            key: of jax.random.
            hidden_dims: their widths: for the token's own position and each before it,
                those of the last layer and of each below.
            context_dim: E, width of the vocabulary table.

        Raises:
            ValueError: as `init`; or unless there is a width for each state.
        """
        return self.init(key, sum(hidden_dims), context_dim)

    @abc.abstractmethod
    def mix(
        self, params: Params, hidden_TD: jax.Array, latent_mask: jax.Array | None = None
    ) -> Mixture:
        """The mixture weights and contexts of every token.

        Args:
            params: of `init`.
            hidden_TD: the states.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.

        Returns:
            log_prior_TK, which sum to 1 as probabilities, and context_TKE.
        """

    def log_prior(self, params: Params, hidden_TD: jax.Array) -> jax.Array:
        """Log-weights of the components in every token, [T, K], active or not.

        Args:
            params: of `init`.
            hidden_TD: the states.
        """
        return self.mix(params, hidden_TD).log_prior_TK

    def components_of(self, params: Params, hidden_TD: jax.Array) -> jax.Array | None:
        """Which component each column of `mix` is in every token, [T, k].

        None where column k is component k, which it is unless only some are active.

        Args:
            params: of `init`.
            hidden_TD: the states.
        """
        del params, hidden_TD
        return None

    def activation(self, params: Params) -> Activation:
        """The log-activation g; the identity unless a head has another.

        Args:
            params: of `init`.
        """
        del params
        return SOFTMAX

    def start_bias(self, counts_V: Any) -> jax.Array:
        """The bias with which the head begins by predicting how frequent words are.

        Its g is `log_frequencies`, so that a context of zero predicts every word about
        as often as the text has it. Where g is the identity, or near it (softcap,
        plif), these are the bias themselves.

        Args:
            counts_V: the words' counts, as `log_frequencies` takes them.

        Returns:
            bias_V, float32.

        Raises:
            ValueError: as `log_frequencies`.
        """
        return log_frequencies(counts_V)

    def loss(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        labels_T: jax.Array,
        weights_T: jax.Array | None = None,
        *,
        reduction: str = "sum",
        ignore_label: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        temperature: float = 1.0,
        latent_mask: jax.Array | None = None,
        key: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """sum_t weight[t] nll[t], a scalar; its gradient is computed in forward.

        A token of weight 0 may hold anything, even NaN, and therefore adds nothing to
        any gradient. That by its own weight is 0 as well; by another weight it is
        nll[t]. A label that is no word of the vocabulary gives NaN.

        Args:
            params: of `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_TD: the states, rows and positions flattened to tokens.
            labels_T: the words that follow, integers of any kind.
            weights_T: of the tokens; 0 is padding. None is 1 for all.
            reduction: "sum"; "mean", over the weights, and 0 where all of them are; or
                "none" for weight[t] nll[t] of each token.
            ignore_label: a label, for example -100, whose tokens have weight 0.
            label_smoothing: a, of which nll[t] is -(1 - a) log P(label) - a times the
                mean of log P over all words. Costs next to nothing beside one softmax;
                a mixture, or another g, forms its log-probabilities in chunks of
                tokens, which takes two to three times as long as the plain loss.
            z_loss: if above 0, that times the mean over the components of the squared
                log-normalizer is added to each nll[t] (PaLM's keeps the log-normalizers
                near 0 with 1e-4).
            temperature: P is taken to the power of 1 / temperature and normalized
                again: the logits of one softmax are divided by it. For others it costs
                what smoothing does.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.
            key: of jax.random, for a head that `draws`; others do not read it.
            options: how it is computed, for example
                Options(compute_dtype=jnp.bfloat16).

        Returns:
            The weighted sum, mean or terms, float32 or better.

        Raises:
            ValueError: if shapes do not go together, an array is float16, the labels
                are not integers, there is no such reduction, `label_smoothing` is not
                in [0, 1), `z_loss` is below 0 or beside a temperature, `temperature` is
                not above 0, or an option is refused.
        """
        return self._loss(
            (params, table_VE, bias_V),
            (hidden_TD, labels_T, weights_T),
            reduction=reduction,
            ignore_label=ignore_label,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            temperature=temperature,
            latent_mask=latent_mask,
            key=key,
            options=options,
        )[0]

    def loss_and_argmax(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        labels_T: jax.Array,
        weights_T: jax.Array | None = None,
        **terms: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """`loss`, and the most probable word of each token, say for the accuracy.

        A head of one component whose g has nothing to learn (softmax, softcap, moc,
        partition and the like, not mixtape) has both in one pass, but on TPU; on a
        Hopper GPU, words whose probabilities differ by less than 2^-15 of themselves
        may then change places. For other heads the argmax takes a pass of its own, as
        in `measure`.

        Args:
            params: as all arrays, of `loss`.
            table_VE: of `loss`.
            bias_V: of `loss`.
            hidden_TD: of `loss`.
            labels_T: of `loss`.
            weights_T: of `loss`.
            **terms: the keywords of `loss`.

        Returns:
            The loss, and argmax_T, which is int32 and has no gradient; any word where a
            token has no weight.

        Raises:
            ValueError: as `loss`.
        """
        output, tokens = (params, table_VE, bias_V), (hidden_TD, labels_T, weights_T)
        return self._loss(output, tokens, argmax=True, **terms)

    def nll(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        labels_T: jax.Array,
        *,
        ignore_label: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        temperature: float = 1.0,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """-log P(label) of each token; takes any cotangent.

        Args:
            params: of `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_TD: the states, rows and positions flattened to tokens.
            labels_T: the words that follow; one that is no word gives NaN.
            ignore_label: a label, for example -100, whose tokens have 0 and no
                gradient; their states may hold anything.
            label_smoothing: as of `loss`.
            z_loss: as of `loss`.
            temperature: as of `loss`.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.
            options: how it is computed.

        Returns:
            nll_T, float32 or better.

        Raises:
            ValueError: as `loss`.
        """
        return self.measure(
            params,
            table_VE,
            bias_V,
            hidden_TD,
            labels_T,
            ("nll",),
            ignore_label=ignore_label,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            temperature=temperature,
            latent_mask=latent_mask,
            options=options,
        )["nll"]

    def measure(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        labels_T: jax.Array,
        names: Sequence[str],
        *,
        ignore_label: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        temperature: float = 1.0,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> dict[str, jax.Array]:
        """`nll` and what comes with it, as asked for; takes any cotangents.

        What is not asked for is not computed. The entropy of a mixture is formed from
        its log-probabilities, a chunk of tokens at a time, and so is then its nll.

        Args:
            params: of `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_TD: the states, rows and positions flattened to tokens.
            labels_T: the words that follow; one that is no word gives NaN.
            names: of what is wanted, [T] each unless another shape is given: "nll", as
                of `nll`; "entropy" of P, at the temperature; "argmax", the most
                probable word, and "accuracy", 1 where that is the label and else 0,
                which have no gradient; "lse", the log-normalizers of the components
                [T, K]; "responsibilities", P(component | label) [T, K]; "z_loss", what
                `z_loss` adds to the nll. Where only k components are active, the two
                are [T, k], of those that `components_of` names.
            ignore_label: a label, for example -100, whose tokens have 0 of everything
                and no gradient; their states may hold anything.
            label_smoothing: as of `loss`.
            z_loss: as of `loss`.
            temperature: as of `loss`; normalizers and responsibilities of a mixture
                are those without it.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.
            options: how it is computed.

        Returns:
            The arrays by name, float32 or better; word ids are int32.

        Raises:
            ValueError: as `loss`; if something is called for that there is not.
        """
        checks.states(params, hidden_TD)
        checks.labels(labels_T, hidden_TD)
        checks.measures(names)
        checks.options(options)
        terms = _terms(label_smoothing, z_loss, temperature)
        kept_T = None
        if ignore_label is not None:
            kept_T = _kept(labels_T, ignore_label, jnp.int32)
        how = (self, terms, options.resolve(), tuple(names))
        tokens = (hidden_TD, word_ids(labels_T=labels_T), kept_T)
        output = (params, table_VE, bias_V)
        return compiled.measure(*how, output, tokens, latent_mask)

    def log_probs_of(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        words_TM: jax.Array,
        *,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """Log P of M given words of each token; takes any cotangent.

        The normalizers are computed once. For re-ranking, contrastive losses and the
        like; `nll` is the same of one word.

        Args:
            params: of `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_TD: the states, rows and positions flattened to tokens.
            words_TM: integers of any kind; inside `jit`, where values are not known,
                one that is no word gives NaN.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.
            options: how it is computed.

        Returns:
            log_p_TM, float32 or better.

        Raises:
            ValueError: as `loss`; if `words_TM` has no words for each token, or one
                that is none.
        """
        checks.states(params, hidden_TD)
        if words_TM.ndim != 2 or len(words_TM) != len(hidden_TD):
            raise ValueError(
                f"words_TM must be [tokens, words] with the {len(hidden_TD)} tokens of "
                f"hidden_TD {hidden_TD.shape}, got {words_TM.shape}."
            )
        checks.words(words_TM, shards.word_count(len(table_VE), options))
        output = (params, table_VE, bias_V)
        predictions = self.predict(output, hidden_TD, latent_mask, options)
        return predictions.log_probs_of(word_ids(words_TM=words_TM))

    def scores(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        labels_T: jax.Array,
        *,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the likelihood is made of; takes any cotangent.

        Args:
            params: of `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_TD: the states, rows and positions flattened to tokens.
            labels_T: the words that follow; one that is no word gives NaN.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.
            options: how it is computed.

        Returns:
            log_prior_TK; score_TK, g(z) of the label; lse_TK, the log-normalizers. The
            label's log P is the log-sum-exp over k of log_prior + score - lse.

        Raises:
            ValueError: as `loss`.
        """
        output = (params, table_VE, bias_V)
        predictions = self.predict(output, hidden_TD, latent_mask, options)
        return predictions.scores(labels_T)

    def log_probs(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        *,
        latent_mask: jax.Array | None = None,
        log_prior_TK: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """Log P(v) of every word.

        Args:
            params: of `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_TD: the states, rows and positions flattened to tokens.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.
            log_prior_TK: in place of the head's own, of which `scores` tells the
                shape; what they sum to is what P sums to.
            options: how it is computed.

        Returns:
            log_p_TV, float32 or better; -inf in rows beyond `vocab`.

        Raises:
            ValueError: as `loss`.
        """
        output = (params, table_VE, bias_V)
        predictions = self.predict(output, hidden_TD, latent_mask, options)
        return predictions.log_probs(log_prior_TK)

    def top_k(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        k: int,
        *,
        latent_mask: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> tuple[jax.Array, jax.Array]:
        """The k most probable words of each token, without [T, V] log-probabilities.

        Args:
            params: of `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_TD: the states, rows and positions flattened to tokens.
            k: how many.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.
            options: how it is computed.

        Returns:
            Log-probabilities and ids, both [T, k], the most probable first and of
            equally probable words the first. Under `vocab_axis` they are those of the
            whole vocabulary, and the same on all shards.

        Raises:
            ValueError: as `loss`; if `k` is not between 1 and the vocabulary's size.
        """
        output = (params, table_VE, bias_V)
        return self.predict(output, hidden_TD, latent_mask, options).top_k(k)

    def sample(
        self,
        params: Params,
        table_VE: jax.Array,
        bias_V: jax.Array | None,
        hidden_TD: jax.Array,
        key: jax.Array,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        latent_mask: jax.Array | None = None,
        log_prior_TK: jax.Array | None = None,
        options: Options = DEFAULTS,
    ) -> jax.Array:
        """One word per token, drawn exactly from P, or from what is asked for of it.

        Temperature, `top_k`, `top_p` and `min_p` are of P itself, the mixture's own
        probabilities, and are applied in this order, each to what the one before it
        keeps. By default the table is read once, and by all of them without
        log-probabilities of [T, V]; `top_p` alone reads it seven or eight times, beside
        `top_k` once or twice (ops/mixture/sampling.py).

        Under `vocab_axis` the word is the same on all shards, and, but for the rounding
        of sums, that of the whole table. Where tokens are split over devices, give each
        its own key: the noise depends on the token's number in the call.

        Args:
            params: of `init`.
            table_VE: a row for each word.
            bias_V: a logit for each word; None is zero.
            hidden_TD: the states, rows and positions flattened to tokens.
            key: of jax.random; the same key draws the same words.
            temperature: below 1 sharpens: P(v)^(1/temperature), renormalized. 0 gives
                the most probable word.
            top_k: keep the k most probable words; None for all.
            top_p: keep the fewest most probable words of at least this mass (nucleus
                sampling), and words as probable as the last one; None for all.
            min_p: keep words of at least this share of the most probable one's
                probability; None for all.
            latent_mask: factors of the contexts, broadcast to [T, K, E]; None for none.
            log_prior_TK: in place of the head's own; need not be normalized.
            options: how it is computed.

        Returns:
            Word ids, [T].

        Raises:
            ValueError: as `loss`; if `temperature` is below 0, `top_k` not between 1
                and the vocabulary's size, `top_p` outside (0, 1], `min_p` outside
                [0, 1], or one of them not known when compiling.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p)
        output = (params, table_VE, bias_V)
        predictions = self.predict(output, hidden_TD, latent_mask, options)
        return predictions.sample(key, log_prior_TK, sampling)

    def predictions(
        self, params: Params, words: Vocabulary, states: States, options: Options
    ) -> Predictions:
        """What the head says of every token, from which its methods answer.

        Those of the mixture that `mix` gives, unless a head has others for some words.

        Args:
            params: of `init`.
            words: table and bias.
            states: of the tokens, checked.
            options: how its operations are computed.
        """
        hidden_TD, latent_mask, key = states
        drawn = {"key": key} if self.draws and key is not None else {}
        mixture = self.mix(params, hidden_TD, latent_mask, **drawn)
        return OfMixture(mixture, words, self.activation(params), options)

    def _loss(
        self,
        output,
        tokens,
        *,
        reduction="sum",
        ignore_label=None,
        label_smoothing=0.0,
        z_loss=0.0,
        temperature=1.0,
        latent_mask=None,
        key=None,
        options=DEFAULTS,
        argmax=False,
    ):
        """`loss`, and the most probable words if they are asked for."""
        params, *_ = output
        hidden_TD, labels_T, weights_T = tokens
        checks.states(params, hidden_TD)
        checks.labels(labels_T, hidden_TD)
        checks.reduction(reduction)
        checks.options(options)
        terms = _terms(label_smoothing, z_loss, temperature)
        if weights_T is None:
            weights_T = jnp.ones(len(hidden_TD))
        checks.weights(weights_T, hidden_TD)
        if ignore_label is not None:
            weights_T = weights_T * _kept(labels_T, ignore_label, weights_T.dtype)
        how = (self, terms, options.resolve(), reduction, argmax)
        tokens = (hidden_TD, word_ids(labels_T=labels_T), weights_T)
        return compiled.loss(*how, output, tokens, latent_mask, key)

    def predict(
        self,
        output: tuple[Params, jax.Array, jax.Array | None],
        hidden_TD: jax.Array,
        latent_mask: jax.Array | None,
        options: Options,
        key: jax.Array | None = None,
    ) -> Predictions:
        """`predictions`, of arrays that are checked first.

        Args:
            output: params, table and bias, as of `loss`.
            hidden_TD: as of `loss`.
            latent_mask: as of `loss`.
            options: as of `loss`.
            key: as of `loss`.
        """
        params, table_VE, bias_V = output
        checks.states(params, hidden_TD)
        checks.options(options)
        checks.floating(table_VE=table_VE)
        checks.contexts(repr(self), self.contexts, params)
        # Of several states side by side the widths are not known here.
        if self.layers == self.positions == 1:
            widths = hidden_TD.shape[1], table_VE.shape[1]
            checks.params(repr(self), _shapes(self, *widths), params, widths)
        check_range(params=params, hidden_TD=hidden_TD)
        checks.mesh(params=params, table_VE=table_VE, hidden_TD=hidden_TD)
        states = States(hidden_TD, latent_mask, key)
        return self.predictions(
            params, Vocabulary.of(table_VE, bias_V), states, options
        )


@functools.lru_cache
def _shapes(head, hidden_dim, context_dim):
    """Those of a head's parameters, by name."""

    def init():
        return head.init(jax.random.key(0), hidden_dim, context_dim)

    return {name: leaf.shape for name, leaf in jax.eval_shape(init).items()}


def _kept(labels_T, ignore_label, dtype):
    """1 where a label counts, else 0."""
    if labels_T.dtype.itemsize < 4:
        # Beside uint8, jax would make the word 156 of -100.
        labels_T = labels_T.astype(jnp.int32)
    return (labels_T != ignore_label).astype(dtype)


def _terms(*values):
    checks.terms(*values)
    return objective.Terms(*values)


def single(hidden_TD: jax.Array, latent_mask: jax.Array | None) -> Mixture:
    """One component whose context is the hidden state itself."""
    context_T1E = masked(hidden_TD[:, None, :], latent_mask)
    return Mixture(jnp.zeros(context_T1E.shape[:2], context_T1E.dtype), context_T1E)


def masked(context_TKE: jax.Array, latent_mask: jax.Array | None) -> jax.Array:
    """The contexts times a dropout mask, if there is one."""
    if latent_mask is None:
        return context_TKE
    return context_TKE * jnp.broadcast_to(
        latent_mask.astype(context_TKE.dtype), context_TKE.shape
    )


def uniform(key: jax.Array, shape: tuple[int, ...], fan_in: float) -> jax.Array:
    """Uniform in plus or minus 1/sqrt(fan_in), as PyTorch's Linear starts."""
    bound = fan_in**-0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
