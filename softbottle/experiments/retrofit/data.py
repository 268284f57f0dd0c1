"""What heads are trained on: a pretrained model's states, and its own head.

States are divided by the root of their mean square and the table is multiplied by it,
so that one learning rate fits those of any model; logits stay what they are. Words are
renumbered by their frequency in the training text, the most frequent first: Mixtape's
frequent words are the first ones, and classes of words, v mod n, then have words of
every frequency.

Batches are stretches of the text, put together at random. Of the held-out text every
second region chooses the learning rate, and the others are what is reported.

Axes: N states, R stretches of a batch, S rows of a stretch.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.analysis.capture import Capture, Tokens, bias_or_zeros, present
from softbottle.analysis.instruments import lowrank
from softbottle.data import frequency
from softbottle.ops.mixture.activations import SOFTMAX

SAMPLE = 65_536  # states whose second moments are taken
SHARE = 0.05  # of the text, held out at its end where no other is
_STRETCH = 128
_REGION = 2048
_ROOM = 0.6  # of a device's memory, that states may have


class Rows:
    """States and labels of a text in blocks, read by row numbers.

    Args:
        blocks: states in any floating type, memory-mapped or not, and labels.
        scale: what the states are divided by.
        on_device: keep them all in the device's memory, as bfloat16.
    """

    def __init__(
        self, blocks: Sequence[Tokens], scale: float = 1.0, on_device: bool = False
    ) -> None:
        self._blocks, self.scale = [block.hidden_TD for block in blocks], scale
        labels = [present("labels_T", block.labels_T) for block in blocks]
        self.labels_N = np.concatenate(labels).astype(np.int32)
        self._starts = np.cumsum([0, *map(len, self._blocks)])
        self._held = self._placed() if on_device else None

    def __len__(self) -> int:
        """How many states there are."""
        return len(self.labels_N)

    def stretches(self, size: int) -> np.ndarray:
        """First rows of as many whole stretches of `size` as blocks have."""
        return np.concatenate(
            [
                np.arange(start, stop - size + 1, size)
                for start, stop in zip(self._starts, self._starts[1:], strict=False)
            ]
        )

    @property
    def longest(self) -> int:
        """Rows of the longest block: a stretch has no more."""
        return max(map(len, self._blocks))

    def take(self, firsts_R: np.ndarray, size: int) -> tuple[jax.Array, np.ndarray]:
        """States [R S, D], float32 and scaled, and labels, of some stretches."""
        rows_T = (firsts_R[:, None] + np.arange(size)[None]).reshape(-1)
        labels_T = self.labels_N[rows_T]
        if self._held is not None:
            return _gather(self._held, firsts_R, size, self.scale), labels_T
        parts = [self._stored(first, first + size) for first in firsts_R]
        return self._scaled(np.concatenate(parts)), labels_T

    def between(self, first: int, stop: int) -> tuple[jax.Array, np.ndarray]:
        """States and labels of consecutive rows, as `take`."""
        return self._scaled(self._stored(first, stop)), self.labels_N[first:stop]

    def _stored(self, first, stop):
        """Consecutive rows as they are stored."""
        at = int(np.searchsorted(self._starts, first, side="right")) - 1
        parts = []
        while at < len(self._blocks) and self._starts[at] < stop:
            start = self._starts[at]
            parts.append(self._blocks[at][max(first - start, 0) : stop - start])
            at += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _scaled(self, hidden_TD):
        return jnp.asarray(hidden_TD).astype(jnp.float32) / self.scale

    def _placed(self):
        """All states on the device, block by block, never two copies of all."""
        width = self._blocks[0].shape[1]
        held_ND = jnp.zeros((len(self), width), jnp.bfloat16)
        for start, block in zip(self._starts, self._blocks, strict=False):
            held_ND = _put(held_ND, jnp.asarray(block, jnp.bfloat16), int(start))
        return held_ND


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model's states along a text, and its head.

    Attributes:
        name: of the model.
        facts: sentences on what was read, and how.
        digest: a hash of what the states are of.
        table_VD: its table, words by frequency, multiplied by the scale.
        bias_V: its bias, or zeros.
        order_V: the model's token of each word here.
        decile_V: of each word, by frequency in the training text.
        train: what heads learn from.
        valid: regions of held-out text that choose a learning rate.
        heldout: the other regions.
    """

    name: str
    facts: tuple[str, ...]
    digest: str
    table_VD: jax.Array
    bias_V: jax.Array
    order_V: np.ndarray
    decile_V: np.ndarray
    train: Rows
    valid: Rows
    heldout: Rows

    @functools.cached_property
    def own(self) -> lowrank.Own:
        """The model's own head, on scaled states."""
        return lowrank.Own(np.asarray(self.table_VD), np.asarray(self.bias_V))

    @functools.cached_property
    def leading(self) -> tuple[np.ndarray, np.ndarray]:
        """`lowrank.leading` of some training states: what every narrow table needs."""
        return lowrank.leading(self.sample(SAMPLE), self.own.table_VD)

    def sample(self, rows: int) -> np.ndarray:
        """Training states of stretches all over the text, [rows or fewer, D]."""
        return _sample(self.train, rows)


