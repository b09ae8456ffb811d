"""Test errors and names of files that are written."""

import errno
import os
from pathlib import Path

import pytest

from fczoo.core.errors import FczooError, printable
from fczoo.core.files import shorten, write_safely


def test_full_disk_error_names_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_safely(tmp_path / "result.json", b"{}")
    assert caught.value.filename == str(tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


def test_non_utf8_names_get_replacement_characters() -> None:
    assert printable(os.fsdecode(b"caf\xe9")) == "caf\ufffd"
    assert printable("猫") == "猫"
    assert shorten(os.fsdecode(b"/data/caf\xe9")) == "caf\ufffd"


@pytest.mark.parametrize("kind", ["file", "read-only file", "folder", "link"])
def test_existing_draft_does_not_prevent_write(tmp_path: Path, kind: str) -> None:
    draft, other = tmp_path / "result.json.tmp", tmp_path / "other"
    other.write_bytes(b"other")
    if kind == "folder":
        draft.mkdir()
    elif kind == "link":
        draft.symlink_to(other)
    else:
        draft.write_bytes(b"half")
        draft.chmod(0o400 if kind == "read-only file" else 0o600)
    write_safely(tmp_path / "result.json", b"{}")
    assert (tmp_path / "result.json").read_bytes() == b"{}"
    assert (tmp_path / "result.json").stat().st_mode & 0o200
    assert other.read_bytes() == b"other"
    names = {path.name for path in tmp_path.iterdir()} - {"other", "result.json"}
    assert names == ({"result.json.tmp"} if kind == "folder" else set())


def test_printable_text_is_one_short_line() -> None:
    assert printable("a\x1b[31m\nb\tc\u202ed\x00") == "a[31m b cd"
    assert printable("\ud800x") == "\ufffdx"
    assert printable("word " * 100, 12) == "word word ..."
    assert len(printable("x" * 30_000_000)) == 164
    error = FczooError("no\nway " + "x" * 30_000_000)
    assert str(error).startswith("no way ") and len(str(error)) < 2100
    assert str(error).isprintable()
