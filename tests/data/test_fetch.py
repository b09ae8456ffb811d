"""Downloads from a local server that behaves badly in every way that servers and archives do."""

import errno
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fczoo import FczooError
from fczoo.cli.app import main
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Archive, Dataset, ImageData, Images
from fczoo.data.fetch import download, fetch
from fczoo.data.unpack import unpack

CONTENT = np.random.default_rng(0).bytes(50_000)


class Server(ThreadingHTTPServer):
    """Serves ``files``; notes the requested ranges and misbehaves as told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges: list[str | None] = []
        self.cut: int | None = None  # bytes after which the connection is closed
        self.hold = False  # keep it open instead
        self.ranged = True  # whether Range is understood
        self.sized = True  # whether the length is told

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.ranges.append(wanted)
        content = server.files.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranged else 0
        if wanted and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if server.sized:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:] if server.cut is None else content[start : start + server.cut])
        self.wfile.flush()
        while server.hold:
            time.sleep(0.01)

    def log_message(self, *_: object) -> None:
        """No lines in the test's output."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.hold = False
        running.shutdown()
        thread.join()


def published(content: bytes, name: str = "toy.tar.gz") -> Archive:
    return Archive(f"http://original.invalid/{name}", hashlib.md5(content).hexdigest(), len(content))


# ---------------------------------------------------------------- one file


@pytest.fixture
def get(server: Server, tmp_path: Path):
    """``get(archive)`` downloads ``toy`` and gives its bytes."""
    server.files["toy"] = CONTENT

    def run(archive: Archive) -> bytes:
        download(f"{server.url}/toy", tmp_path / "toy", archive)
        return (tmp_path / "toy").read_bytes()

    return run


def test_a_download_is_verified(get, server: Server) -> None:
    assert get(published(CONTENT)) == CONTENT and server.ranges == [None]


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_connection_that_breaks_is_resumed(get, server: Server, size: int | None, tmp_path: Path) -> None:
    archive = published(CONTENT)._replace(size=size)
    server.cut = 20_000
    with pytest.raises(FczooError, match=r"ended after 20000 of 50000 bytes|20000 bytes read"):
        get(archive)
    assert (tmp_path / "toy").read_bytes() == CONTENT[:20_000]
    server.cut = None
    assert get(archive) == CONTENT and server.ranges == [None, "bytes=20000-"]
    assert get(archive) == CONTENT  # complete: nothing to send, or not even asked


def test_a_server_that_cannot_resume_sends_it_again(get, server: Server, tmp_path: Path) -> None:
    (tmp_path / "toy").write_bytes(b"something else")
    server.ranged = False
    assert get(published(CONTENT)) == CONTENT


@pytest.mark.parametrize(
    ("served", "says"),
    [
        (CONTENT[:-1] + b"!", r"not the published file \(MD5 [0-9a-f]{32}, expected"),
        (CONTENT + b"!", "longer than the expected 50000 bytes"),
        (CONTENT[:-1], "49999 bytes long, expected 50000"),
    ],
    ids=["changed", "longer", "shorter"],
)
def test_other_content_is_refused_and_removed(
    get, server: Server, served: bytes, says: str, tmp_path: Path
) -> None:
    server.files["toy"] = served
    with pytest.raises(FczooError, match=says):
        get(published(CONTENT))
    assert not (tmp_path / "toy").exists()


def test_no_more_than_the_known_size_is_read(get, server: Server, tmp_path: Path, monkeypatch) -> None:
    """The server would send 4 MiB; one byte too much is enough to know."""
    server.files["toy"], kept = CONTENT + bytes(4 << 20), []
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: kept.append(self.stat().st_size))
    with pytest.raises(FczooError, match="longer than the expected 50000 bytes"):
        get(published(CONTENT))
    assert kept == [50_001]


def test_the_sha256_is_verified_beside_the_md5(get) -> None:
    good = hashlib.sha256(CONTENT).hexdigest()
    assert get(published(CONTENT)._replace(sha256=good)) == CONTENT
    with pytest.raises(FczooError, match=r"not the published file \(SHA256 [0-9a-f]{64}, expected 0000"):
        get(published(CONTENT)._replace(sha256="0" * 64))


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_named_pipe_is_refused_instead_of_waited_for(end: str, get, tmp_path: Path) -> None:
    if end == "source":
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FczooError, match="pipe is no ordinary file"):
            download((tmp_path / "pipe").as_uri(), tmp_path / "toy", published(CONTENT))
    else:
        os.mkfifo(tmp_path / "toy")
        with pytest.raises(FczooError, match="toy is no ordinary file"):
            get(published(CONTENT))


def test_a_spoilt_part_is_found_out(get, tmp_path: Path) -> None:
    (tmp_path / "toy").write_bytes(b"0" * 20_000)
    with pytest.raises(FczooError, match="not the published file"):
        get(published(CONTENT))
    assert get(published(CONTENT)) == CONTENT


def test_without_a_published_checksum_the_sha256_is_told(
    get, server: Server, capsys: pytest.CaptureFixture
) -> None:
    server.sized = False
    assert get(Archive("http://original.invalid/toy")) == CONTENT
    assert f"sha256 is {hashlib.sha256(CONTENT).hexdigest()}" in capsys.readouterr().err


