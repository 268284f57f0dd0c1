"""Text from a trained model, a word at a time.

Words are drawn by the head (`Head.sample`): at temperature 1 with no truncation exactly
from the mixture, otherwise from what temperature, `top_k` and `top_p` leave of its own
probabilities. With a cache the words are those of the head and of the text so far:
every state is remembered, once, with the word that followed it.

A run that reads lines apart (`data.unit`) continues the last line of its prompt, and
begins anew after the end of each, as every line began in its training.

Axes: P words of a prompt, N words that are generated, M entries of the cache.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.data.batches import Batch
from softbottle.heads.cache import given
from softbottle.training.state import Run


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
        tokens: how many words to generate.
        temperature: below 1 sharpens; 0 takes the most probable word.
        top_k: keep so many words; 0 keeps all.
        top_p: nucleus sampling: keep the most probable words up to this mass.
        cache: join the head with a cache of the prompt and of what was generated.
        seed: the same seed gives the same text.

    Raises:
        ValueError: if a setting is out of its range.
    """
    _check(run, tokens, temperature, top_k, top_p)
    eos, unit = run.vocab.eos, run.config.data.unit
    recurrent = bool(jax.tree.leaves(run.model.initial_carry(1)))
    # An LSTM's state runs on from line to line where these are packed into rows.
    apart = unit != "stream" and not (recurrent and unit == "packed")
    prompt = np.asarray(prompt, np.int32)
    if apart:
        prompt = _last_line(prompt, eos)
    elif not len(prompt):
        prompt = np.asarray([eos], np.int32)
    size = len(prompt) + tokens
    programs = _programs(run.model, temperature, top_k, top_p, cache)
    read = _recurrent if recurrent else _rereading
    states = read(run, programs.hidden, prompt, size)
    hidden_CD = next(states)
    past = _remember(_empty(size, hidden_CD), hidden_CD[:-1], prompt[1:])
    keys = jax.random.split(jax.random.key(seed), tokens)
    for index in range(tokens):
        hidden_1D, key = hidden_CD[-1:], keys[index]
        word = int(programs.next_word(run.params, hidden_1D, past, key))
        yield word
        if index + 1 == tokens:
            return
        if apart and word == eos:
            states = read(run, programs.hidden, np.asarray([eos], np.int32), size)
            hidden_CD = next(states)
            past = _empty(size, hidden_CD)
        else:
            past = _remember(past, hidden_1D, np.asarray([word], np.int32))
            hidden_CD = states.send(word)


def make_continuer(
    run: Run,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    cache: bool = False,
) -> Callable[[np.ndarray, int], np.ndarray]:
    """A compiled `continue_prompts(prompts_BP, seed) -> words_BN`, N = `tokens`.

    Prompts of one length are continued side by side, each a text of its own, with the
    settings of `generate`. One loop on the device generates all the words; it reads the
    text so far again for each, whatever the model.

    Raises:
        ValueError: for settings that `generate` refuses; in the call, for prompts
            without words.
    """
    _check(run, tokens, temperature, top_k, top_p)
    model = run.model
    draw = _drawer(model, temperature, top_k, top_p, cache)

    @jax.jit
    def loop(params, text_BS, keys):
        rows, size = text_BS.shape
        ones_BS, entries_M = jnp.ones_like(text_BS), jnp.arange(size)

        def add(text_BS, step):
            place, key = step
            follow_BS = jnp.roll(text_BS, -1, axis=1)
            batch = Batch(text_BS, follow_BS, ones_BS.astype(jnp.float32), ones_BS)
            hidden_BSD, _ = model.hidden(params, batch, model.initial_carry(rows))
            # The state before the new word is not in the cache: no word follows it yet.
            seen_BM = jnp.broadcast_to((entries_M < place - 1)[None], text_BS.shape)
            memory = given(hidden_BSD, follow_BS, seen_BM, positions=1)
            word_B = draw(params, hidden_BSD[:, place - 1], memory, key)
            return text_BS.at[:, place].set(word_B.astype(text_BS.dtype)), None

        places = jnp.arange(size - tokens, size)
        return jax.lax.scan(add, text_BS, (places, keys))[0][:, -tokens:]

    def continue_prompts(prompts_BP, seed):
        if not prompts_BP.shape[1]:
            raise ValueError(
                "a prompt has at least one word; an empty one is the end of a line, "
                f"{run.vocab.eos}."
            )
        text_BS = np.pad(prompts_BP.astype(np.int32), ((0, 0), (0, tokens)))
        keys = jax.random.split(jax.random.key(seed), tokens)
        return np.asarray(loop(run.params, text_BS, keys))

    return continue_prompts


