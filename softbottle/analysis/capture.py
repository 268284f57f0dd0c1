"""What an instrument may look at: the arrays that a model holds along a text.

Every source (a run, a GGUF file, a Hugging Face model, arrays, a text) yields this one
type. A field that a source cannot fill, or was not asked to, is None; the instruments
that need it are left out, and say why (inspection.py).

Axes: N and M positions, L layers (of `AttentionRows`: tokens), W stretches of S
positions, P tokens before each, H attention heads, R rows of attention, M also models.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from softbottle.data import vocab as vocab_lib
from softbottle.heads import Head
from softbottle.heads.base import Params
from softbottle.ops.mixture.activations import SOFTMAX, Activation
from softbottle.ops.mixture.options import Options

SAMPLE = 1024  # positions whose gradients are measured
WORDS = 4096  # of a vocabulary, at most, that are tried for the first place
_READ = 2**24  # entries that are looked at together
_WIDE = 64  # width up to which large sets of words are tried

T = TypeVar("T")


class Tokens(NamedTuple):
    """Positions of a text as a head reads them.

    Attributes:
        hidden_TD: the states.
        labels_T: the words that follow them, or None.
    """

    hidden_TD: np.ndarray
    labels_T: np.ndarray | None


class Mixed(NamedTuple):
    """Positions of a text behind the head's own projections.

    Attributes:
        log_prior_TK: log mixture weights.
        context_TKE: what each component multiplies the table by.
        labels_T: the words that follow.
        activation: the head's g.
        ranks: numbers of leading directions of the table to measure beside all of them.
    """

    log_prior_TK: np.ndarray
    context_TKE: np.ndarray
    labels_T: np.ndarray
    activation: Activation = SOFTMAX
    ranks: Sequence[int] = ()


class Readout(NamedTuple):
    """A head that is more than softmax(h W' + b).

    Attributes:
        head: the head.
        output: its parameters, table and bias, rows beyond the vocabulary included.
        options: of its operations.
    """

    head: Head
    output: tuple[Params, jax.Array, jax.Array]
    options: Options


class Trials(NamedTuple):
    """What is tried for the first place, where one linear map ranks the words.

    Attributes:
        words: the words; None for all.
        sizes: of sets of words.
        sets: random sets per size.
    """

    words: np.ndarray | None
    sizes: Sequence[int]
    sets: int


class Text(NamedTuple):
    """A text whose n-grams are counted.

    Attributes:
        ids: its words or tokens.
        vocab: ids are below it.
        dimensions: of its next-word matrix, at most.
        title: what it is called; {} stands for the names of the models that read it.
    """

    ids: np.ndarray
    vocab: int
    dimensions: int
    title: str = "{}"


class Checkpoint(NamedTuple):
    """A run at one of its steps; the states are the last layer's along a text."""

    step: int
    table_VE: np.ndarray
    states_ND: np.ndarray
    loss: float


class Missing(NamedTuple):
    """A checkpoint of a series that could not be read, and why."""

    name: str
    reason: str


class AttentionRows(NamedTuple):
    """Attention logits over L tokens, one row per head or query, and the tokens."""

    logits_RL: np.ndarray
    values_LD: np.ndarray


class Models(NamedTuple):
    """Sizes, texts and losses of trained models, for their scaling law."""

    parameters_M: np.ndarray
    tokens_M: np.ndarray
    loss_M: np.ndarray
    names: Sequence[str] | None
    fitted_M: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Capture:
    """What a model holds while it reads a text.

    Attributes:
        name: of the model, or of the text where there is no model.
        table_VE: its output table, words only.
        bias_V: its output bias.
        readout: its head; None stands for softmax(h W' + b).
        tokens: what the head reads along the text, in blocks.
        mixed: the start of the text behind the head's projections.
        frozen: states and labels on which heads of limited rank are trained.
        trials: words and sets of words that are tried for the first place; None where
            no linear map ranks the words.
        states: [N, D] by layer, the embedded words first; the head reads the last.
        logits_LWHS: attention logits of the last position of each of W stretches of S
            positions, by layer and head, N = W (S - P).
        spans_L: how many tokens that position sees in each layer, the last ones; None
            for all S.
        front: [W, P, D] by layer, the states of the tokens that are read before each
            stretch of the text (beginning of sequence); None if there are none.
        text: whose n-grams are counted.
        validations: lines of a run's metrics, if one of them is a validation.
        series: a run's checkpoints along its training, read one at a time.
        attention_rows: of an attention layer by itself.
        models: of several sizes.
        activation: g, where there is no `readout` and the head is softmax(g(h W' + b)).
        parameters: how many the model has.
        trained: tokens that it was trained on.
        family: what models of other sizes have in common with it, such as its class.
        words: of the vocabulary, in the order of the table's rows; None if they are
            not known.
        facts: sentences on what was read, and how.
        absent: by field, why this source could not fill it.
    """

    name: str
    table_VE: np.ndarray | None = None
    bias_V: np.ndarray | None = None
    readout: Readout | None = None
    tokens: Sequence[Tokens] | None = None
    mixed: Mixed | None = None
    frozen: Tokens | None = None
    trials: Trials | None = None
    states: Sequence[np.ndarray] | None = None
    logits_LWHS: np.ndarray | None = None
    spans_L: np.ndarray | None = None
    front: Sequence[np.ndarray] | None = None
    text: Text | None = None
    validations: list[dict[str, Any]] | None = None
    series: Iterable[Checkpoint | Missing] | None = None
    attention_rows: AttentionRows | None = None
    models: Models | None = None
    activation: Activation = SOFTMAX
    parameters: int | None = None
    trained: int | None = None
    family: str = ""
    words: Sequence[str] | None = None
    facts: tuple[str, ...] = ()
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_states(
        cls,
        hidden: Any,
        table: Any,
        bias: Any = None,
        labels: Any = None,
        *,
        name: str = "states",
        logits_LWHS: np.ndarray | None = None,
        ids: np.ndarray | None = None,
        frozen_MD: np.ndarray | None = None,
        activation: Activation = SOFTMAX,
    ) -> "Capture":
        """The capture of a model whose head is softmax(g(h W' + b)).

        An array may be one of NumPy, jax or PyTorch, on any device, or the name of a
        .npy file, which is memory-mapped and stays in the type that it is stored in;
        other arrays narrower than float32 are widened to it. An .npz file with these
        names is `Capture.from_states(**np.load("states.npz"))`.

        Args:
            hidden: the states that the head reads along a text, [N, D]; or a list of
                those of every layer, the head's last; empty if only the head is known.
            table: the output table, [V, D].
            bias: the output bias, [V], or None.
            labels: the tokens that follow the states, integers [N], or None.
            name: of the model.
            logits_LWHS: attention logits, or None.
            ids: the whole text in tokens, or None.
            frozen_MD: what the head reads along more of the text, from its start, for
                instruments that train; None if `hidden` is all.
            activation: g, of which nothing is trained.

        Raises:
            ValueError: for shapes that disagree, entries that are not finite or not
                real, labels that are no words, or a file that is no array.
        """
        table_VD, bias_V = _array("table", table), _array("bias", bias)
        labels_N, layers = _array("labels", labels), _layers(hidden)
        _check(table_VD, bias_V, layers, labels_N)
        vocab, dim = table_VD.shape
        last = Tokens(layers[-1], labels_N) if layers else None
        labeled = last if labels_N is not None else None
        frozen = labeled
        if labeled and frozen_MD is not None and len(frozen_MD) > len(layers[-1]):
            frozen = Tokens(frozen_MD, present("text", ids)[1 : len(frozen_MD) + 1])
        absent = {}
        if activation.apply is not SOFTMAX.apply and frozen is not None:
            absent["frozen"] = "heads of limited rank are cut from a softmax"
            frozen = None
        large = (dim // 4, dim // 2, dim) if dim <= _WIDE else (4,)
        words = np.linspace(0, vocab - 1, min(vocab, WORDS)).astype(int)
        text = None
        if ids is not None:
            text = Text(ids, vocab, 2 * dim, "text in tokens of {}")
        return cls(
            name,
            table_VD,
            bias_V,
            tokens=[last] if last else None,
            mixed=_mixed(labeled, table_VD, activation) if labeled else None,
            frozen=frozen,
            trials=Trials(words, sizes_below(vocab, (1, 2, *large)), 5),
            states=layers or None,
            logits_LWHS=logits_LWHS,
            text=text,
            activation=activation,
            absent=absent,
        )


def enough(width: int, least: int) -> int:
    """Positions to read by default: twice the rank d + 2 that a softmax can show.

    With no more than d + 2 of them the sample, and not the head, limits the rank.
    """
    return max(least, 2 * (width + 2))


def present(field: str, value: T | None) -> T:
    """What a capture has in a field.

    Raises:
        ValueError: if that is None. inspection.py leaves such captures out of the
            sections of instruments that need the field.
    """
    if value is None:
        raise ValueError(f"the capture has no {field}, which is needed here.")
    return value


def bias_or_zeros(capture: Capture) -> np.ndarray:
    """The bias, or zeros where the model has none."""
    if capture.bias_V is None:
        table_VE = present("table_VE", capture.table_VE)
        return np.zeros(len(table_VE), table_VE.dtype)
    return capture.bias_V


def joined(blocks: Sequence[Tokens]) -> Tokens:
    """Blocks of a text as one, without a copy where there is one."""
    if len(blocks) == 1:
        return blocks[0]
    hidden, labels = zip(*blocks, strict=True)
    return Tokens(np.concatenate(hidden), np.concatenate(labels))


def powers(most: int) -> list[int]:
    """1, 2, 4, ... below `most`, and `most` itself."""
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)})


