"""Slots in an order that changes: what eviction policies are made of."""

import numpy as np

from kvstow.offload.tier import Bools
from kvstow.plan.view import Ints


class EvictionQueue:
    """Slots in the order they were pushed; pushing one again moves it to the end.

    An entry counts only while its ticket is the slot's latest, so moving and removing leave
    stale entries behind. They are skipped when met, and swept when they are the majority.
    """

    def __init__(self, num_slots: int) -> None:
        self._ticket = np.zeros(num_slots, np.int64)  # 0: not in this queue
        self._slots = np.empty(64, np.int64)
        self._tickets = np.empty(64, np.int64)
        self._head = self._end = 0
        self._next = 1
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has(self, slots: Ints) -> Bools:
        return self._ticket[slots] > 0

    def push(self, slots: Ints) -> None:
        """Slots, each named once, go to the end in this order."""
        if self._end + len(slots) > len(self._slots):
            self._make_room(len(slots))
        tickets = np.arange(self._next, self._next + len(slots))
        self._next += len(slots)
        self._count += len(slots) - int(np.count_nonzero(self._ticket[slots]))
        self._ticket[slots] = tickets
        end = self._end + len(slots)
        self._slots[self._end : end] = slots
        self._tickets[self._end : end] = tickets
        self._end = end

    def drop(self, slots: Ints) -> None:
        """Slots, each named once, are out; those that were not in stay out."""
        self._count -= int(np.count_nonzero(self._ticket[slots]))
        self._ticket[slots] = 0

    def pop(self, count: int, pinned: Bools) -> Ints:
        """The first `count` slots that are not pinned, out of the queue."""
        found: list[Ints] = []
        kept: list[Ints] = []
        while count > 0 and self._head < self._end:
            stop = min(self._end, self._head + max(64, 2 * count))
            slots = self._slots[self._head : stop]
            live = self._ticket[slots] == self._tickets[self._head : stop]
            ready = np.flatnonzero(live & ~pinned[slots])[:count]
            used = int(ready[-1]) + 1 if len(ready) == count else len(slots)
            kept.append(slots[:used][(live & pinned[slots])[:used]].copy())
            found.append(slots[ready].copy())
            self._head += used
            count -= len(ready)
        taken = np.concatenate([np.empty(0, np.int64), *found])
        self.drop(taken)
        self._unpop(np.concatenate([np.empty(0, np.int64), *kept]))
        return taken

    def _unpop(self, slots: Ints) -> None:
        """Entries passed over stand at the head again: `pop` has left the space."""
        start = self._head - len(slots)
        self._slots[start : self._head] = slots
        self._tickets[start : self._head] = self._ticket[slots]
        self._head = start

    def _make_room(self, more: int) -> None:
        live = np.flatnonzero(
            self._ticket[self._slots[self._head : self._end]]
            == self._tickets[self._head : self._end]
        )
        size = max(64, 2 * (len(live) + more))
        slots, tickets = np.empty(size, np.int64), np.empty(size, np.int64)
        slots[: len(live)] = self._slots[self._head + live]
        tickets[: len(live)] = self._tickets[self._head + live]
        self._slots, self._tickets = slots, tickets
        self._head, self._end = 0, len(live)
