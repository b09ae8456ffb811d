"""Hyper-parameters: dataclass fields that know their meaning, their limits and how to be read from a word."""

import dataclasses
import difflib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from fczoo.core.errors import FczooError
from fczoo.core.names import fold, match

Made = TypeVar("Made")

LARGEST = 1e30  # of any option, so that what is computed from it in single precision is a number
WIDEST = 2**63 - 1  # of any whole number: 64 bits
DECIMAL = re.compile(r"[+-]?(\d+\.?|\d*\.\d+)(e[+-]?\d+)?", re.ASCII)  # .5 and 5. too, which JSON refuses
QUOTED = 60  # characters of a wrong value that a message repeats
LISTED = 20  # known names that a message lists at most
CLOSE = 0.5  # similarity from which a known name is proposed
Space = tuple[float, float, Literal["log", "linear"]] | list[Any]
_UNIONS = (types.UnionType, typing.Union)


def option(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    quirk: str | Mapping[Any, str] = "",
    group: str = "",
    tune: Space | None = None,
    kw_only: bool = False,
) -> Any:
    """A dataclass field with a one-line meaning (shown by ``fczoo show``) and optional inclusive limits.

    ``quirk`` says where the deviation that the option switches on was seen, or for each value that is one
    (shown by ``fczoo list quirks``). ``group`` is the heading under which ``fczoo bench --help`` lists it.
    ``tune`` is where ``fczoo tune`` looks: (lowest, highest, "log" or "linear"), or a list of values.
    ``kw_only`` keeps the field out of positional arguments.
    """
    metadata = {"meaning": meaning, "low": low, "high": high, "quirk": quirk, "group": group, "tune": tune}
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


def build(
    cls: type[Made], label: str, values: Mapping[str, Any], spelled: Callable[[str], str] | None = None
) -> Made:
    """``cls(**values)`` with words parsed by the fields' types.

    ``spelled`` says how users write a field (``rounds`` -> ``--rounds``); without it, messages say
    ``LABEL.FIELD``.
    Raises FczooError for an unknown field, naming the nearest one, for a value that does not fit, and for a
    class that lacks a function.
    """
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    hints = typing.get_type_hints(cls)
    parsed = {}
    for key, value in values.items():
        if key not in fields:
            raise FczooError(f"{label} has no option {quoted(key)}; {nearest(key, fields)}")
        name = spelled(key) if spelled else f"{label}.{key}"
        parsed[key] = _parse(value, hints[key], name)
        _check_limits(parsed[key], fields[key], name)
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise FczooError(
            f"{cls.__qualname__} in {cls.__module__} does not define {', '.join(missing)}; define them"
        )
    return cls(**parsed)


def flag(field: str) -> str:
    """How the command line spells a setting: ``batch_size`` -> ``--batch-size``."""
    return f"--{field.replace('_', '-')}"


