import functools

import jax
import numpy as np
import pytest

from softbottle import config as configs
from softbottle.data.vocab import Vocab
from softbottle.scoring import generate as generating
from softbottle.scoring.generate import generate
from softbottle.training import evaluate, state
from tests import tiny
from tests.training.evaluate_test import VOCAB, bigram_oracle, make

WORDS = Vocab(("a", "b", "<eos>", *(f"w{index}" for index in range(3, VOCAB))))
pytestmark = pytest.mark.usefixtures("quick_keys")


@pytest.fixture(scope="module")
def bigram():
    """A run of a bigram model; its rows are more than its words."""
    functions, params = make(multiple=8)
    params = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), params)  # not uniform
    params = jax.device_put(params)
    return state.Run(configs.Config(), WORDS, functions, params, 0)


@functools.cache
def make_run(backbone):
    """What it says depends on all the text."""
    config = tiny.make_softmax(backbone, 4, model__attention_heads=2)
    return tiny.make_run(config, WORDS, seed=2, scale=2.0)


def with_unit(run, unit):
    """The run, had it read its text so."""
    config = configs.from_dict(configs.to_dict(run.config))
    return run._replace(config=tiny.change(config, data__unit=unit))


def cut(p_V, top_k=0, top_p=1.0):
    """The probabilities of what is kept, by adding up words from the best down."""
    kept, mass = set(), 0.0
    best = np.argsort(-p_V, kind="stable")[: top_k or None]
    for word in best:
        if mass >= top_p * p_V[best].sum():
            break
        kept.add(word)
        mass += p_V[word]
    return np.array([p if word in kept else 0.0 for word, p in enumerate(p_V)])


def texts(run, count, **options):
    """Texts of 250 words: one that were longer would be read again for every word."""
    return np.array(
        [[2, *generate(run, [2], 250, seed=seed, **options)] for seed in range(count)]
    )


def deviation(texts_BS, p_VV):
    """By how many standard deviations chi squared exceeds its mean."""
    counts_VV = np.zeros_like(p_VV)
    np.add.at(counts_VV, (texts_BS[:, :-1], texts_BS[:, 1:]), 1)
    expected_VV = counts_VV.sum(axis=1, keepdims=True) * p_VV
    assert np.all(counts_VV[expected_VV == 0] == 0)
    live_VV = expected_VV > 0
    free = live_VV.sum() - live_VV.any(axis=1).sum()
    squares = (counts_VV - expected_VV)[live_VV] ** 2 / expected_VV[live_VV]
    return (squares.sum() - free) / np.sqrt(2 * free)


@pytest.mark.slow
def test_words_are_drawn_from_the_mixture_exactly(bigram):
    texts_BS = texts(bigram, 8)
    p_VV = np.exp(bigram_oracle(bigram.params))
    assert deviation(texts_BS, p_VV) < 4
    # The test is one that tells distributions apart.
    other_VV = p_VV**1.5 / (p_VV**1.5).sum(axis=1, keepdims=True)
    assert deviation(texts_BS, other_VV) > 10


@pytest.mark.slow
def test_sharpened_and_truncated_words_are_drawn_from_what_is_kept(bigram):
    options = {"top_k": 7, "top_p": 0.8}
    texts_BS = texts(bigram, 4, temperature=0.7, **options)
    sharp_VV = np.exp(bigram_oracle(bigram.params) / 0.7)
    sharp_VV /= sharp_VV.sum(axis=1, keepdims=True)
    kept_VV = np.array([cut(p_V, **options) for p_V in sharp_VV])
    assert deviation(texts_BS, kept_VV / kept_VV.sum(axis=1, keepdims=True)) < 4


def test_a_temperature_of_zero_takes_the_most_probable_words(bigram):
    best_V = np.argmax(bigram_oracle(bigram.params), axis=1)
    words = [2, *generate(bigram, [2], 9, temperature=0, seed=3)]
    assert words[1:] == best_V[words[:-1]].tolist()


@pytest.mark.slow
def test_sharpened_words_are_drawn_with_noise_of_a_high_range(bigram):
    def words():
        generating._programs.cache_clear()  # jax would run what it compiled before
        return list(generate(bigram, [2], 40, temperature=0.7, seed=3))

    usual = words()
    jax.config.update("jax_high_dynamic_range_gumbel", True)
    try:
        assert words() == usual
    finally:
        jax.config.update("jax_high_dynamic_range_gumbel", False)


