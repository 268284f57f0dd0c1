"""The operations everyone calls; here inputs are checked and a path is chosen.

    scores     g(z) of the label and logsumexp_v g(z_v), per token and component
    label_score, lse, each alone
    scores_and_entropies, with the entropy of each component
    nll        -log P(label) per token; takes any cotangent
    loss       the weighted sum of nll, with its gradient computed in forward
    loss_and_argmax, with the most probable words
    source     log P of all words in chunks of tokens, for reductions.py
    log_probs, top_k, argmax, sample

Arrays travel in threes: `Mixture(log_prior_TK, context_TKE)`, `Vocabulary(table_VE,
bias_V)` and `Targets(labels_T, weights_T)`. How an operation is computed is said by its
`Options`; which implementation was taken is said in the log.

A label that is no word of the vocabulary gives NaN, never a plausible loss; run with
`jax.debug_nans(True)` to be taken to the call. A token of weight 0 may hold any label.
Labels are integers of any kind. float16 is refused: see `check_range`.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp

from softbottle.ops.mixture import classes, decode, likelihood, reductions, shards
from softbottle.ops.mixture.activations import SOFTMAX, Activation
from softbottle.ops.mixture.arrays import (
    Elsewhere,
    Mixture,
    Targets,
    Vocabulary,
    without_padding,
)
from softbottle.ops.mixture.implementation import Choice, Implementation, Shaped
from softbottle.ops.mixture.options import DEFAULTS, Options, check_range, sum_dtype
from softbottle.ops.mixture.sampling import EXACT, Sampling, draw, one_component, race


def scores(
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
    elsewhere: Elsewhere | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The differentiable primitive: (score [T, K], lse [T, K]).

    score is g(z) of the label and lse the log-normalizer over the vocabulary, and what
    is elsewhere; both take arbitrary cotangents, so losses of other shapes follow by
    differentiation.
    """
    options = options.resolve()
    labels_T = _labels(context_TKE, vocabulary, labels_T, options)
    local = _implementation(options, context_TKE).scores
    inputs = (context_TKE, vocabulary, labels_T, activation, options)
    return likelihood.beside(*likelihood.joint_scores(local, *inputs), elsewhere)


def label_score(
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
) -> jax.Array:
    """g(z) of the label alone, [T, K]; takes any cotangent."""
    labels_T = _labels(context_TKE, vocabulary, labels_T, options)
    return likelihood.target_score(
        context_TKE, vocabulary, labels_T, activation, options
    )


def lse(
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
) -> jax.Array:
    """The log-normalizers alone, [T, K]; take any cotangent."""
    options = options.resolve()
    _check(context_TKE, vocabulary, options)
    local = _implementation(options, context_TKE).lse
    local_TK = classes.lse(local, context_TKE, vocabulary, activation, options)
    return shards.joint_lse(local_TK, options)


