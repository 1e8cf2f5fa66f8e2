"""What a process knows of the ages of a store's rows: one eviction policy per group.

The index is the truth and is shared; the policies are this process's opinion, brought up to date
from the index's sequence numbers when somebody has to go. A wrong opinion costs a hit, never a
wrong row.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from kvstow.offload.index import SLOT_BITS, Index, Write
from kvstow.offload.policies import Bools, Ints, Policy, PolicyName, policy

FLUSH = 1024
"""Uses that a process keeps to itself before it writes them into the index."""


class Ages:
    """Policies over the slots of every group; slot number = segment · slots + slot."""

    def __init__(
        self, index: Index, name: PolicyName, slots: Sequence[int], max_segments: int
    ) -> None:
        self._index = index
        self._slots = tuple(slots)
        self._policies: tuple[Policy, ...] = tuple(policy(name, n * max_segments) for n in slots)
        self._generations = tuple(np.zeros(n * max_segments, np.int64) for n in slots)
        self._seen = [0] * len(slots)
        self._untold: list[dict[int, int]] = [{} for _ in slots]
        """Uses that the policies have still to learn of: place and number, latest last."""
        self._used: dict[int, None] = {}
        self._told: set[int] = set()
        """Uses that will come back from the index although the policies know them."""

    def number(self, group: int, places: npt.ArrayLike) -> Ints:
        at = np.asarray(places, np.int64)
        return (at >> SLOT_BITS) * self._slots[group] + (at & ((1 << SLOT_BITS) - 1))

    def places(self, group: int, numbers: Ints) -> list[int]:
        segments, slots = np.divmod(numbers, self._slots[group])
        return (segments << SLOT_BITS | slots).tolist()

    def use(self, group: int, places: Ints) -> bool:
        """These rows were read; whether so many have gathered that a flush is due.

        The policies learn of it when they are asked next: they may not know the rows yet.
        """
        untold = self._untold[group]
        for at in places.tolist():
            untold[at] = untold.pop(at, 0) + 1
            self._used.pop(at, None)
            self._used[at] = None
        return len(self._used) >= FLUSH

    def flush(self, write: Write) -> None:
        """Let other processes know what was used here."""
        if self._used:
            write.use(self._used)
            self._told.update(self._used)
            self._used.clear()

    def victims(self, group: int, marks: Sequence[int], reading: Collection[int]) -> list[int]:
        """Places of rows to give up for new ones with these marks, not those being read."""
        self._catch_up(group)
        pinned: Bools = np.zeros(len(self._generations[group]), bool)
        pinned[self.number(group, np.fromiter(reading, np.int64))] = True
        return self.places(group, self._policies[group].victims(marks, pinned))

    def forget(self, group: int, places: npt.ArrayLike) -> None:
        """These rows are gone."""
        self._policies[group].remove(self.number(group, places))

    def _catch_up(self, group: int) -> None:
        """Learn what came, and what other processes used, since the last time."""
        places, generations, marks, seen = self._index.since(group, self._seen[group])
        self._seen[group] = seen
        numbers = self.number(group, places)
        ours = numbers < len(self._generations[group])  # another process may have more room
        places, generations, numbers = places[ours], generations[ours], numbers[ours]
        marks = [m for m, known in zip(marks, ours, strict=True) if known]
        new = self._generations[group][numbers] != generations
        self._generations[group][numbers] = generations
        self._policies[group].remove(numbers[new])
        self._policies[group].insert(
            numbers[new], [m for m, n in zip(marks, new, strict=True) if n]
        )
        told = np.isin(places, np.fromiter(self._told, np.int64))
        self._policies[group].touch(numbers[~new & ~told])
        self._told.difference_update(places[told].tolist())
        untold = self._untold[group]
        used = np.repeat(np.fromiter(untold, np.int64), np.fromiter(untold.values(), np.int64))
        self._policies[group].touch(self.number(group, used))
        untold.clear()
        self._policies[group].size = max(1, len(self._policies[group]))
