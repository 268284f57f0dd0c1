"""Learning from another model's distribution, without the [T, V] of either.

    KL(teacher || student) = sum_v P(v) (log P(v) - log Q(v)),

or the reverse, of each token. The teacher is another head with its own states and table
(`Output`), log-probabilities of some words (`TopWords`, as a server returns them) or of
all (`AllWords`). Log-probabilities are formed a chunk of tokens at a time
(ops/mixture/reductions.py). A sum of divergences is computed with its gradient: four
products with a table per token for two softmaxes, where a loss has three.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle.heads import checks, objective
from softbottle.heads.base import Head, Params
from softbottle.ops.mixture import reductions, shards, word_scores
from softbottle.ops.mixture.activations import DEAD
from softbottle.ops.mixture.arrays import without_padding
from softbottle.ops.mixture.likelihood import word_ids
from softbottle.ops.mixture.options import DEFAULTS, Options, check_range


class Output(NamedTuple):
    """A head with its arrays, as `Head.loss` takes them."""

    head: Head
    params: Params
    table_VE: jax.Array
    bias_V: jax.Array | None
    hidden_TD: jax.Array


class TopWords(NamedTuple):
    """Log-probabilities of M words of each token, which are normalized over these."""

    log_p_TM: jax.Array
    words_TM: jax.Array


class AllWords(NamedTuple):
    """Log-probabilities of all words; of the shard's own on a split vocabulary."""

    log_p_TV: jax.Array


def distill(
    student: Output,
    teacher: Output | TopWords | AllWords,
    weights_T: jax.Array | None = None,
    *,
    reverse: bool = False,
    temperature: float = 1.0,
    reduction: str = "sum",
    teacher_learns: bool = False,
    options: Options = DEFAULTS,
) -> jax.Array:
    """The divergence of the student's distribution from the teacher's.

    Args:
        student: whose arrays have a gradient.
        teacher: of the same tokens and words.
        weights_T: of the tokens; 0 is padding, which may hold anything. None is 1 for
            all.
        reverse: KL(student || teacher) in place of KL(teacher || student).
        temperature: both distributions are taken to the power of 1 / temperature and
            normalized again. The gradient is not multiplied by its square.
        reduction: as of `Head.loss`.
        teacher_learns: whether the teacher's arrays have a gradient as well.
        options: of both heads.

    Returns:
        The weighted sum, mean or terms, in nats, float32 or better.

    Raises:
        ValueError: if shapes or vocabularies do not go together, an array is float16,
            there is no such reduction, `temperature` is not above 0, or the reverse is
            asked of some words.
    """
    checks.terms(0.0, 0.0, temperature)
    checks.reduction(reduction)
    options = options.resolve()
    if weights_T is None:
        weights_T = jnp.ones(len(student.hidden_TD))
    _check(student, teacher, weights_T, options)
    # What has no weight has no gradient by it either.
    weights_T = without_padding(weights_T, weights_T)
    if not isinstance(teacher, Output) and teacher_learns:
        raise ValueError("teacher_learns is for a teacher with a head, an Output.")
    sources = [_source(student, weights_T, options)]
    if isinstance(teacher, TopWords):
        if reverse:
            raise ValueError("the reverse needs the teacher's P of all words.")
        by_token = without_padding(weights_T, tuple(teacher))
        divergence = functools.partial(_from_some, temperature, options)
    else:
        sources.append(_source(teacher, weights_T, options))
        by_token = ()
        divergence = functools.partial(_from_all, temperature, reverse, options)
        # That of a head is normalized; what is given may not quite be.
        known = isinstance(teacher, Output) and options.vocab_axis is None
        if sources[0].scores is not None and known and not reverse:
            sources[0] = sources[0]._replace(read=sources[0].scores)
            divergence = functools.partial(_from_scores, temperature, options)
    if not teacher_learns:
        by_token, given = jax.lax.stop_gradient(
            (by_token, [source[:2] for source in sources[1:]])
        )
        sources[1:] = [
            source._replace(tokens=tokens, shared=shared)
            for source, (tokens, shared) in zip(sources[1:], given, strict=True)
        ]
    if reduction == "none":
        each_T = reductions.over_words(divergence, sources, by_token, options)
        return weights_T.astype(each_T.dtype) * each_T
    learning = len(sources) if teacher_learns else 1
    total = reductions.sum_over_words(
        divergence, sources, by_token, weights_T, options, learning
    )
    return objective.reduced(total, weights_T, reduction)


