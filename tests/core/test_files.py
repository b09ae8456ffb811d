"""Errors of files that are written."""

import errno
import os
from pathlib import Path

import pytest

from fczoo.core.errors import printable
from fczoo.core.files import shorten, write_safely


def test_a_full_disk_is_an_error_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_safely(tmp_path / "result.json", b"{}")
    assert caught.value.filename == str(tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


def test_names_that_are_not_utf8_are_shown_with_replacement_characters() -> None:
    assert printable(os.fsdecode(b"caf\xe9")) == "caf\ufffd"
    assert printable("猫") == "猫"
    assert shorten(os.fsdecode(b"/data/caf\xe9")) == "caf\ufffd"
