"""`kvstow dash`: a live page about running agents. It only ever reads."""

import hmac
import ipaddress
import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs, urlsplit

import typer

from kvstow.cli.output import MISUSED, note, refuse

if TYPE_CHECKING:
    from kvstow.cli.watch import Watch

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'"
)
LEAST_KEY = 16

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE…",
        help="Addresses of agents (tcp://127.0.0.1:PORT), Prometheus endpoints (http://…), "
        "directories of stores.",
        show_default=False,
    ),
]
Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="A file with the key that readers need; without one, only this machine is served.",
        show_default=False,
    ),
]


def dash(
    sources: Sources, listen: Listen = "127.0.0.1:8643", key_file: KeyFile = None
) -> None:  # fmt: skip
    """A live page: tiers, transfers, failures, leases, slabs."""
    from kvstow.cli.watch import Watch

    host, port = _address(listen)
    key = _key(key_file)
    if not key and not is_local(host):
        refuse(
            f"{listen} can be reached from other machines, and there is no key\n\n"
            "hint: --key-file FILE, or --listen 127.0.0.1:8643",
            code=MISUSED,
        )
    watch = Watch(sources)
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


def dashboard(watch: "Watch", address: tuple[str, int], *, key: str) -> ThreadingHTTPServer:
    """A server of the page and of what it asks for; with a key, only for those who have it."""
    from kvstow.render.page import page

    html = page("kvstow", {}, ("slabmap.js", "dash.js"), policy=POLICY).encode()

    class Answer(BaseHTTPRequestHandler):
        """One request. Anything but a question is refused."""

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            asked = parse_qs(query)
            if not self._is_welcome(asked.get("key", [""])[0]):
                self._send(HTTPStatus.FORBIDDEN, "text/plain", b"no\n")
            elif path == "/":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", html)
            elif path == "/state.json":
                state = watch.state(history="history" in asked)
                self._send(HTTPStatus.OK, "application/json", json.dumps(state).encode())
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"not here\n")

        def _is_welcome(self, offered: str) -> bool:
            """With a key, whoever has it; without, whoever calls this machine by its own name
            (a page elsewhere that has its name point here does not)."""
            if key:
                return hmac.compare_digest(offered.encode(), key.encode())
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

    try:
        return ThreadingHTTPServer(address, Answer)
    except OSError as error:
        refuse(f"cannot serve on {address[0]}:{address[1]}: {error.strerror}", code=MISUSED)


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
        refuse(f"{listen!r} is no HOST:PORT\n\nhint: for example 127.0.0.1:8643", code=MISUSED)
    return host, port


def _key(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        key = file.read_text("utf-8").strip()
    except OSError as error:
        refuse(f"{file}: cannot be read: {error.strerror}", code=MISUSED)
    if len(key) < LEAST_KEY:
        refuse(f"{file}: a key of {len(key)} characters, at least {LEAST_KEY} are needed",
               code=MISUSED)  # fmt: skip
    return key
