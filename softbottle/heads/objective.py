"""The loss of a token with what may be asked beside it, from a head's predictions.

    nll_t = -(1 - a) log P(label) - a / V sum_v log P(v) + z / K sum_k lse_k^2

with a the label smoothing and z the weight of the z-loss; P is that of the head to the
power of 1 / temperature, normalized again. Of one softmax all of it has a closed form
beside the fused loss: the temperature divides the logits, and

    log P(label) - 1 / V sum_v log P(v) = logit of the label - mean logit,

which is the logit of a mean row. The entropy of one component comes with its
normalizer. Else the log-probabilities are formed a chunk of tokens at a time
(ops/mixture/reductions.py), once for all that is asked of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle.heads.predictions import Predictions
from softbottle.ops.mixture import likelihood, reductions
from softbottle.ops.mixture.arrays import Targets
from softbottle.ops.mixture.options import Options


class Terms(NamedTuple):
    """What the loss of a token has; checked by checks.terms."""

    label_smoothing: float
    z_loss: float
    temperature: float


def loss(
    predictions: Predictions,
    targets: Targets,
    terms: Terms,
    options: Options,
    argmax: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """sum_t weight[t] nll[t], in the fused loss where there is a closed form.

    Args:
        predictions: of the tokens.
        targets: the words that follow and the weights.
        terms: of the loss.
        options: of the head.
        argmax: whether the most probable words [T] are asked for.

    Returns:
        The sum, and the words if they are asked for and the same pass has them.
    """
    weights_T = targets.weights_T
    if weights_T.dtype.itemsize < 4:
        # The terms' products with weights in bfloat16 would be rounded to it.
        weights_T = weights_T.astype(jnp.float32)
        targets = targets._replace(weights_T=weights_T)
    if _streamed(predictions, terms):
        return _sum_over_words(predictions, targets, terms, options), None
    if terms.z_loss:
        targets = targets._replace(z_weights_T=terms.z_loss * weights_T)
    if terms.temperature != 1:
        predictions = predictions.tempered(terms.temperature)
    spread_T = terms.label_smoothing * weights_T
    if terms.label_smoothing:
        targets = targets._replace(score_weights_T=spread_T)
    both = predictions.loss_and_argmax(targets) if argmax else None
    total, argmax_T = both or (predictions.loss(targets), None)
    if terms.label_smoothing:
        mean_T = predictions.mean_score()
        total -= jnp.sum(spread_T.astype(mean_T.dtype) * mean_T)
    return total, argmax_T


def reduced(total: jax.Array, weights_T: jax.Array, reduction: str) -> jax.Array:
    """A weighted sum, or the mean: 0 where all weights are."""
    if reduction == "sum":
        return total
    count = jnp.sum(weights_T, dtype=total.dtype)
    return jnp.where(count == 0, 0.0, total / jnp.where(count == 0, 1.0, count))


def measure(
    predictions: Predictions,
    labels_T: jax.Array,
    terms: Terms,
    names: Sequence[str],
    options: Options,
) -> dict[str, jax.Array]:
    """What `Head.measure` has, but for argmax and accuracy.

    Args:
        predictions: of the tokens.
        labels_T: the words that follow.
        terms: of the loss.
        names: of what is wanted.
        options: of the head.
    """
    streamed = _streamed(predictions, terms)
    if terms.temperature != 1 and not streamed:
        predictions = predictions.tempered(terms.temperature)
        terms = terms._replace(temperature=1.0)
    found: dict[str, jax.Array] = {}
    known = None
    if "entropy" in names and not streamed:
        known = predictions.scores_and_entropy(labels_T)
    if known is not None:
        found = _of_components(known[0], terms) | {"entropy": known[1]}
    elif streamed or "entropy" in names:
        found = _of_words(predictions, labels_T, terms, names, options)
    wanted = set(names)
    wanted |= {"z_loss"} if terms.z_loss else set()
    wanted |= {"score"} if terms.label_smoothing else set()
    if not wanted <= found.keys():
        found = _of_components(predictions.scores(labels_T), terms) | found
    if terms.label_smoothing:
        if "mean" not in found:
            found["mean"] = predictions.mean_score()
        contrast_T = found["score"] - found["mean"]
        found["nll"] += terms.label_smoothing * contrast_T
    if terms.z_loss:
        found["nll"] += found["z_loss"]
    return {name: found[name] for name in names}


def _streamed(predictions, terms):
    """Whether the loss itself is a reduction over all words."""
    return not predictions.plain and (terms.label_smoothing or terms.temperature != 1)


def _of_components(scores, terms):
    """What is made of the components' own scores."""
    _, score_TK, lse_TK = scores
    nll_T = likelihood.nll(*scores)
    return {
        "nll": nll_T,
        "score": score_TK[:, 0],
        "lse": lse_TK,
        "responsibilities": likelihood.posterior(*scores, nll_T),
        "z_loss": terms.z_loss * likelihood.square(lse_TK),
    }


def _sum_over_words(predictions, targets, terms, options):
    """The weighted sum of what `measure` calls the nll."""
    labels_T, weights_T, *_ = targets
    options = options.resolve()

    def reduce(log_p_CV, labels_C):
        log_p_CV = reductions.tempered(log_p_CV, terms.temperature, options)
        own_C = reductions.of_label(log_p_CV, labels_C, options)
        if not terms.label_smoothing:
            return -own_C
        mean_C = reductions.mean(log_p_CV, options)
        return -own_C + terms.label_smoothing * (own_C - mean_C)

    labels_T = likelihood.word_ids(labels_T=labels_T)
    total = reductions.sum_over_words(
        reduce, [predictions.source()], labels_T, weights_T, options
    )
    if not terms.z_loss:
        return total
    *_, lse_TK = predictions.scores(labels_T)
    square_T = likelihood.square(lse_TK)
    return total + terms.z_loss * jnp.sum(weights_T.astype(square_T.dtype) * square_T)


def _of_words(predictions, labels_T, terms, names, options):
    """What is made of the log-probabilities of all words."""
    options = options.resolve()
    labels_T = likelihood.word_ids(labels_T=labels_T)

    def reduce(log_p_CV, labels_C):
        log_p_CV = reductions.tempered(log_p_CV, terms.temperature, options)
        own_C = reductions.of_label(log_p_CV, labels_C, options)
        found = {"nll": -own_C, "score": own_C}
        if terms.label_smoothing:
            found["mean"] = reductions.mean(log_p_CV, options)
        if "entropy" in names:
            found["entropy"] = reductions.entropy(log_p_CV, options)
        return found

    return reductions.over_words(reduce, [predictions.source()], labels_T, options)
