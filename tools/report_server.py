"""Serves the page of a run that goes on, from Python's own library: a few paths of its own, and no file of the disk.

What pages are told is report_live.py's.
"""

import errno
import ipaddress
import json
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tools.report_live import LiveReport

IDLE_SECONDS = 30.0  # after which a connection without a request is closed
HEADERS = {
    # Nothing from elsewhere; plotly sets styles of its own.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Asset:
    """What a path answers with. is_fixed: it stays what it is under this path, and may be kept."""

    body: bytes
    kind: str
    is_fixed: bool = False


class ReportServer(ThreadingHTTPServer):
    """Answers GET of its assets and of /content.json?since=VERSION."""

    daemon_threads = True  # a viewer who reads slowly keeps nobody from ending

    def __init__(self, address: tuple[str, int], live: LiveReport, *, assets: Mapping[str, Asset]) -> None:
        """Raises ValueError that names --port or --host where nothing can listen there."""
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
                words = f"--port is {port}: another program listens there; give another port, or 0 for any that is free"
            elif error.errno == errno.EACCES:
                words = f"--port is {port}: not allowed ({error.strerror}); give 0 or one from 1024 on"
            else:
                words = f"--host is {host}: {error.strerror}; give a name or address of this machine"
            raise ValueError(words) from error
        self._names = {"localhost", host.lower()}
        if not self.is_loopback:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it."""
        address = ipaddress.ip_address(str(self.server_address[0]))
        name = "localhost" if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
        return f"http://{name}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        """Binds; unlike HTTPServer's, it asks nobody for this machine's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def is_own_name(self, host: str) -> bool:
        """Whether a request may come under this Host header: not under a name that others gave this address.

        A page of elsewhere could read answers through a name of its own that it lets point here (DNS rebinding); of
        addresses it cannot. The port may be another's, as behind ssh -L.
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
        """A viewer who goes away in the middle of an answer is no error."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: ReportServer
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    server_version, sys_version = "report", ""

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.is_own_name(hosts[0]):
            self._refuse(HTTPStatus.FORBIDDEN, "this server does not go by that name")
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
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")

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
            # What a refused request still sends is not to be taken for another one.
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(asset.body)

    def _refuse(self, status: HTTPStatus, words: str) -> None:
        self._send(Asset(f"{status.value} {status.phrase}: {words}\n".encode(), "text/plain"), status)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not told: there is one every other second."""


def serve_until_signal(server: ReportServer) -> None:
    """Answers until SIGINT or SIGTERM; from the main thread."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    print(f"Report: {server.url} (Ctrl-C ends it)", flush=True)
    stopped.wait()
    server.shutdown()
    thread.join()
    server.server_close()
    server.live.close()
    print("Report: ended", flush=True)
