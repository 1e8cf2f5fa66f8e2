"""States: the running row and the checkpoints that every request has in a recurrent group."""

import numpy as np

from kvstow.plan.group import Group
from kvstow.plan.retention import State
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks


class States:
    """Per request one running row, and up to `checkpoints` rows kept behind it.

    Checkpoint `k` is the state after `(k + 1) · block_tokens` tokens.
    """

    def __init__(self, group: Group) -> None:
        assert isinstance(group.retention, State)
        self.block_tokens = group.block_tokens
        self.checkpoints = group.retention.checkpoints
        self.running = np.zeros(0, np.int64)
        self._kept: list[list[tuple[int, int]]] = []

    def reserve(self, num_slots: int) -> None:
        """Make room for so many requests."""
        more = num_slots - len(self.running)
        self.running = np.concatenate((self.running, np.zeros(more, np.int64)))
        self._kept += [[] for _ in range(more)]

    def open(self, slot: int, row: int) -> None:
        self.running[slot] = row
        self._kept[slot] = []

    def fork(self, slot: int, twin: int, row: int) -> None:
        """Begin a request with another's checkpoints and a running row of its own."""
        self.running[twin] = row
        self._kept[twin] = list(self._kept[slot])

    def keep(self, slot: int, index: int, row: int) -> None:
        """Add a checkpoint, the newest one."""
        self._kept[slot].append((index, row))

    def outdated(self, slot: int) -> Ints:
        """Give up the oldest checkpoints, where there are more than are kept; their ids."""
        kept = self._kept[slot]
        spare = max(0, len(kept) - self.checkpoints)
        self._kept[slot] = kept[spare:]
        return np.array([row for _, row in kept[:spare]], np.int64)

    def kept(self, slot: int) -> Blocks:
        """The checkpoints, oldest first."""
        pairs = np.array(self._kept[slot], np.int64).reshape(-1, 2)
        return Blocks(pairs[:, 1].copy(), pairs[:, 0].copy())

    def all_ids(self, slot: int) -> Ints:
        """The running row and the checkpoints."""
        return np.concatenate((self.running[slot : slot + 1], self.kept(slot).ids))

    def blocks(self, slot: int) -> Blocks:
        return Blocks(self.running[slot : slot + 1].copy(), np.zeros(1, np.int64))
