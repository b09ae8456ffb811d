"""The options of a method in a row of a table, by whose choice they are."""

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
class Chosen:
    """The options that are not the method's defaults, or not what they would be where the user gave none."""

    by_user: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)  # by the protocol or released code
    for_dataset: dict[str, Any] = field(default_factory=dict)  # the method's own values for it
    followed: str = ""  # the names of protocol and released code


def chosen(line: Line) -> Chosen:
    """What a row's options are; nothing for a method that is not installed here."""
    name, options = line.cells[0].method, line.results[0].options
    if name not in METHODS.names():
        return Chosen()
    cls, settings = METHODS.get(name), line.cells[0].about.settings
    defaults = through_json({f.name: f.default for f in fields(cls)})
    usual = through_json(dict(cls.tuned.get(settings["dataset"], {})))
    followed, stated = _followed(settings, name)
    expected = {**defaults, **usual, **stated}
    by_user = {k: v for k, v in options.items() if k in defaults and v != expected[k]}
    kept = {k: v for k, v in options.items() if k in defaults and k not in by_user and v != defaults[k]}
    return Chosen(
        by_user,
        {k: v for k, v in kept.items() if k in stated},
        {k: v for k, v in kept.items() if k not in stated},
        followed,
    )


def changes(line: Line, stated: Collection[str] = ()) -> int:
    """How many options a user gave a row other than the method has under its protocol and on its data set.

    Numbers for which ``fczoo tune`` looks do not count: with other rates a method is still itself, with
    another switch or start it may not be; nor do ``stated`` options. 0 for a method that is not installed
    here.
    """
    given = {name: value for name, value in chosen(line).by_user.items() if name not in stated}
    searched = spaces(METHODS.get(line.cells[0].method)) if given else {}
    return sum(name not in searched or isinstance(value, bool | str) for name, value in given.items())


def _followed(settings: dict[str, Any], method: str) -> tuple[str, dict[str, Any]]:
    """Words for the protocol and released code that a run followed, and what they have for its method.

    Nothing for those that are not there.
    """
    try:
        made = recorded_settings(settings)
        return ", ".join(made.followed), through_json(made.method_options(method))
    except FczooError:  # of a plug-in that is not installed here
        return "", {}