def test_servers_that_do_not_answer(server: Server, tmp_path: Path) -> None:
    with pytest.raises(FczooError, match=r"answers 404 .*--mirror"):
        download(f"{server.url}/none", tmp_path / "none", published(CONTENT))
    with pytest.raises(FczooError, match=r"failed: .*run it again"):
        download("http://127.0.0.1:9/none", tmp_path / "none", published(CONTENT))


# ---------------------------------------------------------------- archives


def tarred(*members: tarfile.TarInfo, content: bytes = b"x") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for member in members:
            member.size = len(content) if member.isfile() else 0
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def zipped(name: str, mode: int = 0) -> bytes:
    out, info = io.BytesIO(), zipfile.ZipInfo("toy/placeholder")
    info.filename, info.external_attr = (
        name,
        mode << 16,
    )  # as written, without the clean-up of the constructor
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("toy/good", "x")
        archive.writestr(info, "../../evil")
    return out.getvalue()


EVIL = {
    "parent": tarred(entry("toy/good"), entry("toy/../../evil")),
    "absolute": tarred(entry("/tmp/evil")),
    "symbolic link": tarred(entry("toy/link", tarfile.SYMTYPE, "/etc"), entry("toy/link/evil")),
    "link inside": tarred(entry("toy/good"), entry("toy/link", tarfile.SYMTYPE, "good")),
    "hard link": tarred(entry("toy/link", tarfile.LNKTYPE, "../../evil")),
    "device": tarred(entry("toy/device", tarfile.CHRTYPE)),
    "pipe": tarred(entry("toy/pipe", tarfile.FIFOTYPE)),
    "drive": tarred(entry("C:evil")),
    "backslash": tarred(entry("..\\evil")),
    "zip parent": zipped("toy/../../evil"),
    "zip absolute": zipped("/evil"),
    "zip link": zipped("toy/link", 0o120777),
    "zip backslash": zipped("..\\..\\evil"),
    "zip nameless": zipped(""),
}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> type[Dataset]:
    """A data set of one file ``toy/good``, to be downloaded."""

    class Toy(Dataset):
        name, about, classes, folder, source, licence = "toy", "toy", 1, "toy", "toy.tar.gz", "free"

        def load(self, root: Path) -> ImageData:
            images = Images(np.zeros((1, 8, 8, 3), np.uint8), np.zeros(1, np.int64))
            return ImageData(images, images, ("only",))

    monkeypatch.setitem(DATASETS._entries, "toy", Toy)
    return Toy


