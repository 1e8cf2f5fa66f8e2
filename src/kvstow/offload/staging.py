"""Between an arena and rows as a tier keeps them: in place where they are the same bytes.

same rows, host arena    views of the arena itself, nothing is copied
same rows, CUDA arena    one batched copy to or from a pinned stage
other rows               the route's copies to or from a stage
"""

import numpy as np
import numpy.typing as npt
import torch

from kvstow.memory.arena import Arena
from kvstow.memory.copy import copy
from kvstow.offload.rows import RowMapping, matching_group, stacked, starts
from kvstow.offload.tier import Bytes
from kvstow.plan.layout import Layout
from kvstow.plan.view import Ints

STAGE_BYTES = 64 << 20


class RowStage:
    """Rows of one group of an arena, seen as rows of one group of a tier's layout."""

    def __init__(self, arena: Arena, group: int, layout: Layout) -> None:
        self._arena = arena
        self._group = group
        self.tier_group = matching_group(arena.layout, group, layout)
        self.num_rows = max(1, STAGE_BYTES // layout.row_bytes(self.tier_group))
        shape = stacked(layout, self.tier_group, self.num_rows)
        self._mapping = RowMapping(arena.layout, group, shape, 0)
        self._stage: Arena | None = None
        if not self._mapping.same or arena.device.type != "cpu":
            self._stage = Arena(shape, pinned=torch.cuda.is_available())

    def fetch(self, ids: Ints) -> list[Bytes]:
        """The bytes of at most `num_rows` rows; valid until the next call."""
        if self._stage is None:
            return views(self._arena, self._group, ids)
        staged = np.arange(1, len(ids) + 1)
        copy(self._arena, self._stage, self._mapping.out(ids, staged)).wait()
        return views(self._stage, 0, staged)

    def room(self, ids: Ints) -> list[Bytes]:
        """Memory for the bytes of at most `num_rows` rows, to be filled for `deliver`."""
        if self._stage is None:
            return views(self._arena, self._group, ids)
        return views(self._stage, 0, np.arange(1, len(ids) + 1))

    def deliver(self, ids: Ints, which: npt.NDArray[np.bool_]) -> None:
        """Bring those rows that were filled to their places."""
        if self._stage is not None and which.any():
            staged = np.flatnonzero(which) + 1
            copy(self._stage, self._arena, self._mapping.back(staged, ids[which])).wait()


def views(arena: Arena, group: int, ids: Ints) -> list[Bytes]:
    """The bytes of rows of a host arena, in place."""
    memory: Bytes = arena.bytes.numpy()
    nbytes = arena.layout.row_bytes(group)
    return [memory[at : at + nbytes] for at in starts(arena.layout, group, ids).tolist()]
