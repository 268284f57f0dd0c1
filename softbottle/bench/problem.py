"""The sizes that are raced and the numbers in them, the same bits in every framework.

Entry i of an array is a hash of the counter i in wrapping int32 arithmetic, of which 24
bits become a float32 in [-1, 1) without rounding. NumPy, jax and torch do these
operations alike, so children that share no memory hold the same problem, and nothing
large is drawn on the host or read from a disk.

Axes: X entries of a flat array; of an LSTM layer I inputs, H units.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

# Of NumPy, jax or torch.
Array = Any
T = TypeVar("T")
LOGIT_DEVIATION = 2.5
# Streams of the hash, one for each array.
CONTEXT, TABLE, BIAS, LABELS, PRIOR, WEIGHTS = range(6)


class Case(NamedTuple):
    """The sizes of one head: R = tokens * components rows against the vocabulary."""

    name: str
    tokens: int
    components: int
    dim: int
    vocab: int

    @property
    def product_flop(self) -> int:
        """Of one product of all rows with the table, 2 R d V."""
        return 2 * self.tokens * self.components * self.dim * self.vocab

    def tokens_within(self, flop: float) -> int:
        """How many tokens an oracle of three products takes with this many flop."""
        fitting = int(flop / (3 * self.product_flop / self.tokens))
        return max(1, min(self.tokens, fitting))


class Stack(NamedTuple):
    """The sizes of LSTM layers: widths[0] -> widths[1] -> ... -> widths[-1]."""

    name: str
    rows: int
    positions: int
    widths: tuple[int, ...]

    @property
    def product_flop(self) -> int:
        """Of the products of a forward pass; a backward pass has twice as many."""
        pairs = zip(self.widths, self.widths[1:], strict=False)
        weights = sum(4 * size * (inputs + size) for inputs, size in pairs)
        return 2 * self.rows * self.positions * weights


Named = TypeVar("Named", Case, Stack)


def _by_name(*sizes: Named) -> dict[str, Named]:
    return {size.name: size for size in sizes}


CASES = _by_name(
    Case("ptb", 840, 15, 280, 10_000),
    Case("wt2", 1050, 15, 300, 33_278),
    Case("smol", 8192, 4, 576, 49_152),
    Case("lm1b-100k", 2560, 10, 1024, 100_000),
    Case("lm1b", 2560, 10, 1024, 793_471),
    Case("llama", 4096, 1, 4096, 128_256),
    Case("tiny", 61, 3, 24, 509),
)
SWEEPS = {
    "components": tuple(
        Case(f"K={k}", 840, k, 280, 10_000) for k in (1, 2, 4, 8, 15, 30)
    ),
    "vocab": tuple(
        Case(f"V={v // 1000}k", 512, 7, 512, v)
        for v in (10_000, 25_000, 50_000, 100_000, 200_000, 400_000, 800_000)
    ),
}
DECODING = _by_name(
    Case("narrow", 64, 15, 280, 50_000),
    Case("wide", 64, 15, 1024, 50_000),
    Case("tiny", 13, 3, 24, 509),
)
SMALL_SWEEPS = {
    "components": tuple(Case(f"K={k}", 16, k, 24, 509) for k in (1, 2, 4, 8)),
    "vocab": tuple(Case(f"V={v}", 16, 3, 24, v) for v in (500, 1000, 2000, 4000)),
}


STACKS = _by_name(
    Stack("ptb", 12, 70, (280, 960, 960, 620)),
    Stack("wt2", 15, 70, (300, 1150, 1150, 650)),
    Stack("awd", 20, 70, (400, 1150, 1150, 400)),
    Stack("tiny", 3, 11, (5, 7, 7, 6)),
)


class StackArrays(NamedTuple):
    """Inputs, parameters by layer as in ops/lstm/api.py, and the outputs' cotangent."""

    inputs_SBI: Array
    layers: tuple[tuple[Array, Array, Array, Array], ...]
    probe_SBH: Array


