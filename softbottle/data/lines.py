"""Batches whose lines are texts of their own.

A line w_1 ... w_n is read after the end of a line and never together with another:

    packed    reads EOS w_1 ... w_n        predicts w_1 ... w_n EOS
    lines     reads EOS w_1 ... w_n        predicts w_1 ... w_n EOS
    answers   reads EOS w_1 ... w_{n-1}    predicts w_1 ... w_n, of which w_n counts

`packed` is the stream of batches.py with a segment for each line: nothing is padded,
and a line that does not fit its row goes on in the next as if it began there. In the
other two a row is one whole line, padded to a common length. With `answers` the words
before the last have no weight in the loss, and a cache still holds them.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypedDict, Unpack

import numpy as np

from softbottle import config as config_lib
from softbottle.data import batches
from softbottle.data.batches import Batch, Stream
from softbottle.data.vocab import Vocab


class Share(TypedDict, total=False):
    """Which of a batch's rows a process reads; all of them by default."""

    process_index: int
    process_count: int


class Lines:
    """Batches of lines without end, every epoch in an order of its own.

    It has the methods and attributes of `batches.Stream`; no carry fits any batch. The
    lines that are left when no more batch can be filled wait for another order.

    Args:
        ids: a run of ids in which `eos` ends a line.
        eos: that id.
        rows: lines of a batch.
        length: positions of a row.
        answers: whether only the last word of a line counts.
        seed: the order is a function of (seed, epoch).
        process_index, process_count: which share of the rows to return.

    Raises:
        ValueError: if there are fewer lines than rows, or one is longer than a row.
    """

    fresh = True

    def __init__(
        self,
        ids: np.ndarray,
        eos: int,
        rows: int,
        length: int,
        *,
        answers: bool,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ):
        share = rows // process_count
        self._share = slice(share * process_index, share * (process_index + 1))
        self._lines, self._eos = split(ids, eos, length, answers), eos
        if len(self._lines) < rows:
            raise ValueError(f"{len(self._lines)} lines are too few for {rows} rows.")
        self.widths = (length,)
        self._shape, self._answers, self._seed = (rows, length), answers, seed
        self._epoch = self._batches = 0
        # The epoch, and the order of its lines.
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    @property
    def epoch(self) -> int:
        """How many epochs are complete: it rises with the last batch of each."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return len(self._lines) // self._shape[0]

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch begins, for `seek`."""
        return {"epoch": self._epoch, "batches": self._batches}

    def seek(self, position: dict[str, Any]) -> None:
        """Go to a position that `position` gave."""
        if not 0 <= position["batches"] < self.steps_per_epoch:
            raise ValueError(
                f"position {position} is not in an epoch of {self.steps_per_epoch}."
            )
        self._epoch, self._batches = position["epoch"], position["batches"]

    def next(self) -> Batch:
        """The next batch."""
        if self._order[0] != self._epoch:
            random = np.random.default_rng((self._seed, self._epoch))
            self._order = self._epoch, random.permutation(len(self._lines))
        first = self._batches * self._shape[0]
        numbers = self._order[1][first : first + self._shape[0]][self._share]
        chosen = [self._lines[index] for index in numbers]
        self._batches += 1
        if self._batches == self.steps_per_epoch:
            self._epoch, self._batches = self._epoch + 1, 0
        return _batch(chosen, self._eos, len(chosen), self._shape[1], self._answers)


class Packed(Stream):
    """A stream of batches in which every line is a segment of its own.

    No carry fits any batch, in training as in evaluation: segments are numbered anew,
    and the number of a row's last line may be that of another line in the next batch.

    Args:
        ids: a run of ids in which `eos` ends a line.
        eos: that id.
        rows: rows of a batch.
        length: positions of a row.
        **share: which of the rows to return.
    """

    def __init__(
        self, ids: np.ndarray, eos: int, rows: int, length: int, **share: Unpack[Share]
    ):
        super().__init__(ids, rows, length, **share)
        self._eos = eos

    @property
    def fresh(self) -> bool:
        """True: every batch begins with lines of its own."""
        return True

    def next(self) -> Batch:
        """The next batch."""
        return _apart(super().next(), self._eos)


def stream(
    config: config_lib.Data,
    vocab: Vocab,
    ids: np.ndarray,
    seed: int,
    **share: Unpack[Share],
) -> Stream | Lines:
    """The training batches of a config; a process's share of the rows of each."""
    shape = (config.rows, config.length)
    if config.unit == "packed":
        return Packed(ids, vocab.eos, *shape, **share)
    if config.unit != "stream":
        answers = config.unit == "answers"
        return Lines(ids, vocab.eos, *shape, answers=answers, seed=seed, **share)
    return Stream(
        ids,
        *shape,
        variable=config.variable,
        max_delta=config.max_delta,
        seed=seed,
        **share,
    )


def cut(
    config: config_lib.Data, vocab: Vocab
) -> Callable[[np.ndarray, int, int], Iterator[Batch]] | None:
    """How a text is cut for evaluation: (ids, rows, length) -> batches.

    None for a stream, whose carry runs from batch to batch.
    """
    if config.unit == "stream":
        return None
    answers = config.unit == "answers"

    def evaluation(ids, rows, length):
        if config.unit == "packed":
            for batch in batches.evaluation(ids, rows, length):
                yield _apart(batch, vocab.eos)
            return
        lines = split(ids, vocab.eos, length, answers)
        for first in range(0, len(lines), rows):
            chosen = lines[first : first + rows]
            yield _batch(chosen, vocab.eos, rows, length, answers)

    return evaluation


def whole(ids: np.ndarray, eos: int) -> np.ndarray:
    """A text that was cut anywhere, without the line that it was cut in.

    Raises:
        ValueError: if there is no other.
    """
    ends = np.flatnonzero(ids == eos)
    kept = ids[: ends[-1] + 1] if len(ends) else ids[:0]
    if np.all(kept == eos):
        raise ValueError(f"{len(ids)} tokens end before the first line does.")
    return kept


def split(ids: np.ndarray, eos: int, length: int, answers: bool) -> list[np.ndarray]:
    """The lines of a text, without their ends; empty ones are left out.

    Raises:
        ValueError: if there are none, or one does not fit `length` positions.
    """
    ends = np.flatnonzero(np.asarray(ids) == eos)
    lines = [line[line != eos] for line in np.split(np.asarray(ids), ends)]
    lines = [line for line in lines if len(line)]
    if not lines:
        raise ValueError("there are no lines in the text.")
    longest = max(map(len, lines)) + (not answers)
    if longest > length:
        raise ValueError(f"a line needs {longest} positions; a row has {length}.")
    return lines


def _apart(batch, eos):
    """The batch with a segment for each line; one begins where `eos` is read."""
    line_BS = 1 + np.cumsum(batch.ids_BS == eos, axis=1, dtype=np.int32)
    return batch._replace(segments_BS=line_BS * (batch.segments_BS > 0))


def _batch(lines, eos, rows, length, answers):
    ids_BS = np.zeros((rows, length), np.int32)
    labels_BS = np.zeros_like(ids_BS)
    segments_BS = np.zeros_like(ids_BS)
    weights_BS = np.zeros((rows, length), np.float32)
    for row, line in enumerate(lines):
        read, follow = np.append(eos, line), np.append(line, eos)
        size = len(line) + (not answers)
        ids_BS[row, :size], labels_BS[row, :size] = read[:size], follow[:size]
        segments_BS[row, :size] = 1
        weights_BS[row, size - 1 if answers else 0 : size] = 1
    return Batch(ids_BS, labels_BS, weights_BS, segments_BS)
