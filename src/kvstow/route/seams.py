"""Which lanes of neighbouring pairs are one move.

A pair's neighbours have its block on one side and the next one on the other, or the next one
on both. Which lanes of a pair continue lanes of a neighbour depends on their kinds and on
these steps alone, so it is found once for all pairs of such kinds: a joint.

    kinds a, b; the next block on both sides      lanes of a    ┃ · ───── · ┃ · ─
                                                  lanes of b                ┃ ─── · ┃
                                                                  the first lane of b continues
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstow.plan.view import Ints
from kvstow.route.lanes import Edge, Flags, Lanes, Overlap

STEPS = ((0, 1), (1, 0), (1, 1))
"""What a neighbour's blocks are ahead by, in the source and in the destination."""


class Joint(NamedTuple):
    """Two kinds of pairs so many blocks apart on either side: which lanes of the one are
    continued, and which lanes of the other continue them."""

    kinds: tuple[int, int]
    before: Flags
    after: Flags


class Seams(NamedTuple):
    """All joints of some kinds. `table[code]` is 1 plus the number of a joint, or 0, where
    `code` counts steps (2 · source + destination), then the kind before, then the one after.
    Pairs that have one are not more than `reach` apart."""

    table: Ints
    joints: tuple[Joint, ...]
    reach: int


class _Edges(NamedTuple):
    """Open edges of lanes of several kinds, all that must be equal for two to be one."""

    kind: Ints
    lane: Ints
    source: Ints
    destination: Ints
    source_stride: Ints
    destination_stride: Ints
    distance: Ints


def seams(kinds: Sequence[Lanes], most: int) -> Seams:
    """The joints of some kinds of pairs; a destination block has at most `most` of these."""
    ends = _edges(kinds, [lanes.end for lanes in kinds])
    starts = _edges(kinds, [lanes.start for lanes in kinds])
    table = np.zeros(4 * len(kinds) * len(kinds), np.int64)
    joints: list[Joint] = []
    adjacent = True
    for s_step, d_step in STEPS:
        i, j = _equal(ends, starts, s_step, d_step)
        code = ((2 * s_step + d_step) * len(kinds) + ends.kind[i]) * len(kinds) + starts.kind[j]
        found: list[int] = np.unique(code).tolist()
        for number in found:
            mine = np.flatnonzero(code == number)
            which = divmod(number % len(kinds) ** 2, len(kinds))
            one, other = kinds[which[0]], kinds[which[1]]
            joints.append(Joint(
                kinds=which,
                before=_flags(len(one), ends.lane[i[mine]]),
                after=_flags(len(other), starts.lane[j[mine]]),
            ))  # fmt: skip
            table[number] = len(joints)
            adjacent = adjacent and _follow(one.overlap, other.overlap, d_step)
    return Seams(table, tuple(joints), min(len(joints), 1) if adjacent else 2 * most - 1)


def _edges(kinds: Sequence[Lanes], edges: Sequence[Edge]) -> _Edges:
    found = [
        _Edges(
            np.full(len(lane), k),
            lane,
            edge.source[lane],
            edge.destination[lane],
            lanes.source_stride[lane],
            lanes.destination_stride[lane],
            (lanes.pieces.destination - lanes.pieces.source)[lane],
        )
        for k, (lanes, edge) in enumerate(zip(kinds, edges, strict=True))
        for lane in (np.flatnonzero(edge.open),)
    ]
    return _Edges(*map(np.concatenate, zip(*found, strict=True)))


def _equal(ends: _Edges, starts: _Edges, s_step: int, d_step: int) -> tuple[Ints, Ints]:
    """Those of the ends and of the starts, so many blocks ahead, that are the same places."""
    source = starts.source + s_step * starts.source_stride
    destination = starts.destination + d_step * starts.destination_stride
    distance = starts.distance + d_step * starts.destination_stride
    distance -= s_step * starts.source_stride
    order = np.argsort(destination)
    first = np.searchsorted(destination[order], ends.destination, "left")
    count = np.searchsorted(destination[order], ends.destination, "right") - first
    i = np.arange(len(count)).repeat(count)
    j = order[(first + count - np.cumsum(count)).repeat(count) + np.arange(len(i))]
    same = (ends.source[i] == source[j]) & (ends.distance[i] == distance[j])
    same &= ends.source_stride[i] == starts.source_stride[j]
    same &= ends.destination_stride[i] == starts.destination_stride[j]
    return i[same], j[same]


def _follow(a: Overlap, b: Overlap, d_step: int) -> bool:
    """Whether there is nothing between a pair and its neighbour, in the order of pairs."""
    end = a.destination_token + a.tokens
    if d_step:
        return end == a.destination_filled and b.destination_token == 0
    return b.destination_token == end


def _flags(count: int, which: Ints) -> Flags:
    found = np.zeros(count, np.bool_)
    found[which] = True
    return found
