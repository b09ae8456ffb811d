"""Test that missing data and weights are reported, offered, downloaded and resumed."""

import hashlib
import os
import pty
import re
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import timm
from click.testing import CliRunner
from huggingface_hub import constants, file_download
from safetensors.torch import save_file

from fczoo.backbones.load import load_backbone
from fczoo.backbones.weights import weights_file, weights_to_download
from fczoo.cli.app import main
from fczoo.cli.downloads import MissingDownload, download_weights, find_missing, provide
from fczoo.core.errors import FczooError
from fczoo.core.registry import DATASETS
from fczoo.data.dataset import Archive
from fczoo.data.fetch import download_bytes
from fczoo.federation.settings import Settings
from helpers_server import Server, describe_archive, entry, pack_tar
from helpers_warm import warm_python

TINY = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = bytes(range(256)) * 200


class Hub(ThreadingHTTPServer):
    """Local hub with the weights of one model; it records the requested ranges."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.ranges: list[str | None] = []
        self.ranged = True  # whether the server understands Range
        self.cut: int | None = None  # bytes after which the connection is closed
        self.content = CONTENT


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        if self.path.endswith(".safetensors"):  # the hub's client may ask for more
            self.server.ranges.append(self.headers.get("Range"))
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        if self.path != f"/timm/{TINY}/resolve/main/model.safetensors":
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        range_header = self.headers.get("Range") if body and self.server.ranged else None
        start = int(range_header.removeprefix("bytes=").partition("-")[0]) if range_header else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.send_header("X-Linked-Etag", f'"{hashlib.sha256(CONTENT).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(CONTENT)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(self.server.content[start : self.server.cut])

    def log_message(self, *_: object) -> None:
        """Write no lines into the test's output."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):  # before version 1 the latter has a copy
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def data_server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def missing_item(name: str, mb: int | None, log: list[str], advice: str = "") -> MissingDownload:
    """Describe a missing item whose download appends its name to ``log``."""
    size = None if mb is None else mb * 10**6
    return MissingDownload(name, f"no {name}", lambda: log.append(name), lambda: size, advice)


@pytest.mark.parametrize("consent", [None, False])
def test_download_without_consent_is_rejected_with_one_line(consent: bool | None) -> None:
    log: list[str] = []
    with pytest.raises(FczooError) as caught:
        provide(
            [missing_item("cifar100", 169, log), missing_item("weights X", 23, log, "give a file")],
            consent,
        )
    assert str(caught.value) == (
        "no cifar100; no weights X; add --download to fetch cifar100 and weights X, or give a file"
    )
    assert log == []


def test_download_option_gives_consent() -> None:
    log: list[str] = []
    provide([missing_item("a", 1, log), missing_item("b", None, log)], True)
    assert log == ["a", "b"]


@pytest.mark.parametrize("consent", [None, True])
def test_manual_download_is_reported_before_any_download(consent: bool | None) -> None:
    log: list[str] = []
    with pytest.raises(FczooError, match=r"^get mini at X; no a; add --download to fetch a$"):
        provide([MissingDownload("mini", "get mini at X"), missing_item("a", 1, log)], consent)
    with pytest.raises(FczooError, match=r"^get mini at X$"):
        provide([MissingDownload("mini", "get mini at X")], consent)
    assert log == []


def test_interrupted_download_reports_one_line() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(
        FczooError, match=r"^the download of a was interrupted; the same command"
    ) as caught:
        provide([MissingDownload("a", "no a", stop)], True)
    assert caught.value.exit_code == 130


