"""Two right answers: whether a model, and its cache alone, put both of them first.

    Acc@k = share of the right answers that are among the k most probable words,

over lines whose last word may be either of the two nouns that the line names
(data/templates.py), for the head, the head joined with a cache of the line, and that
cache alone. Beside it stands the rank of the matrix of log-probabilities.

Axes: N lines, A right answers of a line, M entries of the cache.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.analysis.instruments import rank
from softbottle.data import batches, lines, templates
from softbottle.data.vocab import Corpus, Vocab
from softbottle.heads import cache
from softbottle.model import Model, Params
from softbottle.training.state import Run

PLACES = (1, 2, 5, 10)
NAMES = ("plain", "joint", "cache")


class Answers(NamedTuple):
    """Log-probabilities of the words that count, and the text that each follows.

    Attributes:
        plain_NV: of the head.
        joint_NV: of the head with the cache of the line.
        cache_NV: of that cache alone; -inf for words that it does not hold.
        read: the words read before each, N arrays.
    """

    plain_NV: np.ndarray
    joint_NV: np.ndarray
    cache_NV: np.ndarray
    read: list[np.ndarray]

    @property
    def log_probs(self) -> dict[str, np.ndarray]:
        """The three matrices by their names in `NAMES`."""
        return dict(
            zip(NAMES, (self.plain_NV, self.joint_NV, self.cache_NV), strict=True)
        )


def answers(model: Model, params: Params, lines: Iterable[batches.Batch]) -> Answers:
    """What a model and its cache predict where the batches have weight."""

    @jax.jit
    def predict(params, batch):
        carry = model.initial_carry(len(batch.ids_BS))
        hidden_BSD, _ = model.hidden(params, batch, carry)
        memory = cache.history(hidden_BSD, batch.labels_BS, batch.segments_BS)
        output, options = model.output(params), model.options
        nothing = memory._replace(visible_BSM=jnp.zeros_like(memory.visible_BSM))
        return (
            model.cached.log_probs(*output, hidden_BSD, nothing, options=options),
            model.cached.log_probs(*output, hidden_BSD, memory, options=options),
            cache.cache_log_probs(hidden_BSD, memory, len(output[1])),
        )

    blocks, read = [], []
    for batch in lines:
        counts_BS = batch.weights_BS != 0
        arrays = [np.asarray(array)[counts_BS] for array in predict(params, batch)]
        blocks.append([array[:, : model.vocab] for array in arrays])
        places = zip(*np.nonzero(counts_BS), strict=True)
        read += [batch.ids_BS[row, : place + 1] for row, place in places]
    plain_NV, joint_NV, cache_NV = map(np.concatenate, zip(*blocks, strict=True))
    return Answers(plain_NV, joint_NV, cache_NV, read)


def accuracy_at(log_p_NV: np.ndarray, right_NA: np.ndarray, k: int) -> float:
    """The share of right answers that are among the k most probable words.

    A word of no probability is among none of them.
    """
    right_NA1 = np.take_along_axis(log_p_NV, right_NA, axis=1)[:, :, None]
    better_NA = (log_p_NV[:, None] > right_NA1).sum(axis=2)
    return float(np.mean((better_NA < k) & np.isfinite(right_NA1[:, :, 0])))


def right_answers(read: list[np.ndarray], vocab: Vocab) -> np.ndarray:
    """The two nouns that each line names, [N, 2]."""
    nouns = [vocab.lookup[word] for word in templates.nouns()]
    return np.array([words[np.isin(words, nouns)] for words in read])


def summarize(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Acc@k and rank on the test lines, by the name of the distribution.

    The rank is judged in float32, of the head alone and of the head with its cache; the
    cache alone has words of no probability, so its matrix has none.
    """
    data = run.config.data
    cut = lines.cut(data, corpus.vocab)
    if cut is None:
        raise ValueError(
            f"the answers are lines' ends, and data.unit is {data.unit!r}."
        )
    predicted = answers(
        run.model, run.params, cut(corpus.test, data.eval_rows, data.eval_length)
    )
    right_NA = right_answers(predicted.read, corpus.vocab)
    summary: dict[str, Any] = {
        f"{name}_acc@{k}": accuracy_at(log_p_NV, right_NA, k)
        for name, log_p_NV in predicted.log_probs.items()
        for k in PLACES
    }
    for name in NAMES[:2]:
        spectrum = rank.spectrum(predicted.log_probs[name], np.float32)
        summary[f"{name}_rank"] = spectrum.rank
    return summary


def table(summary: dict[str, Any]) -> str:
    """The summary as a small table of text."""
    lines = [f"{'':8}" + "".join(f"{f'Acc@{k}':>8}" for k in PLACES) + f"{'rank':>8}"]
    for name in NAMES:
        cells = [f"{100 * summary[f'{name}_acc@{k}']:8.2f}" for k in PLACES]
        cells.append(f"{summary.get(f'{name}_rank', '-'):>8}")
        lines.append(f"{name:8}" + "".join(cells))
    return "\n".join(lines)
