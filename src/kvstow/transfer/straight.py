"""Straight routes: every pair of blocks is one copy, and block `k` goes to block `k`.

    source        row 7   row 2   row 3   row 9        ids of logical blocks 0, 1, 2, 3
    destination   row 4   row 5   row 6   row 1
    by row there  9 ▶ 1 │ 7 ▶ 4 │ 2, 3 ▶ 5, 6          neighbours on both sides are one

Packed rows of equal layouts are such a case, whatever the model. What is then left of a
route is one multiplication per block; anything else is asked of the route itself.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvstow.plan.view import Ints
from kvstow.route.blocks import Blocks
from kvstow.route.copies import Copies, joined, merged
from kvstow.route.lanes import Lanes, Overlap
from kvstow.route.pairing import Tokens
from kvstow.route.route import Crossing, Route

_ABOVE = 32
_BELOW = (1 << _ABOVE) - 1
_NEXT = (1 << _ABOVE) + 1


class Copy(NamedTuple):
    """The single copy of a pair of blocks 0."""

    source: int
    destination: int
    nbytes: int


class Straight(NamedTuple):
    """A crossing whose full blocks of `span` tokens are one copy each: `nbytes` from
    `source + id · nbytes` to `destination + id · nbytes`, row after row without a gap."""

    crossing: Crossing
    span: int
    copy: Copy


class Pairs(NamedTuple):
    """Ids on both sides, by logical block; of the last one, `tail` bytes are copied."""

    source: Ints
    destination: Ints
    tail: int


class Ways:
    """A route, and the short way to its moves wherever it has one."""

    def __init__(self, route: Route) -> None:
        self.route = route
        found = [_straight(crossing) for crossing in route.crossings]
        self._straight = [way for way in found if way is not None]
        self._is_straight = bool(found) and len(self._straight) == len(found)

    def spans(
        self,
        source: Mapping[int, Blocks],
        destination: Mapping[int, Blocks],
        tokens: tuple[int, int],
        bases: tuple[int, int],
    ) -> Copies:
        """The copies that bring tokens `[first, end)` across, as few as there can be.

        `Route.moves` with the two arenas' addresses added; local is the destination. Blocks
        must be ones of the layouts, each listed once. Raises RouteError.
        """
        if self._is_straight:
            pairs = [_paired(way, source, destination, tokens) for way in self._straight]
            runs = [
                _runs(way, pair, bases)
                for way, pair in zip(self._straight, pairs, strict=True)
                if pair is not None
            ]
            if len(runs) == len(pairs):
                return runs[0] if len(runs) == 1 else merged(joined(runs))
        moves = self.route.copies(source, destination, tokens[1], start_token=tokens[0])
        return merged(moves.moved(*bases))


def _straight(crossing: Crossing) -> Straight | None:
    span, other = crossing.spans
    if span != other:
        return None
    lanes = crossing.lanes(Overlap(0, 0, span, span, span))
    copy = _single(lanes)
    if copy is None or {int(lanes.source_stride[0]), int(lanes.destination_stride[0])} != {
        copy.nbytes
    }:
        return None
    return Straight(crossing, span, copy)


def _single(lanes: Lanes) -> Copy | None:
    """The copy of a pair that is only one."""
    return Copy(*(int(column[0]) for column in lanes.pieces)) if len(lanes) == 1 else None


def _paired(
    way: Straight,
    source: Mapping[int, Blocks],
    destination: Mapping[int, Blocks],
    tokens: tuple[int, int],
) -> Pairs | None:
    """All pairs of logical blocks; None where some are missing, or their tokens cut."""
    ours, theirs = source.get(way.crossing.groups[0]), destination.get(way.crossing.groups[1])
    if ours is None or theirs is None or not len(theirs) or not 0 <= tokens[0] <= tokens[1]:
        return None
    wanted = Tokens(*tokens).of(way.crossing.destination)
    span = way.span
    first = max(wanted.first // span, int(theirs.index[0]))
    end = min(-(-wanted.end // span), int(theirs.index[-1]) + 1)
    if wanted.first >= wanted.end or first >= end or wanted.first > first * span:
        return None
    filled = min(span, wanted.end - (end - 1) * span)
    last = way.copy
    if filled < span:
        last = _single(way.crossing.lanes(Overlap(0, 0, filled, filled, filled)))
    from_, to = _listed(ours, first, end), _listed(theirs, first, end)
    if from_ is None or to is None or last is None or last[:2] != way.copy[:2]:
        return None
    return Pairs(from_, to, last.nbytes)


def _listed(blocks: Blocks, first: int, end: int) -> Ints | None:
    """The ids of logical blocks `[first, end)`, if all of them are listed, and none is left
    out between any two."""
    index = blocks.index
    if not len(index):
        return None
    start, last = int(index[0]), int(index[-1])
    if not start <= first < end <= last + 1 == start + len(index):
        return None
    return blocks.ids[first - start : end - start]


def _runs(way: Straight, pairs: Pairs, bases: tuple[int, int]) -> Copies:
    """Pairs by destination, those that follow each other on both sides as one.

    A pair is one number, the destination's id above the source's: so they are sorted, and
    compared, together.
    """
    here, there, nbytes = way.copy
    both = pairs.destination << _ABOVE
    both += pairs.source
    last = both[-1]
    both.sort()
    ends = (both[1:] - both[:-1] != _NEXT).nonzero()[0]
    heads = np.zeros(len(ends) + 1, np.int64)
    np.add(ends, 1, heads[1:])
    counts = np.empty_like(heads)
    counts[:-1], counts[-1] = heads[1:], len(both)
    counts -= heads
    first, lengths = both.take(heads), counts * nbytes
    if pairs.tail != nbytes:
        lengths[first + (counts - 1) * _NEXT == last] -= nbytes - pairs.tail
    return Copies(
        (first & _BELOW) * nbytes + (here + bases[0]),
        (first >> _ABOVE) * nbytes + (there + bases[1]),
        lengths,
    )
