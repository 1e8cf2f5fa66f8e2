"""Queue: numbered items in the order of their last use, without an object per item.

    items   7 2 9 2 5 · ·        a log; `place[2] = 3`, so the 2 at 1 is stale
            ↑         ↑
            head      tail

An item is taken out by forgetting its place; its entry goes stale and is skipped. The log
is closed up when it has run to its end, once per at least as many entries as there are
items.
"""

import numpy as np

from kvstow.blocks.runs import Where, num_at
from kvstow.plan.view import Ints

_NONE = np.zeros(0, np.int64)


class Queue:
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
            return _NONE, _NONE
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