def on_terminal(
    script: str, answer: bytes, environment: dict[str, str], words: Sequence[str] = ()
) -> tuple[int, str]:
    """Run Python code on a pseudo-terminal and type ``answer``; return exit code and output."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [warm_python(), "-c", script, *words],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, **environment},
    )
    os.close(follower)
    os.write(leader, answer)
    output = b""
    while True:
        try:
            block = os.read(leader, 4096)
        except OSError:  # Linux reports a closed terminal this way
            break
        if not block:
            break
        output += block
    os.close(leader)
    return child.wait(), output.decode()


ASK = """
from fczoo.backbones.load import load_backbone
from fczoo.backbones.weights import weights_file, weights_to_download
from fczoo.cli.downloads import MissingDownload, download_weights, find_missing, provide
from fczoo.core.errors import FczooError
try:
    fetch = {name: lambda name=name: print("fetched", name) for name in "ab"}
    provide([MissingDownload(name, name, fetch[name], lambda: 2000000) for name in fetch], None)
except FczooError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    ("answer", "fetched"), [(b"y\n", ["a", "b"]), (b"\n", ["a", "b"]), (b"n\n", []), (b"\x04", [])]
)
def test_terminal_asks_once_for_all_downloads(answer: bytes, fetched: list[str]) -> None:
    code, output = on_terminal(ASK, answer, {})
    question = "Not on this machine: a (2 MB), b (2 MB), 4 MB in all. Download?"
    assert code == 0 and output.count(question) == 1
    assert re.findall(r"fetched (\w)", output) == fetched
    assert ("refused:" in output) == (not fetched)


def test_weights_are_downloaded_once(hub: Hub) -> None:
    assert weights_to_download(TINY) == TINY
    file = download_weights(TINY)
    assert file == weights_file(TINY) and file.read_bytes() == CONTENT
    assert hub.ranges == [None] and weights_to_download("vit_tiny_patch16_224") == ""
    assert [path.name for path in file.parent.glob("*.part")] == []


@pytest.mark.parametrize("ranged", [True, False])
def test_incomplete_weight_download_resumes(hub: Hub, ranged: bool) -> None:
    hub.cut = 20_000
    with pytest.raises(
        FczooError, match=r"ended after 20000 of 51200 bytes; run the command again to resume"
    ):
        download_weights(TINY)
    assert weights_to_download(TINY) == TINY
    hub.cut, hub.ranged = None, ranged
    assert download_weights(TINY).read_bytes() == CONTENT
    assert hub.ranges == [None, "bytes=20000-"]


def test_weights_with_wrong_checksum_are_rejected_and_removed(hub: Hub) -> None:
    hub.content = bytes(len(CONTENT))
    with pytest.raises(
        FczooError, match=r"is not the published file \(SHA256 .* and was removed; run the"
    ):
        download_weights(TINY)
    assert [path.suffix for path in weights_file(TINY).parent.iterdir()] == [".lock"]


def test_missing_weights_on_hub_raise_error(hub: Hub) -> None:
    with pytest.raises(
        FczooError, match=r"has no model.safetensors; give a file: --backbone vit_x:FILE"
    ):
        download_weights("vit_x")


def test_offline_mode_sends_no_request_to_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (missing,) = find_missing([Settings.for_dataset("digits", backbone=TINY)])
    with pytest.raises(
        FczooError, match="are not on this machine and HF_HUB_OFFLINE is set; unset it, or "
    ):
        provide([missing], True)
    assert hub.ranges == []


def test_hash_of_downloaded_weights_matches_hub(hub: Hub) -> None:
    """Load downloaded weights with the hub's hash, so that a run can be compared and resumed."""
    model = timm.create_model(TINY, pretrained=False)
    file = weights_file(TINY)
    file.parent.mkdir(parents=True)
    save_file(model.state_dict(), file)
    del model.head
    backbone = load_backbone("vit_tiny_patch16_224")
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert backbone.sha256 == digest.hexdigest() and hub.ranges == []


@pytest.fixture
def tiny(data_server: Server, monkeypatch: pytest.MonkeyPatch) -> type:
    """Return Tiny-ImageNet with an archive on the local server that holds one file."""
    content = pack_tar(
        entry("tiny-imagenet-200", tarfile.DIRTYPE), entry("tiny-imagenet-200/wnids.txt")
    )
    data_server.files["toy.tar.gz"] = content
    cls = DATASETS.get("tinyimagenet")
    archive: Archive = describe_archive(content)._replace(url=f"{data_server.url}/toy.tar.gz")
    monkeypatch.setattr(cls, "archives", (archive,))
    return cls


