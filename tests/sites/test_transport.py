"""The port of a server: connections of strangers, sites and hostile sites."""

import json
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fczoo import FczooError
from fczoo.core.files import write_json
from fczoo.sites import credentials, node, transport
from fczoo.sites.credentials import tls_context, write_federation
from fczoo.sites.federation_config import read_agreement
from fczoo.sites.node import ServerLink
from fczoo.sites.transport import (
    ANSWER,
    KEY,
    MODEL_FILES,
    QUESTION,
    RUN_COMPLETED,
    RUN_ENDED,
    SiteListener,
)
from helpers_sites import NAMES, free_port

PATHS = ("GET /1/question", "POST /1/answer/x", "GET /1/model.json", "GET /1/model.safetensors")


@pytest.fixture
def federation(agreement_folder, tmp_path) -> tuple[Path, int]:
    """Write the folders of a federation; return them and the server's port."""
    port = free_port()
    write_federation(tmp_path / "federation", agreement_folder, "localhost", port)
    return tmp_path / "federation", port


@pytest.fixture
def listener(federation, monkeypatch) -> Iterator[SiteListener]:
    """Open the port of a server that waits one second for answers."""
    monkeypatch.setattr(transport, "GRACE_SECONDS", 0.0)
    folder, port = federation
    listener = SiteListener(folder / "server", NAMES, port, 1.0)
    yield listener
    listener.close()


def link_of(federation: tuple[Path, int], name: str, patience: float = 5.0) -> ServerLink:
    folder, port = federation
    return ServerLink(folder / name, ("localhost", port), patience)


