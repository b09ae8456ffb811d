"""A file server with every fault that servers have, and archives to serve."""

import hashlib
import io
import tarfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from fczoo.data.dataset import Archive

CONTENT = np.random.default_rng(0).bytes(50_000)


class Server(ThreadingHTTPServer):
    """A server of ``files`` that notes the requested ranges; its attributes select its faults."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges: list[str | None] = []
        self.heads = 0  # requests for a size alone
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
        server, range_header = self.server, self.headers.get("Range")
        server.ranges.append(range_header)
        content = server.files.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = (
            int(range_header.removeprefix("bytes=").rstrip("-"))
            if range_header and server.ranged
            else 0
        )
        if range_header and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if server.sized:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(
            content[start:] if server.cut is None else content[start : start + server.cut]
        )
        self.wfile.flush()
        while server.hold:
            time.sleep(0.01)

    def do_HEAD(self) -> None:
        self.server.heads += 1
        content = self.server.files.get(self.path.lstrip("/"))
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print no lines into the test's output."""


def describe_archive(content: bytes, name: str = "toy.tar.gz") -> Archive:
    """Describe an archive with the MD5 and the size of its content."""
    return Archive(
        f"http://original.invalid/{name}", hashlib.md5(content).hexdigest(), len(content)
    )


def pack_tar(*members: tarfile.TarInfo, content: bytes = b"x") -> bytes:
    """Pack members into a gzipped tar file.

    Args:
        members: The members.
        content: Content of each member that is a file.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for member in members:
            member.size = len(content) if member.isfile() else 0
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    """Make a member of a tar file.

    Args:
        name: Its path.
        kind: Its type, as ``tarfile`` names it.
        target: What it links to, if it is a link.
    """
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member
