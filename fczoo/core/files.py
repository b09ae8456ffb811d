"""Files that a crash cannot leave half written, JSON with one-line errors, and fczoo's folder."""

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import re
import secrets
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import platformdirs

from fczoo.core.errors import FczooError, first_line, printable

T = TypeVar("T")
MAX_TEXT_CHARACTERS = 2000  # of a text in a record, such as a remark
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # in a file
Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]  # in a file; neither infinite nor NaN


def write_safely(path: Path, content: bytes | Iterable[bytes], mode: int = 0o666) -> None:
    """Write a file so that a reader finds the old or the new content, also after a crash.

    Args:
        path: File to write.
        content: The content as a whole, or its parts in order.
        mode: Permissions, before the process's umask removes some.

    Raises:
        OSError: Writing fails, for example because the disk is full; the error names the file.
    """
    draft = path.with_name(path.name + ".tmp")
    if draft.is_dir():  # of someone else
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with contextlib.suppress(OSError):
            draft.unlink()  # of a process that was killed, perhaps of another user
        with (
            name_file_in_errors(path),
            open(draft, "wb", opener=partial(os.open, mode=mode)) as file,
        ):
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
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add a path to an OSError that has none, such as that of a full disk during writing.

    Args:
        path: File that is read or written inside the context.
    """
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if the system can.

    Args:
        folder: Folder that was changed.
    """
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def encode_json(content: Any, **layout: Any) -> str:
    """Return content as JSON, with null for NaN and infinities, which JSON does not have.

    Args:
        content: Plain values, lists and mappings.
        **layout: Options of ``json.dumps``.
    """
    try:
        return json.dumps(content, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_nan_to_null(content), allow_nan=False, **layout)