class Small(NamedTuple):
    """The arrays without an axis of width d; drawn on the host by NumPy."""

    log_prior_TK: np.ndarray
    bias_V: np.ndarray
    labels_T: np.ndarray


def keep_last(make: Callable[..., T]) -> Callable[..., T]:
    """`make`, whose last result is kept until it is called with other arguments.

    The old result is let go of before the new one is made: a device may not hold the
    arrays of two cases.
    """
    last: dict[tuple[Any, ...], T] = {}

    @functools.wraps(make)
    def call(*arguments):
        if arguments not in last:
            last.clear()
            last[arguments] = make(*arguments)
        return last[arguments]

    return call


def hashed(counter_X: Array, stream: int) -> Array:
    """A well-mixed int32 for each int32 of a NumPy, jax or torch array."""
    mixed_X = _mixed(counter_X)
    return _mixed(mixed_X + _wrapped(0x9E3779B9 * (stream + 1)))


def uniform(counter_X: Array, stream: int, float32: Callable[[Array], Array]) -> Array:
    """Multiples of 2^-23 in [-1, 1), exact; `float32` converts an array."""
    bits_X = (hashed(counter_X, stream) >> 8) & 0xFFFFFF
    return float32(bits_X) * 2.0**-23 - 1.0


def half_width(dim: int) -> float:
    """Of the table's uniform entries, so that logits deviate by LOGIT_DEVIATION."""
    return float(np.float32(3 * LOGIT_DEVIATION / math.sqrt(dim)))


def small(case: Case) -> Small:
    """Prior, bias and labels; the bias is a multiple of 1/128, exact in bfloat16."""
    scores_TK = _host_uniform(case.tokens * case.components, PRIOR)
    scores_TK = 2.0 * scores_TK.reshape(case.tokens, case.components).astype(float)
    norm_T1 = np.log(np.sum(np.exp(scores_TK), axis=1, keepdims=True))
    counter_V = np.arange(case.vocab, dtype=np.int32)
    bias_V = ((hashed(counter_V, BIAS) & 31) - 16) / 128
    counter_T = np.arange(case.tokens, dtype=np.int32)
    labels_T = (hashed(counter_T, LABELS) & 0x7FFFFFFF) % case.vocab
    return Small(
        (scores_TK - norm_T1).astype(np.float32), bias_V.astype(np.float32), labels_T
    )


def stack_arrays(
    stack: Stack, uniform: Callable[[int, int, float], Array]
) -> StackArrays:
    """A stack's numbers; `uniform(count, stream, width)` draws them in a framework.

    Weights start as PyTorch's do, in plus or minus 1 / sqrt(H).
    """
    _, rows, positions, widths = stack

    def draw(stream, width, *shape):
        return uniform(math.prod(shape), stream, width).reshape(*shape)

    layers = []
    pairs = zip(widths, widths[1:], strict=False)
    for stream, (inputs, size) in enumerate(pairs, start=1):
        shapes = (inputs, 4 * size), (size, 4 * size), (4 * size,), (4 * size,)
        span = float(np.float32(size**-0.5))
        parts = (draw(10 * stream + i, span, *shapes[i]) for i in range(4))
        layers.append(tuple(parts))
    return StackArrays(
        draw(1, 1.0, positions, rows, widths[0]),
        tuple(layers),
        draw(2, 1.0, positions, rows, widths[-1]),
    )


def _host_uniform(count, stream):
    counter_X = np.arange(count, dtype=np.int32)
    return uniform(counter_X, stream, lambda bits_X: bits_X.astype(np.float32))


def _mixed(x):
    # The shifts are logical ones: int32 shifts carry the sign along.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _wrapped(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _wrapped(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _wrapped(value):
    """The Python integer as the int32 of the same low bits."""
    return (value + 2**31) % 2**32 - 2**31
