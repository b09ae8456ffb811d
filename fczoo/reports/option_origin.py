"""Origin of a method's options in a row of a table: user, protocol, released code or data set."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from fczoo.core.errors import FczooError
from fczoo.core.files import through_json
from fczoo.core.options import spaces
from fczoo.core.registry import METHODS
from fczoo.reports.run_folder import recorded_settings
from fczoo.reports.runs import Line


@dataclass(frozen=True)
class OptionOrigin:
    """Options other than the method's defaults, or than their values without the user's choice."""

    by_user: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)  # by the protocol or released code
    for_dataset: dict[str, Any] = field(default_factory=dict)  # the method's own values for it
    source_names: str = ""  # the names of protocol and released code


def option_origin(line: Line) -> OptionOrigin:
    """Return the options of a row with their origin; empty if its method is not installed.

    Args:
        line: Row of a table.
    """
    name, options = line.cells[0].method, line.results[0].options
    if name not in METHODS.names():
        return OptionOrigin()
    cls, settings = METHODS.get(name), line.cells[0].about.settings
    defaults = through_json({f.name: f.default for f in fields(cls)})
    usual = through_json(dict(cls.dataset_options.get(settings["dataset"], {})))
    source_names, source_values = _source_values(settings, name)
    values_without_user = {**defaults, **usual, **source_values}
    by_user = {k: v for k, v in options.items() if k in defaults and v != values_without_user[k]}
    nondefault_options = {
        k: v for k, v in options.items() if k in defaults and k not in by_user and v != defaults[k]
    }
    return OptionOrigin(
        by_user,
        {k: v for k, v in nondefault_options.items() if k in source_values},
        {k: v for k, v in nondefault_options.items() if k not in source_values},
        source_names,
    )


def count_changes(line: Line, stated: Collection[str] = ()) -> int:
    """Count the options that a user changed from protocol and data set.

    Numbers for which ``fczoo tune`` looks do not count: with other rates a method is still itself,
    with another switch or start it may not be.

    Args:
        line: Row of a table.
        stated: Options that do not count.

    Returns:
        Number of options; 0 for a method that is not installed here.
    """
    user_options = {
        name: value for name, value in option_origin(line).by_user.items() if name not in stated
    }
    search_spaces = spaces(METHODS.get(line.cells[0].method)) if user_options else {}
    return sum(
        name not in search_spaces or isinstance(value, bool | str)
        for name, value in user_options.items()
    )


def _source_values(settings: dict[str, Any], method: str) -> tuple[str, dict[str, Any]]:
    """Return the followed protocol and released code, and their values for the run's method.

    Both are empty if a plug-in is missing.
    """
    try:
        run_settings = recorded_settings(settings)
        return ", ".join(run_settings.sources), through_json(run_settings.method_options(method))
    except FczooError:  # a plug-in is not installed here
        return "", {}
