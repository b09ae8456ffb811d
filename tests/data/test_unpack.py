"""Reject archives that are unsafe, damaged or too large, and keep none of their files."""

import errno
import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from fczoo import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Archive, Dataset
from fczoo.data.fetch import fetch, unpack
from helpers_server import Server, describe_archive, entry, pack_tar


def pack_zip(name: str, mode: int = 0) -> bytes:
    """Pack a valid file and one of this name, written as it is, into a zip file.

    Args:
        name: Name of the second file.
        mode: Its Unix mode.
    """
    out, info = io.BytesIO(), zipfile.ZipInfo("toy/placeholder")
    info.filename, info.external_attr = (
        name,
        mode << 16,
    )  # the constructor would clean the name
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("toy/good", "x")
        archive.writestr(info, "../../evil")
    return out.getvalue()


EVIL = {
    "parent": pack_tar(entry("toy/good"), entry("toy/../../evil")),
    "absolute": pack_tar(entry("/tmp/evil")),
    "symbolic link": pack_tar(entry("toy/link", tarfile.SYMTYPE, "/etc"), entry("toy/link/evil")),
    "link inside": pack_tar(entry("toy/good"), entry("toy/link", tarfile.SYMTYPE, "good")),
    "hard link": pack_tar(entry("toy/link", tarfile.LNKTYPE, "../../evil")),
    "device": pack_tar(entry("toy/device", tarfile.CHRTYPE)),
    "pipe": pack_tar(entry("toy/pipe", tarfile.FIFOTYPE)),
    "drive": pack_tar(entry("C:evil")),
    "backslash": pack_tar(entry("..\\evil")),
    "zip parent": pack_zip("toy/../../evil"),
    "zip absolute": pack_zip("/evil"),
    "zip link": pack_zip("toy/link", 0o120777),
    "zip backslash": pack_zip("..\\..\\evil"),
    "zip nameless": pack_zip(""),
}


@pytest.mark.parametrize("kind", EVIL)
def test_unsafe_archive_is_rejected(
    kind: str, toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    root = tmp_path / "deep" / "root"
    toy.archives = (describe_archive(EVIL[kind]),)
    server.files["toy.tar.gz"] = EVIL[kind]
    with pytest.raises(
        FczooError,
        match=r"neither a file nor a folder|leads out of the folder|member without a name",
    ):
        fetch("toy", root, server.url)
    assert [p.name for p in tmp_path.rglob("*") if p.name not in ("deep", "root")] == [
        ".fetch-toy.lock"
    ]


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive at all", pack_tar(entry("toy/good"))[:-20], pack_tar(entry("other/good"))],
    ids=["empty", "no archive", "cut short", "another folder"],
)
def test_invalid_archive_leaves_no_files(
    content: bytes, toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    toy.archives = (describe_archive(content, "toy.bin"),)
    server.files["toy.bin"] = content
    with pytest.raises(
        FczooError, match=r"not a tar, zip, gz or txt|cannot unpack|not contain the folder toy"
    ):
        fetch("toy", tmp_path, server.url)
    assert [p.name for p in tmp_path.iterdir()] == [".fetch-toy.lock"]


def test_damaged_gz_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "numbers.gz"
    file.write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc")
    with pytest.raises(FczooError, match=r"cannot unpack numbers\.gz"):
        unpack(file, tmp_path / "out")


def bomb(kind: str) -> bytes:
    """Build an archive of 4 MiB of one letter, or of many empty files, in a few kilobytes."""
    out, letters = io.BytesIO(), b"x" * (4 << 20)
    if kind == "gz":
        return gzip.compress(letters)
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("toy/letters", letters)
        return out.getvalue()
    if kind == "tar":
        return pack_tar(entry("toy/letters"), content=letters)
    return pack_tar(*(entry(f"toy/{i}") for i in range(4000)), content=b"")


@pytest.mark.parametrize("kind", ["gz", "zip", "tar", "many empty files"])
def test_archive_bomb_is_rejected(
    kind: str, toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    content, name = bomb(kind), "toy.gz" if kind == "gz" else "toy.bin"
    server.files[name] = content
    toy.archives = (Archive(f"http://original.invalid/{name}"),)
    with pytest.raises(
        FczooError, match=r"bytes, unpacks to more than \d+; nothing of it was kept"
    ):
        fetch("toy", tmp_path, server.url)
    assert [p.name for p in tmp_path.iterdir()] == [".fetch-toy.lock"]
    toy.archives = (describe_archive(content, name),)  # a published checksum lifts the limit
    if kind == "gz":
        toy.archives = (toy.archives[0]._replace(into="toy"),)
    fetch("toy", tmp_path, server.url)
    assert any((tmp_path / "toy").iterdir())


def test_full_disk_keeps_download(
    toy: type[Dataset], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pack_tar(entry("toy/good"), entry("toy/better"))
    toy.archives, server.files["toy.tar.gz"] = (describe_archive(content),), content
    extract = tarfile.TarFile.extract

    def fill(
        self: tarfile.TarFile, member: tarfile.TarInfo, *rest: object, **options: object
    ) -> None:
        if member.name == "toy/better":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extract(self, member, *rest, **options)

    monkeypatch.setattr(tarfile.TarFile, "extract", fill)
    with pytest.raises(
        FczooError, match="No space left on device; correct this and run the command again"
    ):
        fetch("toy", tmp_path, server.url)
    assert [p.name for p in (tmp_path / ".fetch-toy").iterdir()] == ["toy.tar.gz"]
    monkeypatch.undo()
    DATASETS._entries["toy"] = toy
    fetch("toy", tmp_path, server.url)
    assert sorted(p.name for p in (tmp_path / "toy").iterdir()) == [
        "better",
        "fetched.json",
        "good",
    ]


def test_unsafe_archive_is_rejected_without_data_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reject the same archives without tarfile's data filter, as in Python 3.11.0 to 3.11.3."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    for kind, content in EVIL.items():
        (tmp_path / "toy.bin").write_bytes(content)
        with pytest.raises(FczooError, match="nothing of it was kept"):
            unpack(tmp_path / "toy.bin", tmp_path / "deep" / "out")
        assert not list(tmp_path.rglob("evil*")), kind