class _Programs(NamedTuple):
    """Compiled functions of a model: its states, and a word drawn from them."""

    hidden: jax.stages.Wrapped
    next_word: jax.stages.Wrapped


@functools.lru_cache(maxsize=8)
def _programs(model, temperature, top_k, top_p, cache):
    """Compiled once per model and settings; texts of equal length share a program."""
    draw = _drawer(model, temperature, top_k, top_p, cache)

    @jax.jit
    def next_word(params, hidden_1D, past, key):
        return draw(params, hidden_1D, _memory(past), key)[0]

    return _Programs(jax.jit(model.hidden), next_word)


class _Past(NamedTuple):
    """States and the words that followed them; the first `filled` are real."""

    states_MD: jax.Array
    words_M: jax.Array
    filled: jax.Array


def _empty(size, hidden_CD):
    states_MD = jnp.zeros((size, hidden_CD.shape[-1]), hidden_CD.dtype)
    return _Past(states_MD, jnp.zeros(size, jnp.int32), jnp.zeros((), jnp.int32))


@jax.jit
def _remember(past, states_CD, words_C):
    return _Past(
        jax.lax.dynamic_update_slice(past.states_MD, states_CD, (past.filled, 0)),
        jax.lax.dynamic_update_slice(past.words_M, words_C, (past.filled,)),
        past.filled + len(words_C),
    )


def _memory(past):
    seen_1M = (jnp.arange(len(past.words_M)) < past.filled)[None]
    return given(past.states_MD[None], past.words_M[None], seen_1M, positions=1)


def _drawer(model, temperature, top_k, top_p, cache):
    """draw(params, hidden_BD, memory, key) -> word_B; the memory is used with `cache`.

    It may be compiled by the caller, who knows where the states come from.
    """
    named = {"temperature": temperature, "top_k": top_k or None, "top_p": top_p}

    def draw(params, hidden_BD, memory, key):
        head, states = model.head, (hidden_BD,)
        if cache:
            head, states = model.cached, (hidden_BD[:, None], memory)
        inputs = (*model.output(params), *states, key)
        return head.sample(*inputs, **named, options=model.options).reshape(-1)

    return draw


def _last_line(prompt, eos):
    """The words after the last `eos`, with one in front, as lines are read."""
    (ends,) = np.nonzero(prompt == eos)
    start = ends[-1] + 1 if len(ends) else 0
    return np.append(eos, prompt[start:]).astype(np.int32)


def _recurrent(run, hidden, prompt, size):
    """Hidden states of what is new, from a carry: the prompt, then word by word."""
    del size
    carry, ids = run.model.initial_carry(1), prompt
    while True:
        hidden_BSD, carry = hidden(run.params, _batch(ids), carry)
        ids = np.asarray([(yield hidden_BSD[0])], np.int32)


def _rereading(run, hidden, prompt, size):
    """The same of a model without a carry, which reads the text so far again.

    It is one of `size` words, the last of which are no words yet.
    """
    text, start, end = np.zeros(size, np.int32), 0, len(prompt)
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
    if tokens < 1 or not temperature >= 0 or not 0 < top_p <= 1:
        raise ValueError(
            "tokens must be >= 1, temperature >= 0 and top_p in (0, 1]; got "
            f"{tokens}, {temperature} and {top_p}."
        )
    if not 0 <= top_k <= len(run.vocab):
        raise ValueError(
            f"top_k must be between 0 and the vocabulary's {len(run.vocab)}, "
            f"got {top_k}."
        )
