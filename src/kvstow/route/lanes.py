"""Lanes: the copies of one pair of blocks, as few as the two byte orders allow.

Where a source block and a destination block have tokens in common, every byte that both
hold goes from `source + source block · source_stride` to `destination + destination
block · destination_stride`. Two copies are one when they follow each other at the same
distance on both sides and everything between them is free on both sides:

    source        ┃ a a a ┊ · · ┊ b b b ┃        · free: padding, or an unfilled slot
    destination   ┃ a a a ┊ · · ┊ b b b ┃        one copy of eight bytes
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstow.plan.layout import Placement
from kvstow.plan.view import Ints
from kvstow.route.overlap import Part
from kvstow.route.territory import Flags, Pieces, Stride, Taken, Territory, spread


class Overlap(NamedTuple):
    """How two blocks overlap: where in each the common tokens start, and how many they are.

    Slots from `source_filled` and `destination_filled` on hold nothing yet.
    """

    source_token: int
    destination_token: int
    tokens: int
    source_filled: int
    destination_filled: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strand:
    """Layers that differ only in where their pages start, and what both sides hold of them."""

    source_offsets: Ints
    destination_offsets: Ints
    source: Placement
    destination: Placement
    parts: tuple[Part, ...]
    state_tokens: int

    def pieces(self, overlap: Overlap) -> Iterable[Pieces]:
        """The copies of one pair of blocks, in block 0 of either side."""
        first = overlap.source_token // self.state_tokens
        end = -(-(overlap.source_token + overlap.tokens) // self.state_tokens)
        source = self.source_offsets + first * self.source.token_stride
        there = overlap.destination_token // self.state_tokens
        destination = self.destination_offsets + there * self.destination.token_stride
        tokens = Stride(end - first, self.source.token_stride, self.destination.token_stride)
        for part in self.parts:
            content = Pieces(*np.array(part.content, np.int64).T)
            for s_head, d_head, num_heads in part.heads:
                heads = Stride(num_heads, self.source.head_stride, self.destination.head_stride)
                inner = spread(content, (tokens, heads))
                s_page = source + s_head * self.source.head_stride
                d_page = destination + d_head * self.destination.head_stride
                yield Pieces(
                    (s_page[:, None] + inner.source).ravel(),
                    (d_page[:, None] + inner.destination).ravel(),
                    np.tile(inner.nbytes, len(source)),
                )


class Room(NamedTuple):
    """Free bytes after and before each copy, on either side."""

    source_after: Ints
    destination_after: Ints
    source_before: Ints
    destination_before: Ints


class Edge(NamedTuple):
    """One end of each copy: how far free bytes reach on either side, and whether a copy of
    another pair of blocks might follow there.

    Free bytes reach to the end of the row, or to a byte of the same block that is not free;
    before a copy they count only if they reach to the start of the row. So two copies are one
    if the end of the first and the start of the second have the same places on both sides.
    """

    source: Ints
    destination: Ints
    open: Flags


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """The copies of one kind of block pair, by destination."""

    overlap: Overlap
    pieces: Pieces
    source_stride: Ints
    destination_stride: Ints
    start: Edge
    end: Edge

    def __len__(self) -> int:
        return len(self.pieces.nbytes)


def continued(pieces: Pieces, room: Room) -> Flags:
    """For each copy but the first, whether it can be one with the copy before it."""
    gap = pieces.source[1:] - pieces.source[:-1] - pieces.nbytes[:-1]
    other = pieces.destination[1:] - pieces.destination[:-1] - pieces.nbytes[:-1]
    source_room = room.source_after[:-1] + room.source_before[1:]
    destination_room = room.destination_after[:-1] + room.destination_before[1:]
    return (gap == other) & (gap >= 0) & (gap <= np.minimum(source_room, destination_room))


def merged(pieces: Pieces, continues: Flags) -> tuple[Pieces, Ints, Ints]:
    """Every chain of continued copies as one; and which copies begin and end the chains."""
    first = np.flatnonzero(np.append(True, ~continues))
    last = np.append(first[1:] - 1, len(pieces.nbytes) - 1)
    nbytes = pieces.source[last] + pieces.nbytes[last] - pieces.source[first]
    return Pieces(pieces.source[first], pieces.destination[first], nbytes), first, last


def lanes(
    strands: Sequence[Strand], source: Territory, destination: Territory, overlap: Overlap
) -> Lanes:
    """The fewest copies for one kind of block pair."""
    pieces, s_stride, d_stride = _abutting(strands, overlap)
    here = _around(source, pieces.source, pieces.nbytes, overlap.source_token,
                   overlap.tokens, overlap.source_filled)  # fmt: skip
    there = _around(destination, pieces.destination, pieces.nbytes, overlap.destination_token,
                    overlap.tokens, overlap.destination_filled)  # fmt: skip
    room = Room(here.after, there.after, here.before, there.before)
    same = (s_stride[1:] == s_stride[:-1]) & (d_stride[1:] == d_stride[:-1])
    whole, first, last = merged(pieces, continued(pieces, room) & same)
    starts = here.starts_open & there.starts_open & (here.starts_row | there.starts_row)
    ends = here.ends_open & there.ends_open & (here.ends_row | there.ends_row)
    return Lanes(
        overlap=overlap,
        pieces=whole,
        source_stride=s_stride[first],
        destination_stride=d_stride[first],
        start=Edge(here.start[first], there.start[first], starts[first]),
        end=Edge(here.end[last], there.end[last], ends[last]),
    )


class _Around(NamedTuple):
    """What lies around copies on one side: free bytes, then the row's end, a byte of this
    pair of blocks, or something else (open: of another pair, perhaps); and how far those
    reach, as an `Edge` has it."""

    after: Ints
    before: Ints
    end: Ints
    start: Ints
    ends_row: Flags
    starts_row: Flags
    ends_open: Flags
    starts_open: Flags


def _around(
    side: Territory, offsets: Ints, nbytes: Ints, token: int, tokens: int, filled: int
) -> _Around:
    taken = side.taken(0, filled)
    mine: Taken = side.taken(token, token + tokens)
    after, end, ends_row = side.room_after(taken, offsets + nbytes)
    before, start, starts_row = side.room_before(taken, offsets)
    return _Around(
        after=after,
        before=before,
        end=end,
        start=np.where(starts_row, start, offsets),
        ends_row=ends_row,
        starts_row=starts_row,
        ends_open=~mine.holds(end),
        starts_open=~mine.holds(start - 1),
    )


def _abutting(strands: Sequence[Strand], overlap: Overlap) -> tuple[Pieces, Ints, Ints]:
    """All copies by stride and destination, those without a gap between them made one."""
    found = [(piece, strand) for strand in strands for piece in strand.pieces(overlap)]
    counts = [len(piece.nbytes) for piece, _ in found]
    s_stride = np.repeat([strand.source.block_stride for _, strand in found], counts)
    d_stride = np.repeat([strand.destination.block_stride for _, strand in found], counts)
    source, destination, nbytes = map(
        np.concatenate, zip(*(piece for piece, _ in found), strict=True)
    )
    order = np.lexsort((destination, d_stride, s_stride))
    pieces = Pieces(source[order], destination[order], nbytes[order])
    s_stride, d_stride = s_stride[order], d_stride[order]
    none = np.zeros(len(order), np.int64)
    same = (s_stride[1:] == s_stride[:-1]) & (d_stride[1:] == d_stride[:-1])
    pieces, first, _ = merged(pieces, continued(pieces, Room(none, none, none, none)) & same)
    return pieces, s_stride[first], d_stride[first]
