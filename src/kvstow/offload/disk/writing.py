"""Rows onto disk: slots are leased, written, made durable, and then entered.

    lease slots (index) → write rows → fdatasync → enter rows (index)

Rows of one call go in parts, so that one is written while another is leased or entered. Between
the two transactions the slots belong to nobody's row: whatever fails, they are given back.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from threading import Lock

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.disk.allocator import Reading, SlotAllocator
from kvstow.offload.disk.format import ChainLink, SlotRecord
from kvstow.offload.disk.index import RowEntry, Transaction
from kvstow.offload.disk.opening import OpenStore
from kvstow.offload.disk.segments import PendingWrite, SlotRow
from kvstow.offload.eviction.policies import mark
from kvstow.offload.tier import Bools, Bytes, Counter, Counts, firsts

LEASE_BYTES = 256 << 20
"""A store call leases, writes and enters slots in parts of about so many bytes."""

PARTS = 2
"""Parts that are being written while one is leased or entered."""


class RowWriter:
    """Writes rows of one open store, until its index is replaced. Call from any thread.

    `busy` says which places are being read, `entered` is called in every transaction that enters
    rows.
    """

    def __init__(
        self,
        store: OpenStore,
        allocator: SlotAllocator,
        counter: Counter,
        *,
        busy: Callable[[], Reading],
        entered: Callable[[Transaction], None],
    ) -> None:
        self._store, self._allocator, self._counter = store, allocator, counter
        self._busy, self._entered = busy, entered
        self._unreleased: set[int] = set()
        """Slots that are to be given back as soon as the index can be written."""
        self._lock = Lock()

    def store(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink],
    ) -> Bools:
        """Keep rows; which of them are kept now. Rows for which there is no room are not.

        StoreError where the medium or the index fails; rows that were entered before stay.
        """
        kept = self._store.index.contains(group, keys)
        missing = firsts(keys, ~kept)
        step = max(1, LEASE_BYTES // self._store.segments.slot_bytes[group])
        done: set[bytes] = set()
        under_way: list[PendingWrite] = []
        try:
            for start in range(0, len(missing), step):
                part = missing[start : start + step]
                under_way.append(self._start(group, keys, rows, links, part))
                if len(under_way) > PARTS:
                    done |= self._finish(group, under_way.pop(0))
            while under_way:
                done |= self._finish(group, under_way.pop(0))
        finally:
            for left in under_way:
                self._abandon(left, [row.place for row in left.rows])
        return kept | np.array([key in done for key in keys], bool)

    def _start(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink],
        part: Sequence[int],
    ) -> PendingWrite:
        """Lease slots for rows and begin to write them; no more than there is room for."""
        marks = [mark(keys[i]) for i in part]
        places, first = self._allocator.lease(group, marks, self._busy())
        slotted: list[SlotRow] = []
        for n, (at, i) in enumerate(zip(places, part, strict=False)):
            link = links[i] if links else ChainLink()
            slotted.append(SlotRow(at, self._record(group, keys[i], first + n, link), rows[i]))
        try:
            return self._store.segments.start(group, slotted)
        except BaseException:
            self._release(places)
            raise

    def _finish(self, group: int, writing: PendingWrite) -> set[bytes]:
        """Enter what has reached the medium; its keys. Raises where something has not, and the
        slots of what was not entered are given back."""
        left = {row.place for row in writing.rows}
        try:
            records = self._store.segments.finish(writing)
            results = [(row.place, r) for row, r in zip(writing.rows, records, strict=True)]
            good = [(at, r) for at, r in results if isinstance(r, SlotRecord)]
            entered = self._enter(group, good)
            left.difference_update(at for at, _ in good)
        finally:
            if left:
                self._abandon(writing, left)
        bad = [r for _, r in results if isinstance(r, OSError)]
        if bad:
            self._counter.add(Counts(failures=len(bad)))
            raise StoreError(
                f"{self._store.path}: {len(bad)} of {len(records)} rows were not written: {bad[0]}"
            )
        return entered

    def _abandon(self, writing: PendingWrite, places: Iterable[int]) -> None:
        """Wait until nothing writes any more, then give back slots that are no rows."""
        wait(writing.futures)
        self._release(places)

    def _record(self, group: int, key: bytes, generation: int, link: ChainLink) -> SlotRecord:
        return SlotRecord(
            generation=generation,
            group=group,
            key=key,
            checksum=0,
            link=link,
            row_bytes=self._store.layout.row_bytes(group),
        )

    def _enter(self, group: int, good: Sequence[tuple[int, SlotRecord]]) -> set[bytes]:
        """Turn what is on the medium into rows; their keys."""
        entries = [
            RowEntry(at, r.key, r.generation, r.checksum, r.link.block, r.link.parent)
            for at, r in good
        ]
        with self._giving_back() as write:
            entered = write.enter(group, entries, self._store.owner)
            self._entered(write)
        keys = {e.key for e, done in zip(entries, entered, strict=True) if done}
        nbytes = len(keys) * self._store.layout.row_bytes(group)
        self._counter.add(Counts(stored_rows=len(keys), stored_bytes=nbytes))
        return keys

    def _release(self, places: Iterable[int]) -> None:
        """Give slots back; where the index cannot be written now, later."""
        with self._lock:
            self._unreleased.update(places)
        with suppress(StoreError), self._giving_back():
            pass

    @contextmanager
    def _giving_back(self) -> Generator[Transaction]:
        """A transaction that gives back what is to be given back; if it does not happen, as on a
        full disk, another one does."""
        with self._lock:
            places, self._unreleased = self._unreleased, set[int]()
        try:
            with self._store.index.write() as write:
                write.release(places, self._store.owner)
                yield write
        except BaseException:
            with self._lock:
                self._unreleased |= places
            raise
