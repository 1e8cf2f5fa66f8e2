"""Which blocks of one side meet which blocks of the other.

Logical block `k` holds tokens `[k · block_tokens, (k + 1) · block_tokens)`; sizes differ:

    source        │ 0       │ 1       │ 2       │      16 tokens per block
    destination   │ 0             │ 1             │    24
    pairs           0·0        1·0  1·1    2·1
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstow.errors import BlockError, RouteError
from kvstow.plan.blocklist import Blocks, Ints
from kvstow.plan.group import Group
from kvstow.plan.lanes import Flags, Overlap
from kvstow.plan.layout import NULL_SLABS, Layout
from kvstow.plan.spec import Chunk, Encoder, Full, Sink, State, Window


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

    `follows[i]`: some other pair has the same block as pair `i` on one side and the next
    one on the other, or the next one on both. `precedes[i]`: the other way round.
    """

    source: Ints
    destination: Ints
    source_token: Ints
    destination_token: Ints
    tokens: Ints
    source_filled: Ints
    destination_filled: Ints
    follows: Flags
    precedes: Flags

    def __len__(self) -> int:
        return len(self.source)

    def kinds(self) -> Iterator[tuple[Overlap, Ints]]:
        """The pairs that overlap alike, and which they are."""
        columns = (self.source_token, self.destination_token, self.tokens,
                   self.source_filled, self.destination_filled)  # fmt: skip
        left = np.arange(len(self))
        while len(left):
            first = Overlap(*(int(column[left[0]]) for column in columns))
            alike = np.ones(len(left), np.bool_)
            for column, number in zip(columns, first, strict=True):
                alike &= column[left] == number
            yield first, left[alike]
            left = left[~alike]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listed:
    """One side's blocks of a request; nothing here is as long as the pool.

    `by_id` are places in the list, by ascending id; `after` and `before` are, place by
    place, the logical number of the block with the next or the previous id, or -1.
    """

    ids: Ints
    index: Ints
    span: int
    by_id: Ints
    after: Ints
    before: Ints

    def places(self, logical: Ints) -> tuple[Ints, Flags]:
        """Where each logical block is in the list, and whether it is."""
        if not len(self.index):
            return np.zeros(len(logical), np.int64), np.zeros(len(logical), np.bool_)
        last = len(self.index) - 1
        if self.index[last] - self.index[0] == last:
            at = logical - self.index[0]
            return np.clip(at, 0, last), (at >= 0) & (at <= last)
        at = np.minimum(np.searchsorted(self.index, logical), last)
        return at, self.index[at] == logical


def listed(layout: Layout, group: int, blocks: Blocks, side: str) -> Listed:
    """The blocks, once it is certain that they are blocks of the group.

    Refuses ids that are no blocks of the group, null rows, and ids named twice.
    """
    name = layout.groups[group].group.name
    first = layout.groups[group].rows_per_slab * NULL_SLABS
    end = layout.num_blocks(group)
    ids = blocks.ids
    if len(ids) and (int(ids.min()) < first or int(ids.max()) >= end):
        raise BlockError(
            f"{side} group {name!r}: blocks {_few(ids[(ids < first) | (ids >= end)])} are not "
            f"among its {end} blocks from {first} on"
        )
    by_id = np.argsort(ids)
    ascending = ids[by_id]
    twice = ascending[1:] == ascending[:-1]
    if twice.any():
        raise BlockError(
            f"{side} group {name!r}: blocks {_few(np.unique(ascending[1:][twice]))} are named twice"
        )
    next_to = ascending[1:] == ascending[:-1] + 1
    low, high = by_id[:-1][next_to], by_id[1:][next_to]
    after, before = np.full((2, len(ids)), -1, np.int64)
    after[low], before[high] = blocks.index[high], blocks.index[low]
    span = block_span(layout.groups[group].group)
    return Listed(ids=ids, index=blocks.index, span=span, by_id=by_id, after=after, before=before)


def pairs(
    source: Listed, destination: Listed, tokens: Tokens, *, exact: bool
) -> tuple[Pairs, Ints]:
    """Every pair of listed blocks with tokens in common; and `(destination logical block,
    first token, end token)` of those for which the source lists no block."""
    s_span, d_span = source.span, destination.span
    order = destination.by_id
    index = destination.index[order]
    lo = np.maximum(index * d_span, tokens.first)
    hi = np.minimum((index + 1) * d_span, tokens.end)
    wanted = lo < hi
    order, lo, hi = order[wanted], lo[wanted], hi[wanted]
    row, s_index = _meeting(lo, hi, s_span)
    at, found = source.places(s_index)
    d_index = index[wanted][row]
    begin = np.maximum(lo[row], s_index * s_span)
    end = np.minimum(hi[row], (s_index + 1) * s_span)
    missing = np.stack([d_index, begin, end])[:, ~found]
    if missing.size:
        row, at, s_index, d_index, begin, end = (
            column[found] for column in (row, at, s_index, d_index, begin, end)
        )
    to = order[row]
    room = (s_span, d_span) if exact else (tokens.end, tokens.end)
    beside = _beside(source, destination, tokens, (at, s_index), (to, d_index))
    return Pairs(
        source=source.ids[at],
        destination=destination.ids[to],
        source_token=begin - s_index * s_span,
        destination_token=begin - d_index * d_span,
        tokens=end - begin,
        source_filled=np.minimum(s_span, room[0] - s_index * (0 if exact else s_span)),
        destination_filled=np.minimum(d_span, room[1] - d_index * (0 if exact else d_span)),
        follows=beside[0],
        precedes=beside[1],
    ), missing


def _meeting(lo: Ints, hi: Ints, span: int) -> tuple[Ints, Ints]:
    """Pairs of an interval of tokens and a logical block of `span` tokens that meet."""
    first = lo // span
    counts = -(-hi // span) - first
    if (counts == 1).all():
        return np.arange(len(lo)), first
    row = np.repeat(np.arange(len(lo)), counts)
    step = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, first[row] + step


def _beside(
    source: Listed,
    destination: Listed,
    tokens: Tokens,
    here: tuple[Ints, Ints],
    there: tuple[Ints, Ints],
) -> tuple[Flags, Flags]:
    """For each pair (places and logical blocks of both sides), whether there is a pair one
    block further on one side or on both; and one block back."""
    found: list[Flags] = []
    for s_beside, d_beside in ((source.after, destination.after),
                               (source.before, destination.before)):  # fmt: skip
        s_next, d_next = s_beside[here[0]], d_beside[there[0]]
        s_listed, d_listed = s_next >= 0, d_next >= 0
        sides = ((s_next, s_listed, there[1], True), (here[1], True, d_next, d_listed),
                 (s_next, s_listed, d_next, d_listed))  # fmt: skip
        if source.span == destination.span:
            sides = sides[2:]
        near = np.zeros(len(here[0]), np.bool_)
        for s_index, s_there, d_index, d_there in sides:
            lo = np.maximum(s_index * source.span, d_index * destination.span)
            hi = np.minimum((s_index + 1) * source.span, (d_index + 1) * destination.span)
            common = np.maximum(lo, tokens.first) < np.minimum(hi, tokens.end)
            near |= common & s_there & d_there
        found.append(near)
    return found[0], found[1]


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
