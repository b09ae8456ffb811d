"""Processes of a federation: the server and the sites, which all end with the run."""

import http.client
import json
import logging
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fczoo.core.errors import FczooError, LogFile, first_line, printable
from fczoo.core.files import convert_json, read_json, write_json, write_safely
from fczoo.federation.model_record import read_model_record, read_verified
from fczoo.models.storage import store_weights_path
from fczoo.sites.credentials import AGREEMENT_FOLDER, SERVER, read_identity, tls_context
from fczoo.sites.federation_config import RUN, FederationConfig, read_agreement
from fczoo.sites.folders import open_server, open_site
from fczoo.sites.ledger import PrivacyLedger
from fczoo.sites.messages import REFUSAL, Refusal, serialize
from fczoo.sites.transport import (
    ANSWER,
    KEY,
    LARGEST_BODY,
    LIMIT,
    MODEL_FILES,
    QUESTION,
    RETRY_SECONDS,
    RUN_COMPLETED,
    RUN_ENDED,
    RUN_FAILED,
    STALL_SECONDS,
    VERSION,
    SiteListener,
    chunks_of,
)

log = logging.getLogger("fczoo")

MODEL = "model"
RESULT, FAILURE, STATUS = "result.json", "failed.json", "status.json"
LOG, LOCK = "fczoo.log", ".lock"
LOG_BYTES = 10_000_000  # size of a log file; the last two files are kept
STOP_REASON = "it was stopped; start it again to resume"
NO_MODEL = "the server could not store it; see the log of the server"
NO_TRAFFIC = {"seconds": 0.0, "wire_bytes": 0, "connected": [], "missing": []}


def start(folder: Path, images: Path, patience: float, ledger: PrivacyLedger | None = None) -> Path:
    """Run the server or the site of a folder until the run has ended.

    Args:
        folder: Folder of a site or of the server, from ``write_federation``.
        images: Folder of class folders.
        patience: Seconds that the server waits for answers, and a site for its server.
        ledger: Ledger of a site's institution; the server does not use it.

    Returns:
        The server's result file, or the site's folder of the final model.

    Raises:
        FczooError: A folder is missing or invalid, the server cannot be reached, or the run
            failed.
    """
    name, address = read_identity(folder)
    if not images.is_dir():
        raise FczooError(
            f"no folder {images}; give --images a folder that contains the class folders"
        )
    with _lock_folder(folder):
        agreement = read_agreement(folder / AGREEMENT_FOLDER)
        arguments = folder.resolve(), images.resolve(), agreement, name, address, patience
        return _run_server(*arguments) if name == SERVER else _run_site(*arguments, ledger)