def sizes_below(vocab: int, sizes: Sequence[int]) -> list[int]:
    """Sizes of sets that leave a word out, rising."""
    return sorted({size for size in sizes if 0 < size < vocab})


def real(
    name: str, values: ArrayLike, dtype: DTypeLike | None = np.float64
) -> np.ndarray:
    """Real numbers in a floating type; None leaves them in their own.

    Raises:
        ValueError: if they are complex: a cast would drop their imaginary part.
    """
    if np.iscomplexobj(values):
        raise ValueError(
            f"{name} must be real, got {np.asarray(values).dtype}; give its real and "
            "imaginary parts as two arrays."
        )
    return np.asarray(values, dtype)


def _mixed(tokens, table_VD, activation):
    """One component, whose context is the state itself."""
    hidden_TD = np.asarray(tokens.hidden_TD[:SAMPLE])
    return Mixed(
        np.zeros((len(hidden_TD), 1), np.float32),
        hidden_TD[:, None],
        tokens.labels_T[:SAMPLE],
        activation,
        powers(table_VD.shape[1]),
    )


def _layers(hidden):
    """The states of every layer that was given."""
    if isinstance(hidden, list | tuple):
        return [_array("hidden", layer) for layer in hidden]
    return [_array("hidden", hidden)]


def _array(name, value):
    """What a framework or a file calls an array, as NumPy's; None stays None."""
    if value is None:
        return None
    if isinstance(value, str | pathlib.Path):
        try:
            return np.load(value, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{name}: {value} is no .npy file: {error}") from error
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError):
            # On another device, or of a type that NumPy's protocol does not have.
            array = np.asarray(jnp.from_dlpack(value))
    else:
        array = np.asarray(value)
    return np.asarray(array, np.float32) if _is_narrow(array.dtype) else array


