"""Shelves: numbered items sorted by kind, found by kind in a few array operations.

    shelf   per item                │ 0 0 2 1 … │ 1 1 1 1 … │ 0 0 0 0 … │
    counts  per shelf and segment   │ 1: 17     │ 1: 1024   │ 1: 0      │

Nothing here is proportional to the number of items but the sum over segments, a
thousandth of it.
"""

import numpy as np

from kvstow.blocks.runs import Where, fewest_runs, span
from kvstow.plan.view import Ints

SEGMENT_BITS = 10
SEGMENT = 1 << SEGMENT_BITS
_NONE = np.zeros(0, np.int64)

FEW = 8
"""Items that are counted faster one by one."""


class Shelves:
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
            return _NONE
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
            return _NONE
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
