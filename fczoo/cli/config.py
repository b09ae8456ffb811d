"""Settings files of ``fczoo bench``: TOML with options and cells, or a run's ``bench.json``."""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fczoo.cli.arguments import BACKBONE, parse_changes, spell_options
from fczoo.cli.other_tools import option_pointer
from fczoo.core.errors import FczooError, first_line
from fczoo.core.names import match
from fczoo.core.options import flag, nearest, quote
from fczoo.core.registry import DATASETS

Request = dict[str, Any]  # options of ``fczoo bench`` by name, as text or plain values

CELL_OPTIONS = ("methods", "seeds", "set", "name")  # options of a cell in addition to settings
# settings that ``--set backbone.NAME=VALUE`` can also set
BACKBONE_SETTINGS = ("image_size", "mean", "std")
LIST_OPTIONS = ("methods", "dataset", "partition", "log", "cluster")
STRING_OPTIONS = ("protocol", "as_released", "out", "name", "tuned", "executor", "keep_model")
SWITCHES = (
    *("resume", "diagnostics", "dry_run", "skip_failed", "accept_changed_code", "download"),
    *("no_keep_model", "keep_server_state", "zip"),
)


def read_config(
    path: Path, settings: Collection[str], options: Collection[str]
) -> tuple[Request, list[Request]]:
    """Read the options of a file and of each of its cells.

    Args:
        path: TOML file, or the ``bench.json`` of a run folder.
        settings: Names of settings, which are allowed anywhere in the file.
        options: Names of the options of ``fczoo bench``, which are allowed outside cells only.

    Returns:
        Options of the file, and those of each cell.

    Raises:
        FczooError: The file cannot be read, or an option is unknown; the message names the nearest
            one.
    """
    if path.name == "bench.json":
        return request_of_run(path), []
    if path.suffix != ".toml":
        raise FczooError(
            f"--config {path} is not a settings file; give a .toml file or the bench.json of a "
            "run folder"
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FczooError(f"no settings file at {path}") from None
    except (ValueError, RecursionError) as error:
        raise FczooError(f"{path} is not valid TOML: {first_line(error)}") from error
    cells = content.pop("cells", [])
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise FczooError(
            f"{path}: cells is not a list of tables; write [[cells]] above the options of each cell"
        )
    common_options = parse_request(content, options, str(path))
    return common_options, [
        parse_request(c, {*settings, *CELL_OPTIONS}, f"cell {i} of {path}")
        for i, c in enumerate(cells, 1)
    ]


def parse_request(values: Mapping[str, Any], known_names: Collection[str], place: str) -> Request:
    """Check the options of one layer, such as a file, and return them by registered name.

    Args:
        values: Values by name, in any spelling.
        known_names: Names of the allowed options.
        place: Name of the layer, for messages.

    Returns:
        Values by name; ``set`` has values by method and option.

    Raises:
        FczooError: An option is unknown or given twice, or a value has the wrong type.
    """
    out: Request = {}
    for key, value in values.items():
        name = key.lower().replace("-", "_")
        if name not in known_names:
            advice = option_pointer(key, known_names) or nearest(key, known_names)
            raise FczooError(f"{place}: no option is called {quote(key)}; {advice}")
        if name in out:
            raise FczooError(f"{place}: {key} is given twice, in two spellings; leave one out")
        if expected_type := _expected_type(name, value):
            raise FczooError(f"{place}: {key} is {quote(value)}; it must be {expected_type}")
        out[name] = value
    changes = out.pop("set", {})
    changes = spell_options(changes) if isinstance(changes, dict) else parse_changes(changes)
    for field, value in changes.pop(BACKBONE, {}).items():
        setting = match(field, BACKBONE_SETTINGS)
        if setting is None:
            raise FczooError(
                f"--set backbone.{field} is unknown; {nearest(field, BACKBONE_SETTINGS)}"
            )
        out.setdefault(setting, value)
    return {**out, "set": changes}


def merge_requests(*layers: Request) -> Request:
    """Merge requests; later ones override earlier ones, for ``set`` option by option.

    Args:
        layers: Requests, the most general one first.

    Returns:
        The merged request.
    """
    out: Request = {"set": {}}
    for layer in layers:
        changes = out["set"]
        for method, values in layer.get("set", {}).items():
            changes = {**changes, method: {**changes.get(method, {}), **values}}
        out |= {**layer, "set": changes}
    return out


def request_of_run(path: Path) -> Request:
    """Return the request that repeats the runs of a folder, from its ``bench.json``.

    It does not depend on current defaults. Users may have to add the paths of data and weights,
    since a run folder stores only their file names.

    Args:
        path: File ``bench.json``.

    Returns:
        The request.
    """
    from fczoo.data.partition_file import PARTITION
    from fczoo.reports.run_folder import read_bench_file
    from fczoo.reports.runs import with_defaults
    from fczoo.runner.tuned_file import tuned_values_of_run  # imports torch

    bench_file = read_bench_file(path.parent)
    settings = with_defaults(bench_file.settings)
    if settings["attack"] is None:
        del settings["attackers"]
    if settings["partition"].startswith("file:"):
        settings["partition"] = f"file:{path.parent / PARTITION}"
    words = {name: "none" if value is None else value for name, value in settings.items()}
    tuned_option = {"tuned": tuned_values_of_run(bench_file)} if bench_file.tuned else {}
    return {
        **words,
        **tuned_option,
        "methods": list(bench_file.methods),
        "seeds": bench_file.seeds,
        "set": bench_file.methods,
    }


def _expected_type(name: str, value: Any) -> str:
    """Describe the expected type if a value has the wrong one.

    Empty if the type is right, or if ``Settings`` checks it.
    """
    is_string_list = isinstance(value, list) and all(isinstance(v, str) for v in value)
    if name in LIST_OPTIONS and not (is_string_list or isinstance(value, str)):
        return "a string, or a list of strings"
    if name in STRING_OPTIONS and not isinstance(value, str):
        return "a string"
    if name in SWITCHES and not isinstance(value, bool):
        return "true or false"
    if name == "seeds" and not (
        isinstance(value, int | str) or is_string_list or _is_int_list(value)
    ):
        return 'a whole number, a list of them, or a range such as "0-4"'
    if name == "sweep" and not (is_string_list or isinstance(value, dict)):
        return "a table of lists, or a list of METHOD.FIELD=VALUE,VALUE"
    tables = isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())
    if name == "set" and not (is_string_list or tables):
        return f"a table for each method, or a list of METHOD.FIELD=VALUE ({flag(name)})"
    return ""


def _is_int_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) for v in value)


def default_protocol(
    dataset: str, options: Mapping[str, Any], on_cluster: bool = False
) -> dict[str, str]:
    """Return protocol ``quick`` for runs without a GPU, unless the user names a protocol.

    Other schedules take days on a CPU; that of digits is quick by default.

    Args:
        dataset: Name of the data set.
        options: Options by name.
        on_cluster: Whether runs execute on other machines, whose devices are unknown here.

    Returns:
        ``{"protocol": "quick"}``, or an empty dictionary.
    """
    if DATASETS.get(dataset).name == "digits" or options.keys() & {"protocol", "as_released"}:
        return {}
    from fczoo.federation.device import pick_device  # imports torch

    device = options.get("device", "auto")
    slow = device == "cpu" or (device == "auto" and pick_device("auto").type == "cpu")
    return {"protocol": "quick"} if slow and not on_cluster else {}
