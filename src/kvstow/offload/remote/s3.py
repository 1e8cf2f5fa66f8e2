"""S3 and whatever speaks it, through `obstore`: the only module that imports it.

One event loop in a thread of its own has all requests of a batch under way at once. Credentials
and region come from the URL or, as usual, from `AWS_ACCESS_KEY_ID` and the like.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import numpy as np

from kvstow.errors import BackendMissing
from kvstow.offload.remote.client import (
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
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import S3Store
except ImportError:
    raise BackendMissing("obstore", "s3") from None

T = TypeVar("T")

IN_FLIGHT = 64
"""Requests under way at a time, of one call, or of all that put objects."""

RETRIES = 3
BACKOFF = timedelta(milliseconds=50)
"""Requests that a server could not answer, or whose connection it closed, are sent again after
50 ms, 100 ms and 200 ms, about."""

NO_SUCH_RANGE = ("416 Range Not Satisfiable", "panicked", "non-partial")
"""In errors of `obstore`: an object ends before a range begins, before one of several begins, or
comes from a server that has no ranges. Such an object is read whole."""


class S3Client:
    """Objects of one bucket below one prefix."""

    puts_at_once = 16  # each ends with its slowest request, which may take long

    def __init__(
        self, bucket: str, prefix: str, *, options: Mapping[str, str], seconds: float
    ) -> None:
        self.where = f"s3://{bucket}/{prefix}"
        endpoint = options.get("endpoint", "")
        config: dict[str, Any] = {
            name: value for name, value in options.items() if name != "endpoint"
        }
        if endpoint:
            config |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
            config.setdefault("region", "us-east-1")
        self._store = S3Store(
            bucket,
            prefix=prefix or None,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": f"{min(seconds, 2.0)}s",
                "timeout": f"{seconds}s",
            },
            retry_config={
                "max_retries": RETRIES,
                "backoff": {"base": 2, "init_backoff": BACKOFF, "max_backoff": 10 * BACKOFF},
                "retry_timeout": timedelta(seconds=seconds),
            },
            **config,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="kvstow-s3", daemon=True)
        self._thread.start()
        self._seconds = seconds
        self._putting = asyncio.Semaphore(IN_FLIGHT)

    def put(self, blobs: Sequence[Blob]) -> Refused:
        """S3 makes an object or raises: a batch of which one fails counts as failed."""

        async def put(blob: Blob) -> bool:
            try:
                await obstore.put_async(
                    self._store, blob.name, blob.data.data, mode="create", use_multipart=False
                )
            except AlreadyExistsError:
                return False
            return True

        made = zip(blobs, self._each(put, blobs, self._putting), strict=True)
        return {blob.name: THERE for blob, is_new in made if not is_new}

    def get(self, objects: Sequence[tuple[str, Sequence[Range]]]) -> list[Answer]:
        """`obstore` answers a range at once, and an object in two steps, of which each waits for
        the interpreter: so a whole object is a range, too."""

        async def get(each: tuple[str, Sequence[Range]]) -> Answer:
            try:
                parts = await self._ranges_of(*each)
            except FileNotFoundError:
                return None
            return [np.frombuffer(part, np.uint8) for part in parts]

        return self._each(get, objects)

    async def _ranges_of(self, name: str, ranges: Sequence[Range]) -> list[memoryview]:
        """The bytes of ranges, as far as the object has them."""
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            parts = await obstore.get_ranges_async(self._store, name, starts=starts, ends=ends)
            return [memoryview(part) for part in parts]
        except Exception as error:
            if not any(sign in str(error) for sign in NO_SUCH_RANGE):
                raise
        found = await obstore.get_async(self._store, name)
        whole = memoryview(await found.bytes_async())
        return [whole[start:end] for start, end in ranges]

    def exists(self, names: Sequence[str]) -> Bools:
        async def head(name: str) -> bool:
            try:
                await obstore.head_async(self._store, name)
            except FileNotFoundError:
                return False
            return True

        return np.array(self._each(head, names), bool)

    def delete(self, names: Sequence[str]) -> Refused:
        async def delete(some: list[str]) -> None:
            with suppress(FileNotFoundError):
                await obstore.delete_async(self._store, some)

        self._each(delete, [list(names[at : at + 1000]) for at in range(0, len(names), 1000)])
        return {}

    def list_blobs(self, prefix: str) -> Iterator[BlobFacts]:
        try:
            chunks: Iterator[Sequence[Any]] = obstore.list(  # pyright: ignore[reportUnknownMemberType]
                self._store, prefix.rstrip("/") or None
            )
            for chunk in chunks:
                for found in chunk:
                    when = found["last_modified"].timestamp()
                    yield BlobFacts(found["path"], found["size"], when)
        except (BaseError, OSError) as error:
            raise _unreachable(self.where, error) from error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._seconds)
        if not self._loop.is_running():
            self._loop.close()

    def _each(
        self,
        function: Callable[[Any], Awaitable[T]],
        items: Sequence[Any],
        gate: asyncio.Semaphore | None = None,
    ) -> list[T]:
        """The function's results for all items, some at a time; cancelled when one fails."""
        passed = gate or asyncio.Semaphore(IN_FLIGHT)

        async def one(item: Any) -> T:
            async with passed:
                return await function(item)

        async def all_of_them() -> list[T]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item)) for item in items]
            return [task.result() for task in tasks]

        return self._run(all_of_them())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseExceptionGroup as errors:
            raise _unreachable(self.where, errors.exceptions[0]) from errors
        except (BaseError, OSError) as error:
            raise _unreachable(self.where, error) from error


def _unreachable(where: str, error: BaseException) -> StoreUnreachable:
    text = str(error)
    if "NoSuchBucket" in text:
        hint = "make it, or name another one: kvstow makes no buckets"
        return StoreUnreachable(f"{where}: there is no such bucket\n\nhint: {hint}")
    lines = text.splitlines()
    return StoreUnreachable(f"{where}: {lines[0] if lines else error!r}")
