"""Options with several values: ``--sweep NAME=VALUE,VALUE`` and ``--zip``."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fczoo.cli.config import BACKBONE_SETTINGS, Request, merge_requests
from fczoo.cli.other_tools import check_fields, option_owners
from fczoo.core.errors import FczooError
from fczoo.core.names import join_first_names, match
from fczoo.core.options import flag, nearest, plain, plural, quote
from fczoo.core.registry import METHODS
from fczoo.federation.settings import Settings
from fczoo.reports.run_config import RunConfig
from fczoo.reports.runs import WITHOUT_EFFECT
from fczoo.reports.text_format import option_word, sweep_word
from fczoo.runner.configs import Sweep, folder_name

BACKBONE = "backbone."  # ``backbone.image_size`` is the setting ``image_size``
LIST_OPTIONS = ("dataset", "partition", "methods", "seeds")
"""Options of ``fczoo bench`` whose own values are lists."""
MAX_NAME_LENGTH = 200  # characters of a folder's name; file systems allow 255
FOLDER_WITHOUT_AXES = "others"  # folder of methods without an axis, if no setting is swept
SWEEP_SYNTAX = "write METHOD.OPTION=VALUE,VALUE or SETTING=VALUE,VALUE, e.g. hgp.lr=0.01,0.1"


@dataclass(frozen=True)
class Axis:
    """Axis of a sweep: an option of a method, or a setting, with its values as text."""

    method: str  # empty for a setting
    option: str
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return ``METHOD.OPTION``, or the name of a setting."""
        return f"{self.method}.{self.option}" if self.method else self.option

    def request(self, word: str) -> Request:
        """Return the request that gives the option one value.

        Args:
            word: One of the values.
        """
        return {"set": {self.method: {self.option: word}}} if self.method else {self.option: word}

    def value(self, config: RunConfig) -> str:
        """Return the value of a run as text.

        Args:
            config: Run of the axis's method.
        """
        value = config.options[self.option] if self.method else vars(config.settings)[self.option]
        items = value if isinstance(value, list | tuple) else [value]
        return "-".join(option_word(plain(item)) for item in items)


Row = tuple[tuple[Axis, str], ...]
"""One value of each axis."""


def parse_axes(sweep: Sequence[str] | Mapping[str, Any]) -> list[Axis]:
    """Parse values of ``--sweep``.

    Args:
        sweep: Words such as ``hgp.lr=0.01,0.1``, or the table of a settings file.

    Returns:
        One axis per word.

    Raises:
        FczooError: A word cannot be read, a name is unknown or occurs twice, or a list is empty.
    """
    if isinstance(sweep, Mapping):
        sweep = [
            f"{name}={sweep_word(values if isinstance(values, list) else [values])}"
            for name, values in _leaves(sweep)
        ]
    axes = [_parse_axis(word) for word in sweep]
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise FczooError(f"--sweep has {name} twice; give all of its values in one list")
    return axes


