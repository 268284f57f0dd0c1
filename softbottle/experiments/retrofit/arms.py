"""The heads that are put on a pretrained model, and how each of them starts.

    softmax            the model's own; with a narrow table, one of that rank
    affine             a softmax of h + x W + b, x the state's direction: moc(1, linear)
    moc-K, mos-K       mixtures of contexts and of softmaxes; the first is the second's
                       capacity control: the same parameters, the rank of a softmax
    partition-N        contexts by class of words
    mixtape-K          gates of their own for the most frequent tenth of the words
    ...-linear         the same with linear contexts
    softmax-flop:ARM, softmax-parameters:ARM
                       a softmax of the rank that has the flop, or the parameters, of an
                       arm with a narrow table

With a table as wide as the states every arm starts as the model's own head. With a
narrower one, of width r, it starts as the softmax of rank r whose logits are nearest to
the model's (analysis/instruments/lowrank.py).
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp

from softbottle import heads
from softbottle.analysis.instruments import lowrank
from softbottle.experiments.retrofit.data import Problem
from softbottle.heads import Head, Output
from softbottle.heads.mixtape import Mixtape

OWN, SOFTMAX, AFFINE = "own", "softmax", "affine"
MIXED = ("moc", "mos", "partition", "mixtape")
FREQUENT = 0.1  # of the words, that Mixtape has gates for
# What experiments A and B compare (docs/results/retrofit.md).
FULL = (SOFTMAX, AFFINE, "moc-4", "mos-2", "mos-4", "mos-8", "partition-4")
NARROW = (
    *(SOFTMAX, "moc-4", "mos-2", "mos-4", "mos-8", "partition-4", "mixtape-4"),
    *("softmax-flop:mos-4", "softmax-parameters:mos-4"),
)
_MATCHED = re.compile(r"softmax-(flop|parameters):(.+)")
_NAMED = re.compile(r"(moc|mos|partition|mixtape)-(\d+)(-linear)?")


class Costs(NamedTuple):
    """What a head takes, the model's trunk left out.

    Attributes:
        parameters: numbers that it has, table and bias included.
        table_bytes: of its table in bfloat16, as a server has it.
        flop: per predicted token: twice the entries of every matrix that is multiplied.
    """

    parameters: int
    table_bytes: int
    flop: float


class Start(NamedTuple):
    """A head before its training; the states it reads are scaled."""

    head: Head
    params: dict[str, jax.Array]
    table_VE: jax.Array
    bias_V: jax.Array

    def output(self, hidden_TD: jax.Array) -> Output:
        """The head on some states."""
        return Output(*self, hidden_TD)


def check(name: str) -> None:
    """Raise ValueError unless there is such an arm."""
    if match := _MATCHED.fullmatch(name):
        check(match[2])
        if match[2].startswith(SOFTMAX):
            raise ValueError(f"{name}: a softmax is matched to another head.")
    elif name not in (SOFTMAX, AFFINE):
        _head(name, words=2**31)


def own(problem: Problem) -> Start:
    """The model's own head."""
    return Start(heads.softmax(), {}, problem.table_VD, problem.bias_V)


def start(problem: Problem, name: str, width: int | None, seed: int) -> Start:
    """An arm before its training.

    Args:
        problem: the model's states and head.
        name: of the arm.
        width: of its table; None is as wide as the states.
        seed: of its random numbers.

    Raises:
        ValueError: if there is no such arm, or no such width.
    """
    words, full = problem.table_VD.shape
    name, width = _resolved(problem, name, width)
    head = _head(name, words, width, full)
    head.check_words(words)
    params = head.init(jax.random.key(seed), full, width)
    if width == full:
        return Start(head, params, problem.table_VD, problem.bias_V)
    cut, table_VE, bias_V = nearest(problem, width)
    return Start(head, params | cut, table_VE, bias_V)


def nearest(
    problem: Problem, width: int
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """The softmax of a rank whose logits of the states are nearest to the model's."""
    root_DD, basis_DD = problem.leading
    return lowrank.nearest(root_DD, basis_DD[:, :width], problem.own, 1.0)


def costs(start: Start) -> Costs:
    """What a head takes."""
    words, width = start.table_VE.shape
    products = float(start.head.products)
    if isinstance(start.head, Mixtape):
        # Frequent words meet every context, and have gates.
        products += (start.head.contexts - 1) * start.head.frequent / words
    numbers = sum(array.size for array in start.params.values())
    matrices = sum(a.size for name, a in start.params.items() if "bias" not in name)
    parameters = numbers + start.table_VE.size + start.bias_V.size
    flop = 2 * (matrices + products * words * width)
    return Costs(parameters, 2 * words * width, flop)


def expected_costs(problem: Problem, name: str, width: int | None) -> Costs:
    """The costs of an arm that is not made."""
    words, full = problem.table_VD.shape
    name, width = _resolved(problem, name, width)
    head = _head(name, words, width, full)

    def shapes():
        params = head.init(jax.random.key(0), full, width)
        return params, jnp.zeros((words, width)), jnp.zeros(words)

    return costs(Start(head, *jax.eval_shape(shapes)))


def _resolved(problem, name, width):
    """The arm and the width that a name and a width stand for."""
    full = problem.table_VD.shape[1]
    if match := _MATCHED.fullmatch(name):
        return SOFTMAX, _matched(problem, match[1], match[2], width)
    width = full if width is None else width
    if not 1 <= width <= full:
        raise ValueError(f"the table's width must lie in [1, {full}], got {width}.")
    return name, width


def _head(name, words, width=1, full=1):
    if name == SOFTMAX:
        return heads.softmax() if width == full else heads.lowrank(width)
    if name == AFFINE:
        return heads.moc(1, "linear")
    match = _NAMED.fullmatch(name)
    if match is None:
        raise ValueError(
            f"no arm is called {name!r}; there are {SOFTMAX}, {AFFINE}, "
            f"{', '.join(f'{kind}-NUMBER' for kind in MIXED)}, each with -linear for "
            "such contexts, softmax-flop:ARM and softmax-parameters:ARM."
        )
    kind, number = match[1], int(match[2])
    context = "linear" if match[3] else "residual"
    if kind == "partition":
        return heads.partition(number, context=context)
    if kind == "mixtape":
        frequent = max(1, int(FREQUENT * words))
        return heads.mixtape(number, context, frequent=frequent)
    return getattr(heads, kind)(number, context)


def _matched(problem, what, rival, width):
    """The rank of a softmax that has what another arm has, at most that of the model.

    With a rank below the model's there is a projection beside the table.
    """
    words, full = problem.table_VD.shape
    if width is None:
        raise ValueError(f"softmax-{what}:{rival} is for narrow tables: give a width.")
    found = expected_costs(problem, rival, width)
    if what == "flop":
        rank = found.flop / (2 * (words + full))
    else:
        rank = (found.parameters - words) / (words + full)
    return int(min(full, max(1, round(rank))))
