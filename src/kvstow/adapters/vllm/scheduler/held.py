"""Blocks of failed pulls that somebody may still write to: the engine gives them to nobody.

A prefill that hangs while it writes may go on at any later time. Its request is computed in other
blocks; those that it was to have are kept by one more reference in the engine's pool.

    a rank tells of them     one more reference, before the engine lets go of its own: vLLM frees
                             the blocks of a load when it has taken in the same step's results
    a rank tells: quiet      one less; a block that no rank holds is the engine's again

They hold nothing that the engine's prefix cache could find: a load enters it when it succeeds.
"""

from collections.abc import Mapping, Sequence

from kvstow.adapters.vllm.protocol import Hold
from kvstow.adapters.vllm.scheduler.stores import BlockHolds


class HeldBlocks:
    """What the ranks hold, each for itself. Without a `pool` nothing can be held."""

    def __init__(self) -> None:
        self.pool: BlockHolds | None = None
        self._holds: dict[Hold, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Pulls of ranks that are not quiet."""
        return len(self._holds)

    @property
    def num_blocks(self) -> int:
        """Blocks that some rank holds."""
        return len({block for blocks in self._holds.values() for block in blocks})

    def hold(self, held: Mapping[Hold, tuple[int, ...]]) -> int:
        """Keep these blocks; how many were not kept before."""
        before = self.num_blocks
        for hold, blocks in held.items():
            assert self.pool is not None, "a pull was held, and there is no pool"
            assert hold not in self._holds, f"{hold} is held already"
            self.pool.hold(blocks)
            self._holds[hold] = blocks
        return self.num_blocks - before

    def release(self, released: Sequence[Hold]) -> int:
        """Nobody writes to the blocks of these pulls any more; how many are the engine's again."""
        before = self.num_blocks
        for hold in released:
            assert self.pool is not None
            self.pool.release(self._holds.pop(hold))
        return before - self.num_blocks
