"""Rows of other processes' shared host tiers: read, never written, never waited for.

    host tier ⇄ tiers of other processes ⇄ tier below

A row is copied out between two looks at its record. If it was given up meanwhile, that is a miss.
"""

import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np

from kvstow.errors import KvstowError, StoreError
from kvstow.memory.allocate import open_shared
from kvstow.offload.disk.format import ChainLink
from kvstow.offload.host.shared import SharedIndex, key_table, parts
from kvstow.offload.host.tier import HostTier
from kvstow.offload.rows import check_same_rows, same_rows
from kvstow.offload.tier import (
    Bools,
    Bytes,
    Counter,
    Counts,
    Tier,
    Usage,
    checked_keys,
    checked_rows,
    chosen,
    stored_in,
)
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints

LOOK_SECONDS = 1.0
"""How often somebody looks for tiers of other processes."""


class SharedReader:
    """One shared part, read-only. It may be of any layout: `load_request` joins several."""

    name = "shared"

    def __init__(self, part: str) -> None:
        """Map the part of that name; ArenaError or ValueError where it is not there, is not
        this user's alone, or no part."""
        self.part = part
        self._file = open_shared(f"{part}.index", os.O_RDONLY)
        try:
            self.index = SharedIndex(self._file, writable=False)
            self.layout = self.index.layout
            self._memory = _mapped(f"{part}.rows", self.layout.nbytes)
            if self.gone:  # so the rows may be those of another index
                raise ValueError(f"{part} was removed")
        except (OSError, ValueError, KvstowError):
            os.close(self._file)
            raise
        self._end = weakref.finalize(self, os.close, self._file)
        self._lock = Lock()
        self._counter = Counter()
        self._seen = -1
        self._ids: tuple[dict[bytes, int], ...] = tuple({} for _ in self.layout.groups)
        self._keys: dict[int, bytes] = {}

    @property
    def gone(self) -> bool:
        """Whether the part was removed; its memory stays while it is mapped."""
        return os.fstat(self._file).st_nlink == 0

    @property
    def counts(self) -> Counts:
        return self._counter.now

    @property
    def usage(self) -> Usage:
        with self._lock:
            self._look()
            rows = [len(ids) for ids in self._ids]
        nbytes = sum(n * self.layout.row_bytes(g) for g, n in enumerate(rows))
        return Usage(rows=sum(rows), nbytes=nbytes, capacity=self.layout.nbytes)

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        checked_keys(self.layout, group, keys)
        with self._lock:
            self._look()
            return np.fromiter(map(self._ids[group].__contains__, keys), bool, len(keys))

    def load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        checked_rows(self.layout, group, checked_keys(self.layout, group, keys), rows)
        with self._lock:
            self._look()
            known = self._ids[group]
            found = np.array([known.get(key, -1) for key in keys], np.int64)
        at = np.flatnonzero(found >= 0).tolist()
        good = np.zeros(len(keys), bool)
        good[at] = self._copied(group, [keys[i] for i in at], found[at], [rows[i] for i in at])
        loaded = int(good.sum())
        self._counter.add(
            Counts(
                hits=loaded,
                misses=len(keys) - loaded,
                loaded_rows=loaded,
                loaded_bytes=loaded * self.layout.row_bytes(group),
            )
        )
        return good

    def _copied(self, group: int, keys: Sequence[bytes], ids: Ints, rows: Sequence[Bytes]) -> Bools:
        """Copy rows; which of them were, before and after, those of the keys."""
        numbers = self.index.numbers(group, ids)
        seq = self.index.seq[numbers]  # before anything else of a record is looked at
        record = self.index.records[numbers]
        lengths = np.array([len(key) for key in keys], np.uint64)
        good = (
            (seq % 2 == 0)
            & (record["key_bytes"] == lengths)
            & (record["key"] == key_table(keys)).all(axis=1)
        )
        strip = self.layout.footprints[group].strips[0]
        for i in np.flatnonzero(good).tolist():
            start = strip.offset + int(ids[i]) * strip.stride
            rows[i][:] = self._memory[start : start + strip.nbytes]
        return good & (self.index.seq[numbers] == seq)

    def _look(self) -> None:
        """Learn what has changed. What is missed or wrong here costs a hit, not a wrong row."""
        head = self.index.head
        if head == self._seen:
            return
        changed = self.index.changes(self._seen) if self._seen >= 0 else None
        if changed is None:
            self._ids = tuple({} for _ in self._ids)
            self._keys.clear()
            changed = np.arange(len(self.index.records))
        for number in changed.tolist():
            if number in self._keys:
                group, _ = self.index.located(number)
                self._ids[group].pop(self._keys.pop(number), None)
        keys, numbers = self.index.stated(changed)
        for key, number in zip(keys, numbers.tolist(), strict=True):
            group, row = self.index.located(number)
            self._ids[group][key] = row
            self._keys[number] = key
        self._seen = head

    def store(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        """Keeps nothing: only its own process writes a part."""
        return self.contains(group, keys)

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        """Forgets nothing."""
        return 0

    def close(self) -> None:
        self._end()


class SharedTiers:
    """All other parts beside a shared host tier that hold its rows, then the tier below it.

    Give it to a mover as the tier below. Rows are stored in the tier below, and
    loaded from whichever of them has them.
    """

    name = "shared"

    def __init__(
        self,
        host: HostTier,
        below: Tier | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if host.part is None:
            raise StoreError(
                "a host tier that is not shared cannot read other processes' tiers\n\n"
                "hint: HostTier(..., shared=NAME)"
            )
        if below is not None:
            check_same_rows(host.layout, below.name, below.layout)
        self.layout = host.layout
        self._mine, self._below = host.part, below
        self._lock = Lock()
        self._known: dict[str, tuple[SharedReader, list[int]]] = {}
        """By part, its reader and its groups by ours; none for one that holds other rows."""
        self._clock = clock
        self._looked = float("-inf")
        self._counter = Counter()

    @property
    def counts(self) -> Counts:
        return self._counter.now

    @property
    def usage(self) -> Usage:
        found = [one.usage for one, _ in self._present()]
        return Usage(
            rows=sum(u.rows for u in found),
            nbytes=sum(u.nbytes for u in found),
            capacity=sum(u.capacity for u in found),
        )

    def contains(self, group: int, keys: Sequence[bytes]) -> Bools:
        found = np.zeros(len(keys), bool)
        for one, groups in self._present():
            found |= one.contains(groups[group], keys)
        if self._below is not None and not found.all():
            found[~found] = self._below.contains(group, chosen(keys, ~found))
        return found

    def load(self, group: int, keys: Sequence[bytes], rows: Sequence[Bytes]) -> Bools:
        found = np.zeros(len(keys), bool)
        for one, groups in self._present():
            self._filled(one, groups[group], keys, rows, found)
        near = int(found.sum())
        self._counter.add(
            Counts(
                hits=near,
                misses=len(keys) - near,
                loaded_rows=near,
                loaded_bytes=near * self.layout.row_bytes(group),
            )
        )
        if self._below is not None:
            self._filled(self._below, group, keys, rows, found)
        return found

    @staticmethod
    def _filled(
        tier: Tier, group: int, keys: Sequence[bytes], rows: Sequence[Bytes], found: Bools
    ) -> None:
        """Load what is not found yet."""
        left = np.flatnonzero(~found).tolist()
        if left:
            found[left] = tier.load(group, [keys[i] for i in left], [rows[i] for i in left])

    def store(
        self,
        group: int,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        links: Sequence[ChainLink] = (),
    ) -> Bools:
        if self._below is None:
            return np.zeros(len(keys), bool)
        return stored_in(self._below, group, keys, rows, links)

    def evict(self, group: int, keys: Sequence[bytes]) -> int:
        return 0 if self._below is None else self._below.evict(group, keys)

    def close(self) -> None:
        """Let go of other processes' tiers; the tier below is its owner's."""
        with self._lock:
            for one, _ in self._known.values():
                one.close()
            self._known.clear()

    def _present(self) -> list[tuple[SharedReader, list[int]]]:
        """The tiers of other processes now, and their groups by ours."""
        with self._lock:
            if self._clock() - self._looked >= LOOK_SECONDS:
                self._looked = self._clock()
                self._look_around()
            return [(one, groups) for one, groups in self._known.values() if groups]

    def _look_around(self) -> None:
        name = self._mine.rpartition(".")[0]
        here = {f"{name}.{number}" for number, _ in parts(name)} - {self._mine}
        for part, (one, _) in tuple(self._known.items()):
            if part not in here or one.gone:
                del self._known[part]  # closed when the last thread that reads it lets go
        for part in here - set(self._known):
            try:
                one = SharedReader(part)
            except (OSError, ValueError, KvstowError):  # not ready yet, or gone again
                continue
            self._known[part] = one, matching(self.layout, one.layout)


def matching(ours: Layout, theirs: Layout) -> list[int]:
    """Per group of ours the group of theirs that has the same rows; empty where one lacks it."""
    if ours.model != theirs.model or _digest(ours) != _digest(theirs):
        return []
    found: list[int] = []
    for g in range(len(ours.groups)):
        same = [h for h in range(len(theirs.groups)) if same_rows(ours, g, theirs, h)]
        if not same:
            return []
        found.append(same[0])
    return found


def _digest(layout: Layout) -> bytes | None:
    """The computation that fills rows of the layout."""
    return None if layout.identity is None else layout.identity.digest


def shared_readers(name: str) -> list[SharedReader]:
    """All parts of a name that can be read now, whatever their layout."""
    found: list[SharedReader] = []
    for number, _ in parts(name):
        try:
            found.append(SharedReader(f"{name}.{number}"))
        except (OSError, ValueError, KvstowError):
            continue
    return found


def _mapped(name: str, nbytes: int) -> Bytes:
    file = open_shared(name, os.O_RDONLY)
    try:
        return np.frombuffer(mmap.mmap(file, nbytes, access=mmap.ACCESS_READ), np.uint8)
    finally:
        os.close(file)
