"""Rows on their way out: a bounded queue that drops what does not fit.

Nobody waits for a store to write. What is there already is not sent again. What is refused, and
why, is counted.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from math import inf
from threading import Condition
from time import monotonic

from kvstow.offload.remote.calls import Breaker
from kvstow.offload.remote.client import (
    NO_ROOM,
    THERE,
    Blob,
    BlobClient,
    StoreFull,
    StoreUnreachable,
)
from kvstow.offload.remote.collect import Quota
from kvstow.offload.tier import Bytes, Tallies
from kvstow.threads import guarded_thread

log = logging.getLogger("kvstow.offload")

BATCH_BYTES = 32 << 20
REMEMBERED = 1 << 16
RECENT_SECONDS = 60.0
"""So many names that were written or seen so lately are not sent again."""


class WriteQueue:
    """Blobs that threads of its own bring to a store, within a quota.

    `before` is called before each batch, `written` with the blobs that are new in the store.
    """

    def __init__(
        self,
        client: BlobClient,
        breaker: Breaker,
        quota: Quota,
        *,
        max_bytes: int,
        before: Callable[[], None],
        written: Callable[[Sequence[Blob]], None],
    ) -> None:
        self._client, self._breaker, self._quota = client, breaker, quota
        self._max_bytes = max_bytes
        self._before, self._written = before, written
        self._waiting: deque[Blob] = deque()
        self._nbytes = 0
        """Of blobs that were taken and are not written yet."""
        self._seen: OrderedDict[str, float] = OrderedDict()
        """When objects were written or seen, the oldest first; infinity for those on their way."""
        self._changed = Condition()
        self._closed = False
        self.dropped = Tallies()
        """Rows that were not written, by reason."""
        self._said = -inf
        self._threads = [
            guarded_thread(f"kvstow-remote-write-{i}", self._work, on_broken=lambda _: self._end())
            for i in range(client.puts_at_once)
        ]
        for thread in self._threads:
            thread.start()

    def _drop(self, reason: str, message: str, count: int = 1) -> None:
        """Rows are not written; the message is logged once a minute."""
        self.dropped.add(reason, count)
        if monotonic() - self._said > 60:
            self._said = monotonic()
            log.warning("%s: rows are not written: %s", self._client.where, message)

    def add(self, name: str, nbytes: int, make: Callable[[], Bytes]) -> bool:
        """Write what `make` gives, unless it waits, is being written, or was lately; False where it
        is dropped, and counted. One alone always fits. Never waits."""
        with self._changed:
            if monotonic() - self._seen.get(name, -inf) < RECENT_SECONDS:
                return True
            reason, message = self._too_much(nbytes)
            if not reason:
                self._seen[name] = inf
                self._nbytes += nbytes
        if reason:
            self._drop(reason, message)
            return False
        try:
            blob = Blob(name, make())
        except BaseException:
            self._leave({name: nbytes}, lost={name})
            raise
        with self._changed:
            self._waiting.append(blob)
            self._changed.notify_all()
        return True

    def _too_much(self, nbytes: int) -> tuple[str, str]:
        """Why so many bytes more are not taken, in a word and in full; empty where they are."""
        if self._closed or self._breaker.is_open:
            return "unreachable", self._breaker.reason or "the tier is closed"
        if refusal := self._quota.refusal(nbytes, self._nbytes):
            return "quota", refusal
        if self._nbytes and self._nbytes + nbytes > self._max_bytes:
            return "queue full", f"{self._nbytes} of {self._max_bytes} bytes wait already"
        return "", ""

    def forget(self, names: Sequence[str]) -> None:
        """These objects are not there: the next time they come they are sent again."""
        with self._changed:
            for name in names:
                if self._seen.get(name) != inf:
                    self._seen.pop(name, None)

    def flush(self, seconds: float) -> bool:
        """Whether nothing waits or is being written, within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._nbytes, seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits, within so many seconds, and drop the rest."""
        self.flush(seconds)
        self._end()
        end = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    def _end(self) -> None:
        """Take no more, and drop what waits."""
        with self._changed:
            self._closed = True
            self.dropped.add("closed", len(self._waiting))
            self._nbytes -= sum(blob.data.nbytes for blob in self._waiting)
            self._waiting.clear()
            self._changed.notify_all()

    # ── threads ───────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        while batch := self._next_batch():
            lost = {blob.name for blob in batch}
            try:
                lost = self._write(batch)
            except StoreUnreachable as error:
                self._breaker.failed(str(error))
                self.dropped.add("unreachable", len(batch))
            except StoreFull as error:
                self._drop(NO_ROOM, str(error), len(batch))
            except Exception as error:  # the next batch may go well: a thread less would not
                self._drop("failed", f"{type(error).__name__}: {error}", len(batch))
            finally:
                self._leave({blob.name: blob.data.nbytes for blob in batch}, lost)

    def _next_batch(self) -> list[Blob]:
        """Blobs of about one batch, when there are any; none when the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch, nbytes = list[Blob](), 0
            while self._waiting and (not batch or nbytes < BATCH_BYTES):
                batch.append(self._waiting.popleft())
                nbytes += batch[-1].data.nbytes
            return batch

    def _write(self, batch: Sequence[Blob]) -> set[str]:
        """Write what is not there yet; the names of what the store refused."""
        if self._breaker.is_open:
            raise StoreUnreachable(self._breaker.reason)
        self._before()
        there: list[bool] = self._client.exists([blob.name for blob in batch]).tolist()
        new = [blob for blob, is_there in zip(batch, there, strict=True) if not is_there]
        refused = self._client.put(new) if new else {}
        self._breaker.succeeded()
        lost = {name: reason for name, reason in refused.items() if reason != THERE}
        for reason, count in Counter(lost.values()).items():
            self._drop(reason, f"{reason} for {count} of {len(batch)} rows", count)
        self._written([blob for blob in new if blob.name not in refused])
        return set(lost)

    def _leave(self, blobs: dict[str, int], lost: set[str]) -> None:
        """Blobs, by name and bytes, are in the queue no more, and in the store but for the lost."""
        with self._changed:
            for name, nbytes in blobs.items():
                self._nbytes -= nbytes
                self._seen.pop(name, None)
                if name not in lost:
                    self._seen[name] = monotonic()
            while len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
            self._changed.notify_all()
