"""Settings files of ``fczoo bench``: TOML with its options and cells,
or the ``bench.json`` of a run folder.
"""

import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fczoo.cli.arguments import BACKBONE, parse_changes, spell_options
from fczoo.cli.pointers import option_pointer
from fczoo.core.errors import FczooError, first_line
from fczoo.core.names import match
from fczoo.core.options import flag, nearest, quoted

Request = dict[str, Any]  # options of ``fczoo bench`` by name, as words or plain values

BESIDES = ("methods", "seeds", "set", "name")  # what a cell may say besides settings
OF_BACKBONE = ("image_size", "mean", "std")  # settings that ``--set backbone.NAME=VALUE`` gives, too
LISTS = ("methods", "dataset", "partition", "log", "cluster")
WORDS = ("protocol", "as_released", "out", "name", "tuned", "executor")
SWITCHES = ("resume", "diagnostics", "dry_run", "skip_failed", "accept_changed_code")


def read_config(
    path: Path, settings: Collection[str], options: Collection[str]
) -> tuple[Request, list[Request]]:
    """The options of a file, and those of each of its cells.

    ``settings`` may stand anywhere in it, ``options``, those of ``fczoo bench``, outside of cells. Raises
    FczooError for a file that cannot be read, and for an unknown option, naming the nearest one.
    """
    if path.name == "bench.json":
        return request_of_run(path), []
    if path.suffix != ".toml":
        raise FczooError(
            f"--config {path} is no settings file; give a .toml file or the bench.json of a run folder"
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FczooError(f"no settings file at {path}") from None
    except (ValueError, RecursionError) as error:
        raise FczooError(f"{path} is no valid TOML: {first_line(error)}") from error
    cells = content.pop("cells", [])
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise FczooError(f"{path}: cells is no list of tables; write [[cells]] above the options of each")
    shared = request(content, options, str(path))
    return shared, [request(c, {*settings, *BESIDES}, f"cell {i} of {path}") for i, c in enumerate(cells, 1)]


def request(given: Mapping[str, Any], known: Collection[str], place: str) -> Request:
    """Options of one layer by name.

    Raises FczooError for an unknown one and for a value that is of no use there.
    """
    out: Request = {}
    for key, value in given.items():
        name = key.lower().replace("-", "_")
        if name not in known:
            advice = option_pointer(key, known) or nearest(key, known)
            raise FczooError(f"{place}: no option is called {quoted(key)}; {advice}")
        if name in out:
            raise FczooError(f"{place}: {key} is given twice, in two spellings; leave one out")
        if wanted := _wanted(name, value):
            raise FczooError(f"{place}: {key} is {quoted(value)}; it must be {wanted}")
        out[name] = value
    changes = out.pop("set", {})
    changes = spell_options(changes) if isinstance(changes, dict) else parse_changes(changes)
    for field, value in changes.pop(BACKBONE, {}).items():
        setting = match(field, OF_BACKBONE)
        if setting is None:
            raise FczooError(f"--set backbone.{field} is unknown; {nearest(field, OF_BACKBONE)}")
        out.setdefault(setting, value)
    return {**out, "set": changes}


def merged(*layers: Request) -> Request:
    """One request of several; later ones beat earlier ones, of ``set`` option by option."""
    out: Request = {"set": {}}
    for layer in layers:
        changes = out["set"]
        for method, values in layer.get("set", {}).items():
            changes = {**changes, method: {**changes.get(method, {}), **values}}
        out |= {**layer, "set": changes}
    return out


def request_of_run(path: Path) -> Request:
    """What makes the runs of a folder again, from its ``bench.json``, whatever the defaults are today.

    Only where data and weights lie may have to be said: a run folder tells nobody.
    """
    from fczoo.cli.found import found_in_run  # imports torch
    from fczoo.reports.run_folder import PARTITION, read_about
    from fczoo.reports.runs import filled

    about = read_about(path.parent)
    settings = filled(about.settings)
    if settings["attack"] is None:
        del settings["attackers"]
    if settings["partition"].startswith("file:"):
        settings["partition"] = f"file:{path.parent / PARTITION}"
    words = {name: "none" if value is None else value for name, value in settings.items()}
    tuned = {"tuned": found_in_run(about)} if about.tuned else {}
    return {**words, **tuned, "methods": list(about.methods), "seeds": about.seeds, "set": about.methods}


def _wanted(name: str, value: Any) -> str:
    """What a value should be and is not; empty where it is fine, or where ``Settings`` will tell."""
    listed = isinstance(value, list) and all(isinstance(v, str) for v in value)
    if name in LISTS and not (listed or isinstance(value, str)):
        return "a word, or a list of words"
    if name in WORDS and not isinstance(value, str):
        return "a word"
    if name in SWITCHES and not isinstance(value, bool):
        return "true or false"
    if name == "seeds" and not (isinstance(value, int | str) or listed or _whole(value)):
        return 'a whole number, a list of them, or a range such as "0-4"'
    tables = isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())
    if name == "set" and not (listed or tables):
        return f"a table for each method, or a list of METHOD.FIELD=VALUE ({flag(name)})"
    return ""


def _whole(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) for v in value)
