"""`kvstow dash`: a live page about running agents and stores. It only ever reads.

`Watch` asks every source once a second and remembers; a small HTTP server hands out the page
and what `Watch` knows.
"""

import hmac
import ipaddress
import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs, urlsplit

import typer

from kvstow.cli.output import MISUSED, note, refuse
from kvstow.cli.peers import KeysFile, read_keys
from kvstow.cli.sources import (
    ASK_SECONDS,
    Reading,
    Sources,
    places,
    reading,
    transfers_in,
)

if TYPE_CHECKING:
    from kvstow.transfer.channel.curve import Keys

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'"
)
LEAST_KEY = 16

REMEMBERED = 600
"""Moments of which the totals are kept."""

ANSWER_SECONDS = 10.0
"""A connection on which nothing comes for so long is closed."""

Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Address to serve the page on.")
]
PageKey = Annotated[
    Path | None,
    typer.Option(
        "--page-key",
        metavar="FILE",
        help="File with the key that readers of the page need; without it, only this machine is "
        "served.",
        show_default=False,
    ),
]
OldPageKey = Annotated[Path | None, typer.Option("--key-file", hidden=True)]


def dash(
    sources: Sources,
    listen: Listen = "127.0.0.1:8643",
    page_key: PageKey = None,
    keys_file: KeysFile = None,
    key_file: OldPageKey = None,
) -> None:
    """A live page: tiers, transfers, failures, leases, slabs."""
    host, port = _address(listen)
    if key_file is not None:
        note("--key-file is called --page-key now; the old name goes with the next version")
    key = _key(page_key or key_file)
    asked = [place for source in sources for place in places(source)]
    if not key and not is_local(host):
        refuse(
            f"{listen} can be reached from other machines, and there is no key\n\n"
            "hint: --page-key FILE, or --listen 127.0.0.1:8643",
            code=MISUSED,
        )
    watch = Watch(asked, keys=read_keys(keys_file))
    server = dashboard(watch, (host, port), key=key)
    watch.start()
    shown = f"[{host}]" if ":" in host else host
    note(f"http://{shown}:{server.server_port}/{'?key=…' if key else ''} (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        watch.close()


def dashboard(watch: "Watch", address: tuple[str, int], *, key: str) -> "Dashboard":
    """A server of the page and of what it asks for; with a key, only for those who have it."""
    try:
        return Dashboard(watch, address, key)
    except OSError as error:
        refuse(f"cannot serve on {address[0]}:{address[1]}: {error.strerror}", code=MISUSED)


class Dashboard(ThreadingHTTPServer):
    """The page, what it shows, and the key that its readers need."""

    def __init__(self, watch: "Watch", address: tuple[str, int], key: str) -> None:
        from kvstow.render.page import page

        self.watch = watch
        self.key = key
        self.html = page("kvstow", {}, ("slabmap.js", "dash.js"), policy=POLICY).encode()
        super().__init__(address, Answer)


class Answer(BaseHTTPRequestHandler):
    """One request. Anything but a question is refused."""

    timeout = ANSWER_SECONDS

    @property
    def _dashboard(self) -> Dashboard:
        assert isinstance(self.server, Dashboard)
        return self.server

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        asked = parse_qs(query)
        if not self._is_welcome(asked.get("key", [""])[0]):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"no\n")
        elif path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self._dashboard.html)
        elif path == "/state.json":
            state = self._dashboard.watch.state(history="history" in asked)
            self._send(HTTPStatus.OK, "application/json", json.dumps(state).encode())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not here\n")

    def _is_welcome(self, offered: str) -> bool:
        """With a key, whoever has it; without, whoever calls this machine by its own name
        (a page elsewhere that has its name point here does not)."""
        if self._dashboard.key:
            return hmac.compare_digest(offered.encode(), self._dashboard.key.encode())
        return is_local(_host_and_port(self.headers.get("Host", ""))[0])

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", f"{POLICY}; frame-ancestors 'none'"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a log would hold the key."""


def is_local(host: str) -> bool:
    """Whether a name or address means this machine, whatever a name server says."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_and_port(text: str) -> tuple[str, int | None]:
    """The two parts of `HOST:PORT`, as far as they are there."""
    try:
        parts = urlsplit(f"//{text}")
        return parts.hostname or "", parts.port
    except ValueError:
        return "", None


def _address(listen: str) -> tuple[str, int]:
    host, port = _host_and_port(listen)
    if not host or port is None:
        refuse(f"{listen!r} is not HOST:PORT\n\nhint: for example 127.0.0.1:8643", code=MISUSED)
    return host, port


def _key(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        key = file.read_text("utf-8").strip()
    except OSError as error:
        refuse(f"{file}: cannot be read: {error.strerror}", code=MISUSED)
    except UnicodeDecodeError:
        refuse(f"{file}: a key is text in UTF-8, this is not", code=MISUSED)
    if len(key) < LEAST_KEY:
        refuse(
            f"{file}: a key of {len(key)} characters, at least {LEAST_KEY} are needed", code=MISUSED
        )
    return key


class Watch:
    """Asks every source once a second, in a thread of its own.

    A source is an agent's address (`tcp://…`), a Prometheus endpoint (`http://…`) or the
    directory of a store. `keys` are for agents that use keys.
    """

    def __init__(
        self, sources: Iterable[str], *, seconds: float = 1.0, keys: "Keys | None" = None
    ) -> None:
        self._sources = tuple(sources)
        self._keys = keys
        self._seconds = seconds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._latest: dict[str, Reading] = {}
        self._history: dict[str, deque[Reading]] = {
            source: deque(maxlen=REMEMBERED) for source in self._sources
        }
        self._thread = threading.Thread(target=self._run, name="kvstow-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * ASK_SECONDS * max(1, len(self._sources)))

    def state(self, *, history: bool) -> Reading:
        """The latest reading of every source; with `history`, the totals so far."""
        with self._lock:
            return {
                "now": time.time(),
                "sources": [
                    {
                        "source": source,
                        **self._latest.get(source, {"error": "not asked yet"}),
                        "history": list(self._history[source]) if history else [],
                    }
                    for source in self._sources
                ],
            }

    def _run(self) -> None:
        from kvstow.transfer.channel.status import Asker

        asker = Asker(self._keys)
        try:
            while not self._stop.is_set():
                for source in self._sources:
                    self._remember(source, reading(asker.ask, source))
                self._stop.wait(self._seconds)
        finally:
            asker.close()

    def _remember(self, source: str, said: Reading) -> None:
        with self._lock:
            self._latest[source] = said
            moved = transfers_in(said.get("metrics", []))
            if moved is not None:
                said["totals"] = {"at": said["at"], **moved}
                self._history[source].append(said["totals"])