def client_context(authority: Path | None, folder: Path | None, name: str) -> ssl.SSLContext:
    """Create a TLS context that trusts ``authority`` and has the key of ``folder``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if authority:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority)
    if folder:
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
    return context


def response_of(port: int, context: ssl.SSLContext | None, request: str) -> bytes:
    """Return the response to a request; empty if the server refuses it."""
    content = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        try:
            caller = context.wrap_socket(plain) if context else plain
            caller.sendall(f"{request} HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc".encode())
            while part := caller.recv(2**16):
                content += part
        except OSError:  # an SSLError is one
            pass
    return content


def question_in_background(listener, numbers, limit=10**7):
    """Ask sites in another thread; return the thread and the list of answers."""
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(listener(dict.fromkeys(numbers, b"what"), limit))
    )
    thread.start()
    return thread, answers


@pytest.mark.parametrize("kind", ["nothing", "plain", "ca.crt", "other key", "server's key"])
def test_caller_without_valid_key_is_rejected(
    federation, listener, agreement_folder, tmp_path, kind
):
    """Reject strangers at every path, even with all public files."""
    folder, port = federation
    ca = folder / "paris" / "ca.crt"
    context = None
    if kind == "nothing":
        context = client_context(None, None, "")
    elif kind == "ca.crt":
        context = client_context(ca, None, "")
    elif kind == "other key":
        write_federation(tmp_path / "other", agreement_folder, "localhost", port)
        context = client_context(ca, tmp_path / "other" / "paris", "site")
    elif kind == "server's key":  # it is not valid for clients
        context = client_context(ca, folder / "server", "server")
    thread, answers = question_in_background(listener, (0,))
    listener.model = folder / "model"
    listener.model.mkdir()
    (listener.model / MODEL_FILES[0]).write_text("what")
    for request in PATHS:
        content = response_of(port, context, request)
        assert b"HTTP" not in content and b"what" not in content
        assert kind == "plain" or not content
    assert listener.connected_sites == [] and listener.missing_sites == ["paris"]
    thread.join()
    assert answers == [{}] and listener.outcome is None
    valid = client_context(ca, folder / "paris", "site")
    assert response_of(port, valid, "GET /1/model.json").endswith(b"what")


def test_questions_and_answers_are_exchanged(federation, listener):
    thread, answers = question_in_background(listener, (0, 2))
    contents = {"paris": b"large " * 500_000, "lyon": b""}
    for name, content in contents.items():
        link = link_of(federation, name)
        status, headers, question = link.request(QUESTION)
        assert (status, question) == (200, b"what")
        assert (
            link.request(QUESTION)[1][KEY] == headers[KEY]
        )  # the question stays until it is answered
        assert link.request(f"{ANSWER}/{headers[KEY]}", content, (204,))[0] == 204
        again = link.request(f"{ANSWER}/{headers[KEY]}", b"late", (204, 409))
        assert again[0] == 409
    thread.join()
    assert answers == [{0: b"large " * 500_000, 2: b""}]
    assert 3_000_000 < listener.wire_bytes < 3_005_000
    assert listener.connected_sites == ["paris", "lyon"]


def test_server_without_connected_site_raises(federation, listener, monkeypatch):
    """Count a waiting site as connected; raise if no site has sent a request."""
    monkeypatch.setattr(transport, "POLL_SECONDS", 0.1)
    link_of(federation, "rome").request(QUESTION, statuses=(204,))
    assert listener({0: b"what"}, 100) == {}
    monkeypatch.setattr(transport, "OFFLINE_SECONDS", 0.0)
    with pytest.raises(FczooError, match=r"^no site is connected; start the sites"):
        listener({0: b"what"}, 100)


def test_site_waits_for_its_question(federation, listener, monkeypatch):
    monkeypatch.setattr(transport, "POLL_SECONDS", 0.1)
    link = link_of(federation, "rome")
    assert link.request(QUESTION, statuses=(204,))[0] == 204
    monkeypatch.setattr(transport, "POLL_SECONDS", 20.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(link.request, QUESTION)
        thread, _ = question_in_background(listener, (1,))
        assert waiting.result()[2] == b"what"
    thread.join()


def test_site_cannot_act_as_other_site(federation, listener):
    """Identify a site only by the name in its certificate."""
    thread, answers = question_in_background(listener, (0, 1))
    paris, rome = link_of(federation, "paris"), link_of(federation, "rome")
    key = paris.request(QUESTION)[1][KEY]
    assert rome.request(QUESTION)[1][KEY] != key
    assert rome.request(f"{ANSWER}/{key}", b"forged", (409,))[0] == 409
    assert paris.request(f"{ANSWER}/{key}", b"true", (204,))[0] == 204
    thread.join()
    assert answers == [{0: b"true"}]


def test_site_cannot_act_as_server(federation):
    folder, port = federation
    for kind in ("crt", "key"):
        shutil.copy(folder / "rome" / f"site.{kind}", folder / "server" / f"server.{kind}")
    listener = SiteListener(folder / "server", NAMES, port, 1.0)
    try:
        with pytest.raises(FczooError, match="cannot verify the certificate of the server"):
            link_of(federation, "paris").request(QUESTION)
    finally:
        listener.close()


def test_answer_above_size_limit_is_rejected(federation, listener, caplog):
    folder, port = federation
    thread, answers = question_in_background(listener, (0,), limit=1000)
    link = link_of(federation, "paris")
    headers = link.request(QUESTION)[1]
    assert headers[transport.LIMIT] == "1000"
    context = tls_context(folder / "paris", is_server=False)
    with (
        socket.create_connection(("localhost", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as hostile,
    ):
        head = f"POST /1/answer/{headers[KEY]} HTTP/1.0\r\nContent-Length: {10**12}\r\n\r\n"
        hostile.sendall(head.encode())
        assert hostile.recv(100).startswith(b"HTTP/1.0 413")
    thread.join()
    assert answers == [{0: b""}]  # an invalid message, so the site has no upload in this round
    assert "site paris sends 1000000000000 bytes, but the limit is 1000" in caplog.text


@pytest.mark.parametrize("length", ["", "-1", "1e3", "9" * 30, "²"])
def test_invalid_content_length_is_rejected(federation, listener, length):
    folder, port = federation
    thread, answers = question_in_background(listener, (0,))
    key = link_of(federation, "paris").request(QUESTION)[1][KEY]
    context = tls_context(folder / "paris", is_server=False)
    with (
        socket.create_connection(("localhost", port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as hostile,
    ):
        head = f"POST /1/answer/{key} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n"
        hostile.sendall(head.encode())
        assert hostile.recv(100).startswith(b"HTTP/1.0 404")
    listener.take_answer(0, key, listener._sites[0].connection, b"")
    thread.join(5)
    assert len(answers) == 1


def test_new_connection_of_site_closes_old_one(federation, listener):
    folder, port = federation
    context = tls_context(folder / "paris", is_server=False)
    with socket.create_connection(("localhost", port), timeout=5) as plain:
        first = context.wrap_socket(plain, server_hostname="localhost")
        first.sendall(b"GET /1/question HTTP/1.0\r\n\r\n")
        thread, _ = question_in_background(listener, (1,))  # of another site
        threads = threading.active_count()
        second = link_of(federation, "paris", 2.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(second.request, QUESTION, None, (204, RUN_ENDED))
            assert first.recv(100) == b""  # the first connection is closed
            listener.end(RUN_COMPLETED)
            assert waiting.result()[0] == RUN_ENDED
        thread.join()
        assert threading.active_count() <= threads


def test_half_open_connections_do_not_block_sites(federation, listener):
    """Limit the number of half-open connections; close the oldest ones first."""
    _, port = federation
    number = transport.MAX_HANDSHAKES + 20
    strangers = [socket.create_connection(("localhost", port)) for _ in range(number)]
    thread, _ = question_in_background(listener, (0,))
    assert link_of(federation, "paris").request(QUESTION)[2] == b"what"
    thread.join()
    assert len(listener._handshakes) <= transport.MAX_HANDSHAKES
    assert strangers[0].recv(1) == b""  # closed
    for stranger in strangers:
        stranger.close()


def test_connected_sites_get_outcome_and_model(federation, listener, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in (*MODEL_FILES, "server_state.safetensors"):
        (model / name).write_bytes(name.encode())
    paris, rome = link_of(federation, "paris"), link_of(federation, "rome")
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(link.request, QUESTION, None, (RUN_ENDED,)) for link in (paris, rome)
        ]
        while listener.connected_sites != ["paris", "rome"]:
            time.sleep(0.01)
        with pytest.raises(FczooError, match="answers 404"):
            link_of(federation, "lyon").request(MODEL_FILES[0])  # the run has not ended
        listener.end(RUN_COMPLETED, model=model)
        assert [json.loads(w.result()[2])["status"] for w in waiting] == [RUN_COMPLETED] * 2
    assert listener.wait_informed(0.01) == ["paris", "rome", "lyon"]
    for link in (paris, rome):
        assert [link.request(name)[2].decode() for name in MODEL_FILES] == [*MODEL_FILES]
    assert listener.wait_informed(0.01) == ["lyon"]
    for path in ("server_state.safetensors", "../server.key", "%2e%2e/server.key", "model.json/"):
        with pytest.raises(FczooError, match="answers 404"):
            paris.request(path)


def test_server_informs_sites_of_failure(federation, listener, monkeypatch):
    listener.end("failed", "no test image")
    _, _, content = link_of(federation, "paris").request(QUESTION, statuses=(RUN_ENDED,))
    assert json.loads(content) == {"status": "failed", "reason": "no test image"}
    assert listener.wait_informed(1.0) == []
    monkeypatch.setattr(transport, "GRACE_SECONDS", 60.0)  # other sites may still connect
    assert listener.wait_informed(0.01) == ["rome", "lyon"]


def test_connection_errors_are_reported(federation, agreement_folder, tmp_path, monkeypatch):
    folder, port = federation
    monkeypatch.setattr(node, "RETRY_SECONDS", 0.05)
    with pytest.raises(FczooError, match=r"was unreachable for 1 s: Connection refused; start"):
        link_of(federation, "paris", 1.0).request(QUESTION)
    with pytest.raises(FczooError, match="was unreachable for 0 s: name not known"):
        ServerLink(folder / "paris", ("nowhere.invalid", port), 0.1).request(QUESTION)
    listener = SiteListener(folder / "server", NAMES[:2], port, 1.0)
    try:
        with pytest.raises(FczooError, match=f"the server cannot use port {port}: Address"):
            SiteListener(folder / "server", NAMES, port, 1.0)
        write_federation(tmp_path / "other", agreement_folder, "localhost", port)
        with pytest.raises(FczooError, match="cannot verify the certificate of the server"):
            ServerLink(tmp_path / "other" / "rome", ("localhost", port), 1.0).request(QUESTION)
        shutil.copy(folder / "rome" / "ca.crt", tmp_path / "other" / "rome")
        with pytest.raises(FczooError, match=r"refuses the certificate of this site: .*unknown"):
            ServerLink(tmp_path / "other" / "rome", ("localhost", port), 1.0).request(QUESTION)
        with pytest.raises(FczooError, match=r"this site is not in the run\.toml of the server"):
            link_of(federation, "lyon").request(QUESTION)
        monkeypatch.setattr(node, "VERSION", "2")
        with pytest.raises(
            FczooError, match="install the same version of fczoo at server and site"
        ):
            link_of(federation, "paris").request(QUESTION)
    finally:
        listener.close()


def test_expired_or_damaged_certificate_is_rejected(agreement_folder, tmp_path, monkeypatch):
    write_federation(tmp_path / "good", agreement_folder, "localhost", 9443)
    (tmp_path / "good" / "rome" / "site.key").write_text("nothing")
    with pytest.raises(FczooError, match=r"in \S+/rome are missing or damaged: "):
        tls_context(tmp_path / "good" / "rome", is_server=False)
    monkeypatch.setattr(credentials, "DAYS", -0.5)
    write_federation(tmp_path / "old", agreement_folder, "localhost", 9443)
    for name in ("server", "paris"):
        with pytest.raises(FczooError, match=r"expired on 20\d\d-\d\d-\d\d; write the folders"):
            tls_context(tmp_path / "old" / name, is_server=name == "server")


def test_server_rejects_expired_site_certificate(
    federation, listener, agreement_folder, tmp_path, monkeypatch
):
    """Check expiry at the server, even if the site skips its own check."""
    _, port = federation
    monkeypatch.setattr(time, "time", lambda: 0.0)  # its own check passes
    monkeypatch.setattr(credentials, "DAYS", -0.5)
    write_federation(tmp_path / "old", agreement_folder, "localhost", port)
    context = client_context(None, tmp_path / "old" / "paris", "site")
    assert response_of(port, context, PATHS[0]) == b""


def test_late_large_answer_does_not_stop_site(federation, listener, tmp_path, monkeypatch):
    """Close the connection of a late answer at the server; the site gets the outcome."""
    folder, port = federation
    thread, answers = question_in_background(listener, (0,), limit=10**8)

    class SlowSite:
        def answer(self, content: bytes) -> bytes:
            thread.join()  # the server has waited long enough
            listener.end("failed", "no one answered")
            return b"x" * 20_000_000

    monkeypatch.setattr(node, "open_site", lambda *_: SlowSite())
    monkeypatch.setattr(node, "RETRY_SECONDS", 0.05)
    with pytest.raises(FczooError, match="failed at the server: no one answered"):
        node._run_site(folder / "paris", tmp_path, None, "paris", ("localhost", port), 1.0)
    assert answers == [{}]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"status": 1}', b"[" * 10**5, b"\xff"])
def test_invalid_outcome_is_rejected(content):
    with pytest.raises(
        FczooError, match=r"the server sent an invalid outcome of the run: .+; install"
    ):
        node._outcome(content)
    for limit in ("", "-1", "9" * 5000, "many"):
        assert node._limit({transport.LIMIT: limit}) == 0


def test_sites_get_failure_reason_despite_full_disk(federation, tmp_path, monkeypatch):
    """Send the reason to sites even if the server cannot write it to a full disk."""
    folder, port = federation
    outcomes = []

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "disk")

    monkeypatch.setattr(node, "write_json", fail)
    monkeypatch.setattr(transport, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(SiteListener, "end", lambda _, *outcome: outcomes.append(outcome))
    agreement = read_agreement(folder / "server" / "agreed")
    with pytest.raises(FczooError, match="the run has failed: No space left on device: disk"):
        node._run_server(folder / "server", tmp_path, agreement, "server", ("localhost", port), 0.1)
    assert outcomes == [("failed", "No space left on device: disk")]


def test_flower_version_folders_are_rejected(agreement_folder, tmp_path):
    for name, file in (("rome", "node.key"), ("server", "keys")):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "place.json", {"name": name, "address": "localhost:9443"})
        (tmp_path / name / file).touch()
        with pytest.raises(FczooError, match=r"used Flower; write the folders .* again with"):
            node.start(tmp_path / name, tmp_path, 1.0)
