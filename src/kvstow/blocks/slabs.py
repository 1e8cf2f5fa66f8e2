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

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count as counter

import numpy as np

from kvstow.blocks.rows import FreeSlabs, GroupRows
from kvstow.blocks.runs import Bools, Where, ids_at, num_at, span
from kvstow.plan.view import Ints

Evicted = Callable[[int, Ints], None]
"""Told the group and the rows whose content is given up, before they are used again."""


FREE = 1
NOBODY = -1


class Slabs:
    """Slabs `[num_null, num_slabs)`, passed around among `stocks`."""

    def __init__(
        self, stocks: Sequence[GroupRows], *, num_slabs: int, num_null: int, evicted: Evicted
    ) -> None:
        self.stocks = tuple(stocks)
        self.num_slabs = num_slabs
        self.num_null = num_null
        self.owner = np.full(num_slabs, NOBODY, np.int64)
        self.last_owner = np.full(num_slabs, NOBODY, np.int64)
        self.held = np.zeros(num_slabs, np.int64)
        self.cached = np.zeros(num_slabs, np.int64)
        self.free = FreeSlabs(num_slabs, 1)
        self.free.put(np.arange(num_null, num_slabs), FREE)
        self.num_idle = num_slabs - num_null
        self._evicted = evicted
        self._clock = counter(1)

    # ── questions ─────────────────────────────────────────────────────────────────

    def needed(self, stock: GroupRows, rows: int) -> int:
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

    def num_available(self, stock: GroupRows) -> int:
        """Rows that the group could hold, if no other group wanted any."""
        return stock.spare + self.num_idle * stock.rows_per_slab

    # ── slabs change hands ────────────────────────────────────────────────────────

    def claim(self, stock: GroupRows, slabs: Where) -> None:
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

    def vacate(self, stock: GroupRows, slabs: Ints) -> None:
        """Evict what idle slabs of the group have cached; they are nobody's, and on no shelf."""
        rows = stock.cached_rows_of(slabs)
        self.evict(stock, rows)
        if stock.rows_per_slab > 1:
            stock.partial.move(slabs, np.zeros(len(slabs), np.int64))
            stock.idle.drop(slabs[stock.idle.place[slabs] >= 0])
        self.owner[slabs] = NOBODY

    def take_free(self, stock: GroupRows, slabs: Where) -> None:
        """Make slabs from the free shelf the group's own."""
        self.free.drop(slabs, FREE)
        self.claim(stock, slabs)

    # ── rows change state ─────────────────────────────────────────────────────────

    def occupy(self, stock: GroupRows, rows: Where, *, briefly: bool = False) -> None:
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

    def revive(self, stock: GroupRows, rows: Ints, where: Where) -> None:
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

    def vacated(self, stock: GroupRows, rows: Ints, where: Where) -> None:
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

    def evict(self, stock: GroupRows, rows: Ints) -> None:
        """Give up the content of cached rows. Their slabs stay the group's: the caller is
        about to use them, or calls `discarded` instead."""
        if not len(rows):
            return
        self._evicted(stock.group, rows)
        stock.queue.drop(rows)
        stock.kept[rows] = False
        stock.free[rows] = True
        np.subtract.at(self.cached, stock.slabs_of(rows), 1)

    def discarded(self, stock: GroupRows, rows: Ints) -> None:
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

    def _settle(
        self, stock: GroupRows, slabs: Ints, before: Ints, after: Ints, stamp: int = 0
    ) -> None:
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

    def _line_up(self, stock: GroupRows, slabs: Ints, idle: Bools, stamp: int) -> None:
        """Have exactly the idle ones of the slabs in the queue."""
        queued = stock.idle.place[slabs] >= 0
        if np.count_nonzero(leaves := queued & ~idle):
            stock.idle.drop(slabs[leaves])
        if np.count_nonzero(comes := idle & ~queued):
            stock.idle.put(slabs[comes], stamp or next(self._clock))


def _ascending(rows: Where) -> Where:
    return rows if isinstance(rows, slice) else np.sort(rows)


