"""What a request asks for: tokens, and the blocks that either side lists for them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstow.errors import BlockError, RouteError
from kvstow.plan.group import Group
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.retention import Chunk, Encoder, Full, Sink, State, Window
from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks

Places = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Where in a list something is."""

FEW_IDS = 16
"""A list is short if there are more than so many blocks in the group for each of its ids."""


def block_span(group: Group) -> int:
    """Tokens per block; 1 for summaries, where block 0 is the running one."""
    return 1 if isinstance(group.retention, State) else group.block_tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens `[first, end)` of a request that are to be moved."""

    first: int
    end: int

    def of(self, group: Group) -> "Tokens":
        """The same in the terms of a group: a summary or an encoding is moved whole."""
        match group.retention:
            case State():
                return Tokens(0, min(1, self.end))
            case Encoder(tokens):
                return Tokens(0, tokens if self.end else 0)
            case Full() | Window() | Chunk() | Sink():
                return self

    def needed(self, group: Group) -> tuple["Tokens", ...]:
        """Those of the group's tokens that the next token will look at."""
        mine = self.of(group)
        match group.retention:
            case Full() | State() | Encoder():
                return (mine,)
            case Window(tokens):
                return (Tokens(max(mine.first, mine.end - tokens + 1), mine.end),)
            case Chunk(tokens):
                return (Tokens(max(mine.first, mine.end - mine.end % tokens), mine.end),)
            case Sink(sink_tokens, tokens):
                return (
                    Tokens(mine.first, min(sink_tokens, mine.end)),
                    Tokens(max(mine.first, mine.end - tokens + 1), mine.end),
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Listed:
    """One side's blocks of a request; nothing here is as long as the pool."""

    ids: Ints
    end_id: int
    index: Ints
    span: int

    @cached_property
    def tokens(self) -> Tokens:
        """From the first token of the first block to the last of the last."""
        if not len(self.index):
            return Tokens(0, 0)
        return Tokens(int(self.index[0]) * self.span, (int(self.index[-1]) + 1) * self.span)

    @cached_property
    def gapless(self) -> bool:
        """Whether every logical block from the first to the last is listed, and there is one."""
        return len(self.index) > 0 and self.index[-1] - self.index[0] == len(self.index) - 1

    def logical(self, places: Places) -> Ints:
        """The logical blocks at some places of the list."""
        return places + self.index[0] if self.gapless else self.index.take(places)

    def covers(self, first: int, last: int) -> bool:
        """Whether all logical blocks from the first to the last are listed."""
        return self.gapless and self.index[0] <= first and last <= self.index[-1]

    def of(self, logical: Ints) -> Ints:
        """The ids of logical blocks; of some that are not listed, any."""
        at = logical - self.index[0] if self.gapless else np.searchsorted(self.index, logical)
        return self.ids.take(at, mode="clip")

    def lacks(self, logical: Ints) -> Ints:
        """Which of the logical blocks, counted from 0, are not listed."""
        if not len(self.index):
            return np.arange(len(logical))
        at = np.searchsorted(self.index, logical)
        return np.flatnonzero(self.index.take(at, mode="clip") != logical)


def listed(layout: Layout, group: int, blocks: Blocks, side: str) -> Listed:
    """The blocks, once it is certain that they are blocks of the group.

    Refuses ids that are no blocks of the group, null rows, and ids named twice.
    """
    rows = layout.groups[group]
    first, end = rows.rows_per_slab * NULL_SLABS, layout.num_blocks(group)
    ids = blocks.ids
    if len(ids) and (int(ids.min()) < first or int(ids.max()) >= end):
        raise BlockError(
            f"{side} group {rows.group.name!r}: blocks {_few(ids[(ids < first) | (ids >= end)])} "
            f"are not among its {end} blocks from {first} on"
        )
    if not _differ(ids, end):
        numbers, counts = np.unique(ids, return_counts=True)
        raise BlockError(
            f"{side} group {rows.group.name!r}: blocks {_few(numbers[counts > 1])} are named twice"
        )
    return Listed(ids=ids, end_id=end, index=blocks.index, span=block_span(rows.group))


def _differ(ids: Ints, end: int) -> bool:
    """Whether no two ids of `[0, end)` are equal. A flag for every block of the group costs
    less than sorting unless the ids are few."""
    if end > FEW_IDS * len(ids):
        ascending = np.sort(ids)
        return not np.count_nonzero(ascending[1:] == ascending[:-1])
    seen = np.zeros(end, np.bool_)
    seen[ids] = True
    return np.count_nonzero(seen) == len(ids)


def ascending(ids: Ints, end: int) -> tuple[Ints, Places]:
    """Ids of `[0, end)`, of which no two are equal, in ascending order; and the place of each.

    A place for every block of the group costs less than sorting unless the ids are few. Few
    are sorted with their places as one integer, where both fit: places sorted along with
    numbers take several times as long.
    """
    if end <= FEW_IDS * len(ids):
        places = np.full(end, -1, np.int32)
        places[ids] = np.arange(len(ids), dtype=np.int32)
        there = places >= 0
        return np.flatnonzero(there), places[there]
    bits = len(ids).bit_length()
    if end >> (63 - bits):
        order = np.argsort(ids)
        return ids[order], order
    both, order = ids << bits, np.arange(len(ids))
    both |= order
    both.sort()
    np.bitwise_and(both, (1 << bits) - 1, out=order)
    both >>= bits
    return both, order


def check_covered(group: Group, missing: Ints, tokens: Tokens) -> None:
    """Refuses destination blocks that need tokens for which there is no source block."""
    bad: list[int] = []
    for needed in tokens.needed(group):
        bad += missing[0][(missing[1] < needed.end) & (missing[2] > needed.first)].tolist()
    if bad:
        few = _few(np.unique(np.array(bad, np.int64)))
        raise RouteError((
            f"group {group.name!r}: the destination wants logical blocks {few} "
            f"of tokens [{tokens.first}, {tokens.end}), and the source lists no block for them",
        ))  # fmt: skip


def _few(numbers: Ints) -> str:
    shown = ", ".join(map(str, numbers[:8].tolist()))
    return f"{shown} … ({len(numbers)} in all)" if len(numbers) > 8 else shown