BENCH = ["bench", "--methods", "fedncm", "--dataset", "tinyimagenet", "--backbone", "vit_nano_32"]


@pytest.mark.parametrize("more", [[], ["--no-download"], ["--dry-run", "--download"]])
def test_bench_downloads_nothing_without_consent(
    tiny: type,
    data_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, [*BENCH, "--data-root", str(tmp_path / "d"), *more])
    if "--dry-run" not in more:
        assert outcome.exit_code == 1 and outcome.stderr.count("\n") == 1
        assert "Error: no folder tiny-imagenet-200 in" in outcome.stderr
        assert outcome.stderr.endswith("; add --download to fetch tinyimagenet\n")
    assert data_server.ranges == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "more", [[], ["--no-download"], ["--dry-run"], ["--dry-run", "--download"]]
)
def test_archive_size_is_not_requested_without_question(
    tiny: type,
    data_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
) -> None:
    (archive,) = tiny.archives
    monkeypatch.setattr(tiny, "archives", (archive._replace(size=None),))
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(main, [*BENCH, "--data-root", str(tmp_path / "d"), *more])
    assert data_server.heads == 0 and data_server.ranges == []
    assert download_bytes(tiny()) == len(data_server.files["toy.tar.gz"])
    assert data_server.heads == 1 and data_server.ranges == []


@pytest.mark.parametrize("command", [BENCH, ["tune", *BENCH[1:], "--out", "tuned"]])
def test_download_option_fetches_data_set(
    tiny: type,
    data_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, [*command, "--data-root", str(tmp_path / "d"), "--download"])
    assert "tinyimagenet is in" in outcome.stderr and data_server.ranges == [None]
    assert (tmp_path / "d" / "tiny-imagenet-200" / "wnids.txt").read_bytes() == b"x"


def test_incomplete_data_download_resumes(
    tiny: type, data_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data_server.cut = 50
    words = [*BENCH, "--data-root", str(tmp_path / "d"), "--download"]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 1 and "ended after 50 of" in outcome.stderr
    data_server.cut = None
    assert "tinyimagenet is in" in CliRunner().invoke(main, words).stderr
    assert data_server.ranges == [None, "bytes=50-"]


@pytest.mark.parametrize("command", [BENCH, ["tune", *BENCH[1:], "--out", "tuned"]])
def test_option_error_is_reported_before_any_download(
    tiny: type,
    data_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*command, "--data-root", str(tmp_path / "d"), "--download", "--set", "fedncm.lrr=1"]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 1
    assert "lrr" in outcome.stderr
    assert data_server.ranges == []


def test_backbone_weights_are_not_downloaded_without_consent(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "bench",
        "--methods",
        "fedncm",
        "--dataset",
        "digits",
        "--backbone",
        "vit_tiny_patch16_224",
    ]
    outcome = CliRunner().invoke(main, words)
    assert outcome.exit_code == 1
    assert outcome.stderr == (
        f"Error: the weights {TINY} are not on this machine; add --download to fetch weights "
        f"{TINY}, or give a file: --backbone {TINY}:FILE\n"
    )
    assert hub.ranges == []


def test_terminal_question_reports_download_sizes(
    tiny: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ask once for data and weights, with sizes; a refusal names the option."""
    monkeypatch.setenv("FCZOO_HOME", str(tmp_path / "home"))
    script = "from fczoo.cli.app import main; main()"
    words = ["bench", "--methods", "fedncm", "--dataset", "tinyimagenet", "--device", "cpu"]
    code, output = on_terminal(script, b"n\n", {"FCZOO_HOME": str(tmp_path / "home")}, words)
    assert (
        f"Not on this machine: tinyimagenet (248 MB), weights {TINY} (23 MB), 271 MB in all. "
        "Download? [" in output
    )
    assert code == 1
    assert f"add --download to fetch tinyimagenet and weights {TINY}" in output
