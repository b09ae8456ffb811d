"""Files that a crash cannot leave half written, JSON with one-line errors, and fczoo's own folder."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import platformdirs

from fczoo.core.errors import FczooError


def write_safely(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the old or the new content whole, also after a crash."""
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    write_safely(path, (json.dumps(content, indent=1) + "\n").encode())


def through_json(content: Any) -> Any:
    """What a reader of its JSON gets: tuples as lists."""
    return json.loads(json.dumps(content))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object. Raises FczooError, calling the file ``what``, when it is missing or something else."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise FczooError(f"no {what} at {path}") from None
    except (ValueError, RecursionError) as error:
        raise FczooError(f"{path} is no valid {what}: {error}") from error
    if not isinstance(content, dict):
        raise FczooError(f"{path} is no valid {what}: it holds no JSON object")
    return content


def read_lines(path: Path, what: str) -> list[dict[str, Any]]:
    """The JSON objects of a file that has one in each line; none when the file is missing.

    Raises FczooError, calling the file ``what``, for any other content.
    """
    try:
        content = [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise FczooError(f"{path} is no valid {what}: {error}") from error
    if not all(isinstance(line, dict) for line in content):
        raise FczooError(f"{path} is no valid {what}: it holds no JSON object in every line")
    return content


def home() -> Path:
    """Folder for data, weights and caches: ``FCZOO_HOME`` or the platform's cache folder."""
    return Path(os.environ.get("FCZOO_HOME") or platformdirs.user_cache_dir("fczoo"))
