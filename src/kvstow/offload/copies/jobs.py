"""Jobs of a mover, and the queues they wait in: one for each kind of job.

In a queue the job goes first that would end first if all took turns byte by byte: small jobs
overtake large ones, but never by more bytes than the large one has, so none waits for ever. Long
jobs are cut into parts when their turn comes, so that a job waits for the parts under way at most.

A job's copies start after what its submitter's stream had been given by then (`StreamOrder`).
"""

import heapq
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from threading import Condition, Event, Lock

import numpy as np
import torch

from kvstow.errors import StoreError
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.tier import Bools
from kvstow.plan.view import Ints


class JobKind(IntEnum):
    """What a job is for; the first goes first."""

    LOAD = 0
    STORE = 1
    DEMOTE = 2


class MoverJob:
    """Rows on their way between tiers. May be used from any thread."""

    def __init__(
        self,
        kind: JobKind,
        group: int,
        keys: Sequence[bytes],
        ids: Ints,
        links: Sequence[ChainLink] = (),
    ) -> None:
        self.kind = kind
        self.group = group
        self.keys = tuple(keys)
        self.links = tuple(links)
        """Where the blocks stand in their sequences: one per key, or none."""
        self.ids = ids
        self.moved: Bools = np.zeros(len(keys), bool)
        """Per key, whether its row has arrived. Complete when the job is over."""
        self.num_damaged = 0
        """Rows that had not come back as they left; they were forgotten."""
        self.error: StoreError | None = None
        self.fence: torch.cuda.Event | None = None
        """Its copies start after this; None where they may start at once."""
        self._lock = Lock()
        self._over = Event()
        self._parts = 0
        self._is_cancelled = False

    @property
    def over(self) -> bool:
        """Whether nothing of it will touch memory any more."""
        return self._over.is_set()

    @property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        return tuple((self.group, int(block)) for block in self.ids)

    def cancel(self) -> None:
        """Begin no further part. Wait for `over` before rows are used for anything else."""
        with self._lock:
            self._is_cancelled = self._is_cancelled or not self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the job is over, within so many seconds."""
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> Bools:
        """Which rows have arrived. Raises the job's StoreError, which names its blocks."""
        if not self.wait(timeout):
            raise StoreError(
                f"{self.kind.name.lower()} of {len(self.keys)} rows is not done after {timeout} s",
                blocks=self.blocks,
            )
        if self.error is not None:
            raise self.error
        return self.moved

    # ── for the mover ─────────────────────────────────────────────────────────────

    def expect_parts(self, count: int) -> None:
        """So many parts will come to an end."""
        self._parts = count
        if not count:
            self._over.set()

    def begin_part(self) -> bool:
        """Whether the next part is still to be done."""
        with self._lock:
            return not self._is_cancelled and self.error is None

    def end_part(self, error: StoreError | None) -> bool:
        """One part is over; whether the job is."""
        with self._lock:
            self._parts -= 1
            self.error = self.error or error
            if self._parts == 0:
                self._over.set()
            return self._parts == 0


@dataclass(frozen=True, slots=True)
class JobPart:
    """A piece of a job under way: the positions of its keys."""

    job: MoverJob
    positions: slice
    nbytes: int


class JobQueue:
    """Jobs of one kind. Bounded: a disk that is slow to take rows in keeps none from host memory,
    whose jobs wait in another queue."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._heap: list[tuple[int, int, JobPart]] = []
        """Parts that stand in line. First goes that whose job is due first: by the bytes that had
        been taken from the queue when the job came, and its own."""
        self._nbytes = 0
        """Bytes that stand in line or are on their way."""
        self._taken_bytes = 0
        self._numbers = count()
        self._is_closed = False
        self._lock = Lock()
        self._ready = Condition(self._lock)
        self._empty = Condition(self._lock)

    def __len__(self) -> int:
        """Parts that stand in line."""
        return len(self._heap)

    def put(self, job: MoverJob, row_bytes: int, rows_per_part: int) -> None:
        """The whole job stands in line, or none of it: raises StoreError when it is full."""
        nbytes = len(job.keys) * row_bytes
        starts = range(0, len(job.keys), rows_per_part)
        with self._lock:
            if self._is_closed:
                raise StoreError("the mover is closed", blocks=job.blocks)
            if self._nbytes and self._nbytes + nbytes > self._max_bytes:
                raise StoreError(
                    f"the mover's queue is full: {self._nbytes} of {self._max_bytes} bytes wait, "
                    f"{nbytes} more do not fit\n\n"
                    "hint: wait for jobs, or give the mover larger limits",
                    blocks=job.blocks,
                )
            job.expect_parts(len(starts))
            due = self._taken_bytes + nbytes
            for at in starts:
                count = min(rows_per_part, len(job.keys) - at)
                part = JobPart(job, slice(at, at + count), count * row_bytes)
                heapq.heappush(self._heap, (due, next(self._numbers), part))
            self._nbytes += nbytes
            self._ready.notify(len(starts))

    def take(self, *, wait: bool = True) -> JobPart | None:
        """The next part; None when the queue is closed, or at once where nobody is to wait."""
        with self._lock:
            while wait and not self._heap and not self._is_closed:
                self._ready.wait()
            if self._is_closed or not self._heap:
                return None
            _, _, part = heapq.heappop(self._heap)
            self._taken_bytes += part.nbytes
            return part

    def done(self, part: JobPart) -> None:
        """A part that was taken is over."""
        with self._lock:
            self._nbytes -= part.nbytes
            if not self._nbytes:
                self._empty.notify_all()

    def close(self) -> list[JobPart]:
        """Nobody takes or puts any more; what was left."""
        with self._lock:
            self._is_closed = True
            left, self._heap = [part for _, _, part in self._heap], []
            self._ready.notify_all()
            return left

    def wait_empty(self, timeout: float | None = None) -> bool:
        """Whether nothing stands in line or runs, within so many seconds."""
        with self._lock:
            return self._empty.wait_for(lambda: not self._nbytes, timeout)


class StreamOrder:
    """One event per job, one stream per direction, for an arena on that device.

    A direction's copies stand one behind the other: the next part is there before the last one is
    over, and never behind a copy of the other direction. On the host, copies happen when they are
    called, and what the submitter wrote is there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[JobKind, tuple[torch.cuda.Stream, Lock]] = {}
        if device.type == "cuda":
            for kind in (JobKind.LOAD, JobKind.STORE):
                self._streams[kind] = torch.cuda.Stream(device), Lock()

    def record(self, job: MoverJob) -> None:
        """The job comes after what the current stream has been given by now."""
        if self._streams:
            job.fence = torch.cuda.Event()
            job.fence.record(torch.cuda.current_stream(self._device))

    @contextmanager
    def after(self, job: MoverJob) -> Generator[torch.cuda.Stream | None]:
        """The stream of the job's direction, the thread's current one meanwhile, behind the
        job's fence. Submit inside, wait outside: others of the direction submit after it."""
        if not self._streams:
            yield None
            return
        stream, turn = self._streams[job.kind]
        with turn:
            if job.fence is not None:
                stream.wait_event(job.fence)
            with torch.cuda.stream(stream):
                yield stream
