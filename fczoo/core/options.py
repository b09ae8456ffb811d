"""Hyper-parameters: dataclass fields with a meaning and limits, and their parser for text."""

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

Instance = TypeVar("Instance")

MAX_FLOAT = 1e30  # of any option, so that what is computed from it in single precision is a number
MAX_INTEGER = 2**63 - 1  # of any whole number: 64 bits
# also .5 and 5., which JSON rejects
DECIMAL = re.compile(r"[+-]?(\d+\.?|\d*\.\d+)(e[+-]?\d+)?", re.ASCII)
MAX_QUOTED_CHARACTERS = 60  # characters of a wrong value that a message repeats
MAX_LISTED_NAMES = 20  # known names that a message lists at most
MIN_SIMILARITY = 0.5  # similarity from which a known name is proposed
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
    repeats: bool = False,
) -> Any:
    """Create a dataclass field with a one-line meaning and optional inclusive limits.

    Args:
        default: Default value of the option.
        meaning: Meaning in one line, shown by ``--help``.
        low: Smallest value.
        high: Largest value.
        quirk: Source of the deviation that the option switches on, or a mapping from each deviating
            value to its source; shown by ``fczoo list quirks``.
        group: Heading under which ``fczoo bench --help`` lists the option.
        tune: Search space of ``fczoo tune``: (lowest, highest, "log" or "linear"), or a list of
            values.
        kw_only: Whether the field is left out of positional arguments.
        repeats: Whether the option is a number of steps, which affects values but no shapes; a dry
            run uses ``low``.
    """
    metadata = {
        "meaning": meaning,
        "low": low,
        "high": high,
        "quirk": quirk,
        "group": group,
        "tune": tune,
        "repeats": repeats,
    }
    return dataclasses.field(default=default, metadata=metadata, kw_only=kw_only)


def with_fewest_steps(instance: Instance) -> Instance:
    """Return a copy whose options marked ``repeats`` are at their lowest value.

    Args:
        instance: Dataclass instance.
    """
    step_fields = [
        f for f in dataclasses.fields(typing.cast(Any, instance)) if f.metadata.get("repeats")
    ]
    lowest = {f.name: f.metadata["low"] for f in step_fields}
    return typing.cast(Instance, dataclasses.replace(typing.cast(Any, instance), **lowest))


def build(
    cls: type[Instance],
    label: str,
    values: Mapping[str, Any],
    spelling_of: Callable[[str], str] | None = None,
) -> Instance:
    """Create ``cls(**values)`` with text parsed by the fields' types.

    Args:
        cls: Dataclass to create.
        label: Name of the class in messages, as ``LABEL.FIELD``.
        values: Value of each field, as text or in its type.
        spelling_of: Function from a field to the user's spelling of it (``rounds`` -> ``--rounds``)
            for messages.

    Raises:
        FczooError: A field is unknown (the message names the nearest one), a value does not fit, or
            the class does not define an abstract function.
    """
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    hints = _type_hints(cls)
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise FczooError(f"{label} has no option {quote(key)}; {nearest(key, fields)}")
        name = spelling_of(key) if spelling_of else f"{label}.{key}"
        arguments[key] = _parse(value, hints[key], name)
        _check_limits(arguments[key], fields[key], name)
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise FczooError(
            f"{cls.__qualname__} in {cls.__module__} does not define {', '.join(missing)}; define "
            "them"
        )
    return cls(**arguments)


def flag(field: str) -> str:
    """Return the command-line option of a setting: ``batch_size`` -> ``--batch-size``.

    Args:
        field: Name of the setting.
    """
    return f"--{field.replace('_', '-')}"