def _nan_to_null(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _nan_to_null(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_nan_to_null(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def null_to_nan(numbers: Any) -> Any:
    """Replace null by NaN in numbers read from JSON.

    Args:
        numbers: Number or None, or lists and objects of these.
    """
    if isinstance(numbers, Mapping):
        return {key: null_to_nan(value) for key, value in numbers.items()}
    if isinstance(numbers, list):
        return [null_to_nan(value) for value in numbers]
    return math.nan if numbers is None else numbers


def restore_nan(content: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a JSON object with null read as NaN in some fields.

    Args:
        content: JSON object.
        names: Fields in which null represents NaN.
    """
    return {k: null_to_nan(v) if k in names else v for k, v in content.items()}


NUMBERS = re.compile(r"\[\n([-+.\deEnul,\s]*)\]")
"""List of numbers or null in indented JSON. Line breaks inside strings are escaped."""


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old or the new file, never a part of one.

    A list of numbers is on one line.

    Args:
        path: File to write.
        content: Plain values, lists and mappings.
    """
    text = encode_json(content, indent=1)
    text = NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    write_safely(path, f"{text}\n".encode())


def through_json(content: Any) -> Any:
    """Convert content to JSON and back.

    Args:
        content: Plain values, lists and mappings.

    Returns:
        The same with tuples as lists, and with NaN and infinities as None.
    """
    return json.loads(encode_json(content))


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: File to read.
        what: Kind of the file for messages.

    Raises:
        FczooError: The file is missing or does not hold a JSON object.
    """
    content = read_json_value(path, what)
    if not isinstance(content, dict):
        raise FczooError(f"{path} is not a valid {what}: expected a JSON object")
    return content


def read_json_value(path: Path, what: str) -> Any:
    """Read any JSON value.

    Args:
        path: File to read.
        what: Kind of the file for messages.

    Raises:
        FczooError: The file is missing or does not hold JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FczooError(f"no {what} at {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FczooError(f"{path} is not a valid {what}: {first_line(error)}") from error


def read_record(
    path: Path, what: str, kind: type[T], version: str, measured: Collection[str] = ()
) -> T:
    """Read an object that ``write_record`` wrote, or an older fczoo, which stored no version.

    Args:
        path: File to read.
        what: Kind of the file for messages.
        kind: Type of the object, for msgspec.
        version: Expected version of the format.
        measured: Fields in which null represents NaN.

    Raises:
        FczooError: The file is missing, of another version or form, or does not match its SHA-256.
            The message names file and field.
    """
    content = read_json(path, what)
    has_checksum = "format" in content or "sha256" in content
    if has_checksum and content.get("format") != version:
        raise FczooError(
            f"{path} is not a valid {what}: format is "
            f"{printable(repr(content.get('format')))}, expected {version!r}"
        )
    if has_checksum and content.get("sha256") != content_sha256(content):
        raise FczooError(
            f"{path} is not a valid {what}: its content does not match its sha256; it was changed "
            "or is damaged"
        )
    try:
        return convert_json(restore_nan(_printable_texts(content), measured), kind)
    except ValueError as error:
        raise FczooError(f"{path} is not a valid {what}: {first_line(error)}") from error


def _printable_texts(content: Any) -> Any:
    """Return JSON content with printable text only, because tables and pages show it."""
    if isinstance(content, str):
        return printable(content, MAX_TEXT_CHARACTERS)
    if isinstance(content, Mapping):
        return {
            printable(key, MAX_TEXT_CHARACTERS): _printable_texts(value)
            for key, value in content.items()
        }
    return [_printable_texts(value) for value in content] if isinstance(content, list) else content


def write_record(path: Path, version: str, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its format's version and a SHA-256 over all of it.

    Args:
        path: File to write.
        version: Version of the format.
        content: Fields of the object.
    """
    record = {"format": version, **through_json(content)}
    write_json(path, {**record, "sha256": content_sha256(record)})


def content_sha256(content: Mapping[str, Any]) -> str:
    """Hash a JSON object without its own ``sha256``, whatever its spacing and order.

    Args:
        content: JSON object.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    fields = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(fields, sort_keys=True)  # older files hold NaN, and a hash over that word
    return hashlib.sha256(text.encode()).hexdigest()


def convert_json(content: Any, kind: type[T]) -> T:
    """Convert a value from JSON to a type.

    Args:
        content: Value from JSON.
        kind: Type that msgspec can convert to.

    Raises:
        ValueError: The value does not fit; the message names the field.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        fault, _, location = str(error).partition(" - at `")
        field = location.strip("`").removeprefix("$").removeprefix(".")
        raise ValueError(f"{field}: {fault}" if field else fault) from error


def read_toml(path: Traversable, what: str, kind: type[T]) -> T:
    """Read a TOML file as an object.

    Args:
        path: File to read.
        what: Kind of the file for messages.
        kind: Type of the object, for msgspec.

    Raises:
        FczooError: The file cannot be read, or a value does not fit; the message names file and
            key.
    """
    try:
        return convert_json(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except (OSError, ValueError, RecursionError) as error:
        raise FczooError(f"{path} is not a valid {what}: {first_line(error)}") from error


def read_lines(path: Path, what: str) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line.

    Args:
        path: File to read.
        what: Kind of the file for messages.

    Returns:
        The objects; empty if the file is missing.

    Raises:
        FczooError: The file has other content.
    """
    try:
        content = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise FczooError(f"{path} is not a valid {what}: {first_line(error)}") from error
    if not all(isinstance(line, dict) for line in content):
        raise FczooError(f"{path} is not a valid {what}: expected one JSON object per line")
    return content


def home() -> Path:
    """Return the folder for data, weights and caches: ``FCZOO_HOME`` or the platform's."""
    return Path(os.environ.get("FCZOO_HOME") or platformdirs.user_cache_dir("fczoo"))


def shorten(text: str | None) -> str | None:
    """Shorten ``NAME:FOLDER/FILE`` to ``NAME:FILE``; keep other text and names on a hub.

    Args:
        text: Text, or None, which stays None.
    """
    if text is None:
        return None
    text = printable(text, len(text))
    if "/" not in text or re.fullmatch(r"hf:[\w-][\w.-]*/[\w.-]+(,.*)?", text):
        return text
    parent, _, last = text.rstrip("/").rpartition("/")
    name, colon, _ = parent.partition(":")
    return f"{name}:{last}" if colon else last


FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")


def to_csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV text, with an apostrophe before text that looks like a formula.

    Args:
        rows: Cells of each row.

    Returns:
        CSV text whose lines end with a line feed.
    """
    return "".join(_line(row) for row in rows)


def _line(row: Sequence[Any]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerow([quote_formula(cell) for cell in row])
    return out.getvalue().removesuffix("\r\n") + "\n"  # csv leaves \r bare where it ends no line


def quote_formula(cell: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would run as a formula.

    Args:
        cell: Any value; only text that looks like a formula and is not a number changes.
    """
    if not isinstance(cell, str) or not FORMULA.match(cell) or _is_number(cell):
        return cell
    return f"'{cell}"


def unquote_formula(cell: str) -> str:
    """Remove the apostrophe that ``quote_formula`` put before a cell.

    Args:
        cell: Text of a cell.
    """
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not text[0].isspace()
