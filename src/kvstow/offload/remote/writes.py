"""Rows on their way out: a bounded queue that drops what does not fit.

Nobody waits for a store to write. What nobody has looked for lately is looked up first, so that
what is there already is not sent again. What is refused, and why, is counted.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from threading import Condition, Lock, Thread
from time import monotonic

from kvstow.offload.remote.calls import Breaker
from kvstow.offload.remote.clients.base import (
    NO_ROOM,
    Blob,
    BlobClient,
    StoreFull,
    StoreUnreachable,
)

log = logging.getLogger("kvstow.offload")

BATCH_BYTES = 32 << 20
REMEMBERED = 1 << 16
RECENT_SECONDS = 60.0
"""So many names that were written or seen so lately are not sent again."""


class WriteQueue:
    """Blobs that threads of its own bring to a store."""

    def __init__(
        self,
        client: BlobClient,
        breaker: Breaker,
        *,
        max_bytes: int,
        num_threads: int = 2,
        before: Callable[[], None] = lambda: None,
        written: Callable[[Sequence[Blob], Sequence[Blob]], None] = lambda new, others: None,
    ) -> None:
        self._client, self._breaker = client, breaker
        self._max_bytes = max_bytes
        self._before, self._written = before, written
        self._waiting: deque[Blob] = deque()
        self._names: set[str] = set()
        """Of blobs that wait or are being written."""
        self._nbytes = 0
        self._recent: OrderedDict[str, float] = OrderedDict()
        """When objects were written or seen, the oldest first."""
        self._absent: OrderedDict[str, float] = OrderedDict()
        """When objects were not there, the oldest first."""
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._closed = False
        self._dropped: Counter[str] = Counter()
        self._said = float("-inf")
        self._threads = [
            Thread(target=self._work, name=f"kvstow-remote-write-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes that wait or are being written."""
        return self._nbytes

    def is_known(self, name: str) -> bool:
        """Whether the object waits, is being written, or was lately."""
        with self._lock:
            seen = self._recent.get(name, float("-inf"))
            return name in self._names or monotonic() - seen < RECENT_SECONDS

    @property
    def dropped(self) -> dict[str, int]:
        """Rows that were not written, by reason."""
        with self._lock:
            return dict(sorted(self._dropped.items()))

    def drop(self, reason: str, message: str, count: int = 1) -> None:
        """Rows are not written; the message is logged once a minute."""
        with self._lock:
            self._dropped[reason] += count
            silent = monotonic() - self._said < 60
            self._said = self._said if silent else monotonic()
        if not silent:
            log.warning("%s: rows are not written: %s", self._client.where, message)

    def admits(self, nbytes: int) -> bool:
        """Whether a blob of so many bytes would be taken now; if not, it counts as dropped.

        One alone always is.
        """
        if self._closed or self._breaker.is_open:
            self.drop("unreachable", self._breaker.reason or "the tier is closed")
            return False
        if self._nbytes and self._nbytes + nbytes > self._max_bytes:
            self.drop("queue full", f"{self._nbytes} of {self._max_bytes} bytes wait already")
            return False
        return True

    def put(self, blob: Blob) -> bool:
        """Whether the blob will be written, unless the store fails. Never waits."""
        if not self.admits(blob.data.nbytes):
            return False
        with self._lock:
            if blob.name in self._names:
                return True
            self._waiting.append(blob)
            self._names.add(blob.name)
            self._nbytes += blob.data.nbytes
            self._changed.notify_all()
            return True

    def forget(self, names: Sequence[str]) -> None:
        """These objects are not there: the next time they come they are sent again."""
        with self._lock:
            for name in names:
                self._recent.pop(name, None)
            _note(self._absent, names)

    def flush(self, seconds: float) -> bool:
        """Whether nothing waits or is being written, within so many seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._nbytes, seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits, within so many seconds, and drop the rest."""
        self.flush(seconds)
        with self._lock:
            self._closed = True
            self._dropped["closed"] += len(self._waiting)
            for blob in self._waiting:
                self._nbytes -= blob.data.nbytes
            self._waiting.clear()
            self._changed.notify_all()
        end = monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - monotonic()))

    # ── threads ───────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        while batch := self._taken():
            try:
                self._write(batch)
            except StoreUnreachable as error:
                self._breaker.trip(str(error))
                with self._lock:
                    self._dropped["unreachable"] += len(batch)
            except StoreFull as error:
                self.drop(NO_ROOM, str(error), len(batch))
            finally:
                self._done(batch)

    def _taken(self) -> list[Blob]:
        """Blobs of about one batch, when there are any; none when the queue is closed."""
        with self._lock:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch, nbytes = list[Blob](), 0
            while self._waiting and (not batch or nbytes < BATCH_BYTES):
                batch.append(self._waiting.popleft())
                nbytes += batch[-1].data.nbytes
            return batch

    def _write(self, batch: Sequence[Blob]) -> None:
        if self._breaker.is_open:
            raise StoreUnreachable(self._breaker.reason)
        self._before()
        there = self._there([blob.name for blob in batch])
        new = [blob for blob in batch if blob.name not in there]
        refused = self._client.put(new) if new else {}
        for reason, count in Counter(refused.values()).items():
            self.drop(reason, f"{reason} for {count} of {len(new)} rows", count)
        with self._lock:
            _note(self._recent, [blob.name for blob in batch if blob.name not in refused])
        made = [blob for blob in new if blob.name not in refused]
        self._written(made, [blob for blob in batch if blob.name in there | refused.keys()])

    def _there(self, names: Sequence[str]) -> set[str]:
        """Which objects are there already. Those that were absent lately are not asked for: to
        send one in vain does no harm."""
        since = monotonic() - RECENT_SECONDS
        with self._lock:
            asked = [name for name in names if self._absent.pop(name, float("-inf")) < since]
        answers: list[bool] = self._client.exists(asked).tolist() if asked else []
        return {name for name, is_there in zip(asked, answers, strict=True) if is_there}

    def _done(self, batch: Sequence[Blob]) -> None:
        with self._lock:
            for blob in batch:
                self._names.discard(blob.name)
                self._nbytes -= blob.data.nbytes
            self._changed.notify_all()


def _note(when: "OrderedDict[str, float]", names: Sequence[str]) -> None:
    """Remember names from now on, and no more than so many."""
    for name in names:
        when[name] = monotonic()
        when.move_to_end(name)
    while len(when) > REMEMBERED:
        when.popitem(last=False)
