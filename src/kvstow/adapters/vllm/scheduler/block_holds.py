"""Blocks of failed pulls that somebody may still write to: the engine gives them to nobody.

A prefill that hangs while it writes may go on at any later time. Its request is computed in other
blocks; those that it was to have are kept by one more reference in the engine's pool.

    a rank tells of them     one more reference, before the engine lets go of its own: vLLM frees
                             the blocks of a load when it has taken in the same step's results
    a rank tells: quiet      one less; a block that no rank holds is the engine's again

They hold nothing that the engine's prefix cache could find: a load enters it when it succeeds.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvstow.adapters.vllm.counts import EngineCounts
from kvstow.adapters.vllm.engine import BlockPool
from kvstow.adapters.vllm.protocol import Hold, RanksReport


class BlockHolds(Protocol):
    """What is asked of the engine's block pool."""

    def hold(self, blocks: Sequence[int]) -> None:
        """Nobody is given these blocks until they are released."""
        ...

    def release(self, blocks: Sequence[int]) -> None: ...

    def is_last(self, block: int) -> bool:
        """Whether a held block is free once it is released: nobody else has it."""
        ...


class PoolHolds:
    """vLLM's block pool: a block is held by one more reference."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def is_last(self, block: int) -> bool:
        return self._pool.blocks[block].ref_cnt == 1


class HeldPulls:
    """What the ranks hold, each for itself. Without a `pool` nothing can be held."""

    def __init__(self, counts: EngineCounts) -> None:
        self.pool: BlockHolds | None = None
        self._counts = counts
        self._holds: dict[Hold, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Pulls of ranks that are not quiet."""
        return len(self._holds)

    @property
    def num_blocks(self) -> int:
        """Blocks that some rank holds."""
        return len({block for blocks in self._holds.values() for block in blocks})

    def apply(self, report: RanksReport) -> None:
        """Some ranks hold blocks from now on; others let go of theirs."""
        before = self.num_blocks
        self._hold(report.held)
        between = self.num_blocks
        self._release(report.released)
        for what, count in (
            ("held blocks", between - before),
            ("released blocks", between - self.num_blocks),
        ):
            if count:
                self._counts[what] += count

    def _hold(self, held: Mapping[Hold, tuple[int, ...]]) -> None:
        for hold, blocks in held.items():
            assert self.pool is not None, "a pull was held, and there is no pool"
            assert hold not in self._holds, f"{hold} is held already"
            self.pool.hold(blocks)
            self._holds[hold] = blocks

    def _release(self, released: Sequence[Hold]) -> None:
        for hold in released:
            assert self.pool is not None
            self.pool.release(self._holds.pop(hold))
