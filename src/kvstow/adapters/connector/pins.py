"""Pins: the scheduler's side writes the generations, because it alone knows who holds a block.

A block's generation names one unbroken time in which some lease has kept it. It grows when the
last lease on the block is known to be over, before the engine may reuse the block. A worker
that has ended its lease already counts one further on its own, and is set back only by a new
lease within that same unbroken time: see `counters`.
"""

from collections.abc import Mapping

import numpy as np

from kvstow.errors import BlockError
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks


class Pins:
    """Generations and leases of every block of every group."""

    def __init__(self, num_groups: int, num_blocks: int) -> None:
        self._generations = np.ones((num_groups, num_blocks), np.int64)
        self._leases = np.zeros((num_groups, num_blocks), np.int64)

    def pin(self, blocks: Mapping[int, Blocks]) -> dict[int, Ints]:
        """Note a lease on these blocks; their generations under it."""
        for group, listed in blocks.items():
            self._leases[group][listed.ids] += 1
        return {group: self._generations[group][b.ids].copy() for group, b in blocks.items()}

    def unpin(self, blocks: Mapping[int, Blocks]) -> None:
        """A lease is over; blocks that no other lease keeps begin a new generation."""
        for group, listed in blocks.items():
            if (self._leases[group][listed.ids] < 1).any():
                raise BlockError(f"group {group}: some of blocks {listed.ids[:8].tolist()} "
                                 "are not pinned")  # fmt: skip
            self._leases[group][listed.ids] -= 1
            over = listed.ids[self._leases[group][listed.ids] == 0]
            self._generations[group][over] += 1

    @property
    def num_pinned(self) -> int:
        return int((self._leases > 0).sum())
