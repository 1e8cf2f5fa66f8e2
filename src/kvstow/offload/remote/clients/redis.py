"""Redis and Valkey, through `redis`: the only module that imports it.

Every verb is one pipeline. Names are keys behind a prefix. Servers that evict by themselves
(`maxmemory-policy allkeys-lru`) are fine: a row that is gone is a miss.
"""

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice
from socket import SO_SNDTIMEO, SOL_SOCKET, socket
from ssl import SSLSocket
from struct import Struct
from typing import Any, cast

import numpy as np

from kvstow.errors import BackendMissing
from kvstow.offload.remote.clients.base import (
    NO_ROOM,
    THERE,
    Arrived,
    Blob,
    BlobFacts,
    Range,
    RangesArrived,
    Refused,
    StoreUnreachable,
)
from kvstow.offload.tier import Bools, Bytes

try:
    import redis
    from redis.exceptions import AskError, ClusterDownError
except ImportError:
    raise BackendMissing("redis", "redis") from None

SCAN = 1000
"""Keys per step of a listing."""

MOST_PARTS = 1024
"""Pieces of memory that the kernel sends with one call."""

CLUSTER = "\n\nhint: this is a cluster; name a single server, or a proxy before the cluster"
_SENT_AWAY = (AskError, ClusterDownError)
"""A key of another server of a cluster; a moved one is a kind of the first."""

NOTHING = (b"$-1\r\n", b"_\r\n")
"""Answers to a command that found nothing, or made nothing since it was there."""


class RedisClient:
    """Keys of one database that begin with one prefix.

    `ca_file` has the certificates that a `rediss` server is known by, where the system's are not.
    """

    puts_at_once = 2

    def __init__(
        self, url: str, prefix: str, *, seconds: float, ca_file: str | None = None
    ) -> None:
        self._prefix = f"{prefix}:" if prefix else ""
        self._seconds = seconds
        trusted = {} if ca_file is None else {"ssl_ca_certs": ca_file}
        # A client for each thread that asks: a pool of connections, none of them shared.
        self._redis: Any = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            url,
            socket_timeout=seconds,
            socket_connect_timeout=min(seconds, 2.0),
            retry=None,
            **trusted,
        )
        where = self._redis.connection_pool.connection_kwargs
        self.where = f"redis://{where.get('host', '')}:{where.get('port', '')}/{prefix}"

    def memory(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)

    def put(self, blobs: Sequence[Blob]) -> Refused:
        """Make objects with one call of the kernel for many of them: `redis` hands its lock to
        another thread several times per object, and each time waits to get it back."""
        parts: list[memoryview | bytes] = []
        for blob in blobs:
            name = (self._prefix + blob.name).encode()
            head = b"*4\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
            parts += [
                head % (len(name), name, blob.data.nbytes),
                blob.data.data,
                b"\r\n$2\r\nNX\r\n",
            ]
        refused: Refused = {}
        with self._connected() as connection:
            _send(connection._sock, parts, self._seconds)
            with connection._sock.makefile("rb") as answers:
                lines = [answers.readline() for _ in blobs]
            for blob, line in zip(blobs, lines, strict=True):
                if line in NOTHING:
                    refused[blob.name] = THERE
                elif line.startswith(b"-OOM"):
                    refused[blob.name] = NO_ROOM
                elif line != b"+OK\r\n":
                    raise _unexpected(line)
        return refused

    def renew(self, blobs: Sequence[Blob]) -> Refused:
        pipe = self._redis.pipeline(transaction=False)
        for blob in blobs:
            pipe.touch(self._prefix + blob.name)
        self._sent(pipe)
        return {}

    def get(self, names: Sequence[str], most: int, arrived: Arrived) -> None:
        """Whole objects, read from the socket to where they stay: `redis` copies them twice more
        on the way, which costs more than everything else."""
        with self._connected() as connection:
            commands = [("GET", self._prefix + name) for name in names]
            connection.send_packed_command(connection.pack_commands(commands))
            with connection._sock.makefile("rb") as answers:
                for number in range(len(names)):
                    arrived(number, _bulk(answers))

    @contextmanager
    def _connected(self) -> Generator[Any]:
        """A connection of the pool, for commands whose answers are read here; it is closed when
        something goes wrong, whatever that is."""
        connection: Any = None
        is_clean = False
        try:
            connection = self._redis.connection_pool.get_connection()
            yield connection
            is_clean = True
        except (redis.RedisError, OSError, ValueError, MemoryError) as error:
            raise StoreUnreachable(f"{self.where}: {error}") from error
        finally:
            if connection is not None:
                if not is_clean:  # answers to come would be taken for those to other commands
                    connection.disconnect()
                self._redis.connection_pool.release(connection)

    def get_ranges(
        self, wanted: Sequence[tuple[str, Sequence[Range]]], arrived: RangesArrived
    ) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for name, ranges in wanted:
            for start, end in ranges:
                pipe.getrange(self._prefix + name, start, end - 1)
        answers = iter(self._sent(pipe))
        for number, (_, ranges) in enumerate(wanted):
            parts = [np.frombuffer(next(answers), np.uint8) for _ in ranges]
            arrived(number, parts if any(map(len, parts)) else None)

    def exists(self, names: Sequence[str]) -> Bools:
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.exists(self._prefix + name)
        return np.array(self._sent(pipe), bool)

    def ages(self, names: Sequence[str]) -> list[float | None]:
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.exists(self._prefix + name)
            pipe.object("IDLETIME", self._prefix + name)
        answers = self._sent(pipe, raises=False)
        pairs = zip(answers[::2], answers[1::2], strict=True)
        return [
            (float(idle) if isinstance(idle, int) else 0.0) if there == 1 else None
            for there, idle in pairs
        ]

    def delete(self, names: Sequence[str]) -> Refused:
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.unlink(self._prefix + name)
        self._sent(pipe)
        return {}

    def list_blobs(self, prefix: str) -> Iterator[BlobFacts]:
        """Keys with their lengths. Redis keeps no times: `modified` is when they were last used,
        to ten seconds, or now where the server evicts by frequency. Before Redis 7.2 a listing
        counts as use."""
        start = self._prefix + prefix
        cursor = 0
        while True:
            pipe = self._redis.pipeline(transaction=False)
            pipe.scan(cursor, match=_escaped(start) + "*", count=SCAN)
            pipe.time()
            (cursor, keys), (now, _) = self._sent(pipe)
            yield from self._facts(keys, now)
            if not cursor:
                return

    def _facts(self, keys: Sequence[bytes], now: int) -> Iterator[BlobFacts]:
        pipe = self._redis.pipeline(transaction=False)
        pipe.execute_command("CLIENT", "NO-TOUCH", "ON")  # a listing is no use of what it lists
        for key in keys:
            pipe.object("IDLETIME", key)
            pipe.strlen(key)
        pipe.execute_command("CLIENT", "NO-TOUCH", "OFF")
        answers = self._sent(pipe, raises=False)[1:-1]
        for key, idle, nbytes in zip(keys, answers[::2], answers[1::2], strict=True):
            if isinstance(nbytes, int) and nbytes:
                name = key.decode(errors="replace").removeprefix(self._prefix)
                yield BlobFacts(name, nbytes, now - idle if isinstance(idle, int) else now)

    def close(self) -> None:
        self._redis.close()

    def _sent(self, pipe: Any, *, raises: bool = True) -> list[Any]:
        try:
            return cast("list[Any]", pipe.execute(raise_on_error=raises))
        except (redis.RedisError, OSError) as error:
            hint = CLUSTER if isinstance(error, _SENT_AWAY) else ""
            raise StoreUnreachable(f"{self.where}: {error}{hint}") from error


