"""An S3 server, or a proxy before it, that answers with something else than it was asked for."""

import gzip
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import monotonic

import numpy as np
import pytest

from kvstow.offload.keys import block_keys
from kvstow.offload.remote.client import Blob, open_client, whole_objects
from kvstow.offload.remote.s3 import BACKOFF, RETRIES
from kvstow.offload.remote.tier import RemoteTier
from offloading import IDENTITY, numbered_row
from remote_stores import PROMPT, layout_of

KEYS = block_keys(IDENTITY, PROMPT, 4)


class LyingS3(BaseHTTPRequestHandler):
    """Objects in memory. `server.lie` changes the answer to a GET: range, body, code, headers."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("If-None-Match") and self.path in self.server.objects:
            return self._answer(412, b"")
        self.server.objects[self.path] = body
        return self._answer(200, b"", ETag='"x"')

    def do_POST(self):  # the only one that we send removes objects
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"<DeleteResult></DeleteResult>")

    def do_HEAD(self):
        body = self.server.objects.get(self.path)
        self._answer(404 if body is None else 200, body or b"", ETag='"x"')

    def do_GET(self):
        body = self.server.objects.get(self.path)
        if body is None:
            return self._answer(404, b"")
        code, part, headers = 200, body, {"ETag": '"x"'}
        if wanted := self.headers.get("Range"):
            start, end = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            end = min(end, len(body) - 1)
            code, part = 206, body[start : end + 1]
            headers["Content-Range"] = f"bytes {start}-{end}/{len(body)}"
        if "/layout/" not in self.path and "/manifest/" not in self.path:
            code, part, more = self.server.lie(self.path, code, part, body)
            headers |= more
        return self._answer(code, part, **headers)

    def _answer(self, code, body, **headers):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Mon, 16 Nov 2026 10:00:00 GMT")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def others(server, path):
    """Another row object, of the same size."""
    size = len(server.objects[path])
    return next(body for name, body in server.objects.items() if name != path and len(body) == size)


LIES = {
    "another object": lambda server: (
        lambda path, code, part, body: (
            code,
            others(server, path)[: len(part)],
            {},
        )
    ),
    "short": lambda server: lambda path, code, part, body: (code, part[: len(part) // 2], {}),
    "nothing": lambda server: lambda path, code, part, body: (code, b"", {}),
    "another range": lambda server: lambda path, code, part, body: (code, body[-len(part) :], {}),
    "all of it": lambda server: lambda path, code, part, body: (200, body, {}),
    "packed": lambda server: (
        lambda path, code, part, body: (
            code,
            gzip.compress(part),
            {"Content-Encoding": "gzip"},
        )
    ),
    "the next range, as it says": lambda server: (
        lambda path, code, part, body: (
            code,
            body[1 : 1 + len(part)],
            {"Content-Range": f"bytes 1-{len(part)}/{len(body)}"} if code == 206 else {},
        )
    ),
}


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), LyingS3) as server:
        server.objects = {}
        server.lie = lambda path, code, part, body: (code, part, {})
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url_of(server):
    return (
        f"s3://bucket/rows?endpoint=http://127.0.0.1:{server.server_port}&budget=10&load=5"
        "&access_key_id=a&secret_access_key=b"
    )


def loaded(tier):
    """Which rows came; those that did are right."""
    rows = [np.full(tier.layout.row_bytes(0), 0xA5, np.uint8) for _ in KEYS]
    found = tier.load(0, KEYS, rows).tolist()
    for n, row in enumerate(rows):
        assert (row == (numbered_row(tier, 0, n) if found[n] else 0xA5)).all()
    return found


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_is_not_the_object_is_a_miss(server, lie):
    whole, half = layout_of(order="BHLNC"), layout_of(tp=(0, 2), order="BHLNC")
    tier = RemoteTier(url_of(server), whole)
    tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(len(KEYS))])
    assert tier.flush(20)
    assert all(loaded(tier))
    server.lie = LIES[lie](server)
    # Where all of an object is wanted, an answer that has all of it is right.
    assert any(loaded(tier)) == (lie in ("another range", "all of it"))
    tier.close()
    reader = RemoteTier(url_of(server), half)
    rows = [np.full(reader.layout.row_bytes(0), 0xA5, np.uint8) for _ in KEYS]
    # Ranges of an answer that has all of the object are made here.
    found = reader.load(0, KEYS, rows)
    assert found.all() == found.any() == (lie == "all of it")
    for n, row in enumerate(rows):
        heads = numbered_row(tier, 0, n).reshape(4, -1)[:2].ravel()
        assert (row == (heads if found[n] else 0xA5)).all()
    reader.close()


def test_a_server_that_is_busy_is_asked_again_and_its_rows_come(server):
    tier = RemoteTier(url_of(server), layout_of())
    tier.store(0, KEYS, [numbered_row(tier, 0, n) for n in range(len(KEYS))])
    assert tier.flush(20)
    times = {}

    def busy(path, code, part, body):
        times.setdefault(path, []).append(monotonic())
        return (code, part, {}) if len(times[path]) > RETRIES else (503, b"", {})

    server.lie = busy
    assert all(loaded(tier))
    for each in times.values():
        waits = np.diff(each)
        assert len(waits) == RETRIES
        assert waits.sum() > BACKOFF.total_seconds()  # it backs off
    assert tier.breaker.times_opened == 0
    tier.close()


def test_ranges_of_objects_that_end_before_them_come_short(s3_url):
    client, _ = open_client(s3_url)
    sizes = (0, 1, 100, 1000)
    data = {f"ranges/{n}": np.arange(n).astype(np.uint8) for n in sizes}
    client.put([Blob(name, some) for name, some in data.items()])
    for ranges in ([(0, 100)], [(10, 20), (200, 300)], [(0, 1), (50, 2000), (9 << 20, 10 << 20)]):
        found = client.get([(name, ranges) for name in data])
        for some, parts in zip(data.values(), found, strict=True):
            assert [bytes(part) for part in parts] == [bytes(some[lo:hi]) for lo, hi in ranges]
    found = whole_objects(client, [*data, "ranges/none"], 100)
    assert [None if some is None else some.nbytes for some in found] == [0, 1, 100, 101, None]
    assert client.get([("ranges/none", [(0, 1)])]) == [None]
    client.close()


def test_more_objects_than_a_page_of_a_listing_are_all_listed_and_removed(s3_url):
    client, _ = open_client(s3_url)
    names = [f"rows1/{n:04}" for n in range(2100)]
    client.put([Blob(name, np.zeros(1, np.uint8)) for name in names])
    assert sorted(facts.name for facts in client.list_blobs("rows1/")) == names
    assert client.delete(names) == {}
    assert list(client.list_blobs("rows1/")) == []
    client.close()
