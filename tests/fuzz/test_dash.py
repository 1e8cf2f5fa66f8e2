"""HTTP of the dashboard: whatever is sent gets an answer or none; nothing is raised."""

import io
import json
from functools import cache
from http.server import ThreadingHTTPServer
from random import Random
from typing import Any

import pytest

from fuzzing import Reader, damaged_bytes, fuzzed
from kvstow.cli.dash import dashboard

LINES = (
    b"GET / HTTP/1.1",
    b"GET /state.json?history=1&key=x HTTP/1.1",
    b"GET //[::1 HTTP/1.1",
    b"GET /?key=%ff%00&key=\xed\xa0\x80 HTTP/1.0",
    b"POST / HTTP/1.1",
)
HEADERS = (
    *(b"Host: localhost", b"Host: 127.0.0.1:8643", b"Host: [::1]:80", b"Host: [", b"Host: ["),
    *(b"Host: a@b:c", b"Host: \xff", b"Host: //", b"Content-Length: -1", b"Expect: 100-continue"),
    *(b"Connection: keep-alive", b": x", b" folded", b"Host: 127.0.0.1]"),
)


class Page:
    """What the dashboard asks for its numbers."""

    def state(self, *, history: bool) -> dict[str, Any]:
        return {"history": history}


class Socket:
    """A connection on which all has been said already."""

    def __init__(self, said: bytes) -> None:
        self.said, self.heard = said, b""

    def makefile(self, mode: str, *_: object) -> io.BytesIO:
        return io.BytesIO(self.said)

    def sendall(self, data: bytes) -> None:
        self.heard += bytes(data)

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is None or seconds > 0


@cache
def server(key: str) -> ThreadingHTTPServer:
    made = dashboard(Page(), ("127.0.0.1", 0), key=key)  # pyright: ignore
    made.server_close()
    return made


def read(data: bytes) -> str:
    said = set[str]()
    for key in ("", "k" * 16):
        socket = Socket(data)
        server(key).finish_request(socket, ("127.0.0.1", 1))  # pyright: ignore
        headed = socket.heard.startswith(b"HTTP/1.")  # version 0.9 has no header
        status = socket.heard[9:12].decode() if headed else "nothing"
        head, _, body = socket.heard.partition(b"\r\n\r\n")
        if headed and b"application/json" in head:
            assert "history" in json.loads(body)
        said.add(status)
    assert said <= {"nothing", "200", "400", "403", "404", "414", "431", "501", "505"}
    return "accepted" if "200" in said else f"refused: {' '.join(sorted(said))}"


def mutate(random: Random, data: bytes, other: bytes) -> bytes:
    lines = data.split(b"\r\n")
    at = random.randrange(len(lines))
    match random.randrange(5):
        case 0:
            lines.insert(max(1, at), random.choice(HEADERS))
        case 1:
            lines[at] = damaged_bytes(random, lines[at], other)
        case 2:
            lines[0] = random.choice(LINES)
        case 3:
            lines[at] = lines[at][:4096] * random.choice((2, 3000))
        case _:
            return damaged_bytes(random, data, other)
    return b"\r\n".join(lines)


READER = Reader(
    name="dash",
    read=read,
    valid=lambda: [b"\r\n".join((line, header, b"", b"")) for line in LINES for header in HEADERS],
    mutate=mutate,
)


@fuzzed(READER)
def test_a_damaged_request_is_answered_or_dropped(data):
    READER.outcome(data)


@pytest.mark.parametrize("host", [b"[", b"[::1", b"]", b"a[b", b"[v1]", b"\xff"])
def test_a_host_that_is_none_is_refused(host):
    assert read(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n") == "refused: 403"


@pytest.mark.parametrize("path", [b"//[", b"//[::1/", b"http://[/"])
def test_a_path_that_is_none_is_not_found(path):
    request = b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert read(request).startswith("refused: ")
