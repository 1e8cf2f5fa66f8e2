"""Which row goes first: LRU, S3-FIFO.

A policy knows rows by small whole numbers (the tier's slots) and, for the ghosts that S3-FIFO
keeps of rows long gone, by a 64-bit mark of the row's key. Its tier tells it what came
(`insert`), was used (`touch`) or went (`remove`), and asks whom to give up (`victims`).
All operations take arrays; each row costs O(1), amortised.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import Literal, Protocol, get_args

import numpy as np

from kvstow.errors import StoreError
from kvstow.offload.tier import Bools
from kvstow.plan.view import Ints

PolicyName = Literal["lru", "s3fifo"]


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

    def victims(self, marks: Iterable[int], pinned: Bools) -> Ints:
        """Rows to give up so that as many new ones, with these marks, can come.

        They are out of the policy when it returns. Fewer, where the rest is pinned.
        """
        ...

    def __len__(self) -> int:
        """Rows known."""
        ...


def policy(name: PolicyName, num_slots: int) -> Policy:
    """The policy of that name for a tier of `num_slots` slots."""
    match name:
        case "lru":
            return Lru(num_slots)
        case "s3fifo":
            return S3Fifo(num_slots)
        case _:
            known = ", ".join(get_args(PolicyName))
            raise StoreError(f"no eviction policy {name!r}\n\nhint: one of {known}")


class _Queue:
    """Slots in the order they were pushed; pushing one again moves it to the end."""

    def __init__(self) -> None:
        self._slots: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def has(self, slots: Ints) -> Bools:
        return np.fromiter(map(self._slots.__contains__, slots.tolist()), bool, len(slots))

    def push(self, slots: Ints) -> None:
        for slot in slots.tolist():
            self._slots[slot] = None
            self._slots.move_to_end(slot)

    def drop(self, slots: Ints) -> None:
        """Slots are out; those that were not in stay out."""
        for slot in slots.tolist():
            self._slots.pop(slot, None)

    def pop(self, count: int, pinned: Bools) -> Ints:
        """The first `count` slots that are not pinned, out of the queue."""
        free = (slot for slot in self._slots if not pinned[slot])
        taken = np.fromiter(islice(free, count), np.int64)
        self.drop(taken)
        return taken


class Lru:
    """The row that was not used for longest goes first."""

    def __init__(self, num_slots: int) -> None:
        self.size = num_slots
        self._queue = _Queue()

    def __len__(self) -> int:
        return len(self._queue)

    def insert(self, slots: Ints, marks: Iterable[int]) -> None:
        self._queue.push(slots)

    def touch(self, slots: Ints) -> None:
        self._queue.push(slots[self._queue.has(slots)])

    def remove(self, slots: Ints) -> None:
        self._queue.drop(slots)

    def victims(self, marks: Iterable[int], pinned: Bools) -> Ints:
        return self._queue.pop(sum(1 for _ in marks), pinned)


class _Ghosts:
    """Marks of rows long gone, oldest first."""

    def __init__(self) -> None:
        self._marks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, mark: int) -> bool:
        return mark in self._marks

    def add(self, mark: int) -> None:
        self._marks[mark] = None
        self._marks.move_to_end(mark)

    def discard(self, mark: int) -> None:
        self._marks.pop(mark, None)

    def shrink(self, count: int) -> None:
        """Forget the oldest until at most `count` are left."""
        while len(self._marks) > max(0, count):
            self._marks.popitem(last=False)


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
        self._small, self._main = _Queue(), _Queue()
        self._ghosts = _Ghosts()
        self._uses = np.zeros(num_slots, np.uint8)
        self._marks = np.zeros(num_slots, np.uint64)
        self._returning: set[int] = set()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def insert(self, slots: Ints, marks: Iterable[int]) -> None:
        known = list(marks)
        self._marks[slots] = np.array(known, np.uint64)
        self._uses[slots] = 0
        back = np.array([self._recall(m) for m in known], bool)
        self._small.push(slots[~back])
        self._main.push(slots[back])

    def touch(self, slots: Ints) -> None:
        used = slots[self._small.has(slots) | self._main.has(slots)]
        distinct, counts = np.unique(used, return_counts=True)
        self._uses[distinct] = np.minimum(self._uses[distinct] + counts, self.MOST)

    def remove(self, slots: Ints) -> None:
        self._small.drop(slots)
        self._main.drop(slots)

    def victims(self, marks: Iterable[int], pinned: Bools) -> Ints:
        taken: list[int] = []
        for mark in marks:
            if mark in self._ghosts:
                _remember(self._returning, mark, self.size)
            taken += self._evicted(pinned)
        return np.array(taken, np.int64)

    def _recall(self, mark: int) -> bool:
        back = mark in self._returning or mark in self._ghosts
        self._returning.discard(mark)
        self._ghosts.discard(mark)
        return back

    def _evicted(self, pinned: Bools) -> list[int]:
        slots: list[int] = []
        if len(self._small) >= self.SMALL * self.size:
            slots = self._from_small(pinned)
        return slots or self._from_main(pinned) or self._from_small(pinned)

    def _from_small(self, pinned: Bools) -> list[int]:
        while len(slots := self._small.pop(1, pinned)):
            if self._uses[slots[0]] < self.PROMOTED:
                self._ghosts.add(int(self._marks[slots[0]]))
                self._ghosts.shrink(round(self.size * (1 - self.SMALL)))
                return slots.tolist()
            self._main.push(slots)
        return []

    def _from_main(self, pinned: Bools) -> list[int]:
        while len(slots := self._main.pop(1, pinned)):
            if self._uses[slots[0]] == 0:
                return slots.tolist()
            self._uses[slots] -= 1
            self._main.push(slots)
        return []


def _remember(returning: set[int], mark: int, limit: int) -> None:
    """Remember a row that is about to come; all of them are forgotten when they are too many,
    since some that were announced to `victims` never come."""
    if len(returning) >= max(1, limit):
        returning.clear()
    returning.add(mark)