@pytest.mark.parametrize("kind", EVIL)
def test_archives_that_reach_out_are_refused_whole(
    kind: str, toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    root = tmp_path / "deep" / "root"
    toy.archives = (published(EVIL[kind]),)
    server.files["toy.tar.gz"] = EVIL[kind]
    with pytest.raises(
        FczooError, match=r"neither a file nor a folder|leads out of the folder|member without a name"
    ):
        fetch("toy", root, server.url)
    assert [p.name for p in tmp_path.rglob("*") if p.name not in ("deep", "root")] == [".fetch-toy.lock"]


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive at all", tarred(entry("toy/good"))[:-20], tarred(entry("other/good"))],
    ids=["empty", "no archive", "cut short", "another folder"],
)
def test_what_cannot_be_unpacked_leaves_nothing(
    content: bytes, toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    toy.archives = (published(content, "toy.bin"),)
    server.files["toy.bin"] = content
    with pytest.raises(FczooError, match=r"no tar, zip or gz|cannot unpack|holds no folder toy"):
        fetch("toy", tmp_path, server.url)
    assert [p.name for p in tmp_path.iterdir()] == [".fetch-toy.lock"]


def test_a_broken_gz_file(tmp_path: Path) -> None:
    file = tmp_path / "numbers.gz"
    file.write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc")
    with pytest.raises(FczooError, match=r"cannot unpack numbers\.gz"):
        unpack(file, tmp_path / "out")


def bomb(kind: str) -> bytes:
    """Archives of 4 MiB of one letter, or of many empty files, in a few kilobytes."""
    out, letters = io.BytesIO(), b"x" * (4 << 20)
    if kind == "gz":
        return gzip.compress(letters)
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("toy/letters", letters)
        return out.getvalue()
    if kind == "tar":
        return tarred(entry("toy/letters"), content=letters)
    return tarred(*(entry(f"toy/{i}") for i in range(4000)), content=b"")


@pytest.mark.parametrize("kind", ["gz", "zip", "tar", "many empty files"])
def test_an_archive_that_unpacks_to_too_much_is_refused(
    kind: str, toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    content, name = bomb(kind), "toy.gz" if kind == "gz" else "toy.bin"
    server.files[name] = content
    toy.archives = (Archive(f"http://original.invalid/{name}"),)
    with pytest.raises(FczooError, match=r"bytes, unpacks to more than \d+; nothing of it was kept"):
        fetch("toy", tmp_path, server.url)
    assert [p.name for p in tmp_path.iterdir()] == [".fetch-toy.lock"]
    toy.archives = (published(content, name),)  # with a checksum its publisher vouches for it
    if kind == "gz":
        toy.archives = (toy.archives[0]._replace(into="toy"),)
    fetch("toy", tmp_path, server.url)
    assert any((tmp_path / "toy").iterdir())


def test_a_full_disk_leaves_the_download_alone(
    toy: type[Dataset], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = tarred(entry("toy/good"), entry("toy/better"))
    toy.archives, server.files["toy.tar.gz"] = (published(content),), content
    extract = tarfile.TarFile.extract

    def fill(self: tarfile.TarFile, member: tarfile.TarInfo, *rest: object, **options: object) -> None:
        if member.name == "toy/better":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extract(self, member, *rest, **options)

    monkeypatch.setattr(tarfile.TarFile, "extract", fill)
    with pytest.raises(
        FczooError, match="No space left on device; mend that and run it again, the download is kept"
    ):
        fetch("toy", tmp_path, server.url)
    assert [p.name for p in (tmp_path / ".fetch-toy").iterdir()] == ["toy.tar.gz"]
    monkeypatch.undo()
    DATASETS._entries["toy"] = toy
    fetch("toy", tmp_path, server.url)
    assert sorted(p.name for p in (tmp_path / "toy").iterdir()) == ["better", "fetched.json", "good"]


def test_without_the_data_filter_nothing_leads_out_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    for kind, content in EVIL.items():
        (tmp_path / "toy.bin").write_bytes(content)
        with pytest.raises(FczooError, match="nothing of it was kept"):
            unpack(tmp_path / "toy.bin", tmp_path / "deep" / "out")
        assert not list(tmp_path.rglob("evil*")), kind


# ---------------------------------------------------------------- the command


def test_the_command_fetches_and_checks(toy: type[Dataset], server: Server, tmp_path: Path) -> None:
    content = tarred(entry("toy", tarfile.DIRTYPE), entry("toy/good"))
    toy.archives = (published(content),)
    server.files["toy.tar.gz"] = content
    done = CliRunner().invoke(
        main, ["data", "fetch", "toy", "--data-root", str(tmp_path), "--mirror", server.url]
    )
    assert done.exit_code == 0 and f"toy is in {tmp_path / 'toy'}; licence: free" in done.stdout
    assert (tmp_path / "toy" / "good").read_bytes() == b"x"
    note = (tmp_path / "toy" / "fetched.json").read_text()
    assert hashlib.sha256(content).hexdigest() in note and f"{server.url}/toy.tar.gz" in note
    checked = CliRunner().invoke(main, ["data", "check", "toy", "--data-root", str(tmp_path)])
    assert checked.exit_code == 0 and "unreadable files" in checked.stdout
    (tmp_path / "toy" / "good").unlink()
    (tmp_path / "toy" / "fetched.json").unlink()
    toy.folder = "toy/inner"
    again = CliRunner().invoke(main, ["data", "fetch", "toy", "--data-root", str(tmp_path)])
    assert again.exit_code == 1 and "is there but has no inner; move it away" in again.stderr


def test_the_command_says_what_is_wrong_in_one_line(
    toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    toy.archives = (published(CONTENT),)
    for arguments, says in (
        (["fetch", "toy", "--mirror", server.url], "answers 404"),
        (["fetch", "digits"], "digits needs no download"),
        (["fetch", "toyy"], "did you mean toy"),
        (["check", "toy"], "run `fczoo data fetch toy`"),
    ):
        done = CliRunner().invoke(main, ["data", *arguments, "--data-root", str(tmp_path)])
        assert (
            done.exit_code == 1 and says in done.stderr and done.stderr.splitlines()[-1].startswith("Error: ")
        ), done.stderr


def test_a_killed_fetch_leaves_no_data_and_is_resumed(
    toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    content = tarred(entry("toy/good"), content=CONTENT)
    toy.archives = (published(content),)
    server.files["toy.tar.gz"], server.cut, server.hold = content, 30_000, True
    script = (
        "from pathlib import Path\n"
        "from fczoo.core.registry import DATASETS\n"
        "from fczoo.data.dataset import Archive, Dataset\n"
        "from fczoo.data.fetch import fetch\n"
        f"archive = Archive(*{tuple(toy.archives[0])!r})\n"
        "toy = dict(folder='toy', name='toy', archives=(archive,), load=None)\n"
        "DATASETS._entries['toy'] = type('Toy', (Dataset,), toy)\n"
        f"fetch('toy', Path({str(tmp_path)!r}), {server.url!r})"
    )
    part = tmp_path / ".fetch-toy" / "toy.tar.gz"
    child = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(FczooError, match=r"another fetch of toy into .* is running"):
        fetch("toy", tmp_path, server.url)
    child.kill()
    child.wait()
    size = part.stat().st_size
    assert not (tmp_path / "toy").exists() and 0 < size < len(content)
    server.cut, server.hold = None, False
    fetch("toy", tmp_path, server.url)
    assert server.ranges == [None, f"bytes={size}-"]
    assert (tmp_path / "toy" / "good").read_bytes() == CONTENT
