"""Room for new rows on disk: free slots, then new data files, then somebody has to go.

A data file changes hands when everything in it is older than everything that the taker would
have to give up, or when the taker has none.
"""

import errno
from collections.abc import Collection, Sequence

from kvstow.offload.ages import Ages
from kvstow.offload.heal import Place
from kvstow.offload.index import SLOT_BITS, Write

Reading = Sequence[Collection[int]]
"""Per group, places that this process is reading."""


class Room:
    """Who may write where. All decisions are made inside one transaction of the index."""

    def __init__(self, store: Place, ages: Ages) -> None:
        self._store = store
        self._ages = ages
        self.evicted = 0

    def lease(self, group: int, marks: Sequence[int], reading: Reading) -> tuple[list[int], int]:
        """Slots for rows with these marks, ascending, and the first of their generations.

        Fewer than asked for where everything else is being read or written.
        """
        with self._store.index.write() as write:
            found = self._take_free(write, group, len(marks))
            while len(found) < len(marks) and (
                self._grow(write, group) or self._take_over(write, group, reading, older=True)
            ):
                found += self._take_free(write, group, len(marks) - len(found))
            found += self._evicted(write, group, marks[len(found) :], reading)
            while len(found) < len(marks) and self._take_over(write, group, reading, older=False):
                found += self._take_free(write, group, len(marks) - len(found))
            return sorted(found), write.tick(len(found))

    def _take_free(self, write: Write, group: int, count: int) -> list[int]:
        places = write.free(group, count)
        write.take(group, places, self._store.owner)
        return places

    def shrink(self, nbytes: int) -> int:
        """Remove data files, coldest first, until at most `nbytes` are left; rows dropped."""
        segments = self._store.segments
        rows = 0
        with self._store.index.write() as write:
            coldest = self._coldest(write, None, set())
            count = len(write.ask("SELECT id FROM segments"))
            for segment, _ in coldest[: max(0, count - nbytes // segments.segment_bytes)]:
                rows += write.remove_segment(segment)
                segments.remove(segment)
            write.note(f"pruned to {nbytes} bytes", rows)
        return rows

    def _grow(self, write: Write, group: int) -> bool:
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
            write.note(f"no space for another data file ({error.strerror})", 0)
            return False
        write.add_segment(segment, group, segments.slots[group])
        return True

    def _evicted(
        self, write: Write, group: int, marks: Sequence[int], reading: Reading
    ) -> list[int]:
        """Slots of rows of the group that had to go."""
        found: list[int] = []
        while len(found) < len(marks):
            victims = self._ages.victims(write, group, marks[len(found) :], reading[group])
            if not victims:
                break
            gone = [at for at in victims if write.drop(group, [at])]
            write.lease(group, gone, self._store.owner)
            self.evicted += len(gone)
            found += gone
        return found

    def _take_over(self, write: Write, group: int, reading: Reading, *, older: bool) -> bool:
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
        self.evicted += write.remove_segment(segment)
        self._store.segments.hand_over(segment, group)
        write.add_segment(segment, group, self._store.segments.slots[group])
        return True

    def _coldest(self, write: Write, but: int | None, busy: set[int]) -> list[tuple[int, int]]:
        """Data files of other groups, and when something in them was last used."""
        rows = write.ask(
            "SELECT s.id, (SELECT COALESCE(MAX(seq), 0) FROM rows "
            f"WHERE place >= s.id << {SLOT_BITS} AND place < (s.id + 1) << {SLOT_BITS}) AS newest "
            "FROM segments s WHERE s.grp IS NOT ? ORDER BY newest",
            but,
        )
        return [(segment, newest) for segment, newest in rows if segment not in busy]
