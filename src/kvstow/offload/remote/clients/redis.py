"""Redis and Valkey, through `redis`: the only module that imports it.

Every verb is one pipeline. Names are keys behind a prefix. Servers that evict by themselves
(`maxmemory-policy allkeys-lru`) are fine: a row that is gone is a miss.
"""

from collections.abc import Iterator, Sequence
from io import BufferedReader
from typing import Any, cast

import numpy as np

from kvstow.errors import BackendMissing
from kvstow.offload.remote.clients.base import (
    NO_ROOM,
    Blob,
    BlobFacts,
    Range,
    Refused,
    StoreUnreachable,
)
from kvstow.offload.tier import Bools, Bytes

try:
    import redis
except ImportError:
    raise BackendMissing("redis", "redis") from None

SCAN = 1000
"""Keys per step of a listing."""


class RedisClient:
    """Keys of one database that begin with one prefix."""

    def __init__(self, url: str, prefix: str, *, seconds: float) -> None:
        self._prefix = f"{prefix}:" if prefix else ""
        # A client for each thread that asks: a pool of connections, none of them shared.
        self._redis: Any = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            url,
            socket_timeout=seconds,
            socket_connect_timeout=min(seconds, 2.0),
            retry=None,
        )
        where = self._redis.connection_pool.connection_kwargs
        self.where = f"redis://{where.get('host', '')}:{where.get('port', '')}/{prefix}"

    def put(self, blobs: Sequence[Blob]) -> Refused:
        pipe = self._redis.pipeline(transaction=False)
        for blob in blobs:
            pipe.set(self._prefix + blob.name, blob.data.data, nx=True)
        refused: Refused = {}
        for blob, answer in zip(blobs, self._sent(pipe, raises=False), strict=True):
            if isinstance(answer, redis.OutOfMemoryError):
                refused[blob.name] = NO_ROOM
            elif isinstance(answer, redis.RedisError):
                raise StoreUnreachable(f"{self.where}: {answer}")
        return refused

    def get(self, names: Sequence[str], most: int) -> list[Bytes | None]:
        """Whole objects, read from the socket to where they stay: `redis` copies them twice more
        on the way, which costs more than everything else."""
        connection: Any = None
        try:
            connection = self._redis.connection_pool.get_connection()
            commands = [("GET", self._prefix + name) for name in names]
            connection.send_packed_command(connection.pack_commands(commands))
            with connection._sock.makefile("rb") as answers:
                found = [_bulk(answers) for _ in names]
        except (redis.RedisError, OSError, ValueError) as error:
            if connection is not None:
                connection.disconnect()
            raise StoreUnreachable(f"{self.where}: {error}") from error
        finally:
            if connection is not None:
                self._redis.connection_pool.release(connection)
        return found

    def get_ranges(self, wanted: Sequence[tuple[str, Sequence[Range]]]) -> list[list[Bytes] | None]:
        pipe = self._redis.pipeline(transaction=False)
        for name, ranges in wanted:
            for start, end in ranges:
                pipe.getrange(self._prefix + name, start, end - 1)
        answers = iter(self._sent(pipe))
        found: list[list[Bytes] | None] = []
        for _, ranges in wanted:
            parts = [np.frombuffer(next(answers), np.uint8) for _ in ranges]
            found.append(parts if any(map(len, parts)) else None)
        return found

    def exists(self, names: Sequence[str]) -> Bools:
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.exists(self._prefix + name)
        return np.array(self._sent(pipe), bool)

    def delete(self, names: Sequence[str]) -> Refused:
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.unlink(self._prefix + name)
        self._sent(pipe)
        return {}

    def list_blobs(self, prefix: str) -> Iterator[BlobFacts]:
        """Keys with their lengths. Redis keeps no times: `modified` is when they were last used,
        to ten seconds, or now where the server evicts by frequency."""
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
        for key in keys:
            pipe.strlen(key)
            pipe.object("IDLETIME", key)
        answers = self._sent(pipe, raises=False)
        for key, nbytes, idle in zip(keys, answers[::2], answers[1::2], strict=True):
            if isinstance(nbytes, int) and nbytes:
                name = key.decode(errors="replace").removeprefix(self._prefix)
                yield BlobFacts(name, nbytes, now - idle if isinstance(idle, int) else now)

    def close(self) -> None:
        self._redis.close()

    def _sent(self, pipe: Any, *, raises: bool = True) -> list[Any]:
        try:
            return cast("list[Any]", pipe.execute(raise_on_error=raises))
        except (redis.RedisError, OSError) as error:
            raise StoreUnreachable(f"{self.where}: {error}") from error


def _bulk(answers: BufferedReader) -> Bytes | None:
    """The next answer, a string of bytes or none; ValueError for anything else."""
    line = answers.readline()
    if line in (b"$-1\r\n", b"_\r\n"):
        return None
    if not (line.startswith(b"$") and line.endswith(b"\r\n")):
        raise ValueError(line.decode(errors="replace").strip() or "the connection was closed")
    data: Bytes = np.empty(int(line[1:]), np.uint8)
    if answers.readinto(data.data) != data.nbytes or answers.read(2) != b"\r\n":
        raise ValueError("the connection was closed")
    return data


def _escaped(text: str) -> str:
    """The text as a pattern of itself."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)