def _is_narrow(dtype):
    """Whether sums in this type lose what they add up."""
    return jnp.issubdtype(dtype, np.floating) and dtype.itemsize < 4


def _is_number(dtype):
    return jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)


def _is_finite(array):
    """Whether all entries are, a stretch of rows at a time: it may be on a disk."""
    rows = max(1, _READ // max(1, array[:1].size))
    parts = range(0, len(array), rows)
    return all(np.all(np.isfinite(array[at : at + rows])) for at in parts)


def _check(table_VD, bias_V, states, labels_N):
    shapes = [state.shape for state in states[-1:]]
    if table_VD.ndim != 2 or any(
        len(shape) != 2 or shape[1:] != table_VD.shape[1:] for shape in shapes
    ):
        raise ValueError(
            f"hidden {shapes} and table {table_VD.shape} must be [N, D] and [V, D]."
        )
    if bias_V is not None and np.shape(bias_V) != table_VD.shape[:1]:
        raise ValueError(f"bias {np.shape(bias_V)} must be [V] = {table_VD.shape[:1]}.")
    named = [("table", table_VD), ("bias", bias_V)]
    for name, array in [*(("hidden", state) for state in states[-1:]), *named]:
        if array is None:
            continue
        if not (np.iscomplexobj(array) or _is_number(array.dtype)):
            raise ValueError(f"{name} must be numbers, got {array.dtype}.")
        if not _is_finite(real(name, array, None)):
            raise ValueError(f"{name} has entries that are not finite.")
    if labels_N is not None:
        if not states:
            raise ValueError("labels are of states, and no hidden ones are given.")
        if labels_N.shape != states[-1].shape[:1]:
            raise ValueError(f"labels {labels_N.shape} must be [N] as hidden {shapes}.")
        vocab_lib.check_ids("labels", labels_N, len(table_VD))
