"""Data sets ``hf:PLACE``: names, places, and files that Hugging Face's library ``datasets`` reads.

No file is unpickled: a place holds Arrow tables of ``save_to_disk``, or parquet files.
"""

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import fczoo
from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import home
from fczoo.data.folder_scan import TEST, TRAIN, find_named

PREFIX = "hf:"
ROLES = ("image", "label", "group")
"""Columns that a name can state: ``hf:PLACE,image=img,label=fine_label,group=hospital``."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+){0,2}")  # NAME, ORG/NAME or ORG/NAME/CONFIGURATION

Tables = dict[str, Any]  # split -> datasets.Dataset


def parse_source(text: str) -> tuple[str, dict[str, str]]:
    """Read ``PLACE,image=COLUMN,label=COLUMN,group=COLUMN``, the part of a name after ``hf:``.

    Args:
        text: Folder or name on the hub, and columns by role.

    Returns:
        The place, and the named columns.

    Raises:
        FczooError: A role is unknown or has no column.
    """
    location, _, columns = text.partition(",")
    return location.strip().rstrip("/"), parse_columns(columns)


def parse_columns(text: str) -> dict[str, str]:
    """Read ``image=COLUMN,label=COLUMN,group=COLUMN``.

    Args:
        text: Value of ``--hf-columns``.

    Returns:
        Column by role.

    Raises:
        FczooError: A role is unknown or has no column.
    """
    columns = {}
    for word in filter(None, map(str.strip, text.split(","))):
        role, _, column = map(str.strip, word.partition("="))
        if role not in ROLES or not column:
            raise FczooError(
                f"cannot read {word!r} as a column; write {'=NAME, '.join(ROLES)}=NAME, separated "
                "by commas"
            )
        columns[role] = column
    return columns


def locate_dataset(
    dataset: str, data_root: str | None, columns: str | None = None
) -> tuple[str, str | None]:
    """Return name and data root of a data set, with the path of ``hf:FOLDER`` in the data root.

    A run folder may be shared; it stores names, and of a data root only the last part.

    Args:
        dataset: Name of the data set, as the user gives it.
        data_root: Data root.
        columns: Value of ``--hf-columns``, which is added to the name.

    Raises:
        FczooError: The folder does not exist, or columns are given for another kind of data set.
    """
    kind, colon, source = dataset.partition(":")
    if kind.lower() != PREFIX[:-1]:
        if columns:
            raise FczooError(f"--hf-columns is for --dataset hf:PLACE, not {dataset}; leave it out")
        return dataset, data_root
    if not colon and not columns:
        return dataset, data_root
    location, column_of = parse_source(source)
    column_of |= parse_columns(columns or "")
    path = Path(location).expanduser()
    if data_root is None and location and path.is_dir():
        path = path.resolve()
        location, data_root = path.name, str(path.parent)
    elif path.is_absolute() or (data_root is None and not HUB_NAME.fullmatch(location)):
        advice = "leave out --data-root, or give a path relative to it" if data_root else "check it"
        problem = (
            "is an absolute path" if data_root else "is neither a folder nor a name on the hub"
        )
        raise FczooError(f"--dataset hf:{location} {problem}; {advice}")
    words = [location, *(f"{role}={column_of[role]}" for role in ROLES if role in column_of)]
    return PREFIX + ",".join(words), data_root


def import_library() -> Any:
    """Import Hugging Face's ``datasets``, even in a folder that holds another ``datasets``.

    Raises:
        FczooError: It is not installed, it lacks a package itself, or Python finds another package
            of this name.
    """
    module = sys.modules.get("datasets")
    if module is not None and not hasattr(module, "load_from_disk"):
        del sys.modules["datasets"]
    path, skipped = sys.path.copy(), {Path.cwd(), Path(fczoo.__file__).resolve().parents[1]}
    sys.path[:] = [entry for entry in path if Path(entry).resolve() not in skipped]
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "datasets"
        reason = "is not installed" if is_missing else f"cannot be imported: {first_line(error)}"
        problem = f"data sets hf:PLACE need Hugging Face's package datasets, which {reason}"
        raise FczooError(f"{problem}; run pip install 'fczoo[hf]'") from error
    finally:
        sys.path[:] = path
    if not hasattr(library, "load_from_disk"):
        advice = "rename that folder, or pip install 'fczoo[hf]'"
        raise FczooError(f"{next(iter(library.__path__))} hides Hugging Face's datasets; {advice}")
    library.disable_progress_bars()
    return library


def open_tables(folder: Path) -> Tables:
    """Open the splits in a folder of ``save_to_disk`` or of parquet files.

    Args:
        folder: Folder to read.

    Raises:
        FczooError: The folder has neither, or it is damaged.
    """
    library = import_library()
    try:
        if (folder / "dataset_dict.json").is_file():
            return dict(library.load_from_disk(str(folder)))
        if (folder / "state.json").is_file():
            return {TRAIN[0]: library.load_from_disk(str(folder))}
        files, cache = _parquet_files(folder), str(home() / "cache" / "hf")
        return dict(library.load_dataset("parquet", data_files=files, cache_dir=cache))
    except FczooError:
        raise
    except Exception as error:  # the library raises errors of several libraries
        raise FczooError(f"cannot read {folder}: {first_line(error)}; save it again") from error


def _parquet_files(folder: Path) -> dict[str, list[str]]:
    """Return the parquet files of each split; file or folder names begin with its name.

    Raises FczooError if there are none, or those of a split are in several folders.
    """
    splits: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*.parquet")):
        words = [re.split(r"[-_.]", file.stem)[0], *file.relative_to(folder).parts[:-1]]
        splits.setdefault((find_named(words, TRAIN + TEST) or words)[0], []).append(file)
    if not splits:
        raise FczooError(f"{folder} holds neither a data set of save_to_disk nor parquet files")
    for split, files in splits.items():
        first, last = files[0].parent, files[-1].parent
        if first != last:
            problem = f"files of the split {split} are in {first} and in {last}"
            raise FczooError(f"{problem}; name the folder of one configuration")
    return {split: list(map(str, files)) for split, files in splits.items()}


def download(name: str, folder: Path) -> None:
    """Download a data set of the hub through the library's own client, and save it.

    Args:
        name: ``NAME``, ``ORG/NAME`` or ``ORG/NAME/CONFIGURATION``.
        folder: Folder to write.

    Raises:
        FczooError: The download fails.
    """
    library, steps = import_library(), name.split("/")
    part = folder.with_name(f".{folder.name}.part")
    try:
        data = library.load_dataset("/".join(steps[:2]), *steps[2:])
        data.save_to_disk(str(part))
        os.replace(part, folder)
    except Exception as error:  # the library raises errors of several libraries
        advice = "check the name; give a configuration as hf:ORG/NAME/CONFIGURATION"
        raise FczooError(
            f"cannot get {name} from the hub: {first_line(error)}; {advice}"
        ) from error