def make(capture: Capture, heldout: Capture | None = None, digest: str = "") -> Problem:
    """The problem of a model's states.

    Args:
        capture: a model whose head is softmax(h W' + b), with states and labels.
        heldout: the same along text that is held out; None holds out the last part of
            the text, `SHARE` of it.
        digest: a hash of what the states are of.

    Raises:
        ValueError: if the head is another, or states or labels are missing, too few or
            not finite.
    """
    if capture.readout is not None or capture.activation.apply is not SOFTMAX.apply:
        raise ValueError(
            f"the head of {capture.name} is no softmax(h W' + b), which others could "
            "start from."
        )
    table_VD = np.asarray(present("table_VE", capture.table_VE), np.float32)
    train = [_labeled(block) for block in present("tokens", capture.tokens)]
    if heldout is None:
        train, held = _cut(train)
    else:
        held = [_labeled(block) for block in present("tokens", heldout.tokens)]
    counts_V = np.zeros(len(table_VD), np.int64)
    for _, labels_T in train:
        counts_V += np.bincount(labels_T, minlength=len(table_VD))
    order_V = np.argsort(-counts_V, kind="stable")
    place_V = np.argsort(order_V)
    train, held = (
        [Tokens(hidden_ND, place_V[labels_N]) for hidden_ND, labels_N in part]
        for part in (train, held)
    )
    valid, test = halves(held)
    scale = _scale(Rows(train))
    return Problem(
        capture.name,
        capture.facts,
        digest,
        jnp.asarray(table_VD[order_V] * np.float32(scale)),
        jnp.asarray(np.asarray(bias_or_zeros(capture), np.float32)[order_V]),
        order_V,
        frequency.deciles_by_count(counts_V[order_V]),
        Rows(train, scale, _fits(train)),
        Rows(valid, scale),
        Rows(test, scale),
    )


