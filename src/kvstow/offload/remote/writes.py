"""Rows on their way out: a bounded queue that drops what does not fit.

Nobody waits for a store to write. What nobody has looked for lately is looked up first, so that
what is there already is not sent again. What is refused, and why, is counted.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from threading import Condition, Lock, Thread
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

log = logging.getLogger("kvstow.offload")

BATCH_BYTES = 32 << 20
REMEMBERED = 1 << 16
RECENT_SECONDS = 60.0
"""So many names that were written or seen so lately are not sent again."""


class WriteAdmission(Enum):
    """What becomes of a row that is to be written."""

    KNOWN = auto()
    """It waits, is being written, or was lately."""
    TAKEN = auto()
    """There is room for it: `put` must follow."""
    DROPPED = auto()
    """It is not written, and counted."""


class WriteQueue:
    """Blobs that threads of its own bring to a store.

    `before` is called before each batch, `written` with the blobs that are new in the store, and
    `done` with all of a batch when their memory is needed no more. `refusal` says why so many bytes
    are too much, beside as many that wait.
    """

    def __init__(
        self,
        client: BlobClient,
        breaker: Breaker,
        *,
        max_bytes: int,
        before: Callable[[], None],
        written: Callable[[Sequence[Blob]], None],
        done: Callable[[Sequence[Blob]], None],
        refusal: Callable[[int, int], str],
    ) -> None:
        self._client, self._breaker = client, breaker
        self._max_bytes = max_bytes
        self._before, self._written, self._after, self._refusal = before, written, done, refusal
        self._waiting: deque[Blob] = deque()
        self._names: set[str] = set()
        """Of blobs that were taken and are not written yet."""
        self._nbytes = 0
        self._recent: OrderedDict[str, float] = OrderedDict()
        """When objects were written or seen, the oldest first."""
        self._absent: OrderedDict[str, float] = OrderedDict()
        """When objects were not there, the oldest first."""
        self._lock = Lock()
        self._arrived, self._changed = Condition(self._lock), Condition(self._lock)
        """Blobs wait for a thread; fewer bytes than before wait or are being written."""
        self._closed = False
        self._dropped: Counter[str] = Counter()
        self._said = float("-inf")
        self._threads = [
            Thread(target=self._work, name=f"kvstow-remote-write-{i}", daemon=True)
            for i in range(client.puts_at_once)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def nbytes(self) -> int:
        """Bytes that were taken and are not written yet."""
        return self._nbytes

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

    def admit(self, name: str, nbytes: int) -> WriteAdmission:
        """Whether a blob may come: one that is taken has a place in the queue from now on.

        One alone always fits.
        """
        with self._lock:
            seen = self._recent.get(name, float("-inf"))
            if name in self._names or monotonic() - seen < RECENT_SECONDS:
                return WriteAdmission.KNOWN
            reason, message = self._too_much(nbytes)
            if not reason:
                self._names.add(name)
                self._nbytes += nbytes
                return WriteAdmission.TAKEN
        self.drop(reason, message)
        return WriteAdmission.DROPPED

    def _too_much(self, nbytes: int) -> tuple[str, str]:
        """Why so many bytes more are not taken, in a word and in full; empty where they are."""
        if self._closed or self._breaker.is_open:
            return "unreachable", self._breaker.reason or "the tier is closed"
        if refusal := self._refusal(nbytes, self._nbytes):
            return "quota", refusal
        if self._nbytes and self._nbytes + nbytes > self._max_bytes:
            return "queue full", f"{self._nbytes} of {self._max_bytes} bytes wait already"
        return "", ""

    @contextmanager
    def withdrawn_on_error(self, name: str, nbytes: int) -> Generator[None]:
        """A blob that was taken is made meanwhile; if that fails, its place is free again."""
        try:
            yield
        except BaseException:
            self._leave([(name, nbytes)])
            raise

    def put(self, blobs: Sequence[Blob]) -> None:
        """Write blobs that were taken, unless the store fails. Never waits."""
        with self._lock:
            self._waiting.extend(blobs)
            self._arrived.notify()

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
            self._arrived.notify_all()
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
                self._breaker.failed(str(error))
                with self._lock:
                    self._dropped["unreachable"] += len(batch)
            except StoreFull as error:
                self.drop(NO_ROOM, str(error), len(batch))
            except Exception as error:  # the next batch may go well: a thread less would not
                self.drop("failed", f"{type(error).__name__}: {error}", len(batch))
            finally:
                self._done(batch)

    def _taken(self) -> list[Blob]:
        """Blobs of about one batch, when there are any; none when the queue is closed."""
        with self._lock:
            self._arrived.wait_for(lambda: self._waiting or self._closed)
            batch, nbytes = list[Blob](), 0
            while self._waiting and (not batch or nbytes < BATCH_BYTES):
                batch.append(self._waiting.popleft())
                nbytes += batch[-1].data.nbytes
            if self._waiting:
                self._arrived.notify()
            return batch

    def _write(self, batch: Sequence[Blob]) -> None:
        if self._breaker.is_open:
            raise StoreUnreachable(self._breaker.reason)
        self._before()
        present = self._present([blob.name for blob in batch])
        new = [blob for blob in batch if blob.name not in present]
        refused = self._client.put(new) if new else {}
        self._breaker.succeeded()
        lost = {name: reason for name, reason in refused.items() if reason != THERE}
        for reason, count in Counter(lost.values()).items():
            self.drop(reason, f"{reason} for {count} of {len(batch)} rows", count)
        with self._lock:
            _note(self._recent, [blob.name for blob in batch if blob.name not in lost])
        self._written([blob for blob in new if blob.name not in refused])

    def _present(self, names: Sequence[str]) -> set[str]:
        """Which objects are there already. Those that were absent lately are not asked for: to
        send one in vain does no harm."""
        since = monotonic() - RECENT_SECONDS
        with self._lock:
            names = [name for name in names if self._absent.pop(name, float("-inf")) < since]
        if not names:
            return set()
        there: list[bool] = self._client.exists(names).tolist()
        return {name for name, is_there in zip(names, there, strict=True) if is_there}

    def _done(self, batch: Sequence[Blob]) -> None:
        self._after(batch)
        self._leave([(blob.name, blob.data.nbytes) for blob in batch])

    def _leave(self, blobs: Sequence[tuple[str, int]]) -> None:
        """Blobs, by name and bytes, are in the queue no more."""
        with self._lock:
            for name, nbytes in blobs:
                self._names.discard(name)
                self._nbytes -= nbytes
            self._changed.notify_all()


def _note(when: "OrderedDict[str, float]", names: Sequence[str]) -> None:
    """Remember names from now on, and no more than so many."""
    for name in names:
        when[name] = monotonic()
        when.move_to_end(name)
    while len(when) > REMEMBERED:
        when.popitem(last=False)
