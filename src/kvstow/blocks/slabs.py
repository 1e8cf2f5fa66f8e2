"""Slabs: who owns which, among groups that pass them around.

    slab    1        2        3        4        5
    owner   full     full     window   –        window
    rows    ████▒▒░  ███████  █░░      ·        ▒▒▒       █ held  ▒ cached  ░ free

A slab without held or cached rows is nobody's. One without held rows is *idle*: any group
may have it, which costs its owner the cached rows in it. So a set of demands can be met
exactly when the slabs that they need beyond each group's spare rows are not more than the
idle ones (`missing`), and that is known before anything is changed.

A group that shares slabs with nobody is kept here with one row per slab.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count as counter

import numpy as np
import numpy.typing as npt

from kvstow.blocks.runs import Where, ids_at, num_at, span
from kvstow.blocks.shelves import Shelves
from kvstow.blocks.stock import Stock
from kvstow.plan.view import Ints

Evicted = Callable[[int, Ints], None]
"""Told the group and the rows whose content is given up, before they are used again."""

Bools = npt.NDArray[np.bool_]

FREE = 1
NOBODY = -1


class Slabs:
    """Slabs `[num_null, num_slabs)`, passed around among `stocks`."""

    def __init__(
        self, stocks: Sequence[Stock], *, num_slabs: int, num_null: int, evicted: Evicted
    ) -> None:
        self.stocks = tuple(stocks)
        self.num_slabs = num_slabs
        self.num_null = num_null
        self.owner = np.full(num_slabs, NOBODY, np.int64)
        self.last_owner = np.full(num_slabs, NOBODY, np.int64)
        self.held = np.zeros(num_slabs, np.int64)
        self.cached = np.zeros(num_slabs, np.int64)
        self.free = Shelves(num_slabs, 1)
        self.free.put(np.arange(num_null, num_slabs), FREE)
        self.num_idle = num_slabs - num_null
        self._evicted = evicted
        self._clock = counter(1)

    # ── questions ─────────────────────────────────────────────────────────────────

    def needed(self, stock: Stock, rows: int) -> int:
        """Idle slabs without which the group cannot hold so many more rows."""
        return max(0, -(-(rows - stock.spare) // stock.rows_per_slab))

    def missing(self, needs: Mapping[int, int]) -> int:
        """Idle slabs that so many rows of the groups need beyond those there are; negative:
        left over."""
        missing = -self.num_idle
        for stock in self.stocks:
            if rows := needs.get(stock.group):
                missing += self.needed(stock, rows)
        return missing

    def num_available(self, stock: Stock) -> int:
        """Rows that the group could hold, if no other group wanted any."""
        return stock.spare + self.num_idle * stock.rows_per_slab

    # ── slabs change hands ────────────────────────────────────────────────────────

    def claim(self, stock: Stock, slabs: Where) -> None:
        """Make vacant slabs the group's own.

        What other groups' rows in them once held is about to be written over: their
        generations move on, too.
        """
        self.owner[slabs] = stock.group
        if len(self.stocks) == 1:
            return
        before = self.last_owner[slabs]
        if np.count_nonzero(before != stock.group):
            each = ids_at(slabs)
            for other in self.stocks:
                if other is not stock and len(mine := each[before == other.group]):
                    other.generations[other.rows_of(mine)] += 1
            self.last_owner[slabs] = stock.group

    def vacate(self, stock: Stock, slabs: Ints) -> None:
        """Evict what idle slabs of the group have cached; they are nobody's, and on no shelf."""
        rows = stock.cached_rows_of(slabs)
        self.evict(stock, rows)
        if stock.rows_per_slab > 1:
            stock.partial.move(slabs, np.zeros(len(slabs), np.int64))
            stock.idle.drop(slabs[stock.idle.place[slabs] >= 0])
        self.owner[slabs] = NOBODY

    def take_free(self, stock: Stock, slabs: Where) -> None:
        """Make slabs from the free shelf the group's own."""
        self.free.drop(slabs, FREE)
        self.claim(stock, slabs)

    # ── rows change state ─────────────────────────────────────────────────────────

    def occupy(self, stock: Stock, rows: Where, *, briefly: bool = False) -> None:
        """Hold free rows, ascending, of slabs that the group owns, for new content."""
        stock.generations[rows] += 1
        stock.refs[rows] = 1
        stock.free[rows] = False
        count = num_at(rows)
        stock.num_held += count
        if stock.rows_per_slab == 1:
            self.held[rows] = 1
            self.num_idle -= count
            return
        each, counts = stock.by_slab(rows)
        before = self.held[each]
        if briefly:
            stock.passing[each[before == 0]] = 1
        else:
            stock.passing[each] = 0
        self._settle(stock, each, before, before + counts)

    def revive(self, stock: Stock, rows: Ints, where: Where) -> None:
        """Take cached rows, each named once, that are held by now, out of the cache.
        `where` is the rows, perhaps as a slice."""
        stock.queue.drop(where)
        stock.num_held += len(rows)
        if stock.rows_per_slab == 1:
            self.held[where] = 1
            self.cached[where] = 0
            self.num_idle -= len(rows)
            return
        each, counts = stock.by_slab(_ascending(where))
        before = self.held[each]
        self.cached[each] -= counts
        self._settle(stock, each, before, before + counts)

    def vacated(self, stock: Stock, rows: Ints, where: Where) -> None:
        """End the last hold on rows, each named once: kept ones are cached, the last of
        them to be evicted first; others are free. `where` is the rows, perhaps as a slice."""
        stock.num_held -= len(rows)
        kept = stock.kept[where]
        stamp = next(self._clock)
        num_kept = int(np.count_nonzero(kept))
        cached, freed = where, where
        if num_kept == len(rows):
            stock.queue.put(rows[::-1], stamp)
        elif num_kept:
            cached, freed = rows[kept], rows[~kept]
            stock.queue.put(cached[::-1], stamp)
        if num_kept < len(rows):
            stock.free[freed] = True
        if stock.rows_per_slab == 1:
            self.held[where] = 0
            self.num_idle += len(rows)
            if num_kept:
                self.cached[cached] = 1
            if num_kept < len(rows):
                self._give_up(freed)
            return
        each, counts = stock.by_slab(_ascending(where))
        before = self.held[each]
        if num_kept == len(rows):
            self.cached[each] += counts
        elif num_kept:
            np.add.at(self.cached, stock.slabs_of(rows[kept]), 1)
        self._settle(stock, each, before, before - counts, stamp)

    def evict(self, stock: Stock, rows: Ints) -> None:
        """Give up the content of cached rows. Their slabs stay the group's: the caller is
        about to use them, or calls `discarded` instead."""
        if not len(rows):
            return
        self._evicted(stock.group, rows)
        stock.queue.drop(rows)
        stock.kept[rows] = False
        stock.free[rows] = True
        np.subtract.at(self.cached, stock.slabs_of(rows), 1)

    def discarded(self, stock: Stock, rows: Ints) -> None:
        """Give up the content of cached rows, which become free."""
        self.evict(stock, rows)
        if stock.rows_per_slab == 1:
            self._give_up(rows)
            return
        each, _ = stock.by_slab(np.sort(rows))
        held = self.held[each]
        self._settle(stock, each, held, held)

    def _give_up(self, slabs: Where) -> None:
        self.owner[slabs] = NOBODY
        self.free.put(slabs, FREE)

    def _settle(self, stock: Stock, slabs: Ints, before: Ints, after: Ints, stamp: int = 0) -> None:
        """Write down how many rows of slabs are held, which were `before`; bring counts,
        shelves and the queue of idle slabs up to date with it and with `cached`."""
        self.held[slabs] = after
        busy, was_busy = int(np.count_nonzero(after)), int(np.count_nonzero(before))
        stock.num_busy += busy - was_busy
        self.num_idle -= busy - was_busy
        free = stock.rows_per_slab - after - self.cached[slabs]
        shelves = stock.shelves_of(slabs, free)
        num_empty = 0
        if busy < len(slabs):
            empty = free == stock.rows_per_slab
            num_empty = int(np.count_nonzero(empty))
            if num_empty:
                shelves[empty] = 0
                self._give_up(span(slabs if num_empty == len(slabs) else slabs[empty]))
        if len(stock.idle) or busy + num_empty < len(slabs):
            self._line_up(stock, slabs, (after == 0) & (free < stock.rows_per_slab), stamp)
        stock.partial.move(slabs, shelves)

    def _line_up(self, stock: Stock, slabs: Ints, idle: Bools, stamp: int) -> None:
        """Have exactly the idle ones of the slabs in the queue."""
        queued = stock.idle.place[slabs] >= 0
        if np.count_nonzero(leaves := queued & ~idle):
            stock.idle.drop(slabs[leaves])
        if np.count_nonzero(comes := idle & ~queued):
            stock.idle.put(slabs[comes], stamp or next(self._clock))


def _ascending(rows: Where) -> Where:
    return rows if isinstance(rows, slice) else np.sort(rows)