def batches(
    rows: Rows, batch: int, steps: int, seed: int
) -> Iterator[tuple[jax.Array, np.ndarray]]:
    """States and labels of every step: pass after pass, each in an order of its own."""
    size = min(_STRETCH, batch, rows.longest)
    firsts = rows.stretches(size)
    per_step = max(1, min(batch // size, len(firsts)))
    passes = -(-steps * per_step // (len(firsts) // per_step * per_step))
    done = 0
    for number in range(passes):
        order = np.random.default_rng((seed, number)).permutation(firsts)
        for at in range(0, len(order) - per_step + 1, per_step):
            if done == steps:
                return
            yield rows.take(order[at : at + per_step], size)
            done += 1


def steps_per_pass(rows: Rows, batch: int) -> int:
    """Steps of `batches` in which every whole stretch is seen once."""
    size = min(_STRETCH, batch, rows.longest)
    count = len(rows.stretches(size))
    return count // max(1, min(batch // size, count))


def in_order(
    rows: Rows, batch: int
) -> Iterator[tuple[jax.Array, np.ndarray, np.ndarray]]:
    """States, labels and weights, once and in order; the last is filled up by zeros."""
    size = min(batch, len(rows))
    for first in range(0, len(rows), size):
        hidden_TD, labels_T = rows.between(first, min(first + size, len(rows)))
        short = size - len(labels_T)
        yield (
            jnp.pad(hidden_TD, ((0, short), (0, 0))),
            np.pad(labels_T, (0, short)),
            np.pad(np.ones(len(labels_T), np.float32), (0, short)),
        )


def halves(blocks: Sequence[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
    """Every second region of a text, and the others.

    Raises:
        ValueError: if there are too few states for two.
    """
    total = sum(len(block.hidden_TD) for block in blocks)
    if total < 2:
        raise ValueError(f"{total} held-out states are too few.")
    size = max(1, min(_REGION, total // 2))
    both: tuple[list[Tokens], list[Tokens]] = ([], [])
    first = 0
    for block in blocks:
        hidden_ND, labels_N = block.hidden_TD, present("labels_T", block.labels_T)
        at = 0
        # Regions are counted from the text's start, whatever blocks it came in.
        while at < len(hidden_ND):
            turn, inside = divmod(first + at, size)
            stop = at + size - inside
            both[turn % 2].append(Tokens(hidden_ND[at:stop], labels_N[at:stop]))
            at = stop
        first += len(hidden_ND)
    return both


def _labeled(block):
    return Tokens(block.hidden_TD, present("labels_T", block.labels_T))


def _cut(blocks):
    """Blocks without the end of the text, and the end."""
    total = sum(len(block.hidden_TD) for block in blocks)
    keep = total - max(2, round(SHARE * total))
    if keep < 1:
        raise ValueError(f"{total} states are too few to hold some of them out.")
    train, held = [], []
    for hidden_ND, labels_N in blocks:
        at = min(max(keep, 0), len(hidden_ND))
        train.append(Tokens(hidden_ND[:at], labels_N[:at]))
        held.append(Tokens(hidden_ND[at:], labels_N[at:]))
        keep -= len(hidden_ND)
    return [[b for b in part if len(b.hidden_TD)] for part in (train, held)]


def _sample(rows, most):
    size = min(_STRETCH, rows.longest)
    firsts = rows.stretches(size)
    count = max(1, min(len(firsts), most // size))
    chosen = firsts[np.linspace(0, len(firsts) - 1, count).astype(int)]
    return np.asarray(rows.take(chosen, size)[0], np.float32)


def _scale(rows):
    """The root of the mean square of some states."""
    square = float(np.mean(np.square(_sample(rows, SAMPLE), dtype=np.float64)))
    if not np.isfinite(square) or square == 0:
        raise ValueError(f"the states' mean square is {square}.")
    return square**0.5


def _fits(blocks):
    """Whether a device that is not the host's memory has room for these states."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "cpu" or limit is None:
        return False
    return 2 * sum(block.hidden_TD.size for block in blocks) < _ROOM * limit


@functools.partial(jax.jit, donate_argnums=0)
def _put(held_ND, block_ND, start):
    return jax.lax.dynamic_update_slice(held_ND, block_ND, (start, 0))


@functools.partial(jax.jit, static_argnums=2)
def _gather(held_ND, firsts_R, size, scale):
    def stretch(first):
        return jax.lax.dynamic_slice_in_dim(held_ND, first, size)

    hidden_RSD = jax.vmap(stretch)(firsts_R)
    flat_TD = hidden_RSD.reshape(-1, held_ND.shape[1])
    return flat_TD.astype(jnp.float32) / scale
