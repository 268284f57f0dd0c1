"""From ids to batches: endless training streams and evaluation passes.

A run of ids is cut into `rows` equal rows that are read side by side, a stretch of
columns at a time (truncated backpropagation through time), so that a recurrent state
carries over from one batch to the next. With `variable` the number of columns is drawn
from the distribution of AWD-LSTM and MoS, the length law,

    base   = length with probability 0.95, else length / 2
    columns = min(max(5, int(Normal(base, 5))), length + max_delta),

cut short at the end of the data. A batch is then padded, with weight 0, to the
smallest of four widths that holds it. The widths minimise the mean padded width under
the law: for length 70 and max_delta 40 they are 67, 73, 80 and 110, and 7.1% of the
columns are padding (one width would waste 62%, eight 3%).

Axes: L lengths.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

WIDTHS = 4

_SHORTEST = 5
_DEVIATION = 5.0
_SHORT_PROBABILITY = 0.05


class Batch(NamedTuple):
    """What a step reads.

    The arrays are NumPy's as they are read, and jax's once they are on a device.

    Attributes:
        ids_BS: int32, the words that are read.
        labels_BS: int32, the words that follow them; 0 in padding.
        weights_BS: float32, 1 where the label counts and 0 in padding.
        segments_BS: int32, 0 in padding; positive numbers tell contiguous texts apart,
            and a contiguous stream has only 1.
    """

    ids_BS: np.ndarray
    labels_BS: np.ndarray
    weights_BS: np.ndarray
    segments_BS: np.ndarray


class Stream:
    """Contiguous batches without end; one epoch follows another.

    Every label of the trimmed rows is predicted once per epoch. The reference stops
    when a single column is left, which is the one difference from it.

    Attributes:
        columns: columns of the whole text; an epoch predicts all but the first.
        widths: the padded widths that a batch may have.

    Args:
        ids: a run of ids, trimmed at its end to a multiple of `rows`.
        rows: rows of the whole batch, over all processes.
        length: columns of a batch, or the law's `length` if it is variable.
        variable: draw the number of columns of each batch.
        max_delta: bound of the law.
        seed: the number of columns is a function of (seed, epoch, batch).
        process_index: which share of the rows to return.
        process_count: how many shares there are.

    Raises:
        ValueError: if `ids` is too short for `rows`, or `rows` cannot be shared out.
    """

    def __init__(
        self,
        ids: np.ndarray,
        rows: int,
        length: int,
        *,
        variable: bool = False,
        max_delta: int = 40,
        seed: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ):
        _check_sizes(ids, rows, length)
        if len(ids) < 2 * rows:
            raise ValueError(
                f"{len(ids)} ids in {rows} rows leave nothing to predict: a row needs "
                "two or more."
            )
        if rows % process_count or not 0 <= process_index < process_count:
            raise ValueError(
                f"process {process_index} of {process_count} has no equal share of "
                f"{rows} rows."
            )
        share = rows // process_count
        first = share * process_index
        self.columns = len(ids) // rows
        ids_BS = ids[: rows * self.columns].reshape(rows, self.columns)
        self.widths = widths(length, max_delta) if variable else (length,)
        self._ids_BS = ids_BS[first : first + share]
        self._length, self._max_delta = length, max_delta
        self._variable, self._seed = variable, seed
        self._epoch = self._offset = self._batches = 0
        self._fresh = False

    @property
    def epoch(self) -> int:
        """How many epochs are complete: it rises with the last batch of each."""
        return self._epoch

    @property
    def fresh(self) -> bool:
        """Whether no carry fits the batch just returned: it begins an epoch."""
        return self._fresh

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch: their exact number, or what the law leads to expect.

        For PTB in 12 rows the law gives 1,144; the reference's log prints 1,106, which
        is 77,465 // 70 and not a count.
        """
        mean = float(self._length)
        if self._variable:
            p_L = _law(self._length, self._max_delta)
            mean = float(p_L @ np.arange(len(p_L)))
        return math.ceil((self.columns - 1) / mean)

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch starts, as a small JSON value for `seek`.

        It does not depend on how many processes share the rows.
        """
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "batches": self._batches,
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Go to where a stream of the same settings reported to be.

        Raises:
            ValueError: if no such stream can have been there.
        """
        fields = set(self.position)
        if set(position) != fields or any(
            type(v) is not int for v in position.values()
        ):
            raise ValueError(f"a position has integers {fields}, got {position}.")
        first = position["offset"] == 0
        if (
            min(position.values()) < 0
            or position["offset"] >= self.columns - 1
            or first != (position["batches"] == 0)
        ):
            raise ValueError(
                f"position {position} is not in a stream of {self.columns} columns."
            )
        self._epoch, self._offset = position["epoch"], position["offset"]
        self._batches, self._fresh = position["batches"], False

    def next(self) -> Batch:
        """The next batch."""
        columns = min(self._draw(), self.columns - 1 - self._offset)
        width = next(w for w in self.widths if w >= columns)
        stop = self._offset + columns
        batch = _padded(
            self._ids_BS[:, self._offset : stop],
            self._ids_BS[:, self._offset + 1 : stop + 1],
            np.full(self._ids_BS.shape[0], columns),
            width,
        )
        self._fresh = self._batches == 0
        self._offset, self._batches = stop, self._batches + 1
        if stop == self.columns - 1:
            self._epoch, self._offset, self._batches = self._epoch + 1, 0, 0
        return batch

    def _draw(self):
        """How many columns the next batch would like."""
        if not self._variable:
            return self._length
        # Not one generator's state: a function of where we are can be resumed.
        random = np.random.default_rng((self._seed, self._epoch, self._batches))
        short = random.random() < _SHORT_PROBABILITY
        base = self._length / 2 if short else self._length
        drawn = max(_SHORTEST, int(random.normal(base, _DEVIATION)))
        return min(drawn, self._length + self._max_delta)


