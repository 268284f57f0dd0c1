"""The recurrence of LSTM layers as one kernel for all positions, on Hopper GPUs.

A block of threads owns 16 units U of a layer and keeps their weights on chip from the
first position to the last. With q over the gates i, f, g, o it computes

    z_q[U] = W_q[:, U]' h_{t-1} + X_q[:, U]' x_t        64 rows: four gates of 16 units,

the recurrent weights W in registers and X, which read the layer below, in shared
memory. It applies the cell's formulas and hands h_t[U] to the other blocks through
global memory. Layers run at the same time, each as far as what it reads has come. For
the lowest, X x is computed beforehand, and its blocks may own 32 units.

Backward, four blocks form a cluster that owns 64 units V. Each takes one gate of

    dh_{t-1}[V] = sum_q W_q[V, :] dz_q,t                64 rows: 64 units of one gate,

and of what comes down from the layer above, and the cell's formulas for 16 units; the
summands go through the shared memory of the cluster.

The weights stand on the 64-row side of the tensor core's product and the batch on the
other. Each of up to three warpgroups multiplies a share of the columns; one more adds
the parts and applies the formulas.

There is no barrier among blocks in the loop. What travels is bfloat16, and every word
is its own flag: before the first position the arrays are filled with a bit pattern that
no conversion to bfloat16 yields, and a reader asks until it finds another. Sums have a
fixed order, so that equal inputs give equal bits. All blocks must run at once, at most
one per multiprocessor.

This file has the sizes: which layers fit, why others do not, and how a kernel divides
them. The kernels are gpu_forward.py and gpu_backward.py; both read and write tiles as
in gpu_tile.py, and say in PTX what is in ptx.py.

Axes: H units of a layer, Q the four gates, Z = S + 1 positions and the carry.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle.ops.device import HOPPER, Device

MULTIPROCESSORS = 132
CLUSTERS = 30  # of four blocks that surely run at once, whatever processors are off
SHARED_BYTES = 227 * 1024
ROWS = 16  # the batch is padded to a multiple
TILE = 64  # rows of the tensor core's product
UNITS = 16  # of one tile, each with four gates
CHUNK = 64  # columns of bfloat16 in a row of swizzled shared memory
HELD = 5 * CHUNK  # columns of weights that a warpgroup's registers hold
PAD = 4  # columns between rows of the parts, or 16 units lie in two banks
PIECES = 2  # of a batch, one after the other; docs/results/recurrence.md has times


class Stack(NamedTuple):
    """Layers padded to the widest; `units` are theirs, multiples of 64.

    `recurrent` and `input` are [L, Q, H, K] forward, the latter without the lowest
    layer, and [L, K, Q, H] backward, where input[l] are the weights of layer l + 1; a
    stack of one layer has any `input`. `mask` is what the layer above reads h with.
    """

    units: tuple[int, ...]
    recurrent: jax.Array
    input: jax.Array
    mask_LBH: jax.Array


class Trace(NamedTuple):
    """What the backward pass needs; Z = S + 1 begins with the carry.

    `fed` is what the layer above reads, h times the mask.
    """

    hidden_LZBH: jax.Array
    fed_LSBH: jax.Array
    cell_LZBH: jax.Array
    gates_LSBQH: jax.Array


class Bars(NamedTuple):
    """Gradients of the pre-activations and of the carries before the first position."""

    z_bar_LSBQH: jax.Array
    hidden_bar_LBH: jax.Array
    cell_bar_LBH: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes that a kernel is compiled for.

    Attributes:
        steps: positions.
        rows: of the batch, a multiple of 16.
        live: rows that are no padding, the first ones.
        units: of each layer, the lowest first; multiples of 64.
    """

    steps: int
    rows: int
    live: int
    units: tuple[int, ...]

    @property
    def layers(self) -> int:
        """How many layers run at once."""
        return len(self.units)

    @property
    def width(self) -> int:
        """Columns of the arrays: the units of the widest layer."""
        return max(self.units)

    @property
    def groups(self) -> int:
        """Warpgroups of a block that multiply; the next one applies the formulas."""
        return groups_of(self.width)

    @property
    def share(self) -> int:
        """Columns that a warpgroup multiplies."""
        return self.width // self.groups


class ForwardPlan(Plan):
    """How the forward kernel divides the layers among blocks."""

    @property
    def blocks(self) -> list[int]:
        """Blocks of each layer."""
        blocks = _blocks(self.rows, self.units)
        if blocks is None:
            raise ValueError(
                f"layers of {self.units} units do not run at once with {self.rows} rows"
            )
        return blocks

    @property
    def tiles(self) -> int:
        """Tiles of 16 units that a block of the lowest layer owns; others own one."""
        return self.units[0] // (self.blocks[0] * UNITS)


