"""Files that a crash cannot leave half written, JSON with one-line errors, and fczoo's own folder."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import platformdirs

from fczoo.core.errors import FczooError

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # in a file
Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]  # in a file; neither infinite nor NaN


def write_safely(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, whole or part by part, so that a reader finds the old or the new content, also after a
    crash.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FczooError(f"no {what} at {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FczooError(f"{path} is no valid {what}: {error}") from error
    if not isinstance(content, dict):
        raise FczooError(f"{path} is no valid {what}: it holds no JSON object")
    return content


def read_record(path: Path, what: str, kind: type[T], version: str) -> T:
    """An object of type ``kind`` from a JSON file of ``write_record``, or of an older fczoo without version.

    Raises FczooError, naming file and field, when it is missing, of another version, of another form, or
    when its content does not match its SHA-256.
    """
    content = read_json(path, what)
    sealed = "format" in content or "sha256" in content
    if sealed and content.get("format") != version:
        raise FczooError(
            f"{path} is no valid {what}: format is {content.get('format')!r}, expected {version!r}"
        )
    if sealed and content.get("sha256") != content_sha256(content):
        raise FczooError(
            f"{path} is no valid {what}: its content does not match its sha256; it was changed or is damaged"
        )
    try:
        return typed(content, kind)
    except ValueError as error:
        raise FczooError(f"{path} is no valid {what}: {error}") from error


def write_record(path: Path, version: str, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its format's version and a SHA-256 over all of it."""
    record = {"format": version, **through_json(content)}
    write_json(path, {**record, "sha256": content_sha256(record)})


def content_sha256(content: Mapping[str, Any]) -> str:
    """Hash of a JSON object without its own ``sha256``, whatever its spacing and order."""
    hashed = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def typed(content: Any, kind: type[T]) -> T:
    """A value read from JSON as an object of type ``kind``. Raises ValueError that names the field."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        fault, _, place = str(error).partition(" - at `")
        field = place.strip("`").removeprefix("$").removeprefix(".")
        raise ValueError(f"{field}: {fault}" if field else fault) from error


def read_lines(path: Path, what: str) -> list[dict[str, Any]]:
    """The JSON objects of a file that has one in each line; none when the file is missing.

    Raises FczooError, calling the file ``what``, for any other content.
    """
    try:
        content = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
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


def shorten(word: str | None) -> str | None:
    """``NAME:FOLDER/FILE`` -> ``NAME:FILE``; words without a folder as they are."""
    if word is None or "/" not in word:
        return word
    before, _, last = word.rstrip("/").rpartition("/")
    name, colon, _ = before.partition(":")
    return f"{name}:{last}" if colon else last
