"""Where new rows go on disk: free slots, then new data files, then slots of the coldest rows.

A data file changes hands when everything in it is older than everything that the taker would
have to give up, or when the taker has none.

The index, which all processes share, says in which order rows were used; the policies of each
process follow it with a delay. Uses go into the index as sequence numbers, some at a time, and from
there into the policies, oldest first, when rows have to be evicted. A policy that is behind may
evict a row too early; it never causes a wrong row.
"""

import errno
import logging
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvstow.offload.disk.files import BLOCK, LOST, store_errors
from kvstow.offload.disk.index import SLOT_BITS, StoreIndex, Transaction
from kvstow.offload.disk.opening import OpenStore
from kvstow.offload.eviction.policies import Policy, PolicyName, policy
from kvstow.offload.tier import Bools, Counter, Counts
from kvstow.plan.view import Ints

log = logging.getLogger("kvstow.offload")

FLUSH = 8192
"""Uses that a process keeps to itself before it writes them into the index."""

LEARN_ROWS = 1 << 16
"""Rows that the policies read from the index at a time, the oldest first: the first batch is
enough to choose victims, so an eviction need not wait until millions of rows were read."""


class Recency:
    """Policies over the slots of every group; slot number = segment · slots + slot."""

    def __init__(
        self, index: StoreIndex, name: PolicyName, slots: Sequence[int], max_segments: int
    ) -> None:
        self._index = index
        self._name: PolicyName = name
        self._slots = tuple(slots)
        self._max_segments = max_segments
        self._used: dict[int, None] = {}
        self._flushed: dict[int, None] = {}
        """Uses that the last transaction has written down."""
        self._begin()

    def _begin(self) -> None:
        """Nothing was learned yet."""
        sizes = [n * self._max_segments for n in self._slots]
        self._policies: tuple[Policy, ...] = tuple(policy(self._name, n) for n in sizes)
        self._generations = tuple(np.zeros(n, np.int64) for n in sizes)
        self._seen = [0] * len(sizes)

    @contextmanager
    def following(self) -> Generator[Transaction]:
        """A transaction in which uses are written down, and rows given up.

        If it does not happen, as on a full disk, its rows are still there and the policies have
        forgotten them: they learn from the index again.
        """
        with self._index.write(undone=self._undo) as write:
            self._flushed = {}
            yield write

    def _undo(self) -> None:
        self._used = {**self._flushed, **self._used}
        self._begin()

    def number(self, group: int, places: npt.ArrayLike) -> Ints:
        at = np.asarray(places, np.int64)
        return (at >> SLOT_BITS) * self._slots[group] + (at & ((1 << SLOT_BITS) - 1))

    def _known(self, group: int, places: npt.ArrayLike) -> Ints:
        """The numbers of places that this process's capacity reaches; another may have more."""
        numbers = self.number(group, places)
        return numbers[numbers < len(self._generations[group])]

    def places(self, group: int, numbers: Ints) -> list[int]:
        segments, slots = np.divmod(numbers, self._slots[group])
        return (segments << SLOT_BITS | slots).tolist()

    def use(self, places: Ints) -> bool:
        """These rows were read; whether so many have gathered that a flush is due."""
        for at in places.tolist():
            self._used.pop(at, None)
            self._used[at] = None
        return len(self._used) >= FLUSH

    def flush(self, write: Transaction) -> None:
        """Write down what was used here, for all processes."""
        used, self._used = self._used, {}
        self._flushed.update(used)
        if used:
            write.use(used)

    def victims(
        self, write: Transaction, group: int, marks: Sequence[int], reading: Collection[int]
    ) -> list[int]:
        """Places of rows to give up for new ones with these marks, not those being read.

        Fewer than marks where no more are known; ask again until there are none.
        """
        self.flush(write)
        self._learn(group)
        pinned: Bools = np.zeros(len(self._generations[group]), bool)
        pinned[self._known(group, np.fromiter(reading, np.int64))] = True
        return self.places(group, self._policies[group].victims(marks, pinned))

    def forget(self, group: int, places: npt.ArrayLike) -> None:
        """These rows are gone."""
        self._policies[group].remove(self._known(group, places))

    def _learn(self, group: int) -> None:
        """Learn what came, and what was used, since the last time."""
        places, generations, marks, self._seen[group] = self._index.since(
            group, self._seen[group], LEARN_ROWS
        )
        numbers = self.number(group, places)
        ours = numbers < len(self._generations[group])  # another process may have more room
        new = ours.copy()
        new[ours] = self._generations[group][numbers[ours]] != generations[ours]
        self._generations[group][numbers[new]] = generations[new]
        known = self._policies[group]
        known.remove(numbers[new])
        known.insert(numbers[new], [marks[i] for i in np.flatnonzero(new).tolist()])
        known.touch(numbers[ours & ~new])
        known.size = max(1, len(known))


