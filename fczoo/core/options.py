"""Hyper-parameters: dataclass fields that know their meaning, their limits and how to be read from a word."""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from fczoo.core.errors import FczooError

LARGEST = 1e30  # of any option, so that what is computed from it in single precision is a number
_UNIONS = (types.UnionType, typing.Union)


def option(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    quirk: str | Mapping[Any, str] = "",
) -> Any:
    """A dataclass field with a one-line meaning (shown by ``fczoo show``) and optional inclusive limits.

    ``quirk`` says where the deviation that the option switches on was seen, or for each value that is one
    (shown by ``fczoo list quirks``).
    """
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "low": low, "high": high, "quirk": quirk}
    )


def build(cls: type, label: str, values: Mapping[str, Any]) -> Any:
    """``cls(**values)`` with words parsed by the fields' types.

    Raises FczooError for an unknown field, naming the nearest one, and for a value that does not fit.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    parsed = {}
    for key, value in values.items():
        if key not in fields:
            raise FczooError(f"{label} has no option {key!r}; {nearest(key, list(fields))}")
        parsed[key] = _parse(value, hints[key], f"{label}.{key}")
    return cls(**parsed)


def quirks(cls: type) -> list[tuple[str, Any, str]]:
    """(field, value, where it was seen) of every deviation that an option of a dataclass can switch on."""
    found: list[tuple[str, Any, str]] = []
    for field in dataclasses.fields(cls):
        quirk = field.metadata.get("quirk")
        if not quirk:
            continue
        values = quirk if isinstance(quirk, Mapping) else {True: quirk}
        found.extend((field.name, value, where) for value, where in values.items())
    return found


def check_options(instance: Any) -> None:
    """Raise FczooError where a field of a dataclass instance has the wrong type or is outside its limits."""
    hints = typing.get_type_hints(type(instance))
    owner = getattr(instance, "name", "") or type(instance).__name__
    for field in dataclasses.fields(instance):
        label, given = f"{owner}.{field.name}", getattr(instance, field.name)
        value = _parse(given, hints[field.name], label)
        if value != given:  # a word or list that only build() reads
            raise FczooError(f"{label} is {given!r}; it must be {describe_type(hints[field.name])}")
        low, high = field.metadata.get("low"), field.metadata.get("high")
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int | float):
                continue
            if (low is not None and number < low) or (high is not None and number > high):
                raise FczooError(f"{label} is {number}; it must be {_limits(low, high)}")
            if isinstance(number, float) and abs(number) > LARGEST:
                raise FczooError(f"{label} is {number}; it must be at most {LARGEST:g}")


def nearest(word: str, names: list[str]) -> str:
    """Advice after a misspelt word: "did you mean ...?", or the first 20 names where none is close."""
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {', '.join(close)}?"
    return f"known: {', '.join(sorted(names)[:20]) or 'none'}{', ...' if len(names) > 20 else ''}"


def describe_type(hint: Any) -> str:
    """A type as users read it: ``float``, ``sum | first``, ``int, int, ...``."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"{describe_type(typing.get_args(hint)[0])}, ..."
    if typing.get_origin(hint) in _UNIONS:
        return " | ".join(describe_type(a) for a in typing.get_args(hint))
    return "none" if hint is types.NoneType else hint.__name__


def _limits(low: float | None, high: float | None) -> str:
    if low is None:
        return f"at most {high:g}"
    return f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"


def _parse(value: Any, hint: Any, label: str) -> Any:
    if typing.get_origin(hint) in _UNIONS:
        if isinstance(value, str) and value.lower() == "none" and types.NoneType in typing.get_args(hint):
            return None
        for alternative in typing.get_args(hint):
            try:
                return _parse(value, alternative, label)
            except FczooError:
                continue
    elif typing.get_origin(hint) is typing.Literal:
        if value in typing.get_args(hint):
            return value
    elif typing.get_origin(hint) is tuple:
        if isinstance(value, str):
            value = [v for v in value.strip("[]() ").split(",") if v.strip()]
        if isinstance(value, list | tuple):
            return tuple(_parse(v, typing.get_args(hint)[0], label) for v in value)
    else:
        if isinstance(value, str) and hint is not str:
            value = _word(value)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if (
            isinstance(value, hint)
            and not (hint is int and isinstance(value, bool))
            and not (hint is float and not math.isfinite(value))
        ):
            return value
    raise FczooError(f"{label} is {value!r}; it must be {describe_type(hint)}")


def _word(word: str) -> Any:
    if word in ("on", "off"):
        return word == "on"
    try:
        return json.loads(word.strip().lower())
    except ValueError:
        return word