def evaluation(ids: np.ndarray, rows: int, length: int) -> Iterator[Batch]:
    """Batches in which every id but the first is predicted exactly once.

    The len(ids) - 1 pairs (word, next word) are cut into `rows` rows, each a contiguous
    stretch that is read from an empty carry; the last rows end in padding where the
    pairs run out. The weights sum to len(ids) - 1, and that is what a mean divides by.

    The reference drops the remainder of len(ids) / rows and the first word of each
    row, and divides by the number of columns before they are shifted, len rather than
    len - 1: its perplexities are low by about 0.03 on PTB's validation text (10 rows)
    and 0.003 on its test text (1 row).

    Args:
        ids: a run of ids.
        rows: rows of a batch; more are faster, and cost each row's start some context.
        length: columns of every batch, the last one padded.

    Raises:
        ValueError: if there are fewer pairs than rows.
    """
    _check_sizes(ids, rows, length)
    pairs = len(ids) - 1
    columns = math.ceil(pairs / rows)
    starts_B = np.minimum(np.arange(rows) * columns, pairs)
    stops_B = np.minimum(starts_B + columns, pairs)
    return _evaluation_batches(ids, starts_B, stops_B, length)


def widths(length: int, max_delta: int) -> tuple[int, ...]:
    """The at most `WIDTHS` padded widths of least mean under the length law."""
    p_L = _law(length, max_delta)
    lengths_L = np.arange(len(p_L))
    total_L = np.cumsum(p_L)
    # cost_L[l]: mean padded width spent on lengths up to l when l is a width.
    cost_L: np.ndarray = total_L * lengths_L
    previous = []
    for _ in range(WIDTHS - 1):
        # Rows are the width below, columns the width that is added.
        cost_LL = cost_L[:, None] + (total_L[None] - total_L[:, None]) * lengths_L[None]
        cost_LL = np.where(lengths_L[:, None] < lengths_L[None], cost_LL, np.inf)
        cost_LL[0, 0] = 0.0
        previous.append(cost_LL.argmin(axis=0))
        cost_L = cost_LL.min(axis=0)
    chosen = [len(p_L) - 1]
    for below_L in reversed(previous):
        chosen.append(int(below_L[chosen[-1]]))
    return tuple(sorted(set(chosen) - {0}))


def _law(length, max_delta):
    """The probability of each number of columns from 0 to length + max_delta."""
    longest = length + max_delta
    edges = np.arange(min(_SHORTEST, longest), longest + 1)
    p_L = np.zeros(longest + 1)
    for base, weight in (
        (length, 1 - _SHORT_PROBABILITY),
        (length / 2, _SHORT_PROBABILITY),
    ):
        z = (edges[1:] - base) / (_DEVIATION * math.sqrt(2))
        below = np.array([(1 + math.erf(value)) / 2 for value in z])
        # The two ends take all that is beyond them.
        p_L[edges] += weight * np.diff(below, prepend=0.0, append=1.0)
    return p_L


def _evaluation_batches(ids, starts_B, stops_B, length):
    for first in range(0, int((stops_B - starts_B).max()), length):
        from_B = np.minimum(starts_B + first, stops_B)
        to_B = np.minimum(from_B + length, stops_B)
        ids_BS = np.zeros((len(from_B), length), np.int32)
        labels_BS = np.zeros_like(ids_BS)
        for row, (start, stop) in enumerate(zip(from_B, to_B, strict=True)):
            ids_BS[row, : stop - start] = ids[start:stop]
            labels_BS[row, : stop - start] = ids[start + 1 : stop + 1]
        yield _padded(ids_BS, labels_BS, to_B - from_B, length)


def _padded(ids_BS, labels_BS, counts_B, width):
    """A batch of `width` columns whose row b has counts_B[b] that count."""
    rows, columns = ids_BS.shape
    padded = [np.zeros((rows, width), np.int32) for _ in range(2)]
    for array_BS, own_BS in zip(padded, (ids_BS, labels_BS), strict=True):
        array_BS[:, :columns] = own_BS
    live_BS = np.arange(width)[None] < counts_B[:, None]
    return Batch(*padded, live_BS.astype(np.float32), live_BS.astype(np.int32))


def _check_sizes(ids, rows, length):
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"ids must be a run of integers, got {ids.dtype} of shape {ids.shape}."
        )
    if rows < 1 or length < 1:
        raise ValueError(f"rows={rows} and length={length} must be positive.")
    if len(ids) <= rows:
        raise ValueError(f"{len(ids)} ids are too few for {rows} rows.")