def broken_counts(slabs: Slabs) -> Iterator[str]:
    """Every number that does not add up, with both values."""
    held = np.zeros(slabs.num_slabs, np.int64)
    cached = np.zeros(slabs.num_slabs, np.int64)
    for stock in slabs.stocks:
        yield from _broken_rows(slabs, stock)
        of_rows = np.arange(stock.num_rows) // stock.rows_per_slab
        held += np.bincount(of_rows[stock.refs > 0], minlength=slabs.num_slabs)
        cached += np.bincount(of_rows[stock.queue.place >= 0], minlength=slabs.num_slabs)
    for what, counted, written in (("held", held, slabs.held), ("cached", cached, slabs.cached)):
        for slab in np.nonzero(counted != written)[0][:3]:
            yield f"slab {slab}: {counted[slab]} rows are {what}, {written[slab]} in the books"
    yield from _broken_slabs(slabs)


def _broken_rows(slabs: Slabs, stock: GroupRows) -> Iterator[str]:
    name = f"group {stock.name!r}"
    held, cached = stock.refs > 0, stock.queue.place >= 0
    sums = {
        "held": (int(held.sum()), stock.num_held),
        "cached": (int(cached.sum()), len(stock.queue)),
        "free + held + cached": (
            int(stock.free.sum() + held.sum() + cached.sum()),
            stock.num_rows,
        ),
        "negative holds": (int((stock.refs < 0).sum()), 0),
        "held null rows": (int((held | cached)[: stock.num_null].sum()), 0),
        "rows both held and cached": (int((held & cached).sum()), 0),
        "cached rows whose content is not kept": (int((cached & ~stock.kept).sum()), 0),
        "free rows whose content is kept": (int((stock.free & stock.kept).sum()), 0),
        "quarantined rows without a hold": (int((stock.quarantined & ~held).sum()), 0),
    }
    for what, (counted, written) in sums.items():
        if counted != written:
            yield f"{name}: {what}: {counted} counted, {written} expected"
    used = np.nonzero(held | cached)[0]
    foreign = used[slabs.owner[stock.slabs_of(used)] != stock.group]
    if len(foreign):
        slab = int(stock.slabs_of(foreign)[0])
        yield f"{name}: block {foreign[0]} is in use in slab {slab} of group {slabs.owner[slab]}"
    busy = (slabs.owner == stock.group) & (slabs.held > 0)
    spare = int((stock.rows_per_slab - slabs.held[busy]).sum())
    if spare != stock.spare:
        yield f"{name}: {spare} spare rows counted, {stock.spare} in the books"
    yield from _broken_shelves(slabs, stock)


def _broken_shelves(slabs: Slabs, stock: GroupRows) -> Iterator[str]:
    if stock.rows_per_slab == 1:
        return
    mine = slabs.owner == stock.group
    free = np.where(mine, stock.rows_per_slab - slabs.held - slabs.cached, 0)
    shelf = stock.partial.shelf[: slabs.num_slabs]
    expected = stock.shelves_of(np.arange(slabs.num_slabs), free)
    for slab in np.nonzero(shelf != expected)[0][:3]:
        yield (f"group {stock.name!r}: slab {slab} with {free[slab]} free rows is on shelf "
               f"{shelf[slab]}")  # fmt: skip
    idle = mine & (slabs.held == 0)
    queued = stock.idle.place >= 0
    for slab in np.nonzero(idle != queued)[0][:3]:
        yield f"group {stock.name!r}: slab {slab} is idle: {idle[slab]}, queued: {queued[slab]}"


def _broken_slabs(slabs: Slabs) -> Iterator[str]:
    vacant = (slabs.owner == NOBODY) & (np.arange(slabs.num_slabs) >= slabs.num_null)
    free = slabs.free.shelf[: slabs.num_slabs] == FREE
    for slab in np.nonzero(vacant != free)[0][:3]:
        yield f"slab {slab}: owner {slabs.owner[slab]}, on the free shelf: {free[slab]}"
    for slab in np.nonzero(~vacant & (slabs.held + slabs.cached == 0))[0][:3]:
        if slab >= slabs.num_null:
            yield f"slab {slab} of group {slabs.owner[slab]} is empty and not given up"
    num_idle = int(np.count_nonzero(slabs.held[slabs.num_null :] == 0))
    if num_idle != slabs.num_idle:
        yield f"{num_idle} idle slabs counted, {slabs.num_idle} in the books"
    if int(vacant.sum()) != slabs.free.totals[FREE]:
        yield f"{int(vacant.sum())} free slabs counted, {slabs.free.totals[FREE]} in the books"