def _send(to: socket, parts: Sequence[memoryview | bytes], seconds: float) -> None:
    """Send all parts; the kernel waits for the other side, for so many seconds at a time."""
    if isinstance(to, SSLSocket):
        for part in parts:
            to.sendall(part)
        return
    limit = Struct("ll").pack(int(seconds), int(seconds % 1 * 1e6))
    to.setsockopt(SOL_SOCKET, SO_SNDTIMEO, limit)
    to.settimeout(None)
    try:
        left = deque(memoryview(part) for part in parts)
        while left:
            sent = to.sendmsg(islice(left, MOST_PARTS))
            while left and sent >= left[0].nbytes:
                sent -= left.popleft().nbytes
            if sent:
                left[0] = left[0][sent:]
    finally:
        to.settimeout(seconds)


def _unexpected(line: bytes) -> ValueError:
    text = line.decode(errors="replace").strip() or "the connection was closed"
    sent_away = text.startswith(("-MOVED", "-ASK", "-CLUSTERDOWN"))
    return ValueError(text + (CLUSTER if sent_away else ""))


def _bulk(answers: BufferedReader) -> Bytes | None:
    """The next answer, a string of bytes or none; ValueError for anything else."""
    line = answers.readline()
    if line in NOTHING:
        return None
    if not (line.startswith(b"$") and line.endswith(b"\r\n")):
        raise _unexpected(line)
    data: Bytes = np.empty(int(line[1:]), np.uint8)
    if answers.readinto(data.data) != data.nbytes or answers.read(2) != b"\r\n":
        raise ValueError("the connection was closed")
    return data


def _escaped(text: str) -> str:
    """The text as a pattern of itself."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)
