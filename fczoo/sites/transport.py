"""HTTPS between sites and their server, with certificates at both ends.

Sites connect to the server's only port; the server opens no connections. A site can fetch its next
request (a question), send its answer, and fetch the outcome and the final model. The port offers
nothing else, and nothing before the certificate of a site is verified. Bodies are messages of
``fczoo.sites.messages``, JSON or model files: data that neither side executes.
"""

import contextlib
import logging
import os
import re
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from fczoo.core.errors import FczooError, first_line
from fczoo.core.files import encode_json
from fczoo.federation.model_record import RECORD, TENSORS
from fczoo.sites.credentials import site_uri, tls_context

log = logging.getLogger("fczoo")

VERSION = "1"  # of the paths; a server of another version answers 404
QUESTION, ANSWER = "question", "answer"  # paths
KEY, LIMIT = "Question-Key", "Answer-Limit"  # headers of a question
MODEL_FILES = (RECORD, TENSORS)  # files that sites can fetch; they exclude the server's state
LARGEST_BODY = 2**34  # largest question or model file in bytes that a site reads
POLL_SECONDS = 20.0  # after which the server answers that it has no question yet
STALL_SECONDS = 60.0  # without a byte after which a connection is closed
HANDSHAKE = 10.0  # seconds for a whole TLS handshake
MAX_HANDSHAKES = 64  # callers without a verified certificate; one more closes the oldest
OFFLINE_SECONDS = 3 * POLL_SECONDS  # without a request after which a site is disconnected
RETRY_SECONDS = 2.0  # between two attempts of a site to reach the server
GRACE_SECONDS = 3 * RETRY_SECONDS  # after the start within which absent sites may still connect
CHUNK = 2**20  # bytes per write, each within STALL_SECONDS
RUN_ENDED = HTTPStatus.GONE  # the run has ended; the body is its outcome
RUN_COMPLETED, RUN_FAILED = "completed", "failed"  # status of an outcome


@dataclass
class SiteStatus:
    """Server's state of the exchange with one site."""

    question: bytes | None = None  # None: there is no request, or the answer has arrived
    key: str = ""  # identifies the question in HTTP requests
    answer: bytes | None = None
    connection: ssl.SSLSocket | None = None  # the newest; a new one closes it
    last_request: float = -OFFLINE_SECONDS  # time
    knows_outcome: bool = False  # it has fetched the outcome, and the model if there is one