class RotatingLog(LogFile, RotatingFileHandler):
    """Log file of limited size."""


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder inside a ``with`` block; make new files private, and log to its file."""
    lock, old_mask = FileLock(folder / LOCK), os.umask(0o077)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FczooError(f"another process is running in {folder}; stop it first") from None
    handler = RotatingLog(folder / LOG, maxBytes=LOG_BYTES, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    old_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    old_level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    except KeyboardInterrupt:
        error = FczooError(STOP_REASON)
        error.exit_code = 128 + signal.SIGINT
        raise error from None
    finally:
        log.removeHandler(handler)
        log.setLevel(old_level)
        handler.close()
        signal.signal(signal.SIGTERM, old_handler)
        os.umask(old_mask)
        lock.release()


def status(folder: Path) -> dict[str, Any]:
    """Return the state of the last run of a server.

    Args:
        folder: Folder of the server.

    Returns:
        ``status``, ``reason`` of a failure, ``seconds``, ``wire_bytes``, the ``connected`` sites,
        and the sites with ``missing`` answers.

    Raises:
        FczooError: No server was started in this folder.
    """
    if read_identity(folder)[0] != SERVER or not (folder / STATUS).exists():
        raise FczooError(f"no server was started in {folder}; see 'fczoo site start --help'")
    state = read_json(folder / STATUS, "state of a server")
    if state.get("status") == "running":
        try:
            with FileLock(folder / LOCK, timeout=0):
                reason = "the server process has ended unexpectedly; start it again to resume"
                return {**state, "status": RUN_FAILED, "reason": reason}
        except Timeout:
            pass
    return state


def _run_server(
    folder: Path,
    images: Path,
    agreement: FederationConfig,
    name: str,
    address: tuple[str, int],
    patience: float,
) -> Path:
    """Run all rounds and write the result, or the reason of a failure, into the folder."""
    try:
        listener = SiteListener(folder, agreement.sites, address[1], patience)
    except FczooError as error:  # keep the result of an earlier run
        with suppress(OSError):
            write_json(folder / FAILURE, {"reason": str(error)})
            write_json(folder / STATUS, {"status": RUN_FAILED, "reason": str(error), **NO_TRAFFIC})
        raise
    result, model = folder / RESULT, folder / MODEL
    for old in (result, folder / FAILURE, model / MODEL_FILES[0]):
        old.unlink(missing_ok=True)

    def write_status(state: str = "running", reason: str = "") -> None:
        sites = {"connected": listener.connected_sites, "missing": listener.missing_sites}
        traffic = {"seconds": listener.seconds, "wire_bytes": listener.wire_bytes}
        write_json(folder / STATUS, {"status": state, "reason": reason, **traffic, **sites})

    listener.on_change = write_status
    try:
        write_status()
        open_server(agreement, images, listener, folder).run_to(result)
    except BaseException as error:
        reason = _reason(error)
        with suppress(OSError):  # sites must be notified also if the disk is full
            write_json(folder / FAILURE, {"reason": reason})
            write_status(RUN_FAILED, reason)
        if not isinstance(error, Exception):  # a signal: sites wait until the server restarts
            raise
        if not isinstance(error, FczooError):
            log.exception("the server cannot continue")
        listener.end(RUN_FAILED, reason)
        _wait_for_sites(listener, patience)
        raise FczooError(f"the run has failed: {reason}") from error
    else:
        write_status(RUN_COMPLETED)
        has_model = (model / MODEL_FILES[0]).exists()
        reason = "" if has_model else NO_MODEL
        listener.end(RUN_COMPLETED, reason, model if has_model else None)
        _wait_for_sites(listener, patience)
        return result
    finally:
        listener.close()


def _reason(error: BaseException) -> str:
    """Return the reason of a failure in one line."""
    if isinstance(error, FczooError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, Exception):
        return f"{type(error).__name__} at the server: {first_line(error)}; see {LOG} of the server"
    return STOP_REASON


def _wait_for_sites(listener: SiteListener, patience: float) -> None:
    """Wait until all connected sites know the outcome of the run, or until Ctrl-C."""
    end, names = time.monotonic() + patience, list[str]()
    with suppress(KeyboardInterrupt):
        while (waiting := listener.wait_informed(1.0)) and time.monotonic() < end:
            if waiting != names:
                names = waiting
                text = f"waiting for {', '.join(names)} to fetch the outcome (Ctrl-C: do not wait)"
                print(f"the run has ended; {text}", file=sys.stderr, flush=True)


def _run_site(
    folder: Path,
    images: Path,
    agreement: FederationConfig,
    name: str,
    address: tuple[str, int],
    patience: float,
    ledger: PrivacyLedger | None = None,
) -> Path:
    """Answer the server's requests until the run has ended, then fetch the model."""
    link = ServerLink(folder, address, patience)
    site = open_site(agreement, name, images, folder / "kept", ledger)
    while True:
        status, headers, content = link.request(
            QUESTION, statuses=(HTTPStatus.OK, HTTPStatus.NO_CONTENT, RUN_ENDED)
        )
        if status == RUN_ENDED:
            break
        if status == HTTPStatus.OK:
            answer, limit = site.answer(content), _limit(headers)
            if len(answer) > limit:
                reason = f"its answer has {len(answer)} bytes, but the limit is {limit}"
                answer = serialize(REFUSAL, Refusal(f"{reason}; raise answer_mb in {RUN}"))
            log.info("answered a request of %d bytes with %d bytes", len(content), len(answer))
            statuses = (
                HTTPStatus.NO_CONTENT,
                HTTPStatus.CONFLICT,
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
            try:
                link.request(f"{ANSWER}/{headers.get(KEY, '')}", answer, statuses)
            except FczooError as error:  # if it still waits, the server repeats the request
                log.info("the answer did not arrive: %s", error)
                time.sleep(RETRY_SECONDS)
    outcome = _outcome(content)
    reason = printable(outcome.get("reason", ""), 500)
    if outcome.get("status") != RUN_COMPLETED:
        raise FczooError(f"the run has failed at the server: {reason}")
    if reason:
        raise FczooError(f"the run is complete, but its model is not available: {reason}")
    store_weights_path(agreement.settings.backbone, site.scenario.backbone.sha256)
    return _fetch_model(link, folder / MODEL)


def _limit(headers: Mapping[str, str]) -> int:
    """Return the largest size of an answer in bytes; 0 if the header has no valid number."""
    text = headers.get(LIMIT, "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0


def _outcome(content: bytes) -> dict[str, str]:
    try:
        return convert_json(json.loads(content), dict[str, str])
    except (ValueError, RecursionError) as error:
        raise FczooError(
            f"the server sent an invalid outcome of the run: {first_line(error)}; install the same "
            "version of fczoo at server and site"
        ) from error


def _fetch_model(link: "ServerLink", place: Path) -> Path:
    """Fetch the final model and check it."""
    contents = [link.request(name)[2] for name in MODEL_FILES]
    place.mkdir(exist_ok=True)
    for name, content in reversed([*zip(MODEL_FILES, contents, strict=True)]):
        write_safely(place / name, content)
    read_verified(place, MODEL_FILES[1], read_model_record(place))
    return place


class ServerLink:
    """Client of a site for its server, which may be unreachable for a while."""

    def __init__(self, folder: Path, address: tuple[str, int], patience: float):
        """Load the credentials of a site.

        Args:
            folder: Folder of the site.
            address: Host and port of the server.
            patience: Seconds for which an unreachable server is retried.

        Raises:
            FczooError: The credentials are missing or invalid.
        """
        self.context = tls_context(folder, is_server=False)
        self.host, self.port = address
        self.patience, self.problem = patience, ""

    def request(
        self, path: str, body: bytes | None = None, statuses: Sequence[int] = (HTTPStatus.OK,)
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send a request; if the server is unreachable, retry for ``patience`` seconds.

        A request with a body is not retried: the server closes the connection without reading it
        if it no longer waits for this answer.

        Args:
            path: Path, such as ``question``.
            body: Bytes to send (POST). None: fetch the path (GET).
            statuses: Expected HTTP statuses.

        Returns:
            Status, headers and body of the response.

        Raises:
            FczooError: The server is unreachable, is not the federation's server, refuses the
                site, or answers with another status.
        """
        end = time.monotonic() + (self.patience if body is None else 0.0)
        while True:
            try:
                status, headers, content = self._try(path, body)
            except ssl.SSLCertVerificationError as error:
                raise FczooError(
                    f"cannot verify the certificate of the server at {self.host}:{self.port}: "
                    f"{error.verify_message}; ask its operator for a new folder"
                ) from error
            except socket.gaierror:
                problem = "name not known"
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
                    raise FczooError(
                        f"the server at {self.host}:{self.port} refuses the certificate of this "
                        f"site: {_describe_error(error)}; ask its operator for a new folder"
                    ) from error
                problem = _describe_error(error)
            else:
                self.problem = ""
                if status in statuses:
                    return status, headers, content
                if status == HTTPStatus.FORBIDDEN:
                    raise FczooError(
                        f"this site is not in the {RUN} of the server at {self.host}:{self.port}; "
                        "ask the operator of the server to add it"
                    )
                raise FczooError(
                    f"the server at {self.host}:{self.port} answers {status} to {path}; install "
                    "the same version of fczoo at server and site"
                )
            if time.monotonic() > end:
                raise FczooError(
                    f"the server at {self.host}:{self.port} was unreachable for "
                    f"{self.patience:.0f} s: {problem}; start it, then this site again"
                )
            if problem != self.problem:
                print(
                    f"waiting for {self.host}:{self.port} ({problem})", file=sys.stderr, flush=True
                )
                self.problem = problem
            time.sleep(min(RETRY_SECONDS, self.patience))

    def _try(self, path: str, body: bytes | None) -> tuple[int, Mapping[str, str], bytes]:
        server = http.client.HTTPSConnection(
            self.host, self.port, timeout=STALL_SECONDS, context=self.context
        )
        try:
            server.connect()
            chunks = None if body is None else chunks_of(body)
            headers = {} if body is None else {"Content-Length": str(len(body))}
            method = "GET" if body is None else "POST"
            server.request(method, f"/{VERSION}/{path}", chunks, headers)
            response = server.getresponse()
            if response.length is None or response.length > LARGEST_BODY:
                raise OSError("its response has no length or is too large")
            return response.status, dict(response.headers), response.read()
        finally:
            server.close()


def _describe_error(error: Exception) -> str:
    """Describe the error of a failed connection in a few words."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
