"""How a model continues a prompt: its diversity, and its coherence with the prompt.

A prompt is the first words of a line. What is generated ends with the line, or after as
many words as were asked for. Of texts with the n-grams G_n, and of all of them
together,

    diversity  = mean over texts of prod_{n = 2, 3, 4} |set(G_n)| / |G_n|,
    distinct_n = |set of all G_n| / |all G_n|,
    copied     = share of all the words that stand in their own prompts.

Coherence is what a judge, any trained model of the same words, makes of the two parts,
each read by itself after the end of a line. With m the mean of its states over a part,

    coherence = mean over texts of cos(m_prompt - c, m_continuation - c),

c the mean of m over the real lines' two parts, without which all states point much the
same way. It rises with copying as well, so the two belong together. The same judges
score the real continuation of each line, and, as a floor, that of another line.

Axes: P words of a prompt, N words that are generated.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.data import lines
from softbottle.data.batches import Batch
from softbottle.data.vocab import Vocab
from softbottle.experiments import rows as rows_lib
from softbottle.scoring import generate
from softbottle.training import evaluate
from softbottle.training.state import Run

Row = dict[str, Any]
Texts = list[np.ndarray]
ORDERS = (1, 2, 3)  # of the distinct n-grams
_REPEATED = (2, 3, 4)  # orders of the diversity


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is continued, and how words are drawn; the defaults are the paper's."""

    prompts: int = 500
    prompt_words: int = 16
    tokens: int = 32
    temperature: float = 1.0
    top_p: float = 0.95
    seeds: tuple[int, ...] = (0, 1, 42)


class Lines(NamedTuple):
    """Beginnings of lines, after the end of the line before, and the rest of them."""

    prompts_BP: np.ndarray
    rests: Texts


def beginnings(ids: np.ndarray, vocab: Vocab, settings: Settings) -> Lines:
    """The first lines of a text that are long enough for a prompt and all `tokens`.

    Raises:
        ValueError: if there are fewer than two, for one is compared with another.
    """
    first, size = settings.prompt_words, settings.prompt_words + settings.tokens
    every = lines.split(ids, vocab.eos, len(ids) + 1, answers=False)
    chosen = [line[:size] for line in every if len(line) >= size][: settings.prompts]
    if len(chosen) < 2:
        raise ValueError(
            f"of {len(every):,} lines {len(chosen)} have the {size} words of a prompt "
            f"({first}) and its continuation ({settings.tokens}); two are needed."
        )
    line_BS = np.array(chosen, np.int32)
    prompts_BP = np.pad(line_BS[:, :first], ((0, 0), (1, 0)), constant_values=vocab.eos)
    return Lines(prompts_BP, list(line_BS[:, first:]))


def until(words_BN: np.ndarray, eos: int) -> Texts:
    """The words of each row before the first `eos`."""
    return [row[: [*row, eos].index(eos)] for row in words_BN]


def ngrams(text: Sequence[int], order: int) -> list[tuple[int, ...]]:
    """All runs of `order` words."""
    return [
        tuple(text[start : start + order]) for start in range(len(text) - order + 1)
    ]


def distinct(texts: Texts, order: int) -> float:
    """Different n-grams over n-grams, of all the texts together; NaN if none is."""
    grams = [gram for text in texts for gram in ngrams(text.tolist(), order)]
    return len(set(grams)) / len(grams) if grams else float("nan")


def diversity(texts: Texts) -> float:
    """The mean over texts of the share of n-grams that do not repeat an earlier one.

    An order of which a text has no n-gram repeats nothing.
    """

    def unrepeated(text):
        by_order = [ngrams(text.tolist(), order) for order in _REPEATED]
        return np.prod([len(set(grams)) / len(grams) for grams in by_order if grams])

    return float(np.mean([unrepeated(text) for text in texts]))


def make_reader(judge: Run) -> Callable[[Texts, int], np.ndarray]:
    """A compiled `read(texts, width) -> mean_BD`, the mean of a model's states.

    The mean of a text is over its words, read after the end of a line and padded to
    `width` words; it is NaN where there are none.
    """

    @jax.jit
    def average(params, batch):
        carry = judge.model.initial_carry(len(batch.ids_BS))
        hidden_BSD, _ = judge.model.hidden(params, batch, carry)
        # The state before the first word is the same for all.
        word_BS1 = (batch.segments_BS > 0)[:, 1:, None]
        state_BSD = hidden_BSD[:, 1:].astype(jnp.float32)
        total_BD = jnp.sum(jnp.where(word_BS1, state_BSD, 0.0), axis=1)
        return total_BD / jnp.sum(word_BS1, axis=1).astype(jnp.float32)

    def read(texts, width):
        ids_BS = np.zeros((len(texts), 1 + width), np.int32)
        live_BS = np.zeros_like(ids_BS)
        for row, text in enumerate(texts):
            ids_BS[row, : 1 + len(text)] = [judge.vocab.eos, *text]
            live_BS[row, : 1 + len(text)] = 1
        weights_BS = live_BS.astype(np.float32)
        batch = Batch(ids_BS, np.zeros_like(ids_BS), weights_BS, live_BS)
        return np.asarray(average(judge.params, batch))

    return read