class BackwardPlan(Plan):
    """How the backward kernel divides the layers among clusters of four blocks."""

    @property
    def clusters(self) -> list[int]:
        """Clusters of each layer."""
        return [units // TILE for units in self.units]

    @property
    def kinds(self) -> int:
        """Kinds of summands: from the layer itself and, if any, from the one above."""
        return min(self.layers, 2)


def groups_of(width: int) -> int:
    """Warpgroups among which the columns are split evenly."""
    return max(n for n in (1, 2, 3) if width // CHUNK % n == 0)


def padded(rows: int, units: int) -> tuple[int, int]:
    """The sizes that the kernels take, for a batch and a layer."""
    tiles = -(-units // TILE)
    if tiles > 1 and groups_of(tiles * CHUNK) == 1:
        tiles += 1
    return -rows % ROWS + rows, tiles * TILE


def refusals(rows: int, units: int, dtype: jnp.dtype, device: Device) -> list[str]:
    """Why the kernels do not take this layer on the device; empty if they do."""
    reasons = []
    if device.capability != HOPPER:
        reasons.append(f"needs a Hopper GPU, got {device.kind}")
    elif device.multiprocessors < MULTIPROCESSORS:
        reasons.append(
            f"needs {MULTIPROCESSORS} multiprocessors, got {device.multiprocessors}"
        )
    if jax.__version_info__ < (0, 11, 2):
        reasons.append(f"needs jax 0.11.2, got {jax.__version__}")
    if dtype != jnp.bfloat16:
        reasons.append(f"needs compute_dtype bfloat16, got {dtype}")
    rows, units = padded(piece(rows, [units]), units)
    if units > MULTIPROCESSORS * UNITS:
        reasons.append(f"holds {MULTIPROCESSORS * UNITS} units, got {units}")
    if (needed := _shared_bytes(rows, units, 1)) > SHARED_BYTES:
        reasons.append(
            f"{units} units and {rows} rows at a time need {needed} bytes of shared "
            f"memory, more than {SHARED_BYTES}"
        )
    return reasons


def piece(rows: int, units: Sequence[int]) -> int:
    """Rows of a batch that are run at a time: all, or a share that the layers take.

    Where even the smallest share is too large, that one.
    """
    for count in range(1, PIECES + 1):
        share = -(-rows // count)
        sizes = (padded(share, each) for each in units)
        if all(_shared_bytes(*size, 1) <= SHARED_BYTES for size in sizes):
            break
    return share


def forward_runs(rows: int, units: Sequence[int]) -> list[slice]:
    """Which layers run in one kernel: from the lowest, as many as fit."""
    return _runs(units, lambda some: _blocks(rows, some) is not None)


def backward_runs(rows: int, units: Sequence[int]) -> list[slice]:
    """The same for the backward pass."""
    return _runs(units, lambda some: _clusters_fit(rows, some))


def _runs(units: Sequence[int], fit: Callable[[Sequence[int]], bool]) -> list[slice]:
    runs, start = [], 0
    for stop in range(1, len(units) + 1):
        if stop == len(units) or not fit(units[start : stop + 1]):
            runs.append(slice(start, stop))
            start = stop
    return runs


def _blocks(rows: int, units: Sequence[int]) -> list[int] | None:
    """Blocks of each layer if they all run at once; None if they cannot."""
    for tiles in (1, 2):
        blocks = [units[0] // (tiles * UNITS), *(n // UNITS for n in units[1:])]
        width = max(units)
        alone = len(units) == 1 and tiles == 1
        # Weights of two tiles, or of two layers, fill shared memory and registers.
        fits = alone or width // groups_of(width) <= HELD
        fits &= sum(blocks) <= MULTIPROCESSORS
        if fits and _shared_bytes(rows, width, tiles) <= SHARED_BYTES:
            return blocks
    return None


def _clusters_fit(rows: int, units: Sequence[int]) -> bool:
    """Whether layers go backward at once: equal ones, if they all run at once."""
    width = max(units)
    return (
        min(units) == width
        and sum(units) <= CLUSTERS * TILE
        and width // groups_of(width) <= HELD
        and _shared_bytes(rows, width, 2) <= SHARED_BYTES
    )


def _shared_bytes(rows: int, width: int, tiles: int) -> int:
    """What gpu_tile.shared_memory takes, and barriers."""
    parts = 2 * groups_of(width) * tiles * TILE * (rows + PAD) * 4
    return (TILE + rows) * width * 2 + parts + 1024
