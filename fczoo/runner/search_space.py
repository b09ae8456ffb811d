"""Where ``fczoo tune`` looks: the space of a method's options, and points of it, as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import qmc

from fczoo.core.errors import FczooError
from fczoo.core.options import Space

RATES = ("head_lr",)  # options that are as ``lr`` where they are none


def around(space: Mapping[str, Space], options: Mapping[str, Any]) -> dict[str, Any]:
    """The space, as plain values, widened where the method's own value lies outside."""
    found: dict[str, Any] = {}
    for name, where in space.items():
        own = options[name]
        if isinstance(where, tuple):
            known = own if own is not None else where[0]
            found[name] = [min(where[0], known), max(where[1], known), where[2]]
        else:
            found[name] = [*where, *([] if own in where else [own])]
    return found


def own_values(space: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own values; a rate that is none is that of the prompts, so ``lr``.

    Raises FczooError for another option that is none: the method as it comes could not be a trial.
    """
    own = {
        name: options["lr"] if options[name] is None and name in RATES else options[name] for name in space
    }
    if bare := [name for name, value in own.items() if value is None and None not in space[name]]:
        raise FczooError(
            f"{bare[0]} is none by default, no point of its space; tune another option, or --set it"
        )
    return own


def spread(space: Mapping[str, Sequence[Any]], number: int) -> dict[str, Any]:
    """A point of the space: that of Sobol's sequence with this number; the first is the middle."""
    point = qmc.Sobol(len(space), scramble=False).fast_forward(number).random()[0]
    values: dict[str, Any] = {}
    for share, (name, where) in zip(point.tolist(), space.items(), strict=True):
        if not _range(where):
            values[name] = where[int(share * len(where))]
        elif where[-1] == "log":
            values[name] = where[0] * (where[1] / where[0]) ** share
        else:
            values[name] = where[0] + share * (where[1] - where[0])
    return values


def suggest(trial: Any, space: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The point that Optuna's trial asks for."""
    return {name: _suggested(trial, name, where) for name, where in space.items()}


def _suggested(trial: Any, name: str, where: Sequence[Any]) -> Any:
    if _range(where):
        return trial.suggest_float(name, where[0], where[1], log=where[-1] == "log")
    return trial.suggest_categorical(name, where)


def _range(where: Sequence[Any]) -> bool:
    """Whether a part of a space goes from a lowest to a highest value; else it lists its values."""
    return len(where) == 3 and where[-1] in ("log", "linear") and not isinstance(where[0], str)
