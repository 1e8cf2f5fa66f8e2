"""Which row goes first: LRU, S3-FIFO.

A policy knows rows by the tier's slots and, for the ghosts that S3-FIFO keeps of rows long gone, by
a 64-bit mark of the row's key. Its tier tells it what came (`insert`), was used (`touch`) or went
(`remove`), and asks whom to give up (`victims`). Each row costs O(1), amortised.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Literal, Protocol

import numpy as np

from kvstow.offload.tier import Bools
from kvstow.plan.view import Ints

PolicyName = Literal["lru", "s3fifo"]

Queue = OrderedDict[int, None]
"""Slots, or marks, in the order in which they were pushed."""


def mark(key: bytes) -> int:
    """64 bits of a key, by which ghosts are remembered."""
    return int.from_bytes(key[:8], "little")


class Policy(Protocol):
    """What a tier asks of an eviction policy."""

    size: int
    """Rows that the tier has room for now; it may change while slabs change hands."""

    def insert(self, slots: Ints, marks: Iterable[int]) -> None:
        """These slots hold new rows now."""
        ...

    def touch(self, slots: Ints) -> None:
        """These rows were used; slots that hold none are ignored."""
        ...

    def remove(self, slots: Ints) -> None:
        """These rows went for another reason than age; nothing remembers them."""
        ...

    def victims(self, count: int, pinned: Bools) -> Ints:
        """Rows to give up so that as many new ones can come; fewer, where the rest is pinned.

        They are out of the policy when it returns.
        """
        ...

    def __len__(self) -> int:
        """Rows known."""
        ...


def policy(name: PolicyName, num_slots: int) -> Policy:
    """The policy of that name for a tier of `num_slots` slots."""
    kinds: dict[PolicyName, type[Lru | S3Fifo]] = {"lru": Lru, "s3fifo": S3Fifo}
    return kinds[name](num_slots)


def _push(queue: Queue, slots: Ints) -> None:
    """Slots are the last of a queue, whether they were in it or not."""
    for slot in slots.tolist():
        queue[slot] = None
        queue.move_to_end(slot)


def _drop(queue: Queue, slots: Ints) -> None:
    """Slots are out of a queue; those that were not in it stay out."""
    for slot in slots.tolist():
        queue.pop(slot, None)


def _pop(queue: Queue, count: int, pinned: Bools) -> Ints:
    """The first `count` slots that are not pinned, out of the queue."""
    free = (slot for slot in queue if not pinned[slot])
    slots = np.fromiter(islice(free, count), np.int64)
    _drop(queue, slots)
    return slots


def _has(queue: Queue, slots: Ints) -> Bools:
    return np.fromiter(map(queue.__contains__, slots.tolist()), bool, len(slots))


class Lru:
    """The row that was not used for longest goes first."""

    def __init__(self, num_slots: int) -> None:
        self.size = num_slots
        self._queue: Queue = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def insert(self, slots: Ints, marks: Iterable[int]) -> None:
        _push(self._queue, slots)

    def touch(self, slots: Ints) -> None:
        _push(self._queue, slots[_has(self._queue, slots)])

    def remove(self, slots: Ints) -> None:
        _drop(self._queue, slots)

    def victims(self, count: int, pinned: Bools) -> Ints:
        return _pop(self._queue, count, pinned)


class S3Fifo:
    """Three first-in-first-out queues (Yang et al., SOSP 2023).

    New rows wait in a small queue (a tenth); those used at least twice there go on to the
    main queue, the others leave a ghost, and a ghost that returns goes straight to main.
    """

    SMALL = 0.1
    PROMOTED = 2
    MOST = 3

    def __init__(self, num_slots: int) -> None:
        self.size = num_slots
        self._small: Queue = OrderedDict()
        self._main: Queue = OrderedDict()
        self._ghosts: Queue = OrderedDict()
        """Marks of rows long gone."""
        self._uses = np.zeros(num_slots, np.uint8)
        self._marks = np.zeros(num_slots, np.uint64)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def insert(self, slots: Ints, marks: Iterable[int]) -> None:
        known = list(marks)
        self._marks[slots] = np.array(known, np.uint64)
        self._uses[slots] = 0
        is_back = np.array([mark in self._ghosts for mark in known], bool)
        for mark in known:
            self._ghosts.pop(mark, None)
        _push(self._small, slots[~is_back])
        _push(self._main, slots[is_back])

    def touch(self, slots: Ints) -> None:
        used = slots[_has(self._small, slots) | _has(self._main, slots)]
        distinct, counts = np.unique(used, return_counts=True)
        self._uses[distinct] = np.minimum(self._uses[distinct] + counts, self.MOST)

    def remove(self, slots: Ints) -> None:
        _drop(self._small, slots)
        _drop(self._main, slots)

    def victims(self, count: int, pinned: Bools) -> Ints:
        evicted = (slot for _ in range(count) for slot in self._evicted(pinned).tolist())
        return np.fromiter(evicted, np.int64)

    def _evicted(self, pinned: Bools) -> Ints:
        """One row, or none."""
        if len(self._small) >= self.SMALL * self.size:
            slot = self._from_small(pinned)
            if len(slot):
                return slot
        slot = self._from_main(pinned)
        return slot if len(slot) else self._from_small(pinned)

    def _from_small(self, pinned: Bools) -> Ints:
        while len(slot := _pop(self._small, 1, pinned)):
            if self._uses[slot[0]] < self.PROMOTED:
                self._ghosts[int(self._marks[slot[0]])] = None
                while len(self._ghosts) > max(0, round(self.size * (1 - self.SMALL))):
                    self._ghosts.popitem(last=False)
                return slot
            _push(self._main, slot)
        return slot

    def _from_main(self, pinned: Bools) -> Ints:
        while len(slot := _pop(self._main, 1, pinned)):
            if self._uses[slot[0]] == 0:
                return slot
            self._uses[slot] -= 1
            _push(self._main, slot)
        return slot
