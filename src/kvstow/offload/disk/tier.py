"""The disk tier: rows in files that grow, an index in SQLite, a checksum on every row.

    store   lease slots (index) → write rows → fdatasync → enter rows (index)
    load    look up (index) → read slots → record and checksum must match → used

Between the two transactions the slots belong to nobody's row, so a process may die anywhere. A
reader takes no lock: if a slot was given to another row while it was being read, generation or
checksum do not match, and that is a miss. Several processes may use one store.
"""

import json
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from threading import Lock

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.disk import owners
from kvstow.offload.disk.allocator import Recency, SlotAllocator
from kvstow.offload.disk.attachment import Attachment
from kvstow.offload.disk.files import LOST, Files
from kvstow.offload.disk.format import ChainLink, SlotRecord
from kvstow.offload.disk.index import (
    FREE,
    RETIRED,
    IndexBroken,
    RowPlaces,
    StoreIndex,
    Transaction,
)
from kvstow.offload.disk.opening import OpenStore
from kvstow.offload.disk.owners import Processes
from kvstow.offload.disk.recovery import DroppedRows
from kvstow.offload.disk.segments import Segments, SlotRow
from kvstow.offload.disk.writing import RowWriter
from kvstow.offload.eviction.policies import PolicyName
from kvstow.offload.tier import (
    Bools,
    Bytes,
    Counter,
    Counts,
    Tier,
    Usage,
    checked_keys,
    checked_rows,
    facts,
    known_identity,
    note_unverified,
)
from kvstow.plan.identity import Identity
from kvstow.plan.layout import Layout
from kvstow.plan.words import parse_size

log = logging.getLogger("kvstow.offload")

BEAT_SECONDS = 1.0

USAGE_SECONDS = 1.0
"""How long somebody who wants to know the usage waits for the index."""


