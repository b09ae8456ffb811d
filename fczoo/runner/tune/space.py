"""Search spaces of hyper-parameters: values, spread over a space, suggestions of a trial."""

from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import qmc

from fczoo.core.errors import FczooError
from fczoo.core.options import Space

RATES = ("head_lr",)  # options that are as ``lr`` where they are none


def around(space: Mapping[str, Space], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the space as plain values, widened to contain the method's default."""
    values: dict[str, Any] = {}
    for name, domain in space.items():
        default = options[name]
        if isinstance(domain, tuple):
            anchor = default if default is not None else domain[0]
            values[name] = [min(domain[0], anchor), max(domain[1], anchor), domain[2]]
        else:
            values[name] = [*domain, *([] if default in domain else [default])]
    return values


def own_values(space: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the method's default values; a rate of none is ``lr``.

    Raises FczooError for another option that is none: the method's defaults could not be a trial.
    """
    defaults = {
        name: options["lr"] if options[name] is None and name in RATES else options[name]
        for name in space
    }
    if missing := [
        name for name, value in defaults.items() if value is None and None not in space[name]
    ]:
        raise FczooError(
            f"{missing[0]} is none by default, no point of its space; tune another option, or "
            "--set it"
        )
    return defaults


def spread(space: Mapping[str, Sequence[Any]], number: int) -> dict[str, Any]:
    """Return a point of Sobol's sequence in the space; the first is the middle."""
    point = qmc.Sobol(len(space), scramble=False).fast_forward(number).random()[0]
    values: dict[str, Any] = {}
    for share, (name, domain) in zip(point.tolist(), space.items(), strict=True):
        if not _range(domain):
            values[name] = domain[int(share * len(domain))]
        elif domain[-1] == "log":
            values[name] = domain[0] * (domain[1] / domain[0]) ** share
        else:
            values[name] = domain[0] + share * (domain[1] - domain[0])
    return values


def suggest(trial: Any, space: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the point that Optuna's trial suggests."""
    return {name: _suggest_value(trial, name, domain) for name, domain in space.items()}


def _suggest_value(trial: Any, name: str, where: Sequence[Any]) -> Any:
    if _range(where):
        return trial.suggest_float(name, where[0], where[1], log=where[-1] == "log")
    return trial.suggest_categorical(name, where)


def _range(where: Sequence[Any]) -> bool:
    """Return whether a part of a space is a range; else it lists its values."""
    return len(where) == 3 and where[-1] in ("log", "linear") and not isinstance(where[0], str)
