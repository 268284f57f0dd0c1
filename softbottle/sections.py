"""Groups of settings: dataclasses that refuse a field or a value as it is set.

A field is made by one of the functions below, which says beside its default what it
allows: `within(default, low, high)` bounds it on both sides, ends included; `positive`
is above 0; `one_of` lists its values. None is "not set", where the type has it.
"""

import copy
import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

# The largest dropout rate: a rate of 1 would leave nothing.
BELOW_ONE = math.nextafter(1.0, 0.0)


def within(default: Any, low: float, high: float = math.inf) -> Any:
    """A field of a number in [low, high]."""
    return dataclasses.field(default=default, metadata={"within": (low, high)})


def positive(default: Any) -> Any:
    """A field of a number above 0."""
    return dataclasses.field(default=default, metadata={"positive": True})


def one_of(default: str, choices: Sequence[str]) -> Any:
    """A field of one of some words."""
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


@dataclasses.dataclass
class Section:
    """A group of settings; an error names the fields that there are."""

    _frozen = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field that exists to a value of its type."""
        if self._frozen:
            raise ValueError(
                f"the config is validated and frozen; {self._title()}.{name} "
                "can no longer be set."
            )
        types = {field.name: _types(field) for field in dataclasses.fields(self)}
        if name not in types:
            raise ValueError(self._no_field(name))
        if float in types[name] and type(value) is int:
            value = float(value)
        if type(value) not in types[name]:
            kinds = " or ".join(map(_word, types[name]))
            raise ValueError(
                f"{self._title()}.{name} must be {kinds}, got {value!r} of type "
                f"{type(value).__name__}."
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # Only called when the ordinary look-up fails.
        raise AttributeError(self._no_field(name))

    def _title(self) -> str:
        return type(self).__name__

    def _no_field(self, name: str) -> str:
        names = [field.name for field in dataclasses.fields(self)]
        return f"{self._title()} has no field {name!r}; it has {names}."


T = TypeVar("T", bound=Section)


def check(section: Section) -> None:
    """Raise ValueError unless every field of a section, and of those in it, is allowed.

    The message names the field, its value and what was expected.
    """
    for name, field, value in leaves(section):
        _check_value(name, field.metadata, value)


def frozen(section: T) -> T:
    """A copy whose fields, and those of the sections in it, can no longer be set."""
    copied = copy.deepcopy(section)
    for part in _sections(copied):
        object.__setattr__(part, "_frozen", True)
    return copied


def update(
    section: Section,
    values: Mapping[str, Any],
    unset_before: Mapping[str, Any],
    prefix: str = "",
) -> None:
    """Set the fields of a section and of those in it from nested values.

    Args:
        section: what is changed.
        values: by name, nested as the sections are.
        unset_before: by dotted name, the value that once stood for "not set".
        prefix: of the dotted names.

    Raises:
        AttributeError: for a section that does not exist.
        ValueError: for a field that does not exist, or a value of another type.
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(getattr(section, name), Section):
            update(getattr(section, name), value, unset_before, f"{prefix}{name}.")
        elif (prefix + name) in unset_before and value == unset_before[prefix + name]:
            setattr(section, name, None)
        else:
            setattr(section, name, value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def leaves(
    section: Section, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """(dotted name, field, value) of all settings."""
    for field in dataclasses.fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        if isinstance(value, Section):
            yield from leaves(value, f"{name}.")
        else:
            yield name, field, value


def allowed(field: dataclasses.Field) -> str:
    """What the values of a field are, in words."""
    if "choices" in field.metadata:
        return ", ".join(field.metadata["choices"])
    kind, *unset = map(_word, _types(field))
    if "positive" in field.metadata:
        kind += " > 0"
    elif "within" in field.metadata:
        low, high = field.metadata["within"]
        kind += " in [0, 1)" if high == BELOW_ONE else f" >= {low}"
    return " or ".join([kind, *unset])


def _word(kind):
    return "None" if kind is type(None) else kind.__name__


def _check_value(name, allowed, value):
    """Raise ValueError unless a value is what its field allows; None always is."""
    if value is None:
        return
    if "choices" in allowed and value not in allowed["choices"]:
        raise ValueError(f"{name} must be one of {allowed['choices']}, got {value!r}.")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}.")
    # jax takes the lowest 32 bits of a seed; no size needs as many.
    if type(value) is int and value >= 2**32:
        raise ValueError(f"{name} must be below 2**32, got {value}.")
    if "positive" in allowed and not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}.")
    low, high = allowed.get("within", (-math.inf, math.inf))
    if isinstance(value, int | float) and not low <= value <= high:
        if high == BELOW_ONE:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}.")
        if low == 0:
            raise ValueError(f"{name} must not be negative, got {value!r}.")
        raise ValueError(f"{name} must be at least {low}, got {value!r}.")


def _types(field):
    """The types that a field's values may have."""
    return typing.get_args(field.type) or (field.type,)


def _sections(section):
    """A section and all that are in it."""
    yield section
    for field in dataclasses.fields(section):
        if isinstance(value := getattr(section, field.name), Section):
            yield from _sections(value)
