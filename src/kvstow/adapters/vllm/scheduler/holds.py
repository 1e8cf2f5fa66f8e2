"""Blocks that the engine gives to nobody: one more reference in its pool keeps them.

Failed pulls that somebody may still write to. A prefill that hangs while it writes may go on at any
later time; its request is computed in other blocks.

    a rank tells of them     one more reference, before the engine lets go of its own: vLLM frees
                             the blocks of a load when it has taken in the same step's results
    a rank tells: quiet      one less; a block that no rank holds is the engine's again

They hold nothing that the engine's prefix cache could find: a load enters it when it succeeds.

Rows on their way to the tiers: held, in turn, within a bandwidth, never twice.

    added     the engine's block is held, so that nobody writes to it
    taken     one job per step for the workers, as much as the limits allow
    stored    every rank has ended the job: the block is the engine's alone again
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstow.adapters.vllm.counts import Count
from kvstow.adapters.vllm.protocol import Hold, KeyedBlocks, StepResults, StoreBlocks
from kvstow.adapters.vllm.scheduler.parts import EngineState

MAX_BYTES_UNDER_WAY = 4 << 30
"""Bytes of one rank that the workers may be given before they have told of earlier ones. They tell
once per step, and a step of 8,192 tokens of a model of 8 B fills 1 GiB."""


class HeldPulls:
    """What the ranks hold, each for itself."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self._holds: dict[Hold, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Pulls of ranks that are not quiet."""
        return len(self._holds)

    @property
    def num_blocks(self) -> int:
        """Blocks that some rank holds."""
        return len({block for blocks in self._holds.values() for block in blocks})

    def apply(self, results: StepResults) -> None:
        """Some ranks hold blocks from now on; others let go of theirs."""
        before = self.num_blocks
        self._hold(results.held)
        between = self.num_blocks
        self._release(results.released)
        for what, count in (
            (Count.HELD_BLOCKS, between - before),
            (Count.RELEASED_BLOCKS, between - self.num_blocks),
        ):
            if count:
                self._engine.counts[what] += count

    def _hold(self, held: Mapping[Hold, tuple[int, ...]]) -> None:
        for hold, blocks in held.items():
            assert hold not in self._holds, f"{hold} is held already"
            self._engine.blocks.hold(blocks)
            self._holds[hold] = blocks

    def _release(self, released: Sequence[Hold]) -> None:
        for hold in released:
            self._engine.blocks.release(self._holds.pop(hold))


@dataclass(frozen=True, slots=True)
class RowToStore:
    """A block of a request, and the key of what it holds."""

    request: str
    group: int
    key: bytes
    block: int


class StoreQueue:
    """Rows that wait to be stored, and those that are."""

    def __init__(self, engine: EngineState, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._row_bytes = [sum(each.page_bytes for each in group.layers) for group in engine.groups]
        self._rate = engine.options.store_bytes_per_second
        self._max_rows = max(1, engine.num_blocks // (8 if self._rate else 2))
        self._clock = clock
        self._credit = 0.0
        self._credited_at = clock()
        self._keys: set[tuple[int, bytes]] = set()
        self._waiting: deque[RowToStore] = deque()
        self._jobs: dict[int, list[RowToStore]] = {}
        self._ranks_left: dict[int, int] = {}
        self._bytes_under_way = 0
        self._number = 0

    def __len__(self) -> int:
        """Rows that wait or are under way; their blocks are held."""
        return len(self._keys)

    @property
    def is_full(self) -> bool:
        return len(self._keys) >= self._max_rows

    def contains(self, group: int, key: bytes) -> bool:
        return (group, key) in self._keys

    def add(self, row: RowToStore) -> None:
        """Hold the row's block; the row waits for its turn."""
        self._engine.blocks.hold([row.block])
        self._keys.add((row.group, row.key))
        self._waiting.append(row)

    def take(self) -> StoreBlocks | None:
        """The next job for the workers; None where there is nothing to do or no room for more."""
        self._earn()
        rows: list[RowToStore] = []
        while self._waiting and self._affordable(self._row_bytes[self._waiting[0].group]):
            row = self._waiting.popleft()
            rows.append(row)
            self._bytes_under_way += self._row_bytes[row.group]
            self._credit -= self._row_bytes[row.group]
        if not rows:
            return None
        self._number += 1
        self._jobs[self._number] = rows
        self._ranks_left[self._number] = self._engine.num_ranks
        return StoreBlocks(job=self._number, rows=_by_group(rows))

    def _earn(self) -> None:
        now = self._clock()
        earned = self._credit + self._rate * (now - self._credited_at)
        self._credit = min(float(self._rate), earned)  # no more than a second's worth
        self._credited_at = now

    def _affordable(self, nbytes: int) -> bool:
        if self._rate and self._credit <= 0:
            return False
        return not self._bytes_under_way or self._bytes_under_way + nbytes <= MAX_BYTES_UNDER_WAY

    def stored(self, job: int, ranks: int) -> None:
        """So many ranks more have ended a job."""
        self._ranks_left[job] -= ranks
        if self._ranks_left[job] > 0:
            return
        del self._ranks_left[job]
        rows = self._jobs.pop(job)
        self._bytes_under_way -= sum(self._row_bytes[row.group] for row in rows)
        self._let_go(rows)

    def give_up(self) -> list[RowToStore]:
        """Let go of all rows that wait. Those that the workers copy already stay held for a
        moment."""
        rows = list(self._waiting)
        self._waiting.clear()
        self._let_go(rows)
        return rows

    def give_up_free(self) -> list[RowToStore]:
        """Let go of rows that wait, and whose blocks the engine gets by it."""
        rows = [row for row in self._waiting if self._frees(row)]
        if rows:
            self._waiting = deque(row for row in self._waiting if not self._frees(row))
            self._let_go(rows)
        return rows

    @property
    def will_free(self) -> bool:
        """Whether the engine gets some block when the workers have told of what they copy."""
        return any(self._frees(row) for rows in self._jobs.values() for row in rows)

    def _frees(self, row: RowToStore) -> bool:
        """Whether no request has the row's block any more. A running one has all of its own."""
        return self._engine.blocks.is_last(row.block)

    def _let_go(self, rows: Sequence[RowToStore]) -> None:
        if not rows:
            return
        self._engine.blocks.release([row.block for row in rows])
        self._keys.difference_update((row.group, row.key) for row in rows)


def _by_group(rows: Sequence[RowToStore]) -> dict[int, KeyedBlocks]:
    by_group: dict[int, KeyedBlocks] = {}
    for group in sorted({row.group for row in rows}):
        own = [row for row in rows if row.group == group]
        by_group[group] = tuple(row.key for row in own), tuple(row.block for row in own)
    return by_group