def test_the_same_seed_gives_the_same_text_and_another_another(bigram):
    one, again, other = (
        list(generate(bigram, [4, 1], 20, seed=seed)) for seed in (5, 5, 6)
    )
    assert one == again != other
    assert len(one) == len(other) == 20


def test_an_empty_prompt_stands_for_the_end_of_a_line(bigram):
    empty = list(generate(bigram, [], 5, seed=1))
    assert empty == list(generate(bigram, [WORDS.eos], 5, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["awd_lstm", "transformer"])
def test_words_follow_from_all_the_text_before_them(backbone):
    run, prompt = make_run(backbone), [3, 1, 4]
    words = list(generate(run, prompt, 8, top_k=1))
    text = np.array([*prompt, *words], np.int32)
    scored = evaluate.log_probs(run.model, run.params, text, len(text), len(text))
    log_p_TV, _ = scored
    assert words == list(log_p_TV[len(prompt) - 1 :].argmax(axis=1))
    assert len(set(words)) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "backbone, cache",
    [("awd_lstm", True), ("transformer", True), ("transformer", False)],
)
def test_a_run_that_reads_lines_apart_begins_each_line_anew(backbone, cache):
    run, options, ended = make_run(backbone), {"top_k": 1, "cache": cache}, 0
    apart = with_unit(run, "lines")
    for eos in range(VOCAB):
        words = [f"w{index}" for index in range(VOCAB)]
        words[eos] = "<eos>"
        named = apart._replace(vocab=Vocab(tuple(words)))
        prompt = [word for word in (3, 1) if word != eos]
        drawn = list(generate(named, [5, eos, *prompt], 6, **options))
        ended += eos in drawn[:-1]
        start = [eos, *prompt]
        while drawn:
            # A stream that begins with the line goes on as the line does.
            line = list(generate(run, start, 6, **options))[: len(drawn)]
            end = line.index(eos) + 1 if eos in line else len(line)
            assert drawn[:end] == line[:end]
            start, drawn = [eos], drawn[end:]
    assert ended, "no line came to its end"


@pytest.mark.slow
def test_the_state_of_an_lstm_runs_on_where_lines_are_packed():
    run, prompt = make_run("awd_lstm"), [5, WORDS.eos, 3]
    packed = with_unit(run, "packed")
    drawn = [list(generate(each, prompt, 6, top_k=1)) for each in (run, packed)]
    assert drawn[0] == drawn[1]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["awd_lstm", "transformer"])
def test_prompts_of_equal_length_are_compiled_for_once(backbone, monkeypatch):
    run, drawn = make_run(backbone), []
    sample = type(run.model.head).sample

    def count(head, *arguments, **named):
        drawn.append(named)
        return sample(head, *arguments, **named)

    monkeypatch.setattr(type(run.model.head), "sample", count)
    first = list(generate(run, [3, 1, 4], 5, top_k=2))
    assert len(drawn) == 1
    hidden = generating._programs(run.model, 1.0, 2, 1.0, False).hidden
    sizes = hidden._cache_size()
    second = list(generate(run, [2, 7, 1], 5, top_k=2))
    assert len(drawn) == 1 and hidden._cache_size() == sizes
    assert first == list(generate(run, [3, 1, 4], 5, top_k=2)) != second
    # Another length is another shape.
    list(generate(run, [3, 1], 5, top_k=2))
    assert len(drawn) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokens": 0}, "got 0, 1.0 and 1.0"),
        ({"temperature": -1.0}, "got 3, -1.0 and 1.0"),
        ({"temperature": -0.5}, "got 3, -0.5 and 1.0"),
        ({"temperature": float("nan")}, "got 3, nan and 1.0"),
        ({"top_p": 0.0}, "got 3, 1.0 and 0.0"),
        ({"top_p": 1.25}, "got 3, 1.0 and 1.25"),
        ({"top_k": -2}, "vocabulary's 11, got -2"),
        ({"top_k": 12}, "vocabulary's 11, got 12"),
    ],
)
def test_a_setting_out_of_its_range_is_refused_by_value(bigram, options, message):
    with pytest.raises(ValueError, match=message):
        list(generate(bigram, [1], **({"tokens": 3} | options)))
