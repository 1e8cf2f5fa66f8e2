"""Lanes times block pairs: byte offsets, no Python object per move."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstow.plan.blocklist import Ints
from kvstow.plan.lanes import Flags, Lanes, Overlap, Room, continued, merged
from kvstow.plan.pairing import Pairs, next_to
from kvstow.plan.territory import Pieces


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Copies between two arenas: `nbytes[i]` from byte `source[i]` to byte `destination[i]`."""

    source: Ints
    destination: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


class _Lot(NamedTuple):
    """Pairs of one kind, cut into runs of neighbours, and where their moves go."""

    lanes: Lanes
    pairs: Ints
    first: Ints
    last: Ints


def expanded(pairs: Pairs, lanes_of: Callable[[Overlap], Lanes]) -> Pieces:
    """The moves of all pairs, by destination block, neighbours made one."""
    if not len(pairs):
        none = np.empty(0, np.int64)
        return Pieces(none, none, none)
    lots = [_lot(lanes_of(overlap), which, pairs) for overlap, which in pairs.kinds()]
    starts, total = _places(lots, len(pairs))
    moves = Pieces(*(np.empty(total, np.int64) for _ in range(3)))
    for lot in lots:
        _fill(moves, lot, pairs, starts)
    return _joined(moves, lots, pairs, starts)


def _lot(lanes: Lanes, which: Ints, pairs: Pairs) -> _Lot:
    """Runs of pairs whose blocks are neighbours on both sides."""
    neighbours = (np.diff(pairs.source[which]) == 1) & (np.diff(pairs.destination[which]) == 1)
    if not lanes.repeats.any():
        neighbours[:] = False
    first = np.flatnonzero(np.append(True, ~neighbours))
    last = np.append(first[1:] - 1, len(which) - 1)
    return _Lot(lanes, which, first, last)


def _places(lots: list[_Lot], num_pairs: int) -> tuple[Ints, int]:
    """Where each pair's moves start, and how many moves there are."""
    counts = np.zeros(num_pairs, np.int64)
    for lot in lots:
        counts[lot.pairs] = len(lot.lanes) - int(lot.lanes.repeats.sum())
        counts[lot.pairs[lot.first]] = len(lot.lanes)
    ends = np.cumsum(counts)
    return ends - counts, int(ends[-1])


def _fill(moves: Pieces, lot: _Lot, pairs: Pairs, starts: Ints) -> None:
    """Writes the moves of one lot to their places."""
    heads = lot.pairs[lot.first]
    lengths = (lot.last - lot.first)[:, None] * np.where(
        lot.lanes.repeats, lot.lanes.source_stride, 0
    )
    _write(moves, lot, pairs, heads, starts, np.arange(len(lot.lanes)), lengths)
    single = np.flatnonzero(~lot.lanes.repeats)
    rest = np.delete(lot.pairs, lot.first)
    if len(single) and len(rest):
        _write(moves, lot, pairs, rest, starts, single, np.zeros((1, 1), np.int64))


def _write(
    moves: Pieces, lot: _Lot, pairs: Pairs, rows: Ints, starts: Ints, which: Ints, more: Ints
) -> None:
    lanes = lot.lanes
    shape = (len(rows), len(which))
    if len(rows) * len(which) == len(moves.nbytes):
        place: slice | Ints = slice(None)
    else:
        place = (starts[rows][:, None] + np.arange(len(which))).ravel()
    s_stride, d_stride = lanes.source_stride[which], lanes.destination_stride[which]
    moves.source[place] = _affine(lanes.pieces.source[which], pairs.source[rows], s_stride)
    moves.destination[place] = _affine(
        lanes.pieces.destination[which], pairs.destination[rows], d_stride
    )
    moves.nbytes[place] = np.broadcast_to(lanes.pieces.nbytes[which] + more, shape).ravel()


def _affine(offsets: Ints, blocks: Ints, strides: Ints) -> Ints:
    """`offsets[j] + blocks[i] · strides[j]`, row by row."""
    if len(strides) and (strides == strides[0]).all():
        return np.add.outer(blocks * strides[0], offsets).ravel()
    return (blocks[:, None] * strides + offsets).ravel()


def _joined(moves: Pieces, lots: list[_Lot], pairs: Pairs, starts: Ints) -> Pieces:
    """The moves with those of different neighbouring pairs joined where they follow."""
    if not any(lot.lanes.starts_open.any() and lot.lanes.ends_open.any() for lot in lots):
        return moves
    follows, precedes = next_to(pairs)
    found = [part for lot in lots for part in _candidates(lot, starts, follows, precedes)]
    at, *rooms = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(moves.destination[at])
    at = at[order]
    room = Room(*(room[order] for room in rooms))
    chosen = Pieces(*(column[at] for column in moves))
    continues = continued(chosen, room)
    if not continues.any():
        return moves
    whole, first, _ = merged(chosen, continues)
    moves.nbytes[at[first]] = whole.nbytes
    keep = np.ones(len(moves.nbytes), np.bool_)
    keep[at[1:][continues]] = False
    return Pieces(*(column[keep] for column in moves))


def _candidates(lot: _Lot, starts: Ints, follows: Flags, precedes: Flags) -> list[tuple[Ints, ...]]:
    """Places of moves that might continue a neighbour's or be continued, with their room."""
    lanes = lot.lanes
    heads, tails = lot.pairs[lot.first], lot.pairs[lot.last]
    every = np.arange(len(lanes))
    single = np.flatnonzero(~lanes.repeats)
    rest = np.delete(lot.pairs, lot.first)
    found = [_open(lanes, starts, heads, (precedes[heads], follows[tails]), every)]
    if len(single) and len(rest):
        found.append(_open(lanes, starts, rest, (precedes[rest], follows[rest]), single))
    return found


def _open(
    lanes: Lanes, starts: Ints, rows: Ints, near: tuple[Flags, Flags], which: Ints
) -> tuple[Ints, ...]:
    before, after = near
    wanted = np.logical_and.outer(before, lanes.starts_open[which])
    wanted |= np.logical_and.outer(after, lanes.ends_open[which])
    row, lane = np.nonzero(wanted)
    return (starts[rows[row]] + lane, *(room[which[lane]] for room in lanes.room))
