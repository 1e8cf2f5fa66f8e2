"""What a process knows of the ages of a store's rows: one eviction policy per group.

The index is the truth and is shared; the policies are this process's opinion. Uses go into the
index as sequence numbers, some at a time, and from there into the policies of all processes, oldest
first, when somebody has to go. A wrong opinion costs a hit, never a wrong row.
"""

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from kvstow.offload.index import SLOT_BITS, Index, Write
from kvstow.offload.policies import Policy, PolicyName, policy
from kvstow.offload.queue import Bools, Ints

FLUSH = 8192
"""Uses that a process keeps to itself before it writes them into the index."""

LESSON = 1 << 16
"""Rows that the policies learn of at a time: the oldest first, so the first lesson is enough
to know whom to give up, and nobody waits for a million."""


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
        self._used: dict[int, None] = {}

    def number(self, group: int, places: npt.ArrayLike) -> Ints:
        at = np.asarray(places, np.int64)
        return (at >> SLOT_BITS) * self._slots[group] + (at & ((1 << SLOT_BITS) - 1))

    def places(self, group: int, numbers: Ints) -> list[int]:
        segments, slots = np.divmod(numbers, self._slots[group])
        return (segments << SLOT_BITS | slots).tolist()

    def use(self, places: Ints) -> bool:
        """These rows were read; whether so many have gathered that a flush is due."""
        for at in places.tolist():
            self._used.pop(at, None)
            self._used[at] = None
        return len(self._used) >= FLUSH

    def flush(self, write: Write) -> None:
        """Write down what was used here, for all processes."""
        used, self._used = self._used, {}
        if used:
            write.use(used)

    def victims(
        self, write: Write, group: int, marks: Sequence[int], reading: Collection[int]
    ) -> list[int]:
        """Places of rows to give up for new ones with these marks, not those being read.

        Fewer than marks where no more are known; ask again until there are none.
        """
        self.flush(write)
        self._learn(group)
        pinned: Bools = np.zeros(len(self._generations[group]), bool)
        pinned[self.number(group, np.fromiter(reading, np.int64))] = True
        return self.places(group, self._policies[group].victims(marks, pinned))

    def forget(self, group: int, places: npt.ArrayLike) -> None:
        """These rows are gone."""
        self._policies[group].remove(self.number(group, places))

    def _learn(self, group: int) -> None:
        """Learn what came, and what was used, since the last time."""
        places, generations, marks, self._seen[group] = self._index.since(
            group, self._seen[group], LESSON
        )
        numbers = self.number(group, places)
        ours = numbers < len(self._generations[group])  # another process may have more room
        new = ours.copy()
        new[ours] = self._generations[group][numbers[ours]] != generations[ours]
        self._generations[group][numbers[new]] = generations[new]
        known = self._policies[group]
        known.remove(numbers[new])
        known.insert(numbers[new], [marks[i] for i in np.flatnonzero(new).tolist()])
        known.touch(numbers[ours & ~new])
        known.size = max(1, len(known))
