"""GroupRows: the rows of one group, free, held or cached. Arrays with one entry per row.

    free     nobody needs what is in it
    held     `refs` requests, leases or copies need it
    cached   nobody holds it, its content may be wanted again: in the queue, evictable

Rows that lie in slabs of other groups count as free here; who owns a slab is written
down once, in `Slabs`.
"""

import numpy as np
import numpy.typing as npt

from kvstow.blocks.runs import NONE, Where, fewest_runs, num_at, span, span_of_any
from kvstow.errors import BlockError, PlanError
from kvstow.plan.view import Ints

SEGMENT_BITS = 10
SEGMENT = 1 << SEGMENT_BITS

FEW = 8
"""Items that are counted faster one by one."""


class FreeSlabs:
    """Every item lies on one shelf; shelf 0 is the floor, which is not counted."""

    def __init__(self, num_items: int, num_shelves: int) -> None:
        segments = -(-num_items // SEGMENT)
        self.shelf = np.zeros(segments * SEGMENT, np.int8)
        self.totals = [0] * (num_shelves + 1)
        self._counts = np.zeros((num_shelves + 1, segments), np.int64)
        self._flat = self._counts.reshape(-1)
        self._open = 0

    def put(self, items: Where, shelf: int) -> None:
        """Lay items that lie on the floor onto one shelf."""
        self.shelf[items] = shelf
        self._count(items, shelf, 1)

    def drop(self, items: Where, shelf: int) -> None:
        """Lay items of one shelf onto the floor."""
        self.shelf[items] = 0
        self._count(items, shelf, -1)

    def _count(self, items: Where, shelf: int, sign: int) -> None:
        counts = self._counts[shelf]
        if not isinstance(items, slice):
            np.add.at(counts, items >> SEGMENT_BITS, sign)
            self.totals[shelf] += sign * len(items)
            return
        start, stop = items.start, items.stop
        self.totals[shelf] += sign * (stop - start)
        while start < stop:
            segment = start >> SEGMENT_BITS
            end = min(stop, (segment + 1) << SEGMENT_BITS)
            counts[segment] += sign * (end - start)
            start = end

    def move(self, items: Ints, shelves: Ints) -> None:
        """Lay each item, named once, onto its shelf."""
        before = self.shelf[items].astype(np.int64)
        moved = (before != shelves).nonzero()[0]
        if not len(moved):
            return
        if len(moved) < len(items):
            items, before, shelves = items[moved], before[moved], shelves[moved]
        self.shelf[items] = shelves
        segments = items >> SEGMENT_BITS
        if len(items) > FEW:
            width = self._counts.shape[1]
            np.subtract.at(self._flat, before * width + segments, 1)
            np.add.at(self._flat, shelves * width + segments, 1)
        changes = zip(before.tolist(), shelves.tolist(), segments.tolist(), strict=True)
        for old, new, segment in changes:
            self.totals[old] -= 1
            self.totals[new] += 1
            if len(items) <= FEW:
                self._counts[old, segment] -= 1
                self._counts[new, segment] += 1

    def lowest(self, shelves: range, count: int) -> Ints:
        """The lowest items of several shelves, ascending: `count` of them, or all."""
        return self._some(shelves, count, lowest=True)[:count]

    def highest(self, shelves: range, count: int) -> Ints:
        """The highest items of several shelves, descending: `count` of them, or all."""
        return self._some(shelves, count, lowest=False)[::-1][:count]

    def _some(self, shelves: range, count: int, *, lowest: bool) -> Ints:
        """Items of several shelves, ascending, from as many segments as have enough."""
        if not any(self.totals[shelves.start : shelves.stop]):
            return NONE
        counts = self._counts[shelves.start : shelves.stop].sum(axis=0)
        segments = counts.nonzero()[0]
        order = segments if lowest else segments[::-1]
        enough = int(np.searchsorted(counts[order].cumsum(), count)) + 1
        part = np.sort(order[:enough])
        lying = self.shelf.reshape(-1, SEGMENT)[part]
        rows, columns = ((lying >= shelves.start) & (lying < shelves.stop)).nonzero()
        return (part[rows] << SEGMENT_BITS) + columns

    def side_by_side(self, shelf: int, count: int) -> Where:
        """`count` items of a shelf, or all, in few runs, ascending.

        Goes on in the segment it used last, and to the emptiest one when that has too few.
        """
        counts = self._counts[shelf]
        if counts[self._open] < count:
            self._open = int(counts.argmax())
        here = int(counts[self._open])
        if here == SEGMENT >= count:
            start = self._open << SEGMENT_BITS
            return slice(start, start + count)
        if here >= count:
            return span(fewest_runs(self._segment(shelf, self._open), count))
        order = np.argsort(-counts, kind="stable")
        enough = int(np.searchsorted(counts[order].cumsum(), count)) + 1
        return span(fewest_runs(self._within(shelf, np.sort(order[:enough])), count))

    def scattered(self, shelf: int, count: int) -> Ints:
        """`count` items of a shelf, or all, where they leave the long runs alone: from the
        segments that have the fewest."""
        counts = self._counts[shelf]
        segments = np.nonzero(counts)[0]
        if not len(segments):
            return NONE
        least = int(segments[counts[segments].argmin()])
        if counts[least] >= count:
            return self._segment(shelf, least)[:count]
        order = segments[np.argsort(counts[segments], kind="stable")]
        enough = int(np.searchsorted(counts[order].cumsum(), count)) + 1
        return self._within(shelf, np.sort(order[:enough]))[:count]

    def _segment(self, shelf: int, segment: int) -> Ints:
        start = segment << SEGMENT_BITS
        return (self.shelf[start : start + SEGMENT] == shelf).nonzero()[0] + start

    def _within(self, shelf: int, segments: Ints) -> Ints:
        if len(segments) == 1:
            return self._segment(shelf, int(segments[0]))
        rows, columns = np.nonzero(self.shelf.reshape(-1, SEGMENT)[segments] == shelf)
        return (segments[rows] << SEGMENT_BITS) + columns


class LruQueue:
    """At most one place for each of `num_items` items."""

    def __init__(self, num_items: int) -> None:
        self.place = np.full(num_items, -1, np.int64)
        self._items = np.empty(2 * num_items + 64, np.int64)
        self._stamps = np.empty(2 * num_items + 64, np.int64)
        self._head = 0
        self._tail = 0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def put(self, items: Ints, stamp: int) -> None:
        """Line up items that are not in the queue, each named once, behind the others."""
        end = self._tail + len(items)
        if end > len(self._items):
            self._close_up()
            end = self._tail + len(items)
        self._items[self._tail : end] = items
        self._stamps[self._tail : end] = stamp
        self.place[items] = np.arange(self._tail, end)
        self._tail = end
        self._num += len(items)

    def drop(self, items: Where) -> None:
        """Take out items that are in the queue, each named once."""
        self.place[items] = -1
        self._num -= num_at(items)

    def oldest(self, count: int) -> tuple[Ints, Ints]:
        """The `count` items that have waited longest, or all, with their stamps."""
        if self._num == 0 or count < 1:
            self._head = self._tail if self._num == 0 else self._head
            return NONE, NONE
        found: list[Ints] = []
        start, chunk = self._head, count + 32
        missing = min(count, self._num)
        while missing > 0:
            end = min(start + chunk, self._tail)
            entries = self._items[start:end]
            valid = np.nonzero(self.place[entries] == np.arange(start, end))[0] + start
            if not found:
                self._head = int(valid[0]) if len(valid) else end
            if len(valid):
                found.append(valid)
                missing -= len(valid)
            start, chunk = end, 2 * chunk
        places = found[0] if len(found) == 1 else np.concatenate(found)
        places = places[:count]
        return self._items[places], self._stamps[places]

    def _close_up(self) -> None:
        live = np.arange(self._head, self._tail)
        live = live[self.place[self._items[live]] == live]
        items, stamps = self._items[live], self._stamps[live]
        self._head, self._tail = 0, len(live)
        self._items[: self._tail] = items
        self._stamps[: self._tail] = stamps
        self.place[items] = np.arange(self._tail)


class GroupRows:
    """`num_slabs` slabs of `rows_per_slab` rows; the first `num_null` rows are nobody's.

    Slabs with free rows lie on shelves, by the number of those: `1 … top`, and `top + 1 …
    2 · top` where all that is held in them is held briefly (`passing`).
    """

    def __init__(
        self,
        *,
        group: int,
        name: str,
        num_slabs: int,
        rows_per_slab: int,
        num_null: int,
        generations: Ints | None,
    ) -> None:
        self.group = group
        self.name = name
        self.rows_per_slab = rows_per_slab
        self.num_rows = num_slabs * rows_per_slab
        self.num_null = num_null
        self.refs = np.zeros(self.num_rows, np.int64)
        self.free = np.ones(self.num_rows, np.bool_)
        self.kept = np.zeros(self.num_rows, np.bool_)
        self.quarantined = np.zeros(self.num_rows, np.bool_)
        self.generations = _generations(name, self.num_rows, generations)
        self.queue = LruQueue(self.num_rows)
        self.idle = self.queue if rows_per_slab == 1 else LruQueue(num_slabs)
        self.top = rows_per_slab.bit_length()
        self.partial = FreeSlabs(num_slabs, 2 * self.top)
        self.passing = np.zeros(num_slabs, np.int64)
        self.num_busy = 0
        self.num_held = 0
        self.num_quarantined = 0
        levels = [n.bit_length() for n in range(rows_per_slab + 1)]
        self._shelf = np.array([levels, [n and n + self.top for n in levels]], np.int64)

    @property
    def spare(self) -> int:
        """Rows that are not held, in slabs that have held ones."""
        return 0 if self.rows_per_slab == 1 else self.num_busy * self.rows_per_slab - self.num_held

    def shelves_of(self, slabs: Ints, free: Ints) -> Ints:
        """Where slabs with so many free rows belong."""
        return self._shelf[self.passing[slabs], free]

    def slabs_of(self, rows: Ints) -> Ints:
        return rows if self.rows_per_slab == 1 else rows // self.rows_per_slab

    def by_slab(self, rows: Where) -> tuple[Ints, Ints]:
        """The slabs that ascending rows lie in, and how many of the rows lie in each."""
        size = self.rows_per_slab
        if isinstance(rows, slice):
            slabs = np.arange(rows.start // size, -(-rows.stop // size))
            counts = np.full(len(slabs), size)
            counts[0] -= rows.start % size
            counts[-1] -= -rows.stop % size
            return slabs, counts
        slabs = rows // size
        edges = np.empty(len(slabs) + 1, np.bool_)
        edges[0] = edges[-1] = True
        np.not_equal(slabs[1:], slabs[:-1], out=edges[1:-1])
        starts = edges.nonzero()[0]
        return slabs[starts[:-1]], starts[1:] - starts[:-1]

    def rows_of(self, slabs: Ints) -> Ints:
        """All rows of the slabs, in their order."""
        if self.rows_per_slab == 1:
            return slabs
        within = np.arange(self.rows_per_slab)
        return (slabs[:, None] * self.rows_per_slab + within).ravel()

    def free_rows_of(self, slabs: Ints) -> Ints:
        """The free rows of slabs that the group owns."""
        rows = self.rows_of(slabs)
        return rows[self.free[rows]]

    def cached_rows_of(self, slabs: Ints) -> Ints:
        rows = self.rows_of(slabs)
        return rows[self.queue.place[rows] >= 0]

    def located(self, rows: npt.ArrayLike) -> tuple[Ints, Where]:
        """The rows as an array and, perhaps, as a slice, once it is certain that all exist."""
        array = np.asarray(rows, np.int64)
        where = span_of_any(array)
        if isinstance(where, slice):
            good = where.start >= 0 and where.stop <= self.num_rows
        else:
            words = array.view(np.uint64)
            good = not len(words) or words[words.argmax()] < self.num_rows
        if not good:
            wrong = array[(array < 0) | (array >= self.num_rows)]
            raise BlockError(
                f"group {self.name!r}: block {wrong[0]} is not among the {self.num_rows} there are"
            )
        return array, where

    def known(self, rows: npt.ArrayLike) -> Ints:
        """The rows as an array, once it is certain that all of them exist."""
        return self.located(rows)[0]

    def refuse(self, rows: Ints, wrong: npt.NDArray[np.bool_], what: str) -> None:
        """Raises if any row is wrong, naming the first of them."""
        if np.count_nonzero(wrong):
            first = int(rows[wrong][0])
            raise BlockError(
                f"group {self.name!r}: block {first} {what}: it has {int(self.refs[first])} holds "
                f"({int(wrong.sum())} of {len(rows)} blocks are such)"
            )


def _generations(name: str, num_rows: int, given: Ints | None) -> Ints:
    if given is None:
        return np.zeros(num_rows, np.int64)
    if given.shape != (num_rows,) or given.dtype != np.int64 or not given.flags.c_contiguous:
        raise PlanError(
            f"group {name!r}: generations are {given.dtype} {given.shape}, not contiguous int64 "
            f"({num_rows},)"
        )
    return given
