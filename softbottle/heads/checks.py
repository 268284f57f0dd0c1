"""What is asked of a head's settings and arrays, where they come in."""

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType

from softbottle.ops.mixture.options import Options

REDUCTIONS = ("sum", "mean", "none")
MEASURES = (
    *("nll", "entropy", "argmax", "accuracy", "lse", "responsibilities", "z_loss"),
)
P = ParamSpec("P")
H = TypeVar("H")


def factory(make: Callable[P, H]) -> Callable[P, H]:
    """A function that makes a head, whose errors about arguments list those it has."""
    signature = inspect.signature(make)
    call = signature.replace(return_annotation=signature.empty)

    @functools.wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> H:
        try:
            signature.bind_partial(*args, **kwargs)  # an unknown name before a missing
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{make.__name__}{call}: {error}.") from None
        return make(*args, **kwargs)

    return checked


def positive_integer(name: str, value: int) -> int:
    """The value as an int.

    Raises:
        ValueError: unless it is an integer above 0.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")
    return int(value)


def number(name: str, value: float) -> float:
    """The value as a float.

    Raises:
        ValueError: unless it is a finite number that is known when compiling.
    """
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def options(options: Options) -> None:
    """Raise ValueError unless these are `Options`."""
    if not isinstance(options, Options):
        raise ValueError(
            "options must be softbottle.Options(...), for example softbottle.Options("
            f"compute_dtype=jnp.bfloat16), got {options!r}."
        )


def classes(classes: int, words: int) -> None:
    """Raise ValueError unless every class has a word."""
    if classes > words:
        raise ValueError(
            f"classes={classes} are more than the vocabulary's {words} words."
        )


def reduction(name: str) -> None:
    """Raise ValueError unless there is such a reduction."""
    if name not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {name!r}.")


def terms(label_smoothing: float, z_loss: float, temperature: float) -> None:
    """Raise ValueError unless a loss may have these, and all of them."""
    given = (label_smoothing, z_loss, temperature)
    if not all(isinstance(value, numbers.Real) for value in given):
        raise ValueError(
            "label_smoothing, z_loss and temperature must be numbers that are known "
            f"when compiling, got {given}."
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing must be at least 0 and below 1, got {label_smoothing!r}."
        )
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be a finite number >= 0, got {z_loss!r}.")
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature must be a finite number above 0, got {temperature!r}."
        )
    if z_loss and temperature != 1:
        raise ValueError(
            f"z_loss={z_loss!r} is of the logits as they are, and with temperature="
            f"{temperature!r} the loss is of others: give one of the two."
        )


def measures(names: Sequence[str]) -> None:
    """Raise ValueError unless `Head.measure` knows all of these."""
    if isinstance(names, str) or not set(names) <= set(MEASURES):
        raise ValueError(f"names must be some of {MEASURES}, got {names!r}.")


def floating(**arrays: jax.Array) -> None:
    """Raise ValueError unless these are arrays of floating-point numbers."""
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jax.dtypes.issubdtype(dtype, np.floating):
            raise ValueError(
                f"{name} must be an array of floating-point numbers, got "
                f"{type(array).__name__ if dtype is None else dtype}."
            )


def states(params: Mapping[str, jax.Array], hidden_TD: jax.Array) -> None:
    """Raise ValueError unless these are the flattened states of such parameters."""
    if not isinstance(params, Mapping):
        raise ValueError(
            f"params must be what head.init gives, got {type(params).__name__}; it "
            "comes first, before table_VE, bias_V and hidden_TD."
        )
    floating(hidden_TD=hidden_TD)
    if hidden_TD.ndim != 2:
        raise ValueError(
            f"hidden_TD must be [tokens, width], got the shape {hidden_TD.shape}; "
            "flatten rows and positions first, with hidden.reshape(-1, width)."
        )
    width = hidden_TD.shape[1]
    for name, array in params.items():
        if name.rpartition("_")[2].startswith("D") and len(array) != width:
            raise ValueError(
                f"hidden_TD is {width} wide, but the head's parameters are of states "
                f"{len(array)} wide: {name} has the shape {array.shape}."
            )


def contexts(head: str, count: int, params: Mapping[str, Any]) -> None:
    """Raise ValueError unless the parameters are of as many contexts as the head has.

    The components of a head are one axis of a product, so that parameters of another
    number of them would be computed with, as another model.
    """
    latent = {
        name: array.shape
        for name, array in params.items()
        if name.startswith(("latent_", "lower_")) and getattr(array, "ndim", 0) == 3
    }
    found = sum(shape[1] for shape in latent.values())
    if latent and found != count:
        shapes = ", ".join(f"{name} {shape}" for name, shape in latent.items())
        raise ValueError(
            f"the parameters are of {found} contexts per token, and {head} has {count}:"
            f" {shapes}."
        )


def params(
    head: str,
    shapes: Mapping[str, tuple[int, ...]],
    params: Mapping[str, Any],
    widths: tuple[int, int],
) -> None:
    """Raise ValueError unless the parameters have a head's names and shapes.

    Many that are of another head would be computed with, as a third one.

    Args:
        head: for the message.
        shapes: of the head's own parameters, by name.
        params: those that were given.
        widths: of the states and of the table, for the message.
    """
    found = {name: tuple(array.shape) for name, array in params.items()}
    wrong = [
        f"{name} {found[name]} instead of {shape}"
        for name, shape in shapes.items()
        if name in found and found[name] != shape
    ]
    wrong += [f"no {name} {shapes[name]}" for name in shapes if name not in found]
    more = [f"{name} {found[name]}" for name in found if name not in shapes]
    wrong += [f"{each}, which it has not" for each in more]
    if wrong:
        raise ValueError(
            f"the parameters are not those of {head} with states {widths[0]} wide and "
            f"a table {widths[1]} wide: {', '.join(wrong)}."
        )


def labels(labels_T: jax.Array, hidden_TD: jax.Array) -> None:
    """Raise ValueError unless there is a label for each token."""
    _by_token("labels_T", "word", labels_T, hidden_TD)


def weights(weights_T: jax.Array, hidden_TD: jax.Array) -> None:
    """Raise ValueError unless there is a weight for each token."""
    _by_token("weights_T", "weight", weights_T, hidden_TD)


def _by_token(name, what, array_T, hidden_TD):
    found = getattr(array_T, "shape", type(array_T).__name__)
    if found != hidden_TD.shape[:1]:
        raise ValueError(
            f"{name} must have a {what} for each of the {hidden_TD.shape[0]} tokens of "
            f"hidden_TD {hidden_TD.shape}, got {found}."
        )


def words(words_TM: jax.Array, vocab: int, weights_T: jax.Array | None = None) -> None:
    """Raise ValueError if a token that counts has one that is no word.

    Inside `jit` values are not known, and nothing is checked.
    """
    arrays = [words_TM] if weights_T is None else [words_TM, weights_T]
    if not all(_is_known(array) for array in arrays):
        return
    ids_TM = np.asarray(words_TM)
    wrong_TM = (ids_TM < 0) | (ids_TM >= vocab)
    if weights_T is not None:
        wrong_TM &= (np.asarray(weights_T) != 0)[:, None]
    if wrong_TM.any():
        token, place = np.argwhere(wrong_TM)[0].tolist()
        raise ValueError(
            f"words_TM[{token}, {place}] is {ids_TM[token, place]}, which is none of "
            f"the {vocab} words, 0 to {vocab - 1}."
        )


def _is_known(array):
    if isinstance(array, jax.core.Tracer):
        return False
    return not isinstance(array, jax.Array) or array.is_fully_addressable


def mesh(**trees: Any) -> None:
    """Raise ValueError if an array is split over axes of an Explicit mesh."""
    for name, tree in trees.items():
        for leaf in jax.tree.leaves(tree):
            sharding = jax.typeof(leaf).sharding
            # Inside `auto_axes` and `shard_map` no axis is Explicit.
            if any(sharding.spec) and AxisType.Explicit in sharding.mesh.axis_types:
                raise ValueError(
                    f"{name} is split over axes of an Explicit mesh, {sharding.spec}: "
                    "under jax.set_mesh(mesh) wrap the function that calls the head, "
                    "jax.sharding.auto_axes(function, out_sharding=P()) for a loss; or "
                    "give jax.make_mesh axis_types=(jax.sharding.AxisType.Auto, ...)."
                )
