"""Languages whose next-word distribution is known, and is not low-rank.

Each word w of V has its own distribution over the word that follows it, and a text is
one long walk of this Markov chain. There are two languages:

    random      P(v | w) = softmax_v( spread * G[w, v] )
    readings    P(v | w) = 1/J sum_j softmax_v( spread * u_j(w) . t(v) / sqrt(R) )

with G, u and t standard normal, drawn once, J = `readings` and R = `rank`.

In the first, log P has rank V, so no softmax whose state is narrower than V - 2 can
express it; it is no mixture of softmaxes of a narrow state either, so no student is
handed its own family. In the second a word has J readings, and each asks for other
words. A mixture of J softmaxes of width R can express it exactly: V R (J + 1) numbers
tell all of it, and such a mixture is handed its own family. Its log P has rank V all
the same (the logarithm of a sum of exponentials is no sum), so that a softmax needs as
great a width as in the first.

Entropy, stationary distribution and rank of the truth are exact, which makes the
divergence of a trained model from it exact too.

Axes: J readings, R their rank.
"""

import functools
from typing import NamedTuple

import numpy as np

from softbottle import config as config_lib
from softbottle.data.vocab import EOS, Corpus, Vocab


class Language(NamedTuple):
    """The truth, in float64.

    Attributes:
        log_p_VV: log P(next | previous), a row for each previous word.
        stationary_V: how often each word occurs in an endless text.
        entropy: of the next word given the previous one, in nats.
    """

    log_p_VV: np.ndarray
    stationary_V: np.ndarray
    entropy: float


def language(config: config_lib.Synthetic) -> Language:
    """The language of these settings; the same settings give the same language."""
    law = config.words, config.readings, config.rank, config.spread, config.seed
    return _language(*law)


# Of the last one: a run asks for it to draw its text and to be compared with it.
@functools.lru_cache(maxsize=1)
def _language(words, readings, rank, spread, seed):
    random = np.random.default_rng(seed)
    if readings is None:
        log_p_VV = _log_softmax(spread * random.standard_normal((words, words)))
    else:
        log_p_VV = _of_readings(random, words, readings, rank, spread)
    stationary_V = _stationary(np.exp(log_p_VV))
    entropy_V = -(np.exp(log_p_VV) * log_p_VV).sum(axis=1)
    return Language(log_p_VV, stationary_V, float(stationary_V @ entropy_V))


def corpus(config: config_lib.Synthetic) -> Corpus:
    """Three texts in this language, each a walk of its own."""
    truth = language(config)
    train, valid, test = (
        _walk(truth, tokens, np.random.default_rng((config.seed, split)))
        for split, tokens in enumerate(
            (config.train_tokens, config.eval_tokens, config.eval_tokens), start=1
        )
    )
    words = (EOS, *(f"w{index}" for index in range(1, config.words)))
    return Corpus(train, valid, test, Vocab(words))


def describe(config: config_lib.Synthetic) -> str:
    """The language of these settings in a few words, for a title."""
    if config.readings is None:
        return f"{config.words} words, random"
    return f"{config.words} words with {config.readings} readings of rank {config.rank}"


def divergence(truth: Language, previous_T: np.ndarray, log_q_TV: np.ndarray) -> float:
    """Mean over positions of KL(P(. | previous) || Q), in nats; exact at each."""
    log_p_TV = truth.log_p_VV[previous_T]
    return float((np.exp(log_p_TV) * (log_p_TV - log_q_TV)).sum(axis=1).mean())


def _of_readings(random, words, readings, rank, spread):
    """log P of a language whose words have several readings, all equally likely."""
    word_VR = random.standard_normal((words, rank))
    p_VV = np.zeros((words, words))
    for _ in range(readings):
        reading_VR = random.standard_normal((words, rank))
        logits_VV = spread / np.sqrt(rank) * reading_VR @ word_VR.T
        p_VV += np.exp(_log_softmax(logits_VV))
    return np.log(p_VV / readings)


def _log_softmax(logits_VV):
    log_p_VV = logits_VV - logits_VV.max(axis=1, keepdims=True)
    return log_p_VV - np.log(np.exp(log_p_VV).sum(axis=1, keepdims=True))


def _stationary(p_VV):
    """The distribution with s P = s and sum 1, by a linear solve."""
    words = len(p_VV)
    system = np.concatenate([p_VV.T - np.eye(words), np.ones((1, words))])
    right = np.concatenate([np.zeros(words), [1.0]])
    solved_V = np.linalg.lstsq(system, right)[0]
    # Rounded, words that hardly ever occur may come out below 0.
    return np.maximum(solved_V, 0.0) / np.maximum(solved_V, 0.0).sum()


def _walk(truth, tokens, random):
    """One walk; the draws that follow each word are made in batches of their own."""
    cumulative_VV = np.cumsum(np.exp(truth.log_p_VV), axis=1)
    cumulative_VV[:, -1] = 1.0
    words = len(cumulative_VV)
    drawn = [[] for _ in range(words)]
    batch = max(16, tokens // words)
    word = int(random.choice(words, p=truth.stationary_V / truth.stationary_V.sum()))
    walk = np.empty(tokens, np.int32)
    for index in range(tokens):
        walk[index] = word
        follow = drawn[word]
        if not follow:
            uniform = random.random(batch)
            follow.extend(
                np.searchsorted(cumulative_VV[word], uniform, "right").tolist()
            )
        word = follow.pop()
    return walk
