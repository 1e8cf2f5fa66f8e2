"""Which blocks of one side meet which blocks of the other.

Logical block `k` holds tokens `[k · block_tokens, (k + 1) · block_tokens)`; sizes differ:

    source        │ 0       │ 1       │ 2       │      16 tokens per block
    destination   │ 0             │ 1             │    24
    pairs           0·0        1·0  1·1    2·1
"""

from dataclasses import dataclass

import numpy as np

from kvstow.errors import BlockError, RouteError
from kvstow.plan.blocklist import Blocks, Ints
from kvstow.plan.group import Group
from kvstow.plan.lanes import Overlap
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.period import Kinds, Period, Side, period
from kvstow.plan.spec import Chunk, Encoder, Full, Sink, State, Window

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Pairs of blocks with common tokens, by destination id and slot.

    Pair `i` overlaps as `kinds[kind[i]]` says. A destination block has at most `most` pairs.
    """

    source: Ints
    destination: Ints
    kind: Kinds
    kinds: tuple[Overlap, ...]
    most: int

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listed:
    """One side's blocks of a request; nothing here is as long as the pool."""

    ids: Ints
    end_id: int
    index: Ints
    span: int

    @property
    def tokens(self) -> Tokens:
        """From the first token of the first block to the last of the last."""
        if not len(self.index):
            return Tokens(0, 0)
        return Tokens(int(self.index[0]) * self.span, (int(self.index[-1]) + 1) * self.span)

    def of(self, side: Side, numbers: range) -> tuple[Ints, Ints]:
        """The ids of the blocks of pairs; and those of the pairs, counted from 0, whose block
        is not listed."""
        if not len(self.index):
            return np.zeros(len(numbers), np.int64), np.arange(len(numbers))
        start, last = int(self.index[0]), int(self.index[-1])
        first, end = side.block(numbers[0]), side.block(numbers[-1]) + 1
        none = np.empty(0, np.int64)
        if start <= first and end <= last + 1 == start + len(self.index):
            near = self.ids[first - start : end - start]
            return (near, none) if len(near) == len(numbers) else (
                near[side.logical(numbers) - first], none)  # fmt: skip
        logical = side.logical(numbers)
        at = np.minimum(np.searchsorted(self.index, logical), len(self.index) - 1)
        return self.ids[at], np.flatnonzero(self.index[at] != logical)


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


def pairs(
    source: Listed, destination: Listed, tokens: Tokens, *, exact: bool
) -> tuple[Pairs, Ints]:
    """Every pair of listed blocks with tokens in common; and `(destination logical block,
    first token, end token)` of those for which the source lists no block."""
    cycle = period(source.span, destination.span)
    held = destination.tokens
    first, end = max(tokens.first, held.first), min(tokens.end, held.end)
    missing = np.empty((3, 0), np.int64)
    if first >= end:
        none = missing[0]
        return Pairs(source=none, destination=none, kind=none, kinds=(), most=0), missing
    numbers = range(cycle.number(first), cycle.number(end - 1) + 1)
    kinds, kind = cycle.kinds(numbers, (tokens.first, tokens.end), exact=exact)
    here, lacking = source.of(cycle.source, numbers)
    there, unasked = destination.of(cycle.destination, numbers)
    if len(lacking) or len(unasked):
        wanted = np.ones(len(numbers), np.bool_)
        wanted[unasked] = False
        missing = _stretches(cycle, numbers, lacking[wanted[lacking]], tokens)
        wanted[lacking] = False
        here, there, kind = here[wanted], there[wanted], kind[wanted]
    ids, order = by_number(there, destination.end_id)
    return Pairs(
        source=here[order],
        destination=ids,
        kind=kind[order] if len(kinds) > 1 else kind,
        kinds=kinds,
        most=cycle.most,
    ), missing


def _stretches(cycle: Period, numbers: range, which: Ints, tokens: Tokens) -> Ints:
    """Destination block, first and end token of some of the pairs."""
    s_span, d_span = cycle.source.span, cycle.destination.span
    s, d = (side.logical(numbers)[which] for side in (cycle.source, cycle.destination))
    first = np.maximum(np.maximum(s * s_span, d * d_span), tokens.first)
    end = np.minimum(np.minimum((s + 1) * s_span, (d + 1) * d_span), tokens.end)
    return np.stack([d, first, end])


def by_number(numbers: Ints, end: int) -> tuple[Ints, Ints]:
    """Numbers of `[0, end)` in ascending order, and the place of each; equal ones by place.

    Sorts number and place as one integer, where both fit: places sorted along with numbers
    take several times as long.
    """
    bits = len(numbers).bit_length()
    if end >> (63 - bits):
        order = np.argsort(numbers, kind="stable")
        return numbers[order], order
    both, order = numbers << bits, np.arange(len(numbers))
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
