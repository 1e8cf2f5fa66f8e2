"""Redis and Valkey, through `redis`: the only module that imports it.

Every verb is one pipeline. Names are keys behind a prefix. Servers that evict by themselves
(`maxmemory-policy allkeys-lru`) are fine: a row that is gone is a miss.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from kvstow.errors import BackendMissing
from kvstow.offload.remote.client import (
    NO_ROOM,
    THERE,
    Answer,
    Blob,
    BlobFacts,
    Range,
    Refused,
    StoreUnreachable,
)
from kvstow.offload.tier import Bools

try:
    import redis
    from redis.exceptions import AskError, ClusterDownError, OutOfMemoryError
except ImportError:
    raise BackendMissing("redis", "redis") from None

SCAN = 1000
"""Keys per step of a listing."""

CLUSTER = "\n\nhint: this is a cluster; name a single server, or a proxy before the cluster"
_SENT_AWAY = (AskError, ClusterDownError)
"""A key of another server of a cluster; a moved one is a kind of the first."""


class RedisClient:
    """Keys of one database that begin with one prefix.

    `ca_file` has the certificates that a `rediss` server is known by, where the system's are not.
    """

    puts_at_once = 2

    def __init__(
        self, url: str, prefix: str, *, seconds: float, ca_file: str | None = None
    ) -> None:
        self._prefix = f"{prefix}:" if prefix else ""
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

    def put(self, blobs: Sequence[Blob]) -> Refused:
        pipe = self._redis.pipeline(transaction=False)
        for blob in blobs:
            pipe.set(self._prefix + blob.name, blob.data.data, nx=True)
        refused: Refused = {}
        for blob, answer in zip(blobs, self._sent(pipe, raises=False), strict=True):
            if answer is None:
                refused[blob.name] = THERE
            elif isinstance(answer, OutOfMemoryError):
                refused[blob.name] = NO_ROOM
            elif isinstance(answer, Exception):
                raise self._unreachable(answer)
        return refused

    def get(self, objects: Sequence[tuple[str, Sequence[Range]]]) -> list[Answer]:
        """Ranges only: of a foreign object of gigabytes no more comes than was asked for."""
        pipe = self._redis.pipeline(transaction=False)
        for name, ranges in objects:
            for start, end in ranges:
                pipe.getrange(self._prefix + name, start, end - 1)
        answers = iter(self._sent(pipe))
        parts = [[np.frombuffer(next(answers), np.uint8) for _ in each] for _, each in objects]
        return [each if any(map(len, each)) else None for each in parts]

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
        except (redis.RedisError, OSError, ValueError, OverflowError, MemoryError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> StoreUnreachable:
        hint = CLUSTER if isinstance(error, _SENT_AWAY) else ""
        return StoreUnreachable(f"{self.where}: {error}{hint}")


def _escaped(text: str) -> str:
    """The text as a pattern of itself."""
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in text)
