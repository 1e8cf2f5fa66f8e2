"""Lanes times block pairs: byte offsets, no Python object per move."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstow.plan.blocklist import Ints
from kvstow.plan.lanes import Flags, Lanes, Overlap, merged
from kvstow.plan.pairing import Pairs
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


class _Open(NamedTuple):
    """Moves that might be joined with a neighbour's: their places, by lane and pair, and
    which lane each is."""

    places: Ints
    lane: Ints
    lanes: Lanes


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
    heads, rest = lot.pairs[lot.first], np.delete(lot.pairs, lot.first)
    step = np.where(lot.lanes.repeats, lot.lanes.source_stride, 0)
    nbytes = lot.lanes.pieces.nbytes + (lot.last - lot.first)[:, None] * step
    _write(moves, lot.lanes, pairs, heads, starts, np.arange(len(lot.lanes)), nbytes)
    single = np.flatnonzero(~lot.lanes.repeats)
    if len(single) and len(rest):
        _write(moves, lot.lanes, pairs, rest, starts, single, lot.lanes.pieces.nbytes[single])


def _write(
    moves: Pieces, lanes: Lanes, pairs: Pairs, rows: Ints, starts: Ints, which: Ints, nbytes: Ints
) -> None:
    """Writes lanes `which` of pairs `rows`: in place where their moves follow each other."""
    shape = (len(rows), len(which))
    source = lanes.pieces.source[which], pairs.source[rows], lanes.source_stride[which]
    destination = (
        lanes.pieces.destination[which], pairs.destination[rows], lanes.destination_stride[which]
    )  # fmt: skip
    first = int(starts[rows[0]])
    if int(starts[rows[-1]]) - first == (len(rows) - 1) * len(which):
        s, d, n = (column[first : first + shape[0] * shape[1]].reshape(shape) for column in moves)
        _affine(*source, s)
        _affine(*destination, d)
        n[:] = nbytes
        return
    place = np.add.outer(starts[rows], np.arange(len(which)))
    buffer = np.empty(shape, np.int64)
    moves.source[place] = _affine(*source, buffer)
    moves.destination[place] = _affine(*destination, buffer)
    moves.nbytes[place] = nbytes


def _affine(offsets: Ints, blocks: Ints, strides: Ints, out: Ints) -> Ints:
    """`out[i, j] = offsets[j] + blocks[i] · strides[j]`."""
    if (strides == strides[0]).all():
        return np.add.outer(blocks * strides[0], offsets, out=out)
    np.multiply.outer(blocks, strides, out=out)
    return np.add(out, offsets, out=out)


def _joined(moves: Pieces, lots: list[_Lot], pairs: Pairs, starts: Ints) -> Pieces:
    """The moves with those of different neighbouring pairs joined where they follow."""
    found = [part for lot in lots for part in _candidates(lot, starts, pairs)]
    at = np.concatenate([part.places for part in found])
    if len(at) < 2:
        return moves
    # Each lot's places ascend almost everywhere: merging them beats sorting them.
    order = np.argsort(moves.destination[at], kind="stable")
    at = at[order]
    chosen = Pieces(*(column[at] for column in moves))
    step = chosen.source[1:] - chosen.source[:-1]
    likely = np.flatnonzero(
        (step == chosen.destination[1:] - chosen.destination[:-1]) & (step >= chosen.nbytes[:-1])
    )
    if not len(likely):
        return moves
    continues = np.zeros(len(step), np.bool_)
    continues[likely] = _fits(found, order, likely, step[likely] - chosen.nbytes[likely])
    whole, first, _ = merged(chosen, continues)
    moves.nbytes[at[first]] = whole.nbytes
    return _without(moves, np.sort(at[1:][continues]))


def _fits(found: list[_Open], order: Ints, which: Ints, gap: Ints) -> Flags:
    """Whether the gaps after some of the candidates are free on both sides."""
    ends = np.cumsum([len(part.places) for part in found])
    before, after = order[which], order[which + 1]

    def room(candidates: Ints, number: int) -> Ints:
        lot = np.searchsorted(ends, candidates, "right")
        free = np.empty(len(candidates), np.int64)
        for k, (places, lane, lanes) in enumerate(found):
            mine = np.flatnonzero(lot == k)
            inside = candidates[mine] - (ends[k] - len(places))
            free[mine] = lanes.room[number][lane[inside]]
        return free

    source_room = room(before, 0) + room(after, 2)
    destination_room = room(before, 1) + room(after, 3)
    return gap <= np.minimum(source_room, destination_room)


def _without(moves: Pieces, gone: Ints) -> Pieces:
    """The moves but for some, given in ascending order."""
    if len(gone) * 64 > len(moves.nbytes):
        keep = np.ones(len(moves.nbytes), np.bool_)
        keep[gone] = False
        return Pieces(*(column[keep] for column in moves))
    return Pieces(*(
        np.concatenate([part[1:] if i else part for i, part in enumerate(np.split(column, gone))])
        for column in moves
    ))  # fmt: skip


def _candidates(lot: _Lot, starts: Ints, pairs: Pairs) -> Iterator[_Open]:
    """Moves that might continue a neighbour's or be continued."""
    lanes = lot.lanes
    heads, tails = lot.pairs[lot.first], lot.pairs[lot.last]
    near = pairs.precedes[heads], pairs.follows[tails]
    yield _open(lanes, starts[heads], near, np.arange(len(lanes)))
    single = np.flatnonzero(~lanes.repeats)
    rest = np.delete(lot.pairs, lot.first)
    if len(single) and len(rest):
        yield _open(lanes, starts[rest], (pairs.precedes[rest], pairs.follows[rest]), single)


def _open(lanes: Lanes, starts: Ints, near: tuple[Flags, Flags], which: Ints) -> _Open:
    """Lanes `which` of pairs that are open towards a pair that is there."""
    place = np.flatnonzero(lanes.starts_open[which] | lanes.ends_open[which])
    beside = np.flatnonzero(near[0] | near[1])
    lane = which[place]
    wanted = np.logical_and.outer(lanes.starts_open[lane], near[0][beside])
    wanted |= np.logical_and.outer(lanes.ends_open[lane], near[1][beside])
    i, j = np.nonzero(wanted)
    return _Open(starts[beside[j]] + place[i], lane[i], lanes)