def spell_fields(names: Iterable[str], label: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with their keys in the spelling of ``names``; unknown keys stay.

    Args:
        names: Names of the fields.
        label: Name of the class for messages.
        values: Value of each key that the user gave.

    Raises:
        FczooError: Two keys are spellings of one name.
    """
    field_names, values_by_name = list(names), dict[str, Any]()
    user_spellings: dict[str, str] = {}
    for spelling, value in values.items():
        key = match(spelling, field_names) or spelling
        if key in values_by_name:
            problem = f"{label} has {user_spellings[key]!r} and {spelling!r}, the same option"
            raise FczooError(f"{problem}; leave one out")
        values_by_name[key], user_spellings[key] = value, spelling
    return values_by_name


class OptionDeclaration(typing.NamedTuple):
    """Declaration of an ``option`` field."""

    default: Any
    meaning: str
    quirk: str | Mapping[Any, str]


class Quirk(typing.NamedTuple):
    """A deviation that an option can switch on."""

    field: str
    value: Any
    place: str  # where it was seen
    meaning: str  # of the option


def dataclass_options(cls: type) -> dict[str, OptionDeclaration]:
    """Return the options of a dataclass by field.

    Args:
        cls: Dataclass whose fields come from ``option``.
    """
    fields = [f for f in dataclasses.fields(cls) if "meaning" in f.metadata]
    return {
        f.name: OptionDeclaration(f.default, f.metadata["meaning"], f.metadata["quirk"])
        for f in fields
    }


def quirks(options: Mapping[str, OptionDeclaration]) -> list[Quirk]:
    """Return every deviation that some options can switch on.

    Args:
        options: Declaration of each option by field.
    """
    deviations = []
    for field, (_, meaning, quirk) in options.items():
        values = quirk if isinstance(quirk, Mapping) else {True: quirk} if quirk else {}
        deviations += [Quirk(field, value, source, meaning) for value, source in values.items()]
    return deviations


def spaces(cls: type) -> dict[str, Space]:
    """Return the search space of ``fczoo tune`` for the options of a dataclass.

    Args:
        cls: Dataclass whose fields come from ``option``.
    """
    search_spaces = {field.name: field.metadata.get("tune") for field in dataclasses.fields(cls)}
    return {name: space for name, space in search_spaces.items() if space is not None}


_HINTS: dict[Any, dict[str, Any]] = {}


def _type_hints(cls: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, cached because large files need them often."""
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def check_options(instance: Any) -> None:
    """Check the fields of a dataclass instance, and convert NumPy values and paths.

    Args:
        instance: Dataclass instance; its fields are overwritten by their ``plain`` values.

    Raises:
        FczooError: A field has the wrong type or is outside its limits.
    """
    hints = _type_hints(type(instance))
    for field in dataclasses.fields(instance):
        label = f"{getattr(instance, 'name', '') or type(instance).__name__}.{field.name}"
        setting = plain(getattr(instance, field.name))
        object.__setattr__(instance, field.name, setting)
        value = _parse(setting, hints[field.name], label)
        if value != setting:  # a word or list that only build() reads
            raise FczooError(
                f"{label} is {quote(setting)}; it must be "
                f"{describe_type(hints[field.name], TYPE_WORDS)}"
            )
        _check_limits(value, field, label)


def _check_limits(value: Any, field: dataclasses.Field[Any], label: str) -> None:
    low, high = field.metadata.get("low"), field.metadata.get("high")
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        largest = MAX_FLOAT if isinstance(number, float) else MAX_INTEGER
        if (low is not None and number < low) or (high is not None and number > high):
            raise FczooError(f"{label} is {quote(number)}; it must be {_limits(low, high)}")
        if abs(number) > largest:
            raise FczooError(f"{label} is {quote(number)}; it must be at most {largest}")


def plain(value: Any) -> Any:
    """Convert paths and devices to text, and NumPy numbers and arrays to Python's.

    Args:
        value: Any value; one of another type is returned unchanged.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("torch", "device"):
        return str(value)
    return value.tolist() if kind.__module__ == "numpy" and hasattr(value, "tolist") else value


def quote(value: Any) -> str:
    """Format a value for messages; a long one is cut.

    Args:
        value: Any value.
    """
    text = repr(value)
    return (
        text
        if len(text) <= MAX_QUOTED_CHARACTERS
        else f"{text[:MAX_QUOTED_CHARACTERS]}... ({len(text)} characters)"
    )


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: ``1 setting`` or ``2 settings``.

    Args:
        number: Number of things.
        noun: Noun in the singular.
        nouns: Plural, for a noun whose plural does not end in s.
    """
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def nearest(word: str, names: Iterable[str]) -> str:
    """Return advice for an unknown name: similar names, else all names, the most similar first.

    Args:
        word: Unknown name.
        names: Known names.
    """
    candidates, key = sorted(names), fold(word)
    similarity = {
        name: difflib.SequenceMatcher(None, key, fold(name)).ratio() for name in candidates
    }
    by_similarity = sorted(candidates, key=lambda name: -similarity[name])
    parts = [name for name in by_similarity if len(key) > 3 and key in fold(name)]
    similar_names = [name for name in by_similarity if similarity[name] >= MIN_SIMILARITY]
    if proposals := list(dict.fromkeys([*parts, *similar_names]))[:3]:
        return f"did you mean {', '.join(proposals)}?"
    if len(candidates) <= MAX_LISTED_NAMES:
        return f"known: {', '.join(candidates) or 'none'}"
    names = ", ".join(by_similarity[:MAX_LISTED_NAMES])
    return f"known: {names}, ... ({len(candidates) - MAX_LISTED_NAMES} more)"


TYPE_WORDS = {int: "a whole number", float: "a finite number"}  # in an error


def describe_type(hint: Any, words: Mapping[Any, str] = types.MappingProxyType({})) -> str:
    """Format a type for users: ``float``, ``sum | first``, ``int, ...``.

    Args:
        hint: Type of a field.
        words: Type -> text that replaces its name.
    """
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        item = describe_type(kind, words)
        items = f"{item.removeprefix('a ')}s" if kind in words else item
        return f"a list of {items}" if words else f"{item}, ..."
    if typing.get_origin(hint) in _UNIONS:
        return " | ".join(describe_type(a, words) for a in typing.get_args(hint))
    return "none" if hint is types.NoneType else words.get(hint, hint.__name__)


def _limits(low: float | None, high: float | None) -> str:
    low_text, high_text = (
        str(n) if isinstance(n, int) else f"{n:g}" for n in (low or 0, high or 0)
    )
    if low is None:
        return f"at most {high_text}"
    return f"at least {low_text}" if high is None else f"between {low_text} and {high_text}"


def _parse(given: Any, hint: Any, label: str) -> Any:
    value = plain(given)
    if typing.get_origin(hint) in _UNIONS:
        is_none = value is None or (isinstance(value, str) and value.lower() == "none")
        if is_none and types.NoneType in typing.get_args(hint):
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
            value = _parse_word(value)
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1e308 else math.inf
        if (
            isinstance(value, hint)
            and not (hint is int and isinstance(value, bool))
            and not (hint is float and not math.isfinite(value))
        ):
            return value
    raise FczooError(f"{label} is {quote(given)}; it must be {describe_type(hint, TYPE_WORDS)}")


def _parse_word(word: str) -> Any:
    plain = word.strip().lower()
    if plain in ("on", "off"):
        return plain == "on"
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):  # no JSON, or brackets without end
        return float(plain) if DECIMAL.fullmatch(plain) else word


def spell(value: Any) -> str:
    """Return the shortest text that ``build`` parses to a value: ``0.5``, ``10``, ``on``.

    Args:
        value: Value of an option; None becomes ``none``, a list becomes ``1,2``.
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ",".join(map(spell, value))
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    return "none" if value is None else str(value)
