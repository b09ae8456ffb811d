"""Files that a crash cannot leave half written, JSON with one-line errors, and fczoo's own folder."""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
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

    Raises OSError that names the file, also where the disk is full.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        with naming(path), draft.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a path to an OSError that has none, as where a disk is full while a file is written."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def encode_json(content: Any, **layout: Any) -> str:
    """Return content as JSON, with null for NaN and infinities, which JSON does not have.

    ``layout`` holds options of ``json.dumps``.
    """
    try:
        return json.dumps(content, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_finite_or_null(content), allow_nan=False, **layout)


def _finite_or_null(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite_or_null(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite_or_null(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def null_as_nan(numbers: Any) -> Any:
    """Replace null by NaN in numbers read from JSON, also in lists and objects of numbers."""
    if isinstance(numbers, Mapping):
        return {key: null_as_nan(value) for key, value in numbers.items()}
    if isinstance(numbers, list):
        return [null_as_nan(value) for value in numbers]
    return math.nan if numbers is None else numbers


def restore_nan(content: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a JSON object with null read as NaN in the fields called ``names``."""
    return {k: null_as_nan(v) if k in names else v for k, v in content.items()}


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    write_safely(path, (encode_json(content, indent=1) + "\n").encode())


def through_json(content: Any) -> Any:
    """Return content as a reader of its JSON gets it: tuples as lists, NaN and infinities as None."""
    return json.loads(encode_json(content))


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


def read_record(path: Path, what: str, kind: type[T], version: str, measured: Collection[str] = ()) -> T:
    """Read an object of type ``kind`` from a file of ``write_record``, or of an older fczoo without version.

    Null stands for NaN in the fields ``measured``.
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
        return typed(restore_nan(content, measured), kind)
    except ValueError as error:
        raise FczooError(f"{path} is no valid {what}: {error}") from error


def write_record(path: Path, version: str, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its format's version and a SHA-256 over all of it."""
    record = {"format": version, **through_json(content)}
    write_json(path, {**record, "sha256": content_sha256(record)})


def content_sha256(content: Mapping[str, Any]) -> str:
    """Hash of a JSON object without its own ``sha256``, whatever its spacing and order."""
    hashed = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(hashed, sort_keys=True)  # older files hold NaN, and a hash over that word
    return hashlib.sha256(text.encode()).hexdigest()


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


def printable(name: str) -> str:
    """Return a file's name as text: bytes that are not UTF-8 become replacement characters."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def shorten(word: str | None) -> str | None:
    """``NAME:FOLDER/FILE`` -> ``NAME:FILE``; words without a folder as they are."""
    if word is None:
        return None
    word = printable(word)
    if "/" not in word:
        return word
    before, _, last = word.rstrip("/").rpartition("/")
    name, colon, _ = before.partition(":")
    return f"{name}:{last}" if colon else last
