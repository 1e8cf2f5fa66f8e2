"""S3 and whatever speaks it, through `obstore`: the only module that imports it.

Threads have many requests of a batch under way at once. Credentials and region come from the URL
or, as usual, from `AWS_ACCESS_KEY_ID` and the like.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
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
"""Requests under way at a time that put objects, and as many others."""

RETRIES = 3
BACKOFF = timedelta(milliseconds=50)
"""Requests that a server could not answer, or whose connection it closed, are sent again after
50 ms, 100 ms and 200 ms, about."""

NO_SUCH_RANGE = ("416 Range Not Satisfiable", "PanicException", "non-partial")
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
        self._putting, self._asking = (
            ThreadPoolExecutor(IN_FLIGHT, f"kvstow-s3-{what}") for what in ("put", "ask")
        )

    def put(self, blobs: Sequence[Blob]) -> Refused:
        """S3 makes an object or raises: a batch of which one fails counts as failed."""

        def put(blob: Blob) -> bool:
            try:
                obstore.put(
                    self._store, blob.name, blob.data.data, mode="create", use_multipart=False
                )
            except AlreadyExistsError:
                return False
            return True

        made = zip(blobs, self._each(put, blobs, self._putting), strict=True)
        return {blob.name: THERE for blob, is_new in made if not is_new}

    def get(self, objects: Sequence[tuple[str, Sequence[Range]]]) -> list[Answer]:
        def get(each: tuple[str, Sequence[Range]]) -> Answer:
            try:
                return [np.frombuffer(part, np.uint8) for part in self._ranges_of(*each)]
            except FileNotFoundError:
                return None

        return self._each(get, objects, self._asking)

    def _ranges_of(self, name: str, ranges: Sequence[Range]) -> list[memoryview]:
        """The bytes of ranges, as far as the object has them."""
        starts, ends = [start for start, _ in ranges], [end for _, end in ranges]
        try:
            parts = obstore.get_ranges(self._store, name, starts=starts, ends=ends)
            return [memoryview(part) for part in parts]
        except BaseException as error:  # a panic is no Exception
            if not any(sign in repr(error) for sign in NO_SUCH_RANGE):
                raise
        whole = memoryview(obstore.get(self._store, name).bytes())
        return [whole[start:end] for start, end in ranges]

    def exists(self, names: Sequence[str]) -> Bools:
        def head(name: str) -> bool:
            try:
                obstore.head(self._store, name)
            except FileNotFoundError:
                return False
            return True

        return np.array(self._each(head, names, self._asking), bool)

    def delete(self, names: Sequence[str]) -> Refused:
        def delete(some: list[str]) -> None:
            with suppress(FileNotFoundError):
                obstore.delete(self._store, some)

        lots = [list(names[at : at + 1000]) for at in range(0, len(names), 1000)]
        self._each(delete, lots, self._asking)
        return {}

    def list_blobs(self, prefix: str) -> Iterator[BlobFacts]:
        try:
            chunks: Iterator[Sequence[Any]] = obstore.list(  # pyright: ignore[reportUnknownMemberType]
                self._store, prefix.rstrip("/") or None
            )
            for chunk in chunks:
                for entry in chunk:
                    when = entry["last_modified"].timestamp()
                    yield BlobFacts(entry["path"], entry["size"], when)
        except (BaseError, OSError) as error:
            raise _unreachable(self.where, error) from error

    def close(self) -> None:
        for threads in (self._putting, self._asking):
            threads.shutdown(wait=False, cancel_futures=True)

    def _each(
        self, function: Callable[[Any], T], items: Sequence[Any], threads: ThreadPoolExecutor
    ) -> list[T]:
        """The function's results for all items; none is begun any more when one has failed."""
        try:
            return list(threads.map(function, items))
        except (BaseError, OSError, RuntimeError) as error:  # which a closed client raises
            raise _unreachable(self.where, error) from error


def _unreachable(where: str, error: BaseException) -> StoreUnreachable:
    text = str(error)
    if "NoSuchBucket" in text:
        hint = "make it, or name another one: kvstow makes no buckets"
        return StoreUnreachable(f"{where}: there is no such bucket\n\nhint: {hint}")
    lines = text.splitlines()
    return StoreUnreachable(f"{where}: {lines[0] if lines else error!r}")