Reading = Sequence[Collection[int]]
"""Per group, places that this process is reading."""


class SlotAllocator:
    """Who may write where. All decisions are made inside one transaction of the index."""

    def __init__(self, store: OpenStore, recency: Recency, counter: Counter) -> None:
        self._store = store
        self._recency = recency
        self._counter = counter
        self._is_full = False

    def lease(self, group: int, marks: Sequence[int], reading: Reading) -> tuple[list[int], int]:
        """Slots for rows with these marks, ascending, and the first of their generations.

        Fewer than asked for where everything else is being read or written.
        """
        with store_errors(self._store.path), self._recency.following() as write:
            found = self._take_free(write, group, len(marks))
            while len(found) < len(marks) and (
                self._grow(write, group) or self._take_over(write, group, reading, older=True)
            ):
                found += self._take_free(write, group, len(marks) - len(found))
            found += self._evicted(write, group, marks[len(found) :], reading)
            while len(found) < len(marks) and self._take_over(write, group, reading, older=False):
                found += self._take_free(write, group, len(marks) - len(found))
            return sorted(found), write.tick(len(found))

    def _take_free(self, write: Transaction, group: int, count: int) -> list[int]:
        places = self._store.segments.set_aside(group, write.free(group, count))
        write.take(group, places, self._store.owner)
        return places

    def shrink(self, nbytes: int) -> int:
        """Drop rows until the data files take at most `nbytes`; how many were dropped.

        Rows that are being written stay. Where a file system cannot give back a part of a file,
        and where a file is damaged, whole files go.
        """
        rows = 0
        with store_errors(self._store.path), self._recency.following() as write:
            files = write.ask("SELECT id, grp FROM segments")
            if nbytes < sum(self._store.segments.used(segment) for segment, _ in files):
                self._recency.flush(write)
                kept = self._hottest(write, nbytes)
                for segment, group in files:
                    rows += self._keep_only(write, segment, group, kept.get(segment, set()))
            write.note(f"pruned to {nbytes} bytes", rows)
        return rows

    def _hottest(self, write: Transaction, nbytes: int) -> dict[int, set[int]]:
        """By data file, the places of the rows to keep if data files may take `nbytes`.

        Every group keeps the same part of its rows: those stored or used last, of what was
        stored together the first blocks, so that what is left are prefixes.
        """
        slot_bytes: tuple[int, ...] = self._store.segments.slot_bytes
        sizes: dict[int, int] = dict(write.ask("SELECT grp, COUNT(*) FROM rows GROUP BY grp"))
        total = sum(slot_bytes[group] * count for group, count in sizes.items())
        (files,) = write.ask("SELECT COUNT(*) FROM segments")[0]
        room = max(0, nbytes - files * BLOCK)
        kept: dict[int, set[int]] = {}
        for group, count in sizes.items():
            for (place,) in write.ask(
                "SELECT place FROM rows WHERE grp = ? ORDER BY seq - block DESC, block LIMIT ?",
                group,
                min(count, count * room // total),
            ):
                kept.setdefault(place >> SLOT_BITS, set()).add(place)
        return kept

    def _keep_only(self, write: Transaction, segment: int, group: int, kept: set[int]) -> int:
        """Drop all rows of a data file but those; the file too, if nothing in it is used."""
        segments, first = self._store.segments, segment << SLOT_BITS
        end = (segment + 1) << SLOT_BITS
        leased = write.ask(
            "SELECT place FROM slots WHERE owner > 0 AND place >= ? AND place < ?", first, end
        )
        used = sorted(kept | {place for (place,) in leased})
        if used:
            places = write.ask("SELECT place FROM rows WHERE place >= ? AND place < ?", first, end)
            rows = write.drop(group, (place for (place,) in places if place not in kept))
            try:
                segments.keep_only(segment, group, used)
                return rows
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP and error.errno not in LOST:
                    raise
        else:
            rows = 0
        rows += write.remove_segment(segment)
        segments.remove(segment)
        return rows

    def _grow(self, write: Transaction, group: int) -> bool:
        """One more data file, if capacity and disk allow it."""
        segments = self._store.segments
        taken = {segment for (segment,) in write.ask("SELECT id FROM segments")}
        if (len(taken) + 1) * segments.segment_bytes > self._store.capacity:
            return False
        segment = next(i for i in range(len(taken) + 1) if i not in taken)
        segments.remove(segment)  # what a process left that died while it made one
        try:
            segments.create(segment, group)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._note_full(write, error)
            return False
        write.add_segment(segment, group, segments.slots[group])
        return True

    def _note_full(self, write: Transaction, error: OSError) -> None:
        """Say that rows find no room although the capacity allows it: once in the log."""
        what = f"no space for another data file ({error.strerror})"
        write.note(what, 0)
        if not self._is_full:
            each, most = self._store.segments.segment_bytes, self._store.capacity
            log.warning(
                "store %s: %s: %d bytes each, %d in all are allowed; rows are dropped for others",
                self._store.path,
                what,
                each,
                most,
            )
        self._is_full = True

    def _evicted(
        self, write: Transaction, group: int, marks: Sequence[int], reading: Reading
    ) -> list[int]:
        """Slots of rows of the group that had to go."""
        found: list[int] = []
        while len(found) < len(marks):
            victims = self._recency.victims(write, group, marks[len(found) :], reading[group])
            if not victims:
                break
            gone = [at for at in victims if write.drop(group, [at])]
            write.lease(group, gone, self._store.owner)
            self._counter.add(Counts(evicted_rows=len(gone)))
            found += gone
        return found

    def _take_over(self, write: Transaction, group: int, reading: Reading, *, older: bool) -> bool:
        """A data file of another group becomes ours, its rows go; whether there was one.

        With `older`, only one in which everything is older than all rows of our own.
        """
        busy = {at >> SLOT_BITS for places in reading for at in places}
        busy |= {at >> SLOT_BITS for (at,) in write.ask("SELECT place FROM slots WHERE owner > 0")}
        coldest = self._coldest(write, group, busy)
        oldest = write.ask("SELECT MIN(seq) FROM rows WHERE grp = ?", group)[0][0]
        if not coldest or (older and (oldest is None or coldest[0][1] >= oldest)):
            return False
        segment = coldest[0][0]
        self._counter.add(Counts(evicted_rows=write.remove_segment(segment)))
        self._store.segments.hand_over(segment, group)
        write.add_segment(segment, group, self._store.segments.slots[group])
        return True

    def _coldest(
        self, write: Transaction, but: int | None, busy: set[int]
    ) -> list[tuple[int, int]]:
        """Data files of other groups, and when something in them was last used."""
        rows = write.ask(
            "SELECT s.id, (SELECT COALESCE(MAX(seq), 0) FROM rows "
            f"WHERE place >= s.id << {SLOT_BITS} AND place < (s.id + 1) << {SLOT_BITS}) AS newest "
            "FROM segments s WHERE s.grp IS NOT ? ORDER BY newest",
            but,
        )
        return [(segment, newest) for segment, newest in rows if segment not in busy]
