"""What is special about Redis: servers that hang, TLS, clusters, foreign keys of gigabytes."""

import asyncio
import resource
import socket
import ssl
import subprocess
import time
from contextlib import closing, contextmanager
from queue import Queue
from threading import Thread

import numpy as np
import pytest

from kvstow.offload.remote.client import THERE, Blob, StoreUnreachable, open_client, whole_objects
from kvstow.offload.remote.redis import RedisClient
from servers import Valkey
from waiting import wait_for


def data(n, nbytes):
    return np.random.default_rng(n).integers(0, 256, nbytes, np.uint8)


def test_many_objects_of_all_sizes_are_made_at_once_and_come_back_whole(valkey_url):
    client, _ = open_client(valkey_url)
    sizes = [1, 2, 3, 5 << 20, *range(4, 500), 9 << 20]
    blobs = [Blob(f"object {n}", data(n, nbytes)) for n, nbytes in enumerate(sizes)]
    assert client.put(blobs) == {}
    found = whole_objects(client, [blob.name for blob in blobs], max(sizes))
    for blob, came in zip(blobs, found, strict=True):
        assert (came == blob.data).all()
    client.close()


def test_an_object_that_is_there_stays_as_it_is(valkey_url):
    client, _ = open_client(valkey_url)
    assert client.put([Blob("a", data(0, 100))]) == {}
    assert client.put([Blob("a", data(1, 50)), Blob("b", data(2, 50))]) == {"a": THERE}
    first, second = whole_objects(client, ["a", "b"], 100)
    assert (first == data(0, 100)).all()
    assert (second == data(2, 50)).all()
    client.close()


def test_a_listing_says_when_objects_were_last_used_and_is_no_use_of_them(valkey_url):
    client, _ = open_client(valkey_url)
    client.put([Blob("a", data(0, 100))])

    def idle():
        (facts,) = client.list_blobs("")
        return time.time() - facts.modified

    wait_for(lambda: idle() >= 4)
    for _ in range(2):
        assert idle() >= 3
    whole_objects(client, ["a"], 100)
    assert idle() < 3
    client.close()


def test_a_put_to_a_server_that_hangs_ends_and_later_ones_work(tmp_path):
    with Valkey(tmp_path) as server:
        client = RedisClient(server.url, "hangs", seconds=3.0)
        assert client.put([Blob("a", data(0, 100))]) == {}
        server.stop()
        try:
            with pytest.raises(StoreUnreachable):
                client.put([Blob(f"large {n}", data(n, 8 << 20)) for n in range(4)])
        finally:
            server.go_on()
        assert client.put([Blob("b", data(1, 100))]) == {}
        assert client.exists(["a", "b"]).all()
        client.close()


# ── TLS ───────────────────────────────────────────────────────────────────────────────
# The package's server has none. As in front of many a real one, another process ends it.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    made, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", made, "-keyout", key], check=True, capture_output=True)
    return made, key


@contextmanager
def tls_before(port, certificate):
    """The port of a server that ends TLS and passes all bytes on to another port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def passed_on(reader, writer):
        try:
            while some := await reader.read(1 << 16):
                writer.write(some)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def accepted(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(passed_on(reader, there[1]), passed_on(there[0], writer))

    started: Queue[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = Queue()

    async def listening():
        done = asyncio.Event()
        async with await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=context) as server:
            started.put((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), done))
            await done.wait()

    # all in a thread of its own: a browser's tests leave a loop running in this one
    thread = Thread(target=asyncio.run, args=(listening(),))
    thread.start()
    there, loop, done = started.get(timeout=60)
    try:
        yield there
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()


def test_objects_of_all_sizes_go_over_tls_and_come_back_whole(valkey, certificate):
    with tls_before(valkey.ports[0], certificate) as port:
        url = f"rediss://127.0.0.1:{port}/0?prefix=tls&load=60&ca_file={certificate[0]}"
        client, _ = open_client(url)
        sizes = [1, 2, 3, 5 << 20, *range(4, 300), 9 << 20]
        blobs = [Blob(f"object {n}", data(n, nbytes)) for n, nbytes in enumerate(sizes)]
        names = [blob.name for blob in blobs]
        assert client.put(blobs) == {}
        assert client.put(blobs[:2]) == dict.fromkeys(names[:2], THERE)
        assert client.exists(names).all()
        for blob, came in zip(blobs, whole_objects(client, names, max(sizes)), strict=True):
            assert (came == blob.data).all()
        ((part,),) = client.get([("object 3", [(1 << 20, 2 << 20)])])
        assert (part == data(3, 5 << 20)[1 << 20 : 2 << 20]).all()
        client.close()
        plain, _ = open_client(f"{valkey.url}?prefix=tls")
        assert (whole_objects(plain, ["object 3"], 5 << 20)[0] == data(3, 5 << 20)).all()
        plain.close()


def test_a_server_whose_certificate_nobody_trusts_gets_nothing(valkey, certificate):
    with tls_before(valkey.ports[0], certificate) as port:
        client, _ = open_client(f"rediss://127.0.0.1:{port}/0?prefix=untrusted")
        with pytest.raises(StoreUnreachable, match="certificate verify failed"):
            client.put([Blob("a", data(0, 100))])
        client.close()
    plain, _ = open_client(f"{valkey.url}?prefix=untrusted")
    assert not plain.exists(["a"]).any()
    plain.close()


GREETINGS = {b"HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n", b"CLIENT": b"+OK\r\n"}


def answering(listening, answer):
    """Answer all commands so, whatever they are."""

    def serve():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as commands:
                for line in commands:
                    names = [
                        commands.readline() and commands.readline() for _ in range(int(line[1:]))
                    ]
                    greeting = GREETINGS.get(names[0].strip().upper())
                    connection.sendall(greeting or answer)

    Thread(target=serve, daemon=True).start()


@pytest.fixture
def listening():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


def client_of(listening):
    port = listening.getsockname()[1]
    return RedisClient(f"redis://127.0.0.1:{port}/0", "odd", seconds=0.5)


@pytest.mark.parametrize("verb", ["get", "put", "exists", "delete"])
def test_a_cluster_that_sends_us_elsewhere_is_unreachable_and_says_what_to_do(listening, verb):
    answering(listening, b"-MOVED 3999 127.0.0.1:6381\r\n")
    client = client_of(listening)
    calls = {
        "get": lambda: whole_objects(client, ["a"], 10),
        "put": lambda: client.put([Blob("a", data(0, 10))]),
        "exists": lambda: client.exists(["a"]),
        "delete": lambda: client.delete(["a"]),
    }
    with pytest.raises(StoreUnreachable, match=r"(?s)3999.*hint: this is a cluster"):
        calls[verb]()
    client.close()


@pytest.mark.parametrize("length", [b"-7", b"many", b"1099511627776000", b"9" * 30])
def test_an_answer_of_an_absurd_length_is_unreachable_and_its_connection_is_not_used_again(
    listening, length
):
    answering(listening, b"$" + length + b"\r\n" + b"$1\r\nx\r\n" * 3)
    client = client_of(listening)
    for _ in range(3):
        with pytest.raises(StoreUnreachable):
            whole_objects(client, ["a"], 10)
    client.close()


def test_of_a_foreign_object_of_gigabytes_no_more_is_read_than_was_asked_for(valkey_url):
    client, _ = open_client(valkey_url)
    key = client._prefix + "large"
    client._redis.setrange(key, (256 << 20) - 1, b"x")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (found,) = whole_objects(client, ["large"], 1 << 20)
    assert found is None or len(found) == (1 << 20) + 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    client._redis.delete(key)
    client.close()
