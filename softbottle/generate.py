"""Text from a trained model, a word at a time.

At temperature 1 with no truncation a word is drawn exactly from the mixture by its
head. Otherwise the mixture's own log-probabilities are sharpened, log P / temperature,
cut to the `top_k` most probable words and to the smallest set that holds `top_p` of
the mass, and drawn from. With a cache the words are those of the head and of the text
so far: every state is remembered, once, with the word that followed it.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import heads
from softbottle.data.batches import Batch
from softbottle.state import Run


def generate(
    run: Run,
    prompt: np.ndarray,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    cache: bool = False,
    seed: int = 0,
) -> Iterator[int]:
    """Word ids that continue a prompt.

    Args:
        run: a trained model.
        prompt: ids; an empty one stands for the end of a line.
        tokens: how many words to make.
        temperature: above 0; below 1 sharpens.
        top_k: keep so many words; 0 keeps all.
        top_p: keep the most probable words up to this mass.
        cache: join the head with a cache of the prompt and of what was made.
        seed: the same seed gives the same text.

    Raises:
        ValueError: if a setting is out of its range.
    """
    _check(run, tokens, temperature, top_k, top_p)
    prompt = np.asarray(prompt if len(prompt) else [run.vocab.eos], np.int32)
    exact = temperature == 1 and not top_k and top_p == 1

    sample, log_probs = _decoders(run.model, cache)

    @jax.jit
    def draw(params, hidden_1D, past, key):
        if exact:
            return sample(params, hidden_1D, past, key)
        log_p_V = log_probs(params, hidden_1D, past)
        return jax.random.categorical(
            key, truncated(log_p_V / temperature, top_k, top_p)
        )

    read = _recurrent if jax.tree.leaves(run.model.initial_carry(1)) else _whole
    states = read(run, prompt, tokens)
    hidden_CD = next(states)
    past = _empty(len(prompt) + tokens, hidden_CD)
    past = _remember(past, hidden_CD[:-1], prompt[1:])
    keys = jax.random.split(jax.random.key(seed), tokens)
    for index in range(tokens):
        word = int(draw(run.params, hidden_CD[-1:], past, keys[index]))
        yield word
        if index + 1 < tokens:
            past = _remember(past, hidden_CD[-1:], np.asarray([word], np.int32))
            hidden_CD = states.send(word)


class _Past(NamedTuple):
    """States and the words that followed them; the first `count` are real."""

    states_MD: jax.Array
    words_M: jax.Array
    count: jax.Array


def _empty(size, hidden_CD):
    states_MD = jnp.zeros((size, hidden_CD.shape[-1]), hidden_CD.dtype)
    return _Past(states_MD, jnp.zeros(size, jnp.int32), jnp.zeros((), jnp.int32))


@jax.jit
def _remember(past, states_CD, words_C):
    return _Past(
        jax.lax.dynamic_update_slice(past.states_MD, states_CD, (past.count, 0)),
        jax.lax.dynamic_update_slice(past.words_M, words_C, (past.count,)),
        past.count + len(words_C),
    )


def _decoders(model, cache):
    """(draw a word, log-probabilities of all), of the head or of it and the past."""

    def memory(past):
        seen_M = jnp.arange(len(past.words_M)) < past.count
        return heads.Memory(
            past.states_MD[None], past.words_M[None], seen_M[None, None]
        )

    def cached(function, params, hidden_1D, past, *key):
        given = (*model.output(params), hidden_1D[None], memory(past), *key)
        return function(*given, **model.options)[0, 0]

    def plain(function, params, hidden_1D, past, *key):
        del past
        return function(*model.output(params), hidden_1D, *key, **model.options)[0]

    how, head = (cached, model.cached) if cache else (plain, model.head)
    return tuple(functools.partial(how, f) for f in (head.sample, head.log_probs))


def truncated(log_p_V: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Log-probabilities with -inf outside the top k words and the top p of mass."""
    log_p_V = jax.nn.log_softmax(log_p_V)
    ordered_V = jnp.sort(log_p_V, descending=True)
    before_V = jnp.cumsum(jnp.exp(ordered_V)) - jnp.exp(ordered_V)
    # The word that crosses the mass still belongs to the set.
    kept = jnp.sum(before_V < top_p) if top_p < 1 else log_p_V.shape[0]
    kept = jnp.minimum(kept, top_k) if top_k else jnp.maximum(kept, 1)
    return jnp.where(log_p_V >= ordered_V[kept - 1], log_p_V, -jnp.inf)


def _recurrent(run, prompt, tokens):
    """Hidden states of what is new, from a carry: the prompt, then word by word."""
    del tokens
    hidden = jax.jit(run.model.hidden)
    carry, ids = run.model.initial_carry(1), prompt
    while True:
        hidden_BSD, carry = hidden(run.params, _batch(ids), carry)
        ids = np.asarray([(yield hidden_BSD[0])], np.int32)


def _whole(run, prompt, tokens):
    """The same of a model without a carry, which reads the text so far again."""
    hidden = jax.jit(run.model.hidden)
    text, start, end = np.zeros(len(prompt) + tokens, np.int32), 0, len(prompt)
    text[:end] = prompt
    while True:
        hidden_BSD, _ = hidden(run.params, _batch(text), ())
        text[end] = yield hidden_BSD[0, start:end]
        start, end = end, end + 1


def _batch(ids):
    ids_1S = np.asarray(ids, np.int32)[None]
    ones_1S = np.ones_like(ids_1S)
    return Batch(ids_1S, ids_1S, ones_1S.astype(np.float32), ones_1S)


def _check(run, tokens, temperature, top_k, top_p):
    if tokens < 1 or not temperature > 0 or not 0 < top_p <= 1:
        raise ValueError(
            "tokens must be at least 1, temperature positive and top_p in (0, 1]; got "
            f"{tokens}, {temperature} and {top_p}."
        )
    if not 0 <= top_k <= len(run.vocab):
        raise ValueError(
            f"top_k must be between 0 and the vocabulary's {len(run.vocab)}, "
            f"got {top_k}."
        )