class DiskTier:
    """Rows of one layout in a directory, within `capacity` bytes of data files.

    `layout` may be that of any arena whose rows are to be kept; the tier's own is the layout
    that the directory states, and `layout=None` asks for just that. The computation that makes
    the rows is `identity`, or the layout's. `dropped` says what was lost when the store was
    opened after a crash. With `threads=0` nothing happens outside the caller's thread; `files`,
    `clock` and `processes` are what a simulation replaces.

    A broken index is made again from the data files as soon as no other process uses it. Until
    then loads are misses and stores are errors.
    """

    name = "disk"

    def __init__(
        self,
        path: str | Path,
        layout: Layout | None = None,
        *,
        identity: Identity | None = None,
        capacity: int | str | None = None,
        policy: PolicyName = "lru",
        files: Files | None = None,
        threads: int = 4,
        clock: Callable[[], float] = time.time,
        processes: Processes | None = None,
    ) -> None:
        self.path = Path(path)
        self._processes = processes or Processes()
        if layout is not None:
            known = known_identity(layout, identity, f"store {path}")
            layout = layout.identified(known)
        self._open = OpenStore(
            self.path,
            layout,
            capacity=parse_size(capacity) if isinstance(capacity, str) else capacity,
            files=files or Files(),
            threads=threads,
            clock=clock,
            processes=self._processes,
        )
        self.layout = self._open.layout
        self.dropped: tuple[DroppedRows, ...] = ()
        self._note_dropped()
        self._policy: PolicyName = policy
        self._clock = clock
        self._reading: tuple[dict[int, list[int]], ...] = tuple({} for _ in self.layout.groups)
        """Per group and load under way, the places that are read."""
        self._numbers = count()
        self._lock = Lock()
        self._attachment = Attachment(self._open, clock, self._index_replaced)
        self._counter = Counter()
        self._beaten = float("-inf")
        self._beside: tuple[Tier, ...] = ()
        self._last_usage = Usage(rows=0, nbytes=0, capacity=self._open.capacity)
        try:
            self._make_allocator()
            if identity is not None and layout is None:
                known_identity(self.layout, identity, f"store {path}")
        except BaseException:
            with closing(self._open), suppress(StoreError), self.index.write() as write:
                owners.remove(write, self._open.owner)
            raise
        if layout is not None:
            note_unverified(self.layout.identity, f"store {path}")

    def _make_allocator(self) -> None:
        self._recency = Recency(
            self._open.index, self._policy, self.segments.slots, self._open.max_segments
        )
        self._allocator = SlotAllocator(self._open, self._recency, self._counter)
        self._writer = RowWriter(
            self._open, self._allocator, self._counter, busy=self._busy, entered=self._beat
        )

    def _index_replaced(self) -> None:
        """Leases and ages of the old index mean nothing any more."""
        self._note_dropped()
        self._make_allocator()

    def _note_dropped(self) -> None:
        self.dropped = (*self.dropped, *self._open.dropped)
        for dropped in self._open.dropped:
            log.warning("store %s: %s", self.path, dropped)

    def close(self) -> None:
        """Write down what was used, and give up everything that is held; once is enough.

        What cannot be written down, as on a full disk, is logged: rows are as good as before.
        """
        if not self._attachment.close():
            return
        try:
            if self._attachment.is_attached:
                with self.index.write() as write:
                    self._recency.flush(write)
                    owners.remove(write, self._open.owner)
        except StoreError as error:
            log.warning("store %s: closed, and that is not written down: %s", self.path, error)
        finally:
            self._open.close()

    # ── questions ─────────────────────────────────────────────────────────────────

    @property
    def index(self) -> StoreIndex:
        return self._open.index

    @property
    def segments(self) -> Segments:
        return self._open.segments

    @property
    def counts(self) -> Counts:
        return self._counter.now

    @property
    def usage(self) -> Usage:
        """The usage now, or what it last was: whoever asks need not wait for a thread that waits
        for another process to let go of the index."""
        try:
            return self._attachment.retried(self._usage_lately)
        except IndexBroken:
            return Usage(rows=0, nbytes=0, capacity=self._open.capacity)

    def _usage_lately(self) -> Usage:
        with self.index.held(USAGE_SECONDS) as is_ours:
            if is_ours:
                self._last_usage = self._usage_now()
        return self._last_usage

    def _usage_now(self) -> Usage:
        """The usage, asked by somebody who uses the index already."""
        nbytes = sum(self.segments.used(segment) for segment, _, _ in self.index.segments())
        return Usage(rows=self.index.num_rows(), nbytes=nbytes, capacity=self._open.capacity)

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        checked_keys(self.layout, group, keys)
        try:
            return self._attachment.retried(lambda: self.index.contains(group, keys))
        except IndexBroken:
            return np.zeros(len(keys), bool)

    def keys(self, group: int) -> list[bytes]:
        """The keys of all rows of a group, by place."""
        return self._attachment.retried(lambda: self.index.keys(group))

    def keys_since(self, group: int, seq: int, most: int = 10_000) -> tuple[list[bytes], int]:
        """Keys of rows of a group that any process has entered or used after `seq`, at most so
        many, and the `seq` to go on from; 0 is the beginning."""
        return self._attachment.retried(lambda: self.index.keys_since(group, seq, most))

    # ── store ─────────────────────────────────────────────────────────────────────

    def store(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        """Keep rows; which of them are kept now.

        Rows for which there is no room are not kept. Raises StoreError when the medium or the
        index fails; rows that were entered before stay.
        """
        checked_rows(self.layout, group, checked_keys(self.layout, group, keys), rows)
        return self._attachment.retried(lambda: self._writer.store(group, keys, rows, links))

    # ── load ──────────────────────────────────────────────────────────────────────

    def load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        """Copy rows out; which of them were here, and whole.

        A row whose bytes are not what they were is dropped, counted as a failure and noted
        in the index; the caller sees a miss.
        """
        checked_rows(self.layout, group, checked_keys(self.layout, group, keys), rows)
        try:
            return self._attachment.retried(lambda: self._loaded(group, keys, rows))
        except IndexBroken:
            self._count_load(group, len(keys), 0)
            return np.zeros(len(keys), bool)

    def _loaded(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        places = self.index.find(group, keys)
        wanted = self._slots(group, places, keys, rows)
        with self._pinned(group, places):
            results = self.segments.read(group, wanted)
        good = np.array([result is True for result in results], bool)
        if not good.all():
            self._dismiss(group, wanted, results)
        self._count_load(group, len(keys), int(good.sum()))
        if self._recency.use(places.place[good]) or self._beat_is_due():
            self._note("rows that were used", self._write_down)
        mask = np.zeros(len(keys), bool)
        mask[places.position[good]] = True
        return mask

    def _slots(
        self, group: int, places: RowPlaces, keys: Sequence[bytes], rows: Sequence[Bytes]
    ) -> list[SlotRow]:
        """What is to be read where, and what its record must say."""
        row_bytes, nowhere = self.layout.row_bytes(group), ChainLink()
        return [
            SlotRow(
                place,
                SlotRecord(
                    generation=generation,
                    group=group,
                    key=keys[i],
                    row_bytes=row_bytes,
                    checksum=checksum,
                    link=nowhere,
                ),
                rows[i],
            )
            for i, place, generation, checksum in places.rows()
        ]

    def _write_down(self, write: Transaction) -> None:
        self._recency.flush(write)
        self._beat(write)

    def _note(self, what: str, change: Callable[[Transaction], None]) -> None:
        """Change the index after a load. If that fails it is logged: the loaded rows are good."""
        try:
            with self._recency.following() as write:
                change(write)
        except IndexBroken:
            raise
        except StoreError as error:
            log.warning("store %s: %s: not written down: %s", self.path, what, error)

    def _count_load(self, group: int, asked: int, loaded: int) -> None:
        nbytes = loaded * self.layout.row_bytes(group)
        self._counter.add(
            Counts(hits=loaded, misses=asked - loaded, loaded_rows=loaded, loaded_bytes=nbytes)
        )

    def _busy(self) -> list[set[int]]:
        with self._lock:
            return [set(chain(*reading.values())) for reading in self._reading]

    @contextmanager
    def _pinned(self, group: int, found: RowPlaces) -> Generator[None]:
        """Rows being read are not given up by this process."""
        number = next(self._numbers)
        with self._lock:
            self._reading[group][number] = found.place.tolist()
        try:
            yield
        finally:
            with self._lock:
                del self._reading[group][number]

    def _dismiss(
        self, group: int, rows: Sequence[SlotRow], results: Sequence[bool | OSError]
    ) -> None:
        """Drop rows whose bytes are lost, unless they were replaced while we read.

        What could not be read for want of descriptors or memory is a miss now, and stays.
        """
        passing = [r for r in results if isinstance(r, OSError) and r.errno not in LOST]
        if passing:
            log.warning("store %s: %d rows not read: %s", self.path, len(passing), passing[0])
        lost = [
            (row, result)
            for row, result in zip(rows, results, strict=True)
            if result is False or (isinstance(result, OSError) and result.errno in LOST)
        ]
        if lost:
            self._note("rows that are lost", lambda write: self._drop(write, group, lost))

    def _drop(
        self, write: Transaction, group: int, lost: Sequence[tuple[SlotRow, bool | OSError]]
    ) -> None:
        for row, result in lost:
            still = write.ask(
                "SELECT 1 FROM rows WHERE place = ? AND generation = ?",
                row.place,
                row.record.generation,
            )
            if not still:
                continue
            unreadable = isinstance(result, OSError)
            write.drop(group, [row.place], to=RETIRED if unreadable else FREE)
            why = f"cannot be read ({result})" if unreadable else "is not what was written"
            what = f"row {row.record.key.hex()} of group {group} at {row.place:#x} {why}"
            write.note(what, 1)
            log.warning("store %s: %s", self.path, what)
            self._counter.add(Counts(failures=1))

    # ── evict ─────────────────────────────────────────────────────────────────────

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        checked_keys(self.layout, group, keys)
        count = self._attachment.retried(lambda: self._evicted(group, keys))
        self._counter.add(Counts(evicted_rows=count))
        return count

    def _evicted(self, group: int, keys: Sequence[bytes]) -> int:
        places = self.index.find(group, keys).place
        with self._recency.following() as write:
            count = write.drop(group, places.tolist())
            self._recency.forget(group, places)
        return count

    def prune(self, nbytes: int) -> int:
        """Drop rows, coldest first, until the data files take at most `nbytes`; how many."""
        count = self._attachment.retried(lambda: self._allocator.shrink(nbytes))
        self._counter.add(Counts(evicted_rows=count))
        return count

    # ── being seen ────────────────────────────────────────────────────────────────

    def publish(self, tier: Tier) -> None:
        """Let `kvstow top` show another tier of this process beside the store."""
        self._beside = (*self._beside, tier)

    def beat(self) -> None:
        """Tell other processes, and `kvstow top`, that this one lives and what it has done."""
        with self._attachment.using(), self._recency.following() as write:
            self._recency.flush(write)
            self._beaten = float("-inf")
            self._beat(write)

    def _beat_is_due(self) -> bool:
        since = self._clock() - self._beaten
        return not 0 <= since < BEAT_SECONDS  # a clock that was set back is due as well

    def _beat(self, write: Transaction) -> None:
        if self._beat_is_due():
            self._beaten = self._clock()
            tiers = [{"tier": tier.name, **facts(tier)} for tier in self._beside]
            mine = {**asdict(self.counts), **asdict(self._usage_now())}
            tiers.append({"tier": self.name, **mine})
            owners.beat(write, self._open.owner, self._processes, json.dumps(tiers))