def _from_all(temperature, reverse, options, log_q_CV, log_p_CV, _):
    """The divergence of Q from P, both of all words, [C]."""
    # One of the tables may have more rows that are no words.
    words = min(log_p_CV.shape[1], log_q_CV.shape[1])
    log_p_CV, log_q_CV = (
        reductions.tempered(each[:, :words], temperature, options)
        for each in (log_p_CV, log_q_CV)
    )
    if reverse:
        log_p_CV, log_q_CV = log_q_CV, log_p_CV
    return reductions.divergence(log_p_CV, log_q_CV, options)


def _from_scores(temperature, options, scores, log_p_CV, _):
    """The divergence of one softmax, whose scores are given, from P, [C]."""
    score_CV, lse_C = scores
    words = min(log_p_CV.shape[1], score_CV.shape[1])
    log_p_CV = reductions.tempered(log_p_CV[:, :words], temperature, options)
    score_CV = score_CV[:, :words]
    if temperature != 1:
        score_CV = score_CV / temperature
        lse_C = word_scores.joint_lse(score_CV, options)
    return reductions.divergence_of_scores(log_p_CV, score_CV, lse_C)


def _from_some(temperature, options, log_q_CV, by_token):
    """The divergence of Q from a P of some words, [C]."""
    log_p_CM, words_CM = by_token
    log_p_CM = jax.nn.log_softmax(log_p_CM.astype(log_q_CV.dtype) / temperature)
    # A word that the teacher gives no probability adds 0, not 0 times infinity.
    log_p_CM = jnp.maximum(log_p_CM, DEAD)
    log_q_CV = reductions.tempered(log_q_CV, temperature, options)
    log_q_CM = reductions.of_words(log_q_CV, word_ids(words_TM=words_CM), options)
    return jnp.sum(jnp.exp(log_p_CM) * (log_p_CM - log_q_CM), axis=1)


def _source(model, weights_T, options):
    if isinstance(model, AllWords):
        return reductions.of_dense(without_padding(weights_T, model.log_p_TV))
    head, params, table_VE, bias_V, hidden_TD = model
    hidden_TD = without_padding(weights_T, hidden_TD)
    return head.predict((params, table_VE, bias_V), hidden_TD, None, options).source()


def _check(student, teacher, weights_T, options):
    """Raise ValueError unless both have the same tokens and words."""
    tokens = len(student.hidden_TD)
    if weights_T.shape != (tokens,):
        raise ValueError(
            f"weights_T must have a weight for each of the {tokens} tokens, got "
            f"{weights_T.shape}."
        )
    theirs = teacher[0] if not isinstance(teacher, Output) else teacher.hidden_TD
    if theirs.ndim != 2 or len(theirs) != tokens:
        raise ValueError(
            f"the teacher must have the student's {tokens} tokens, got an array of the "
            f"shape {theirs.shape}."
        )
    if isinstance(teacher, TopWords):
        check_range(log_p_TM=teacher.log_p_TM)
        if teacher.words_TM.shape != theirs.shape:
            raise ValueError(
                f"log_p_TM {theirs.shape} and words_TM {teacher.words_TM.shape} must "
                "have one shape."
            )
        words = shards.word_count(len(student.table_VE), options)
        checks.words(teacher.words_TM, words, weights_T)
        return
    rows = len(student.table_VE)
    if isinstance(teacher, AllWords):
        check_range(log_p_TV=theirs)
        others = theirs.shape[1]
    else:
        others = len(teacher.table_VE)
    # Rows beyond `vocab` are no words, and may be another number of them.
    padded = options.vocab is not None and options.vocab_axis is None
    if others < options.vocab if padded else others != rows:
        raise ValueError(
            f"the teacher has {others} words and the student "
            f"{options.vocab if padded else rows}: a divergence needs one vocabulary."
        )
