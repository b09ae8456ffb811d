"""Test downloads from a faulty server and the command ``fczoo data fetch``."""

import errno
import hashlib
import os
import subprocess
import sys
import tarfile
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from fczoo import FczooError
from fczoo.cli.app import main
from fczoo.data.dataset import Archive, Dataset
from fczoo.data.fetch import download, fetch
from helpers_server import CONTENT, Server, describe_archive, entry, pack_tar


@pytest.fixture
def get(server: Server, tmp_path: Path):
    """Return ``get(archive)``: it downloads ``toy`` and returns its bytes."""
    server.files["toy"] = CONTENT

    def run(archive: Archive) -> bytes:
        download(f"{server.url}/toy", tmp_path / "toy", archive)
        return (tmp_path / "toy").read_bytes()

    return run


def test_download_is_verified(get, server: Server) -> None:
    assert get(describe_archive(CONTENT)) == CONTENT and server.ranges == [None]


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_broken_download_resumes(get, server: Server, size: int | None, tmp_path: Path) -> None:
    archive = describe_archive(CONTENT)._replace(size=size)
    server.cut = 20_000
    with pytest.raises(FczooError, match=r"ended after 20000 of 50000 bytes|20000 bytes read"):
        get(archive)
    assert (tmp_path / "toy").read_bytes() == CONTENT[:20_000]
    server.cut = None
    assert get(archive) == CONTENT and server.ranges == [None, "bytes=20000-"]
    assert get(archive) == CONTENT  # complete: the server sends nothing


def test_download_restarts_without_range_support(get, server: Server, tmp_path: Path) -> None:
    (tmp_path / "toy").write_bytes(b"something else")
    server.ranged = False
    assert get(describe_archive(CONTENT)) == CONTENT


@pytest.mark.parametrize(
    ("served", "says"),
    [
        (CONTENT[:-1] + b"!", r"not the published file \(MD5 [0-9a-f]{32}, expected"),
        (CONTENT + b"!", "longer than the expected 50000 bytes"),
        (CONTENT[:-1], "49999 bytes long, expected 50000"),
    ],
    ids=["changed", "longer", "shorter"],
)
def test_wrong_content_is_rejected_and_removed(
    get, server: Server, served: bytes, says: str, tmp_path: Path
) -> None:
    server.files["toy"] = served
    with pytest.raises(FczooError, match=says):
        get(describe_archive(CONTENT))
    assert not (tmp_path / "toy").exists()


def test_download_stops_after_known_size(get, server: Server, tmp_path: Path, monkeypatch) -> None:
    """Read at most one byte more than the known size.

    The server would send 4 MiB.
    """
    server.files["toy"], sizes = CONTENT + bytes(4 << 20), []
    monkeypatch.setattr(
        Path, "unlink", lambda self, missing_ok=False: sizes.append(self.stat().st_size)
    )
    with pytest.raises(FczooError, match="longer than the expected 50000 bytes"):
        get(describe_archive(CONTENT))
    assert sizes == [50_001]