def spell_fields(names: Iterable[str], label: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` under the spelling that ``names`` has of their keys; unknown keys stay.

    Raises FczooError where two keys are spellings of one name.
    """
    known, spelled = list(names), dict[str, Any]()
    given: dict[str, str] = {}
    for word, value in values.items():
        key = match(word, known) or word
        if key in spelled:
            problem = f"{label} has {given[key]!r} and {word!r}, which are one option"
            raise FczooError(f"{problem}; leave one out")
        spelled[key], given[key] = value, word
    return spelled


class Declared(typing.NamedTuple):
    """What ``option`` was told of a field."""

    default: Any
    meaning: str
    quirk: str | Mapping[Any, str]


class Quirk(typing.NamedTuple):
    """A deviation that an option can switch on."""

    field: str
    value: Any
    place: str  # where it was seen
    meaning: str  # of the option


def declared(cls: type) -> dict[str, Declared]:
    """The options of a dataclass by field."""
    fields = [f for f in dataclasses.fields(cls) if "meaning" in f.metadata]
    return {f.name: Declared(f.default, f.metadata["meaning"], f.metadata["quirk"]) for f in fields}


def quirks(options: Mapping[str, Declared]) -> list[Quirk]:
    """Every deviation that some options can switch on."""
    found = []
    for field, (_, meaning, quirk) in options.items():
        values = quirk if isinstance(quirk, Mapping) else {True: quirk} if quirk else {}
        found += [Quirk(field, value, place, meaning) for value, place in values.items()]
    return found


def spaces(cls: type) -> dict[str, Space]:
    """Where ``fczoo tune`` looks for values of the options of a dataclass."""
    found = {field.name: field.metadata.get("tune") for field in dataclasses.fields(cls)}
    return {name: space for name, space in found.items() if space is not None}


def check_options(instance: Any) -> None:
    """Raise FczooError where a field of a dataclass instance has the wrong type or is outside its limits."""
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        label = f"{getattr(instance, 'name', '') or type(instance).__name__}.{field.name}"
        given = plain(getattr(instance, field.name))
        object.__setattr__(instance, field.name, given)
        value = _parse(given, hints[field.name], label)
        if value != given:  # a word or list that only build() reads
            raise FczooError(
                f"{label} is {quoted(given)}; it must be {describe_type(hints[field.name], IN_WORDS)}"
            )
        _check_limits(value, field, label)


def _check_limits(value: Any, field: dataclasses.Field[Any], label: str) -> None:
    low, high = field.metadata.get("low"), field.metadata.get("high")
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        largest = LARGEST if isinstance(number, float) else WIDEST
        if (low is not None and number < low) or (high is not None and number > high):
            raise FczooError(f"{label} is {quoted(number)}; it must be {_limits(low, high)}")
        if abs(number) > largest:
            raise FczooError(f"{label} is {quoted(number)}; it must be at most {largest}")


def plain(value: Any) -> Any:
    """Return paths and devices as words, and numbers and arrays of NumPy as those of Python."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("torch", "device"):
        return str(value)
    return value.tolist() if kind.__module__ == "numpy" and hasattr(value, "tolist") else value


def quoted(value: Any) -> str:
    """A value as messages repeat it: its beginning, where it is long."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}... ({len(text)} characters)"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return ``1 setting`` or ``2 settings``; ``nouns`` is the plural where it does not end in s."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def nearest(word: str, names: Iterable[str]) -> str:
    """Return advice after an unknown name: the close names, else all with the likeliest first."""
    known, key = sorted(names), fold(word)
    likeness = {name: difflib.SequenceMatcher(None, key, fold(name)).ratio() for name in known}
    ranked = sorted(known, key=lambda name: -likeness[name])
    parts = [name for name in ranked if len(key) > 3 and key in fold(name)]
    close = [name for name in ranked if likeness[name] >= CLOSE]
    if proposed := list(dict.fromkeys([*parts, *close]))[:3]:
        return f"did you mean {', '.join(proposed)}?"
    if len(known) <= LISTED:
        return f"known: {', '.join(known) or 'none'}"
    return f"known: {', '.join(ranked[:LISTED])}, ... ({len(known) - LISTED} more)"


IN_WORDS = {int: "a whole number", float: "a finite number"}  # in an error


def describe_type(hint: Any, words: Mapping[Any, str] = types.MappingProxyType({})) -> str:
    """A type as users read it: ``float``, ``sum | first``, ``int, ...``; or what ``words`` has for one."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"{describe_type(typing.get_args(hint)[0], words)}, ..."
    if typing.get_origin(hint) in _UNIONS:
        return " | ".join(describe_type(a, words) for a in typing.get_args(hint))
    return "none" if hint is types.NoneType else words.get(hint, hint.__name__)


def _limits(low: float | None, high: float | None) -> str:
    least, most = (str(n) if isinstance(n, int) else f"{n:g}" for n in (low or 0, high or 0))
    if low is None:
        return f"at most {most}"
    return f"at least {least}" if high is None else f"between {least} and {most}"


def _parse(given: Any, hint: Any, label: str) -> Any:
    value = plain(given)
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
            value = value.strip("[]() ").removesuffix(",").split(",")
            value = value if any(v.strip() for v in value) else []
        if isinstance(value, list | tuple) and "" not in (str(v).strip() for v in value):
            return tuple(_parse(v, typing.get_args(hint)[0], label) for v in value)
    else:
        if isinstance(value, str) and hint is not str:
            value = _word(value)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1e308 else math.inf
        if (
            isinstance(value, hint)
            and not (hint is int and isinstance(value, bool))
            and not (hint is float and not math.isfinite(value))
        ):
            return value
    raise FczooError(f"{label} is {quoted(given)}; it must be {describe_type(hint, IN_WORDS)}")


def _word(word: str) -> Any:
    plain = word.strip().lower()
    if plain in ("on", "off"):
        return plain == "on"
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):  # no JSON, or brackets without end
        return float(plain) if DECIMAL.fullmatch(plain) else word


def spell(value: Any) -> str:
    """Return the shortest word from which ``build`` reads a value: ``0.5``, ``10``, ``on``, ``none``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ",".join(map(spell, value))
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return "none" if value is None else str(value)