class Judge:
    """The coherence that a model finds of texts with the beginnings of lines.

    Args:
        run: the model.
        openings: the lines.
    """

    def __init__(self, run: Run, openings: Lines):
        self._read, self._width = make_reader(run), len(openings.rests[0])
        words_BP = openings.prompts_BP[:, 1:]
        self._prompt_BD = self._read(list(words_BP), words_BP.shape[1])
        rest_BD = self._read(openings.rests, self._width)
        self._center_D = np.concatenate([self._prompt_BD, rest_BD]).mean(axis=0)

    def __call__(self, texts: Texts) -> float:
        """The coherence of a text for each line, of at most as many words."""
        text_BD = self._read(texts, self._width)
        return coherence(self._prompt_BD, text_BD, self._center_D)


def copied(prompts: Texts, texts: Texts) -> float:
    """The share of all generated words that stand in their own prompts."""
    hits = [np.isin(text, prompt) for prompt, text in zip(prompts, texts, strict=True)]
    return float(np.mean(np.concatenate(hits)))


def coherence(
    prompt_BD: np.ndarray, text_BD: np.ndarray, center_D: np.ndarray
) -> float:
    """The mean cosine of the pairs about a center; texts without words are left out."""
    prompt_BD, text_BD = prompt_BD - center_D[None], text_BD - center_D[None]
    norm_B = np.linalg.norm(prompt_BD, axis=1) * np.linalg.norm(text_BD, axis=1)
    return float(np.nanmean(np.sum(prompt_BD * text_BD, axis=1) / norm_B))


def compare(
    runs: dict[str, Run], judges: dict[str, Run], ids: np.ndarray, settings: Settings
) -> tuple[list[Row], list[dict[str, str]]]:
    """Continue one text's lines with every run, without and with its cache.

    Args:
        runs: models of one vocabulary, by name.
        judges: models of the same vocabulary, by name.
        ids: the text.
        settings: of the prompts and of the drawing.

    Returns:
        (rows, samples): numbers by way of continuing, each over seeds a list where
        words were drawn; and the first prompts with each way's continuation.

    Raises:
        ValueError: if a model knows other words, or the lines are too short.
    """
    vocab = _shared_vocab([*runs.items(), *judges.items()])
    openings = beginnings(ids, vocab, settings)
    prompts = [prompt[1:] for prompt in openings.prompts_BP]
    seated = {name: Judge(judge, openings) for name, judge in judges.items()}

    def measured(texts):
        row = {"words": float(np.mean([len(text) for text in texts]))}
        row |= {f"distinct_{order}": distinct(texts, order) for order in ORDERS}
        row |= {"diversity": diversity(texts), "copied": copied(prompts, texts)}
        return row | {
            f"coherence, {name}": seat(texts) for name, seat in seated.items()
        }

    shuffled = [*openings.rests[1:], openings.rests[0]]
    rows = [
        {"run": "the line itself", "drawn": [measured(openings.rests)]},
        {"run": "another line", "drawn": [measured(shuffled)]},
    ]
    samples = [{"prompt": _words(vocab, prompt)} for prompt in prompts[:5]]
    for sample, rest in zip(samples, openings.rests, strict=False):
        sample["the line itself"] = _words(vocab, rest)
    for name, run in runs.items():
        for cache in (False, True):
            drawn = _drawn(run, openings.prompts_BP, cache, settings)
            way = f"{name}, cache" if cache else name
            row = {"run": way, **_perplexity(run, ids, cache)}
            rows.append(row | {"drawn": [measured(texts) for texts in drawn]})
            for sample, text in zip(samples, drawn[0], strict=False):
                sample[way] = _words(vocab, text)
    return rows, samples


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table, mean ± deviation over the seeds."""
    fields = list(rows[-1]["drawn"][0])
    titles = ["continued by", "perplexity", "cache right", *fields]
    written = []
    for row in rows:
        cells = [row["run"]]
        cells.append(f"{row['perplexity']:.2f}" if "perplexity" in row else "")
        cells.append(f"{row['cache_right']:.1%}" if "cache_right" in row else "")
        cells += [_cell([drawn[field] for drawn in row["drawn"]]) for field in fields]
        written.append(cells)
    return rows_lib.table(titles, written)


def _cell(values):
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"


def _drawn(run, prompts_BP, cache, settings):
    continue_prompts = generate.make_continuer(
        run,
        settings.tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        cache=cache,
    )
    drawn = (continue_prompts(prompts_BP, seed) for seed in settings.seeds)
    return [until(words_BN, run.vocab.eos) for words_BN in drawn]


def _perplexity(run, ids, cache):
    """Of the whole text, cut as it was in training."""
    data = run.config.data
    cut = lines.cut(data, run.vocab)
    score = evaluate.make_evaluator(run.model, cached=cache, cut=cut)
    result = score(run.params, ids, data.eval_rows, data.eval_length)
    right = {"cache_right": result.hits / result.count} if cache else {}
    return {"perplexity": result.perplexity, **right}


def _shared_vocab(named):
    """The words of all; a run and a judge may have one name."""
    names, runs = zip(*named, strict=True)
    if len({run.vocab.digest for run in runs}) > 1:
        names = list(dict.fromkeys(names))
        raise ValueError(f"the runs {names} do not all know the same words.")
    return runs[0].vocab


def _words(vocab, ids):
    return " ".join(vocab.decode(ids))