class SiteListener(ThreadingTCPServer):
    """Public port of a server, which exchanges bytes with the sites.

    The certificate of a caller names its site. Each site has one connection at a time.
    """

    allow_reuse_address = os.name == "posix"  # on Windows it would allow two servers on one port
    daemon_threads, block_on_close = True, False
    request_queue_size = 2 * MAX_HANDSHAKES

    def __init__(self, folder: Path, names: Sequence[str], port: int, patience: float):
        """Open the port.

        Args:
            folder: Folder of the server.
            names: Names of the sites; other callers are refused.
            port: Port on all IPv4 addresses of this machine.
            patience: Seconds to wait for the answers of sites.

        Raises:
            FczooError: Certificates are missing or invalid, or another program uses the port.
        """
        self.context = tls_context(folder, is_server=True)
        self.numbers = {site_uri(name): number for number, name in enumerate(names)}
        self.names, self.patience, self.limit = names, patience, 0
        self.model: Path | None = None  # folder of the final model
        self.outcome: dict[str, str] | None = None  # None: the run has not ended
        self.wire_bytes, self.start = 0, time.monotonic()
        self.on_change: Callable[[], None] = lambda: None  # connected or missing sites changed
        self._reported: tuple[list[str], list[str]] = ([], [])
        self._sites = [SiteStatus() for _ in names]
        self._changed = threading.Condition()
        self._handshakes: dict[socket.socket, None] = {}  # the oldest first
        try:
            super().__init__(("0.0.0.0", port), BaseHTTPRequestHandler)  # see finish_request
        except OSError as error:
            raise FczooError(
                f"the server cannot use port {port}: {error.strerror}; stop the program that uses "
                "it, or write folders with another port with fczoo site init"
            ) from error
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def __call__(self, questions: Mapping[int, bytes], limit: int, /) -> Mapping[int, bytes]:
        """Send questions to sites and return their answers after at most ``patience`` seconds.

        Args:
            questions: Questions by number of the site.
            limit: Largest size of an answer in bytes; larger ones are not read.

        Returns:
            Answers by number of the site, without sites that did not answer.

        Raises:
            FczooError: No site answers, and none has sent a request within the last minute.
        """
        with self._changed:
            self.limit = limit
            for number, question in questions.items():
                site = self._sites[number]
                site.question, site.key, site.answer = question, secrets.token_urlsafe(), None
            self._changed.notify_all()
            log.info("request to %s", ", ".join(self.missing_sites))
            end = time.monotonic() + self.patience
            while self.missing_sites and (seconds_left := end - time.monotonic()) > 0:
                self._report()
                self._changed.wait(min(seconds_left, 1.0))
            for name in self.missing_sites:
                log.info("site %s did not answer within %.0f s", name, self.patience)
            answers = {k: a for k in questions if (a := self._sites[k].answer) is not None}
            for number in questions:
                self._sites[number].question = self._sites[number].answer = None
            if not answers and self.seconds > OFFLINE_SECONDS and not self.connected_sites:
                raise FczooError("no site is connected; start the sites, then the server to resume")
            return answers

    def _report(self) -> None:
        """Call ``on_change`` if the connected or missing sites have changed."""
        if (state := (self.connected_sites, self.missing_sites)) != self._reported:
            self._reported = state
            self.on_change()

    @property
    def seconds(self) -> float:
        """Return the time since the port was opened."""
        return time.monotonic() - self.start

    @property
    def missing_sites(self) -> list[str]:
        """Return the sites whose answers are missing."""
        return [self.names[k] for k, site in enumerate(self._sites) if site.question is not None]

    @property
    def connected_sites(self) -> list[str]:
        """Return the sites that have sent a request within the last minute."""
        return [self.names[k] for k, site in enumerate(self._sites) if self._is_present(site)]

    def _is_present(self, site: SiteStatus) -> bool:
        return site.connection is not None or time.monotonic() - site.last_request < OFFLINE_SECONDS

    def end(self, status: str, reason: str = "", model: Path | None = None) -> None:
        """Publish the outcome of the run.

        Args:
            status: ``completed`` or ``failed``.
            reason: Reason of a failure, or of a missing model.
            model: Folder of the final model.
        """
        with self._changed:
            self.model, self.outcome = model, {"status": status, "reason": reason}
            self._changed.notify_all()

    def wait_informed(self, seconds: float) -> list[str]:
        """Wait until all connected sites know the outcome; return those that do not yet.

        Args:
            seconds: Longest wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._sites_without_outcome, seconds)
            return self._sites_without_outcome

    @property
    def _sites_without_outcome(self) -> list[str]:
        may_come = self.seconds < GRACE_SECONDS
        return [
            name
            for name, site in zip(self.names, self._sites, strict=True)
            if (may_come or self._is_present(site)) and not site.knows_outcome
        ]

    def close(self) -> None:
        """Close the port and all connections."""
        self.shutdown()
        self.server_close()
        with self._changed:
            for site in self._sites:
                _shut_down(site.connection)

    # connections: accepted in the listener's thread, served in one thread each

    def get_request(self) -> tuple[ssl.SSLSocket, Any]:
        """Accept a connection without waiting for its TLS handshake."""
        peer, address = self.socket.accept()
        peer.settimeout(HANDSHAKE)
        try:
            secure = self.context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:  # it is gone already
            peer.close()
            raise OSError(str(error)) from error
        with self._changed:
            self._handshakes[secure] = None
            if len(self._handshakes) > MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                _shut_down(oldest)
        return secure, address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Verify the caller's certificate, then serve its site."""
        try:
            request.do_handshake()
        except (OSError, ValueError) as error:
            if isinstance(error, ssl.SSLError):
                log.info("refused %s: %s", client_address[0], first_line(error))
                _drain(request)
            return
        finally:
            with self._changed:
                self._handshakes.pop(request, None)
        number = self._number(request.getpeercert())
        if number is None:
            log.info("refused %s: its certificate names no agreed site", client_address[0])
            request.sendall(b"HTTP/1.0 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            _drain(request)
            return
        with self._changed:
            site, older = self._sites[number], self._sites[number].connection
            site.connection, site.last_request = request, time.monotonic()
            _shut_down(older)
            self._changed.notify_all()
        try:
            SiteHandler(request, client_address, self, number)
        finally:
            with self._changed:
                site.last_request = time.monotonic()
                if site.connection is request:
                    site.connection = None
                self._changed.notify_all()

    def _number(self, certificate: Mapping[str, Any]) -> int | None:
        """Return the number of the site that a verified certificate names."""
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
        return self.numbers.get(names[0]) if len(names) == 1 else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an unexpected error of one connection; other connections continue."""
        if not isinstance(sys.exception(), OSError | ValueError):
            log.error("a request failed", exc_info=True)

    # actions of a site

    def next_question(self, number: int, connection: ssl.SSLSocket) -> tuple[bytes, str] | None:
        """Return the question of a site with its key; None if there is none within POLL_SECONDS."""
        site = self._sites[number]
        with self._changed:
            self._changed.wait_for(
                lambda: site.question or self.outcome or site.connection is not connection,
                POLL_SECONDS,
            )
            return None if site.question is None or self.outcome else (site.question, site.key)

    def is_open(self, number: int, key: str, connection: ssl.SSLSocket) -> bool:
        """Return whether the server waits for the answer to a question on this connection."""
        site = self._sites[number]
        return (
            site.question is not None
            and secrets.compare_digest(site.key.encode(), key.encode())
            and site.connection is connection
        )

    def take_answer(self, number: int, key: str, connection: ssl.SSLSocket, answer: bytes) -> bool:
        """Store the answer of a site; return False if the server no longer waits for it."""
        with self._changed:
            if not self.is_open(number, key, connection):
                return False
            self._sites[number].question, self._sites[number].answer = None, answer
            self._changed.notify_all()
            return True

    def count(self, number_of_bytes: int) -> None:
        """Add to the bytes on the wire."""
        with self._changed:
            self.wire_bytes += number_of_bytes

    def record_outcome_sent(self, number: int) -> None:
        """Record that a site has fetched the outcome, and the model if there is one."""
        with self._changed:
            self._sites[number].knows_outcome = True
            self._changed.notify_all()


class SiteHandler(BaseHTTPRequestHandler):
    """One request of a site whose certificate is verified."""

    server: SiteListener
    connection: ssl.SSLSocket
    timeout = STALL_SECONDS
    server_version, sys_version = "fczoo", ""

    def __init__(self, request: Any, address: Any, server: SiteListener, number: int):
        self.number = number
        super().__init__(request, address, server)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: a site could fill the disk."""

    def do_GET(self) -> None:
        """Send the next question, the outcome, or a file of the final model."""
        name, server = self._name(), self.server
        if name == QUESTION:
            question = server.next_question(self.number, self.connection)
            if server.outcome:
                self._respond(RUN_ENDED, encode_json(server.outcome).encode())
                if server.model is None:
                    server.record_outcome_sent(self.number)
            elif question is None:
                self._respond(HTTPStatus.NO_CONTENT)
            else:
                content, key = question
                self._respond(HTTPStatus.OK, content, {KEY: key, LIMIT: str(server.limit)})
        elif name in MODEL_FILES and server.model is not None:
            self._respond(HTTPStatus.OK, (server.model / name).read_bytes())
            if name == MODEL_FILES[-1]:
                server.record_outcome_sent(self.number)
        else:
            self._respond(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        """Receive the answer to the site's question, if it is expected and not too large."""
        (path, _, key), server = (self._name() or "").partition("/"), self.server
        length = self.headers.get("Content-Length", "")
        if path != ANSWER or not re.fullmatch(r"[0-9]{1,18}", length):
            self._respond(HTTPStatus.NOT_FOUND)
        elif not server.is_open(self.number, key, self.connection):
            self._respond(HTTPStatus.CONFLICT)
        elif int(length) > server.limit:
            text = "site %s sends %s bytes, but the limit is %d"
            log.warning(text, server.names[self.number], length, server.limit)
            server.take_answer(self.number, key, self.connection, b"")  # an invalid answer
            self._respond(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            answer = self.rfile.read(int(length))
            server.count(len(answer))
            if len(answer) == int(length):
                is_taken = server.take_answer(self.number, key, self.connection, answer)
                self._respond(HTTPStatus.NO_CONTENT if is_taken else HTTPStatus.CONFLICT)

    def _name(self) -> str | None:
        """Return the requested path without its version; None if the version differs."""
        version, _, name = self.path.removeprefix("/").partition("/")
        return name if version == VERSION else None

    def _respond(
        self, status: HTTPStatus, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        fields = {**(headers or {}), "Content-Length": str(len(body))}
        lines = [f"HTTP/1.0 {status.value} {status.phrase}", *(f"{k}: {fields[k]}" for k in fields)]
        head = "".join(f"{line}\r\n" for line in [*lines, ""]).encode()
        self.server.count(len(self.requestline) + len(str(self.headers)) + len(head) + len(body))
        self.wfile.write(head)
        for chunk in chunks_of(body):
            self.wfile.write(chunk)


def chunks_of(content: bytes) -> Iterator[memoryview]:
    """Split a body into chunks, so that the time limit of a connection applies to each chunk.

    Args:
        content: The body.
    """
    view = memoryview(content)
    return (view[start : start + CHUNK] for start in range(0, len(view), CHUNK))


def _shut_down(connection: socket.socket | None) -> None:
    """Close a connection that another thread reads or writes."""
    if connection is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _drain(connection: ssl.SSLSocket) -> None:
    """Read the data that a refused caller has sent, so that it receives the refusal."""
    with contextlib.suppress(OSError, ValueError):
        socket.socket.shutdown(connection, socket.SHUT_WR)
        connection.settimeout(1.0)
        socket.socket.recv(connection, 2**16)