def _leaves(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the lists of a table by name, those of a method as ``METHOD.OPTION``."""
    return [
        leaf
        for name, value in table.items()
        for leaf in (
            [(f"{name}.{option}", v) for option, v in value.items()]
            if isinstance(value, Mapping)
            else [(name, value)]
        )
    ]


def _parse_axis(word: str) -> Axis:
    target, sign, text = word.partition("=")
    target = target.strip()
    if not (sign and target):
        raise FczooError(f"cannot read --sweep {quote(word)}; {SWEEP_SYNTAX}")
    method, option = _parse_name(target, word)
    return Axis(method, option, tuple(_split_values(text, word)))


def _parse_name(target: str, word: str) -> tuple[str, str]:
    """Return the registered names of a method and its option, or "" and a setting."""
    method, dot, option = target.partition(".")
    if target.lower().startswith(BACKBONE):
        method, dot, option = "", "", match(option, BACKBONE_SETTINGS) or target
    if dot:
        name = METHODS.find(method)
        if name is None:
            raise FczooError(
                f"--sweep {target}: no method is called {quote(method)}; "
                f"{nearest(method, METHODS.names())}"
            )
        options = METHODS.options(name)
        option_name = match(option, options)
        if option_name is None:
            check_fields(name, options, [option])
            raise FczooError(f"{name} has no option {quote(option)}; {nearest(option, options)}")
        return name, option_name
    option = option or target
    if name := match(option, LIST_OPTIONS):
        raise FczooError(f"--sweep {target}: give several values as {flag(name)} VALUE,VALUE")
    settings = [f.name for f in fields(Settings)]
    setting = match(option.removeprefix("--"), settings)
    if setting is None:
        owners = option_owners(target)
        if owners:
            option_name = owners[next(iter(owners))]
            raise FczooError(
                f"cannot read --sweep {quote(word)}: {option_name} is an option of "
                f"{join_first_names(list(owners))}; write METHOD.{option_name}=VALUE,VALUE"
            )
        raise FczooError(
            f"--sweep: no setting is called {quote(target)} (write METHOD.OPTION for an option of "
            f"a method); {nearest(target, settings)}"
        )
    if setting in WITHOUT_EFFECT:
        raise FczooError(
            f"--sweep {setting}: {flag(setting)} is not a hyper-parameter; for several values "
            "write [[cells]] in a settings file, see --config"
        )
    return "", setting


def _split_values(text: str, word: str) -> list[str]:
    """Split at commas outside of parentheses; ``(0,1),(0,1,2)`` has two values."""
    values, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth < 0:
            break
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    if depth != 0:
        raise FczooError(f"--sweep {quote(word)} has an unmatched parenthesis; add the other one")
    values = [value.strip() for value in values]
    if values == [""]:
        raise FczooError(f"--sweep {quote(word)} has no value; {SWEEP_SYNTAX}")
    if "" in values:
        raise FczooError(f"--sweep {quote(word)} has an empty entry; remove it and its comma")
    return [
        value[1:-1].rstrip(",") if value[0] == "(" and value[-1] == ")" else value
        for value in values
    ]


def combine_axes(axes: Sequence[Axis], zipped: bool) -> list[Row]:
    """Return the rows of a sweep: all combinations of values, or one row per position.

    Args:
        axes: Axes of the sweep.
        zipped: Whether to combine the i-th values of all axes only.

    Raises:
        FczooError: A value occurs twice, or lists to zip have unequal lengths.
    """
    if zipped:
        lengths = {axis.name: len(axis.values) for axis in axes}
        if len(axes) < 2:
            raise FczooError("--zip needs two or more --sweep; add another, or leave --zip out")
        if len(set(lengths.values())) > 1:
            counts = ", ".join(
                f"{plural(count, 'value')} of {name}" for name, count in lengths.items()
            )
            raise FczooError(f"--zip needs lists of equal length, but there are {counts}")
    rows = [
        tuple(zip(axes, words, strict=True))
        for words in (zip if zipped else itertools.product)(*(axis.values for axis in axes))
    ]
    for row in rows:
        if rows.count(row) > 1:
            axis, text = next((a, w) for a, w in row if zipped or a.values.count(w) > 1)
            raise FczooError(f"--sweep has {axis.name}={text} twice; leave one out")
    return rows


def sweep_axes(
    request: Request, rows: Sequence[Row], make_sweep: Callable[[Request], Sweep]
) -> dict[Path, Sequence[RunConfig]]:
    """Return the runs of all rows of a sweep.

    A method runs once per combination of settings and its own options; axes of other methods do not
    multiply its runs.

    Args:
        request: Options without the swept ones.
        rows: Values of the axes.
        make_sweep: Function that returns the runs of a request by folder.

    Returns:
        Runs by folder: one level for the values, then those of ``make_sweep``.

    Raises:
        FczooError: A value is invalid, two values are the same, or two folders have the same name.
    """
    sweep: dict[Path, Sequence[RunConfig]] = {}
    order: dict[Path, tuple[int, int]] = {}  # by settings, then by method
    finished_rows = set[tuple[str, Row]]()
    all_settings = list(dict.fromkeys(_values_of_method(row, "") for row in rows))
    with _name_sweep_in_errors(rows[0]):
        first_runs = make_sweep(merge_requests(request, *_requests(all_settings[0])))
    names = list(dict.fromkeys(config.method for runs in first_runs.values() for config in runs))
    for row in rows:
        settings_row = _values_of_method(row, "")
        by_row: dict[Row, list[str]] = {}
        for method in names:
            method_row = _values_of_method(row, method)
            if (method, method_row) not in finished_rows:
                finished_rows.add((method, method_row))
                by_row.setdefault(method_row, []).append(method)
        for method_row, methods in by_row.items():
            changes = _requests(method_row)
            with _name_sweep_in_errors(row):
                runs_by_folder = make_sweep(merge_requests(request, {"methods": methods}, *changes))
            for folder, runs in runs_by_folder.items():
                row_folder = _folder([axis for axis, _ in method_row], runs[0])
                if row_folder / folder in sweep:
                    raise FczooError(f"--sweep gives {row_folder.name} twice; leave one out")
                sweep[row_folder / folder] = runs
                order[row_folder / folder] = (
                    all_settings.index(settings_row),
                    names.index(methods[0]),
                )
    return {folder: sweep[folder] for folder in sorted(sweep, key=order.__getitem__)}


def _requests(row: Row) -> list[Request]:
    """Return a request per value of a row."""
    return [axis.request(word) for axis, word in row]


def _values_of_method(row: Row, method: str) -> Row:
    """Return the values of a row that are settings or options of a method."""
    return tuple((axis, word) for axis, word in row if axis.method in ("", method))


@contextmanager
def _name_sweep_in_errors(row: Row) -> Iterator[None]:
    """Replace the option in errors about a value by ``--sweep``, where the user gave the value."""
    try:
        yield
    except FczooError as error:
        for axis, _ in row:
            option = f"--set {axis.name} " if axis.method else f"{flag(axis.option)} "
            if str(error).startswith(option):
                problem = str(error).removeprefix(option)
                raise FczooError(f"--sweep {axis.name} {problem}") from error
        raise


def _folder(axes: Sequence[Axis], config: RunConfig) -> Path:
    """Return the folder of one row of a sweep."""
    name = ",".join(f"{axis.name}={folder_name(axis.value(config))}" for axis in axes)
    if len(name) > MAX_NAME_LENGTH:
        raise FczooError(
            f"the folder name of this --sweep is longer than {MAX_NAME_LENGTH} characters; write "
            "some options as [[cells]] of a settings file, see --config"
        )
    return Path(name or FOLDER_WITHOUT_AXES)


def check_axes(axes: Sequence[Axis], layers: Sequence[Request], methods: set[str]) -> None:
    """Check axes against the other options.

    Args:
        axes: Axes of the sweep.
        layers: Requests that must not set an option of an axis.
        methods: Methods that run.

    Raises:
        FczooError: An option of an axis is also set, or its method does not run.
    """
    for axis in axes:
        if axis.method and axis.method not in methods:
            raise FczooError(
                f"--sweep {axis.name}: {axis.method} is not a method of this run; "
                f"{nearest(axis.method, methods)}"
            )
        for layer in layers:
            layer_options = layer.get("set", {}).get(axis.method, {}) if axis.method else layer
            if axis.option in layer_options:
                option = f"--set {axis.name}" if axis.method else flag(axis.option)
                raise FczooError(f"{option} and --sweep {axis.name} are both given; leave one out")
