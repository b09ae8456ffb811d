"""A real browser: the pages of a folder, and the requests of the browser."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
PROBE = """<!doctype html><title>probe</title>
<iframe src="/{page}" style="width:{width}px;height:800px"></iframe>
<script>
onload = async () => {{
  const page = document.querySelector("iframe").contentWindow;
  const found = await (async (window, document) => {{ {script} }})(page, page.document);
  document.title = JSON.stringify(found);
}};
</script>"""


class Site:
    """A folder of pages on a server of this machine, as a browser with no other network sees it."""

    def __init__(self, folder: Path, profile: Path):
        self.folder, self.profile, self.asked, self.probe = folder, profile, [], ""
        site = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/favicon.ico":  # which browsers ask for unasked
                    site.asked.append(self.path)
                if self.path != "/probe.html":
                    super().do_GET()
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(site.probe.encode())

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        handler = partial(Handler, directory=str(folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def chromium(self, page: str, *wishes: str) -> str:
        return self.run(page, *wishes).stdout

    def run(self, page: str, *wishes: str) -> subprocess.CompletedProcess[str]:
        """Open a page in the browser.

        Args:
            page: Path of the page on the server.
            wishes: Further options of Chromium.

        Returns:
            The finished process.
        """
        address = f"http://127.0.0.1:{self.server.server_port}/{page}"
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={self.profile}", *wishes, address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    def dom(self, page: str) -> str:
        """Return the page as the browser has it after its scripts."""
        return self.chromium(page, "--virtual-time-budget=5000", "--dump-dom")

    def complaints(self, page: str) -> list[str]:
        """Return the lines of the page's console: errors, and what its policy forbids."""
        log = self.run(
            page, "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"
        ).stderr
        return [line for line in log.splitlines() if "CONSOLE" in line]

    def shot(self, page: str, file: Path, width: int = 500, height: int = 2000) -> Any:
        """Return a picture of the page [height, width, 4].

        Args:
            page: Path of the page on the server.
            file: PNG file to write.
            width: Width of the window in pixels.
            height: Height of the window in pixels.
        """
        import matplotlib.image

        self.chromium(page, f"--screenshot={file}", f"--window-size={width},{height}")
        return matplotlib.image.imread(file)

    def ask(self, page: str, script: str, width: int = 390) -> Any:
        """Run the body of a JavaScript function on a page in a frame; return what it returns.

        Args:
            page: Path of the page on the server.
            script: Body of an asynchronous function of ``window`` and ``document``.
            width: Width of the frame in pixels.
        """
        self.probe = PROBE.format(page=page, width=width, script=script)
        dom = self.chromium("probe.html", "--virtual-time-budget=8000", "--dump-dom")
        (title,) = re.findall(r"<title>(.*?)</title>", dom, flags=re.DOTALL)[:1]
        return json.loads(unescape(title))


@contextmanager
def serve_site(folder: Path, profile: Path) -> Iterator[Site]:
    """Serve the pages of a folder while the context is open.

    Args:
        folder: The folder of pages.
        profile: Folder of the browser's profile.
    """
    site = Site(folder, profile)
    try:
        yield site
    finally:
        site.server.shutdown()


def cells(page: Path, table: str) -> list[list[str]]:
    """Return the text of each cell of a table.

    Args:
        page: The page.
        table: The table's label.

    Returns:
        One list per row.
    """
    _, _, text = page.read_text().partition(f'aria-label="{table}">')
    body = text.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", body)
    ]
    return [[unescape(re.sub(r"<[^>]*>", "", cell)) for cell in row] for row in rows]
