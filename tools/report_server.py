"""Serves the live page of a run in progress with Python's standard library: a few fixed paths, and no files from disk.

report.py computes the content of the page. This module first sends all of it, and then changes since a page's version.
"""

import errno
import ipaddress
import json
import secrets
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megatron.tools.run_log import RunFollower, RunLog

MAX_VERSIONS = 4  # a page with an older version receives the whole content
MIN_SECONDS = 1.0  # minimum time between two reads of the logs, for any number of pages
SHARE_OF_TIME = 0.2  # maximum fraction of the server's time spent on reading and computing
IDLE_SECONDS = 30.0  # connections without a request are closed after this time
HEADERS = {
    # The page loads only from this server; plotly needs inline styles.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveReport:
    """The content of a live page, in versions. Thread-safe.

    content_of: computes the page's content from runs. clock: returns monotonic seconds.
    """

    def __init__(
        self,
        places: Sequence[Path],
        content_of: Callable[[Sequence[RunLog]], dict[str, Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._followers = [RunFollower(place) for place in places]
        self._content_of, self._clock = content_of, clock
        self._lock = threading.Lock()
        # Distinguishes versions of this server from versions of an earlier server on the same port.
        self._name, self._number = secrets.token_hex(4), 0
        self._contents: dict[str, dict[str, Any]] = {}  # by version, the latest last
        self._changes: dict[str, Any] = {}  # by version: changes to the latest, shared by all pages
        self._next_update_at = 0.0

    def answer(self, since: str | None) -> dict[str, Any]:
        """Returns the changes since a version, or the whole content if `since` is unknown.

        Returns {"version", "content"} or {"version", "changes"}, with changes None if there are none.
        """
        with self._lock:
            self._update()
            version = next(reversed(self._contents))
            if since not in self._contents:
                return {"version": version, "content": self._contents[version]}
            if since not in self._changes:
                self._changes[since] = changes(self._contents[since], self._contents[version])
            return {"version": version, "changes": self._changes[since]}

    def close(self) -> None:
        """Closes the logs of all runs."""
        with self._lock:
            for follower in self._followers:
                follower.close()

    def _update(self) -> None:
        if self._clock() < self._next_update_at:
            return
        began = self._clock()
        news = [follower.update() for follower in self._followers]
        if any(news) or not self._contents:
            self._add(self._content())
        took = self._clock() - began
        self._next_update_at = began + max(MIN_SECONDS, took / SHARE_OF_TIME)

    def _content(self) -> dict[str, Any]:
        missing = [follower.problem for follower in self._followers if follower.problem]
        runs = [follower.run() for follower in self._followers if not follower.problem]
        return {**(self._content_of(runs) if runs else {}), "waits": missing}

    def _add(self, content: dict[str, Any]) -> None:
        self._number += 1
        self._contents[f"{self._name}-{self._number}"] = content
        self._changes.clear()
        while len(self._contents) > MAX_VERSIONS:
            self._contents.pop(next(iter(self._contents)))


@dataclass(frozen=True)
class Asset:
    """The response for a path. is_fixed: it never changes under this path, so browsers may cache it."""

    body: bytes
    kind: str
    is_fixed: bool = False


class ReportServer(ThreadingHTTPServer):
    """Answers GET requests for its assets and for /content.json?since=VERSION."""

    daemon_threads = True  # a slow reader does not delay the shutdown

    def __init__(self, address: tuple[str, int], live: LiveReport, *, assets: Mapping[str, Asset]) -> None:
        """Starts listening. Raises ValueError naming --port or --host if the server cannot listen on it."""
        host, port = address
        self.live, self.assets = live, assets
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            self.is_loopback = ipaddress.ip_address(place[0]).is_loopback
            super().__init__((str(place[0]), port), _Handler)
        except socket.gaierror as error:
            raise ValueError(f"--host is {host}: {error.strerror}; give a name or address of this machine") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                words = f"--port is {port}: another program listens on it; give another port, or 0 for any free port"
            elif error.errno == errno.EACCES:
                words = f"--port is {port}: not allowed ({error.strerror}); give 0 or a port of at least 1024"
            else:
                words = f"--host is {host}: {error.strerror}; give a name or address of this machine"
            raise ValueError(words) from error
        self._names = {"localhost", host.lower()}
        if not self.is_loopback:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    @property
    def url(self) -> str:
        """URL of the page for a browser on this machine."""
        address = ipaddress.ip_address(str(self.server_address[0]))
        name = "localhost" if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
        return f"http://{name}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        """Binds without looking up this machine's name, which HTTPServer does and which may be slow."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def is_own_name(self, host: str) -> bool:
        """Returns whether the Host header of a request names this machine.

        A foreign page could otherwise read responses through a domain that resolves to this address (DNS rebinding). IP
        addresses are safe. Any port is accepted, because ssh -L changes it.
        """
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if not name:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or not self.is_loopback

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that disconnect in the middle of a response."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    server: ReportServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server_version, sys_version = "report", ""

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.is_own_name(hosts[0]):
            self._refuse(HTTPStatus.FORBIDDEN, "this server does not have that name")
            return
        target = urlsplit(self.path)
        if target.path == "/content.json":
            since = parse_qs(target.query).get("since", [None])[0]
            answer = json.dumps(self.server.live.answer(since), allow_nan=False, separators=(",", ":"))
            self._send(Asset(answer.encode(), "application/json"))
        elif (asset := self.server.assets.get(self.path)) is not None:
            self._send(asset)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _other_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is supported")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _other_method

    def _send(self, asset: Asset, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{asset.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(asset.body)))
        self.send_header("Cache-Control", "max-age=31536000, immutable" if asset.is_fixed else "no-store")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        if status is not HTTPStatus.OK:
            # The rest of a rejected request must not be parsed as the next request.
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(asset.body)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._send(Asset(f"{status.value} {status.phrase}: {words}\n".encode(), "text/plain"), status)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because each page sends a request every 2 seconds."""


def serve_until_signal(server: ReportServer) -> None:
    """Serves until SIGINT or SIGTERM. Must be called from the main thread."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    print(f"Report: {server.url} (stop with Ctrl-C)", flush=True)
    stopped.wait()
    server.shutdown()
    thread.join()
    server.server_close()
    server.live.close()
    print("Report: stopped", flush=True)


def changes(old: Any, new: Any) -> list[Any] | None:
    """Returns the changes that turn the JSON value `old` into `new`, or None if they are equal.

    ["=", value] replaces the value. ["{", {key: change}] changes an object with the same keys. ["[", {index: change},
    [items]] changes a list and appends items. applied() in report_live.js applies them.
    """
    if type(old) is not type(new):
        return ["=", new]
    if isinstance(new, dict):
        # The order of keys is the order on the page.
        return _object_changes(old, new) if list(old) == list(new) else ["=", new]
    if isinstance(new, list) and len(new) >= len(old):
        return _list_changes(old, new)
    return None if old == new else ["=", new]


def _object_changes(old: dict[str, Any], new: dict[str, Any]) -> list[Any] | None:
    inner = {key: change for key in new if (change := changes(old[key], new[key])) is not None}
    return ["{", inner] if inner else None


def _list_changes(old: list[Any], new: list[Any]) -> list[Any] | None:
    inner: dict[str, list[Any]] = {}
    for index, (before, after) in enumerate(zip(old, new)):
        if (change := changes(before, after)) is not None:
            inner[str(index)] = change
    if not inner and len(new) == len(old):
        return None
    # If most numbers changed, the list of changes is longer than the numbers.
    if 2 * len(inner) > len(new) and not isinstance(new[0], (dict, list)):
        return ["=", new]
    return ["[", inner, new[len(old) :]]