def test_full_disk_keeps_partial_download(
    get, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def update(self, count: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    server.cut = 20_000
    with monkeypatch.context() as patch:
        patch.setattr("fczoo.data.fetch.progress_bar", lambda *_: nullcontext(Full()))
        with pytest.raises(FczooError) as caught:
            get(describe_archive(CONTENT))
    assert str(caught.value) == (
        f"the download of {server.url}/toy to {tmp_path / 'toy'} failed: No space left on device; "
        "run the command again to resume"
    )
    part, server.cut = (tmp_path / "toy").stat().st_size, None
    assert 0 < part <= 20_000
    assert get(describe_archive(CONTENT)) == CONTENT
    assert server.ranges == [None, f"bytes={part}-"]


def test_sha256_is_verified(get) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert get(describe_archive(CONTENT)._replace(sha256=digest)) == CONTENT
    with pytest.raises(
        FczooError, match=r"not the published file \(SHA256 [0-9a-f]{64}, expected 0000"
    ):
        get(describe_archive(CONTENT)._replace(sha256="0" * 64))


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
@pytest.mark.parametrize("end", ["source", "target"])
def test_named_pipe_is_rejected(end: str, get, tmp_path: Path) -> None:
    if end == "source":
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(FczooError, match="pipe is not an ordinary file"):
            download((tmp_path / "pipe").as_uri(), tmp_path / "toy", describe_archive(CONTENT))
    else:
        os.mkfifo(tmp_path / "toy")
        with pytest.raises(FczooError, match="toy is not an ordinary file"):
            get(describe_archive(CONTENT))


def test_corrupt_partial_download_is_rejected(get, tmp_path: Path) -> None:
    (tmp_path / "toy").write_bytes(b"0" * 20_000)
    with pytest.raises(FczooError, match="not the published file"):
        get(describe_archive(CONTENT))
    assert get(describe_archive(CONTENT)) == CONTENT


def test_sha256_is_reported_without_published_checksum(
    get, server: Server, capsys: pytest.CaptureFixture
) -> None:
    server.sized = False
    assert get(Archive("http://original.invalid/toy")) == CONTENT
    assert f"sha256 is {hashlib.sha256(CONTENT).hexdigest()}" in capsys.readouterr().err


def test_unavailable_server_is_reported(server: Server, tmp_path: Path) -> None:
    with pytest.raises(FczooError, match=r"answers 404 .*--mirror"):
        download(f"{server.url}/none", tmp_path / "none", describe_archive(CONTENT))
    with pytest.raises(FczooError, match=r"failed: .*run the command again"):
        download("http://127.0.0.1:9/none", tmp_path / "none", describe_archive(CONTENT))


# ---------------------------------------------------------------- the command


def test_data_fetch_and_check_commands(toy: type[Dataset], server: Server, tmp_path: Path) -> None:
    content = pack_tar(entry("toy", tarfile.DIRTYPE), entry("toy/good"))
    toy.archives = (describe_archive(content),)
    server.files["toy.tar.gz"] = content
    outcome = CliRunner().invoke(
        main, ["data", "fetch", "toy", "--data-root", str(tmp_path), "--mirror", server.url]
    )
    assert outcome.exit_code == 0
    assert f"toy is in {tmp_path / 'toy'}; licence: free" in outcome.stdout
    assert (tmp_path / "toy" / "good").read_bytes() == b"x"
    note = (tmp_path / "toy" / "fetched.json").read_text()
    assert hashlib.sha256(content).hexdigest() in note
    assert f"{server.url}/toy.tar.gz" in note
    check = CliRunner().invoke(main, ["data", "check", "toy", "--data-root", str(tmp_path)])
    assert check.exit_code == 0 and "unreadable files" in check.stdout
    (tmp_path / "toy" / "good").unlink()
    (tmp_path / "toy" / "fetched.json").unlink()
    toy.folder = "toy/inner"
    again = CliRunner().invoke(main, ["data", "fetch", "toy", "--data-root", str(tmp_path)])
    assert again.exit_code == 1
    assert "is there but has no inner; move it away" in again.stderr


def test_data_command_errors_are_one_line(
    toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    toy.archives = (describe_archive(CONTENT),)
    for arguments, says in (
        (["fetch", "toy", "--mirror", server.url], "answers 404"),
        (["fetch", "digits"], "digits needs no download"),
        (["fetch", "toyy"], "did you mean toy"),
        (["check", "toy"], "run `fczoo data fetch toy`"),
    ):
        outcome = CliRunner().invoke(main, ["data", *arguments, "--data-root", str(tmp_path)])
        assert outcome.exit_code == 1, outcome.stderr
        assert says in outcome.stderr, outcome.stderr
        assert outcome.stderr.splitlines()[-1].startswith("Error: "), outcome.stderr


def test_killed_fetch_leaves_no_data_and_resumes(
    toy: type[Dataset], server: Server, tmp_path: Path
) -> None:
    content = pack_tar(entry("toy/good"), content=CONTENT)
    toy.archives = (describe_archive(content),)
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
    child = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
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