def scores_and_entropies(
    context_TKE: jax.Array,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`scores`, and the entropy of each component, [T, K] all.

    They take any cotangents. The activation has no parameters, and words no classes.
    """
    options = options.resolve()
    labels_T = _labels(context_TKE, vocabulary, labels_T, options)
    chosen = _implementation(options, context_TKE)
    inputs = (context_TKE, vocabulary, labels_T, activation, options)
    own_TK, lse_TK, entropy_TK = chosen.entropies(*inputs)
    rows = len(vocabulary.table_VE)
    score_TK = shards.from_owner(own_TK, labels_T, rows, options)
    joint_TK = shards.joint_lse(lse_TK, options)
    entropy_TK = shards.joint_entropy(lse_TK, entropy_TK, joint_TK, options)
    return score_TK, joint_TK, entropy_TK


def nll(
    mixture: Mixture,
    vocabulary: Vocabulary,
    labels_T: jax.Array,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
) -> jax.Array:
    """-log P(label) = -logsumexp_k(log_prior + score - lse) of each token, [T]."""
    log_prior_TK, context_TKE = mixture
    _check_tokens(context_TKE, log_prior_TK=log_prior_TK)
    score_TK, lse_TK = scores(context_TKE, vocabulary, labels_T, activation, options)
    return likelihood.nll(log_prior_TK, score_TK, lse_TK)


def loss(
    mixture: Mixture,
    vocabulary: Vocabulary,
    targets: Targets,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
    elsewhere: Elsewhere | None = None,
) -> jax.Array:
    """sum_t weight[t] nll[t], a scalar whose gradient is computed in forward.

    A token of weight 0 may hold anything, even NaN, and therefore adds nothing to any
    gradient. That by its own weight is 0 as well; by another weight it is nll[t].
    `elsewhere` is what words outside the vocabulary given here add.
    """
    options = options.resolve()
    targets = _targets(mixture, vocabulary, targets, options)
    mixture, targets, elsewhere = without_padding(
        targets.weights_T, (mixture, targets, elsewhere)
    )
    chosen = _implementation(options, mixture.context_TKE)
    return chosen.loss(mixture, vocabulary, targets, activation, options, elsewhere)


def loss_and_argmax(
    mixture: Mixture,
    vocabulary: Vocabulary,
    targets: Targets,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
) -> tuple[jax.Array, jax.Array] | None:
    """`loss`, and the most probable word of each token [T], in one pass.

    None where that takes two: with several components, or where the implementation has
    no such pass.
    """
    if mixture.context_TKE.shape[-2] > 1:
        return None
    options = options.resolve()
    targets = _targets(mixture, vocabulary, targets, options)
    mixture, targets = without_padding(targets.weights_T, (mixture, targets))
    chosen = _implementation(options, mixture.context_TKE)
    inputs = (mixture, vocabulary, targets, activation, options)
    return chosen.loss_and_argmax(*inputs)


def choice(
    context_TKE: Shaped,
    table_VE: Shaped,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
) -> Choice:
    """How `loss` would be computed on such arrays, of which only shapes are read."""
    options = options.resolve()
    chosen = _implementation(options, context_TKE)
    return chosen.choice(context_TKE, table_VE, activation, options)


def source(
    mixture: Mixture,
    vocabulary: Vocabulary,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
) -> reductions.Source:
    """Log-probabilities in chunks of tokens, for reductions over all words."""
    options = options.resolve()
    _check_mixture(mixture, vocabulary, options)
    fused = _implementation(options, mixture.context_TKE).logits_and_lse
    return reductions.of_mixture(mixture, vocabulary, activation, options, fused)


def log_probs(
    mixture: Mixture,
    vocabulary: Vocabulary,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
    lse_TK: jax.Array | None = None,
) -> jax.Array:
    """log P(v) of every word, [T, V]; of the local words under `vocab_axis`.

    The log-normalizers are those over the vocabulary, unless they are given: words
    outside it may share them.
    """
    options = decode.budgeted(options)
    _check_mixture(mixture, vocabulary, options)
    if lse_TK is None:
        lse_TK = lse(mixture.context_TKE, vocabulary, activation, options)
    return decode.log_probs(mixture, vocabulary, lse_TK, activation, options)


def top_k(
    mixture: Mixture,
    vocabulary: Vocabulary,
    k: int,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
    lse_TK: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The k most probable words of each token: (log-probabilities, ids), [T, k].

    Of equally probable words the first comes first. Under `vocab_axis` the words are
    those of all shards, and the same on each. The log-normalizers may be given, as
    those of `log_probs`.
    """
    options = decode.budgeted(options)
    _check_mixture(mixture, vocabulary, options)
    decode.check_best(k, shards.word_count(len(vocabulary.table_VE), options))
    if lse_TK is None:
        lse_TK = lse(mixture.context_TKE, vocabulary, activation, options)
    given = (mixture, vocabulary, lse_TK, activation, options)
    return decode.top_k(decode.blocks(*given, least=k), k, options)


def argmax(
    mixture: Mixture,
    vocabulary: Vocabulary,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
) -> jax.Array:
    """The most probable word of each token, [T]; of one component no normalizer."""
    log_prior_TK = mixture.log_prior_TK
    lse_TK = jnp.zeros_like(log_prior_TK) if log_prior_TK.shape[1] == 1 else None
    # In blocks as large as a loss has them, not as small as decoding needs.
    options = options.resolve()
    options = dataclasses.replace(options, budget_bytes=options.block_bytes)
    return top_k(mixture, vocabulary, 1, activation, options, lse_TK)[1][:, 0]


def sample(
    mixture: Mixture,
    vocabulary: Vocabulary,
    key: jax.Array,
    activation: Activation = SOFTMAX,
    options: Options = DEFAULTS,
    sampling: Sampling = EXACT,
    first: int = 0,
) -> jax.Array:
    """One word per token, [T], the same on all shards under `vocab_axis`.

    By default it is drawn exactly from the mixture: a component, then Gumbel-max over
    it. sampling.py has the rest, and what it costs. `first` is the number of the
    table's first row, which the noise depends on.
    """
    options = decode.budgeted(options)
    _check_mixture(mixture, vocabulary, options)
    tokens, components = mixture.log_prior_TK.shape
    if sampling.is_exact:
        prior_key, key = jax.random.split(key)
        mixture = one_component(mixture, prior_key)
        fold = decode.blocks(
            *(mixture, vocabulary, None, activation, options), first=first, beside=2
        )
        return race(fold, tokens, key, options)
    sampling.check_words(shards.word_count(len(vocabulary.table_VE), options))
    lse_TK = None
    if components > 1:
        lse_TK = lse(mixture.context_TKE, vocabulary, activation, options)
    given = (mixture, vocabulary, lse_TK, activation, options)
    fold = decode.blocks(*given, first=first, least=sampling.top_k or 1, beside=2)
    return draw(fold, tokens, key, sampling, options)


def _implementation(options: Options, context_TKE: Shaped) -> Implementation:
    # A grid of no blocks is nothing that a kernel could be started with.
    name = options.implementation if context_TKE.shape[0] else "blocked"
    return importlib.import_module(f"softbottle.ops.mixture.{name}").IMPLEMENTATION


def _targets(mixture, vocabulary, targets, options):
    """A loss's targets, in the dtypes of its sums; all its inputs are checked."""
    _check_mixture(mixture, vocabulary, options)
    given = {
        name: array for name, array in targets._asdict().items() if array is not None
    }
    _check_tokens(mixture.context_TKE, **given)
    wide = sum_dtype(mixture.context_TKE, vocabulary.table_VE)
    weights = jax.tree.map(lambda array: array.astype(wide), targets[1:])
    return Targets(likelihood.word_ids(labels_T=targets.labels_T), *weights)


def _labels(context_TKE, vocabulary, labels_T, options):
    """The labels as word ids; all inputs are checked."""
    _check(context_TKE, vocabulary, options)
    _check_tokens(context_TKE, labels_T=labels_T)
    return likelihood.word_ids(labels_T=labels_T)


def _check_mixture(mixture, vocabulary, options):
    _check(mixture.context_TKE, vocabulary, options)
    _check_tokens(mixture.context_TKE, log_prior_TK=mixture.log_prior_TK)


def _check(context_TKE, vocabulary, options):
    """Check the arrays that every operation shares."""
    table_VE, bias_V = vocabulary
    check_range(context_TKE=context_TKE, table_VE=table_VE, bias_V=bias_V)
    if context_TKE.ndim not in (3, 4):
        raise ValueError(
            "context_TKE must have 3 axes, or 4 with words in classes, got the shape "
            f"{context_TKE.shape}."
        )
    for name, array, rank in (("table_VE", table_VE, 2), ("bias_V", bias_V, 1)):
        if array.ndim != rank:
            raise ValueError(
                f"{name} must have {rank} axes, got the shape {array.shape}."
            )
    rows, width = table_VE.shape
    if context_TKE.shape[-1] != width:
        raise ValueError(
            f"the context is {context_TKE.shape[-1]} wide and the table {width}; "
            f"got context_TKE {context_TKE.shape} and table_VE {table_VE.shape}."
        )
    if bias_V.shape[0] != rows:
        raise ValueError(f"bias_V has {bias_V.shape[0]} entries for {rows} rows.")
    if options.vocab_axis is None and options.vocab and options.vocab > rows:
        raise ValueError(f"vocab={options.vocab} exceeds the table's {rows} rows.")
    classes.check(context_TKE, table_VE, options)


def _check_tokens(context_TKE, **arrays):
    check_range(log_prior_TK=arrays.get("log_prior_TK"))
    tokens, components = context_TKE.shape[0], context_TKE.shape[-2]
    for name, array in arrays.items():
        expected = (tokens, components) if name.endswith("TK") else (tokens,)
        if array.shape != expected:
            raise ValueError(
                f"{name} must have the shape {expected} to go with context_TKE "
                f"{context_TKE.shape}, got {array.shape}."
            )
